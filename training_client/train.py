"""The loop: ask, step, ask again, and stop before the step that would pass the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from training_client.budget import Allowance
from training_client.data import Dataset
from training_client.errors import BudgetExhaustedError
from training_client.optimizers import PrivateOptimizer
from training_client.sampling import PoissonSampler
from training_client.service import Guarantee


@dataclass(frozen=True, slots=True)
class Progress:
    """What a progress bar shows after a step."""

    step: int
    loss: float
    epsilon_allowed: float


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run.

    Attributes:
        steps: steps made.
        guarantee: the service's claim about exactly these steps.
        test_accuracy: share of the test set classified right.
        stopped_by_budget: whether the budget, rather than the plan, ended the run.
        stopped_by_request: whether the caller did.
        accuracies: test accuracy after some steps, if these were asked for.
    """

    steps: int
    guarantee: Guarantee
    test_accuracy: float
    stopped_by_budget: bool
    stopped_by_request: bool = False
    accuracies: tuple[tuple[int, float], ...] = ()


def cross_entropy(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One loss an example."""
    return functional.cross_entropy(predictions, labels, reduction="none")


def mlp(inputs: int, hidden: int, classes: int) -> nn.Module:
    """One hidden layer of rectified linear units."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def train(
    model: nn.Module,
    data: Dataset,
    optimizer: PrivateOptimizer,
    budget: Allowance,
    *,
    steps_max: int | None = None,
    report: Callable[[Progress], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    evaluate_every: int | None = None,
    sampler: PoissonSampler | None = None,
) -> Result:
    """Train until the budget or `steps_max` ends the run.

    Args:
        model: on the device of `data`; what `optimizer` updates.
        data: the private training set, and a test set.
        optimizer: makes the private steps; its plan is the budget's.
        budget: allows each step beforehand.
        steps_max: stop here even if budget is left; no limit by default.
        report: called after every step.
        stop: asked before every step; the run ends, and is accounted for, when it says so.
        evaluate_every: so many steps apart the test accuracy is taken; never by default.
        sampler: of the batches; Poisson at the plan's rate by default.

    Raises:
        ServiceError: the service gave no usable answer; no step was made without one.
    """
    if optimizer.plan != budget.plan:
        raise ValueError("the optimizer runs another plan than the budget accounts for")
    plan = optimizer.plan
    sampler = sampler or PoissonSampler(len(data.train_labels), plan.sample_rate)
    done, exhausted, requested = budget.made, False, False
    accuracies = []
    for step in itertools.count(done + 1):
        if stop():
            requested = True
            break
        if steps_max is not None and step > steps_max:
            break
        try:
            budget.allow(step)
        except BudgetExhaustedError:
            exhausted = True
            break
        rows = sampler.draw().to(data.train_labels.device)
        loss = optimizer.step(data.train_examples[rows], data.train_labels[rows], cross_entropy)
        done = step
        report(Progress(step, loss, budget.spent))
        if evaluate_every is not None and step % evaluate_every == 0:
            accuracies.append((step, accuracy(model, data)))
    return Result(
        done,
        budget.guarantee(done),
        accuracy(model, data),
        exhausted,
        requested,
        tuple(accuracies),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset) -> float:
    """Share of the test set classified right."""
    return float((model(data.test_examples).argmax(1) == data.test_labels).float().mean())
