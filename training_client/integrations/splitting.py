"""Batches that Opacus' `BatchMemoryManager` splits: each pass begins with nothing left of another.

Its sampler tells the optimizer of each part whether to skip the step, in a queue, and the optimizer
adds parts up until one is not skipped. A pass that is given up within a batch (a framework's epoch
of `len(loader)` parts, which is an estimate; a `break`; an error) leaves a sum, and with workers
flags of parts that were drawn ahead. The next pass would add its first batch to that sum, and a
record that is in both would count twice: the step is charged as one of one batch.

So when this module is imported, a pass forgets what was left. And of two passes at the same time,
whose flags would be mixed, the first ends with an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, SupportsIndex

from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler

from training_client.errors import NoGuaranteeError


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
            raise NoGuaranteeError(
                "a part of a batch was passed over without a step, and the parts after it would be "
                "taken for those before them: call the optimizer for every part"
            )
        self._given = flags.taken + 1


def _splits(loader: Any) -> bool:
    return isinstance(getattr(loader, "batch_sampler", None), BatchSplittingSampler)


def _one_pass(sampler: Any) -> Iterator[Any]:
    """What `BatchSplittingSampler.__iter__` gives, from a fresh start."""
    flags = _forget(sampler.optimizer)
    parts = _GENUINE(sampler)
    while True:
        if sampler.optimizer._step_skip_queue is not flags:
            raise NoGuaranteeError(
                "another pass over the loader has begun, and the optimizer cannot tell which of "
                "them a part belongs to: take parts from one at a time"
            )
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


_GENUINE: Final = BatchSplittingSampler.__iter__
BatchSplittingSampler.__iter__ = _one_pass
