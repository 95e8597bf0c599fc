"""An upper bound on ε alone, for searches that need no lower bound: one FFT lattice.

`certified_interval` bounds ε from both sides. A search for the least noise only asks whether an
upper bound meets a target. For laws without a characteristic function, such as balls in bins, an
upper bound at a chosen accuracy costs a fraction of the interval. The proof is that of
`fft_lattice.upper_profile`, for any tilt and any spacing: both affect the width of the bound only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics.engines.fft_lattice import AccuracyTarget
from accountant_service.numerics.engines.lattice_refinement import RefinedLattice
from accountant_service.numerics.engines.saddle_point import TILT_MIN
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.laws.dominating_pair import Composition, Direction

_SLOPE_STEP: Final = 0.02  # relative step in ε over which the slope is measured


@dataclass(frozen=True, slots=True)
class DirectionBound:
    """A proved upper bound on ε when a record is removed, or when one is added.

    Attributes:
        epsilon: the bound; infinite if the lattice proves none.
        slope: about −d(log δ)/dε there; a good tilt for a similar composition is a little less.
    """

    epsilon: float
    slope: float


def bound_direction(
    releases: Composition, direction: Direction, delta: float, epsilon: float, tilt: float,
    width: float,
) -> DirectionBound:  # fmt: skip
    """Compute a proved upper bound on ε at δ, for a removed or for an added record.

    Args:
        releases: each release with its count (≥ 1), at least one.
        direction: of add-or-remove.
        delta: in (0, 1).
        epsilon: about the ε expected, above 0; the bound is most accurate there.
        tilt: of the convolution, above 0; about −d(log δ)/dε, rather less than more.
        width: about the error allowed, relative to `epsilon`.
    """
    target = AccuracyTarget(direction, max(tilt, TILT_MIN), epsilon)
    steps = sum(count for _, count in releases)
    spacing = math.sqrt(4 * width * epsilon / (steps * (target.tilt + 1)))
    upper, _ = RefinedLattice(releases, target, math.log(delta), spacing).profiles(lambda _: False)
    if upper is None:
        return DirectionBound(math.inf, tilt)
    found = rounding.up(upper.epsilon(delta))
    if not 0 < found < math.inf:
        return DirectionBound(found, tilt)
    near, far = upper.deltas(np.array([found, found * (1 + _SLOPE_STEP)]))
    slope = math.log(near / far) / (_SLOPE_STEP * found) if near > far > 0 else tilt
    return DirectionBound(found, float(slope))
