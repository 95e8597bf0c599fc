"""Refinement of an FFT lattice, spacing by spacing, until its bounds are as narrow as wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from accountant_service.numerics.engines.fft_lattice import (
    POINTS_MAX,
    SPACING_MAX,
    AccuracyTarget,
    LatticeProfile,
    loss_window,
    lower_profile,
    max_cells,
    standard_deviations_to_cover,
    upper_profile,
)
from accountant_service.numerics.engines.saddle_point import TILT_MIN, SaddlePoint
from accountant_service.numerics.errors import LatticeTooLargeError
from accountant_service.numerics.laws.dominating_pair import Composition


class RefinedLattice:
    """A grid of equally spaced privacy losses, which `refine` makes finer, with bounds on δ(ε)."""

    def __init__(
        self, releases: Composition, target: AccuracyTarget, log_delta: float, spacing: float
    ) -> None:
        self.releases, self.target, self.log_delta = releases, target, log_delta
        self.loss_range = _loss_range(releases, target, log_delta)
        self.finest = self.loss_range / (max_cells(len(releases), target) - 3)
        self.spacing = max(min(spacing, self.loss_range / 8), self.finest)
        self.exhausted = False

    @classmethod
    def around(
        cls,
        releases: Composition,
        saddle: SaddlePoint,
        log_delta: float,
        width: float,
        points_max: int = POINTS_MAX,
        *,
        extended: bool = False,
    ) -> RefinedLattice:
        """Return a grid of losses for bounds on ε about `width` apart, near the ε of `saddle`."""
        target = AccuracyTarget(saddle.direction, saddle.tilt, saddle.epsilon, points_max, extended)
        return cls(releases, target, log_delta, _first_spacing(releases, target, width))

    def refine(self, factor: float) -> None:
        """Multiply the grid's spacing by about `factor` < 1, but keep to the limit on points."""
        self.spacing = max(self.finest, self.spacing * min(0.7, max(0.1, 0.85 * factor)))

    def profiles(
        self, lower_wanted: Callable[[LatticeProfile], bool] = lambda _: True
    ) -> tuple[LatticeProfile | None, LatticeProfile | None]:
        """Return an upper and a lower bound on δ(ε) at this grid spacing; None if not computed.

        The spacing is made coarser if the lattice does not fit into the limit.

        Args:
            lower_wanted: given the upper profile, returns whether to compute the lower one.

        Returns:
            None for a profile that is not wanted, and for both if no lattice fits.
        """
        while not self.exhausted:
            try:
                upper = upper_profile(self.releases, self.target, self.spacing, self.log_delta)
                if upper.floor > self.target.epsilon and self.target.tilt > TILT_MIN:
                    # tilted so far that the ε to be read lies below the window
                    self.target = replace(self.target, tilt=self.target.tilt / 2)
                    continue
                lower = None
                if lower_wanted(upper):
                    lower = lower_profile(self.releases, self.target, self.spacing, self.log_delta)
            except LatticeTooLargeError as error:
                self.finest = self.spacing = self.spacing * max(1.2, error.size_ratio)
                self.exhausted = self.spacing > min(2 * self.loss_range, SPACING_MAX)
                continue
            self.exhausted = self.spacing <= self.finest
            return upper, lower
        return None, None


def lattice_profiles(
    releases: Composition, saddle: SaddlePoint, tolerance: float, points_max: int
) -> tuple[LatticeProfile | None, LatticeProfile | None]:
    """Return an upper and a lower bound on δ(ε), tight near `saddle`'s ε; None if too costly.

    Args:
        releases: with their counts.
        saddle: around the ε of interest.
        tolerance: relative, of δ; wider if that takes too many points.
        points_max: the most points of each lattice.
    """
    width = tolerance / (1.0 + saddle.tilt)
    log_delta = max(saddle.log_delta, -600.0) - 10.0
    return RefinedLattice.around(releases, saddle, log_delta, width, points_max).profiles()


def _first_spacing(releases: Composition, target: AccuracyTarget, width: float) -> float:
    """Return the grid spacing at which upper and lower bounds on ε are about `width` apart.

    It solves T·(s+1)·h²/8 ≈ width.

    Quantised to quarter powers of two, so that neighbouring questions share a lattice and ε is
    monotone between them.
    """
    steps = sum(count for _, count in releases)
    wanted = math.sqrt(4 * width / (steps * (target.tilt + 1)))
    return float(2.0 ** (math.floor(4 * math.log2(wanted)) / 4))


def _loss_range(releases: Composition, target: AccuracyTarget, log_delta: float) -> float:
    """Return the length of the longest privacy-loss range to discretise, over all releases."""
    tail_deviations = standard_deviations_to_cover(sum(count for _, count in releases), log_delta)
    limits = [loss_window(release, target, tail_deviations) for release, _ in releases]
    return max(high - low for low, high in limits)
