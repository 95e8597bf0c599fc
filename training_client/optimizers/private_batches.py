"""Batches for a user's training loop, drawn and loaded as the budget's plan says.

A `DataLoader` loads the records of a batch when it is drawn, so the data may be larger than memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from training_client.errors import BudgetExhaustedError, DataError
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.record_groups import require_unit
from training_client.private_step.batches import require_shapes, shapes_of
from training_client.private_step.model_state import RandomStates
from training_client.private_step.sampling import (
    Epoch,
    Sampler,
    describe_choice,
    sampler_for_plan,
)

Collate = Callable[[list[Any]], Any]
_RECORDS_TRIED: Final = 8  # to see whether rows depend on what else is in their batch
_RANDOM_REPETITIONS: Final = 4  # of that, if a batch depends on random numbers


def private_batches(
    optimizer: PrivateOptimizer,
    dataset: Dataset[Any],
    *,
    collate: Collate = default_collate,
    sampler: Sampler | None = None,
    workers: int = 0,
    device: torch.device | str | None = None,
) -> Iterator[Any]:
    """Yield batches until the budget is spent; each is paid for before it is yielded.

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
            record of a batch, or lets a record change the rows of others: a few records are
            collated with themselves and with one another to find out.
        sampler: draws the records; by default a new one that draws as the plan says.
        workers: processes that load records ahead; none by default. What they loaded ahead is lost
            when the loop ends, and with it the place in an epoch of balls-in-bins sampling.
        device: where batches are copied to; by default they stay where `collate` makes them. For a
            CUDA device `collate` must make new tensors on the CPU, which are pinned in memory. The
            next batch is loaded before a batch is yielded, and copied while its step runs. If it
            cannot be loaded, the step before is charged and not made. What was copied ahead is lost
            like what workers loaded.

    Yields:
        What `collate` makes of the drawn records. A batch without records has the tensors of a
        batch of one record, without rows.

    Raises:
        DataError: the dataset has no random access, no records or another number of them than the
            plan, the sampler does not draw as the plan says, batches differ in width, or a
            record's row depends on the other records of its batch.
        NoGuaranteeError: another run took steps of the same budget, a batch was not used for a
            step, the sampler is at another place in its epoch than the optimizer, or in another
            epoch, or a ledger's budget is for another unit than the dataset (`PersonDataset`).
        ServiceError: the service gave no usable answer; no batch is yielded without one.
    """
    if isinstance(dataset, DataLoader):
        raise DataError(
            "expected a dataset, got a DataLoader: its batches are not drawn as is charged. "
            f"{_describe_sampler(dataset)} Pass its dataset, with collate= and workers= as it has "
            "them"
        )
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or len(dataset) == 0:
        raise DataError(
            "expected a dataset of records that are drawn by their index (with __len__ and "
            "__getitem__, and not empty): of a stream, no record can be drawn at random"
        )
    has_claim = optimizer.allowance.has_claim
    sampler = sampler_for_plan(optimizer.plan, len(dataset), sampler, has_claim)
    require_unit(optimizer.allowance, dataset)
    drawn = _DrawnIndices(sampler, optimizer.share_of_records)
    optimizer.continue_epoch(drawn)
    loader = DataLoader(
        dataset,
        batch_sampler=drawn,
        collate_fn=_CollateOrEmpty(dataset, collate),
        num_workers=workers,
        pin_memory=_is_on_cuda(device),
    )
    batches, is_first = _moved(loader, device), True
    while True:
        try:
            optimizer.take()
        except BudgetExhaustedError:
            return
        batch = next(batches)
        if is_first:
            _check_collate(batch, dataset, collate)
            is_first = False
        optimizer.expect_examples(drawn.use_next())
        yield batch


def _describe_sampler(loader: DataLoader[Any]) -> str:
    """Return how a loader's sampler chooses records, which would be lost with the loader."""
    records = loader.dataset
    inner = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
    if isinstance(records, IterableDataset) or not isinstance(records, Sized):
        return "Its records are a stream."
    return describe_choice(inner, len(records))


def _is_on_cuda(device: torch.device | str | None) -> bool:
    """Return whether a device is one of CUDA: pinned memory is copied there beside a step."""
    return device is not None and torch.device(device).type == "cuda"


def _moved(loader: DataLoader[Any], device: torch.device | str | None) -> Iterator[Any]:
    """Iterate over an endless loader's batches, copied to a device unless it is None."""
    if device is None:
        return iter(loader)
    if _is_on_cuda(device):
        return _copied_ahead(iter(loader), torch.device(device))
    return (_copy(batch, device) for batch in loader)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield endless batches on a CUDA device; copy each while the step of the one before runs.

    Copies have a stream of their own. A batch is yielded when it has been copied, so that any
    stream may use it. Its memory is used again only after the stream that is current now has done
    what was given to it while the batch was held.
    """
    copies: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy_next() -> tuple[Any, torch.cuda.Event]:
        """Begin to copy the next batch; return it, and an event that waits for the copy."""
        batch = next(batches)
        with torch.cuda.stream(copies):
            copied = _copy(batch, device, non_blocking=True)
            return copied, copies.record_event()

    ahead = copy_next()
    while True:
        batch, copied = ahead
        ahead = copy_next()
        copied.synchronize()  # it began a step ago
        for each in _tensors(batch):
            each.record_stream(torch.cuda.current_stream(each.device))
        yield batch


def _copy(batch: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """Return a batch with its tensors on a device."""
    return tree_map_only(
        torch.Tensor, lambda each: each.to(device, non_blocking=non_blocking), _as_tree(batch)
    )


def _check_collate(batch: Any, dataset: Any, collate: Collate) -> None:
    """Raise if `collate` makes of some records what depends on the other records of their batch.

    Each is collated with itself: its width must be that of the batch. Its row beside another record
    must then be the same, with the same random numbers.

    Raises:
        DataError: a width or a row depends on the other records, or on numbers that nobody can
            draw again.
    """
    size = len(dataset)
    indices = range(0, size, -(-size // _RECORDS_TRIED))
    records = [dataset[index] for index in indices]
    for _ in range(_RANDOM_REPETITIONS):
        is_random = False
        for index, record in zip(indices, records, strict=True):
            states = RandomStates(torch.device("cpu"), all_generators=True)
            alone = _tensors(collate([record, record]))
            end = RandomStates(torch.device("cpu"), all_generators=True)
            is_random |= end != states
            require_shapes(alone, shapes_of(batch), "a batch of other records")
            for beside, place in (([record, record], 0), ([record, records[0]], 0),
                                  ([records[0], record], 1)):  # fmt: skip
                states.restore()
                found = _tensors(collate(beside))
                if _are_equal(_rows(alone, place), _rows(found, place)):
                    continue
                if beside[0] is beside[1]:
                    raise DataError(
                        "collate draws random numbers from a generator of its own, so that nobody "
                        "can tell whether the rows of a batch depend on each other: draw them from "
                        "torch, random or numpy.random"
                    )
                if place and RandomStates(torch.device("cpu"), all_generators=True) != end:
                    continue  # the record before drew more of them, or fewer
                raise DataError(
                    f"the values that collate returns for record {index} depend on the record "
                    "beside it: one record would change the examples of others, and clipping does "
                    "not bound that. Compute each row from its own record, and use each record once"
                )
            end.restore()  # so that other numbers are drawn for the next record
        if not is_random:
            return


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch of any structure."""
    return [each for each in tree_leaves(_as_tree(batch)) if isinstance(each, torch.Tensor)]


def _as_tree(batch: Any) -> Any:
    """Return a batch whose tensors PyTorch finds: a mapping of any class becomes a dictionary."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _rows(pair: list[torch.Tensor], place: int) -> list[torch.Tensor]:
    """Return the row at a place in the tensors of a batch of two records that have two rows."""
    return [each[place] for each in pair if each.dim() and len(each) == 2]


def _are_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether two lists hold the same tensors; NaN equals NaN."""
    return len(ones) == len(others) and all(
        one.shape == other.shape
        and bool(((one == other) | ((one != one) & (other != other))).all())
        for one, other in zip(ones, others, strict=True)
    )


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
        one = _as_tree(self._collate([self._dataset[0]]))
        return tree_map_only(torch.Tensor, lambda each: each[:0], one)
