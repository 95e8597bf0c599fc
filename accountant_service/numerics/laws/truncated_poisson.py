"""A dominating pair for a Gaussian release on a Poisson sample of limited size.

Each of the n records of the larger dataset is sampled with probability q. Of a sample of more than
B records a uniform subset of B is kept. Let K be the number of sampled records other than x, the
record by which the datasets differ.

* K < B: the sample is kept, with or without x. The pair is (1−q)·N(0) + q·N(μ) against N(0).
* K ≥ B: let U be a uniform set of B − 1 and y one more of the other sampled records. Without x the
  batch is U and y. With x it is U and x with probability q·B/(K + 1), else U and y. Neither U nor y
  depends on K, as a uniform subset of a uniform sample is uniform. So given U and y, the pair is
  (1−p)·N(0) + p·N(2μ) against N(0), where p is the mean of q·B/(K + 1) given K ≥ B, and 2μ the
  largest distance of x and y.

Whether K ≥ B, U and y do not depend on x. By joint convexity the mixture of the two pairs, with
weights of at least P(K < B) and P(K ≥ B), dominates the release, when x is removed and when added.
Compare arXiv 2508.15089. The pair is not attained: in the first case the batch holds U and x, in
the second x takes the place of y, and no y is known to be −x for certain in both.

**A replaced record.** Both datasets have n records. If K < B, the pair is that of a replaced record
of a Poisson sample. If K ≥ B, the record or its replacement takes the place of y, or neither does:
the pair is that of a replaced record of a fixed-size sample, with the rate p. A zeroed record is a
replaced one; if K < B, it costs what an absent one does.

With S the size of the whole sample, p·P(K ≥ B) = q·Σ_{j≥B} P(K = j)·B/(j + 1) = P(S > B)·B/n.
"""

from __future__ import annotations

from typing import Final

from scipy import special

from accountant_service.numerics.laws.dominating_pair import GaussianPair, Release, ReleaseLaw
from accountant_service.numerics.laws.fixed_size_replacement import FixedSizeReplacement
from accountant_service.numerics.laws.mixture import MixedRelease
from accountant_service.numerics.laws.replaced_record import ReplacedRecord

_ROUNDING: Final = 1e-9  # relative, more than the error of a binomial tail
_WEIGHT_MIN: Final = 1e-300  # of a case whose probability underflows


def truncated_poisson_law(
    dataset_size: int,
    sample_rate: float,
    batch_size_max: int,
    mu: float,
    *,
    replaced: bool = False,
    zeroed: bool = False,
) -> ReleaseLaw:
    """Return the dominating pair of a Gaussian release on a Poisson sample of limited size.

    Args:
        dataset_size: n, of the larger dataset, more than `batch_size_max`.
        sample_rate: q in (0, 1].
        batch_size_max: B.
        mu: the clip norm divided by the standard deviation of the noise.
        replaced: whether neighbours differ in one replaced record, not in one more record.
        zeroed: whether they differ in one zeroed record.
    """
    others = dataset_size - 1
    cut = binomial_tail(batch_size_max, others, sample_rate)
    rate = sample_rate
    if cut > _WEIGHT_MIN:
        chosen = binomial_tail(batch_size_max + 1, dataset_size, sample_rate)
        rate = min(rate, chosen * batch_size_max / dataset_size / cut * (1 + 4 * _ROUNDING))
    exchanged: ReleaseLaw = Release(GaussianPair(2 * mu), rate)
    if replaced or zeroed:
        exchanged = FixedSizeReplacement(2 * mu, rate)
    kept = binomial_below(batch_size_max, others, sample_rate)
    whole = _untruncated_law(mu, sample_rate, replaced=replaced)
    return MixedRelease(((_round_up(kept), whole), (_round_up(cut), exchanged)))


def _round_up(weight: float) -> float:
    """Round the probability of one case of a mixture up; return at least `_WEIGHT_MIN`.

    Neither case dominates the other: a record that is kept moves a sum less, but more often.
    """
    return min(1.0, max(weight * (1 + _ROUNDING), _WEIGHT_MIN))


def _untruncated_law(mu: float, sample_rate: float, *, replaced: bool) -> ReleaseLaw:
    """Return the dominating pair of a Gaussian release on an untruncated Poisson sample."""
    if replaced and sample_rate == 1.0:
        return Release(GaussianPair(2 * mu), 1.0)
    if replaced:
        return ReplacedRecord(mu, sample_rate)
    return Release(GaussianPair(mu), sample_rate)


def binomial_tail(least: int, trials: int, probability: float) -> float:
    """Return the probability of at least `least` successes of a binomial distribution.

    SciPy's incomplete beta function is exact to about 1e-12 for a billion trials, its binomial
    tails are not.
    """
    if not 0 < least <= trials:
        return float(least <= 0)
    return float(special.betainc(least, trials - least + 1, probability))


def binomial_below(least: int, trials: int, probability: float) -> float:
    """Return the probability of fewer than `least` successes of a binomial distribution."""
    if not 0 < least <= trials:
        return float(least > 0)
    return float(special.betaincc(least, trials - least + 1, probability))
