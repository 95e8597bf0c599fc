"""Batches for a user's training loop, drawn and loaded as the budget's plan says.

A `DataLoader` loads the records of a batch when it is drawn, so the data may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from training_client.errors import BudgetExhaustedError, DataError
from training_client.optimizers.base import PrivateOptimizer
from training_client.private_step.sampling import Sampler, sampler_for_plan

Collate = Callable[[list[Any]], Any]


def private_batches(
    optimizer: PrivateOptimizer,
    dataset: Dataset[Any],
    *,
    collate: Collate = default_collate,
    sampler: Sampler | None = None,
    workers: int = 0,
) -> Iterator[Any]:
    """Yield batches until the budget is spent; each is charged before its records are loaded.

    Make exactly one `optimizer.step` with each batch, also with an empty one: a step that is taken
    but not made ends the run.

    Args:
        optimizer: its plan says how records are drawn.
        dataset: the private records, by index; as many as the plan says.
        collate: makes a batch of a list of records; tensors have one record per row.
        sampler: draws the records; by default a new one that draws as the plan says.
        workers: processes that load records ahead; none by default.

    Yields:
        What `collate` makes of the drawn records. A batch without records has the tensors of a
        batch of one record, without rows.

    Raises:
        DataError: the dataset has no random access, no records or another number of them than the
            plan, or the sampler does not draw as the plan says.
        NoGuaranteeError: another run took steps of the same budget, a batch was not used for a
            step, or the sampler is at another place in its epoch than the optimizer.
        ServiceError: the service gave no usable answer; no batch was drawn without one.
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or len(dataset) == 0:
        raise DataError(
            "expected a dataset of records that are drawn by their index (with __len__ and "
            "__getitem__, and not empty): of a stream, no record can be drawn at random"
        )
    if len(dataset) != optimizer.plan.dataset_size:
        raise DataError(
            f"the dataset has {len(dataset)} records, the plan is charged for "
            f"{optimizer.plan.dataset_size}"
        )
    sampler = sampler_for_plan(optimizer.plan, len(dataset), sampler)
    optimizer.continue_epoch(sampler.position)
    loader = DataLoader(
        dataset,
        batch_sampler=_DrawnIndices(sampler),
        collate_fn=_CollateOrEmpty(dataset, collate),
        num_workers=workers,
    )
    batches = iter(loader)
    while True:
        try:
            optimizer.take()
        except BudgetExhaustedError:
            return
        yield next(batches)


class _DrawnIndices:
    """An endless sequence of sampled batches, each a list of record indices."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after another."""
        while True:
            yield self._sampler.draw().tolist()


class _CollateOrEmpty:
    """Collates a batch of records; without records, makes an empty batch of the same shape."""

    def __init__(self, dataset: Dataset[Any], collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, records: Sequence[Any]) -> Any:
        """Return the batch."""
        if records:
            return self._collate(list(records))
        one = self._collate([self._dataset[0]])
        one = dict(one) if isinstance(one, Mapping) else one
        return tree_map_only(torch.Tensor, lambda each: each[:0], one)
