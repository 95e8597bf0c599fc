"""Compare optimizers at one budget: learning curves against ε and against epochs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from training_client.budget import Allowance, Budget, NoBudget
from training_client.errors import DataError
from training_client.lab.data import Dataset
from training_client.lab.models import CLASSES, RECONSTRUCTION, Objective
from training_client.lab.train import Progress, train
from training_client.optimizers import PrivateOptimizer
from training_client.plan import Plan

_POINTS: Final = 20  # of a learning curve
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class LearningCurve:
    """Test scores of one optimizer during training, with step, epoch and ε of each.

    Attributes:
        name: the optimizer, as NAME or NAME:STATE.
        plan: what each step does and costs.
        delta: the δ of `epsilons`.
        proven: whether a privacy guarantee covers the run.
        measure: the name of the test measure.
        steps: the steps after which the score was taken.
        epsilons: ε of the steps up to each point.
        epochs: epochs up to each point.
        scores: the mean score over the seeds at each point.
        finals: the score of each seed at the end.
    """

    name: str
    plan: Plan
    delta: float
    proven: bool
    measure: str
    steps: tuple[int, ...]
    epsilons: tuple[float, ...]
    epochs: tuple[float, ...]
    scores: tuple[float, ...]
    finals: tuple[float, ...]

    @property
    def final(self) -> float:
        """The mean over seeds of the score at the end of training."""
        return statistics.mean(self.finals)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds of the final score; None with a single seed."""
        return statistics.stdev(self.finals) if len(self.finals) > 1 else None

    @property
    def rank(self) -> float:
        """A sort key by the final score: lower is better."""
        return self.final if self.measure == RECONSTRUCTION.measure else -self.final

    @property
    def document(self) -> dict[str, Any]:
        """The learning curve as JSON."""
        return asdict(self) | {"final": self.final, "deviation": self.deviation}


def train_seeds(
    name: str,
    make: Callable[[Allowance], tuple[nn.Module, PrivateOptimizer]],
    data: Dataset,
    budget: Budget,
    steps: int,
    seeds: int,
    *,
    objection: str | None = None,
    objective: Objective = CLASSES,
    report: Callable[[int, Progress], None] = lambda *_: None,
) -> LearningCurve:
    """Train one optimizer once per seed; return its learning curve, averaged over seeds.

    Args:
        name: the name of the curve.
        make: makes a new model and its optimizer for an allowance.
        data: private training set and test set; labels are the objective's targets.
        budget: the budget of each run; the runs are compared, not released together.
        steps: the number of steps of a run.
        seeds: the number of runs. A seed fixes the initial weights, never the noise.
        objection: why no guarantee holds; None if one does.
        objective: the loss and the test measure.
        report: called after every step, with the number of steps of earlier seeds.
    """
    every = max(1, steps // _POINTS)
    limits: dict[str, Any] = {"steps_max": steps, "evaluate_every": every}
    results = []
    for seed in range(seeds):
        own: Allowance = replace(budget)  # a fresh copy: a budget grants each step once
        if objection is not None:
            own = NoBudget(budget.plan, steps, objection)
        torch.manual_seed(seed)
        model, optimizer = make(own)
        report_step = partial(report, seed * steps)
        results.append(
            train(model, data, optimizer, objective=objective, report=report_step, **limits)
        )
    evaluated = [step for step, _ in results[0].scores]
    columns = zip(*(each.scores for each in results), strict=True)
    return LearningCurve(
        name,
        budget.plan,
        budget.delta,
        objection is None,
        objective.measure,
        tuple(evaluated),
        tuple(budget.planned_guarantee(step).epsilon for step in evaluated),
        tuple(step * budget.plan.sample_rate for step in evaluated),
        tuple(statistics.mean(score for _, score in column) for column in columns),
        tuple(each.test_score for each in results),
    )


def import_figure_class() -> type[Any]:
    """Import matplotlib's Figure class.

    Raises:
        DataError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError(
            "a plot needs matplotlib: pip install 'privacy-accountant[plots]'"
        ) from None
    return Figure


def plot(curves: Sequence[LearningCurve], file: Path, title: str = "") -> None:
    """Plot curves against ε and against epochs, side by side, and write the image to a file.

    Raises:
        DataError: matplotlib is missing.
    """
    figure = import_figure_class()(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    figure.suptitle(title)
    for at, curve in sorted(enumerate(curves), key=lambda each: each[1].rank):
        line = "-" if at < len(_COLOURS) else "--"
        style = {"color": _COLOURS[at % len(_COLOURS)], "linestyle": line if curve.proven else ":"}
        label = curve.name if curve.proven else f"{curve.name} (no guarantee)"
        left.plot(curve.epsilons, curve.scores, label=label, **style)
        right.plot(curve.epochs, curve.scores, **style)
    left.set_xlabel("ε")
    left.set_ylabel(f"test {curves[0].measure}")
    right.set_xlabel("epochs")
    figure.legend(frameon=False, loc="outside right center", title="best first")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
