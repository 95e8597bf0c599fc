"""AGD: gradient descent that pays for a better gradient when its direction fails.

Lee and Kifer, "Concentrated Differentially Private Gradient Descent with Adaptive per-Iteration
Privacy Budget", KDD 2018, which papers/000 compares with. Rebuilt from its published description:
in each step a noisy gradient is released, then the best of several step sizes is selected
privately by the loss. If that is 0, the direction has failed: the gradient is measured again, and
the share of the budget per gradient grows by 1 + γ from then on.

How much noise a step has depends on what was released before. So every release is charged by
itself, before it is made, to a dataset of the ledger, whose filter covers such choices. Make the
dataset with the Rényi filter: the default one is for releases like one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn

from training_client.budget import Allowance, LedgerBudget, NoBudget
from training_client.client import AccountingService, Json
from training_client.errors import BudgetExhaustedError, DataError
from training_client.lab.selection import permute_and_flip
from training_client.plan import Plan
from training_client.private_step import Loss, Transform
from training_client.private_step.model_state import evaluation_mode
from training_client.private_step.private_sum import PrivateSum
from training_client.private_step.sampling import PoissonSampler

_PURPOSE: Final = "accountant-train agd"
_UNITS: Final = 1 << 20  # whole numbers that a record's clipped loss is rounded to


class Gate(Protocol):
    """Interface of what pays for a release before it is made."""

    def pay(self, mechanism: Json) -> None:
        """Charge a release; raise `BudgetExhaustedError` if it does not fit."""

    def allow_step(self, plan: Plan) -> Allowance:
        """Return a budget for one step of a plan; raise if it does not fit."""


@dataclass(frozen=True)
class LedgerGate:
    """Charges each release to a dataset of the ledger, with a reservation of its own.

    Attributes:
        accounting: the service.
        dataset: the dataset's name.
        delta: δ of its budget.
    """

    accounting: AccountingService
    dataset: str
    delta: float

    def pay(self, mechanism: Json) -> None:
        """Charge a release; raise `BudgetExhaustedError` if it does not fit."""
        held = self.accounting.reserve(self.dataset, mechanism, _PURPOSE)
        self.accounting.commit(self.accounting.grant(held, 1))

    def allow_step(self, plan: Plan) -> Allowance:
        """Return a budget for one step of a plan; raise if it does not fit."""
        held = self.accounting.reserve(self.dataset, plan.mechanism(1), _PURPOSE)
        return LedgerBudget(self.accounting, plan, self.dataset, self.delta, held)


@dataclass
class NoGate:
    """Pays nothing, and claims nothing: for measurements, with a limit of ρ.

    Attributes:
        rho: what may be spent yet, in zero-concentrated differential privacy.
    """

    rho: float

    def pay(self, mechanism: Json) -> None:
        """Subtract ε²/2 of a selection; raise if less is left (Bun & Steinke 2016, Prop. 3.3)."""
        self._subtract(mechanism["epsilon"] ** 2 / 2)

    def allow_step(self, plan: Plan) -> Allowance:
        """Subtract 1/(2σ²); return a `NoBudget`."""
        self._subtract(1 / (2 * plan.noise_multiplier**2))
        return NoBudget(plan, 1, "it is measured")

    def _subtract(self, rho: float) -> None:
        if rho > self.rho:
            raise BudgetExhaustedError(f"ρ = {rho:g} is more than the {self.rho:g} that is left")
        self.rho -= rho


@dataclass(frozen=True, kw_only=True)
class Agd:
    """The parameters of AGD.

    Attributes:
        clip_norm: C > 0, of each example's gradient.
        noise_multiplier: σ > 0 of the first gradients.
        selection_epsilon: ε > 0 of each selection of a step size.
        loss_max: each example's loss is clipped to [0, loss_max] for the selection.
        step_sizes: along the noisy gradient scaled to length 1; 0 is added to them.
        growth: γ > 0: after a failed direction 1/(2σ²) is multiplied by 1 + γ.
        steps_max: the largest number of steps.

    Raises:
        DataError: a parameter is out of range.
    """

    clip_norm: float
    noise_multiplier: float
    selection_epsilon: float
    loss_max: float = 5.0
    step_sizes: Sequence[float] = (0.03, 0.1, 0.3, 1.0)
    growth: float = 0.1
    steps_max: int = 1000

    def __post_init__(self) -> None:
        """Require positive finite parameters."""
        numbers = (
            self.clip_norm, self.noise_multiplier, self.selection_epsilon, self.loss_max,
            self.growth, self.steps_max, *self.step_sizes,
        )  # fmt: skip
        if not (self.step_sizes and all(0 < each < math.inf for each in numbers)):
            raise DataError(f"expected positive finite parameters of AGD, got {self}")


@dataclass(frozen=True)
class AgdRun:
    """The outcome of a run.

    Attributes:
        steps: the steps that changed the parameters.
        failures: how often no step size was better than 0.
        noise_multiplier: σ of the last gradient.
    """

    steps: int
    failures: int
    noise_multiplier: float


def train_agd(
    model: nn.Module,
    examples: torch.Tensor,
    targets: torch.Tensor,
    loss: Loss,
    gate: Gate,
    agd: Agd,
) -> AgdRun:
    """Train a model in place until the budget is spent or `steps_max` steps are made.

    Args:
        model: the model to train.
        examples: of all private records, on the model's device; each step uses all of them.
        targets: theirs, one row per example.
        loss: returns one value per example.
        gate: pays for each release before it is made.
        agd: the parameters.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    noise, steps, failures = agd.noise_multiplier, 0, 0
    data = model, examples, targets, loss, gate
    try:
        while steps < agd.steps_max:
            measured, precision = _release_gradient(*data, agd.clip_norm, noise), noise**-2
            while not (size := _select_step(*data, agd, _unit(measured))):
                failures += 1
                more = precision * agd.growth  # 1/σ² of the measurement that is added
                again = _release_gradient(*data, agd.clip_norm, more**-0.5)
                measured = torch.lerp(measured, again, more / (precision + more))
                precision += more
                noise = precision**-0.5
            _move(trained, _unit(measured), -size)
            steps += 1
    except BudgetExhaustedError:
        pass
    return AgdRun(steps, failures, noise)


def _release_gradient(
    model: nn.Module, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, gate: Gate,
    clip_norm: float, noise: float,
) -> torch.Tensor:  # fmt: skip
    """Release the mean of clipped gradients of all records as one vector, with noise."""
    plan = Plan(len(targets), 1.0, clip_norm, noise)
    allowance = gate.allow_step(plan)
    private_sum = PrivateSum(model, allowance)
    rows = private_sum.draw(PoissonSampler(len(targets), 1.0))
    mean = private_sum.release(examples[rows], targets[rows], loss, Transform(clip_norm))
    found = torch.cat([each.flatten() for each in mean.to_tensors()])
    allowance.commit()
    return found


def _select_step(
    model: nn.Module, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, gate: Gate,
    agd: Agd, direction: torch.Tensor,
) -> float:  # fmt: skip
    """Select the size of a step along a direction privately by its loss; 0 if none is better."""
    gate.pay({"kind": "permute_and_flip", "epsilon": agd.selection_epsilon})
    trained = [each for each in model.parameters() if each.requires_grad]
    before, sizes = [each.detach().clone() for each in trained], (0.0, *agd.step_sizes)
    scores = []
    for size in sizes:
        _move(trained, direction, -size)
        scores.append(-_count_loss(model, examples, targets, loss, agd.loss_max))
        with torch.no_grad():
            for each, old in zip(trained, before, strict=True):
                each.copy_(old)
    return sizes[permute_and_flip(scores, _UNITS, agd.selection_epsilon)]


@torch.no_grad()
def _count_loss(
    model: nn.Module, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, loss_max: float
) -> int:
    """Return the sum of losses in units of loss_max/2²⁰; each counts from 0 to 2²⁰: private."""
    with evaluation_mode(model):
        losses = loss(model(examples), targets).double()
    shares = (losses / loss_max).nan_to_num(1.0, 1.0, 0.0).clamp(0, 1)
    return int((shares * _UNITS).round().long().sum())


def _unit(vector: torch.Tensor) -> torch.Tensor:
    """Return a vector scaled to length 1."""
    return vector.div(vector.norm().clamp_min(torch.finfo(vector.dtype).tiny))


@torch.no_grad()
def _move(parameters: Sequence[torch.Tensor], direction: torch.Tensor, size: float) -> None:
    """Add `size` times a direction to the parameters."""
    begin = 0
    for each in parameters:
        each.add_(direction[begin : begin + each.numel()].view_as(each), alpha=size)
        begin += each.numel()
