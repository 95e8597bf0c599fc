"""The only exit for private data: a clipped sum with noise.

Everything after it is post-processing, and everything before it must be known without the batch. So
this is where the budget is asked: no noisy mean is released without a step taken from it.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from training_client.budget import Allowance, FixedParts
from training_client.errors import DataError, NoGuaranteeError
from training_client.plan import Plan
from training_client.private_step import AffineMap, Block, BlockwiseSum, Clipper, Loss, Transform
from training_client.private_step.batches import (
    Examples,
    TargetLoss,
    Targets,
    by_row,
    count_examples,
    device_of,
    require_shapes,
    shapes_of,
    tensors_of,
)
from training_client.private_step.blocks import unflatten_vector
from training_client.private_step.earlier_noise import EarlierNoise, rounded_coordinates
from training_client.private_step.noise import FreshGenerator, draw_key
from training_client.private_step.processes.shared_budget import SharedBudget
from training_client.private_step.processes.single_process import require_same_process
from training_client.private_step.processes.step_processes import (
    OneProcess,
    SharedStep,
    StepProcesses,
    StepTerms,
)
from training_client.private_step.rounded_gaussian import NoiseGrid
from training_client.private_step.rounding_bounds import (
    Scalar,
    smallest_safe_factor,
    sum_share,
)
from training_client.private_step.sampling import Epoch, EpochProgress, Sampler, sampler_for_plan
from training_client.private_step.trained_parameters import TrainedParameters

LOAD_EARLIER: Final = (
    "a checkpoint would change its number. Load it into a new optimizer, before a batch is drawn"
)
_BEGIN_ANEW: Final = (
    "a record of its batch may have caused that, and noise does not hide it. Begin a new run, with "
    "a new optimizer"
)
_ASSUMED: Final = (
    "The operating system's random numbers are unpredictable, and bits of AES-256 in counter mode "
    "cannot be told from uniform ones.",
    "PyTorch and its libraries compute a record's gradient, with its rounding, alike beside other "
    "records.",
    "Matrix products and other operations compute what they are named for, each result rounded as "
    "IEEE 754 says.",
)
_COPY_LATER: Final = "a copy would release it again. Copy the optimizer between its steps"


@dataclass(frozen=True, slots=True)
class NoisyBlock:
    """One block of coordinates of the noisy mean gradient that a step releases.

    Attributes:
        block: the block.
        mean: the noisy sum of clipped u = D∘(∇ + b) over the expected batch size.
        affine: D and b on the block.
        noise_deviation: the standard deviation of the noise on each coordinate of the mean.
    """

    block: Block
    mean: torch.Tensor
    affine: AffineMap
    noise_deviation: float

    def gradient_moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Estimate the mean gradient and its square on the block; the square may be negative."""
        return self.affine.gradient_moments(self.mean, self.noise_deviation)


@dataclass(frozen=True, slots=True)
class _StepSum:
    """A step's clipped gradient sum (private), with the noise to add.

    Attributes:
        total: the clipped sum.
        grid: what the sum is rounded to, and the noise on it.
        factor: of the noisy sum, which makes it the mean.
        noise_deviation: the standard deviation of the noise on each coordinate of the mean.
        unread: the blocks whose noisy mean was not read yet; each may be read once.
    """

    total: BlockwiseSum
    grid: NoiseGrid
    factor: float
    noise_deviation: float
    unread: deque[Block]


class NoisyMean:
    """The noisy mean gradient that a step releases, readable once, block by block.

    The noise of a block is drawn when the block is read. The step is finished with the last block.

    Attributes:
        noise_deviation: the standard deviation of the noise on each coordinate of the mean.
        unclipped: the noisy number of examples that were not clipped, over the expected batch size;
            None without adaptive clipping.

    Args:
        mean_loss: the batch's mean loss.
        noise_deviation: see above.
        unclipped: see above.
        blocks: all blocks.
        parameters: the whole trained parameters.
        make_block: writes the noisy mean on a block into a tensor, and returns it as a
            `NoisyBlock`.
        trained: the trained parameters, if they may be sharded among processes.
    """

    def __init__(
        self,
        mean_loss: Scalar,
        noise_deviation: float,
        blocks: Sequence[Block],
        parameters: Sequence[torch.Tensor],
        make_block: Callable[[Block, torch.Tensor], NoisyBlock],
        unclipped: float | None = None,
        trained: TrainedParameters | None = None,
    ) -> None:
        self._mean_loss, self.noise_deviation = mean_loss, noise_deviation
        self.unclipped = unclipped
        self._blocks, self._parameters, self._make_block = blocks, parameters, make_block
        self._trained = trained

    @property
    def mean_loss(self) -> float:
        """The batch's mean loss; on an accelerator, reading it waits for the pass that computes it.

        It is without noise: for the data owner's eyes only.
        """
        return float(self._mean_loss)

    def for_each_block(self, process: Callable[[NoisyBlock], None]) -> None:
        """Compute one noisy block after another, and call `process` with each.

        Raises:
            RuntimeError: the mean has been read already.
        """
        for block in self._blocks:
            process(self._make_block(block, self._parameters[0].new_empty(block.size)))

    def to_tensors(self) -> list[torch.Tensor]:
        """Return the noisy mean, one tensor per parameter; of a sharded one, this process's rows.

        Raises:
            RuntimeError: the mean has been read already.
        """
        if self._trained is not None and self._trained.is_sharded:
            return self._to_sharded_tensors(self._trained)
        means = self._parameters[0].new_empty(sum(block.size for block in self._blocks))
        for block in self._blocks:
            self._make_block(block, block.view_in(means))
        return unflatten_vector(means, self._parameters)

    def _to_sharded_tensors(self, trained: TrainedParameters) -> list[torch.Tensor]:
        """Return the noisy mean on this process's rows; no process holds the whole of it."""
        means = [torch.empty_like(each) for each in trained.own_tensors()]

        def keep_own_rows(noisy: NoisyBlock) -> None:
            """Copy this process's rows of a block."""
            for own, values in trained.own_rows(noisy.block, noisy.mean, means):
                own.copy_(values)

        self.for_each_block(keep_own_rows)
        return trained.as_held(means)


class PrivateSum(FixedParts):
    """Releases the noisy mean of clipped gradients, once for each step that a budget covers.

    A step is open from `take` until its noisy mean was read to the end. Only the process that made
    the object releases it, not a forked one, and one thread at most.

    Attributes:
        allowance: the budget that covers the steps.
        trained: the model's trained parameters, which may be sharded among processes.
        clipper: computes the clipped sums.
        processes: the processes that make a step together.
        steps: steps that count as made, including those of an earlier run with the budget.

    Args:
        model: the model to train.
        allowance: see above; its plan says what each step does and costs.
        generator: keys of the noise are drawn from it; by default from the operating system. A
            budget with a claim takes none but a `FreshGenerator`, which stands for that.
        physical_batch_size: see `Clipper`.
        sparse_inputs: see `Clipper`.

    Raises:
        NoGuaranteeError: there is no budget, several processes train that do not share one, or the
            noise of a claim may be drawn again.
        UnsupportedModelError: a layer cannot be clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        generator: torch.Generator | None = None,
        physical_batch_size: int | None = None,
        *,
        sparse_inputs: bool = False,
    ) -> None:
        if not hasattr(allowance, "take"):
            raise NoGuaranteeError(
                f"expected a budget that covers the steps, got {type(allowance).__name__}: "
                "pass a Budget or a LedgerBudget, or NoBudget(plan, steps, reason) for steps "
                "without a privacy claim"
            )
        _require_fresh_noise(allowance, generator)
        if not _is_shared(allowance):
            OneProcess().require_usable()
        self.allowance = allowance
        model = _without_wrapper(model, allowance)
        self.trained = TrainedParameters(model, _guard_of(allowance))
        self.clipper = Clipper(
            model, physical_batch_size, sparse_inputs=sparse_inputs, trained=self.trained
        )
        self.processes = _processes_of(allowance, self.trained)
        self.processes.require_usable()
        self._device = self.clipper.parameters[0].device
        self._generator = generator
        self.steps = allowance.made
        self._process, self._lock = os.getpid(), threading.RLock()
        self._is_step_open = False  # the last step was taken, and not all of its mean was read
        self._is_batch_read = False  # the batch of that step was looked at
        self._examples_drawn: int | None = None  # for that step, if `expect_examples` was called
        banded = allowance.plan.banded_noise
        self._earlier = None if banded is None else EarlierNoise(banded)
        has_epochs = self.plan.steps_per_charge > 1  # its sampler shows that a batch was drawn
        self._needs_drawn_examples = self.processes.are_several or (
            allowance.has_claim and (not has_epochs or banded is not None)
        )
        self._shapes: list[tuple[int, ...]] | None = None  # of an example, in this run's batches
        self._sampler: EpochProgress | None = None  # draws the batches, if they have epochs
        self._epoch: Epoch | None = None  # of the batch of the last step
        allowance.assume(*_ASSUMED)
        if allowance.has_claim:
            parts = ("allowance", "trained", "clipper", "processes", "_generator", "_earlier")
            self.keep_fixed(*parts, *dir(PrivateSum))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has.

        Raises:
            NoGuaranteeError: a step is open, which the copy would release a second time.
        """
        self.require_no_open_step(_COPY_LATER)
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, for the process that made it."""
        vars(self).update(state)
        self._process, self._lock = os.getpid(), threading.RLock()

    @property
    def plan(self) -> Plan:
        """The plan of the current step: sampling, clip norm and noise."""
        return self.allowance.plan.at(self.current_step)

    @property
    def current_step(self) -> int:
        """The number of the step that is in progress, or comes next."""
        return self.steps if self._is_step_open else self.steps + 1

    def take(self) -> None:
        """Spend the next step's budget; raise if it does not fit or a step is unfinished.

        Call it before the batch is drawn: the batch is then charged, whatever becomes of it.
        Otherwise `release` takes the step.

        Raises:
            BudgetExhaustedError: the budget covers no further step.
            NoGuaranteeError: another run took the step, the step before was not finished, several
                processes train that do not share the budget, this process is a fork, or
                `continue_epoch` was not called for balls-in-bins sampling.
            ProcessLostError: another process ended or did not answer in time.
            ServiceError: no usable answer.
        """
        require_same_process(self._process)
        self.processes.require_usable()
        with self._lock:
            self.require_no_open_step(_BEGIN_ANEW)
            self._require_sampler()
            self.allowance.take(self.steps + 1)
            self.steps += 1
            self._is_step_open, self._is_batch_read = True, False
            self._examples_drawn = None

    def require_no_open_step(self, problem: str) -> None:
        """Raise if a step was taken and is not finished.

        Args:
            problem: why that is a problem here, and the way out.

        Raises:
            NoGuaranteeError: see above.
        """
        if self._is_step_open:
            raise NoGuaranteeError(
                f"step {self.steps} was taken from the budget but not finished: {problem}"
            )

    @contextmanager
    def reopened_by_errors(self) -> Iterator[None]:
        """Context manager for the use of a noisy mean: after an error, its step is unfinished.

        The batch is still in memory, so whether there is enough for the update may depend on it.
        """
        try:
            yield
        except BaseException:
            self._is_step_open = True
            raise

    def expect_examples(self, count: int) -> None:
        """Announce how many records this process drew for the step that budget was spent on.

        From then on each step needs a batch drawn for it. With a claim, no step is made without it:
        the batches of an ordinary `DataLoader` are not those that are charged. Nor do several
        processes make one, because nothing else shows that each took its own share of the records.
        """
        self._examples_drawn, self._needs_drawn_examples = count, True

    def draw(self, sampler: Sampler) -> torch.Tensor:
        """Spend the next step's budget and draw its batch; return its records' indices, ascending.

        The step must be made with as many examples. Of several processes, each gets the records i
        whose remainder i mod (number of processes) is the process's number.

        Args:
            sampler: draws as the plan says. With balls-in-bins sampling, a new one begins an epoch.

        Returns:
            The indices, on the model's device.

        Raises:
            DataError: the sampler does not draw as the plan says.
            NoGuaranteeError: the sampler of a claim draws what can be drawn again; or see `take`.
            BudgetExhaustedError, NoGuaranteeError, ServiceError: see `take` and `continue_epoch`.
        """
        with self._lock:
            sampler_for_plan(self.plan, self.plan.dataset_size, sampler, self.allowance.has_claim)
            if sampler is not self._sampler:
                self.continue_epoch(sampler)
            self.take()
            rows = sampler.draw()
            rank, processes = self.processes.share_of_records
            own = rows[rows % processes == rank]
            self.expect_examples(len(own))
        return own.to(self._device)

    def continue_epoch(self, sampler: EpochProgress) -> None:
        """Resume a sampler's epoch, or begin one with it and skip the rest of the one before.

        An epoch of balls-in-bins sampling is charged as one draw of its bins. After others are
        drawn, the steps left of it cover nothing. From now on each step needs the next batch of
        this sampler.

        Args:
            sampler: draws the batches, or shows which of them was used last.

        Raises:
            NoGuaranteeError: the sampler is in another epoch than the steps made, or at another
                place in it; or a step is unfinished.
        """
        if not hasattr(sampler, "epoch"):
            raise NoGuaranteeError(
                f"expected the sampler that draws the batches, got {sampler!r}: call "
                "continue_epoch(sampler) before its first batch"
            )
        with self._lock:
            self.require_no_open_step(_BEGIN_ANEW)
            steps = self.steps if sampler.position else self.plan.whole_charges(self.steps)
            place, epoch = steps % self.plan.steps_per_charge, sampler.epoch
            is_known = epoch is not None and (
                epoch == self._epoch or (self._epoch is None and epoch.is_restored)
            )
            if sampler.position != place or (place and not is_known):
                raise self._wrong_place(sampler, steps, place)
            self.steps, self._sampler, self._epoch = steps, sampler, epoch

    def _require_sampler(self) -> EpochProgress | None:
        """Return the sampler that draws the batches; None if they have no epochs.

        Raises:
            NoGuaranteeError: they have, and the sampler is not known.
        """
        plan = self.plan
        if plan.steps_per_charge == 1:
            return None
        if self._sampler is None:
            raise NoGuaranteeError(
                f"each step of {plan.sampling.replace('_', '-')} sampling needs the next "
                "batch of an epoch, and the sampler that draws them is not known: call "
                "continue_epoch(sampler) before its first batch, or train with private_batches"
            )
        return self._sampler

    def _require_next_batch(self) -> Epoch | None:
        """Return the epoch of the batch that the sampler drew for this step.

        Raises:
            NoGuaranteeError: the sampler drew none, several, or one of another epoch.
        """
        sampler = self._require_sampler()
        if sampler is None:
            return None
        made, length = self.current_step - 1, self.plan.steps_per_charge
        is_first, is_same = made % length == 0, sampler.epoch == self._epoch
        place = (made + 1) % length
        if sampler.position != place or is_first == is_same:
            raise self._wrong_place(sampler, made, place)
        return sampler.epoch

    def _wrong_place(self, sampler: EpochProgress, made: int, place: int) -> NoGuaranteeError:
        """Return the error of a sampler that is not at `place` in the epoch of the steps made."""
        which = "another" if sampler.position == place else "its"
        return NoGuaranteeError(
            f"the sampler drew {sampler.position} batches of {which} epoch, and {made} steps are "
            f"made, in epochs of {self.plan.steps_per_charge}: each step needs the next batch of "
            "one epoch, drawn for it by the sampler that continue_epoch was called with. Workers "
            "of private_batches draw ahead, and what its loop leaves is lost: train in one loop, "
            "or with a new sampler and continue_epoch(sampler), which begins a new epoch"
        )

    def release(
        self, examples: Examples, targets: Targets, loss: TargetLoss, transform: Transform
    ) -> NoisyMean:
        """Return the noisy mean gradient of one sampled batch; an empty batch gets the same noise.

        Raises:
            BudgetExhaustedError, NoGuaranteeError, ServiceError: see `take`; nothing was computed.
            DataError: the examples are on another device than the model, or not those drawn.
            ProcessLostError: another process ended, failed or did not answer in time.
        """
        require_same_process(self._process)
        device = device_of(examples)
        if device != self._device:
            raise DataError(
                f"the examples are on {device}, the model on {self._device}: move one of them"
            )
        with self._lock:
            drawn = self._require_drawn_batch()
            epoch = self._require_next_batch()
            if not self._is_step_open or self._is_batch_read:
                self.take()
            self._is_batch_read, self._epoch, self._examples_drawn = True, epoch, None
            plan = self.plan
        size = plan.expected_batch_size
        grid, factor = self._noise(plan, transform), transform.gain / size
        deviation = grid.noise_deviation * factor
        if self._earlier is not None:
            groups = None if epoch is None else epoch.groups
            deviation *= self._earlier.begin(self.steps, groups, grid)
        terms = StepTerms(self.steps, transform.bound, deviation)
        with self.trained.gathered():
            total, mean_loss = self.processes.clip(
                terms,
                count_examples(examples),
                partial(self._clip_drawn, drawn, examples, targets, loss, transform),
            )
        unclipped = None
        if plan.adaptive_clipping is not None and transform.counts:
            noise = plan.adaptive_clipping.count_noise
            unclipped = self._noisy_count(total.unclipped, noise) / size
        step = _StepSum(total, grid, factor, deviation, deque(self.clipper.blocks))
        return NoisyMean(
            mean_loss,
            terms.noise_deviation,
            self.clipper.blocks,
            self.clipper.parameters,
            partial(self._noisy_block, step, transform),
            unclipped,
            self.trained,
        )

    def _require_drawn_batch(self) -> int | None:
        """Return the number of records drawn for this step; None if it was not announced.

        Raises:
            NoGuaranteeError: no batch was drawn, or a step was made with it before.
        """
        if self._needs_drawn_examples and self._examples_drawn is None:
            raise NoGuaranteeError(
                f"no batch was drawn for step {self.current_step}. A batch of a DataLoader, or the "
                "same batch a second time, is not a random batch as the plan charges it. Train "
                "with private_batches(optimizer, dataset) and make one step with each batch, or "
                "draw the records of each batch with optimizer.draw(sampler)"
            )
        return self._examples_drawn

    def _noise(self, plan: Plan, transform: Transform) -> NoiseGrid:
        """Return the grid that the sum is rounded to, with the noise that the plan asks for.

        Each of several processes rounds a sum of its own, by up to √d.
        """
        processes = self.processes.share_of_records[1]
        sensitivity = transform.bound * (1 + sum_share(plan.expected_batch_size))
        return NoiseGrid.for_sum(
            plan.noise_multiplier,
            math.nextafter(sensitivity, math.inf),
            rounded_coordinates(self.clipper.size * processes**2, plan.banded_noise),
            plan.expected_batch_size,
        )

    @torch.no_grad()
    def _noisy_block(
        self, step: _StepSum, transform: Transform, block: Block, mean: torch.Tensor
    ) -> NoisyBlock:
        """Write (clipped sum + noise) / expected batch size into `mean`, for one block."""
        require_same_process(self._process)
        if not step.unread or step.unread.popleft() is not block:
            raise RuntimeError(
                "a step's noisy mean can be read once: reading it again would draw other noise for "
                "the same sum"
            )
        is_last, number = not step.unread, len(self.clipper.blocks) - len(step.unread)
        affine = transform.for_block(block)
        total = torch.empty_like(mean, dtype=torch.float64)
        step.total.write_block(block, affine, total)
        self._add_noise(total, step.grid, step.factor, mean.dtype, number)
        mean.copy_(total)
        if is_last:
            self._is_step_open = False
        return NoisyBlock(block, mean, affine, step.noise_deviation)

    def _add_noise(
        self,
        total: torch.Tensor,
        grid: NoiseGrid,
        factor: float,
        dtype: torch.dtype,
        block: int | None = None,
    ) -> None:
        """Overwrite this process's sum with (the rounded sum of all processes + noise)·`factor`.

        Several processes add up whole numbers, exactly: shares of the noise would not add up to it.

        Args:
            total: the sum, in double precision.
            grid: what it is rounded to, and the noise.
            factor: see above.
            dtype: what the result will be rounded to.
            block: the block's number, if earlier noise is to be taken back; None for a count.

        Raises:
            DataError: the noise is so small that the result may underflow.
        """
        deviation, least = grid.noise_deviation * factor, smallest_safe_factor(dtype)
        if not deviation >= least:
            raise DataError(
                f"noise of standard deviation {deviation:g} may underflow in {dtype} (at "
                f"least {least:.0e} is needed): use a larger clip norm, or a smaller sample rate"
            )
        key = draw_key(self._generator)
        earlier = None if block is None else self._earlier
        if not self.processes.are_several and earlier is None:
            grid.add_noise(total, factor, key)
            return
        shares = self.processes.share_of_records[1]
        steps = grid.round(total, shares)
        own = steps.clone()
        if earlier is not None and block is not None:
            earlier.take_back(block, steps, shares)
        if self.processes.adds_noise:
            steps += grid.draw_like(steps, key)
        if self.processes.are_several:
            self.processes.add_up(steps)
        if earlier is not None and block is not None:
            earlier.keep(block, own.sub_(steps) if self.processes.adds_noise else own)
        total.copy_(steps.mul_(grid.step * factor))

    def _noisy_count(self, count: Scalar, deviation: float) -> float:
        """Return the number of unclipped examples, over all processes, with Gaussian noise.

        It is read once per step, because the next clip norm is computed from it on the CPU.
        """
        noisy = torch.zeros(1, dtype=torch.float64, device=self._device) + count
        self._add_noise(noisy, NoiseGrid.for_count(deviation), 1.0, noisy.dtype)
        return float(noisy)

    def _clip_drawn(
        self,
        drawn: int | None,
        examples: Examples,
        targets: Targets,
        loss: TargetLoss,
        transform: Transform,
    ) -> BlockwiseSum:
        """Return a batch's clipped sum; raise unless its size is the number of `drawn` records.

        Raises:
            DataError: it has more or fewer, or examples of another shape than earlier batches.
        """
        if drawn not in (None, count := count_examples(examples)):
            raise DataError(
                f"{drawn} records were drawn, and the batch has {count} examples. Examples that "
                "share a record would give it more influence than is charged: make one example of "
                "each record, and give those to leave out a loss of 0"
            )
        rows, loss_by_row = by_row(targets, loss)
        batch = [*tensors_of(examples), *tensors_of(targets)]
        if self._shapes is not None:
            require_shapes(batch, self._shapes, "earlier ones")
        self._shapes = shapes_of(batch)
        return self.clipped_sum(examples, rows, loss_by_row, transform)

    def clipped_sum(
        self, examples: Examples, targets: torch.Tensor, loss: Loss, transform: Transform
    ) -> BlockwiseSum:
        """Return a batch's clipped sum without noise: still private, for `release` only."""
        share = sum_share(self.plan.expected_batch_size) / self.processes.share_of_records[1]
        found = self.clipper.clip(examples, targets, loss, transform, share)
        self.allowance.assume(
            *(
                f"Examples are apart, which was tested and not proved: {each}."
                for each in self.clipper.unproved
            )
        )
        return found


def _require_fresh_noise(allowance: Allowance, generator: torch.Generator | None) -> None:
    """Raise if a guarantee is claimed, and the generator of the noise may draw it twice.

    A program that gives its generator a seed draws the same noise again when it is started again,
    for example to resume a run. The difference of two such sums has no noise.

    Raises:
        NoGuaranteeError: see above.
    """
    if generator is None or isinstance(generator, FreshGenerator):
        return
    if getattr(allowance, "has_claim", True):
        raise NoGuaranteeError(
            "the noise comes from a generator that the program made. With a seed it draws the same "
            "noise when the run is resumed, and the difference of two sums has none; and anyone "
            "who knows the seed can compute it. Leave out generator, or pass FreshGenerator(device)"
            " of training_client.private_step.noise. For runs that can be repeated, use a NoBudget"
        )


def _is_shared(allowance: Allowance) -> bool:
    """Return whether several processes share a run's budget."""
    return isinstance(allowance, SharedBudget) and allowance.group.size > 1


def _processes_of(allowance: Allowance, trained: TrainedParameters) -> StepProcesses:
    """Return the processes that take the steps of a budget together."""
    if isinstance(allowance, SharedBudget) and allowance.group.size > 1:
        return SharedStep(allowance.group, trained.replicated, trained.held[0].device)
    return OneProcess()


def _guard_of(allowance: Allowance) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager for calls between the processes that share a budget."""
    if isinstance(allowance, SharedBudget) and allowance.group.size > 1:
        return allowance.group.call
    return nullcontext


def _without_wrapper(model: nn.Module, allowance: Allowance) -> nn.Module:
    """Return the model inside DistributedDataParallel if the budget is shared by processes.

    Sums are added up here, with the noise, so the wrapper's own all-reduce of gradients is not
    used.
    """
    if _is_shared(allowance) and type(model).__name__ == "DistributedDataParallel":
        inner: nn.Module = model.get_submodule("module")
        return inner
    return model
