"""The certified interval: where to tilt, how fine a lattice, and when to stop refining.

The saddle point that minimises a Rényi bound of ε (or of δ) puts the tilted mass where ε
will be; it decides accuracy, never validity. The lattice of `lattice.py` then proves both sides.
Both bounds err by about T·s·h²/12, so one measured width tells the spacing that is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy import special

from accountant_service.numerics import rounding
from accountant_service.numerics.lattice import (
    SPACING_MAX,
    Aim,
    Composition,
    LatticeTooLargeError,
    Profile,
    cells_max,
    lower_profile,
    reach_for,
    upper_profile,
)
from accountant_service.numerics.privacy_loss import DIRECTIONS, Direction
from accountant_service.numerics.special import Array, log_sum_exp

_COARSE_NODES: Final = 512
_ROUNDS_MAX: Final = 6
_TILT_MIN: Final = 1e-3
EPSILON_NEGLIGIBLE: Final = 0.05  # the tolerance is relative to ε, but never to less than this


@dataclass(frozen=True, slots=True)
class Bounds:
    """A proved enclosure of a value: lower ≤ value ≤ upper (upper may be infinite)."""

    lower: float
    upper: float


def epsilon_bounds(releases: Composition, delta: float, tolerance: float) -> Bounds:
    """A proved interval around the smallest ε with which the composition is (ε, δ)-DP.

    Args:
        releases: each release with its count (≥ 1), at least one.
        delta: in (0, 1).
        tolerance: the width to reach, relative to max(ε, `EPSILON_NEGLIGIBLE`).

    Returns:
        The interval, as narrow as the lattice limit allows when the tolerance is out of reach.
    """
    log_delta = math.log(delta)
    aims = [_aim(releases, d, log_delta, None) for d in DIRECTIONS]

    def wide(bounds: Bounds) -> float:
        if math.isinf(bounds.upper):
            return math.inf
        return (bounds.upper - bounds.lower) / max(bounds.upper, EPSILON_NEGLIGIBLE)

    return _refine(
        releases, aims, log_delta, tolerance, wide, lambda profile: profile.epsilon(delta)
    )


def delta_bounds(releases: Composition, epsilon: float, tolerance: float) -> Bounds:
    """A proved interval around the composition's δ(ε).

    Args:
        releases: each release with its count (≥ 1), at least one.
        epsilon: at least 0.
        tolerance: the width to reach, relative to δ divided by the tilt (so that it corresponds
            to the same relative width in ε).
    """
    aims = [_aim(releases, d, None, epsilon) for d in DIRECTIONS]
    steepest = max(aim.tilt for aim in aims)
    chernoff = max(_log_chernoff(releases, aim, epsilon) for aim in aims)
    log_delta = min(0.0, max(-600.0, chernoff - 10.0))

    def wide(bounds: Bounds) -> float:
        if math.isinf(bounds.upper):
            return math.inf
        if bounds.upper <= 1e-250:
            return 0.0
        scale = 1.0 + steepest * max(epsilon, EPSILON_NEGLIGIBLE)
        return (bounds.upper - bounds.lower) / (bounds.upper * scale)

    return _refine(
        releases, aims, log_delta, tolerance, wide, lambda profile: profile.delta(epsilon)
    )


def _refine(
    releases: Composition,
    aims: list[Aim],
    log_delta: float,
    tolerance: float,
    width: Callable[[Bounds], float],
    read: Callable[[Profile], float],
) -> Bounds:
    """Narrow each direction's lattice until the interval of the costlier one is as asked.

    A direction whose upper bound lies below the other's lower bound no longer matters.
    """
    sides = [_Side(releases, aim, log_delta, tolerance) for aim in aims]
    sides.sort(key=lambda side: -side.aim.epsilon)  # the costlier first: it settles the other
    for _ in range(_ROUNDS_MAX):
        for side in sides:
            best = max(side.lower for side in sides)
            reached = width(side.against(best))
            if reached <= tolerance or side.exhausted:
                continue
            if math.isfinite(reached):
                side.refine(math.sqrt(tolerance / reached))
            side.evaluate(read, best)
    return Bounds(
        rounding.down(max(side.lower for side in sides)),
        rounding.up(max(side.upper for side in sides)),
    )


class _Side:
    """One direction: its best bounds so far and the spacing to try next."""

    def __init__(self, releases: Composition, aim: Aim, log_delta: float, tolerance: float) -> None:
        self.releases, self.aim, self.log_delta = releases, aim, log_delta
        self.loss_range = _loss_range(releases, aim.direction, log_delta)
        self.finest = self.loss_range / (cells_max(len(releases)) - 3)
        wanted = _first_spacing(releases, aim, tolerance, self.loss_range)
        self.spacing = max(wanted, self.finest)
        self.lower, self.upper = 0.0, math.inf
        self.exhausted = False

    def against(self, lower: float) -> Bounds:
        """This side's upper bound beside the best lower bound of either side."""
        return Bounds(lower, max(lower, self.upper))

    def evaluate(self, read: Callable[[Profile], float], best: float) -> None:
        """Tighten the bounds at the present spacing, or at the finest that fits."""
        while not self.exhausted:
            try:
                upper = upper_profile(self.releases, self.aim, self.spacing, self.log_delta)
                if upper.floor > self.aim.epsilon and self.aim.tilt > _TILT_MIN:
                    # tilted so far that the ε to be read off lies below the window
                    self.aim = replace(self.aim, tilt=self.aim.tilt / 2)
                    continue
                self.upper = min(self.upper, read(upper))
                if self.upper > best:
                    lower = lower_profile(self.releases, self.aim, self.spacing, self.log_delta)
                    self.lower = max(self.lower, read(lower))
            except LatticeTooLargeError as error:
                self.finest = self.spacing = self.spacing * max(1.2, error.excess)
                self.exhausted = self.spacing > min(2 * self.loss_range, SPACING_MAX)
                continue
            self.exhausted = self.spacing <= self.finest
            return

    def refine(self, factor: float) -> None:
        """A finer spacing for the next round, within the lattice limit."""
        self.spacing = max(self.finest, self.spacing * min(0.7, max(0.1, 0.85 * factor)))


def _first_spacing(releases: Composition, aim: Aim, tolerance: float, loss_range: float) -> float:
    """A guess of the spacing that meets the tolerance, from T·(s+1)·h²/8 ≈ width.

    Quantised to quarter powers of two, so that neighbouring questions share a lattice and ε is
    monotone between them.
    """
    steps = sum(count for _, count in releases)
    width = tolerance * max(aim.epsilon, EPSILON_NEGLIGIBLE)
    wanted = min(math.sqrt(4 * width / (steps * (aim.tilt + 1))), loss_range / 8)
    return float(2.0 ** (math.floor(4 * math.log2(wanted)) / 4))


def _loss_range(releases: Composition, direction: Direction, log_delta: float) -> float:
    """The longest range of losses that one release's cells must cover."""
    reach = reach_for(sum(count for _, count in releases), log_delta)
    limits = [release.loss_limits(direction, reach) for release, _ in releases]
    return max(high - low for low, high in limits)


def _coarse_losses(
    releases: Composition, direction: Direction, reach: float
) -> list[tuple[Array, Array, int]]:
    """Each release's log P-mass and loss on a few hundred cells: for choosing, not for proving."""
    coarse = []
    for release, count in releases:
        low, high = release.ratio.limits(reach)
        of = release.ratio.masses(np.linspace(low - 1e-12, high + 1e-12, _COARSE_NODES))
        mixed = (1 - release.sample_rate) * of.zero + release.sample_rate * of.one
        p, q = (mixed, of.zero) if direction == "removing" else (of.zero, mixed)
        p, q = p + 1e-300, q + 1e-300  # far apart, no cell may have mass under both
        coarse.append((np.log(p), np.log(p / q), count))
    return coarse


def _cumulants(coarse: list[tuple[Array, Array, int]], tilts: Array) -> Array:
    """T·K(s) for each tilt s."""
    total = np.zeros_like(tilts)
    for log_p, loss, count in coarse:
        total += count * log_sum_exp(log_p + tilts[:, None] * loss)
    return total


def _aim(
    releases: Composition, direction: Direction, log_delta: float | None, epsilon: float | None
) -> Aim:
    """The tilt for a given δ, where Chernoff's ε is least, or for a given ε, where δ is."""
    steps = sum(count for _, count in releases)
    reach = reach_for(steps, -40.0 if log_delta is None else log_delta)
    coarse = _coarse_losses(releases, direction, reach)

    def cost(tilts: Array) -> Array:
        # δ ≤ e^{K(s) − sε}·sˢ/(s + 1)^{s+1}: Canonne, Kamath & Steinke's conversion at α = s + 1
        moments = _cumulants(coarse, tilts) - np.log1p(tilts) - tilts * np.log1p(1 / tilts)
        if epsilon is not None:
            return moments - tilts * epsilon
        return (moments - (log_delta or 0.0)) / tilts

    tilts = np.geomspace(_TILT_MIN, 1e5, 57)
    for _ in range(2):
        best = int(np.argmin(cost(tilts)))
        tilts = np.geomspace(tilts[max(best - 1, 0)], tilts[min(best + 1, len(tilts) - 1)], 17)
    tilt = float(tilts[int(np.argmin(cost(tilts)))])
    mean = math.fsum(
        count * float(special.softmax(log_p + tilt * loss) @ loss) for log_p, loss, count in coarse
    )
    return Aim(direction, tilt, max(mean if epsilon is None else epsilon, 0.0))


def _log_chernoff(releases: Composition, aim: Aim, epsilon: float) -> float:
    """Chernoff's log δ at the saddle point."""
    reach = reach_for(sum(count for _, count in releases), -40.0)
    coarse = _coarse_losses(releases, aim.direction, reach)
    return float(_cumulants(coarse, np.array([aim.tilt]))[0]) - aim.tilt * epsilon
