"""Batches that Opacus' `BatchMemoryManager` splits: each pass begins with nothing left of another.

Its sampler tells the optimizer of each part whether to skip the step, in a queue, and the optimizer
adds parts up until one is not skipped. A pass that is given up within a batch (a framework's epoch
of `len(loader)` parts, which is an estimate; a `break`; an error) leaves a sum, and with workers
flags of parts that were drawn ahead. The next pass would add its first batch to that sum, and a
record that is in both would count twice: the step is charged as one of one batch.

Nor may the batch be dropped: which batch a pass ends within depends on how many records were drawn.
So when this module is imported, a pass over parts is as long as it takes for all batches; a pass
that follows one given up within a batch is refused, and so is a part whose step is left out. And of
two passes at the same time, whose flags would be mixed, the first ends with an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, SupportsIndex

from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler

from training_client.errors import NoGuaranteeError
from training_client.integrations.ahead import drawn_ahead

_PASSED_OVER: Final = (
    "a part of a batch was passed over without a step, and the parts after it would be taken for "
    "those before them: call the optimizer for every part"
)


class Flags(list[bool]):
    """Of parts whose step is still to be made, whether to skip it.

    Attributes:
        taken: how many were.
        last: that was taken.
    """

    taken = 0
    last: bool | None = None

    def pop(self, at: SupportsIndex = -1) -> bool:
        """What the optimizer does when it is asked for a step."""
        self.taken += 1
        self.last = super().pop(at)
        return self.last


def flags_of(optimizer: DPOptimizer) -> Flags | None:
    """Those of the pass that goes on; None if none has begun."""
    flags = optimizer._step_skip_queue
    return flags if isinstance(flags, Flags) else None


def ends_batch(optimizer: DPOptimizer, loader: Any) -> bool:
    """Whether a step may be made of what the loader gave last: a batch, or the last part of one.

    A loader that splits batches tells the optimizer of each part whether its step is to be skipped.
    A part of which it told nothing is not known to be the last.
    """
    return not _splits(loader) or optimizer._step_skip_queue[:1] == [False]


class Parts:
    """Parts of batches that a framework was given, each of which must have its step.

    A part that is passed over leaves its flag in the queue for the next one, and from then on steps
    end in the middle of batches.
    """

    def __init__(self) -> None:
        self._flags: object = None
        self._given = 0

    def require_each_taken(self, optimizer: DPOptimizer, loader: Any) -> None:
        """To be called when a part is given, before its step.

        Raises:
            NoGuaranteeError: the part before it had no step.
        """
        flags = flags_of(optimizer)
        if not _splits(loader) or flags is None:
            return
        if flags is not self._flags:  # of another pass
            self._flags, self._given = flags, 0
        if flags.taken < self._given:
            raise NoGuaranteeError(_PASSED_OVER)
        self._given = flags.taken + 1


def require_finished(optimizer: DPOptimizer) -> None:
    """Refuse to go on, or to claim anything, after a batch that was begun and left.

    Raises:
        NoGuaranteeError: the last part that was taken was not the last of its batch.
    """
    if optimizer._is_last_step_skipped and flags_of(optimizer) is not None:
        raise NoGuaranteeError(
            "the pass over split batches ended within a batch, whose step was left out: which one "
            "that is depends on how many records were drawn, and no noise hides that. Go through "
            "all parts, and limit epochs, not steps or batches"
        )


def require_whole_passes(loader: Any, limit: str | None) -> None:
    """Refuse a framework that counts parts of batches as batches, and ends after so many.

    Args:
        loader: of the batches.
        limit: the option that says so; None if there is none.

    Raises:
        NoGuaranteeError: the loader splits batches, and there is a limit.
    """
    if limit is not None and _splits(loader):
        raise NoGuaranteeError(
            f"{limit} counts parts of split batches, of which there are more the more records were "
            "drawn, so that the number of steps tells of them: limit epochs, or the budget"
        )


def _splits(loader: Any) -> bool:
    return isinstance(getattr(loader, "batch_sampler", None), BatchSplittingSampler)


def _one_pass(sampler: Any) -> Iterator[Any]:
    """Give what `BatchSplittingSampler.__iter__` does, from a fresh start."""
    require_finished(sampler.optimizer)
    flags, ahead = _forget(sampler.optimizer), drawn_ahead()
    parts = _GENUINE(sampler)
    while True:
        if sampler.optimizer._step_skip_queue is not flags:
            raise NoGuaranteeError(
                "another pass over the loader has begun, and the optimizer cannot tell which of "
                "them a part belongs to: take parts from one at a time"
            )
        if len(flags) > ahead:
            raise NoGuaranteeError(_PASSED_OVER)
        part = next(parts, None)
        if part is None:
            return
        yield part


def _forget(optimizer: DPOptimizer) -> Flags:
    """What an earlier pass has left: flags, a sum, gradients."""
    flags = Flags()
    optimizer._step_skip_queue, optimizer._is_last_step_skipped = flags, False
    for parameter in optimizer.params:
        parameter.grad_sample = parameter.summed_grad = None
    return flags


def _parts_at_most(sampler: Any) -> int:
    """Return how many parts there are in a pass, or more: frameworks end it after so many.

    Of T batches with R records in all there are at most T + R/m. R is binomial with mean μ, and
    above μ + 8√μ + 32 with probability 1e-13 at most, by Bernstein's inequality.
    """
    drawn = sampler.sampler
    if not hasattr(drawn, "sample_rate"):  # it does not sample by Poisson
        return int(_LENGTH(sampler))
    mean = len(drawn) * drawn.sample_rate * drawn.num_samples
    most = mean + 8 * math.sqrt(mean) + 32
    return int(len(drawn) + math.ceil(most / sampler.max_batch_size))


_GENUINE: Final = BatchSplittingSampler.__iter__
_LENGTH: Final = BatchSplittingSampler.__len__
BatchSplittingSampler.__iter__, BatchSplittingSampler.__len__ = _one_pass, _parts_at_most
