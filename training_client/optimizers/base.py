"""A step of any optimizer: transform, clip, sum, add noise, divide by the batch size, update.

What is private happens in `private_sum`. A subclass says what is clipped, from what it already
knows (`transform`), and what to do with the noisy mean (`update`): both are post-processing of
noisy sums, unless its state comes from elsewhere (`source`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from training_client.budget import Allowance, NoBudget
from training_client.clipping import Block, Loss, Transform
from training_client.errors import DataError, NoGuaranteeError
from training_client.optimizers.source import Noisy, Source, Step
from training_client.plan import Plan
from training_client.private_sum import PrivateSum


class PrivateOptimizer(ABC):
    """Makes the private steps that an allowance covers, as its plan says.

    Each step is taken from the allowance before anything is computed from its batch.

    Attributes:
        allowance: that covers the steps.
        parameters: what is trained.
        blocks: of all their numbers.
        size: how many numbers that is.
        learning_rate: η; it may be changed between steps, as a schedule does.

    Args:
        model: the model to train.
        allowance: a `Budget` or `LedgerBudget`; a `NoBudget` for steps without a privacy claim.
        source: where the gradients come from that state is made of; noisy ones by default.
        generator: of the noise, on the model's device; seeded by the operating system by default.
        physical_batch_size: so many examples are clipped at a time; all by default.
        sparse_inputs: most numbers of examples are 0; see `Clipper`.

    Raises:
        NoGuaranteeError: a budget is to account for state that no theorem covers, or several
            processes train.
        UnsupportedModelError: a layer cannot be clipped.
    """

    kept: ClassVar[tuple[str, ...]] = ()  # attributes that are its state
    learning_rate: float

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        *,
        source: Source | None = None,
        generator: torch.Generator | None = None,
        physical_batch_size: int | None = None,
        sparse_inputs: bool = False,
    ) -> None:
        self.source, self.allowance = source or Noisy(), allowance
        self.private_sum = PrivateSum(
            model, allowance, generator, physical_batch_size, sparse_inputs=sparse_inputs
        )
        if not (self.source.proven or isinstance(allowance, NoBudget)):
            raise NoGuaranteeError(
                f"state {self.source.state!r} is made of private gradients: no theorem covers it, "
                "and no budget; train it with a NoBudget"
            )
        self.parameters = self.private_sum.clipper.parameters
        self.blocks = self.private_sum.clipper.blocks
        self.size = self.private_sum.clipper.size

    @property
    def plan(self) -> Plan:
        """What each step does and costs."""
        return self.private_sum.plan

    @property
    def steps_made(self) -> int:
        """Steps that count as made."""
        return self.private_sum.steps

    @property
    def param_groups(self) -> NoReturn:
        """Refuse what handles ordinary optimizers, such as a GradScaler.

        Raises:
            NoGuaranteeError: always.
        """
        raise NoGuaranteeError(
            "a private optimizer has no param_groups. A GradScaler skips a step where one record's "
            "gradient is infinite, which no noise hides: call step() without it, and train in "
            "float32, or under torch.autocast in bfloat16"
        )

    def take(self) -> None:
        """Take the next step from the allowance before its batch is drawn; else `step` does.

        Raises:
            BudgetExhaustedError: the allowance covers no further step.
            NoGuaranteeError: another run took the step, the step before was not finished, or
                several processes train.
            ServiceError: no usable answer; no batch may be drawn.
        """
        self.private_sum.take()

    def step(self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss) -> float:
        """One step on one Poisson batch (which may be empty: the noise is added all the same).

        Returns:
            The batch's mean loss, for the data owner's eyes only.

        Raises:
            BudgetExhaustedError, NoGuaranteeError, ServiceError: see `take`; nothing was computed.
            DataError: the examples are on another device than the model.
        """
        with torch.no_grad():
            transform = self.transform()
        released = self.private_sum.release(examples, targets, loss, transform)
        size = self.plan.expected_batch_size
        with torch.no_grad():
            self.update(Step(released, self.private_sum.clipper, examples, targets, loss, size))
        return released.mean_loss

    def zeros(self) -> torch.Tensor:
        """A vector, for state: a number for each that is trained."""
        return self.private_sum.clipper.zeros()

    def descend(self, block: Block, direction: torch.Tensor, rate: float) -> None:
        """Change the parameters.

        Args:
            block: where.
            direction: of its numbers.
            rate: how far to go against it.
        """
        for piece in block.pieces:
            piece.of(self.parameters).sub_(piece.within(direction), alpha=rate)

    def transform(self) -> Transform:
        """What is clipped in the next step: the gradient itself, to the plan's norm."""
        return Transform(self.plan.clip_norm)

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer keeps from step to step, for a checkpoint."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` gave.

        Raises:
            DataError: another optimizer or model gave it.
        """
        if set(state) != set(self.kept):
            raise DataError(f"a checkpoint of {sorted(state)} is not one of {sorted(self.kept)}")
        for name, value in state.items():
            require_alike(name, value, getattr(self, name))
        for name, value in state.items():
            if torch.is_tensor(value):  # a copy, wherever the model is now
                value = value.to(getattr(self, name).device, copy=True)
            setattr(self, name, value)

    @abstractmethod
    def update(self, step: Step) -> None:
        """Change the parameters, from what the step released, and the state, from the source."""


def require_alike(name: str, given: Any, own: Any) -> None:
    """Return if what a checkpoint gives can take the place of an optimizer's own.

    Raises:
        DataError: they are not of one kind, or tensors not of one shape and type.
    """
    if _kind(given) != _kind(own):
        raise DataError(f"{name} in the checkpoint is of another model, or of another version")


def _kind(kept: Any) -> tuple[Any, ...]:
    if torch.is_tensor(kept):
        return torch.Tensor, kept.shape, kept.dtype
    return (type(kept),)
