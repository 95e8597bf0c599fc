"""Check the numbers of records that a mechanism states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, assert_never

from accountant_service.mechanisms.tree import (
    ApproximateDp,
    BallsInBins,
    BandedMatrixFactorization,
    Composed,
    DiagonalGaussian,
    DiscreteGaussian,
    DiscreteLaplace,
    DpSgd,
    Exponential,
    FixedSizeSampled,
    Gaussian,
    Gdp,
    Laplace,
    MatrixFactorization,
    Mechanism,
    Parallel,
    PermuteAndFlip,
    PoissonSampled,
    PrivacyProfile,
    PrivateSelection,
    RandomizedResponse,
    Rdp,
    Repeated,
    ShuffledReports,
    TreeAggregation,
    TruncatedLaplace,
    TruncatedPoissonSampled,
    UserLevel,
    Zcdp,
)

_WITHOUT_INNER: Final = (
    ApproximateDp,
    BandedMatrixFactorization,
    DiagonalGaussian,
    DiscreteGaussian,
    DiscreteLaplace,
    DpSgd,
    Exponential,
    Gaussian,
    Gdp,
    Laplace,
    MatrixFactorization,
    PermuteAndFlip,
    PrivacyProfile,
    RandomizedResponse,
    Rdp,
    TreeAggregation,
    TruncatedLaplace,
    Zcdp,
)


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
        mechanism: as the codec has accepted it.
        pointer: JSON pointer of the mechanism.
    """
    return _find_mismatches(dataset_size, mechanism, pointer, is_part=False)


def _find_mismatches(
    records: int, mechanism: Mechanism, pointer: str, *, is_part: bool
) -> Iterator[DatasetSizeMismatch]:
    """Yield the mismatches in a mechanism that runs on `records` records, or on part of them."""
    name, size = _stated_size(mechanism)
    if size is not None:
        may_be_fewer = is_part or name == "reports"
        if size > records or (size < records and not may_be_fewer):
            yield DatasetSizeMismatch(f"{pointer}/{name}", size, records)
    match mechanism:
        case FixedSizeSampled(_, batch_size):  # the inner mechanism runs on the sample
            records, is_part = batch_size, False
        case Parallel(mechanisms):
            is_part = is_part or len(mechanisms) > 1
    for at, inner in _list_inner(mechanism):
        yield from _find_mismatches(records, inner, pointer + at, is_part=is_part)


def _stated_size(mechanism: Mechanism) -> tuple[str, int | None]:
    """Return the field of a mechanism that states a number of records, and the number."""
    match mechanism:
        case DpSgd() | FixedSizeSampled() | TruncatedPoissonSampled():
            return "dataset_size", mechanism.dataset_size
        case ShuffledReports():
            return "reports", mechanism.reports
        case _:
            return "", None


def _list_inner(mechanism: Mechanism) -> list[tuple[str, Mechanism]]:
    """List the mechanisms directly inside a mechanism, each with its JSON pointer from there.

    Every kind is named, so that the type checker and a test find a new one that is missing.
    """
    match mechanism:
        case (
            PoissonSampled()
            | FixedSizeSampled()
            | TruncatedPoissonSampled()
            | BallsInBins()
            | UserLevel()
            | PrivateSelection()
            | ShuffledReports()
            | Repeated()
        ):
            return [("/mechanism", mechanism.mechanism)]
        case Composed() | Parallel():
            return [(f"/mechanisms/{i}", each) for i, each in enumerate(mechanism.mechanisms)]
        case _ if isinstance(mechanism, _WITHOUT_INNER):
            return []
        case _:
            assert_never(mechanism)
