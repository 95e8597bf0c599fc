"""The certified interval against closed forms, and mutations that must break it."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from scipy import special

from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import fft_lattice, lattice_refinement, saddle_point
from accountant_service.numerics.engines.fft_lattice import LatticeProfile
from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.laws import dominating_pair, gaussian
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Composition,
    Direction,
    GaussianPair,
    LaplacePair,
    Release,
)
from tests.support import oracles
from tests.support.helpers import log_uniform

pytestmark = pytest.mark.usefixtures("without_memory")  # engines are replaced here


def sampled(q: float, sigma: float) -> Release:
    return Release(GaussianPair(1 / sigma), q)


@pytest.fixture
def lattice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing decays: the lattice has to answer."""

    def undamped(*_: object) -> None:
        raise SlowDecayError

    monkeypatch.setattr(certified_interval, "integrate_composition", undamped)
    monkeypatch.setattr(certified_interval.rare_events, "integrate_rare_events", undamped)


@pytest.fixture(params=["contour", "lattice"])
def engine(request: pytest.FixtureRequest) -> None:
    """Either engine."""
    if request.param == "lattice":
        request.getfixturevalue("lattice_only")


@pytest.mark.usefixtures("engine")
def test_holds_the_closed_form_without_sampling() -> None:
    rng = random.Random(11)
    for _ in range(40):
        mu, delta = log_uniform(rng, 0.02, 8), log_uniform(rng, 1e-15, 1e-2)
        steps = rng.choice([1, 3, 50, 4000])
        releases = [(Release(GaussianPair(mu / math.sqrt(steps))), steps)]
        bounds = certified_interval.epsilon_bounds(releases, delta, 1e-3)
        exact = float(gaussian.epsilon(delta, mu))
        assert bounds.lower <= exact <= bounds.upper, (mu, steps, delta)
        assert bounds.upper - bounds.lower <= 1e-3 * max(bounds.upper, 0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_holds_the_closed_form_of_a_single_step_in_both_directions() -> None:
    rng = random.Random(12)
    for _ in range(15):
        q, sigma = log_uniform(rng, 1e-4, 1), log_uniform(rng, 0.3, 20)
        delta = log_uniform(rng, 1e-12, 1e-3) * q
        bounds = certified_interval.epsilon_bounds([(sampled(q, sigma), 1)], delta, 1e-3)
        exact = float(oracles.single_step_epsilon(delta, q, sigma))
        assert bounds.lower <= exact * (1 + 1e-9) + 1e-12, (q, sigma, delta)
        assert bounds.upper >= exact * (1 - 1e-9), (q, sigma, delta)


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_the_delta_interval_holds_the_closed_form() -> None:
    rng = random.Random(13)
    for _ in range(12):
        q, sigma = log_uniform(rng, 1e-3, 1), log_uniform(rng, 0.4, 10)
        epsilon = log_uniform(rng, 1e-3, 5)
        bounds = certified_interval.delta_bounds([(sampled(q, sigma), 1)], epsilon, 1e-3)
        exact = max(
            float(oracles.single_step_delta(epsilon, q, sigma, removing=removing))
            for removing in (True, False)
        )
        assert bounds.lower <= exact * (1 + 1e-9) + 1e-280
        assert bounds.upper >= exact * (1 - 1e-9)


@pytest.mark.parametrize("scale", [0.5, 2.0, 20.0])
def test_holds_the_closed_form_of_laplace_noise(scale: float) -> None:
    for delta in (0.1, 1e-3, 1e-6, 1e-12):
        bounds = certified_interval.epsilon_bounds(
            [(Release(LaplacePair(1 / scale)), 1)], delta, 1e-3
        )
        exact = max(0.0, 1 / scale + 2 * math.log1p(-delta))
        assert bounds.lower <= exact * (1 + 1e-9)
        assert exact * (1 - 1e-9) <= bounds.upper <= exact + 1e-3 * max(exact, 0.05) + 1e-4


@pytest.mark.usefixtures("engine")
def test_parts_composed_are_the_whole() -> None:
    release = sampled(0.02, 1.1)
    whole = certified_interval.epsilon_bounds([(release, 600)], 1e-6, 1e-3)
    parts = certified_interval.epsilon_bounds([(release, 250), (release, 350)], 1e-6, 1e-3)
    assert max(whole.lower, parts.lower) <= min(whole.upper, parts.upper)


@pytest.mark.usefixtures("lattice_only")
def test_a_finer_lattice_narrows_the_interval() -> None:
    releases = [(sampled(0.01, 1.0), 1000)]
    coarse = certified_interval.epsilon_bounds(releases, 1e-5, 1e-2)
    fine = certified_interval.epsilon_bounds(releases, 1e-5, 1e-4)
    assert coarse.lower <= fine.lower
    assert fine.upper <= coarse.upper
    assert fine.upper - fine.lower < 1e-4 * fine.upper


@pytest.mark.usefixtures("engine")
def test_the_costlier_direction_counts() -> None:
    q, sigma, delta = 0.3, 1.0, 1e-6
    exact = float(oracles.single_step_epsilon(delta, q, sigma))
    found = certified_interval.epsilon_bounds([(sampled(q, sigma), 1)], delta, 1e-3)
    assert found.lower <= exact <= found.upper


@pytest.mark.slow
def test_a_composition_too_wide_for_a_lattice_still_gets_bounds() -> None:
    bounds = certified_interval.epsilon_bounds([(sampled(0.5, 0.05), 10**9)], 1e-5, 1e-3)
    assert 0 <= bounds.lower <= bounds.upper


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "delta"),
    [
        # the lattice at the saddle point's tilt: 26 % wide; at the slope of δ, in doubles: .6 %
        (
            [(4.698e-4, 1.62056, 4779), (7.0227e-4, 19.2246, 6972), (5.4795e-5, 22.1229, 186)],
            3.1587e-15,
        ),
        # a line integral that needs a little more than a third of a second: .4 %
        (
            [(3.1795e-5, 0.53209, 161), (9.6355e-5, 18.6377, 9375), (1.11862e-4, 7.40302, 92)],
            1.1848e-6,
        ),
    ],
    ids=["small differences", "rare events"],
)
def test_rare_large_losses_beside_small_ones(
    parts: list[tuple[float, float, int]], delta: float
) -> None:
    """Two cases of 10 000 whose intervals were right and wide."""
    releases = [(sampled(q, sigma), steps) for q, sigma, steps in parts]
    bounds = certified_interval.epsilon_bounds(releases, delta, 1e-3)
    assert bounds.upper - bounds.lower <= 1e-3 * bounds.upper


@pytest.mark.slow
@pytest.mark.usefixtures("lattice_only")
def test_events_whose_mass_underflows_do_not_lower_the_upper_bound() -> None:
    """ε in the tens of thousands: an early version ignored them and answered 115 165."""
    exact = 115_395.2065  # by the line integral, good to ten digits
    for tolerance in (1e-2, 1e-3):
        bounds = certified_interval.epsilon_bounds(
            [(sampled(0.8271, 0.807), 209_953)], 2.8e-7, tolerance
        )
        assert bounds.lower <= exact <= bounds.upper


# --- the lattice's outward terms: the bounds hold with each, and not without (tests/mutants)

MU, STEPS = 1.0, 50
PARTS = [(Release(GaussianPair(MU / math.sqrt(STEPS))), STEPS)]
SPACING = 0.002


def wrong_transform(patch: pytest.MonkeyPatch) -> None:
    """Let composed masses be off inward by what a transform may leave: P, Q and P of the upper."""
    genuine, signs = fft_lattice.convolve, iter((1, -1, -1))

    def off(*args: Any, **options: Any) -> tuple[fft_lattice.Array, float]:
        mass, error = genuine(*args, **options)
        error *= 1e8  # or the lattice's own width would hide it
        return mass + next(signs) * error, error

    patch.setattr(fft_lattice, "convolve", off)


def few_cells(patch: pytest.MonkeyPatch) -> None:
    """Cut two standard deviations into cells only: what lies above must count as infinite."""
    patch.setattr(fft_lattice, "standard_deviations_to_cover", lambda *_: 2.0)


def wrong_masses(patch: pytest.MonkeyPatch) -> None:
    """Let masses be off inward by their stated rounding, were doubles good to 1e-6 only."""
    # private: double precision is too good for the rounding to show
    patch.setattr(dominating_pair, "_EPS", 1e-6)
    genuine, signs = dominating_pair.normal_masses, iter((-1, 1, 1, -1))  # Q, P; Q, P

    def rounded(z: fft_lattice.Array, mu: float) -> tuple[fft_lattice.Array, fft_lattice.Array]:
        mass, rounding = genuine(z, mu)
        return np.maximum(mass + next(signs) * rounding, 0.0), rounding

    patch.setattr(dominating_pair, "normal_masses", rounded)


@pytest.mark.parametrize(
    ("fault", "epsilon", "tilt"),
    [
        (None, 1.0, 1.0),
        (wrong_transform, 1.0, 1.0),
        (few_cells, 3.0, 2.0),
        (wrong_masses, 1.0, 1.0),
    ],
)
def test_a_lattice_holds_the_closed_form(
    monkeypatch: pytest.MonkeyPatch, fault: Any, epsilon: float, tilt: float
) -> None:
    if fault is not None:
        fault(monkeypatch)
    aim = fft_lattice.AccuracyTarget("removing", tilt, epsilon)
    lower = fft_lattice.lower_profile(PARTS, aim, SPACING, -60.0).delta(epsilon)
    upper = fft_lattice.upper_profile(PARTS, aim, SPACING, -60.0).delta(epsilon)
    assert lower <= float(oracles.gaussian_delta(epsilon, MU)) <= upper


# ------------------------------------------------------------- reading a lattice at many points


def profiles_of(
    releases: Composition, epsilon: float, direction: Direction
) -> list[LatticeProfile]:
    """Return the upper and the lower profile of a lattice around an ε."""
    saddle = saddle_point.find_at_epsilon(releases, direction, epsilon)
    found = lattice_refinement.lattice_profiles(releases, saddle, 2e-3, 1 << 17)
    return [each for each in found if each is not None]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_points_of_a_lattice_are_read_as_one_by_one(direction: Direction) -> None:
    """The bound at each ε is the largest over all events, not only over those that are tried."""
    releases = [(sampled(0.01, 0.9), 30)]
    epsilons = np.linspace(0.0, 0.25, 40)
    upper, lower = profiles_of(releases, 0.1, direction)
    for profile in (upper, lower):
        known = profile.p > 0 if profile is upper else (profile.p > 0) & (profile.q > 0)
        factor = np.exp(epsilons + profile.log_scale_q - profile.log_scale_p)
        gains = profile.p[known] - np.multiply.outer(factor, profile.q[known])
        largest = np.maximum(gains.max(axis=1), 0.0) * math.exp(profile.log_scale_p)
        expected = np.where(epsilons < profile.floor, 1.0, largest + profile.slack)
        assert profile.deltas(epsilons) == pytest.approx(expected, rel=1e-12, abs=1e-300)
    assert (lower.deltas(epsilons) <= upper.deltas(epsilons)).all()
    assert upper.deltas(epsilons)[0] > 1e-3
    assert 0.99 * upper.delta(0.1) < lower.delta(0.1), "low losses are left out, not what counts"


@pytest.mark.parametrize("epsilon", [0.002, 0.01, 0.019])
def test_a_lattice_without_losses_far_below_zero_encloses_the_exact_curve(epsilon: float) -> None:
    """Adding a record to one sampled release: H(x) = a·Φ(t) − b·Φ(t − μ), e^x·l = a/b at t."""
    rate, mu = 0.02, 1 / 0.8
    weight, part = 1 - math.exp(epsilon) * (1 - rate), math.exp(epsilon) * rate
    at = (math.log(weight / part) + mu**2 / 2) / mu
    exact = weight * special.ndtr(at) - part * special.ndtr(at - mu)
    upper, lower = profiles_of([(Release(GaussianPair(mu), rate), 1)], epsilon, "adding")
    assert lower.delta(epsilon) <= exact <= upper.delta(epsilon)
    assert upper.delta(epsilon) - lower.delta(epsilon) < 0.05 * exact
