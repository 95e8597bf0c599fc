"""Batches for a user's training loop, drawn and loaded as the budget's plan says.

A `DataLoader` loads the records of a batch when it is drawn, so the data may be larger than memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from training_client.errors import BudgetExhaustedError, DataError
from training_client.optimizers.base import PrivateOptimizer
from training_client.private_step.batches import require_shapes, shapes_of
from training_client.private_step.sampling import Epoch, Sampler, sampler_for_plan

Collate = Callable[[list[Any]], Any]
_RECORDS_TRIED: Final = 8  # to see whether a batch's width depends on what is in it


def private_batches(
    optimizer: PrivateOptimizer,
    dataset: Dataset[Any],
    *,
    collate: Collate = default_collate,
    sampler: Sampler | None = None,
    workers: int = 0,
) -> Iterator[Any]:
    """Yield batches until the budget is spent; each is paid for before its records are loaded.

    Make exactly one `optimizer.step` with each batch, also with an empty one: a step that is taken
    but not made ends the run.

    With a budget that several processes share, every process loops over the same dataset, and gets
    its own records of each batch: record i belongs to process i modulo their number. So no record
    is in two batches of a step, and each is in one with the probability that is charged.

    Args:
        optimizer: its plan says how records are drawn.
        dataset: the private records, by index; as many as the plan says, in every process.
        collate: makes a batch of a list of records; tensors have one record per row. A step with
            more or fewer rows than records is refused. So is a collate that pads to the longest
            record of a batch: a few records, each collated with itself, must get the first batch's
            width.
        sampler: draws the records; by default a new one that draws as the plan says.
        workers: processes that load records ahead; none by default. What they loaded ahead is lost
            when the loop ends, and with it the place in an epoch of balls-in-bins sampling.

    Yields:
        What `collate` makes of the drawn records. A batch without records has the tensors of a
        batch of one record, without rows.

    Raises:
        DataError: the dataset has no random access, no records or another number of them than the
            plan, the sampler does not draw as the plan says, or batches differ in width.
        NoGuaranteeError: another run took steps of the same budget, a batch was not used for a
            step, or the sampler is at another place in its epoch than the optimizer, or in another
            epoch.
        ServiceError: the service gave no usable answer; no batch was drawn without one.
    """
    if isinstance(dataset, DataLoader):
        raise DataError(
            "expected a dataset, got a DataLoader: its batches are not drawn as is charged. Pass "
            "its dataset, with collate= and workers= as it has them"
        )
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or len(dataset) == 0:
        raise DataError(
            "expected a dataset of records that are drawn by their index (with __len__ and "
            "__getitem__, and not empty): of a stream, no record can be drawn at random"
        )
    sampler = sampler_for_plan(optimizer.plan, len(dataset), sampler)
    drawn = _DrawnIndices(sampler, optimizer.share_of_records)
    optimizer.continue_epoch(drawn)
    loader = DataLoader(
        dataset,
        batch_sampler=drawn,
        collate_fn=_CollateOrEmpty(dataset, collate),
        num_workers=workers,
    )
    batches, is_first = iter(loader), True
    while True:
        try:
            optimizer.take()
        except BudgetExhaustedError:
            return
        batch = next(batches)
        if is_first:
            _require_same_width(batch, dataset, collate)
            is_first = False
        optimizer.expect_examples(drawn.use_next())
        yield batch


def _require_same_width(batch: Any, dataset: Any, collate: Collate) -> None:
    """Raise unless some records get the shapes of a batch when each is collated with itself."""
    size = len(dataset)
    for index in range(0, size, -(-size // _RECORDS_TRIED)):
        record = dataset[index]
        require_shapes(collate([record, record]), shapes_of(batch), "a batch of other records")


class _DrawnIndices:
    """An endless sequence of sampled batches, as lists of this process's record indices.

    Workers load batches ahead, so the sampler may have drawn more of them than are used.

    Attributes:
        epoch: the epoch of the last batch used.
        position: the number of batches used in the current epoch; 0 at its end.

    Args:
        sampler: draws from all records.
        share: the process's number, and the number of processes.
    """

    def __init__(self, sampler: Sampler, share: tuple[int, int]) -> None:
        self._sampler, (self._rank, self._processes) = sampler, share
        self.epoch, self.position = sampler.epoch, sampler.position
        self._unused = deque[tuple[int, Epoch | None, int]]()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the record indices of one batch after another."""
        while True:
            rows = self._sampler.draw()
            own = rows[rows % self._processes == self._rank].tolist()
            self._unused.append((len(own), self._sampler.epoch, self._sampler.position))
            yield own

    def use_next(self) -> int:
        """Move on to the next batch, and return its number of records."""
        size, self.epoch, self.position = self._unused.popleft()
        return size


class _CollateOrEmpty:
    """Collates records to a batch; without records, makes an empty batch of the same shape."""

    def __init__(self, dataset: Dataset[Any], collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, records: Sequence[Any]) -> Any:
        """Return the batch of these records."""
        if records:
            return self._collate(list(records))
        one = self._collate([self._dataset[0]])
        one = dict(one) if isinstance(one, Mapping) else one
        return tree_map_only(torch.Tensor, lambda each: each[:0], one)
