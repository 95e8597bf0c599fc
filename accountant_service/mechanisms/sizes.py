"""The numbers of records that a mechanism says it draws its samples from."""

from __future__ import annotations

from collections.abc import Iterator

from accountant_service.mechanisms.tree import (
    Composed,
    DpSgd,
    FixedSizeSampled,
    Mechanism,
    PoissonSampled,
    Repeated,
)


def sizes_other_than(
    records: int, mechanism: Mechanism, pointer: str = ""
) -> Iterator[tuple[str, int]]:
    """Yield each `dataset_size` that is not the number of records there is, with its JSON pointer.

    Args:
        records: of the dataset that the mechanism runs on.
        mechanism: as the codec has accepted it.
        pointer: of the mechanism.
    """
    match mechanism:
        case DpSgd(dataset_size=int(size)) | FixedSizeSampled(dataset_size=size):
            if size != records:
                yield f"{pointer}/dataset_size", size
    match mechanism:
        case FixedSizeSampled(_, batch_size, inner):  # which runs on the sample
            yield from sizes_other_than(batch_size, inner, f"{pointer}/mechanism")
        case PoissonSampled(_, inner) | Repeated(_, inner):
            yield from sizes_other_than(records, inner, f"{pointer}/mechanism")
        case Composed(mechanisms):
            for i, each in enumerate(mechanisms):
                yield from sizes_other_than(records, each, f"{pointer}/mechanisms/{i}")
