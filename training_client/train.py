"""The loop: ask, step, ask again, and stop before the step that would pass the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from training_client.data import Dataset
from training_client.errors import BudgetExhaustedError
from training_client.evaluation import evaluating
from training_client.models import CLASSES, Objective, cross_entropy, mlp
from training_client.optimizers import PrivateOptimizer
from training_client.processor import fit_for_training
from training_client.sampling import PoissonSampler
from training_client.service import Guarantee

__all__ = ["Progress", "Result", "cross_entropy", "mlp", "score", "train"]

_EXAMPLES_SCORED: Final = 1000  # at a time


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
        guarantee: the claim about the plan, whose end may not have been reached.
        test_score: the mean over the test set of what the objective measures.
        measure: what that is.
        stopped_by_budget: whether the budget, rather than the plan, ended the run.
        stopped_by_request: whether the caller did.
        scores: test scores after some steps, if these were asked for.
    """

    steps: int
    guarantee: Guarantee
    test_score: float
    measure: str
    stopped_by_budget: bool
    stopped_by_request: bool = False
    scores: tuple[tuple[int, float], ...] = ()

    @property
    def test_accuracy(self) -> float | None:
        """Share of the test set classified right; None if the model does not classify."""
        return self.test_score if self.measure == CLASSES.measure else None


def train(
    model: nn.Module,
    data: Dataset,
    optimizer: PrivateOptimizer,
    *,
    objective: Objective = CLASSES,
    steps_max: int | None = None,
    report: Callable[[Progress], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    evaluate_every: int | None = None,
    sampler: PoissonSampler | None = None,
) -> Result:
    """Train until the budget or `steps_max` ends the run.

    Args:
        model: on the device of `data`; what `optimizer` updates.
        data: the private training set, and a test set; labels are what `objective` aims at.
        optimizer: makes the private steps that its allowance covers.
        objective: the loss, and what is measured on the test set.
        steps_max: stop here even if budget is left; no limit by default. The claim stays that of
            the budget's plan: to claim less, declare its end there.
        report: called after every step.
        stop: asked before every step; the run ends, and is accounted for, when it says so.
        evaluate_every: so many steps apart the test score is taken; never by default.
        sampler: of the batches; Poisson at the plan's rate by default.

    Raises:
        DataError: the loss of public examples became no number; or the sampler draws otherwise
            than the plan says.
        NoGuaranteeError: another run took steps of this budget meanwhile, or several processes
            train.
        ServiceError: the service gave no usable answer; no step was made without one.
    """
    budget = optimizer.allowance
    sampler = PoissonSampler.of(budget.plan, len(data.train_labels), sampler)
    done, exhausted, requested = optimizer.steps_made, False, False
    scores = []
    with fit_for_training():
        for step in itertools.count(done + 1):
            if stop():
                requested = True
                break
            if steps_max is not None and step > steps_max:
                break
            try:
                optimizer.take()  # before the batch is drawn
            except BudgetExhaustedError:
                exhausted = True
                break
            rows = sampler.draw().to(data.train_labels.device)
            loss = optimizer.step(
                data.train_examples[rows], data.train_labels[rows], objective.loss
            )
            done = step
            report(Progress(step, loss, budget.spent))
            if evaluate_every is not None and step % evaluate_every == 0:
                scores.append((step, score(model, data, objective)))
    return Result(
        done,
        budget.guarantee(done),
        score(model, data, objective),
        objective.measure,
        exhausted,
        requested,
        tuple(scores),
    )


@torch.no_grad()
def score(model: nn.Module, data: Dataset, objective: Objective = CLASSES) -> float:
    """Return the mean over the test set of what the objective measures, in evaluation mode."""
    examples = torch.split(data.test_examples, _EXAMPLES_SCORED)
    labels = torch.split(data.test_labels, _EXAMPLES_SCORED)
    with evaluating(model):
        found = [objective.score(model(x), y) for x, y in zip(examples, labels, strict=True)]
    return float(torch.cat(found).mean())
