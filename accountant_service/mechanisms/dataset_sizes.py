"""Check the numbers of records that a mechanism states.

Nothing here lists the kinds: a number of records is found by the name of its field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from accountant_service.mechanisms.kinds import FixedSizeSampled, Mechanism, Parallel

_MAY_BE_FEWER: Final = {  # each field that states a number of records; whether some may be left out
    "dataset_size": False,
    "reports": True,
}


@dataclass(frozen=True, slots=True)
class DatasetSizeMismatch:
    """A number of records that a mechanism states, and that its dataset does not have.

    Attributes:
        pointer: JSON pointer of the stated number.
        stated: the stated number.
        records: the number of records of the dataset, or of the sample, that the release runs on.
    """

    pointer: str
    stated: int
    records: int

    @property
    def is_overstated(self) -> bool:
        """Return whether the release may cost more than it states.

        A smaller number of records costs more: batches of the same size are a larger share, and
        fewer reports hide each other less.
        """
        return self.stated > self.records


def find_dataset_size_mismatches(
    dataset_size: int, mechanism: Mechanism, pointer: str = ""
) -> Iterator[DatasetSizeMismatch]:
    """Yield the numbers of records in a mechanism that contradict the dataset's.

    `dataset_size` must be that of the dataset. The records of one of several parallel parts are
    not known: they are at most those of the dataset. The same holds for `reports`, because some
    people may send none.

    Args:
        dataset_size: number of records in the dataset that the mechanism runs on.
        mechanism: as it was read from JSON.
        pointer: JSON pointer of the mechanism.
    """
    return _find_mismatches(dataset_size, mechanism, pointer, is_part=False)


def _find_mismatches(
    records: int, mechanism: Mechanism, pointer: str, *, is_part: bool
) -> Iterator[DatasetSizeMismatch]:
    """Yield the mismatches in a mechanism that runs on `records` records, or on part of them."""
    for name, may_be_fewer in _MAY_BE_FEWER.items():
        size = getattr(mechanism, name, None)
        if size is not None and (
            size > records or (size < records and not (is_part or may_be_fewer))
        ):
            yield DatasetSizeMismatch(f"{pointer}/{name}", size, records)
    match mechanism:
        case FixedSizeSampled(_, batch_size):  # the inner mechanism runs on the sample
            records, is_part = batch_size, False
        case Parallel(mechanisms):
            is_part = is_part or len(mechanisms) > 1
    for at, inner in mechanism.inner():
        yield from _find_mismatches(records, inner, pointer + at, is_part=is_part)
