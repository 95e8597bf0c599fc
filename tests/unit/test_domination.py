"""Domination of compositions: proved bounds everywhere, in both directions, and searches."""

from __future__ import annotations

import decimal
import itertools
import math
import time
import tracemalloc
from fractions import Fraction
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from accountant_service.numerics import domination, privacy_profile
from accountant_service.numerics.domination import dominates, fewest_repetitions, most_repetitions
from accountant_service.numerics.engines import saddle_point
from accountant_service.numerics.engines.line_integral import (
    IntegrationSettings,
    integrate_composition,
)
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws import gaussian
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Composition,
    GaussianPair,
    LaplacePair,
    Release,
)
from accountant_service.numerics.privacy_profile import PrivacyProfile
from accountant_service.numerics.time_limit import limit_time

SLACK = 1e-8


def steps(rate: float, noise: float, count: int = 1) -> Composition:
    """Return Poisson-sampled Gaussian steps."""
    return [(Release(GaussianPair(1 / noise), rate), count)]


# ------------------------------------------------------------------------- against other bounds

# The larger and the smaller composition of each pair differ in kind: none is evident.
PAIRS = [
    (steps(0.01, 1.1, 211), steps(0.01, 1.5, 380)),
    (steps(0.01, 1.1, 1856), steps(0.1, 5.0, 510)),
    (steps(0.004, 0.9, 6121), steps(0.01, 1.1, 1840)),
    (steps(0.02, 0.8, 601), steps(0.01, 1.1, 4200)),
    (steps(0.01, 1.1, 1000) + steps(0.02, 2.0, 100), steps(0.02, 1.5, 290)),
]


def test_the_bounds_at_the_last_points_are_kept_and_those_at_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search that asks at the same points again gets the bounds of before, not computed anew."""
    evaluations = Mock(wraps=privacy_profile._intersect)
    # private: an answer does not say what was computed anew
    monkeypatch.setattr(privacy_profile, "_intersect", evaluations)
    profile, points = PrivacyProfile(steps(0.01, 1.1, 200), "removing"), np.linspace(0.0, 1.0, 7)
    first, others = profile.cover(points, 1e-3, 0.0), profile.cover(points + 0.5, 1e-3, 0.0)
    assert (others[1][0] < first[1][0]).all()  # δ decreases: the kept bounds are not taken here
    evaluations.reset_mock()
    for found, again in zip(others, profile.cover(points + 0.5, 1e-3, 0.0), strict=True):
        assert (found == again).all()
    evaluations.assert_not_called()
    with pytest.raises(ValueError, match="read-only"):
        others[1][0, 0] = 0.0
    asked = points + 0.5
    profile.cover(asked, 1e-3, 0.0)
    asked[:] = points  # the caller's own array: it changes, the kept points do not
    evaluations.reset_mock()
    fresh = profile.cover(asked, 1e-3, 0.0)
    evaluations.assert_called()
    assert (first[0] <= fresh[0]).all()
    assert (fresh[1] <= first[1]).all()


@pytest.mark.spread(first=2)
@pytest.mark.parametrize(("larger", "smaller"), PAIRS)
def test_proved_domination_holds_at_random_points(
    larger: Composition, smaller: Composition
) -> None:
    """Between grid points too, H of the smaller composition is at most the slack above."""
    assert dominates(larger, smaller, SLACK)
    random = np.random.default_rng(7)
    for direction in DIRECTIONS:
        last = saddle_point.find_at_delta(smaller, direction, math.log(SLACK)).bound
        x = np.sort(random.uniform(0.0, 1.1 * last, 200))
        lower, _ = PrivacyProfile(smaller, direction).cover(x, 1e-6, SLACK / 100)
        _, upper = PrivacyProfile(larger, direction).cover(x, 1e-6, SLACK / 100)
        assert (lower <= upper + SLACK).all()
        assert (lower[0, x < 0.7 * last] > SLACK / 10).all()  # the comparison is not empty
    assert not dominates(smaller, larger, SLACK)


def test_negative_points_follow_from_the_other_direction() -> None:
    """H(−x) of one direction is 1 − e^−x + e^−x·H(x) of the other, for a product as well."""
    releases = [*steps(0.05, 1.0, 40), *steps(0.2, 3.0, 30), *steps(1.0, 4.0, 1)]
    x = np.linspace(0.05, 1.0, 9)
    for direction, other in (DIRECTIONS, DIRECTIONS[::-1]):
        saddle = saddle_point.find_at_epsilon(releases, direction, 0.0)
        line = integrate_composition(releases, saddle, IntegrationSettings(-26.0, 0.0, 1 << 20))
        lower, upper = line.delta(-x)
        low, high = PrivacyProfile(releases, other).cover(x, 1e-7, 0.0)
        assert (lower - 1e-9 <= -np.expm1(-x) + np.exp(-x) * high[0]).all()
        assert (upper + 1e-9 >= -np.expm1(-x) + np.exp(-x) * low[0]).all()
        assert (upper - lower < 1e-6).all()


def test_rows_of_a_table_are_bounds_of_each_number() -> None:
    """δ of several numbers of repetitions at once encloses that of each by itself."""
    numbers, x = np.array([150.0, 211.0, 300.0]), np.linspace(0.0, 1.0, 7)
    step = steps(0.01, 1.1)
    for direction in DIRECTIONS:
        lower, upper = PrivacyProfile(step, direction, numbers).cover(x, 1e-6, 1e-10)
        for at, number in enumerate(numbers):
            single = PrivacyProfile(steps(0.01, 1.1, int(number)), direction)
            low, high = single.cover(x, 1e-6, 1e-10)
            assert (lower[at] <= high[0]).all()
            assert (low[0] <= upper[at]).all()
            assert (upper[at] - lower[at] <= 1e-3 * upper[at] + 1e-9).all()


@pytest.mark.parametrize("last", [0.05, 1.0, 30.0])
def test_chords_between_upper_bounds_are_upper_bounds(last: float) -> None:
    """The chord in e^ε, rounded up, is the bound on δ between points whose δ is known."""
    random = np.random.default_rng(3)
    x = np.sort(random.uniform(0.0, last, 40))
    zero = Fraction(math.exp(1.01 * last))  # δ is a line in y = e^ε from 1 to 0: chords lie on it
    with decimal.localcontext() as context:
        context.prec = 60
        exact = [1 - Fraction(decimal.Decimal(float(each)).exp()) / zero for each in x]
    above = np.nextafter([float(each) for each in exact], math.inf)
    known = np.stack([above, np.where(random.random(40) < 0.7, 1.0, above)])
    known[1, -1] = above[-1]
    for row in privacy_profile._lower_to_chords(known, x):
        assert all(Fraction(float(bound)) >= each for bound, each in zip(row, exact, strict=True))
        assert (row <= above * (1 + 3e-10)).all()
    curved = np.exp(gaussian.log_delta(x, 1.0))  # strictly convex: chords lie above
    assert (privacy_profile._lower_to_chords(curved[np.newaxis], x) >= curved).all()
    gaps = np.where(np.arange(40) % 3 == 2, curved, 1.0)
    lowered = privacy_profile._lower_to_chords(gaps[np.newaxis], x)[0]
    assert (lowered >= curved).all()
    assert (lowered[:-1] < 1.0).all()


@pytest.mark.parametrize("scale", [5, 7, 8, 10, 20])
def test_fewer_repetitions_are_dominated_where_more_are(scale: int) -> None:
    """A lattice bounds few points: what is between them does not decide a comparison."""
    larger, slack = steps(0.01, 1.1, 2742), 1.25e-8
    step = [(Release(LaplacePair(1 / scale)), 1)]
    most = most_repetitions(step, larger, slack, 10**4)
    assert most >= scale
    for count in {*range(1, 8), most // 2, most - 2, most}:
        fits = dominates(larger, [(step[0][0], count)], slack)
        assert fits, count
    assert not dominates(larger, [(step[0][0], 2 * most)], slack)


# ------------------------------------------------------------------------------------ the slack


def gaussian_excess(mu_smaller: float, mu_larger: float) -> float:
    """Return sup H_smaller − H_larger of two unsampled Gaussian mechanisms."""
    x = np.linspace(0.0, 3.0, 20001)
    small, large = (np.exp(gaussian.log_delta(x, mu)) for mu in (mu_smaller, mu_larger))
    return float((small - large).max())


@pytest.mark.parametrize("scale", [0.02, 0.3, 1.0])
def test_slack_counts_once(scale: float) -> None:
    """Domination with slack holds just above the exact excess, and not below it."""
    excess = gaussian_excess(1.02 * scale, scale)
    larger, smaller = steps(1.0, 1 / scale), steps(1.0, 1 / (1.02 * scale))
    assert dominates(larger, smaller, 1.02 * excess)
    assert not dominates(larger, smaller, 0.98 * excess)
    assert not dominates(larger, smaller, 0.0)
    assert dominates(smaller, larger, 0.0)


# ------------------------------------------------------------------- between points, and beyond


def synthetic_bounds(x: Array, smaller: Array, larger: Array) -> domination._Bounds:
    """Return exact bounds on a grid."""
    narrow = np.ones(1, dtype=bool)
    return domination._Bounds(x, smaller[None], larger[None], larger[None], narrow)


def profile(rng: np.random.Generator, y: Array) -> Array:
    """Return a random convex function of y that decreases, with slopes in [−1, 0] and H(0) = 1."""
    offsets = rng.uniform(0.2, 1.0, 5)
    slopes = rng.uniform(0.0, 1.0, 5) * offsets
    lines = offsets[:, None] - slopes[:, None] * y
    return np.asarray(np.maximum(np.maximum(lines.max(axis=0), 1 - y), 0.0))


def mirrored(values: Array, y: Array) -> Array:
    """Return H of the other direction at 1/y, from that of this direction at y < 1."""
    return np.asarray((values - 1 + y) / y)


def gap_on_grid(seed: int, points: int) -> tuple[float, float, float]:
    """Return the gap found on a grid, the true one, and that at the grid points alone.

    The gap includes what H of the smaller function is at the end of the grid.
    """

    def both(y: Array) -> tuple[Array, Array]:
        """Return two random functions at each y."""
        rng = np.random.default_rng(seed)
        return profile(rng, y), profile(rng, y)

    x = np.linspace(0.0, 2.0, points)
    smaller, larger = both(np.exp(x))
    below = [mirrored(each, np.exp(-x)) for each in both(np.exp(-x))]
    this, other = synthetic_bounds(x, smaller, larger), synthetic_bounds(x, *below)
    small, large = both(np.exp(np.linspace(0.0, 2.0, 4001)))
    found = float(domination._largest_gap(this, other, 0.0)[0])
    tail = float(smaller[-1])
    return (
        found,
        max(float((small - large).max()), tail),
        max(float((smaller - larger).max()), tail),
    )


@given(st.integers(0, 10**9), st.integers(3, 12))
@settings(max_examples=60, deadline=None, derandomize=True)
@pytest.mark.slow
def test_gap_between_points_is_counted(seed: int, points: int) -> None:
    """The gap found on a coarse grid is at least the true one, whatever lies between its points."""
    found, true, _ = gap_on_grid(seed, points)
    assert found >= true - 1e-12


def test_points_alone_miss_a_crossing() -> None:
    """On coarse grids two functions cross between points: comparing the points is not enough."""
    results = [gap_on_grid(seed, 4) for seed in range(400)]
    assert any(at_points <= 0 < true - 1e-3 for _, true, at_points in results)
    assert any(found <= 0 for found, _, _ in results)  # some are proved on this grid nevertheless


def test_fine_grids_lose_little() -> None:
    """On a fine grid the gap found is hardly above the true one."""
    losses = [found - true for found, true, _ in (gap_on_grid(seed, 200) for seed in range(50))]
    assert max(losses) < 1e-2


def test_tail_beyond_the_last_point_is_counted() -> None:
    """H of the smaller composition at the last point must be within the slack."""
    x = np.linspace(0.0, 1.0, 9)
    smaller = 0.2 * np.exp(-x)
    larger = smaller + 0.1
    bounds = synthetic_bounds(x, smaller, larger)
    assert domination._largest_gap(bounds, bounds, 0.05)[0] > 0
    assert domination._largest_gap(bounds, bounds, float(smaller[-1]))[0] <= 0


def test_heavier_tail_is_refused() -> None:
    """Rare and large losses are not dominated by frequent small ones of a larger δ(0)."""
    light, heavy = steps(0.2, 4.0, 100), steps(0.002, 0.5, 20)
    at_zero = [
        PrivacyProfile(each, "removing").cover(np.zeros(1), 1e-2, 0.0) for each in (light, heavy)
    ]
    assert at_zero[0][0][0, 0] > at_zero[1][1][0, 0]
    assert not dominates(light, heavy, SLACK)


@pytest.mark.parametrize("failing", DIRECTIONS)
def test_both_directions_must_hold(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """Domination in one direction alone is refused."""
    x = np.linspace(0.0, 3.0, 200)
    low, high = (np.exp(gaussian.log_delta(x, mu)) for mu in (0.5, 0.6))
    low, high = np.where(x < 2.9, low, 0.0), np.where(x < 2.9, high, 0.0)

    def bounds(larger: PrivacyProfile, *_: object) -> domination._Bounds:
        """Return a pair of profiles that fails in one direction."""
        order = (high, low) if larger.direction == failing else (low, high)
        return synthetic_bounds(x, *order)

    # private: no pair of mechanisms is known that fails in one direction only
    monkeypatch.setattr(domination, "_bound_profiles", bounds)
    larger, smaller = PAIRS[0]
    assert not dominates(larger, smaller, 1e-3)
    failing = "neither"
    assert dominates(larger, smaller, 1e-3)


# ------------------------------------------------------------------------------------- an order


def test_reflexive_and_monotone_in_counts() -> None:
    """Every composition dominates itself and fewer of its releases, even without slack."""
    mixed = [*steps(0.01, 1.1, 50), (Release(LaplacePair(0.3), 0.5), 3), *steps(1.0, 7.0, 2)]
    assert dominates(mixed, mixed, 0.0)
    assert dominates(mixed, mixed[::-1], 0.0)
    for left_out in range(len(mixed)):
        fewer = [(r, n - (at == left_out)) for at, (r, n) in enumerate(mixed)]
        assert dominates(mixed, fewer, 0.0)
        assert not dominates(fewer, mixed, 0.0)


def test_numerics_alone_are_reflexive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of H prove that a composition dominates itself and fewer steps."""
    # private: what is evident would be decided before
    monkeypatch.setattr(domination, "_is_evident", lambda *_: False)
    assert dominates(steps(0.01, 1.1, 301), steps(0.01, 1.1, 300), SLACK)
    assert not dominates(steps(0.01, 1.1, 299), steps(0.01, 1.1, 300), SLACK)


def test_transitive_within_slack() -> None:
    """If A dominates B and B dominates C, then A dominates C with the sum of the slacks."""
    chain = [steps(0.01, 1.1, 211), steps(0.01, 1.5, 380), steps(0.02, 3.0, 300)]
    slack = SLACK / 2
    assert dominates(chain[0], chain[1], slack)
    assert dominates(chain[1], chain[2], slack)
    assert dominates(chain[0], chain[2], 2 * slack)


RATES, NOISES = (0.01, 0.3, 1.0), (0.8, 1.5)
RELEASES = [
    *(Release(GaussianPair(1 / noise), rate) for rate in RATES for noise in NOISES),
    *(Release(LaplacePair(1 / noise), rate) for rate in RATES for noise in NOISES),
]


def test_channels_never_increase_the_hockey_stick() -> None:
    """If one release can imitate another, its H is at least as large at every x."""
    pairs = itertools.permutations(RELEASES, 2)
    imitated = [pair for pair in pairs if domination._can_imitate(*pair)]
    assert len(imitated) >= 20
    for (release, other), direction in itertools.product(imitated, DIRECTIONS):
        larger, smaller = (each.cells(direction, -4000, 8000, 1e-3) for each in (release, other))
        for x in (-1.5, -0.3, 0.0, 0.2, 0.7, 1.4):
            gaps = [np.maximum(c.p - math.exp(x) * c.q, 0.0).sum() for c in (larger, smaller)]
            assert gaps[1] <= gaps[0] + 2e-3  # of grouping losses into cells


def test_more_noise_or_less_sampling_is_evident() -> None:
    """Post-processing is recognised without slack; the reverse is refused."""
    assert dominates(steps(0.02, 1.0, 10), steps(0.01, 1.2, 10), 0.0)
    assert not dominates(steps(0.02, 1.0, 10), steps(0.01, 1.2, 11), 0.0)
    assert not dominates(steps(0.02, 1.0, 10), steps(0.021, 1.2, 10), 0.0)
    assert not dominates(steps(0.02, 1.0, 10), steps(0.01, 0.99, 10), 0.0)
    laplace = [(Release(LaplacePair(0.5)), 2)]
    assert dominates(laplace, [(Release(LaplacePair(0.4), 0.5), 2)], 0.0)
    assert not dominates(laplace, steps(1.0, 1e3), 0.0)
    assert dominates(steps(1.0, 2.0, 4), steps(1.0, 3.0, 9), 0.0)  # both have μ = 1
    assert not dominates(steps(1.0, 2.0, 4), steps(1.0, 3.0, 10), 0.0)


def test_nothing_is_dominated_by_everything() -> None:
    """An empty composition is dominated; it dominates only what is within the slack."""
    assert dominates([], [], 0.0)
    assert dominates(steps(0.01, 1.0), [], 0.0)
    assert not dominates([], steps(0.01, 1.0), 1e-6)
    assert dominates([], steps(0.01, 1.0), 0.01)


# ------------------------------------------------------------------------------------- searches


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(("larger", "smaller"), [pair for pair in PAIRS if len(pair[0]) == 1])
def test_searches_find_the_boundary(larger: Composition, smaller: Composition) -> None:
    """The numbers found are proved, and numbers one per cent beyond are not."""
    ((reference, free),), ((other, block),) = larger, smaller
    least = fewest_repetitions(smaller, [(reference, 1)], SLACK, 10**6)
    assert least is not None
    assert least <= free
    assert dominates([(reference, least)], smaller, SLACK)
    assert not dominates([(reference, round(0.99 * least) - 1)], smaller, SLACK)
    most = most_repetitions([(other, 1)], larger, SLACK, 10**6)
    assert most >= block
    assert dominates(larger, [(other, most)], SLACK)
    assert not dominates(larger, [(other, round(1.01 * most) + 1)], SLACK)


def test_a_guess_takes_little_memory() -> None:
    """Laplace noise leads to tilts at which a sampled step's moments would take a gigabyte."""
    tracemalloc.start()
    try:
        found = fewest_repetitions(
            [(Release(LaplacePair(1 / 20)), 1)], steps(0.01, 1.1), 1.25e-8, 2742
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == 33
    assert peak < 100 << 20


def test_searches_keep_to_their_limit() -> None:
    """The largest number to try bounds the answer."""
    larger, smaller = PAIRS[0]
    step, other = [(larger[0][0], 1)], [(smaller[0][0], 1)]
    assert fewest_repetitions(smaller, step, SLACK, 100) is None
    assert fewest_repetitions(smaller, step, SLACK, 0) is None
    assert most_repetitions(other, larger, SLACK, 100) == 100
    assert most_repetitions(steps(1.0, 0.1), larger, SLACK, 100) == 0


def test_searches_are_exact_for_the_same_step() -> None:
    """A block of a step costs its own number, and back."""
    step = steps(0.01, 1.1)
    assert fewest_repetitions(steps(0.01, 1.1, 137), step, SLACK, 10**6) == 137
    assert fewest_repetitions(steps(0.01, 1.1, 137), step, 0.0, 136) is None
    assert most_repetitions(step, steps(0.01, 1.1, 137), SLACK, 10**6) == 137


@pytest.mark.slow
def test_searches_of_few_rare_steps() -> None:
    """Lattices decide where no line integral can be computed."""
    most = most_repetitions(steps(0.02, 1.4), steps(0.01, 0.8, 8), SLACK / 10, 10**4)
    assert 1 <= most <= 8
    assert dominates(steps(0.01, 0.8, 8), steps(0.02, 1.4, most), SLACK / 10)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("least", [1, 2, 3, 299, 4567])
def test_search_finds_every_boundary(together: bool, least: int) -> None:
    """Any guess leads to the boundary, even if numbers cannot be compared together."""

    def excess(numbers: Array, up: bool = True) -> tuple[Array, np.ndarray]:
        """Return the distance from the boundary."""
        decided = np.full(len(numbers), together or len(numbers) == 1)
        gap = least - numbers if up else numbers - least
        return np.where(decided, gap, 1.0), decided

    for guess in (1.0, 70.0, 299.0, 5000.0):
        found = domination._search_proved_number(excess, guess, unproved=0, proved=10**6)
        assert least <= found <= 1.0011 * least
        found = domination._search_proved_number(
            lambda each: excess(each, up=False), guess, unproved=10**6, proved=0
        )
        assert 0.9989 * least <= found <= least


def test_laplace_releases_are_compared() -> None:
    """Compositions with Laplace noise are compared by lattices."""
    laplace = [(Release(LaplacePair(0.2)), 10)]
    assert dominates(laplace, steps(0.05, 2.0, 10), 1e-6)
    assert not dominates(steps(0.05, 2.0, 10), laplace, 1e-6)


def test_no_time_decides_nothing() -> None:
    """Once the time is up, nothing is decided, in whatever part the computation is."""
    larger, smaller = PAIRS[0]
    for call in (
        lambda: dominates(larger, smaller, SLACK),
        lambda: fewest_repetitions(smaller, [(larger[0][0], 1)], SLACK, 10**6),
        lambda: most_repetitions([(smaller[0][0], 1)], larger, SLACK, 10**6),
    ):
        with pytest.raises(TimeoutError), limit_time(0.0):
            call()
        call()


def test_a_computation_that_has_begun_ends_when_its_time_is_up() -> None:
    """The limit holds inside the engines too: each of many releases is a part of the work."""
    many = [(Release(GaussianPair(1 / (1 + at / 997)), 0.001 + 1e-6 * at), 1) for at in range(2000)]
    begun = time.process_time()
    with pytest.raises(TimeoutError), limit_time(0.1):
        PrivacyProfile(many, "removing").cover(np.linspace(0.0, 1.0, 9), 1e-4, 0.0)
    assert time.process_time() - begun < 0.4


@pytest.mark.parametrize(
    ("guess", "most"), [(1005.0, 8), (995.0, 8), (1100.0, 13), (10.0, 30), (90_000.0, 30)]
)
def test_a_search_by_single_numbers_starts_close_to_the_guess(guess: float, most: int) -> None:
    """Bounds of many numbers at once decide nothing, as for releases without a line integral."""
    tried: list[float] = []

    def excess(numbers: Array) -> tuple[Array, NDArray[np.bool_]]:
        if len(numbers) > 1:
            return np.full(len(numbers), 0.1), np.zeros(len(numbers), dtype=bool)
        tried.append(float(numbers[0]))
        return np.where(numbers >= 1000, 0.0, 0.1), np.ones(1, dtype=bool)

    found = domination._search_proved_number(excess, guess, unproved=0, proved=10**6)
    assert 1000 <= found <= 1001
    assert len(tried) <= most
