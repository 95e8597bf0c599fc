"""The page of results: the text of `page.md` with figures from the results file.

`{name:argument}` in the text is replaced by the result of the function in `FIGURES`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.results import plots
from benchmarks.results.certification import build_claimed_question
from scripts.page_parts import enclose_part
from training_client.lab.papers.accounting import find_certified_epsilon
from training_client.lab.papers.experiments import (
    EXPERIMENTS,
    PAPER_CLAIMS,
    TABLE_1,
    Experiment,
    PaperResult,
)
from training_client.lab.papers.store import Store
from training_client.lab.papers.tasks import TASKS
from training_client.lab.papers.verdicts import (
    describe_breakdown,
    find_welch_interval,
    list_final_scores,
)

TEMPLATE: Final = Path(__file__).with_name("page.md")
COMMAND: Final = "python benchmarks/training_results.py report"
NOTHING: Final = "–"
SEEDS: Final = 3  # a score of fewer runs is marked
_EXPERIMENTS: Final = {each.name: each for each in EXPERIMENTS}


def find_experiments(argument: str) -> list[Experiment]:
    """Return the experiments named by `task/section` or `task/section/column`."""
    task, section, *column = argument.split("/")
    return [
        each
        for each in EXPERIMENTS
        if (each.task, each.section) == (task, section) and each.column in (column or [each.column])
    ]


def format_mean(name: str, store: Store) -> str:
    """Return a named experiment's mean final score as text."""
    found = list_final_scores(_EXPERIMENTS[name], store)
    return f"{statistics.mean(found):.3f}" if found else NOTHING


def _format_score(experiment: Experiment, store: Store) -> str:
    """Return mean ± standard deviation over the seeds, with the number of failed runs."""
    found, runs = list_final_scores(experiment, store), store.list_runs(experiment)
    if not runs:
        return NOTHING
    if not found:
        return "broke down"
    spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
    if len(runs) < SEEDS:
        spread += f" ({len(runs)} of {SEEDS} seeds)"
    broken = f", {len(runs) - len(found)} broke down" if len(found) < len(runs) else ""
    return f"{statistics.mean(found):.3f}{spread}{broken}"


def format_score(name: str, store: Store) -> str:
    """Return the mean ± standard deviation of a named experiment's final scores."""
    return _format_score(_EXPERIMENTS[name], store)


def _list_scores_of_pair(names: str, store: Store) -> list[list[float]]:
    """Return the final scores of the two experiments named in `first over second`.

    An experiment of which a run broke down has none: its mean would be of the others.
    """
    pair = [_EXPERIMENTS[name] for name in names.split(" over ")]
    return [[] if describe_breakdown(e, store) else list_final_scores(e, store) for e in pair]


def _format_points(difference: float) -> str:
    """Format a difference of scores in hundredths, with its sign."""
    return f"{round(100 * difference, 1) or 0.0:+.1f}".replace("-", "−")


def _format_interval_end(difference: float) -> str:
    """Format an end of an interval of differences; one digit, not 0.0, if it is close to 0."""
    text = _format_points(difference)
    if difference == 0 or text != "+0.0":
        return text
    return f"{100 * difference:+.1g}".replace("-", "−")


def format_lead(names: str, store: Store) -> str:
    """Return the difference of two experiments' mean scores, in hundredths, as text."""
    first, second = _list_scores_of_pair(names, store)
    if not (first and second):
        return NOTHING
    return _format_points(statistics.mean(first) - statistics.mean(second))


def format_verdict(names: str, store: Store) -> str:
    """Return the 95 % confidence interval of a mean difference (Welch), and if it excludes 0."""
    first, second = _list_scores_of_pair(names, store)
    if min(len(first), len(second)) < 2:
        return NOTHING
    low, high = find_welch_interval(first, second)
    decided = "significant" if low > 0 or high < 0 else "not significant"
    ends = f"{_format_interval_end(low)} to {_format_interval_end(high)}"
    return f"95 % interval {ends}: {decided}"


SETTINGS: Final = {  # for MNIST at σ = 8: the pattern of the experiments' names
    "η chosen at σ = 4, constant": "mnist/main/{}/8",
    "η chosen at σ = 8, constant": "mnist-8/main/{}/8",
    "η chosen at σ = 8, schedule": "mnist-8/main/{}, schedule/8",
}


def build_settings_table(_: str, store: Store) -> str:
    """Return a Markdown table of scores by method and by choice of the learning rate."""
    return _build_table_by_setting(lambda name, label: format_score(name.format(label), store))


def build_leads_table(_: str, store: Store) -> str:
    """Return a Markdown table of leads over DP-SGD, by method and choice of learning rate."""

    def format_cell(name: str, label: str) -> str:
        """Return the lead of a method with one choice of learning rate over DP-SGD."""
        pair = f"{name.format(label)} over {name.format('dp_sgd')}"
        return f"{format_lead(pair, store)} ({format_verdict(pair, store)})"

    return _build_table_by_setting(format_cell, without="dp_sgd")


def _build_table_by_setting(format_cell: Callable[[str, str], str], without: str = "") -> str:
    """Return a Markdown table: methods as rows, choices of the learning rate as columns."""
    lines = [f"| method | {' | '.join(SETTINGS)} |", "|---" * (len(SETTINGS) + 1) + "|"]
    constant = [
        each.method for each in find_experiments("mnist-8/main") if each.method.schedule is None
    ]
    for label in (method.label for method in constant if method.label != without):
        cells = [format_cell(name, label) for name in SETTINGS.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_state_range(argument: str, store: Store) -> str:
    """Return the range of a statistic of the optimizer state over an experiment's runs."""
    fact, name = argument.split(" of ")
    values = [run[fact] for run in store.list_runs(_EXPERIMENTS[name]) if fact in run]
    if None in values:
        return "beyond every number"
    if not values:
        return NOTHING
    shown = [
        f"{each}" if isinstance(each, int) else f"{each:.2g}" for each in (min(values), max(values))
    ]
    return " to ".join(dict.fromkeys(shown))


def format_paper_result(paper: PaperResult) -> str:
    """Return a paper's reported number with its source, as text."""
    if paper.value is None:
        return paper.source
    remark = f"; {paper.remark}" if paper.remark else ""
    return f"**{paper.value:g}** ({paper.source}{remark})"


def build_results_table(argument: str, store: Store) -> str:
    """Return a Markdown table with a row for each experiment of a section, best first."""
    experiments = find_experiments(argument)
    unit, higher = TASKS[experiments[0].task].unit, TASKS[experiments[0].task].higher_is_better

    def rank(each: Experiment) -> float:
        """Return an experiment's sort key: lower is better."""
        found = list_final_scores(each, store)
        value = statistics.mean(found) if found else float("-inf" if higher else "inf")
        return -value if higher else value

    lines = [f"| method | {unit} | ε | η | the paper |", "|---|---|---|---|---|"]
    lines += [_build_result_row(each, store) for each in sorted(experiments, key=rank)]
    return "\n".join(lines)


def _build_result_row(experiment: Experiment, store: Store) -> str:
    """Return an experiment's Markdown row of a results table."""
    method = experiment.method
    found = find_certified_epsilon(experiment, experiment.steps, store)
    guarantee = f"{found:.3g}" if found is not None else NOTHING
    if not method.has_guarantee:
        guarantee = "no guarantee"
    rate = store.find_best_rate(experiment.task, method.label)
    shown = NOTHING if rate is None else f"{rate:g}"
    cells = (
        method.label,
        _format_score(experiment, store),
        guarantee,
        shown,
        format_paper_result(experiment.paper_result),
    )
    return f"| {' | '.join(cells)} |"


def build_rates_table(_: str, store: Store) -> str:
    """Return a Markdown table of each method's scores by learning rate tried, best in bold."""
    lines = ["| task | method | η: score |", "|---|---|---|"]
    for task, label in dict.fromkeys((each.task, each.method.label) for each in EXPERIMENTS):
        if TASKS[task].tuned_on:
            continue
        chosen = store.find_best_rate(task, label)
        tried = sorted(store.list_tuning_scores(task, label).items())
        cells = [_format_tried_rate(rate, found, chosen) for rate, found in tried]
        lines.append(f"| {task} | {label} | {', '.join(cells) or NOTHING} |")
    return "\n".join(lines)


def _format_tried_rate(rate: float, found: float | None, chosen: float | None) -> str:
    """Return a tried learning rate with its score as text, in bold if it was chosen."""
    text = f"{rate:g}: {'broke down' if found is None else f'{found:.3f}'}"
    return f"**{text}**" if rate == chosen else text


def build_table_1(_: str, store: Store) -> str:
    """Return a Markdown table of the ε needed for each accuracy, beside papers/000 Table I."""
    methods = {each.method.label: each for each in find_experiments("mnist/table-1")}
    lines = [
        "| accuracy | dp_sgd: paper | ours | AdaDP: paper | adadp raw |",
        "|" + "---|" * 5,
    ]
    for level, (plain, adaptive) in TABLE_1.items():
        found = {
            label: _format_cost_of_accuracy(each, level, store) for label, each in methods.items()
        }
        cells = (f"{plain:.2f}", found["dp_sgd"], f"{adaptive:.2f}", found["adadp raw"])
        lines.append(f"| {level:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_cost_of_accuracy(experiment: Experiment, level: float, store: Store) -> str:
    """Return the ε at which an experiment's mean score first reaches `level`, as text."""
    if broken := describe_breakdown(experiment, store):
        return broken
    found = plots.compute_mean_curve(experiment, store)
    if found is None:
        return NOTHING
    points = zip(found.steps, found.means, strict=True)
    step = next((step for step, reached in points if reached >= level), None)
    if step is None:
        return "not reached"
    spent, epochs = (
        find_certified_epsilon(experiment, step, store),
        step * TASKS[experiment.task].sample_rate,
    )
    cost = f"{spent:.2f}" if spent is not None else "no guarantee"
    return f"{cost} ({epochs:g} epochs)"


def build_claims_table(_: str, store: Store) -> str:
    """Return a Markdown table of papers/001 §5.2's claimed ε and the certified ε."""
    lines = ["| σ | epochs | ε: papers/001 | certified |", "|---|---|---|---|"]
    for noise, epochs, said in PAPER_CLAIMS:
        known = store.get({"kind": "epsilon", **build_claimed_question(noise, epochs)})
        cost = NOTHING if known is None else f"{known['epsilon']:.3g}"
        lines.append(f"| {noise:g} | {epochs} | {said} | {cost} |")
    return "\n".join(lines)


FIGURES: Final[dict[str, Callable[[str, Store], str]]] = {
    "claims": build_claims_table,
    "inside": format_state_range,
    "lead": format_lead,
    "leads": build_leads_table,
    "mean": format_mean,
    "rates": build_rates_table,
    "score": format_score,
    "settings": build_settings_table,
    "table": build_results_table,
    "table_1": build_table_1,
    "verdict": format_verdict,
}


def render_page(store: Store, template: str) -> str:
    """Return the page template with its placeholders replaced by figures."""

    def render_figure(found: re.Match[str]) -> str:
        """Return the text for one placeholder of the template."""
        text = FIGURES[found[1]](found[2], store)
        return enclose_part(found[1], COMMAND, text) if text.startswith("|") else text

    return re.sub(r"\{(\w+):([^{}]*)\}", render_figure, template)


PLOTS: Final = (
    "mnist",
    "mnist/long",
    "fashion-mnist",
    "box",
    "adult",
    "newsgroups",
    "autoencoder",
)


def write_page(store: Store, file: Path) -> None:
    """Write the page, and its plots into `images` beside it."""
    images = file.parent / "images"
    images.mkdir(exist_ok=True)
    file.write_text(render_page(store, TEMPLATE.read_text()))
    for name in PLOTS:
        task, _, section = name.partition("/")
        plot = images / f"training-{name.replace('/', '-')}.svg"
        plots.draw(find_experiments(f"{task}/{section or 'main'}"), store, plot)
