"""Several optimizers at one budget: scores along the steps, against ε and against epochs."""

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
from training_client.data import Dataset
from training_client.errors import DataError
from training_client.models import CLASSES, RECONSTRUCTION, Objective
from training_client.optimizers import PrivateOptimizer
from training_client.plan import Plan
from training_client.train import Progress, train

_POINTS: Final = 20
_HUES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class Curve:
    """Test scores of one optimizer along its steps.

    Attributes:
        name: of the optimizer, and its state if that was asked for.
        plan: what each step does and costs.
        delta: for which `epsilons` are.
        proven: whether its guarantee stands.
        measure: what the scores are.
        steps: at which they were taken.
        epsilons: ε of so many steps.
        epochs: so many steps amount to.
        scores: the mean over the seeds at each.
        finals: at the end, of each seed.
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
        """Mean score at the end."""
        return statistics.mean(self.finals)

    @property
    def deviation(self) -> float | None:
        """Of the score at the end; None of one seed, which tells nothing of it."""
        return statistics.stdev(self.finals) if len(self.finals) > 1 else None

    @property
    def rank(self) -> float:
        """Less is better: errors as they are, anything else turned round."""
        return self.final if self.measure == RECONSTRUCTION.measure else -self.final

    @property
    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"final": self.final, "deviation": self.deviation}


def run_all(
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
) -> Curve:
    """Train one optimizer several times.

    Args:
        name: what the curve is called.
        make: a new model and its optimizer, with an allowance; models of one seed are alike across
            optimizers.
        data: private training set and test set; labels are what `objective` aims at.
        budget: of each run; they are compared, not released together.
        steps: of a run.
        seeds: runs; only the model's first weights depend on them, never the noise.
        objection: why no guarantee stands; None if one does.
        objective: the loss, and what is measured.
        report: called after every step, with the steps of earlier seeds.
    """
    every = max(1, steps // _POINTS)
    limits: dict[str, Any] = {"steps_max": steps, "evaluate_every": every}
    results = []
    for seed in range(seeds):
        own: Allowance = replace(budget)  # with nothing taken yet: it hands out each step once
        if objection is not None:
            own = NoBudget(budget.plan, steps, objection)
        torch.manual_seed(seed)
        model, optimizer = make(own)
        told = partial(report, seed * steps)
        results.append(train(model, data, optimizer, objective=objective, report=told, **limits))
    taken = [step for step, _ in results[0].scores]
    columns = zip(*(each.scores for each in results), strict=True)
    return Curve(
        name,
        budget.plan,
        budget.delta,
        objection is None,
        objective.measure,
        tuple(taken),
        tuple(budget.planned(step).epsilon for step in taken),
        tuple(step * budget.plan.sample_rate for step in taken),
        tuple(statistics.mean(score for _, score in column) for column in columns),
        tuple(each.test_score for each in results),
    )


def figure_class() -> type[Any]:
    """What plots are drawn on.

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


def draw(curves: Sequence[Curve], file: Path, title: str = "") -> None:
    """Scores against ε, and against epochs, side by side; each curve keeps its colour by its place.

    Raises:
        DataError: matplotlib is missing.
    """
    figure = figure_class()(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    figure.suptitle(title)
    for at, curve in sorted(enumerate(curves), key=lambda each: each[1].rank):
        dashes = "-" if at < len(_HUES) else "--"
        style = {"color": _HUES[at % len(_HUES)], "linestyle": dashes if curve.proven else ":"}
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
