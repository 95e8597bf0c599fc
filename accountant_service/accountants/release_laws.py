"""From a release to the law of its privacy loss: one table for all kinds of mechanism.

A release is a dominating pair. A row of the table says how to make the pair of one kind, which
theorem proves it, and whether two datasets attain it; no engine knows kinds. To add a kind, add its
row here, its fields to `mechanisms`, and its pair to `numerics/laws`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from accountant_service.errors import MethodNotApplicableError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.mechanisms import Atom
from accountant_service.numerics.laws.discrete_pairs import RandomizedResponsePair
from accountant_service.numerics.laws.dominating_pair import (
    BasePair,
    GaussianPair,
    LaplacePair,
    Release,
    ReleaseLaw,
)
from accountant_service.numerics.laws.fixed_size_replacement import FixedSizeReplacement
from accountant_service.numerics.laws.replaced_record import ReplacedRecord

POISSON_SOURCE: Final = "Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Theorem 11"
_REPLACED: Final = "proved in docs/accountants/pld.md, section A replaced record"
_GAUSSIAN: Final = "Balle & Wang 2018, arXiv 1805.06530v2, Theorem 8"


@dataclass(frozen=True, slots=True)
class ReleaseGroup:
    """Equal releases of a mechanism, with the noise and sample rate that accountants use.

    Attributes:
        atom: the release.
        count: number of such releases, at least 1.
        sigma: effective noise multiplier: noise over the sensitivity under the neighbouring
            relation.
        rate: probability that a given record takes part in one release.
    """

    atom: Atom
    count: int
    sigma: float
    rate: float

    def replaces_record_in(self, sampling: str, relation: NeighbouringRelation) -> bool:
        """Return whether one record of such a sample is replaced between neighbouring datasets.

        `sigma` is then that of the distance 2C between the record and its replacement.
        """
        replaced = relation is NeighbouringRelation.REPLACE_ONE
        return replaced and self.atom.sampling == sampling and self.rate < 1.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a kind of release gets its dominating pair.

    Attributes:
        law: returns the pair of a release under a relation.
        source: the publication that proves that the pair dominates the release without sampling.
        statement: what the description must mean for the proof to hold.
        unsampled_cost: returns μ² and ε of the releases of a group without sampling, if they are
            as private as a Gaussian release of this μ and a pure one of this ε.
        is_attained: whether two neighbouring datasets have this pair, so that lower bounds hold.
        relations: under which the pair is proved.
    """

    law: Callable[[ReleaseGroup, NeighbouringRelation], ReleaseLaw]
    source: str
    statement: str = "each release is dominated by a pair of one-dimensional distributions"
    unsampled_cost: Callable[[ReleaseGroup], tuple[float, float]] = lambda _: (0.0, math.inf)
    is_attained: bool = True
    relations: frozenset[NeighbouringRelation] = frozenset(NeighbouringRelation)


def dominating_pair(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of one release of the group."""
    return _KINDS[group.atom.noise].law(group, relation)


def unsampled_cost(groups: Sequence[ReleaseGroup]) -> tuple[float, float]:
    """Return μ of the Gaussian and ε of the pure releases, composed without sampling.

    The ε is infinite if another kind is among them.
    """
    costs = [_KINDS[each.atom.noise].unsampled_cost(each) for each in groups]
    squares, pure = zip(*costs, strict=True)
    return math.sqrt(math.fsum(squares)), math.fsum(pure)


def is_attained(kind: str) -> bool:
    """Return whether two neighbouring datasets attain the pair of a kind, without sampling."""
    return kind not in _KINDS or _KINDS[kind].is_attained


def hypothesis(group: ReleaseGroup, relation: NeighbouringRelation) -> tuple[str, str]:
    """Return what is assumed of a release of the group, and the source of the proof."""
    kind = _KINDS[group.atom.noise]
    if group.rate == 1.0:
        return kind.statement, kind.source
    replaced = relation is NeighbouringRelation.REPLACE_ONE
    return kind.statement, _REPLACED if replaced else POISSON_SOURCE


def require_dominating_pair(group: ReleaseGroup, relation: NeighbouringRelation) -> None:
    """Raise MethodNotApplicableError if a release has no proved pair under the relation."""
    name, sampling = group.atom.noise, group.atom.sampling
    if relation not in _KINDS[name].relations:
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for {name} under {relation}", group.atom.pointer
        )
    if name in ("gaussian", "laplace"):
        _require_pair_of_sample(group, relation)
    elif sampling == "poisson":
        _require_add_or_remove(group, relation)
    elif sampling != "none":
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for {name} with {sampling} sampling",
            group.atom.pointer,
        )


def _require_add_or_remove(group: ReleaseGroup, relation: NeighbouringRelation) -> None:
    """Refuse a Poisson-sampled release unless a record is added or removed.

    Only then the sample without the record is a neighbour of the sample with it.
    """
    if relation is not NeighbouringRelation.ADD_OR_REMOVE_ONE:
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for a Poisson-sampled {group.atom.noise} under "
            f"{relation}; use add_or_remove_one",
            group.atom.pointer,
        )


def _require_pair_of_sample(group: ReleaseGroup, relation: NeighbouringRelation) -> None:
    """Refuse Gaussian or Laplace noise on a sample whose pair is not proved."""
    sampling = group.atom.sampling
    if group.rate == 1.0:
        return
    if relation is NeighbouringRelation.REPLACE_ONE and group.atom.noise == "gaussian":
        return
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    zeroed = relation is NeighbouringRelation.ZERO_OUT_ONE and sampling == "poisson"
    if not (added or zeroed):
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for {group.atom.noise} noise and {sampling} "
            f"sampling under {relation}; use subsampled_rdp",
            group.atom.pointer,
        )
    if group.atom.noise == "laplace" and sampling == "fixed_size":
        raise MethodNotApplicableError(
            "pld has no proved dominating pair for Laplace noise on fixed-size samples",
            group.atom.pointer,
        )


def _gaussian_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the pair of a Gaussian release on any kind of sample."""
    if group.replaces_record_in("poisson", relation):
        return ReplacedRecord(0.5 / group.sigma, group.rate)  # 2C apart, each C from absence
    if group.replaces_record_in("fixed_size", relation):
        return FixedSizeReplacement(1 / group.sigma, group.rate)
    return Release(GaussianPair(1 / group.sigma), group.rate)


def _laplace_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:  # noqa: ARG001
    """Return the pair of a Laplace release, Poisson-sampled or not."""
    return Release(LaplacePair(1 / group.sigma), group.rate)


def _pair_law(
    pair: Callable[..., BasePair],
) -> Callable[[ReleaseGroup, NeighbouringRelation], ReleaseLaw]:
    """Return the law of a kind whose parameters are those of its pair under every relation."""

    def law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:  # noqa: ARG001
        parameters: tuple[Any, ...] = group.atom.parameters
        return Release(pair(*parameters), group.rate)

    return law


_KINDS: Final[Mapping[str, _Kind]] = {
    "gaussian": _Kind(
        _gaussian_law,
        _GAUSSIAN,
        unsampled_cost=lambda group: (group.count / group.sigma**2, 0.0),
    ),
    "laplace": _Kind(
        _laplace_law,
        _GAUSSIAN,
        unsampled_cost=lambda group: (0.0, group.count / group.sigma),
    ),
    "randomized_response": _Kind(
        _pair_law(RandomizedResponsePair), "Kairouz, Bonawitz & Ramage 2016, arXiv 1602.07387"
    ),
}
