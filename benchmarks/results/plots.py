"""Plots of the score during a run, over its epochs and its certified ε."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from training_client.lab.papers.accounting import find_certified_epsilon
from training_client.lab.papers.experiments import Experiment, Method
from training_client.lab.papers.runner import count_epochs
from training_client.lab.papers.store import Store
from training_client.lab.papers.tasks import TASKS
from training_client.lab.papers.verdicts import describe_breakdown

# Okabe and Ito's colours, which colour-blind readers can distinguish; by label or by optimizer
_COLOURS: Final = {
    "non_private": "#999999",
    "dp_sgd": "#000000",
    "dp_adam": "#999999",
    "dp_rmsprop": "#56b4e9",
    "adadp": "#0072b2",
    "adal": "#56b4e9",
    "adan": "#009e73",
    "pi_adam": "#d55e00",
    "pi_rmsprop": "#e69f00",
    "pi_adagrad": "#cc79a7",
    "adadps": "#d55e00",
    "dp_r_pub": "#009e73",
    "dp_adam_pub": "#e69f00",
    "sgd_maj": "#e69f00",
    "sgd_adv": "#56b4e9",
    "sgd_pass": "#009e73",
    "a_ddp": "#0072b2",
    "a_ddp pld": "#d55e00",
    "exp": "#009e73",
    "adppl": "#cc79a7",
    "agd": "#cc79a7",
    "dp_opt": "#e69f00",
    "pda_dpmd": "#cc79a7",
    "box, privatised": "#d55e00",
    "box, raw": "#d55e00",
}
_DASHES: Final = ("-", "--", "-.")
_UNPROVEN: Final = ":"
_PANEL: Final = (3.6, 4.0)  # inches
_SHOWN: Final = 0.25  # range of accuracy below the best that a plot shows


@dataclass(frozen=True)
class ScoreCurve:
    """Mean and standard deviation of the test score over the seeds, at each evaluated step."""

    steps: list[int]
    means: list[float]
    standard_deviations: list[float]


def compute_mean_curve(experiment: Experiment, store: Store) -> ScoreCurve | None:
    """Return an experiment's mean score curve over seeds; None if every run broke down."""
    runs = [dict(run["curve"]) for run in store.list_runs(experiment) if run["score"] is not None]
    if not runs:
        return None
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    columns = [[run[step] for run in runs] for step in steps]
    spread = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
    return ScoreCurve(steps, [statistics.mean(column) for column in columns], spread)


def draw(
    experiments: Sequence[Experiment],
    store: Store,
    file: Path,
    printed: Mapping[str, tuple[float, float | None]] = MappingProxyType({}),
) -> None:
    """Draw a figure with one panel for each column of the results page.

    Args:
        experiments: the experiments, a curve each.
        store: the results.
        file: the file to write.
        printed: a paper's final score by the name of the experiment that answers it, with the
            epochs that the paper prints; drawn as a cross of the experiment's colour.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(each.column for each in experiments))
    width, height = _PANEL
    with rc_context({"svg.hashsalt": file.stem, "svg.fonttype": "path", "font.size": 9}):
        figure = Figure(figsize=(width * len(columns) + 1.8, height), layout="constrained")
        panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        floor = _find_lowest_shown_score(experiments, store)
        for axes, column in zip(panels, columns, strict=True):
            beside = [each for each in experiments if each.column == column]
            _draw_panel(axes, column, beside, store, floor)
            _draw_printed_scores(axes, beside, printed, floor)
        panels[0].set_ylabel(TASKS[experiments[0].task].unit)
        _cut_off_low_scores(panels, floor)
        lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
        figure.legend(lines.values(), lines.keys(), frameon=False, loc="outside right center")
        figure.savefig(file, metadata={"Date": None})


def _find_lowest_shown_score(experiments: Sequence[Experiment], store: Store) -> float:
    """Return the lowest score to plot, so that a bad run does not squeeze the other curves."""
    found = [compute_mean_curve(experiment, store) for experiment in experiments]
    tops = [max(each.means) for each in found if each is not None]
    return max(tops) - _SHOWN if tops and TASKS[experiments[0].task].higher_is_better else -math.inf


def _cut_off_low_scores(panels: Sequence[Any], floor: float) -> None:
    """Cut a plot off below `floor`; mark the labels of curves that stay below it."""
    if floor == -math.inf:
        return
    lines = [line for axes in panels for line in axes.get_lines()]
    floor = max(floor, panels[0].get_ylim()[0])
    panels[0].set_ylim(floor, max(max(line.get_ydata()) for line in lines) + 0.02)
    seen = {line.get_label() for line in lines if max(line.get_ydata()) > floor}
    for line in lines:
        if line.get_label() not in seen:
            line.set_label(f"{line.get_label()}, below")


def _draw_panel(
    axes: Any, column: str, experiments: Sequence[Experiment], store: Store, floor: float
) -> None:
    """Draw the score curves of one column's experiments."""
    for experiment in experiments:
        found = compute_mean_curve(experiment, store)
        if found is None:
            continue
        style = _choose_line_style(experiment, experiments)
        if broken := describe_breakdown(experiment, store):
            style["label"] += f", {broken}"
        if len(found.steps) == 1:
            style["marker"] = "o"  # a line would not be seen
        along = [step * _get_step_unit(experiment)[0] for step in found.steps]
        axes.plot(along, found.means, **style)
        low = [
            mean - spread
            for mean, spread in zip(found.means, found.standard_deviations, strict=True)
        ]
        high = [
            mean + spread
            for mean, spread in zip(found.means, found.standard_deviations, strict=True)
        ]
        seen = [mean > floor for mean in found.means]  # no band without its line
        axes.fill_between(along, low, high, seen, color=style["color"], alpha=0.12, linewidth=0)
    axes.set_title(column)
    axes.set_xlabel(_get_step_unit(experiments[0])[1])
    if TASKS[experiments[0].task].users > 1:
        axes.set_xscale("log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _draw_epsilon_axis(axes, experiments, store)


def _draw_printed_scores(
    axes: Any,
    experiments: Sequence[Experiment],
    printed: Mapping[str, tuple[float, float | None]],
    floor: float,
) -> None:
    """Draw the final scores that a paper prints, as crosses at its epochs."""
    for experiment in experiments:
        score, epochs = printed.get(experiment.name, (-math.inf, None))
        if score < floor or score == -math.inf:
            continue
        at = count_epochs(experiment, experiment.steps) if epochs is None else epochs
        colour = _choose_colour(experiment.method)
        axes.plot([at], [score], "x", color=colour, label="printed by the paper", clip_on=False)


def _get_step_unit(experiment: Experiment) -> tuple[float, str]:
    """Return the length of a step on the axis and its unit: epochs, or rounds over all users."""
    if TASKS[experiment.task].users > 1:
        return 1.0, "rounds"
    return experiment.sample_rate or TASKS[experiment.task].sample_rate, "epochs"


def _choose_line_style(experiment: Experiment, beside: Sequence[Experiment]) -> dict[str, Any]:
    """Choose the line: a colour per optimizer, dashes per variant, dots without a guarantee."""
    method = experiment.method
    colour, label = _choose_colour(method), method.label
    alike = [
        each
        for each in beside
        if each.method.has_guarantee and _choose_colour(each.method) == colour
    ]
    if method.has_guarantee:
        dashes = _DASHES[alike.index(experiment) % len(_DASHES)]
    else:
        dashes, label = _UNPROVEN, f"{label} (no guarantee)"
    return {"label": label, "color": colour, "linestyle": dashes, "linewidth": 1.4}


def _choose_colour(method: Method) -> str:
    """Return the colour of a method's optimizer."""
    return _COLOURS.get(method.label) or _COLOURS[method.optimizer]


def _draw_epsilon_axis(axes: Any, experiments: Sequence[Experiment], store: Store) -> None:
    """Draw the certified ε above the epochs if it is the same for all experiments."""
    if len({each.noise_multiplier for each in experiments}) > 1:
        return
    proven = next(each for each in experiments if each.method.has_guarantee)
    found = compute_mean_curve(proven, store)
    if found is None:
        return
    marks = found.steps[len(found.steps) // 4 - 1 :: max(1, len(found.steps) // 4)]
    costs = [find_certified_epsilon(proven, step, store) for step in marks]
    above = axes.secondary_xaxis("top")
    above.set_xticks(
        [step * _get_step_unit(proven)[0] for step in marks],
        ["" if cost is None else f"{cost:.3g}" for cost in costs],
    )
    above.set_xlabel("certified ε", fontsize=8)
    above.tick_params(labelsize=8)
