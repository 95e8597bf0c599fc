"""Profiles on a lattice: δ is the largest gain over all thresholds, also beside plateaus."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant_service.numerics.engines import fft_lattice
from accountant_service.numerics.engines.fft_lattice import LatticeProfile
from accountant_service.numerics.laws.dominating_pair import LossCells


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    points=st.integers(1, 3000) | st.integers(3000, 20_000),  # one block of thresholds, and many
    floor=st.sampled_from([-math.inf, -1.0]),
    noise=st.sampled_from([0.0, 1e-3]),
)
def test_delta_is_the_largest_gain_over_all_thresholds(
    seed: int, points: int, floor: float, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.exponential(size=(2, points)) * rng.choice([0, 1, 30], size=(2, points))
    p, q = (np.cumsum(each[::-1])[::-1] / max(each.sum(), 1e-9) for each in steps)
    p = p + noise * rng.uniform(size=points)  # rounding makes many small peaks
    profile = LatticeProfile(p, q, 0.0, 0.0, floor=floor)
    epsilons = np.array([0.0, 0.1, 1.0, 5.0])
    is_lower = floor == -math.inf
    for epsilon, found in zip(epsilons, profile.deltas(epsilons), strict=True):
        known = (p > 0) & (q > 0) if is_lower else p > 0
        gains = (p - math.exp(epsilon) * q)[known]
        best = float(gains.max(initial=0.0))
        assert math.isclose(found, min(max(best, 0.0), 1.0), rel_tol=1e-12, abs_tol=1e-300)


def test_a_peak_far_from_a_plateau_is_found() -> None:
    """A search at every √n-th threshold lands on the plateau, which lies higher than its steps."""
    points = 800_000
    p = np.full(points, 1e-3)
    p[: points // 2] += 3.5e-4
    q = np.full(points, 1e-3)
    q[points // 2 + 7 :] = 0.0  # one peak, between two of these thresholds
    p[points // 2 + 8 :] = 1e-5
    profile = LatticeProfile(p, q, 0.0, 0.0, floor=-1.0)
    assert profile.delta(0.0) >= 1e-3


def test_an_outcome_beyond_its_edge_counts_with_its_loss() -> None:
    """A cell whose edges are off by e holds losses up to e above its upper edge."""
    spacing, off = 0.1, 0.01
    loss = spacing + off
    p, q = np.array([0.0, 1.0, 0.0]), np.array([0.0, math.exp(-loss), 0.0])
    none, edge_error = np.zeros(3), np.full(2, off)
    cells = LossCells(0, p, q, 1 - q[1:-1], none, none, none[1:-1], np.ones(1), edge_error)
    # private: the discretised pair is a step of the upper profile
    first, mass, infinite = fft_lattice._connect_the_dots(cells, spacing)
    losses = spacing * (first + np.arange(len(mass)))
    for epsilon in (0.0, 0.05, spacing, spacing + 0.5 * off):
        found = mass @ np.maximum(-np.expm1(epsilon - losses), 0.0) + infinite
        assert found >= -math.expm1(epsilon - loss), epsilon
