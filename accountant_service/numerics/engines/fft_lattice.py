"""Two-sided composition of privacy losses on a lattice, with every error added outward.

The proofs are in docs/accountants/pld.md; in short, for releases with losses on a lattice of
spacing h:

* **Upper bound.** Each cell's P-mass moves to its two edges so that P- and Q-mass are both kept
  ("connect the dots", Doroshenko et al. 2022, arXiv 2207.04380): the new pair dominates the old,
  and dominance survives composition.
* **Lower bound.** Any event A gives δ(ε) ≥ P(A) − e^ε·Q(A). Take A_t = {Σ l̃ ≥ t}, l̃ the loss
  rounded to the nearest lattice point: P(A_t) and Q(A_t) are lattice convolutions, no more.
* **Composition** convolves the exponentially tilted masses p(l)·e^{sl}/M(s) by FFT, so that the
  mass that matters is near the centre and the transform's error is relative to it.

Added outward:

* **FFT rounding.** A transform of N points is off by at most η‖·‖₂ with η = 7·eps·log₂N. An error
  of φᵢ grows in Φ = Πφⱼ^{Tⱼ} to Tᵢ|Φ/φᵢ||e|; Cauchy–Schwarz bounds each point of the inverse
  transform by Σ Tᵢ·η·‖pᵢ‖₂·‖Φ/φᵢ‖₂/√N plus a few eps·Tᵢ·‖Φ‖₂/√N for powers and products. This is
  added to every point (upper), or taken from every point of P and added to Q (lower).
* **Wrap-around.** The window holds all but e^{−30} of the tilted mass by Chernoff's bound on either
  side. Its moments are sums of blocks of masses that keep their mean at their ends, which by
  convexity can only raise them; an eps for each mass and block, and a few eps of the largest
  exponent, T times, are added. What lies above the window is added to δ (upper); the attacker
  accuses only within it (lower). Aliases can only add to the upper bound, and to Q, and are taken
  from P.
* **Masses** are rounded outward by a few eps of their exponents before they are composed.
* **Scale.** T·log M(s) is off by a few eps of itself, undoing the tilt by a few eps of its
  exponent, and the tails' sums by an eps a point. These move every mass outward.
* **Underflow.** A mass computed as zero may be up to 1e-300: that much is added to every mass that
  has to be an upper bound. Losses beyond ±600 count as infinite. Where a Q-mass underflows after
  composition, the upper bound gives up, and the lower one leaves the event out.

**Edges that are off.** Where outcomes are cut is computed by inverting l, so a cell holds outcomes
with losses in [a − e, a + h + e]. Each law bounds e: the loss at the computed cut is computed
again, and its distance from the lattice point and its own rounding are added. By connecting the
dots the mass may move to the ends a − e and a + h + e, with θ larger by at most e·r·e^a/(p·(1 −
e^{−h})). The lower end moves up to a. The upper one lies between two lattice points, and again at
most (1 − e^{−e})/(1 − e^{−h}) of its mass moves on to the next one. ∎ The lower bound needs nothing
of this: any event is an attack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy import fft

from accountant_service.numerics.errors import LatticeTooLargeError
from accountant_service.numerics.floats.convolution import (
    BLOCKS_MAX,
    LatticeMasses,
    coarsen,
    convolve,
)
from accountant_service.numerics.floats.special_functions import Array, lattice_points, log_sum_exp
from accountant_service.numerics.laws.dominating_pair import (
    Composition,
    Direction,
    LossCells,
    ReleaseLaw,
)
from accountant_service.numerics.time_limit import check_time

_EPS: Final = float(np.finfo(float).eps)
_LOG_WRAP: Final = -30.0  # natural log of the tilted mass allowed outside the window
_LOG_CUT: Final = -21.0  # natural log of the share of δ that may lie beyond the cells
_TILTED_REACH: Final = 60.0  # natural log of the tilted mass above 0 over that below the cells
POINTS_MAX: Final = 1 << 20  # points of one window, and cells of one release
_CELLS_MAX: Final = 1 << 22  # cells of all releases together: 32 MiB
_BLOCK: Final = 4096  # thresholds compared in one call of NumPy; fewer take as long
_WORK_MAX: Final = 1 << 26  # points of the window times different releases: a few seconds


@dataclass(frozen=True, slots=True)
class _ComposedMasses:
    """A composition's probabilities at equally spaced losses l, exponentially tilted by e^{tilt·l}.

    The mass at lattice point j is e^{log_scale − tilt·(l_j − centre)}·(mass_j ± error), and at
    most e^{log_above} (e^{log_below}) of the tilted mass lies above (below) the window.
    """

    losses: Array
    mass: Array
    error: float
    tilt: float
    log_scale: float
    rounding: float
    centre: float
    log_above: float
    log_below: float

    def weights(self) -> Array:
        """Return the factors e^{−tilt·(l − centre)} that undo the exponential tilting."""
        return np.exp(-self.tilt * (self.losses - self.centre))

    def without_overflow(self) -> _ComposedMasses:
        """Return the masses at losses l whose factor in `weights` does not overflow."""
        first = int(np.searchsorted(self.losses, self.centre - 300.0 / (1.0 + self.tilt)))
        return self.keep_last(len(self.losses) - first)

    def keep_last(self, points: int) -> _ComposedMasses:
        """Return the masses at the `points` greatest privacy losses."""
        return replace(self, losses=self.losses[-points:], mass=self.mass[-points:])


@dataclass(frozen=True, slots=True)
class LatticeProfile:
    """An upper or a lower bound on δ(ε), computed at equally spaced privacy losses (a lattice).

    It consists of bounds on the P- and Q-mass of {loss ≥ t} for every t of a window.

    Attributes:
        p, q: tail masses times e^{−log_scale_p}, e^{−log_scale_q}, by increasing t.
        slack: mass that the tails do not count, added to every δ.
        floor: the loss below which an upper bound says nothing; −∞ for lower bounds.
    """

    p: Array
    q: Array
    log_scale_p: float
    log_scale_q: float
    slack: float = 0.0
    floor: float = -math.inf

    @property
    def _is_upper(self) -> bool:
        """Return whether the profile is an upper bound on δ(ε), rather than a lower one."""
        return self.floor > -math.inf

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on ε at δ if the profile is an upper bound, else a lower bound.

        It is the largest log((P(A_t) − δ)/Q(A_t)) over t, at least 0.

        It is infinite if the slack alone exceeds δ.
        """
        target = delta - self.slack
        if target <= 0:
            return math.inf
        gain = self.p - math.exp(min(math.log(target) - self.log_scale_p, 700.0))
        useful = (gain > 0) & (self.q > 0)
        if self._is_upper and ((gain > 0) & (self.q == 0)).any():
            return math.inf  # the ratio of an event whose Q-mass underflows is not known
        if not useful.any():
            return max(0.0, self.floor)
        log_ratio = np.log(gain[useful]) - np.log(self.q[useful])
        best = float(log_ratio.max()) + self.log_scale_p - self.log_scale_q
        return max(0.0, best, self.floor)

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on δ(ε) if the profile is an upper bound, else a lower bound."""
        return float(self.deltas(np.array([epsilon]))[0])

    def deltas(self, epsilons: Array) -> Array:
        """Return, at each ε, an upper bound on δ(ε) if the profile is one, else a lower bound.

        It is the largest P(A_t) − e^ε·Q(A_t) over t, plus the slack, between 0 and 1.
        """
        is_known = (self.p > 0) & (self._is_upper | (self.q > 0))  # no Q underflows to nothing
        p, q = np.where(is_known, self.p, 0.0), np.where(is_known, self.q, 1.0)
        exponent = epsilons + (self.log_scale_q - self.log_scale_p)
        with np.errstate(over="ignore"):
            factor = np.exp(np.minimum(exponent, 700.0) if self._is_upper else exponent)
            best = _largest_gains(p, q, factor)
        with np.errstate(divide="ignore"):
            logs = np.log(np.maximum(best, 0.0)) + self.log_scale_p
        found = np.exp(np.minimum(logs, 0.0)) + self.slack
        return np.where(epsilons < self.floor, 1.0, np.minimum(found, 1.0))


def _largest_gains(p: Array, q: Array, factors: Array) -> Array:
    """Return max over thresholds t of p[t] − f·q[t] for each f = e^ε, which is δ(ε).

    Every t counts: rounding makes plateaus on which a search that assumes one peak stops. A block
    of neighbouring t is looked at only if its largest p and least q allow more than what is found.
    """
    if len(p) <= _BLOCK:
        return np.array([(p - factor * q).max() for factor in factors])
    starts = np.arange(0, len(p), _BLOCK)
    highest_p, lowest_q = np.maximum.reduceat(p, starts), np.minimum.reduceat(q, starts)
    found = np.empty(len(factors))
    for i, factor in enumerate(factors):
        limits = highest_p - factor * lowest_q
        best = -math.inf
        for block in np.argsort(-limits):
            if not limits[block] > best:
                break
            part = slice(starts[block], starts[block] + _BLOCK)
            best = max(best, float((p[part] - factor * q[part]).max()))
        found[i] = best
    return found


@dataclass(frozen=True, slots=True)
class AccuracyTarget:
    """The ε, and the exponential tilt, near which a bound on δ(ε) should be tight.

    Attributes:
        direction: of add-or-remove.
        tilt: s, near the saddle point.
        epsilon: about the ε to be read, better too large than too small.
        points_max: the most points of one window, and cells of one release.
        extended: whether to transform in longer numbers than doubles.
    """

    direction: Direction
    tilt: float
    epsilon: float
    points_max: int = POINTS_MAX
    extended: bool = False


SPACING_MAX: Final = 40.0  # so that e^loss of an edge beyond LOSS_MAX stays a double


def standard_deviations_to_cover(steps: int, log_delta: float) -> float:
    """Return how many standard deviations of a release's privacy loss the grid must cover.

    Beyond that reach `steps` releases lose at most e^_LOG_CUT of δ.
    """
    return math.sqrt(2 * (math.log(steps) - log_delta - _LOG_CUT))


def upper_profile(
    releases: Composition, target: AccuracyTarget, spacing: float, log_delta: float
) -> LatticeProfile:
    """Return an upper bound on δ(ε), tight near the target ε, where δ is about e^`log_delta`."""
    tail_deviations = standard_deviations_to_cover(sum(count for _, count in releases), log_delta)
    steps, log_finite = [], 0.0
    for release, count in releases:
        cells = _cut_into_cells(
            release, target, spacing, tail_deviations, max_cells(len(releases), target)
        )
        first, mass, beyond = _connect_the_dots(cells, spacing)
        if not mass.any():  # every loss counts as infinite
            return LatticeProfile(np.zeros(1), np.zeros(1), 0.0, 0.0, slack=1.0, floor=0.0)
        steps.append(LatticeMasses(first, mass, count))
        log_finite += count * math.log1p(-beyond) if beyond < 1 else -math.inf
    tilted = _compose(steps, spacing, target, rounding_sign=1).without_overflow()
    mass = np.maximum(tilted.mass, 0.0) + tilted.error
    p = mass * tilted.weights()
    q = p * np.exp(-(tilted.losses - tilted.centre))
    log_scale = tilted.log_scale + tilted.rounding
    top = log_scale - target.tilt * float(tilted.losses[-1] - tilted.centre)
    infinite = -math.expm1(log_finite)
    slack = infinite + math.exp(min(tilted.log_above + top, 0.0))
    return LatticeProfile(
        _tail_sums(p),
        _tail_sums(q),
        log_scale,
        tilted.log_scale - tilted.rounding - tilted.centre,
        slack,
        float(tilted.losses[0]),
    )


def lower_profile(
    releases: Composition, target: AccuracyTarget, spacing: float, log_delta: float
) -> LatticeProfile:
    """Return a lower bound on δ(ε), attained by attacks that see each privacy loss rounded.

    An attack accuses if the sum of rounded losses is at least a threshold in the window.

    Mass that wrapped around from outside the window is subtracted from P, and left in Q. Outcomes
    of infinite loss, which Q excludes, belong to every event: they are the slack.
    """
    tail_deviations = standard_deviations_to_cover(sum(count for _, count in releases), log_delta)
    limit = max_cells(len(releases), target)
    cut = [
        (
            _cut_into_cells(release, target, spacing, tail_deviations, limit, centred=True),
            count,
        )
        for release, count in releases
    ]
    p_steps, q_steps, log_finite = [], [], 0.0
    for cells, count in cut:
        log_finite += count * math.log1p(-cells.infinite) if cells.infinite < 1 else -math.inf
        p_mass, q_mass = np.maximum(cells.p - cells.p_rounding, 0.0), cells.q + cells.q_rounding
        p_mass[-1] = max(p_mass[-1] - cells.infinite, 0.0)
        if not p_mass.any():  # its rounding errors exceed all masses: nothing is known
            return LatticeProfile(np.zeros(1), np.ones(1), 0.0, 0.0)
        p_steps.append(LatticeMasses(cells.first, p_mass, count))
        q_steps.append(LatticeMasses(cells.first, q_mass, count))
    p = _compose(p_steps, spacing, target, rounding_sign=-1)
    q_target = replace(target, tilt=target.tilt + 1.0)
    q = _compose(q_steps, spacing, q_target, rounding_sign=1, window=p)
    points = min(len(p.without_overflow().losses), len(q.without_overflow().losses))
    p, q = p.keep_last(points), q.keep_last(points)
    aliases = math.exp(p.log_above) + math.exp(p.log_below)
    p_weights, q_weights = p.weights(), q.weights()
    p_tails = _tail_sums((p.mass - p.error) * p_weights) - aliases * p_weights
    q_tails = _tail_sums((np.maximum(q.mass, 0.0) + q.error) * q_weights)
    slack = -math.expm1(log_finite)
    return LatticeProfile(
        p_tails, q_tails, p.log_scale - p.rounding, q.log_scale + q.rounding, slack
    )


def _tail_sums(values: Array) -> Array:
    """Return for each value the sum of itself and all later values."""
    return np.cumsum(values[::-1])[::-1]


def loss_window(
    release: ReleaseLaw, target: AccuracyTarget, tail_deviations: float
) -> tuple[float, float]:
    """Return the least and the greatest loss that a release's discretisation must cover.

    Losses far below 0 hardly count once they are tilted: E_P[e^{sL}] ≥ e^{s·E_P[L]} ≥ 1, so the
    tilted mass below l is at most e^{sl}. An upper bound moves it up to l, and a lower bound counts
    it as a single loss there.
    """
    low, high = release.loss_limits(target.direction, tail_deviations)
    return max(low, min(0.0, high) - _TILTED_REACH / target.tilt), high


def _cut_into_cells(
    release: ReleaseLaw,
    target: AccuracyTarget,
    spacing: float,
    tail_deviations: float,
    limit: int,
    *,
    centred: bool = False,
) -> LossCells:
    """Discretise a privacy loss into intervals between grid points, or centred on them.

    Centred cells are what rounding to the nearest lattice point collects.
    """
    check_time()
    low, high = loss_window(release, target, tail_deviations)
    first, last = math.floor(low / spacing) - 1, math.ceil(high / spacing) + 1
    count = last - first  # one cell to spare on either side, for atoms at the very ends
    if count > limit:
        raise LatticeTooLargeError(count, limit)
    return release.cells(target.direction, first, count, spacing, offset=0.5 if centred else 0.0)


def _connect_the_dots(cells: LossCells, spacing: float) -> tuple[int, Array, float]:
    """Move each interval's mass to its ends; return first index, masses, and mass at infinity.

    The mass under both laws of the dominating pair, P and Q, is kept.

    Mass above the last edge moves to infinity.

    A cell's share for its upper edge is θ = (P − Q·e^{low})/(P·(1 − e^{−h})); rounding moves mass
    up, never down. What lies below the first edge moves up to it.

    If the outcomes were divided at losses up to e from the edges, their ends are low − e and
    high + e. The first moves up to the edge. The second is split between the edge and the next one,
    whose share is at most (1 − e^{−e})/(1 − e^{−h}).
    """
    inner, rounding = cells.p[1:-1] + cells.p_rounding[1:-1], cells.p_rounding
    edge_error = np.maximum(cells.edge_error[:-1], cells.edge_error[1:])
    gap = cells.gap + cells.gap_rounding + edge_error * (inner + np.abs(cells.gap))
    upward = np.clip(gap / -math.expm1(-spacing) + rounding[1:-1], 0.0, inner)
    from_below = np.concatenate([cells.p[:1] + rounding[:1], upward])
    beyond = from_below * np.minimum(np.expm1(-cells.edge_error) / math.expm1(-spacing), 1.0)
    mass = from_below - beyond
    mass[:-1] += inner - upward
    mass[1:] += beyond[:-1]
    return cells.first, mass, float(cells.p[-1] + rounding[-1] + beyond[-1])


def _compose(
    steps: Sequence[LatticeMasses],
    spacing: float,
    target: AccuracyTarget,
    rounding_sign: int,
    window: _ComposedMasses | None = None,
) -> _ComposedMasses:
    """Convolve all releases' exponentially tilted probabilities on a common grid of losses.

    Chernoff's bound chooses the window unless it is given.

    Args:
        steps: the releases' masses.
        spacing: of the lattice.
        target: gives the tilt.
        rounding_sign: 1 to round every tilted mass up by its rounding error, −1 to round it down.
        window: a composition whose window and centre are reused; None to choose them.
    """
    tilt = target.tilt
    tilted, log_scale, rounding = [], 0.0, 0.0
    for step in steps:
        losses = lattice_points(step.first, len(step.mass), spacing)
        with np.errstate(divide="ignore"):
            exponent = np.log(step.mass) + tilt * losses
        log_moment = float(log_sum_exp(exponent))
        # each exponent is off by a few eps of its terms, log_moment taken as it was computed
        terms = np.abs(exponent - tilt * losses) + np.abs(tilt * losses) + abs(log_moment)
        exponent_error = np.where(np.isfinite(exponent), 4 * _EPS * (4 + terms), 0.0)
        mass = np.exp(exponent - log_moment + rounding_sign * exponent_error)
        tilted.append(replace(step, mass=mass))
        log_scale += step.count * log_moment
        rounding += step.count * 4 * _EPS * abs(log_moment)
    moments = _ChernoffMoments(tilted, spacing)
    if window is None:
        low, high = moments.window()
        first = math.floor(low / spacing)
        size = math.ceil(high / spacing) - first + 1
        limit = _max_window_points(len(steps), target)
        if size <= limit:  # a larger number may be more than an array can have
            size = fft.next_fast_len(size, real=True)
            size += size % 2
        if size > limit:
            raise LatticeTooLargeError(size, limit)
        losses, centre = lattice_points(first, size, spacing), moments.mean
    else:
        losses, centre = window.losses, window.centre
        first, size = round(float(losses[0]) / spacing), len(losses)
    mass, error = convolve(tilted, first, size, extended=target.extended)
    largest_loss = abs(centre) + float(losses[-1] - losses[0])  # the largest loss of a weight
    return _ComposedMasses(
        losses,
        mass,
        error,
        tilt,
        log_scale - tilt * centre,
        rounding + _EPS * (4 * (1 + tilt) * largest_loss + size),  # with that of the tails' sums
        centre,
        moments.log_tail_above(float(losses[-1])),
        moments.log_tail_below(float(losses[0])),
    )


def max_cells(releases: int, target: AccuracyTarget) -> int:
    """Return the most loss intervals that one of `releases` releases may be discretised into."""
    return min(target.points_max, _CELLS_MAX // releases)


def _max_window_points(releases: int, target: AccuracyTarget) -> int:
    """Return the most grid points that the work limit allows in convolving releases."""
    return min(target.points_max, _WORK_MAX // releases)


class _ChernoffMoments:
    """Log-moments of a composition's tilted privacy loss, for Chernoff bounds on its tails."""

    def __init__(self, steps: Sequence[LatticeMasses], spacing: float) -> None:
        coarse = [(*coarsen(step, spacing), step.count) for step in steps]
        means = [float(mass @ losses) for losses, mass, _ in coarse]
        variances = [
            count * float(mass @ (losses - mean) ** 2)
            for (losses, mass, count), mean in zip(coarse, means, strict=True)
        ]
        self.mean = math.fsum(
            mean * count for (_, _, count), mean in zip(coarse, means, strict=True)
        )
        deviation = math.sqrt(max(math.fsum(variances), spacing * spacing, 1e-200))
        relative = np.array([0.25, 0.5, 1, 2, 4, 6, 8, 10, 13, 18, 30]) / deviation
        # a few rare outcomes far out need rates of their own
        self.rates = np.concatenate([relative, [1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0]])
        self.upper, self.lower = np.zeros_like(self.rates), np.zeros_like(self.rates)
        for (losses, mass, count), step in zip(coarse, steps, strict=True):
            exponent, log_mass = self.rates[:, None] * losses, np.log(mass)
            moment_error = _moment_rounding(exponent, log_mass, len(step.mass))
            self.upper += count * (log_sum_exp(log_mass + exponent) + moment_error)
            self.lower += count * (log_sum_exp(log_mass - exponent) + moment_error)

    def window(self) -> tuple[float, float]:
        """Return a least and a greatest loss; by Chernoff's bound, the mass beyond is negligible.

        On either side at most e^_LOG_WRAP of the tilted mass lies outside.
        """
        high = float(np.min((self.upper - _LOG_WRAP) / self.rates))
        low = float(np.max(-(self.lower - _LOG_WRAP) / self.rates))
        return low, high

    def log_tail_above(self, edge: float) -> float:
        """Return the log of Chernoff's bound on the tilted mass at losses above `edge`."""
        return min(0.0, float((self.upper - self.rates * edge).min()))

    def log_tail_below(self, edge: float) -> float:
        """Return the log of Chernoff's bound on the tilted mass at losses below `edge`."""
        return min(0.0, float((self.lower + self.rates * edge).min()))


def _moment_rounding(exponent: Array, log_mass: Array, points: int) -> Array:
    """Return upper bounds on the rounding error of one release's log-moment, per order.

    Every term is off by a few eps of its exponent. Blocks are sums of at most `points` / 4096 + 1
    positive masses, the moment is one of all blocks, and sums in any order are off by at most an
    eps a term.
    """
    largest = np.abs(exponent).max(axis=1) + float(np.abs(log_mass).max())
    rounding: Array = _EPS * (4 * largest + 3 * points / BLOCKS_MAX + len(log_mass) + 16)
    return rounding
