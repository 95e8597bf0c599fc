"""From a release to the law of its privacy loss: one table for all kinds of mechanism.

A release is a dominating pair. A row of the table says how to make the pair of one kind, which
theorem proves it, and whether two datasets attain it; no engine knows kinds. To add a kind, add its
row here, its fields to `mechanisms`, and its pair to `numerics/laws`.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.errors import MethodNotApplicableError
from accountant_service.mechanisms import Atom
from accountant_service.numerics.floats import decimals, rounding
from accountant_service.numerics.laws import gaussian, private_selection
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
from accountant_service.numerics.laws.gaussian_mixture import (
    GaussianMixturePair,
    drawn_shifts,
    several_records,
)
from accountant_service.numerics.laws.profile_pair import ProfilePair, RenyiPair
from accountant_service.numerics.laws.replaced_laplace import ReplacedLaplacePair
from accountant_service.numerics.laws.replaced_person import ReplacedPersonPair
from accountant_service.numerics.laws.replaced_record import ReplacedRecord
from accountant_service.numerics.laws.revealed_sample import RevealedSamplePair
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
_EXACT_BITS_MAX: Final = 1 << 16  # of a probability that is computed exactly
_DIGITS: Final = 400  # of one that is not
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

    @property
    def exact_rate(self) -> Fraction:
        """The sample rate as written, or as the ratio of the sizes that were written."""
        if self.rate == self.atom.sample_rate and self.atom.exact_rate is not None:
            return self.atom.exact_rate
        return rounding.as_written(self.rate)

    def replaces_record_in(self, sampling: str, relation: NeighbouringRelation) -> bool:
        """Return whether batches are drawn by `sampling` and neighbours replace one record.

        `sigma` is then that of the distance 2C between the record and its replacement. In a sample
        of fixed size a zeroed record is a replaced one: another record may be 2C away from it.
        """
        replaced = relation is NeighbouringRelation.REPLACE_ONE
        if sampling == "fixed_size":
            replaced = relation is not NeighbouringRelation.ADD_OR_REMOVE_ONE
        return replaced and self.atom.sampling == sampling and self.rate < 1.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """A noise's dominating pair: how it is built for a release, and its proof.

    Attributes:
        law: returns the pair of a release under a relation.
        source: the publication that proves that the pair dominates the release without sampling.
        statement: what the description must mean for the proof to hold.
        squared_mu: returns μ² of the Gaussian release that all releases of a group are as private
            as without sampling; None if they are not Gaussian.
        loss: returns the range of the privacy losses of one release without sampling; None if no
            bound on them is known.
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
    squared_mu: Callable[[ReleaseGroup], float | None] = lambda _: None
    loss: Callable[[ReleaseGroup], LossRange] | None = None
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
    if group.atom.noise in ("user_level", "gaussian_mixture"):
        return 1 / _mixture_pair(group).largest_shift
    return None


def is_renyi_curve(group: ReleaseGroup) -> bool:
    """Return whether the releases are unsampled and specified only by their Rényi divergences."""
    return group.rate == 1.0 and _KINDS[group.atom.noise].is_renyi_curve


def attained_pair(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw | None:
    """Return the pair of two datasets for a release whose dominating pair they do not attain.

    All other records contribute what the record's replacement does: −C, or 0 if it is zeroed. Then
    it does not matter which of them takes the record's place in a batch of fixed size: the output
    shows no more than whether the record was drawn, at a distance of 2C or C. None for a release
    other than Gaussian or Laplace noise on such a batch.
    """
    is_plain = group.atom.noise in ("gaussian", "laplace")
    if not is_plain or not group.replaces_record_in("fixed_size", relation):
        return None
    share = 1.0 if relation is NeighbouringRelation.REPLACE_ONE else 0.5  # of the 2C
    distance = share / group.sigma
    laplace = group.atom.noise == "laplace"
    pair: BasePair = LaplacePair(distance) if laplace else GaussianPair(distance)
    return Release(pair, group.rate)


def renyi_law(groups: Sequence[ReleaseGroup], relation: NeighbouringRelation) -> ReleaseLaw:
    """Return one dominating pair for all releases that are specified by Rényi divergences."""
    rho = math.fsum(g.count * zcdp_rho(g) for g in groups if g.atom.noise == "zcdp")
    curves = [(*renyi_curve(g, relation), g.count) for g in groups if g.atom.noise != "zcdp"]
    return Release(RenyiPair(rho, tuple(curves)))


def zcdp_rho(group: ReleaseGroup) -> float:
    """Return ρ of a release that is specified as ρ-zCDP (zero-concentrated DP)."""
    return float(group.atom.parameters[0])  # type: ignore[arg-type]


def renyi_curve(
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


def _mixture_pair(group: ReleaseGroup) -> GaussianMixturePair:
    """Return the pair of a release in which the norm of a person's contribution is random."""
    if group.atom.noise == "user_level":
        (records,) = group.atom.parameters
        return several_records(int(records), group.rate, 1 / group.sigma)  # type: ignore[arg-type]
    shifts, probabilities = group.atom.parameters
    return drawn_shifts(shifts, probabilities).scaled(1 / group.sigma)  # type: ignore[arg-type]


def _mixture_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of a release in which a contribution's norm is random."""
    pair = _mixture_pair(group)
    if relation is NeighbouringRelation.REPLACE_ONE:  # 2C apart, each C from absence
        return Release(ReplacedPersonPair(pair.scaled(0.5)))
    return Release(pair)


def _squared_mu_of_records(group: ReleaseGroup) -> float:
    """Return μ² of the releases if all records of the person were in each.

    Given which records are sampled, the same ones of both persons if one is replaced, the outputs
    are normal laws at most this far apart. δ is jointly convex, so it is at most that without
    sampling.
    """
    (records,) = group.atom.parameters
    return group.count * (float(records) / group.sigma) ** 2  # type: ignore[arg-type]


def _squared_mu_of_replacement(group: ReleaseGroup) -> float:
    """Return μ² of the releases if a record always took another one's place.

    Given all samples the outputs are normal laws at most twice the clip norm apart.
    """
    return group.count * (2 / group.atom.noise_multiplier) ** 2


def _truncated_poisson(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of a Gaussian release on a Poisson sample of limited size."""
    size, batch = group.atom.fixed_sizes or (1, 1)
    mu = 1 / group.atom.noise_multiplier
    replaced = relation is NeighbouringRelation.REPLACE_ONE
    zeroed = relation is NeighbouringRelation.ZERO_OUT_ONE
    return truncated_poisson_law(size, group.rate, batch, mu, replaced=replaced, zeroed=zeroed)


def _shuffled_reports_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:  # noqa: ARG001
    """Return the dominating pair of n shuffled reports, each ε-DP."""
    (reports,) = group.atom.parameters
    ((report, _),) = group.atom.releases
    return Release(ShuffledReportsPair(int(reports), _local_epsilon(report)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class LossRange:
    """A release's privacy loss: the largest finite one, and the probability of an infinite one.

    Numbers are those that were written, so that sums and products of them are exact.

    Attributes:
        epsilon: an upper bound on every finite loss.
        delta: an upper bound on the probability of an infinite loss.
        least_epsilon: a lower bound on the largest finite loss, if the pair is attained.
        least_delta: a lower bound on the probability of an infinite loss, if the pair is attained.
    """

    epsilon: Fraction
    delta: Fraction
    least_epsilon: Fraction
    least_delta: Fraction

    @classmethod
    def exact(cls, epsilon: Fraction, delta: Fraction = Fraction()) -> LossRange:
        """Return the range of a release whose two numbers are known exactly."""
        return cls(epsilon, delta, epsilon, delta)

    @classmethod
    def pure(cls, least_epsilon: Fraction, epsilon: Fraction) -> LossRange:
        """Return the range of an ε-DP release whose ε is between two numbers."""
        return cls(epsilon, Fraction(), least_epsilon, Fraction())


@dataclass(frozen=True, slots=True)
class SimpleCost:
    """The cost of releases, each of which is charged as a Gaussian one or as an (ε, δ)-DP one.

    Gaussian releases are charged as if they used all the data. By basic composition the others are
    (Σεᵢ, 1 − Π(1 − δᵢ))-DP together. If they are all there is, ε is the largest finite loss.

    Attributes:
        mu: √(Σ 1/σ²) of the Gaussian releases.
        loss: of all others together, without those that are neither kind.
        is_known: whether no release is neither kind.
    """

    mu: float
    loss: LossRange
    is_known: bool

    @property
    def epsilon(self) -> float:
        """Σεᵢ, rounded up; ∞ if a release is charged as neither."""
        return rounding.fraction_up(self.loss.epsilon) if self.is_known else math.inf

    @property
    def is_bounded(self) -> bool:
        """Return whether no finite privacy loss exceeds ε: there is no Gaussian release."""
        return self.is_known and self.mu == 0.0

    @property
    def is_gaussian(self) -> bool:
        """Return whether all releases are charged as Gaussian ones."""
        return self.is_known and self.loss.epsilon == self.loss.delta == 0

    @property
    def is_pure(self) -> bool:
        """Return whether the releases are ε-DP: no privacy loss exceeds ε."""
        return self.is_bounded and self.loss.delta == 0

    def bounds(self, delta: Fraction) -> bool:
        """Return whether the releases are (ε, δ)-DP with `epsilon` at this δ."""
        return self.is_bounded and delta >= self.loss.delta

    def has_no_epsilon(self, delta: Fraction) -> bool:
        """Return whether no finite ε holds at this δ, if the releases' pairs are attained.

        δ(ε) is at least the probability of an infinite loss, and more if losses have no bound.
        """
        least = self.loss.least_delta
        return delta < least or (delta == least and not self.is_bounded) or least == 1

    def epsilon_at(self, delta: float) -> float:
        """Return an upper bound on ε at δ; ∞ if none is proved.

        With m the probability of an infinite loss of the (ε, δ)-DP releases, and δ_μ that of the
        Gaussian ones, δ(Σεᵢ + x) ≤ m + (1 − m)·δ_μ(x).
        """
        left = rounding.as_written(delta) - self.loss.delta
        if left < 0 or not self.is_known or (left == 0 and self.mu > 0):
            return math.inf
        if self.mu == 0.0:
            return self.epsilon
        share = rounding.fraction_down(left / (1 - self.loss.delta))
        if share <= 0.0:
            return math.inf
        found = rounding.up(float(gaussian.epsilon(share, self.mu)))
        return rounding.up(found + self.epsilon) if self.loss.epsilon else found

    def delta_at(self, epsilon: float) -> float:
        """Return an upper bound on δ at ε, as `epsilon_at` does; 1 if none is proved."""
        written = rounding.as_written(epsilon)
        if not self.is_known or written < self.loss.epsilon:
            return 1.0
        if self.mu == 0.0:
            return rounding.fraction_up(self.loss.delta)
        beyond = rounding.fraction_down(written - self.loss.epsilon)
        rest = rounding.up(math.exp(float(gaussian.log_delta(beyond, self.mu))))
        if not self.loss.delta:
            return min(1.0, rest)
        return min(1.0, rounding.up(float(self.loss.delta) + rest))


def simple_cost(groups: Sequence[ReleaseGroup], relation: NeighbouringRelation) -> SimpleCost:
    """Return the cost of releases that are charged as Gaussian or (ε, δ)-DP, whatever they are."""
    squares = [
        _KINDS[each.atom.noise].squared_mu(_without_sampling(each, relation)) for each in groups
    ]
    others = [each for each, square in zip(groups, squares, strict=True) if square is None]
    ranges = [(_loss_range(each, relation), each.count) for each in others]
    known = [(loss, count) for loss, count in ranges if loss is not None]
    highest = _any_of([(loss.delta, count) for loss, count in known])
    least = _any_of([(loss.least_delta, count) for loss, count in known])
    total = LossRange(
        sum((count * loss.epsilon for loss, count in known), Fraction()),
        highest[1],
        sum((count * loss.least_epsilon for loss, count in known), Fraction()),
        least[0],
    )
    mu = math.sqrt(math.fsum(square for square in squares if square is not None))
    return SimpleCost(mu, total, len(known) == len(ranges))


def _without_sampling(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseGroup:
    """Return a group with the noise multiplier that it has on all the data.

    Given the sample, a zeroed record changes its sum by C, not by the 2C to another record.
    """
    zeroed = relation is NeighbouringRelation.ZERO_OUT_ONE
    if zeroed and group.replaces_record_in("fixed_size", relation):
        return replace(group, sigma=2 * group.sigma)
    return group


def _any_of(chances: Sequence[tuple[Fraction, int]]) -> tuple[Fraction, Fraction]:
    """Return bounds on 1 − Π(1 − p)ⁿ, which are equal unless the exact number is very long.

    A δ that somebody writes has at most 17 digits and an exponent, so it can only equal a number
    with few digits.
    """
    chances = [(chance, count) for chance, count in chances if chance and count]
    length = sum(count * chance.denominator.bit_length() for chance, count in chances)
    if length <= _EXACT_BITS_MAX:
        exact = 1 - math.prod(
            ((1 - chance) ** count for chance, count in chances), start=Fraction(1)
        )
        return exact, exact
    found = []
    for direction in (decimal.ROUND_CEILING, decimal.ROUND_FLOOR):  # of the probability of none
        context = decimal.Context(prec=_DIGITS, rounding=direction, Emin=decimal.MIN_EMIN)
        none = decimal.Decimal(1)
        for chance, count in chances:
            kept = context.divide(
                decimal.Decimal(chance.denominator - chance.numerator),
                decimal.Decimal(chance.denominator),
            )
            none = context.multiply(none, _power(kept, count, context))
        found.append(1 - Fraction(none))
    return max(found[0], Fraction()), min(found[1], Fraction(1))


def _power(base: decimal.Decimal, exponent: int, context: decimal.Context) -> decimal.Decimal:
    """Return base^exponent by repeated squaring, each product rounded as the context says."""
    found = decimal.Decimal(1)
    while exponent:
        if exponent & 1:
            found = context.multiply(found, base)
        base, exponent = context.multiply(base, base), exponent >> 1
    return found


def _loss_range(group: ReleaseGroup, relation: NeighbouringRelation) -> LossRange | None:
    """Return the privacy losses of one release of a group; None if they have no known bound.

    By the loss log(1 − q + q·e^Λ) of a Poisson sample, or by Balle, Barthe & Gaboardi 2018, arXiv
    1807.01647v2, Theorem 8, a sample of an (ε, δ)-DP release is (log(1 + q(e^ε − 1)), q·δ)-DP. The
    pair of a revealed sample is (ε, q·δ)-DP.
    """
    kind = _KINDS[group.atom.noise]
    alone = kind.loss(_without_sampling(group, relation)) if kind.loss else None
    if alone is None or group.rate == 1.0:
        return alone
    whole = alone.epsilon
    alone = kind.loss(group) if kind.loss else alone  # another record may be farther away
    if group.atom.noise == "laplace" and group.replaces_record_in("poisson", relation):
        largest = _replaced_laplace_pair(group).largest_loss
        return LossRange.pure(Fraction(rounding.down(largest)), Fraction(rounding.up(largest)))
    law, rate = dominating_pair(group, relation), group.exact_rate
    pair = law.base_pair if isinstance(law, Release) else None
    found = replace(alone, delta=rate * alone.delta, least_delta=rate * alone.least_delta)
    if isinstance(pair, RevealedSamplePair):
        return found
    if alone.epsilon > _AMPLIFIED_MAX:
        return replace(found, epsilon=whole, least_epsilon=Fraction())
    low, _ = decimals.sampled_epsilon(rate, alone.least_epsilon)
    _, high = decimals.sampled_epsilon(rate, alone.epsilon)
    return replace(found, epsilon=min(whole, alone.epsilon, high), least_epsilon=low)


def _declared_loss(group: ReleaseGroup) -> LossRange:
    """Return the privacy losses of one release without sampling, from its description.

    The ε of a bounded range is a pure ε too.
    """
    atom, written = group.atom, rounding.as_written
    values: tuple[Any, ...] = atom.parameters or (atom.noise_multiplier,)
    first, *rest = values
    match atom.noise:
        case "laplace":
            sensitivity = Fraction(atom.noise_multiplier / group.sigma)  # 1 or 2
            return LossRange.exact(sensitivity / written(first))
        case "discrete_laplace":
            return LossRange.exact(written(rest[0]) / written(first))
        case "truncated_laplace":
            epsilon = written(rest[1]) / written(first)
            low, high = decimals.truncated_mass(*map(written, values))
            return LossRange(epsilon, high, epsilon, low)
        case "approximate_dp":
            return LossRange.exact(written(first), written(rest[0]))
        case "privacy_profile":
            last = rest[0][-1]
            return LossRange.exact(written(first[rest[0].index(last)]), written(last))
        case "randomized_response":
            # a probability near 1, as written and as a double: 1 − f differs
            ends = [
                decimals.response_epsilon(int(first), each)
                for each in (written(rest[0]), Fraction(rest[0]))
            ]
            return LossRange.pure(min(low for low, _ in ends), max(high for _, high in ends))
        case _:
            return LossRange.exact(written(first))


def _unshuffled_loss(group: ReleaseGroup) -> LossRange:
    """Return the privacy losses of one person's report, without amplification by shuffling."""
    ((report, _),) = group.atom.releases
    return LossRange.exact(Fraction(_local_epsilon(report)))


def _response_epsilon(report: Atom) -> float:
    """Return ε of randomized response, not rounded: log of (1 − f + f/k)/(f/k)."""
    categories, flip = map(float, report.parameters)  # type: ignore[arg-type]
    return math.log1p((1 - flip) * categories / flip)


def _local_epsilon(report: Atom) -> float:
    """Return ε of an ε-DP mechanism that is applied to one person's input, rounded up."""
    first, second, *_ = (*map(float, report.parameters), 0.0)  # type: ignore[arg-type]
    match report.noise:
        case "randomized_response":
            return rounding.up(_response_epsilon(report))
        case "discrete_laplace":
            return rounding.up(second / first)
        case _:
            return first


def count_pairs(group: ReleaseGroup) -> int:
    """Return the number of dominating pairs to compose for all releases of the group."""
    return group.count * _KINDS[group.atom.noise].pairs(group)


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
    if not added and sampling not in ("poisson", "fixed_size"):
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for {group.atom.noise} noise and {sampling} "
            f"sampling under {relation}; use subsampled_rdp",
            group.atom.pointer,
        )
    if group.atom.noise == "laplace" and sampling == "fixed_size" and added:
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for Laplace noise on fixed-size samples under "
            f"{relation}",
            group.atom.pointer,
        )


def _gaussian_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of a Gaussian release under any sampling."""
    if group.replaces_record_in("poisson", relation):
        return ReplacedRecord(0.5 / group.sigma, group.rate)  # 2C apart, each C from absence
    if group.replaces_record_in("fixed_size", relation):
        return FixedSizeReplacement(1 / group.sigma, group.rate)
    return Release(GaussianPair(1 / group.sigma), group.rate)


def _replaced_laplace_pair(group: ReleaseGroup) -> ReplacedLaplacePair:
    """Return the pair of Laplace noise on a Poisson sample with one record replaced."""
    return ReplacedLaplacePair(0.5 / group.sigma, group.rate)  # 2C apart, each C from absence


def _laplace_law(group: ReleaseGroup, relation: NeighbouringRelation) -> ReleaseLaw:
    """Return the dominating pair of a Laplace release under any sampling."""
    if group.replaces_record_in("poisson", relation):
        return Release(_replaced_laplace_pair(group))
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
        squared_mu=lambda group: group.count / group.sigma**2,
    ),
    "laplace": _Kind(
        _laplace_law,
        _GAUSSIAN,
        loss=_declared_loss,
    ),
    "balls_in_bins": _Kind(
        _balls_in_bins_law,
        "proved in docs/accountants/balls_in_bins.md; pair of arXiv 2412.16802 and 2502.08202",
        "each record is put into its batches uniformly, independently of all other records and "
        "anew in every epoch, and each noisy sum is divided by a constant",
        squared_mu=lambda group: (
            group.count * _batches_and_participations(group.atom)[1] / group.sigma**2
        ),
        pairs=lambda group: _batches_and_participations(group.atom)[1],
    ),
    "randomized_response": _Kind(
        _pair_law(RandomizedResponsePair),
        "Kairouz, Bonawitz & Ramage 2016, arXiv 1602.07387v3; exact by enumeration",
        "a neighbour changes one person's true category",
        is_personal=True,
        loss=_declared_loss,
    ),
    "discrete_laplace": _Kind(
        _pair_law(DiscreteLaplacePair),
        "Ghosh, Roughgarden & Sundararajan 2012, arXiv 0811.2841v3; proved in "
        "docs/accountants/kinds.md",
        _ONE_INTEGER,
        loss=_declared_loss,
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
        loss=_declared_loss,
    ),
    "permute_and_flip": _Kind(
        _pair_law(LaplacePair),
        "McKenna & Sheldon 2020, arXiv 2010.12603v1; its Laplace pair proved in "
        "docs/accountants/kinds.md",
        "a neighbour changes each score by at most Δ",
        is_attained=False,
        loss=_declared_loss,
    ),
    "truncated_laplace": _Kind(
        _pair_law(TruncatedLaplacePair),
        "Geng, Ding, Guo & Kumar 2020, arXiv 1810.00877v3; proved in docs/accountants/kinds.md",
        "the noise is added to one number, which a neighbour changes by at most Δ",
        loss=_declared_loss,
    ),
    "tree_aggregation": _Kind(
        lambda group, _: Release(GaussianPair(1 / group.sigma)),
        "Kairouz et al. 2021, arXiv 2103.00039; sensitivity proved in docs/accountants/kinds.md",
        squared_mu=lambda group: group.count / group.sigma**2,
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
        loss=_unshuffled_loss,
        is_attained=False,
        can_be_sampled=False,
    ),
    "approximate_dp": _Kind(
        _pair_law(ApproximatePair),
        "Kairouz, Oh & Viswanathan 2015, arXiv 1311.0776v4, Theorem 3.4",
        _GIVEN.format("(ε, δ)-DP"),
        loss=_declared_loss,
    ),
    "gdp": _Kind(
        _pair_law(GaussianPair),
        "Dong, Roth & Su 2019, arXiv 1905.02383v3, Theorem 3.2",
        _GIVEN.format("μ-GDP"),
        squared_mu=lambda group: group.count * float(group.atom.parameters[0]) ** 2,  # type: ignore[arg-type]
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
        loss=_declared_loss,
    ),
    "user_level": _Kind(
        _mixture_law,
        "Ganesh 2024, arXiv 2401.10294v2, Theorem 3.1; proved in docs/accountants/kinds.md",
        "a person has at most the stated number of records, each clipped and sampled by itself",
        squared_mu=_squared_mu_of_records,
        samples_itself=True,
    ),
    "gaussian_mixture": _Kind(
        _mixture_law,
        "Choquette-Choo et al. 2023, arXiv 2310.15526; proved in docs/accountants/kinds.md",
        "the norm of a person's contribution is drawn with the stated probabilities, independently "
        "of all other persons and anew in every release",
        squared_mu=lambda group: group.count * (group.atom.parameters[0][-1] / group.sigma) ** 2,  # type: ignore[index, operator]
        can_be_sampled=False,  # of fixed size; a Poisson sample is another mixture
    ),
    "truncated_poisson_sampled": _Kind(
        _truncated_poisson,
        "arXiv 2508.15089; proved in docs/accountants/kinds.md",
        "the larger of two neighbouring datasets has `dataset_size` records",
        squared_mu=_squared_mu_of_replacement,
        is_attained=False,
        samples_itself=True,
    ),
}
