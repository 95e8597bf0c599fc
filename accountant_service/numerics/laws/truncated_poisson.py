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

Whether K ≥ B, U and y do not depend on x. By joint convexity the mixture of the two pairs, with the
weights P(K < B) and P(K ≥ B), dominates the release, when x is removed and when it is added.
Compare arXiv 2508.15089. The pair is not attained: in the first case the batch holds U and x, in
the second x takes the place of y, and no y is known to be −x for certain in both.

With S the size of the whole sample, p·P(K ≥ B) = q·Σ_{j≥B} P(K = j)·B/(j + 1) = P(S > B)·B/n.
"""

from __future__ import annotations

from scipy import special

from accountant_service.numerics.laws.dominating_pair import GaussianPair, Release, ReleaseLaw
from accountant_service.numerics.laws.mixture import MixedRelease

_ROUNDING = 1e-9  # relative, more than the error of a binomial tail


def truncated_poisson_law(
    dataset_size: int, sample_rate: float, batch_size_max: int, mu: float
) -> ReleaseLaw:
    """Return the dominating pair of a Gaussian release on a Poisson sample of limited size.

    Args:
        dataset_size: n, of the larger dataset, more than `batch_size_max`.
        sample_rate: q in (0, 1].
        batch_size_max: B.
        mu: the clip norm divided by the standard deviation of the noise.
    """
    whole = Release(GaussianPair(mu), sample_rate)
    cut = binomial_tail(batch_size_max, dataset_size - 1, sample_rate)
    if cut <= 0.0:
        return whole
    chosen = binomial_tail(batch_size_max + 1, dataset_size, sample_rate)
    rate = min(sample_rate, chosen * batch_size_max / dataset_size / cut * (1 + 4 * _ROUNDING))
    exchanged = Release(GaussianPair(2 * mu), rate)
    cut = min(1.0, cut * (1 + _ROUNDING))
    return MixedRelease(
        ((1.0, exchanged),) if cut == 1.0 else ((1.0 - cut, whole), (cut, exchanged))
    )


def binomial_tail(least: int, trials: int, probability: float) -> float:
    """Return the probability of at least `least` successes of a binomial distribution."""
    return float(special.bdtrc(least - 1, trials, probability)) if least > 0 else 1.0
