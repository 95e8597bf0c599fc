"""The worst pair of n shuffled reports, each made by an ε₀-DP randomizer of one person's input.

Let e = e^{ε₀} and C ~ Binomial(n − 1, 2/(e + 1)). Each of C + 1 reports is a bit. C of them are
fair coins, the clones. The last is the person's: 0 with probability e/(e + 1) under P, and 1 with
this probability under Q. An attacker sees the number of zeros and of ones. The pair dominates the
shuffled reports of two datasets that differ in one person's input (docs/accountants/kinds.md).

With N = C + 1 bits, a zeros, b = N − a ones, and B the masses of the zeros of N fair coins,

    P(a | N) = B(a)·2(e·a + b)/(N(e + 1)),    Q(a | N) = B(a)·2(a + e·b)/(N(e + 1)),

and the privacy loss is log((e·a + b)/(a + e·b)). N has the same law under both.

**Fewer outcomes.** Two steps keep the pair small, and can only raise its profile.

* *Fewer clones.* The pair with c clones dominates that with c + 1, as an attacker can add another
  fair coin. So neighbouring numbers of clones form blocks, and each block has its least number.
* *A grid of losses.* An outcome between two losses of the grid moves to both, with its masses under
  P and Q kept. Every hockey-stick divergence is a mean of a convex function of the ratio P/Q, and
  can only rise. The outcomes of few reports stay where they are.

**Rounding.** ε₀ is rounded up and the probability of a clone down, by the same argument. Binomial
masses are products of ratios of neighbours, from the largest mass outwards, divided by their sum:
each of k steps adds a few eps of the logarithm. The masses beyond add up to less than 1e-300.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.atomic_pair import AtomicPair, Atoms

_EPS: Final = float(np.finfo(float).eps)
_CENTRAL_DEVIATIONS: Final = 9.0  # of the number of clones, where blocks are narrow
_CENTRAL_WIDTH: Final = 2e-4  # of a block there, over its number of clones
_OUTER_WIDTH: Final = 0.05  # of a block elsewhere
_EXACT_REPORTS: Final = 200  # up to which every outcome is kept
_GRID: Final = 4096  # losses up to `_GRID_DEVIATIONS` of the outcomes
_GRID_DEVIATIONS: Final = 14.0
_GRID_OUTER: Final = 512  # losses beyond
_EPSILON_MIN: Final = 1e-9  # a smaller ε₀ is rounded up to it
_CELL_MIN: Final = 1e-12  # relative distance of two different losses


@dataclass(frozen=True)
class ShuffledReportsPair(AtomicPair):
    """The dominating pair of n shuffled reports, each by an ε₀-DP randomizer of one person.

    Attributes:
        reports: n, at least 1.
        epsilon: ε₀ ≥ 0.
    """

    reports: int
    epsilon: float

    def list_atoms(self) -> Atoms:
        """Return the outcomes of the pair; many outcomes are merged on a grid of privacy losses."""
        epsilon = max(rounding.up(self.epsilon), _EPSILON_MIN)
        small = math.exp(-epsilon)
        clone = rounding.down(2 * small / (1 + small))
        first, masses, error = binomial_masses(self.reports - 1, clone)
        grid = self._list_losses(epsilon, first, masses)
        weights = np.zeros(len(grid))
        for clones, weight in _blocks(first, masses):
            losses, q, own_error = _outcomes(clones, epsilon)
            error = max(error, own_error)
            _spread(grid, losses, weight * q, weights)
        return _mirrored(grid, weights, 2 * error + 64 * _EPS * (1 + epsilon))

    def _list_losses(self, epsilon: float, first: int, masses: Array) -> Array:
        """Return the grid of privacy losses, from 0 to ε₀, onto which outcomes are moved."""
        if self.reports <= _EXACT_REPORTS:
            each = [_outcomes(c, epsilon)[0] for c in range(first, first + len(masses))]
            return _merge_close(np.unique(np.concatenate([[0.0, epsilon], *each])))
        typical = max(first + float(masses @ np.arange(len(masses))), 1.0)
        end = min(_GRID_DEVIATIONS / math.sqrt(typical), 1.0)
        excess = np.linspace(0.0, end, _GRID + 1)  # of zeros over ones, as a share of all bits
        if end < 1.0:
            excess = np.concatenate([excess, np.geomspace(end, 1.0, _GRID_OUTER + 1)[1:]])
        losses = _losses((1 + excess) / 2, (1 - excess) / 2, epsilon)
        return _merge_close(np.unique(np.append(losses, epsilon)))


def binomial_masses(trials: int, probability: float) -> tuple[int, Array, float]:
    """Return a binomial distribution's probabilities, except for tails below 1e-300.

    Returns:
        The least number of successes, the masses from there on, and a bound on their relative
        error.
    """
    if trials == 0:
        return 0, np.ones(1), 0.0
    deviation = math.sqrt(trials * probability * (1 - probability))
    reach = math.ceil(40 * deviation) + 400
    mode = min(int((trials + 1) * probability), trials)
    first, last = max(mode - reach, 0), min(mode + reach, trials)
    number = np.arange(first, last, dtype=float)
    odds = math.log(probability) - math.log1p(-probability)
    rise = np.log((trials - number) / (number + 1)) + odds  # from each number to the next
    logs = np.concatenate([[0.0], np.cumsum(rise)])
    logs -= logs[mode - first]
    below = np.cumsum(-rise[: mode - first][::-1])[::-1]
    above = np.cumsum(rise[mode - first :])
    logs = np.maximum(np.concatenate([below, [0.0], above]), -745.0)
    masses = np.exp(logs)
    error = _EPS * (len(logs) * (8 + abs(odds) * 2 + float(np.abs(logs).max())) + 8)
    return first, masses / masses.sum(), 2 * error


def _blocks(first: int, masses: Array) -> Iterator[tuple[int, float]]:
    """Group numbers of clones (random reports): yield each group's least number and probability."""
    number = np.arange(first, first + len(masses), dtype=float)
    mean = float(masses @ number)
    reach = _CENTRAL_DEVIATIONS * math.sqrt(float(masses @ (number - mean) ** 2))
    end = first + len(masses)
    edges = [math.ceil(mean - reach), math.floor(mean + reach) + 1, end]
    start = first
    while start < end:
        width = _CENTRAL_WIDTH if edges[0] <= start < edges[1] else _OUTER_WIDTH
        stop = start + max(1, int(width * start))
        stop = min([stop, *(edge for edge in edges if edge > start)])
        yield start, float(masses[start - first : stop - first].sum())
        start = stop


def _losses(zeros: Array, ones: Array, epsilon: float) -> Array:
    """Return the privacy losses of outcomes with these numbers of zeros and ones, zeros ≥ ones."""
    small = math.exp(-epsilon)
    losses: Array = np.log1p((1 - small) * (zeros - ones) / (small * zeros + ones))
    losses[losses > epsilon] = epsilon
    return losses


def _outcomes(clones: int, epsilon: float) -> tuple[Array, Array, float]:
    """Return losses ≥ 0, probabilities and an error bound for one number of random reports.

    Outcomes with a negative loss are the mirror images of these. An outcome with as many zeros as
    ones is its own mirror image, and counts half.
    """
    bits = clones + 1
    least, masses, error = binomial_masses(bits, 0.5)
    zeros = np.arange(-(-bits // 2), least + len(masses), dtype=float)
    masses = masses[len(masses) - len(zeros) :].copy()
    if bits % 2 == 0:
        masses[0] /= 2
    ones = bits - zeros
    losses = _losses(zeros, ones, epsilon)
    small = math.exp(-epsilon)
    q = masses * 2 * (small * zeros + ones) / (bits * (1 + small))
    return losses, q, error + 16 * _EPS


def _spread(grid: Array, losses: Array, q: Array, weights: Array) -> None:
    """Add each outcome's probability to the `weights` of its two nearest grid losses."""
    upper = np.clip(np.searchsorted(grid, losses, side="left"), 1, len(grid) - 1)
    low, high = grid[upper - 1], grid[upper]
    losses = np.clip(losses, low, high)
    whole = np.expm1(low - high)
    down = q * np.expm1(losses - high) / whole
    up = q * np.exp(losses - high) * np.expm1(low - losses) / whole
    weights += np.bincount(upper - 1, down, len(grid)) + np.bincount(upper, up, len(grid))


def _merge_close(losses: Array) -> Array:
    """Return increasing losses without those that differ only by rounding.

    The first loss in each of many small ranges is kept, if it is far from the one before.
    """
    places = np.log1p(losses)
    _, first = np.unique(np.floor(places / (2 * _CELL_MIN)), return_index=True)
    far = np.diff(places[first]) > _CELL_MIN
    kept: Array = losses[first[np.concatenate([[True], far])]]
    kept[-1] = losses[-1]
    return kept


def _mirrored(losses: Array, q: Array, error: float) -> Atoms:
    """Return the outcomes with losses ≥ 0 and probabilities `q`, and their mirror images."""
    with np.errstate(divide="ignore"):
        log_q = np.log(q)
    present = log_q > -np.inf
    present[0] = False
    losses_up, log_up = losses[present], log_q[present]
    zero = np.array([0.0] if q[0] > 0 else [])
    log_zero = np.array([math.log(2 * q[0])] if q[0] > 0 else [])
    return Atoms(
        np.concatenate([-losses_up[::-1], zero, losses_up]),
        np.concatenate([(log_up + losses_up)[::-1], log_zero, log_up]),
        np.concatenate([log_up[::-1], log_zero, log_up + losses_up]),
        error,
    )
