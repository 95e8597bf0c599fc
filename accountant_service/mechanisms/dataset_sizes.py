"""Check the dataset sizes that a mechanism states."""

from __future__ import annotations

from collections.abc import Iterator

from accountant_service.mechanisms.tree import (
    Composed,
    DpSgd,
    FixedSizeSampled,
    Mechanism,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    TruncatedPoissonSampled,
    UserLevel,
)


def find_dataset_size_mismatches(
    dataset_size: int, mechanism: Mechanism, pointer: str = ""
) -> Iterator[tuple[str, int]]:
    """Yield each `dataset_size` in a mechanism that differs from the dataset's, with a pointer.

    Args:
        dataset_size: number of records in the dataset that the mechanism runs on.
        mechanism: as the codec has accepted it.
        pointer: JSON pointer of the mechanism.
    """
    match mechanism:
        case (
            DpSgd(dataset_size=int(size))
            | FixedSizeSampled(dataset_size=size)
            | TruncatedPoissonSampled(dataset_size=size)
        ):
            if size != dataset_size:
                yield f"{pointer}/dataset_size", size
    match mechanism:
        case FixedSizeSampled(_, batch_size, inner):  # the inner mechanism runs on the sample
            yield from find_dataset_size_mismatches(batch_size, inner, f"{pointer}/mechanism")
        case (
            PoissonSampled(_, inner)
            | Repeated(_, inner)
            | UserLevel(_, inner)
            | PrivateSelection(_, inner)
        ):
            yield from find_dataset_size_mismatches(dataset_size, inner, f"{pointer}/mechanism")
        case Composed(mechanisms):
            for i, each in enumerate(mechanisms):
                yield from find_dataset_size_mismatches(
                    dataset_size, each, f"{pointer}/mechanisms/{i}"
                )
