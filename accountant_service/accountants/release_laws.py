"""From a release to the law of its privacy loss: one table for all kinds of mechanism.

A release is a dominating pair. A row of the table says how to make the pair of one kind, which
theorem proves it, and whether two datasets attain it; no engine knows kinds. To add a kind, add its
row here, its fields to `mechanisms`, and its pair to `numerics/laws`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from accountant_service.errors import MethodNotApplicableError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.mechanisms import Atom
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.laws import private_selection
from accountant_service.numerics.laws.balls_in_bins import BallsInBins
from accountant_service.numerics.laws.bounded_range import BoundedRangePair
from accountant_service.numerics.laws.discrete_pairs import (
    ApproximatePair,
    DiscreteGaussianPair,
    DiscreteLaplacePair,
    RandomizedResponsePair,
)
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    BasePair,
    GaussianPair,
    LaplacePair,
    Release,
    ReleaseLaw,
)
from accountant_service.numerics.laws.fixed_size_replacement import (
    FixedSizePairReplacement,
    FixedSizeReplacement,
)
from accountant_service.numerics.laws.profile_pair import ProfilePair, RenyiPair
from accountant_service.numerics.laws.replaced_laplace import ReplacedLaplacePair
from accountant_service.numerics.laws.replaced_person import ReplacedPersonPair
from accountant_service.numerics.laws.replaced_record import ReplacedRecord
from accountant_service.numerics.laws.revealed_sample import RevealedSamplePair
from accountant_service.numerics.laws.several_records import SeveralRecordsPair
from accountant_service.numerics.laws.shuffled_reports import ShuffledReportsPair
from accountant_service.numerics.laws.truncated_laplace import TruncatedLaplacePair
from accountant_service.numerics.laws.truncated_poisson import truncated_poisson_law

POISSON_SOURCE: Final = "Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Theorem 11"
_REPLACED: Final = "proved in docs/accountants/pld.md, section A replaced record"
_CHANGED: Final = "proved in docs/accountants/kinds.md, section Records changed in place"
BINS_NOISE_MIN: Final = 0.25  # below it a known bin is assumed
BINS_NOISE_MAX: Final = 100.0  # above it the cells of the sum are too narrow
_GAUSSIAN: Final = "Balle & Wang 2018, arXiv 1805.06530v2, Theorem 8"
_AMPLIFIED_MAX: Final = 700  # e^ε is a double
RATE_MIN: Final = 1e-30  # smaller products of sample rates are rounded up to it
_CONVERSION: Final = (
    "Canonne, Kamath & Steinke 2020, arXiv 2004.00010v7, Proposition 12; worst pair of a profile: "
    "Zhu, Dong & Wang 2022, arXiv 2106.08567v4"
)
_GIVEN: Final = "the release has {} as described, and nothing else is known of it"
_ONE_INTEGER: Final = "the noise is added to one integer, which a neighbour changes by at most Δ"


@dataclass(frozen=True, slots=True)
class ReleaseGroup:
    """Equal releases with their count, noise and sample rate, as accounting methods use them.

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
        """Return whether batches are drawn by `sampling` and neighbours replace one record.

        `sigma` is then that of the distance 2C between the record and its replacement.
        """
        replaced = relation is NeighbouringRelation.REPLACE_ONE
        return replaced and self.atom.sampling == sampling and self.rate < 1.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """A noise's dominating pair: how it is built for a release, and its proof.

    Attributes:
        law: returns the pair of a release under a relation.
        source: the publication that proves that the pair dominates the release without sampling.
        statement: what the description must mean for the proof to hold.
        unsampled_cost: returns μ² and ε of the releases of a group without sampling, if they are
            as private as a Gaussian release of this μ and a pure one of this ε. A rational ε is
            exact, or was rounded up.
        is_attained: whether two neighbouring datasets have this pair, so that lower bounds hold.
        is_personal: whether the description may mean one answer of each person. On a sample it may
            then be visible who answered, or it may not: under every relation the pair of a Poisson
            sample is that of a revealed sample, and it is an upper bound only.
        relations: under which the pair is proved.
        pairs: returns the number of such pairs whose composition dominates one release.
        samples_itself: whether `source` covers the kind's sampling.
        can_be_sampled: whether the pair stays dominating on a Poisson sample. The proof needs a
            release whose meaning does not depend on the number of records.
        is_renyi_curve: whether the releases of such kinds are added as Rényi curves, which is
            tighter than composing their pairs.
    """

    law: Callable[[ReleaseGroup, NeighbouringRelation], ReleaseLaw]
    source: str
    statement: str = "each release is dominated by a pair of one-dimensional distributions"
    unsampled_cost: Callable[[ReleaseGroup], tuple[float, Fraction | None]] = lambda _: (0.0, None)
    is_attained: bool = True
    is_personal: bool = False
    relations: frozenset[NeighbouringRelation] = frozenset(NeighbouringRelation)
    pairs: Callable[[ReleaseGroup], int] = lambda _: 1
    samples_itself: bool = False
    can_be_sampled: bool = True
    is_renyi_curve: bool = False


def release_groups(
    atom_counts: Sequence[tuple[Atom, int]], relation: NeighbouringRelation
) -> tuple[ReleaseGroup, ...]:
    """Return each distinct release with its effective noise and sample rate under the relation."""
    return tuple(
        ReleaseGroup(
            atom,
            count,
            atom.noise_multiplier / _effective_sensitivity(atom, relation),
            _participation_probability(atom, relation),
        )
        for atom, count in atom_counts
    )


def samples_whole_dataset(release: Atom) -> bool:
    """Return whether the release's fixed-size sample is the whole dataset."""
    return release.sampling == "fixed_size" and release.sample_rate == 1.0


def _effective_sensitivity(release: Atom, relation: NeighbouringRelation) -> float:
    """Return the ℓ2 distance of neighbours' clipped sums over one batch, divided by the clip norm.

    In a batch of fixed size, another record takes the place of a record that is not drawn, up to
    2C away. A batch of all the data always holds the record, which is zeroed or replaced in place.
    """
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    if release.sampling == "fixed_size" and (added or not samples_whole_dataset(release)):
        return 2.0
    return relation.sensitivity


def _participation_probability(release: Atom, relation: NeighbouringRelation) -> float:
    """Return the probability that a record of the larger dataset is in a batch.

    Under add/remove, a batch of n records cannot be drawn from n − 1 records, so a batch of all n
    records is compared with n of n + 1: its rate is n/(n + 1). Laplace noise on fixed-size samples
    has no formula here: its batch of all the data is charged without that amplification.
    """
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    if (
        added
        and samples_whole_dataset(release)
        and release.noise == "gaussian"
        and release.fixed_sizes
    ):
        return release.fixed_sizes[0] / (release.fixed_sizes[0] + 1)
    if release.sampling == "poisson":
        return max(release.sample_rate, RATE_MIN)
    return 1.0 if release.sampling in ("shuffled", "balls_in_bins") else release.sample_rate


def dominating_pair(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of a single release of the group."""
    if not _uses_unsampled_pair(group, relation):
        return _KINDS[group.atom.noise].law(group, relation)
    alone = _KINDS[group.atom.noise].law(replace(group, rate=1.0), relation)
    assert isinstance(alone, Release)
    if group.atom.sampling == "fixed_size":
        return FixedSizePairReplacement(alone.base_pair, group.rate)
    return Release(RevealedSamplePair(alone.base_pair, group.rate))


def _uses_unsampled_pair(group: ReleaseGroup, relation: NeighbouringRelation) -> bool:
    """Return whether a sampled release's dominating pair is built from the one without sampling.

    This is so if neighbours change a record in place, and for answers of each person. Gaussian and
    Laplace releases have a tighter pair, because the record contributes nothing to a sample without
    it.
    """
    noise = group.atom.noise
    in_place = relation is not NeighbouringRelation.ADD_OR_REMOVE_ONE or is_personal(noise)
    has_tighter_pair = noise in ("gaussian", "laplace") or _KINDS[noise].samples_itself
    return in_place and group.rate < 1.0 and not has_tighter_pair


def effective_noise(group: ReleaseGroup) -> float | None:
    """Return the noise over the most that a person's records move a sampled Gaussian release.

    The cost of its law grows with the inverse. None for other releases.
    """
    if group.atom.noise in ("gaussian", "truncated_poisson_sampled") and group.rate < 1:
        return group.sigma
    if group.atom.noise == "user_level":
        return 1 / _several_records_pair(group).largest_shift
    return None


def is_renyi_curve(group: ReleaseGroup) -> bool:
    """Return whether the releases are unsampled and specified only by their Rényi divergences."""
    return group.rate == 1.0 and _KINDS[group.atom.noise].is_renyi_curve


def renyi_law(groups: Sequence[ReleaseGroup], relation: NeighbouringRelation) -> ReleaseLaw:
    """Return one dominating pair for all releases that are specified by Rényi divergences."""
    rho = math.fsum(g.count * _rho(g) for g in groups if g.atom.noise == "zcdp")
    curves = [(*_curve(g, relation), g.count) for g in groups if g.atom.noise != "zcdp"]
    return Release(RenyiPair(rho, tuple(curves)))


def _rho(group: ReleaseGroup) -> float:
    """Return ρ of a release that is specified as ρ-zCDP (zero-concentrated DP)."""
    return float(group.atom.parameters[0])  # type: ignore[arg-type]


def _curve(
    group: ReleaseGroup, relation: NeighbouringRelation
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return a release's Rényi orders, and an upper bound on its Rényi divergence at each."""
    if group.atom.noise == "rdp":
        orders, divergences = group.atom.parameters
        return orders, divergences  # type: ignore[return-value]
    distribution, mean, shape = group.atom.parameters
    inner = release_groups(group.atom.releases, relation)
    laws = tuple((dominating_pair(each, relation), count_pairs(each)) for each in inner)
    return private_selection.selected_curve(
        private_selection.Repeats(str(distribution), float(mean), float(shape)),  # type: ignore[arg-type]
        laws,
    )


def _renyi_release(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of one release that is specified by its Rényi divergences."""
    alone = renyi_law([replace(group, count=1, rate=1.0)], relation)
    return replace(alone, sample_rate=group.rate)  # type: ignore[type-var]


def _several_records_pair(group: ReleaseGroup) -> SeveralRecordsPair:
    """Return the pair of a release in which one person owns several sampled records."""
    (records,) = group.atom.parameters
    return SeveralRecordsPair(int(records), group.rate, 1 / group.sigma)  # type: ignore[arg-type]


def _several_records_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of a release in which one person owns several sampled records."""
    pair = _several_records_pair(group)
    if relation is NeighbouringRelation.REPLACE_ONE:  # 2C apart, each C from absence
        return Release(ReplacedPersonPair(replace(pair, mu=0.5 * pair.mu)))
    return Release(pair)


def _several_records_cost(group: ReleaseGroup) -> tuple[float, Fraction]:
    """Return μ² of the releases if all records of the person were in each, and 0.

    Given which records are sampled, the same ones of both persons if one is replaced, the outputs
    are normal laws at most this far apart. δ is jointly convex, so it is at most that without
    sampling.
    """
    (records,) = group.atom.parameters
    return group.count * (float(records) / group.sigma) ** 2, Fraction()  # type: ignore[arg-type]


def _truncated_poisson_cost(group: ReleaseGroup) -> tuple[float, Fraction]:
    """Return μ² of the releases if a record always took another one's place, and 0.

    Given all samples the outputs are normal laws at most twice the clip norm apart.
    """
    return group.count * (2 / group.atom.noise_multiplier) ** 2, Fraction()


def _truncated_poisson(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of a Gaussian release on a Poisson sample of limited size."""
    size, batch = group.atom.fixed_sizes or (1, 1)
    mu = 1 / group.atom.noise_multiplier
    replaced = relation is NeighbouringRelation.REPLACE_ONE
    return truncated_poisson_law(size, group.rate, batch, mu, replaced=replaced)


def _shuffled_reports_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:  # noqa: ARG001
    """Return the dominating pair of n shuffled reports, each ε-DP."""
    (reports,) = group.atom.parameters
    ((report, _),) = group.atom.releases
    return Release(ShuffledReportsPair(int(reports), _local_epsilon(report)))  # type: ignore[arg-type]


def _unshuffled_cost(group: ReleaseGroup) -> tuple[float, Fraction | None]:
    """Return 0 for μ², and the ε of one person's reports without amplification by shuffling."""
    ((report, _),) = group.atom.releases
    return 0.0, group.count * Fraction(_local_epsilon(report))


def _pure_cost(group: ReleaseGroup) -> tuple[float, Fraction | None]:
    """Return 0 for μ², and the pure ε of the releases of a group without sampling, if it has one.

    The ε of a bounded range, or of a list of points that ends with δ = 0, is a pure ε too.
    """
    first, *rest = group.atom.parameters or (group.sigma,)
    match group.atom.noise:
        case "laplace":
            epsilon = 1 / Fraction(group.sigma)
        case "discrete_laplace":
            epsilon = Fraction(rest[0]) / Fraction(first)  # type: ignore[arg-type]
        case "approximate_dp" if rest != [0.0]:
            return 0.0, None
        case "privacy_profile":
            if rest[0][-1] > 0.0:  # type: ignore[index, operator]
                return 0.0, None
            epsilon = Fraction(first[-1])  # type: ignore[index]
        case "randomized_response":
            epsilon = Fraction(_local_epsilon(group.atom))
        case _:
            epsilon = Fraction(first)  # type: ignore[arg-type]
    return 0.0, group.count * epsilon


def _local_epsilon(report: Atom) -> float:
    """Return ε of an ε-DP mechanism that is applied to one person's input, rounded up."""
    first, second, *_ = (*map(float, report.parameters), 0.0)  # type: ignore[arg-type]
    match report.noise:
        case "randomized_response":
            return rounding.up(math.log1p((1 - second) * first / second))
        case "discrete_laplace":
            return rounding.up(second / first)
        case _:
            return first


def count_pairs(group: ReleaseGroup) -> int:
    """Return the number of dominating pairs to compose for all releases of the group."""
    return group.count * _KINDS[group.atom.noise].pairs(group)


def unsampled_cost(groups: Sequence[ReleaseGroup]) -> tuple[float, float]:
    """Return the total μ of Gaussian and ε of pure-DP releases, as if none were sampled.

    The ε is infinite if another kind is among them. Else it is the exact sum, rounded up.
    """
    costs = [_KINDS[each.atom.noise].unsampled_cost(each) for each in groups]
    known = [pure for _, pure in costs if pure is not None]
    pure = _round_up(sum(known, Fraction())) if len(known) == len(costs) else math.inf
    return math.sqrt(math.fsum(square for square, _ in costs)), pure


def _round_up(value: Fraction) -> float:
    """Return the least double that is not below a rational number; ∞ beyond the doubles."""
    try:
        nearest = float(value)
    except OverflowError:
        return math.inf
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def pure_epsilon(groups: Sequence[ReleaseGroup], relation: NeighbouringRelation) -> float:
    """Return a bound that no privacy loss of the releases exceeds, rounded up; ∞ if none is known.

    The loss of the pair of a Poisson sample, log(1 − q + q·e^Λ) or its negative, is at most
    log(1 + q(e^ε − 1)) if |Λ| ≤ ε: the first since it increases in Λ; the negative of its least
    value is no more, as (1 − q + q·e^ε)·(1 − q + q·e^−ε) ≥ 1 by the inequality of Cauchy and
    Schwarz. Losses of compositions add up.
    """
    total = Fraction()
    for group in groups:
        square, pure = _KINDS[group.atom.noise].unsampled_cost(replace(group, count=1))
        if square > 0.0 or pure is None:
            return math.inf
        total += group.count * _amplify(pure, group, relation)
    return _round_up(total)


def _amplify(pure: Fraction, group: ReleaseGroup, relation: NeighbouringRelation) -> Fraction:
    """Return log(1 + q(e^ε − 1)), rounded up, if the group's pair is that of a Poisson sample."""
    if group.rate == 1.0 or pure > _AMPLIFIED_MAX or group.replaces_record_in("poisson", relation):
        return pure
    law = dominating_pair(group, relation)
    if not isinstance(law, Release) or law.sample_rate == 1.0:
        return pure
    amplified = math.log1p(law.sample_rate * math.expm1(_round_up(pure)))
    return min(pure, Fraction(rounding.up(amplified)))


def is_attained(kind: str) -> bool:
    """Return whether some neighbouring datasets have exactly the δ(ε) computed for this noise."""
    return kind not in _KINDS or _KINDS[kind].is_attained


def is_personal(kind: str) -> bool:
    """Return whether a release of this kind may be one answer of each person."""
    return kind in _KINDS and _KINDS[kind].is_personal


def hypothesis(group: ReleaseGroup, relation: NeighbouringRelation) -> tuple[str, str]:
    """Return the assumption under which the release's dominating pair is proved, and its source."""
    kind = _KINDS[group.atom.noise]
    if group.rate == 1.0 or kind.samples_itself:
        return kind.statement, kind.source
    if _uses_unsampled_pair(group, relation):
        return kind.statement, f"{kind.source}; {_CHANGED}"
    replaced = relation is NeighbouringRelation.REPLACE_ONE
    return kind.statement, _REPLACED if replaced else POISSON_SOURCE


def require_dominating_pair(group: ReleaseGroup, relation: NeighbouringRelation) -> None:
    """Raise MethodNotApplicableError if no dominating pair of the release is proved."""
    name, sampling = group.atom.noise, group.atom.sampling
    if name not in _KINDS:
        raise MethodNotApplicableError(f"pld has no formula for {name}", group.atom.pointer)
    if relation not in _KINDS[name].relations:
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for {name} under {relation}", group.atom.pointer
        )
    for inner in release_groups(group.atom.releases, relation):
        require_dominating_pair(inner, relation)
        if _KINDS[name].is_renyi_curve:
            _require_renyi_curve(inner, relation)
    if name in ("gaussian", "laplace"):
        _require_proved_sampling(group, relation)
    elif not _KINDS[name].samples_itself and sampling not in ("none", name):
        _require_known_sampling(group, relation)


def _require_renyi_curve(group: ReleaseGroup, relation: NeighbouringRelation) -> None:
    """Raise if a release's Rényi divergences are infinite: an outcome reveals the record."""
    if any(dominating_pair(group, relation).infinite_mass(each) > 0 for each in DIRECTIONS):
        raise MethodNotApplicableError(
            f"private_selection needs Rényi divergences, and those of {group.atom.noise} are "
            "infinite",
            group.atom.pointer,
        )


def _require_known_sampling(group: ReleaseGroup, relation: NeighbouringRelation) -> None:
    """Raise if the dominating pair of this release is unknown under its sampling.

    Poisson samples are covered under every relation. A sample of fixed size is covered if a record
    is replaced: only then all its samples are neighbours.
    """
    sampling = group.atom.sampling
    replaced = relation is NeighbouringRelation.REPLACE_ONE
    covered = sampling == "poisson" or (sampling == "fixed_size" and replaced)
    if not (covered and _KINDS[group.atom.noise].can_be_sampled):
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for {group.atom.noise} with {sampling} sampling "
            f"under {relation}",
            group.atom.pointer,
        )


def _require_proved_sampling(group: ReleaseGroup, relation: NeighbouringRelation) -> None:
    """Raise if no dominating pair is proved for this noise, sampling and relation."""
    sampling = group.atom.sampling
    if group.rate == 1.0:
        return
    if relation is NeighbouringRelation.REPLACE_ONE:
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
    """Return the dominating pair of a Gaussian release under any sampling."""
    if group.replaces_record_in("poisson", relation):
        return ReplacedRecord(0.5 / group.sigma, group.rate)  # 2C apart, each C from absence
    if group.replaces_record_in("fixed_size", relation):
        return FixedSizeReplacement(1 / group.sigma, group.rate)
    return Release(GaussianPair(1 / group.sigma), group.rate)


def _laplace_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of a Laplace release under any sampling."""
    if group.replaces_record_in("poisson", relation):
        return Release(ReplacedLaplacePair(0.5 / group.sigma, group.rate))
    if group.replaces_record_in("fixed_size", relation):
        return FixedSizePairReplacement(LaplacePair(1 / group.sigma), group.rate)
    return Release(LaplacePair(1 / group.sigma), group.rate)


def _pair_law(
    pair: Callable[..., BasePair],
) -> Callable[[ReleaseGroup, NeighbouringRelation], ReleaseLaw]:
    """Return a function that builds a release's dominating pair with the constructor `pair`."""

    def law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:  # noqa: ARG001
        """Return the dominating pair of a release of the group."""
        parameters: tuple[Any, ...] = group.atom.parameters
        return Release(pair(*parameters), group.rate)

    return law


def _balls_in_bins_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of one epoch of balls-in-bins sampling.

    k selections of b bins are dominated by k epochs with one selection of ⌊b/k⌋ bins. Under
    replace-one no amplification is proved, and below `BINS_NOISE_MIN` none is computed: the pair
    is then that of a known bin.
    """
    bins, selections = _batches_and_participations(group.atom)
    each = bins // selections
    known = relation is NeighbouringRelation.REPLACE_ONE or group.sigma < BINS_NOISE_MIN
    if known or each == 1:
        return Release(GaussianPair(1 / group.sigma))
    return BallsInBins(1 / min(group.sigma, BINS_NOISE_MAX), each)  # more noise costs no more


def has_bins_law(release: Atom, relation: NeighbouringRelation) -> bool:
    """Return whether amplification by balls-in-bins sampling is computed for this release."""
    in_range = BINS_NOISE_MIN <= release.noise_multiplier <= BINS_NOISE_MAX
    return in_range and relation is not NeighbouringRelation.REPLACE_ONE


def _batches_and_participations(release: Atom) -> tuple[int, int]:
    """Return an epoch's number of batches, and in how many of them each record takes part."""
    bins, selections = (int(each) for each in release.parameters)  # type: ignore[arg-type]
    return bins, selections


_KINDS: Final[Mapping[str, _Kind]] = {
    "gaussian": _Kind(
        _gaussian_law,
        _GAUSSIAN,
        unsampled_cost=lambda group: (group.count / group.sigma**2, Fraction()),
    ),
    "laplace": _Kind(
        _laplace_law,
        _GAUSSIAN,
        unsampled_cost=_pure_cost,
    ),
    "balls_in_bins": _Kind(
        _balls_in_bins_law,
        "proved in docs/accountants/balls_in_bins.md; pair of arXiv 2412.16802 and 2502.08202",
        "each record is put into its batches uniformly, independently of all other records and "
        "anew in every epoch, and each noisy sum is divided by a constant",
        unsampled_cost=lambda group: (
            group.count * _batches_and_participations(group.atom)[1] / group.sigma**2,
            Fraction(),
        ),
        pairs=lambda group: _batches_and_participations(group.atom)[1],
    ),
    "randomized_response": _Kind(
        _pair_law(RandomizedResponsePair),
        "Kairouz, Bonawitz & Ramage 2016, arXiv 1602.07387v3; exact by enumeration",
        "a neighbour changes one person's true category",
        is_personal=True,
        unsampled_cost=_pure_cost,
    ),
    "discrete_laplace": _Kind(
        _pair_law(DiscreteLaplacePair),
        "Ghosh, Roughgarden & Sundararajan 2012, arXiv 0811.2841v3; proved in "
        "docs/accountants/kinds.md",
        _ONE_INTEGER,
        unsampled_cost=_pure_cost,
    ),
    "discrete_gaussian": _Kind(
        _pair_law(DiscreteGaussianPair),
        "Canonne, Kamath & Steinke 2020, arXiv 2004.00010v7; proved in docs/accountants/kinds.md",
        _ONE_INTEGER,
    ),
    "exponential": _Kind(
        _pair_law(BoundedRangePair),
        "Dong, Durfee & Rogers 2020, arXiv 1909.13830v2; worst pair proved in "
        "docs/accountants/kinds.md",
        "the mechanism has the bounded range ε",
        is_attained=False,
        unsampled_cost=_pure_cost,
    ),
    "permute_and_flip": _Kind(
        lambda group, _: Release(ApproximatePair(float(group.atom.parameters[0]), 0.0), group.rate),  # type: ignore[arg-type]
        "McKenna & Sheldon 2020, arXiv 2010.12603v1, Theorem 1; worst pair of ε-DP: Kairouz, Oh & "
        "Viswanathan 2015, arXiv 1311.0776v4, Theorem 3.4",
        "the mechanism is ε-DP",
        is_attained=False,
        unsampled_cost=_pure_cost,
    ),
    "truncated_laplace": _Kind(
        _pair_law(TruncatedLaplacePair),
        "Geng, Ding, Guo & Kumar 2020, arXiv 1810.00877v3; proved in docs/accountants/kinds.md",
        "the noise is added to one number, which a neighbour changes by at most Δ",
    ),
    "tree_aggregation": _Kind(
        lambda group, _: Release(GaussianPair(1 / group.sigma)),
        "Kairouz et al. 2021, arXiv 2103.00039; sensitivity proved in docs/accountants/kinds.md",
        unsampled_cost=lambda group: (group.count / group.sigma**2, Fraction()),
        is_attained=False,
        can_be_sampled=False,
    ),
    "private_selection": _Kind(
        _renyi_release,
        "Papernot & Steinke 2022, arXiv 2110.03620v2, Theorems 2 and 6",
        "the number of runs is drawn from the stated distribution, and only the best run's output "
        "is released",
        is_attained=False,
        is_renyi_curve=True,
    ),
    "shuffled_reports": _Kind(
        _shuffled_reports_law,
        "Feldman, McMillan & Talwar 2023, arXiv 2208.04591; proved in docs/accountants/kinds.md",
        "each person's report is made by the same ε-DP mechanism, independently of all others, and "
        "only the shuffled reports are seen; a neighbour changes one person's input",
        unsampled_cost=_unshuffled_cost,
        is_attained=False,
        can_be_sampled=False,
    ),
    "approximate_dp": _Kind(
        _pair_law(ApproximatePair),
        "Kairouz, Oh & Viswanathan 2015, arXiv 1311.0776v4, Theorem 3.4",
        _GIVEN.format("(ε, δ)-DP"),
        unsampled_cost=_pure_cost,
    ),
    "gdp": _Kind(
        _pair_law(GaussianPair),
        "Dong, Roth & Su 2019, arXiv 1905.02383v3, Theorem 3.2",
        _GIVEN.format("μ-GDP"),
        unsampled_cost=lambda group: (
            group.count * float(group.atom.parameters[0]) ** 2,  # type: ignore[arg-type]
            Fraction(),
        ),
    ),
    "zcdp": _Kind(
        _renyi_release,
        _CONVERSION,
        _GIVEN.format("ρ-zCDP"),
        is_attained=False,
        is_renyi_curve=True,
    ),
    "rdp": _Kind(
        _renyi_release,
        _CONVERSION,
        _GIVEN.format("the Rényi curve"),
        is_attained=False,
        is_renyi_curve=True,
    ),
    "privacy_profile": _Kind(
        _pair_law(ProfilePair),
        "Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Proposition 8 and Theorem 9",
        _GIVEN.format("the profile"),
        unsampled_cost=_pure_cost,
    ),
    "user_level": _Kind(
        _several_records_law,
        "Ganesh 2024, arXiv 2401.10294v2, Theorem 3.1; proved in docs/accountants/kinds.md",
        "a person has at most the stated number of records, each clipped and sampled by itself",
        unsampled_cost=_several_records_cost,
        samples_itself=True,
    ),
    "truncated_poisson_sampled": _Kind(
        _truncated_poisson,
        "arXiv 2508.15089; proved in docs/accountants/kinds.md",
        "the larger of two neighbouring datasets has `dataset_size` records",
        unsampled_cost=_truncated_poisson_cost,
        is_attained=False,
        relations=frozenset(
            [NeighbouringRelation.ADD_OR_REMOVE_ONE, NeighbouringRelation.REPLACE_ONE]
        ),
        samples_itself=True,
    ),
}
