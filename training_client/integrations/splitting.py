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
