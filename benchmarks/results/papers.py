"""The pages of the five papers: every printed result beside ours, with a verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.results import plots
from benchmarks.results.report import COMMAND
from scripts.page_parts import enclose_part
from training_client.lab.cli.paper import Plan
from training_client.lab.papers.experiments import Experiment
from training_client.lab.papers.printed import (
    PAPERS,
    PrintedResult,
    list_experiments,
    list_printed_results,
    shorten_place,
)
from training_client.lab.papers.store import Store
from training_client.lab.papers.verdicts import NOTHING, OWN_DATA, SEEDS, Measure, Outcome, judge

TEMPLATES: Final = Path(__file__).parent
AUDIT_PAGE: Final = Path(__file__).parents[2] / "docs/audit.md"
TITLES: Final = {
    "000": "AdaDP",
    "001": "PIGDO",
    "002": "DP-SGD",
    "003": "A-DDP",
    "004": "AdaDPS",
}
ARTICLE: Final = "five-papers.md"
# the places with a plot of ours: the section of the experiments, and its columns
PLOTS: Final = {
    ("000", "Figure 2"): ("mnist/figure-2", ("σ = 8",)),
    ("000", "Figure 4"): ("mnist/figure-4", ("σ = 8",)),
    ("001", "Figure 3"): ("mnist-784/figure-3", ("σ = 4",)),
    ("001", "Figure 5"): ("mnist-784/figure-5", ("σ = 8",)),
    ("001", "Figure 9"): ("fashion-784/figure-9", ("σ = 8", "σ = 4", "σ = 2")),
    ("003", "Figure 1"): ("adult/main", ("ε = 0.5", "ε = 2")),
    ("004", "Table 6"): ("mnist-64/main", ("σ = 1",)),
}
_HEADINGS: Final = (
    "claim", "the paper", "ours, as in the paper", "ours, with a guarantee", "epochs", "seeds",
    "verdict",
)  # fmt: skip


def read_audit(page: Path = AUDIT_PAGE) -> dict[str, str]:
    """Return the verdict on each claim in the table of the audit page."""
    rows = [line.strip("| \n").split(" | ") for line in page.read_text().splitlines()]
    return {row[1]: row[4] for row in rows if len(row) == 6 and row[0] not in ("source", "---")}


def judge_all(store: Store, audit: Mapping[str, str]) -> list[Outcome]:
    """Return the outcome of every printed result."""
    return [judge(each, store, audit) for each in list_printed_results()]


def write_paper_pages(store: Store, folder: Path) -> None:
    """Write the index, a page for each paper, and the article on all of them."""
    folder.mkdir(exist_ok=True)
    for name, text in render_paper_pages(store, read_audit()):
        (folder / name).write_text(text)
    for paper, place in PLOTS:
        if drawn := _list_drawn(paper, place, store):
            file = folder.parent / "images" / _name_plot(paper, place)
            plots.draw(drawn, store, file, _list_printed_scores(paper, place))


def _list_drawn(paper: str, place: str, store: Store) -> list[Experiment]:
    """Return the experiments of a place's plot that were run."""
    section, columns = PLOTS.get((paper, place), ("", ()))
    return [
        each
        for each in list_experiments(paper, shorten_place(place))
        if each.name.startswith(f"{section}/") and each.column in columns and store.list_runs(each)
    ]


def _list_printed_scores(paper: str, place: str) -> dict[str, tuple[float, float | None]]:
    """Return the accuracies that a place prints, with its epochs, by our experiment's name."""
    return {
        each.private.experiments[0].name: (float(each.value), each.epochs)
        for each in list_printed_results()
        if (each.paper, each.place, each.unit) == (paper, place, "accuracy")
        and each.private is not None
        and each.private.kind == "score"
    }


def render_paper_pages(store: Store, audit: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the file name and the text of each page."""
    outcomes = judge_all(store, audit)
    for paper in PAPERS:
        own = [each for each in outcomes if each.printed.paper == paper]
        yield f"{paper}.md", _render_paper(paper, own, store)
    for name in ("index.md", ARTICLE):
        template = (TEMPLATES / f"papers_{name}").read_text()
        yield name, _fill(template, outcomes, store)


def _render_paper(paper: str, outcomes: Sequence[Outcome], store: Store) -> str:
    """Return the page of one paper."""
    introduction = [
        f"# papers/{paper}: {TITLES[paper]}",
        f"Every result that [papers/{paper}](../glossary.md#the-papers) prints, beside ours. "
        "[The index](index.md) explains the columns and the verdicts.",
    ]
    parts = [f"{_count_verdicts(outcomes)}. {describe_left(paper, store)}"]
    for place in dict.fromkeys(each.printed.place for each in outcomes):
        own = [each for each in outcomes if each.printed.place == place]
        parts += [f"## {place}", *_describe_command(paper, place, own)]
        parts += [*_describe_trivial_scores(own, store), _build_table(own)]
        if drawn := _list_drawn(paper, place, store):
            crosses = _list_printed_scores(paper, place).keys() & {each.name for each in drawn}
            text = f"{place}, ours{'; crosses are what the paper prints' if crosses else ''}"
            parts.append(f"![{text}](../images/{_name_plot(paper, place)})")
    results = enclose_part("results", COMMAND, "\n\n".join(parts))
    return "\n\n".join([*introduction, results]) + "\n"


def _name_plot(paper: str, place: str) -> str:
    """Return the file name of the plot of a place."""
    return f"training-paper-{paper}-{shorten_place(place)}.svg"


def _describe_command(paper: str, place: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Return a paragraph with the command that runs a place's experiments, if there are some."""
    kinds = {reference.kind for each in outcomes for reference in each.printed.references}
    if "audit" in kinds:
        return ["`accountant audit`; [the reasons](../audit.md)"]
    if not kinds:
        return []
    return [f"`accountant-train paper {paper} --only {shorten_place(place)}`"]


def _describe_trivial_scores(outcomes: Sequence[Outcome], store: Store) -> list[str]:
    """Return a paragraph with the scores of constant answers on the tasks, if known."""
    tasks = dict.fromkeys(
        experiment.task
        for each in outcomes
        if each.printed.unit not in ("seconds", "epsilon")
        for reference in each.printed.references
        for experiment in reference.experiments
    )
    known = {task: store.find_trivial_score(task) for task in tasks}
    shown = [f"{score:.3f} on {task}" for task, score in known.items() if score is not None]
    return [f"The best constant answer has {', '.join(shown)}."] if shown else []


def _build_table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table of printed results and ours."""
    lines = [f"| {' | '.join(_HEADINGS)} |", "|---" * len(_HEADINGS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(_list_cells(each))} |" for each in outcomes)])


def _list_cells(outcome: Outcome) -> Iterator[str]:
    """Yield the cells of a row."""
    printed = outcome.printed
    yield printed.claim
    yield f"{printed.value} {_UNITS.get(printed.unit, '')}".strip() if printed.value else NOTHING
    for found in (outcome.ours, outcome.private):
        yield NOTHING if found is None else found.text
    yield _format_epochs(printed, outcome.measures)
    yield NOTHING if not outcome.measures else str(min(each.seeds for each in outcome.measures))
    yield outcome.verdict + (f": {outcome.reason}" if outcome.reason else "")


_UNITS: Final = {
    "points": "points",
    "points, at most": "points",
    "percent": "%",
    "relative percent": "%",
    "relative percent, at most": "%",
}


def _format_epochs(printed: PrintedResult, measures: Sequence[Measure]) -> str:
    """Return the paper's epochs and ours as text."""
    theirs = NOTHING if printed.epochs is None else f"{printed.epochs:g}"
    if not measures:
        return theirs
    ours = dict.fromkeys(f"{each.epochs:.3g}" for each in measures)
    return f"{theirs}; ours {' and '.join(ours)}"


def _count_verdicts(outcomes: Sequence[Outcome]) -> str:
    """Return the number of printed results by verdict, as text."""
    counts = Counter(_name_verdict(each) for each in outcomes)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _name_verdict(outcome: Outcome) -> str:
    """Return a verdict without the place that it refers to, and without the names of data."""
    if outcome.reason.startswith(OWN_DATA):
        return "not run, needs your data"
    return "summary" if outcome.verdict.startswith("see ") else outcome.verdict


def describe_left(paper: str, store: Store) -> str:
    """Return the number of runs of a paper that are left, and their estimated time."""
    experiments = list_experiments(paper)
    if not experiments:
        return "There is nothing to train."
    plan = Plan(experiments, SEEDS, store, Path("data"))
    return f"{plan.describe_left()} (`accountant-train paper {paper}`)."


def _build_index_table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with the number of printed results of each paper by verdict."""
    names = list(dict.fromkeys(sorted(map(_name_verdict, outcomes))))
    lines = [f"| paper | results | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for paper in PAPERS:
        counts = Counter(_name_verdict(each) for each in outcomes if each.printed.paper == paper)
        cells = [str(counts[name] or NOTHING) for name in names]
        title = f"[papers/{paper}]({paper}.md): {TITLES[paper]}"
        lines.append(f"| {title} | {counts.total()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _build_left_table(store: Store) -> str:
    """Return a Markdown list of what is left of each paper."""
    return "\n".join(f"- papers/{paper}: {describe_left(paper, store)}" for paper in PAPERS)


def _fill(template: str, outcomes: Sequence[Outcome], store: Store) -> str:
    """Return a page with its placeholders replaced by figures.

    `{index}`, `{left}`, `{results}`, `{verdicts}` are tables, the number of printed results, and
    that by verdict; `{ours:PAPER PLACE: CLAIM}`, `private`, `printed` and `verdict` are cells of
    the row of the claim, or of the only one that begins so; `{count:VERDICT}` is a number of rows.
    """
    whole = {
        "index": enclose_part("index", COMMAND, _build_index_table(outcomes)),
        "left": enclose_part("left", COMMAND, _build_left_table(store)),
        "results": str(len(outcomes)),
        "verdicts": _count_verdicts(outcomes),
    }

    def render(found: re.Match[str]) -> str:
        """Return the text for one placeholder."""
        name, argument = found[1], found[2]
        if argument is None:
            return whole[name]
        if name == "count":
            return str(sum(_name_verdict(each) == argument for each in outcomes))
        row = _find_row(argument, outcomes)
        if name in ("printed", "verdict"):
            return row.printed.value if name == "printed" else row.verdict
        cell: Measure | None = getattr(row, name)
        return "not run" if cell is None else cell.text

    return re.sub(r"\{(\w+)(?:: ?([^{}]*))?\}", render, template)


def _find_row(argument: str, outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of `PAPER PLACE: CLAIM`, where the claim may be cut off."""
    names = [f"{e.printed.paper} {e.printed.place}: {e.printed.claim}" for e in outcomes]
    found = [each for each, name in zip(outcomes, names, strict=True) if name == argument] or [
        each for each, name in zip(outcomes, names, strict=True) if name.startswith(argument)
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} printed results begin with {argument!r}")
    return found[0]
