"""The training loop: ask before every step, and stop before one would exceed the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from training_client.client.answers import Guarantee
from training_client.errors import BudgetExhaustedError
from training_client.integrations.patches import tune_process
from training_client.lab.data import Dataset
from training_client.lab.models import CLASSES, Objective
from training_client.optimizers import PrivateOptimizer
from training_client.private_step.model_state import evaluation_mode
from training_client.private_step.sampling import Sampler, sampler_for_plan

_EVALUATION_BATCH: Final = 1000  # test examples per forward pass


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run after a step: step number, loss, and ε of all steps allowed so far."""

    step: int
    loss: float
    epsilon_allowed: float


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run: why it ended, its steps, scores and guarantee.

    Attributes:
        steps: the number of steps made.
        guarantee: the privacy claim, which covers the whole plan even if the run ended early.
        test_score: the mean over the test set of the objective's measure.
        measure: the name of the measure.
        stopped_by_budget: whether the run ended because no further step fits the budget.
        stopped_by_request: whether the run ended because `stop` returned True.
        scores: pairs of a step and the test score after it, if `evaluate_every` was set.
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
        """The accuracy on the test set; None if the model does not classify."""
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
    sampler: Sampler | None = None,
) -> Result:
    """Train until the budget or `steps_max` ends the run.

    Args:
        model: the model that `optimizer` updates, on the device of `data`.
        data: the private training set and a test set; labels are the objective's targets.
        optimizer: makes the private steps that its allowance covers.
        objective: the loss, and the measure on the test set.
        steps_max: the last step to make, even if budget is left; no limit by default. The claim
            still covers the budget's whole plan: to claim less, shorten the plan.
        report: called after every step.
        stop: called before every step; if it returns True the run ends and is accounted for.
        evaluate_every: steps between evaluations on the test set; none by default.
        sampler: draws the batches; by default a new one that draws as the plan says. With
            balls-in-bins sampling a new one begins an epoch: what was left of the last one is
            charged and not made.

    Raises:
        DataError: the loss of the public examples became non-finite, or the sampler does not match
            the plan.
        NoGuaranteeError: another run took steps of the same budget, several processes train, or
            the sampler is at another place in its epoch than the optimizer.
        ServiceError: the service gave no usable answer; no step was made without one.
    """
    budget = optimizer.allowance
    sampler = sampler_for_plan(budget.plan, len(data.train_labels), sampler, budget.has_claim)
    optimizer.continue_epoch(sampler)
    done, exhausted, requested = optimizer.steps_made, False, False
    scores = []
    with tune_process():
        for step in itertools.count(done + 1):
            if stop():
                requested = True
                break
            if steps_max is not None and step > steps_max:
                break
            try:
                rows = optimizer.draw(sampler)
            except BudgetExhaustedError:
                exhausted = True
                break
            loss = optimizer.step(
                data.train_examples[rows], data.train_labels[rows], objective.loss
            )
            done = step
            report(Progress(step, loss, budget.spent))
            if evaluate_every is not None and step % evaluate_every == 0:
                scores.append((step, evaluate(model, data, objective)))
    is_evaluated = bool(scores) and scores[-1][0] == done
    return Result(
        done,
        budget.guarantee(done),
        scores[-1][1] if is_evaluated else evaluate(model, data, objective),
        objective.measure,
        exhausted,
        requested,
        tuple(scores),
    )


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset, objective: Objective = CLASSES) -> float:
    """Return the objective's mean test measure over the test set, in evaluation mode."""
    examples = torch.split(data.test_examples, _EVALUATION_BATCH)
    labels = torch.split(data.test_labels, _EVALUATION_BATCH)
    with evaluation_mode(model):
        scores = [objective.score(model(x), y) for x, y in zip(examples, labels, strict=True)]
    return float(torch.cat(scores).mean())
