"""Series of datasets: data that grows, a dataset for each period, all made from one template.

The datasets of a series have one privacy unit, one neighbouring relation and equal budgets, so that
one run may be on several of them. Each is named after the series and a label, such as
`sales-2026-10`. The labels of a series have the same number of characters: in their order as texts
`2026-09` comes before `2026-10`, and the last k datasets are what everybody takes them for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger.columns import Stored
from accountant_service.ledger.errors import SeriesLabelError, SeriesTooShortError
from accountant_service.ledger.filter_names import DEFAULT_FILTER
from accountant_service.ledger.rules import NewDataset
from accountant_service.mechanisms import Mechanism
from accountant_service.numerics.floats import rounding
from accountant_service.writing.canonical_json import canonical_json, read_json


@dataclass(frozen=True, slots=True)
class Template:
    """The budget of all datasets of a series, and all else that they share; it never changes.

    Attributes:
        epsilon, delta: the budget of each dataset.
        relation: when two datasets are neighbours.
        privacy_unit: what one record stands for.
        planned_mechanism: the mechanism that each dataset's filter is chosen for, if there is one.
        filter: the name of the privacy filter.
        accept_weak: whether a budget that protects hardly anyone is wanted.

    Raises:
        WeakGuaranteeError: ε protects hardly anyone, and that was not accepted. Whether δ does
            depends on the size of each dataset.
    """

    epsilon: float
    delta: float
    relation: NeighbouringRelation
    privacy_unit: str
    planned_mechanism: Mechanism | None = None
    filter: str = DEFAULT_FILTER
    accept_weak: bool = False

    def __post_init__(self) -> None:
        """Refuse a weak ε that was not accepted."""
        self.new_dataset("example", 1)

    @property
    def example(self) -> NewDataset:
        """A dataset of one record, for which every dataset's privacy filter may be chosen."""
        return self.new_dataset("example", 1)

    def new_dataset(self, name: str, size: int) -> NewDataset:
        """Return a dataset of the series, which is to be created.

        Raises:
            WeakGuaranteeError: the budget is weak for so few records.
        """
        return NewDataset(
            name, size, self.epsilon, self.delta, self.relation, self.privacy_unit,
            self.planned_mechanism, self.filter, self.accept_weak,
        )  # fmt: skip

    def to_text(self) -> str:
        """Return the template as canonical JSON; equal templates have equal texts."""
        planned = self.planned_mechanism
        return canonical_json(
            {
                "epsilon": self.epsilon,
                "delta": self.delta,
                "neighbouring_relation": self.relation.value,
                "privacy_unit": self.privacy_unit,
                "planned_mechanism": None if planned is None else mechanisms.to_json(planned),
                "filter": self.filter,
                "accept_weak": self.accept_weak,
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Template:
        """Return the template that a row stores.

        Raises:
            KeyError, TypeError, ValueError, MechanismError: it stores none.
        """
        found: dict[str, Any] = read_json(text)
        planned = found["planned_mechanism"]
        return cls(
            float(found["epsilon"]),
            float(found["delta"]),
            NeighbouringRelation(found["neighbouring_relation"]),
            str(found["privacy_unit"]),
            None if planned is None else mechanisms.from_json(planned),
            str(found["filter"]),
            found["accept_weak"] is True,
        )


@dataclass(frozen=True, slots=True)
class Series:
    """A series of datasets.

    Attributes:
        name: unique among series and datasets.
        template: of its datasets.
        created_at: microseconds since 1970.
    """

    name: Annotated[str, Stored(length=200, is_primary=True)]
    template: Template
    created_at: int

    def name_dataset(self, label: str) -> str:
        """Return the name of the dataset with a label."""
        return f"{self.name}-{label}"

    def require_label(self, label: str, names: Iterable[str]) -> None:
        """Raise `SeriesLabelError` unless a new label has as many characters as those before it.

        Args:
            label: of a new dataset.
            names: of the datasets of the series.
        """
        for name in names:
            if len(name) != len(self.name_dataset(label)):
                known = name.removeprefix(f"{self.name}-")
                raise SeriesLabelError(
                    f"the label {label!r} must have {len(known)} characters, as {known!r} has: "
                    "labels are ordered as texts, so write 2026-09 and not 2026-9",
                    "/path/label",
                )

    def take_last(self, count: int, names: Iterable[str]) -> list[str]:
        """Return the names of the last datasets, in their order.

        Args:
            count: at least 1.
            names: of the datasets of the series.

        Raises:
            SeriesTooShortError: there are fewer datasets.
        """
        ordered = sorted(names)
        if len(ordered) < count:
            raise SeriesTooShortError(
                f"series {self.name!r} has {len(ordered)} datasets, fewer than {count}", "/last"
            )
        return ordered[-count:]


def bound_loss_in_all(budgets: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return (ε, δ) that is proved for a person with one record in each of several datasets.

    Everything ever released is (εᵢ, δᵢ)-DP in the records of dataset i, whatever the others hold
    (docs/accountants/filters.md). One dataset after the other, that is group privacy: ε = Σεᵢ, and
    δ = δ₁ + e^ε₁ δ₂ + … + e^(ε₁ + … + ε_{k−1}) δ_k. Addition of the δs alone would be wrong, as
    a run on all of them sees all of the person's records at once.

    Args:
        budgets: (ε, δ) of each dataset.

    Returns:
        Both rounded up; None if δ would be 1 or more, so that nothing is proved.
    """
    ordered = sorted(budgets, key=lambda budget: -budget[1])  # any order is proved
    total, delta = Fraction(0), 0.0
    for epsilon, each in ordered:
        if each:
            before = rounding.fraction_up(total)
            growth = rounding.up(math.exp(before)) if before < 700 else math.inf
            delta = rounding.add_rounding_up(delta, rounding.up(growth * each))
        total += rounding.as_written(epsilon)
    return (rounding.fraction_up(total), delta) if delta < 1 else None
