"""The page: hand-written text in `page.md`, every figure in it out of the results file.

`{name:argument}` in the text is replaced by what the function of that name below says.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Final

from scipy.stats import ttest_ind

from benchmarks.results import plots
from benchmarks.results.accounting import claimed, epsilon
from benchmarks.results.experiments import CLAIMED, EXPERIMENTS, TABLE_1, Experiment, Printed
from benchmarks.results.store import Store
from benchmarks.results.tasks import TASKS

TEMPLATE: Final = Path(__file__).with_name("page.md")
NOTHING: Final = "–"
SEEDS: Final = 3  # fewer are pointed out
_BY_NAME: Final = {each.name: each for each in EXPERIMENTS}


def of_part(argument: str) -> list[Experiment]:
    """The experiments of `task/part`, or of `task/part/column`."""
    task, part, *column = argument.split("/")
    return [
        each
        for each in EXPERIMENTS
        if (each.task, each.part) == (task, part) and each.column in (column or [each.column])
    ]


def finals(experiment: Experiment, store: Store) -> list[float]:
    """Scores at the end of the runs that did not break down."""
    return [run["score"] for run in store.runs(experiment) if run["score"] is not None]


def mean(name: str, store: Store) -> str:
    """The mean over the seeds alone."""
    found = finals(_BY_NAME[name], store)
    return f"{statistics.mean(found):.3f}" if found else NOTHING


def _score(experiment: Experiment, store: Store) -> str:
    """Mean ± deviation over the seeds; how many runs broke down, or are missing, if any."""
    found, runs = finals(experiment, store), store.runs(experiment)
    if not runs:
        return NOTHING
    if not found:
        return "broke down"
    spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
    if len(runs) < SEEDS:
        spread += f" ({len(runs)} of {SEEDS} seeds)"
    broken = f", {len(runs) - len(found)} broke down" if len(found) < len(runs) else ""
    return f"{statistics.mean(found):.3f}{spread}{broken}"


def score(name: str, store: Store) -> str:
    """The mean over the seeds ± their deviation."""
    return _score(_BY_NAME[name], store)


def _pair(names: str, store: Store) -> list[list[float]]:
    """The final scores of the two experiments of `first over second`."""
    return [finals(_BY_NAME[name], store) for name in names.split(" over ")]


def _points(difference: float) -> str:
    """A difference between scores in hundredths, with its sign."""
    return f"{round(100 * difference, 1) or 0.0:+.1f}".replace("-", "−")


def lead(names: str, store: Store) -> str:
    """By how much the first of two is ahead of the second, in hundredths."""
    first, second = _pair(names, store)
    if not (first and second):
        return NOTHING
    return _points(statistics.mean(first) - statistics.mean(second))


def verdict(names: str, store: Store) -> str:
    """The 95 % confidence interval of a lead (Welch's t), and whether it excludes 0."""
    first, second = _pair(names, store)
    if min(len(first), len(second)) < 2:
        return NOTHING
    low, high = ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    decided = "significant" if low > 0 or high < 0 else "not significant"
    return f"95 % interval {_points(low)} to {_points(high)}: {decided}"


SETTINGS: Final = {  # of MNIST at σ = 8: the experiment's name, given the method's
    "η chosen at σ = 4, constant": "mnist/main/{}/8",
    "η chosen at σ = 8, constant": "mnist-8/main/{}/8",
    "η chosen at σ = 8, schedule": "mnist-8/main/{}, schedule/8",
}


def settings(_: str, store: Store) -> str:
    """Scores of each method by how its learning rate was set."""
    return _by_settings(lambda name, label: score(name.format(label), store))


def leads(_: str, store: Store) -> str:
    """Leads over DP-SGD by how both learning rates were set."""

    def cell(name: str, label: str) -> str:
        pair = f"{name.format(label)} over {name.format('dp_sgd')}"
        return f"{lead(pair, store)} ({verdict(pair, store)})"

    return _by_settings(cell, without="dp_sgd")


def _by_settings(cell: Callable[[str, str], str], without: str = "") -> str:
    """A table of `SETTINGS`: a cell for each of their names and each method's label."""
    lines = [f"| method | {' | '.join(SETTINGS)} |", "|---" * (len(SETTINGS) + 1) + "|"]
    constant = [each.method for each in of_part("mnist-8/main") if each.method.schedule is None]
    for label in (method.label for method in constant if method.label != without):
        cells = [cell(name, label) for name in SETTINGS.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def inside(argument: str, store: Store) -> str:
    """The range of what the runs of an experiment tell of their state: `fact of experiment`."""
    fact, name = argument.split(" of ")
    told = [run[fact] for run in store.runs(_BY_NAME[name]) if fact in run]
    if None in told:
        return "beyond every number"
    if not told:
        return NOTHING
    shown = [
        f"{each}" if isinstance(each, int) else f"{each:.2g}" for each in (min(told), max(told))
    ]
    return " to ".join(dict.fromkeys(shown))


def printed(paper: Printed) -> str:
    """The paper's number, and where it stands."""
    if paper.value is None:
        return paper.source
    remark = f"; {paper.remark}" if paper.remark else ""
    return f"**{paper.value:g}** ({paper.source}{remark})"


def table(argument: str, store: Store) -> str:
    """A row for each experiment of a part, the best first."""
    experiments = of_part(argument)
    unit, higher = TASKS[experiments[0].task].unit, TASKS[experiments[0].task].higher_is_better

    def rank(each: Experiment) -> float:
        found = finals(each, store)
        value = statistics.mean(found) if found else float("-inf" if higher else "inf")
        return -value if higher else value

    lines = [f"| method | {unit} | ε | η | the paper |", "|---|---|---|---|---|"]
    lines += [_row(each, store) for each in sorted(experiments, key=rank)]
    return "\n".join(lines)


def _row(experiment: Experiment, store: Store) -> str:
    method = experiment.method
    found = epsilon(experiment, experiment.steps, store)
    guarantee = f"{found:.3g}" if found is not None else NOTHING
    if not method.proven:
        guarantee = "no guarantee"
    rate = store.chosen_rate(experiment.task, method.label)
    shown = NOTHING if rate is None else f"{rate:g}"
    cells = (method.label, _score(experiment, store), guarantee, shown, printed(experiment.printed))
    return f"| {' | '.join(cells)} |"


def rates(_: str, store: Store) -> str:
    """What every method scored at every learning rate of its grid; the chosen one in bold."""
    lines = ["| task | method | η: score |", "|---|---|---|"]
    for task, label in dict.fromkeys((each.task, each.method.label) for each in EXPERIMENTS):
        if TASKS[task].tuned_on:
            continue
        chosen = store.chosen_rate(task, label)
        tried = sorted(store.tuning(task, label).items())
        cells = [_tried(rate, found, chosen) for rate, found in tried]
        lines.append(f"| {task} | {label} | {', '.join(cells) or NOTHING} |")
    return "\n".join(lines)


def _tried(rate: float, found: float | None, chosen: float | None) -> str:
    text = f"{rate:g}: {'broke down' if found is None else f'{found:.3f}'}"
    return f"**{text}**" if rate == chosen else text


def table_1(_: str, store: Store) -> str:
    """The ε and the epochs at which a mean first reaches an accuracy, beside papers/000 Table I."""
    methods = {each.method.label: each for each in of_part("mnist/table-1")}
    lines = [
        "| accuracy | dp_sgd: paper | ours | AdaDP: paper | adadp raw |",
        "|" + "---|" * 5,
    ]
    for level, (plain, adaptive) in TABLE_1.items():
        found = {label: _needed(each, level, store) for label, each in methods.items()}
        cells = (f"{plain:.2f}", found["dp_sgd"], f"{adaptive:.2f}", found["adadp raw"])
        lines.append(f"| {level:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _needed(experiment: Experiment, level: float, store: Store) -> str:
    found = plots.curve(experiment, store)
    if found is None:
        return NOTHING
    points = zip(found.steps, found.means, strict=True)
    step = next((step for step, reached in points if reached >= level), None)
    if step is None:
        return "not reached"
    spent, epochs = epsilon(experiment, step, store), step * TASKS[experiment.task].sample_rate
    cost = f"{spent:.2f}" if spent is not None else "no guarantee"
    return f"{cost} ({epochs:g} epochs)"


def claims(_: str, store: Store) -> str:
    """What papers/001 §5.2 says its runs cost, and what the service certifies."""
    lines = ["| σ | epochs | ε: papers/001 | certified |", "|---|---|---|---|"]
    for noise, epochs, said in CLAIMED:
        known = store.get({"kind": "epsilon", **claimed(noise, epochs)})
        cost = NOTHING if known is None else f"{known['epsilon']:.3g}"
        lines.append(f"| {noise:g} | {epochs} | {said} | {cost} |")
    return "\n".join(lines)


FIGURES: Final[dict[str, Callable[[str, Store], str]]] = {
    "claims": claims,
    "inside": inside,
    "lead": lead,
    "leads": leads,
    "mean": mean,
    "rates": rates,
    "score": score,
    "settings": settings,
    "table": table,
    "table_1": table_1,
    "verdict": verdict,
}


def page(store: Store, template: str) -> str:
    """The text with its figures."""

    def figure(found: re.Match[str]) -> str:
        return FIGURES[found[1]](found[2], store)

    return re.sub(r"\{(\w+):([^{}]*)\}", figure, template)


PLOTS: Final = (
    "mnist",
    "mnist/long",
    "fashion-mnist",
    "box",
    "adult",
    "newsgroups",
    "autoencoder",
)


def write(store: Store, file: Path) -> None:
    """The page, and its plots in `images` beside it."""
    images = file.parent / "images"
    images.mkdir(exist_ok=True)
    file.write_text(page(store, TEMPLATE.read_text()))
    for name in PLOTS:
        task, _, part = name.partition("/")
        plot = images / f"training-{name.replace('/', '-')}.svg"
        plots.draw(of_part(f"{task}/{part or 'main'}"), store, plot)
