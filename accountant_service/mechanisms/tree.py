"""The mechanism tree: immutable kinds of mechanism, and a shorthand for DP-SGD.

A description says everything that an accountant may need, and nothing about how to account for it.
The meaning of a released kind never changes: extensions are new kinds or new optional fields.

`noise_multiplier` is the noise over the clip norm C under every neighbouring relation. Accountants,
not callers, take into account that a relation may double the sensitivity.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

Sampling = Literal["poisson", "fixed_size", "balls_in_bins", "shuffled", "none"]


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Adds N(0, (σC)²) to a sum of vectors of ℓ2 norm at most C; `noise_multiplier` is σ."""

    kind: ClassVar = "gaussian"
    noise_multiplier: float


@dataclass(frozen=True, slots=True)
class Laplace:
    """Adds Laplace noise to a sum of ℓ1 norm at most C; `noise_multiplier` is its scale b over C.

    The scale, not the standard deviation (which is √2·b): the unsampled release is (C/b)-DP.
    """

    kind: ClassVar = "laplace"
    noise_multiplier: float


@dataclass(frozen=True, slots=True)
class DiagonalGaussian:
    """Adds Gaussian noise with its own standard deviation to each coordinate or block.

    As private as a Gaussian with σ* = (Σⱼ sⱼ²/σⱼ²)^(−1/2): Xu et al. 2020, Lemma 1.
    """

    kind: ClassVar = "diagonal_gaussian"
    sensitivities: tuple[float, ...]
    noise_stds: tuple[float, ...]

    def noise_multiplier(self) -> float:
        """Return the noise multiplier of the equivalent Gaussian release.

        It is σ* of Lemma 1, the same for any order of the coordinates.
        """
        ratios = sorted(
            (s / deviation) ** 2
            for s, deviation in zip(self.sensitivities, self.noise_stds, strict=True)
        )
        return 1.0 / math.sqrt(math.fsum(ratios))


@dataclass(frozen=True, slots=True)
class RandomizedResponse:
    """Answers truly, or with probability `flip_probability` uniformly among all categories.

    Each person sends one answer. Neighbouring datasets differ in one person's true category.
    """

    kind: ClassVar = "randomized_response"
    categories: int
    flip_probability: float


@dataclass(frozen=True, slots=True)
class DiscreteLaplace:
    """Adds an integer j with probability ∝ e^{−|j|/scale} to one integer.

    `sensitivity` is that of the integer under the stated neighbouring relation.
    """

    kind: ClassVar = "discrete_laplace"
    scale: float
    sensitivity: int = 1


@dataclass(frozen=True, slots=True)
class DiscreteGaussian:
    """Adds an integer j with probability ∝ e^{−j²/(2·noise_std²)} to one integer.

    `sensitivity` is that of the integer under the stated neighbouring relation.
    """

    kind: ClassVar = "discrete_gaussian"
    noise_std: float
    sensitivity: int = 1


@dataclass(frozen=True, slots=True)
class Exponential:
    """A mechanism with the bounded range `epsilon` under the stated neighbouring relation.

    The exponential mechanism with scores of sensitivity Δ and probabilities ∝ e^{ε·score/(2Δ)} has
    it, or e^{ε·score/Δ} if all scores change in the same direction.
    """

    kind: ClassVar = "exponential"
    epsilon: float


@dataclass(frozen=True, slots=True)
class PermuteAndFlip:
    """The permute-and-flip mechanism with probabilities e^{ε·(score − best)/(2Δ)}: it is ε-DP."""

    kind: ClassVar = "permute_and_flip"
    epsilon: float


@dataclass(frozen=True, slots=True)
class TruncatedLaplace:
    """Adds noise with a density ∝ e^{−|x|/scale} on [−bound, bound] to one number.

    `sensitivity` is that of the number under the stated neighbouring relation.
    """

    kind: ClassVar = "truncated_laplace"
    scale: float
    bound: float
    sensitivity: float = 1.0


@dataclass(frozen=True, slots=True)
class MatrixFactorization:
    """Adds correlated noise to the steps of a training run (DP-FTRL): Gaussian noise times C⁻¹.

    C is the lower-triangular Toeplitz matrix with these coefficients in its first column, as in
    BandMF and BLT, and `noise_multiplier` the noise over the clip norm before C⁻¹ is applied. Each
    record takes part in at most `participations` steps, at least `min_separation` steps apart.
    """

    kind: ClassVar = "matrix_factorization"
    noise_multiplier: float
    coefficients: tuple[float, ...]
    steps: int
    min_separation: int
    participations: int

    def sensitivity(self) -> float:
        """Return the ℓ2 sensitivity of the matrix C times the gradients, in units of the clip norm.

        The worst record takes part in the steps 0, b, 2b, …: inner products of columns are not
        negative, and fall with the distance of the columns and with the later one's index.
        """
        total = [0.0] * self.steps
        for start in range(0, self.steps, self.min_separation)[: self.participations]:
            for i, value in enumerate(self.coefficients[: self.steps - start]):
                total[start + i] += value
        return math.hypot(*total)


@dataclass(frozen=True, slots=True)
class BandedMatrixFactorization:
    """Adds correlated noise to a run whose records are Poisson-sampled in turn, group by group.

    Noise and C are those of `matrix_factorization`, as in BandMF. Each record belongs to one of
    `groups` groups, which depends on nothing but the record. Step t samples each record of the
    group t mod `groups` independently at `sample_rate`, and no other record. C has at most as many
    coefficients as there are groups, so the steps of one record share no noise.
    """

    kind: ClassVar = "banded_matrix_factorization"
    noise_multiplier: float
    coefficients: tuple[float, ...]
    steps: int
    groups: int
    sample_rate: float

    def rounds(self) -> tuple[tuple[float, int], ...]:
        """Return the column norms at the first group's steps, each with its number of steps.

        Other groups have as many steps or one fewer, at columns that are cut off no less.
        """
        count = -(-self.steps // self.groups)
        last = self.steps - (count - 1) * self.groups
        whole, cut = math.hypot(*self.coefficients), math.hypot(*self.coefficients[:last])
        return ((whole, count - 1), (cut, 1)) if cut < whole else ((whole, count),)


@dataclass(frozen=True, slots=True)
class TreeAggregation:
    """Releases sums over a binary tree of the steps of a run, each with its own noise (DP-FTRL).

    The tree's nodes are blocks of 1, 2, 4, … steps; a node is released when its last step is done.
    Each has Gaussian noise of `noise_multiplier` times the clip norm. A record takes part in at
    most `participations` steps, at least `min_separation` steps apart. For a tree that
    starts anew each epoch use the kind `repeated`.
    """

    kind: ClassVar = "tree_aggregation"
    noise_multiplier: float
    steps: int
    participations: int = 1
    min_separation: int = 1

    def squared_sensitivity_bounds(self) -> tuple[int, int]:
        """Return a lower and an upper bound on the squared ℓ2 sensitivity, for clip norm 1.

        It is the most that Σ m² over the nodes can be, m the number of the record's steps in a
        node. Below: the record takes part in the steps 0, b, 2b, …. Above: in each level of the
        tree, nodes hold as many of its steps as fit, one node after the other.
        """
        separation, most = self.min_separation, self.participations
        counts = [0] * self.steps
        for step in range(0, self.steps, separation)[:most]:
            counts[step] = 1
        lower, upper, size = 0, 0, 1
        while counts:
            lower += sum(count * count for count in counts)
            fitting = min(most, -(-size // separation))
            present = min(most, -(-len(counts) * size // separation))
            upper += present // fitting * fitting**2 + (present % fitting) ** 2
            whole = len(counts) // 2 * 2
            counts = [a + b for a, b in zip(counts[:whole:2], counts[1:whole:2], strict=True)]
            size *= 2
        return lower, upper


@dataclass(frozen=True, slots=True)
class Repeats:
    """The distribution of the number of runs of a private selection, with its mean.

    `shape` is that of a negative binomial distribution.
    """

    distribution: Literal["geometric", "logarithmic", "negative_binomial", "poisson"]
    mean: float
    shape: float | None = None


@dataclass(frozen=True, slots=True)
class PrivateSelection:
    """Runs `mechanism` a random number of times, and releases the output of the best run only."""

    kind: ClassVar = "private_selection"
    repeats: Repeats
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class Parallel:
    """Runs each of `mechanisms` on a part of the data of its own.

    Each record belongs to one part, which depends on nothing but the record and never changes. So
    the parts are the same in all repetitions of a `repeated` release. Another `parallel` may divide
    the data in another way.
    """

    kind: ClassVar = "parallel"
    mechanisms: tuple[Mechanism, ...]


@dataclass(frozen=True, slots=True)
class ShuffledReports:
    """Shuffles the reports of `reports` people: each runs `mechanism` on their own input only.

    All run the same mechanism, independently, and it is ε-DP for some ε. Only the shuffled reports
    are seen. Neighbouring datasets differ in one person's input.
    """

    kind: ClassVar = "shuffled_reports"
    reports: int
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class ApproximateDp:
    """Any release that is (ε, δ)-DP under the stated neighbouring relation."""

    kind: ClassVar = "approximate_dp"
    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class Gdp:
    """Any release that is μ-Gaussian DP under the stated neighbouring relation."""

    kind: ClassVar = "gdp"
    mu: float


@dataclass(frozen=True, slots=True)
class Zcdp:
    """Any release that is ρ-zero-concentrated DP under the stated neighbouring relation."""

    kind: ClassVar = "zcdp"
    rho: float


@dataclass(frozen=True, slots=True)
class Rdp:
    """Any release with these Rényi divergences, at most, at these orders.

    Under the stated neighbouring relation, and in both directions.
    """

    kind: ClassVar = "rdp"
    orders: tuple[float, ...]
    divergences: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PrivacyProfile:
    """Any release that is (ε, δ)-DP for each of these pairs under the stated relation."""

    kind: ClassVar = "privacy_profile"
    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class UserLevel:
    """Runs `mechanism` on data in which one person has up to `records` records.

    Each record is sampled by itself, and its gradient is clipped by itself. Neighbouring datasets
    differ in all records of one person.
    """

    kind: ClassVar = "user_level"
    records: int
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class GaussianMixture:
    """Gaussian noise on a sum to which a person's contribution is drawn anew in every release.

    Its norm is at most `shifts[i]`, in clip norms, with probability `probabilities[i]`,
    independently of all other persons. `noise_multiplier` is noise over one clip norm.
    """

    kind: ClassVar = "gaussian_mixture"
    noise_multiplier: float
    shifts: tuple[float, ...]
    probabilities: tuple[float, ...]

    def drawn(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the shifts of positive probability, and their probabilities, which add up to 1.

        What rounding has left of 1 goes to the largest shift, and what is too much is taken from
        the smallest: a larger contribution never costs less.
        """
        pairs = list(zip(self.shifts, self.probabilities, strict=True))
        kept = [(shift, Fraction(str(chance))) for shift, chance in pairs if chance > 0]
        missing = 1 - sum(chance for _, chance in kept)
        at = -1 if missing > 0 else 0
        kept[at] = (kept[at][0], kept[at][1] + missing)
        kept = [(shift, chance) for shift, chance in kept if chance > 0]
        return tuple(shift for shift, _ in kept), tuple(float(chance) for _, chance in kept)

    def on_sample(self, rate: Fraction) -> GaussianMixture:
        """Return the mixture on a Poisson sample: a person who is not in it contributes nothing."""
        chances = {
            shift: rate * Fraction(str(chance))
            for shift, chance in zip(self.shifts, self.probabilities, strict=True)
        }
        chances[0.0] = Fraction(1) - sum(chances[shift] for shift in chances if shift > 0)
        shifts = tuple(sorted(chances))
        return GaussianMixture(
            self.noise_multiplier, shifts, tuple(float(chances[shift]) for shift in shifts)
        )


@dataclass(frozen=True, slots=True)
class TruncatedPoissonSampled:
    """Runs `mechanism` on a Poisson sample of which at most `batch_size_max` records are kept.

    A larger sample is replaced by a uniform subset of that size. `dataset_size` is the number of
    records of the larger of two neighbouring datasets.
    """

    kind: ClassVar = "truncated_poisson_sampled"
    dataset_size: int
    sample_rate: float
    batch_size_max: int
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class PoissonSampled:
    """Runs `mechanism` on a sample that contains each record independently at `sample_rate`."""

    kind: ClassVar = "poisson_sampled"
    sample_rate: float
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class FixedSizeSampled:
    """Runs `mechanism` on a uniform sample of exactly `batch_size` of `dataset_size` records."""

    kind: ClassVar = "fixed_size_sampled"
    dataset_size: int
    batch_size: int
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class BallsInBins:
    """Runs `mechanism` on each of `bins` batches: one epoch of balls-in-bins sampling.

    Each record is put into `selections` different batches, drawn uniformly and independently of all
    other records, and anew in every epoch. Batches have any size; the noisy sums are divided by a
    constant. `mechanism` is Gaussian noise without sampling of its own.
    """

    kind: ClassVar = "balls_in_bins"
    bins: int
    mechanism: Mechanism
    selections: int = 1


@dataclass(frozen=True, slots=True)
class Repeated:
    """Runs `mechanism` `count` times with fresh randomness, each adaptively."""

    kind: ClassVar = "repeated"
    count: int
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class Composed:
    """Runs each of `mechanisms` once, each adaptively."""

    kind: ClassVar = "composed"
    mechanisms: tuple[Mechanism, ...]


@dataclass(frozen=True, slots=True)
class DpSgd:
    """Shorthand for a training run: `steps` sampled Gaussian releases.

    Either `sample_rate` and `steps`, or `dataset_size`, `batch_size` and one of `steps` and
    `epochs`; or `steps` alone if `sampling` is "none", because the rate is then 1. Steps are
    rounded up to a whole number: ⌈epochs·dataset_size/batch_size⌉. With `balls_in_bins` sampling
    the batches of an epoch and the epochs must be whole numbers.
    """

    kind: ClassVar = "dp_sgd"
    noise_multiplier: float
    sample_rate: float | None = None
    steps: int | None = None
    dataset_size: int | None = None
    batch_size: int | None = None
    epochs: float | None = None
    sampling: Sampling = "poisson"

    def rate(self) -> float:
        """Return the sample rate: the expected fraction of the dataset in one batch."""
        return self.sample_rate if self.sample_rate is not None else float(self._exact_rate())

    def bins(self) -> int:
        """Return the number of batches in an epoch, rounded to the nearest integer."""
        if self.sample_rate is not None:
            return round(1 / self.sample_rate) if self.sample_rate > 0 else 1
        return round(1 / self._exact_rate())

    def unit_steps(self) -> int:
        """Return the number of steps accounted together: those of a balls-in-bins epoch, else 1."""
        return self.bins() if self.sampling == "balls_in_bins" else 1

    def step_count(self) -> int:
        """Return the number of steps."""
        if self.steps is not None:
            return self.steps
        return math.ceil(Fraction(self.epochs or 0) / self._exact_rate())

    def _exact_rate(self) -> Fraction:
        """Return the batch size over the dataset size, as an exact fraction.

        The codec has checked that both are given, or that there is no sampling.
        """
        if self.batch_size is None:
            return Fraction(1)
        return Fraction(self.batch_size, self.dataset_size or 1)

    def epoch_count(self) -> int:
        """Return the number of epochs of shuffled batches, rounded up.

        A loader that drops the last, smaller batch has ⌊N/B⌋ steps an epoch, one that keeps it has
        one more. The smaller number counts: a record may then be in more batches. A rate given
        without sizes may be rounded, so its inverse within a few rounding errors of a whole number
        counts as that number: 1 000 steps at a rate of 0.01 are ten epochs.
        """
        if self.epochs is not None:
            return math.ceil(self.epochs)
        if self.rate() == 0.0:
            return 0
        if self.dataset_size is not None:
            batches = math.floor(1 / self._exact_rate())
        else:
            batches = math.floor(1 / self.rate() * (1 + 4 * sys.float_info.epsilon))
        return -(-self.step_count() // max(batches, 1))


Mechanism = (
    Gaussian
    | Laplace
    | DiagonalGaussian
    | PoissonSampled
    | FixedSizeSampled
    | BallsInBins
    | Repeated
    | Composed
    | DpSgd
    | RandomizedResponse
    | DiscreteLaplace
    | DiscreteGaussian
    | Exponential
    | PermuteAndFlip
    | TruncatedLaplace
    | MatrixFactorization
    | BandedMatrixFactorization
    | TreeAggregation
    | PrivateSelection
    | ShuffledReports
    | Parallel
    | ApproximateDp
    | Gdp
    | Zcdp
    | Rdp
    | PrivacyProfile
    | UserLevel
    | GaussianMixture
    | TruncatedPoissonSampled
)
