"""The base class of private optimizers.

A step is: transform, clip, sum, add noise, divide by the expected batch size, update.
Only `private_step.private_sum` handles private data. A subclass says what is clipped, from its
state before the step (`transform`), and what to do with the noisy mean (`update`): both are
post-processing of noisy sums, unless the state is made of other gradients (`source`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Final, NoReturn

import torch
from torch import nn

from training_client.budget import (
    BEFORE,
    CHARGED,
    CLAIM,
    NO_CLAIM,
    RESERVATIONS,
    Allowance,
    FixedParts,
    NoBudget,
    require_known_claim,
    require_same_charge,
)
from training_client.errors import DataError, NoGuaranteeError
from training_client.optimizers.state_source import (
    NoisySource,
    PublicSource,
    StateSource,
    StepContext,
)
from training_client.plan import AdaptiveClipping, Plan, Schedule
from training_client.private_step import Block, Transform
from training_client.private_step.batches import Examples, TargetLoss, Targets
from training_client.private_step.private_sum import LOAD_EARLIER, PrivateSum
from training_client.private_step.sampling import EpochProgress, Sampler

SOURCE: Final = "state_source"  # the key of what the state in a checkpoint is made of
_CHECKPOINT_KEYS: Final[dict[str, type]] = {  # that the claim rests on, and their values' types
    CLAIM: str,
    SOURCE: str,
    CHARGED: str,
    BEFORE: list,
    RESERVATIONS: list,
}


class PrivateOptimizer(FixedParts, ABC):
    """Base of private optimizers: clip per-example gradients, add noise, update parameters.

    Each step is taken from the budget before anything is computed from its batch. Under a claim
    nothing that this class defines can be replaced.

    Attributes:
        allowance: the budget that covers the steps.
        trained: the trained parameters, which `fully_shard` may have sharded among processes.
        parameters: the trained parameters, as the model holds them between steps.
        blocks: the blocks that their coordinates are cut into.
        size: the number of their coordinates.
        learning_rate: η; it may be changed between steps, as a schedule does.

    Args:
        model: the model to train.
        allowance: a `Budget` or `LedgerBudget`; a `NoBudget` for steps without a privacy claim.
        source: source of the gradients that update the state; the noisy ones by default.
        generator: draws the noise, on the model's device; by default the operating system seeds it.
            Only a `NoBudget` may have another one than a `FreshGenerator`.
        physical_batch_size: examples per forward pass; the whole batch by default.
        sparse_inputs: declare that most input values are 0; see `Clipper`.
        automatic_clipping: γ > 0, to normalise each gradient to C·∇/(‖∇‖ + γ) instead of clipping
            it; None to clip.

    Raises:
        ValueError: automatic and adaptive clipping together.
        NoGuaranteeError: the state is made of raw gradients, which no budget can account for,
            several processes train that do not share the budget, or the noise of a claim may be
            drawn again.
        UnsupportedModelError: a layer cannot be clipped.
    """

    state_attributes: ClassVar[tuple[str, ...]] = ()  # the keys of `state_dict`
    learning_rate: float

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        *,
        source: StateSource | None = None,
        generator: torch.Generator | None = None,
        physical_batch_size: int | None = None,
        sparse_inputs: bool = False,
        automatic_clipping: float | None = None,
    ) -> None:
        adaptive = allowance.plan.adaptive_clipping if hasattr(allowance, "plan") else None
        _check_automatic_clipping(automatic_clipping, adaptive)
        self.automatic_clipping = automatic_clipping
        self.clip_factor = 1.0  # of the plan's clip norm, with adaptive clipping
        self.source, self.allowance = source or NoisySource(), allowance
        self.private_sum = PrivateSum(
            model, allowance, generator, physical_batch_size, sparse_inputs=sparse_inputs
        )
        if not (self.source.proven or isinstance(allowance, NoBudget)):
            raise NoGuaranteeError(
                f"state {self.source.state!r} is made of private gradients without noise, which no "
                "theorem covers: train with a NoBudget, which claims nothing"
            )
        self.trained = self.private_sum.trained
        self.parameters = self.trained.held
        self.blocks = self.private_sum.clipper.blocks
        self.size = self.private_sum.clipper.size
        if allowance.has_claim:
            self.keep_fixed(*(vars(self).keys() - {"clip_factor"}), *dir(PrivateOptimizer))

    @property
    def plan(self) -> Plan:
        """The plan of the next step: sample rate, clip norm and noise."""
        return self.private_sum.plan

    @property
    def steps_made(self) -> int:
        """The number of steps taken so far."""
        return self.private_sum.steps

    @property
    def unproved(self) -> tuple[str, ...]:
        """The model's operations that were only tested to keep examples apart, each with its line.

        `privacy.json` names them.
        """
        return self.private_sum.clipper.unproved

    @property
    def share_of_records(self) -> tuple[int, int]:
        """This process's number, and the number of processes that divide the records."""
        return self.private_sum.processes.share_of_records

    @property
    def is_first_process(self) -> bool:
        """True in the one process that writes files, among those that share the budget."""
        return self.share_of_records[0] == 0

    @property
    def param_groups(self) -> NoReturn:
        """Raise, so that tools for PyTorch optimizers, such as GradScaler, refuse this one.

        Raises:
            NoGuaranteeError: always.
        """
        raise NoGuaranteeError(
            "a private optimizer has no param_groups. A GradScaler skips a step where one record's "
            "gradient is infinite, which no noise hides: call step() without it, and train in "
            "float32, or under torch.autocast in bfloat16"
        )

    def take(self) -> None:
        """Spend the next step's budget; call it before drawing the batch.

        `step` charges it otherwise.

        Raises:
            BudgetExhaustedError: the budget covers no further step.
            NoGuaranteeError: another run took the step, the step before was not finished, or
                several processes train that do not share the budget.
            ProcessLostError: another process ended or did not answer in time.
            ServiceError: no usable answer; no batch may be used.
        """
        self.private_sum.take()

    def expect_examples(self, count: int) -> None:
        """Announce how many records were drawn for the step; `private_batches` calls it.

        Call it yourself only if you draw batches by means of your own: the claim then rests on
        your word that each was drawn as the plan says.
        """
        self.private_sum.expect_examples(count)

    def draw(self, sampler: Sampler) -> torch.Tensor:
        """Spend the next step's budget and draw its batch; return its records' indices, ascending.

        `private_batches` does this and loads the records. Several processes each get their own
        share of the batch.

        Args:
            sampler: draws as the plan says. With balls-in-bins sampling, a new one begins an epoch.

        Returns:
            The indices, on the model's device; the step must be made with as many examples.

        Raises:
            DataError: the sampler does not draw as the plan says.
            BudgetExhaustedError, NoGuaranteeError, ProcessLostError, ServiceError: see `take` and
                `continue_epoch`; nothing was drawn.
        """
        return self.private_sum.draw(sampler)

    def continue_epoch(self, sampler: EpochProgress) -> None:
        """Resume a sampler's epoch, or begin one with it; call it before drawing its batches.

        With balls-in-bins sampling, each step then needs the next batch of this sampler.

        Raises:
            NoGuaranteeError: the epoch, or the place in it, is not that of the steps made.
        """
        self.private_sum.continue_epoch(sampler)

    def step(self, examples: Examples, targets: Targets, loss: TargetLoss) -> float:
        """Make one private step on a sampled batch; return the batch's mean loss.

        An empty batch gets noise all the same.

        Args:
            examples: a tensor, or a dictionary of tensors that become the model's keyword
                arguments; one example per row of the first dimension.
            targets: a tensor, or a dictionary of tensors, with one row per example.
            loss: maps the model's output and targets to one loss per example.

        Returns:
            The batch's mean loss, for the data owner's eyes only.

        Raises:
            BudgetExhaustedError, NoGuaranteeError, ServiceError: see `take`; nothing was computed.
            DataError: the examples are on another device than the model, or not those drawn.
            ProcessLostError: another process ended, failed or did not answer in time.
        """
        plan, step = self.plan, self.private_sum.current_step
        self.prepare(loss)
        with torch.no_grad():
            transform = self._complete(self.transform(), plan)
        is_ball = transform.bound == plan.clip_norm * self.clip_factor
        noisy_mean = self.private_sum.release(examples, targets, loss, transform)
        clipper, size = self.private_sum.clipper, plan.expected_batch_size
        context = StepContext(
            noisy_mean, clipper, examples, targets, loss, size, self.private_sum.processes
        )
        scaled = self._scaled_learning_rate(plan.learning_rate_schedule, step)
        with torch.no_grad(), self.private_sum.reopened_by_errors(), scaled:
            self.update(context)
        self._adapt_clip_norm(plan.adaptive_clipping, noisy_mean.unclipped, is_ball)
        return noisy_mean.mean_loss

    @property
    def clip_norm(self) -> float:
        """The clip norm of the next step, scheduled or adapted."""
        return self.plan.clip_norm * self.clip_factor

    def _complete(self, transform: Transform, plan: Plan) -> Transform:
        """Add automatic clipping, or the count of unclipped examples, to a step's transform."""
        if self.automatic_clipping is not None:
            return transform.automatic(self.automatic_clipping)
        if plan.adaptive_clipping is not None:
            return replace(transform, counts=True)
        return transform

    @contextmanager
    def _scaled_learning_rate(self, schedule: Schedule | None, step: int) -> Iterator[None]:
        """Context manager: multiply the learning rate by the schedule's factor for a step."""
        if schedule is None:
            yield
            return
        rate = self.learning_rate
        self.learning_rate = rate * schedule.at(step)
        try:
            yield
        finally:
            self.learning_rate = rate

    def _adapt_clip_norm(
        self, clipping: AdaptiveClipping | None, unclipped: float | None, is_ball: bool
    ) -> None:
        """For clipping to a ball, adapt its norm to the noisy fraction of unclipped examples."""
        if clipping is not None and unclipped is not None and is_ball:
            self.clip_factor = clipping.next_factor(self.clip_factor, unclipped)

    def zeros(self) -> torch.Tensor:
        """Return a flat vector of zeros, one per trained coordinate, to use as state."""
        return self.private_sum.clipper.zeros()

    def descend(self, block: Block, direction: torch.Tensor, rate: float) -> None:
        """Subtract `rate` times `direction` from the parameters on a block of coordinates.

        Args:
            block: the block.
            direction: one value per coordinate of the block.
            rate: the learning rate.
        """
        for own, values in self.trained.own_rows(block, direction):
            own.sub_(values, alpha=rate)

    def prepare(self, loss: TargetLoss) -> None:
        """Update the state from public examples before a batch is clipped; by default do nothing.

        It sees no private record, so what it computes is public. If the step is then refused, the
        state is one public gradient ahead.
        """

    def transform(self) -> Transform:
        """Return how the next step scales and clips per-example gradients; by default it clips."""
        return Transform(self.clip_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the optimizer keeps from step to step, for a checkpoint."""
        own = {name: getattr(self, name) for name in self.state_attributes}
        return own | self.shared_state()

    def shared_state(self) -> dict[str, Any]:
        """Return what all optimizers keep.

        It is the steps made, what a claim about them rests on, what the state is made of, and the
        state of adaptive clipping.
        """
        found = {"steps_made": self.steps_made, **self._checkpoint_keys}
        return found | ({"clip_factor": self.clip_factor} if self._adapts_clipping else {})

    @property
    def _checkpoint_keys(self) -> dict[str, Any]:
        """The entries of a checkpoint that a claim rests on."""
        return {SOURCE: self.source.state, **self.allowance.checkpoint_keys()}

    @property
    def _adapts_clipping(self) -> bool:
        """True if the clip norm is adapted from step to step."""
        return self.allowance.plan.adaptive_clipping is not None

    def load_shared_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Restore what `shared_state` returned; return the rest, of this kind of optimizer.

        A budget without a ledger counts the checkpoint's steps as made. A ledger has its own count.

        Raises:
            DataError: the checkpoint has adaptive clipping and the plan has not, or the other way
                round; or the number of steps is no integer.
            NoGuaranteeError: the checkpoint's steps were made under another plan or reservation or
                after other releases, or the ledger has granted fewer of them; or, under a claim,
                the checkpoint has none, does not say so, or has state of raw gradients.
        """
        self.private_sum.require_no_open_step(LOAD_EARLIER)
        rest, own = dict(state), self._checkpoint_keys
        made = rest.pop("steps_made", 0)
        saved = {key: rest.pop(key) for key in _CHECKPOINT_KEYS if key in rest}
        for key, value in {"steps_made": made, **saved}.items():
            if not isinstance(value, _CHECKPOINT_KEYS.get(key, int)):
                raise DataError(f"the checkpoint is not one of this optimizer: {key} is {value!r}")
        if ("clip_factor" in state) != self._adapts_clipping:
            raise DataError(
                "the checkpoint and the plan do not agree on adaptive clipping: resume with the "
                "plan of the run that wrote it"
            )
        require_known_claim(saved, own)
        _require_proven_state(saved, own)
        require_same_charge(saved, made, own)
        if made > self.steps_made:
            self.private_sum.steps = max(self.steps_made, self.allowance.count_resumed(made))
        self.clip_factor = float(rest.pop("clip_factor", 1.0))
        return rest

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        For a new run that begins with the state of another, remove `steps_made` from it, and give
        the other run's mechanism to the budget (`before`), so that the claim covers it too.

        Raises:
            DataError: another optimizer or model returned it.
            NoGuaranteeError: the checkpoint's steps were made under another plan or reservation or
                after other releases, or the ledger has granted fewer of them.
        """
        state = self.load_shared_state(state)
        if set(state) != set(self.state_attributes):
            raise DataError(
                f"the checkpoint has optimizer state {sorted(state)}, but this optimizer has "
                f"{sorted(self.state_attributes)}: resume with the optimizer that wrote it"
            )
        for name, value in state.items():
            require_same_kind(name, value, getattr(self, name))
        for name, value in state.items():
            if torch.is_tensor(value):  # a copy, wherever the model is now
                value = value.to(getattr(self, name).device, copy=True)
            setattr(self, name, value)

    @abstractmethod
    def update(self, step: StepContext) -> None:
        """Update the parameters and the optimizer's state from the step's noisy mean gradient."""


def _require_proven_state(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise if a guarantee is claimed, and a checkpoint's state leaks what no noise hides.

    Raises:
        NoGuaranteeError: its state is made of raw gradients, or of what this optimizer does not
            know.
    """
    known = {NoisySource.state, PublicSource.state, own[SOURCE]}
    if own[CLAIM] != NO_CLAIM and saved.get(SOURCE, own[SOURCE]) not in known:
        raise NoGuaranteeError(
            f"the checkpoint's state is made of {saved[SOURCE]} gradients, which no budget can "
            "account for: begin with a new optimizer, and with parameters that no private record "
            "has changed; or continue the run with a NoBudget"
        )


def _check_automatic_clipping(stability: float | None, adaptive: AdaptiveClipping | None) -> None:
    """Raise unless `stability` (γ) is positive and finite, and adaptive clipping is off.

    Raises:
        ValueError: see above.
    """
    if stability is None:
        return
    if not 0 < stability < math.inf:
        raise ValueError(f"expected a finite automatic_clipping > 0, got {stability}")
    if adaptive is not None:
        raise ValueError(
            "automatic clipping has no threshold to adapt: leave out automatic_clipping, or the "
            "plan's adaptive_clipping"
        )


def require_same_kind(name: str, given: Any, own: Any) -> None:
    """Raise unless a checkpoint's value has the same type and shape as the optimizer's own.

    Raises:
        DataError: the types differ, or the tensors' shapes or dtypes.
    """
    if _kind(given) != _kind(own):
        raise DataError(
            f"{name!r} in the checkpoint is of another model or version: expected {_kind(own)}, "
            f"got {_kind(given)}"
        )


def _kind(value: Any) -> tuple[Any, ...]:
    """Return a value's type; for a tensor also its shape and dtype."""
    if torch.is_tensor(value):
        return torch.Tensor, value.shape, value.dtype
    return (type(value),)
