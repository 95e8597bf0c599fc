"""Batches that Opacus' `BatchMemoryManager` splits into physical batches.

Its sampler tells the optimizer for each physical batch, in a queue, whether to skip the step; the
optimizer sums gradients until it need not skip. A pass that is abandoned within a batch (by a
framework that ends an epoch after `len(loader)` physical batches, which is an estimate; by `break`;
by an error) leaves a sum and, with workers, signals of prefetched physical batches. The next pass
would add its first batch to that sum, and a record in both would count twice: the step is charged
as one of one batch.

Dropping the unfinished batch is no solution, since which batch it is depends on how many records
were drawn. So importing this module changes Opacus' sampler (see `patches`): a pass ends only after
all batches; a pass that follows an unfinished batch is refused, and so is a physical batch without
a step. If two passes run at the same time, which would mix their signals, the first is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, SupportsIndex

from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler

from training_client.errors import NoGuaranteeError
from training_client.integrations.opacus.prefetching import count_prefetched_batches
from training_client.integrations.patches import replace_split_passes, reset_accumulation

_MISSING_STEP: Final = (
    "a physical batch was passed over without a step, and later ones would be mistaken for it: "
    "call the optimizer once for every physical batch"
)


class SkipQueue(list[bool]):
    """Opacus' skip signals, one per physical batch: True to accumulate, False to make a step.

    Attributes:
        taken: the number of signals that the optimizer has taken.
        last: the signal taken last; None if there is none.
    """

    taken = 0
    last: bool | None = None

    def pop(self, at: SupportsIndex = -1) -> bool:
        """Remove, count and return a skip signal; the optimizer calls this in each step."""
        self.taken += 1
        self.last = super().pop(at)
        return self.last


def find_skip_queue(optimizer: DPOptimizer) -> SkipQueue | None:
    """Return the optimizer's skip queue; None before the first pass over split batches."""
    queue = optimizer._step_skip_queue
    return queue if isinstance(queue, SkipQueue) else None


def is_end_of_batch(optimizer: DPOptimizer, loader: Any) -> bool:
    """Return whether the physical batch just loaded completes a batch, so that a step is due.

    A loader that does not split gives whole batches. One that does signals the end of a batch; a
    physical batch without a signal is not known to be the last.
    """
    return not _is_splitting(loader) or optimizer._step_skip_queue[:1] == [False]


class PhysicalBatchTracker:
    """Checks that the optimizer is called once for each physical batch.

    A physical batch without a step leaves its signal in the queue for the next one, and from then
    on steps would end in the middle of batches.
    """

    def __init__(self) -> None:
        self._queue: object = None
        self._given = 0

    def require_last_used(self, optimizer: DPOptimizer, loader: Any) -> None:
        """Raise if the optimizer was not called for the previous physical batch.

        Raises:
            NoGuaranteeError: the one before had no step.
        """
        queue = find_skip_queue(optimizer)
        if not _is_splitting(loader) or queue is None:
            return
        if queue is not self._queue:  # a new pass
            self._queue, self._given = queue, 0
        if queue.taken < self._given:
            raise NoGuaranteeError(_MISSING_STEP)
        self._given = queue.taken + 1


def require_finished_batch(optimizer: DPOptimizer) -> None:
    """Raise if the optimizer was not called for all physical batches of the last batch.

    Raises:
        NoGuaranteeError: the last physical batch used was not the last of its batch.
    """
    if optimizer._is_last_step_skipped and find_skip_queue(optimizer) is not None:
        raise NoGuaranteeError(
            "the pass over split batches ended within a batch, so its step was left out. Which "
            "batch that is depends on how many records were drawn, and no noise hides that. Use "
            "all physical batches, and limit the number of epochs, not of steps or batches"
        )


def require_no_batch_limit(loader: Any, limit: str | None) -> None:
    """Raise if a framework limits the number of batches while the loader splits batches.

    Args:
        loader: the training loader.
        limit: the option that sets the limit; None if there is none.

    Raises:
        NoGuaranteeError: the loader splits batches, and there is a limit.
    """
    if limit is not None and _is_splitting(loader):
        raise NoGuaranteeError(
            f"{limit} counts physical batches. Their number depends on how many records were "
            "drawn, so the number of steps would reveal that: limit the epochs or the budget"
        )


def _is_splitting(loader: Any) -> bool:
    """Return whether a loader splits batches into physical batches."""
    return isinstance(getattr(loader, "batch_sampler", None), BatchSplittingSampler)


def _iterate_pass(sampler: Any) -> Iterator[Any]:
    """Iterate over physical batches as Opacus does, and check that each one was used."""
    require_finished_batch(sampler.optimizer)
    queue, prefetched = SkipQueue(), count_prefetched_batches()
    reset_accumulation(sampler.optimizer, queue)
    physical_batches = _ORIGINAL_ITER(sampler)
    while True:
        if sampler.optimizer._step_skip_queue is not queue:
            raise NoGuaranteeError(
                "another pass over the loader has begun, and the optimizer cannot tell which of "
                "them a physical batch belongs to: iterate over one at a time"
            )
        if len(queue) > prefetched:
            raise NoGuaranteeError(_MISSING_STEP)
        physical_batch = next(physical_batches, None)
        if physical_batch is None:
            return
        yield physical_batch


def _physical_batches_max(sampler: Any) -> int:
    """Return an upper bound on the number of physical batches in one pass over the data.

    T batches with R records in all have at most T + R/m physical batches. R is binomial with mean
    μ, and above μ + 8√μ + 32 with probability 1e-13 at most, by Bernstein's inequality.
    """
    drawn = sampler.sampler
    if not hasattr(drawn, "sample_rate"):  # not Poisson sampling
        return int(_ORIGINAL_LEN(sampler))
    mean = len(drawn) * drawn.sample_rate * drawn.num_samples
    records_max = mean + 8 * math.sqrt(mean) + 32
    return int(len(drawn) + math.ceil(records_max / sampler.max_batch_size))


_ORIGINAL_ITER: Final = BatchSplittingSampler.__iter__
_ORIGINAL_LEN: Final = BatchSplittingSampler.__len__
replace_split_passes(_iterate_pass, _physical_batches_max)
