"""Balls in bins: simulation, each error term, and the kind of mechanism.

Direct integrals of few bins are rows of `tests/support/kind_rows.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from accountant_service import mechanisms
from accountant_service.accounting import solver
from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import DpSgd
from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import fft_lattice, saddle_point
from accountant_service.numerics.floats.bounds import EPSILON_NEGLIGIBLE
from accountant_service.numerics.laws import balls_in_bins as law_of_bins
from accountant_service.numerics.laws import gaussian as gaussian_law
from accountant_service.numerics.laws import lognormal_sum, sum_lattices
from accountant_service.numerics.laws.balls_in_bins import BallsInBins
from accountant_service.numerics.laws.dominating_pair import DIRECTIONS, GaussianPair, Release
from accountant_service.numerics.time_limit import limit_time
from tests.support.kinds import (
    ADDED,
    REPLACED,
    ZEROED,
    Json,
    balls_in_bins,
    dp_sgd,
    gaussian,
    hash_of,
    proved_delta,
    proved_epsilon,
    repeated,
)
from tests.support.pairwise import pairwise

GAUSSIAN = gaussian(1.0)


def epoch(bins: int = 100, selections: int = 1, noise_multiplier: float = 1.0) -> Json:
    return balls_in_bins(bins, gaussian(noise_multiplier), selections=selections)


def run(**fields: Any) -> Json:
    return dp_sgd(1.0, sampling="balls_in_bins") | fields


def simulated(sigma: float, bins: int, epsilon: float, draws: int) -> tuple[float, float]:
    """δ(ε) of removing in one epoch, with its standard error: one summand is drawn tilted."""
    rng = np.random.default_rng(7)
    values = []
    for _ in range(max(1, draws * bins // 10_000_000)):
        z = rng.standard_normal((max(1, min(draws, 10_000_000 // bins)), bins))
        z[:, 0] += 1 / sigma
        ratio = np.exp(z / sigma - 0.5 / sigma**2).mean(axis=1)
        values.append(np.maximum(1 - math.exp(epsilon) / ratio, 0.0))
    sample = np.concatenate(values)
    return float(sample.mean()), float(sample.std() / math.sqrt(len(sample)))


def assert_simulation_agrees(seed: int, draws: int) -> None:
    rng = random.Random(seed)
    sigma, bins = rng.uniform(0.7, 3), round(math.exp(rng.uniform(1, 5)))
    epsilon = rng.uniform(0.2, 1.5) * 2 / (sigma * math.sqrt(bins))
    mean, error = simulated(sigma, bins, epsilon, draws)
    found = certified_interval.delta_bounds([(BallsInBins(1 / sigma, bins), 1)], epsilon, 1e-2)
    assert found.lower - 5 * error <= mean <= found.upper + 5 * error, (sigma, bins, epsilon)
    assert found.upper - found.lower <= 0.05 * found.upper


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("seed", range(2))
def test_simulation_agrees(seed: int) -> None:
    assert_simulation_agrees(seed, 100_000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_long_simulations_agree(night_seed: int, subtests: pytest.Subtests) -> None:
    for seed in range(night_seed, night_seed + 50):
        with subtests.test(seed=seed):
            assert_simulation_agrees(seed, 10_000_000)


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    ("sigma", "bins", "epochs", "delta"),
    [(1.0, 100, 10, 1e-5), (2.0, 20, 3, 1e-12), (3.0, 20, 100, 1e-5)],
)
def test_tolerances_are_consistent(sigma: float, bins: int, epochs: int, delta: float) -> None:
    releases = [(BallsInBins(1 / sigma, bins), epochs)]
    coarse = certified_interval.epsilon_bounds(releases, delta, 1e-3)
    fine = certified_interval.epsilon_bounds(releases, delta, 2e-4)
    assert coarse.upper - coarse.lower <= 1.01e-3 * coarse.upper
    assert coarse.lower <= fine.lower <= fine.upper <= coarse.upper


@pytest.mark.slow
def test_the_search_ends_where_finer_lattices_narrow_nothing() -> None:
    """One epoch at a tiny δ: the mass that a transform wraps around decides the width."""
    with limit_time(5.0):  # it takes a tenth of that; all six lattices take twice as long
        found = certified_interval.epsilon_bounds([(BallsInBins(1.0, 100), 1)], 1e-20, 1e-3)
    assert found.lower < 4.91 < found.upper < 1.02 * found.lower


def assert_tolerances_intersect(case: tuple[float, float, float, float], tolerance: float) -> None:
    """Intervals of two tolerances intersect, and the finer one is within the coarser."""
    sigma, log_bins, log_epochs, log_delta = case
    bins, epochs, delta = round(math.exp(log_bins)), round(math.exp(log_epochs)), 10**log_delta
    releases = [(BallsInBins(1 / sigma, bins), epochs)]
    coarse = certified_interval.epsilon_bounds(releases, delta, 1e-3)
    fine = certified_interval.epsilon_bounds(releases, delta, tolerance)
    assert coarse.lower <= fine.lower <= fine.upper <= coarse.upper
    assert coarse.upper - coarse.lower <= 1.01e-3 * max(coarse.upper, EPSILON_NEGLIGIBLE)


RANDOM_CASES = st.tuples(
    st.floats(0.25, 4.0),
    st.floats(math.log(2), math.log(1000)),
    st.floats(0.0, math.log(100)),
    st.floats(-12.0, -3.0),
)


@pytest.mark.slow
@given(RANDOM_CASES)
@settings(max_examples=5, deadline=None, derandomize=True)
def test_more_digits_never_loosen(case: tuple[float, float, float, float]) -> None:
    assert_tolerances_intersect(case, 1e-4)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # several seconds an example
@given(RANDOM_CASES)
@settings(max_examples=100, deadline=None)
def test_more_digits_never_loosen_in_many_cases(case: tuple[float, float, float, float]) -> None:
    assert_tolerances_intersect(case, 1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hundred", range(10))
def test_random_cases_are_sound_and_consistent(
    hundred: int, night_seed: int, subtests: pytest.Subtests
) -> None:
    first = 1000 * night_seed + 100 * hundred
    for seed in range(first, first + 100):
        with subtests.test(seed=seed):
            check_random_case(seed)


def check_random_case(seed: int) -> None:
    """Check intervals at three tolerances, each within the one before, and δ at the last's ends.

    A known bin costs no less.
    """
    rng = random.Random(seed)
    sigma, bins = rng.uniform(0.3, 4.0), round(math.exp(rng.uniform(math.log(2), math.log(1000))))
    epochs, delta = round(math.exp(rng.uniform(0, math.log(100)))), 10 ** rng.uniform(-12, -3)
    releases = [(BallsInBins(1 / sigma, bins), epochs)]
    widest, middle, narrow = (
        certified_interval.epsilon_bounds(releases, delta, tolerance)
        for tolerance in (1e-2, 1e-3, 1e-4)
    )
    for outer, inner in ((widest, middle), (middle, narrow)):
        assert outer.lower <= inner.lower <= inner.upper <= outer.upper
    assert widest.upper - widest.lower <= 1.01e-2 * max(widest.upper, EPSILON_NEGLIGIBLE)
    known = gaussian_law.epsilon(delta, math.sqrt(epochs) / sigma)
    assert narrow.lower <= known
    if narrow.lower > EPSILON_NEGLIGIBLE:
        assert certified_interval.delta_bounds(releases, narrow.lower, 1e-3).upper >= delta
    assert certified_interval.delta_bounds(releases, narrow.upper, 1e-3).lower <= delta


def test_balls_in_bins_costs_less_than_a_known_bin_and_than_poisson_sampling() -> None:
    bins = certified_interval.epsilon_bounds([(BallsInBins(1.0, 100), 10)], 1e-5, 1e-3)
    poisson = certified_interval.epsilon_bounds(
        [(Release(GaussianPair(1.0), 0.01), 1000)], 1e-5, 1e-3
    )
    assert bins.lower == pytest.approx(1.7015, rel=1e-3)
    assert bins.upper < poisson.lower


@pytest.mark.spread(first=2)
@pytest.mark.parametrize(
    ("sigma", "bins", "epochs", "delta"),
    [
        (0.5853957, 6, 83, 8.424e-11),  # took minutes, and was 29 % wide
        (0.7319, 502, 23, 7.4e-12),
        (0.8428, 629, 6, 1.57e-12),
        (1.0, 1000, 1, 1e-5),  # Rényi bounds are twenty times too high
        (0.36225252, 789, 61, 4.654e-12),  # a tilt of the large summands overflowed
        (2.0488564, 16, 2, 1.737e-7),  # 5 % wide: bounds on moments suggested twice the tilt
    ],
)
def test_heavy_tails_have_narrow_bounds_at_small_deltas(
    sigma: float, bins: int, epochs: int, delta: float
) -> None:
    """Mass that wraps around is small beside such a δ, too, and few lattices are tried."""
    started = time.process_time()
    found = certified_interval.epsilon_bounds([(BallsInBins(1 / sigma, bins), epochs)], delta, 1e-3)
    assert found.upper - found.lower <= 1e-3 * found.upper
    assert time.process_time() - started < 10  # half a second on an idle machine


@pytest.mark.parametrize(
    ("sigma", "bins", "epochs", "delta", "direction"),
    [
        (0.3147, 80, 95, 5.2e-8, "adding"),  # small sums need a class of their own
        (0.3105, 3, 7, 3.5e-9, "removing"),  # no sum exceeds `bins` times the largest summand
    ],
)
def test_a_coarse_lattice_locates_the_answer_where_sums_differ_by_many_orders(
    sigma: float, bins: int, epochs: int, delta: float, direction: Any
) -> None:
    releases = [(BallsInBins(1 / sigma, bins), epochs)]
    saddle = saddle_point.find_at_delta(releases, direction, math.log(delta))
    target = fft_lattice.AccuracyTarget(direction, saddle.tilt, saddle.epsilon)
    coarse, fine = (
        fft_lattice.upper_profile(releases, target, spacing, math.log(delta)).epsilon(delta)
        for spacing in (0.25, 0.02)
    )
    assert fine <= coarse <= 1.05 * fine < math.inf


def test_a_coarse_lattice_settles_the_cheaper_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law for moments, known before, shows that adding a record costs less here."""
    law, cells, asked = BallsInBins(1.0, 100), BallsInBins.cells, []

    def recorded(
        self: Any, direction: Any, first: int, count: int, spacing: float, offset: float = 0.0
    ) -> Any:
        asked.append((direction, spacing))
        return cells(self, direction, first, count, spacing, offset)

    monkeypatch.setattr(BallsInBins, "cells", recorded)
    certified_interval._search_both_directions.cache_clear()
    certified_interval.epsilon_bounds([(law, 10)], 1.01e-5, 1e-3)
    coarse = law_of_bins._moment_spacing(1.0, 100)
    assert {spacing >= coarse for direction, spacing in asked if direction == "adding"} == {True}
    assert {spacing >= coarse for direction, spacing in asked if direction == "removing"} == {
        True,
        False,
    }


# --- the law's error terms: a fault that each covers, and the bounds without it

MU, BINS = 0.5, 20
LATTICES = sum_lattices.choose_lattices(MU, BINS, -0.8, 1.2, 0.02)


def masses(lattices: Any = LATTICES) -> dict[str, np.ndarray[Any, Any]]:
    lower, wrapped, upper = lognormal_sum.sum_below(MU, BINS, lattices, tilted=False)
    above = lognormal_sum.sum_above(MU, BINS, lattices).mass
    return {"above": above, "lower": lower, "upper": upper, "wrapped": np.array(wrapped)}


@pytest.fixture(scope="module")
def genuine() -> dict[str, np.ndarray[Any, Any]]:
    return masses()


def test_classes_share_their_limits() -> None:
    """Every outcome up to the last cut belongs to one class."""
    for sums in ("all", "large", "small"):
        found = sum_lattices.choose_lattices(2.0, 3, -9.0, 9.0, 0.01, sums)
        assert all(a.largest == b.above * b.step for a, b in itertools.pairwise(found))
        assert all(a.largest < b.largest for a, b in itertools.pairwise(found))


def test_there_are_classes_of_each_sort() -> None:
    assert LATTICES[0].is_first
    assert not any(each.is_first for each in LATTICES[1:])
    assert len(LATTICES) > 1


@pytest.mark.parametrize("side", ["above", "lower", "upper"])
def test_the_error_of_transforms(
    side: str, monkeypatch: pytest.MonkeyPatch, genuine: dict[str, np.ndarray[Any, Any]]
) -> None:
    """Every class is off by 1e-9: bounds hold if that is stated, and not otherwise."""
    compose, sign = lognormal_sum.compose_class, 1 if side == "lower" else -1

    def holds(stated: float) -> bool:
        def off(*args: Any) -> Any:
            return [(mass + sign * 1e-9, error + stated) for mass, error in compose(*args)]

        with monkeypatch.context() as patch:
            patch.setattr(lognormal_sum, "compose_class", off)
            found = masses()
        outside = np.maximum(sign * (found[side] - genuine[side]) - 1e-14, 0.0)
        # without the mass that wrapped around, lower bounds hold in all
        return bool(outside.sum() <= (found["wrapped"] if side == "lower" else 0.0))

    assert holds(1.1e-9)
    assert not holds(0.0)


def test_the_terms_left_out(
    monkeypatch: pytest.MonkeyPatch, genuine: dict[str, np.ndarray[Any, Any]]
) -> None:
    """With the first term alone, upper bounds hold only with the mass of the others added."""
    terms = lognormal_sum._binomial_terms

    def holds(share: float) -> bool:
        def first(*args: Any) -> Any:
            found, left_out = terms(*args)
            return found, share * left_out

        with monkeypatch.context() as patch:
            patch.setattr(lognormal_sum, "TERMS_MAX", 1)
            # private: the fault that the term covers is made here
            patch.setattr(lognormal_sum, "_binomial_terms", first)
            found = masses()
        return all((found[side] >= genuine[side] * (1 - 1e-9)).all() for side in ("above", "upper"))

    assert holds(1.0)
    assert not holds(0.0)


@pytest.mark.parametrize(("name", "share"), [("plain", 1), ("tilted", 3)])
def test_the_error_of_cell_masses(
    name: str, share: int, monkeypatch: pytest.MonkeyPatch, genuine: dict[str, np.ndarray[Any, Any]]
) -> None:
    """Cell masses are off by a relative 1e-7, downwards in the bound above."""
    cells = lognormal_sum._cell_masses

    def holds(stated: float) -> bool:
        def off(*args: Any) -> Any:
            found = list(cells(*args))
            at = 0 if name == "plain" else 2
            found[at + 1] = found[at + 1] + stated * found[at]
            found[at] = found[at] * (1 - 1e-7)
            return tuple(found)

        with monkeypatch.context() as patch:
            # private: the fault that the term covers is made here
            patch.setattr(lognormal_sum, "_cell_masses", off)
            found = masses()["above"]
        return bool((found >= genuine["above"] * (1 - 1e-9) - 1e-18).all())

    assert holds(1.01e-7)
    assert not holds(0.0)


@pytest.mark.parametrize("tilted", [False, True])
def test_the_error_of_cell_masses_in_lower_bounds(
    tilted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cell masses are a relative 1e-7 too large: lower bounds hold only without that share."""
    cells = lognormal_sum._cell_masses
    genuine, _, _ = lognormal_sum.sum_below(MU, BINS, LATTICES, tilted=tilted)

    def holds(stated: float) -> bool:
        def off(*args: Any) -> Any:
            plain, plain_error, one, one_error = cells(*args)
            room = stated * (1 + 1e-7)
            return (
                plain * (1 + 1e-7),
                plain_error + room * plain,
                one * (1 + 1e-7),
                (one_error + room * one),
            )

        with monkeypatch.context() as patch:
            # private: the fault that the term covers is made here
            patch.setattr(lognormal_sum, "_cell_masses", off)
            found, _, _ = lognormal_sum.sum_below(MU, BINS, LATTICES, tilted=tilted)
        return bool((found <= genuine * (1 + 1e-9) + 1e-18).all())

    assert holds(1e-7)
    assert not holds(0.0)


def test_tiny_masses_are_left_out_of_lower_bounds() -> None:
    """Two classes of three summands: sums of products with a tiny factor, term by term."""
    below, within = np.array([0.5, 1e-290]), np.array([0.25, 2e-290])
    masses = lognormal_sum._Summands((below, within), (below, within))
    factors = [(mass, part) for part in (0, 1) for mass in (below, within)[part]]
    exact = math.fsum(
        math.prod(mass for mass, _ in each)
        for each in itertools.product(factors, repeat=3)
        if any(part for _, part in each) and any(0 < mass < 1e-280 for mass, _ in each)
    )
    found = lognormal_sum._mass_with_tiny(masses, masses, 3)
    assert all(exact <= bound < 10 * exact for bound in found)


def test_the_mass_that_wraps_around(genuine: dict[str, np.ndarray[Any, Any]]) -> None:
    """In a short window, lower bounds hold only without the mass that wrapped around."""
    whole = LATTICES[0]
    short = dataclasses.replace(whole, size=whole.size // 8, tilts=(0.0,))
    found, wrapped, _ = lognormal_sum.sum_below(MU, BINS, [short], tilted=False)
    excess = found.sum() - genuine["lower"][: short.size].sum()
    assert 0 < excess <= wrapped + 1e-9


# many bins: sums are smooth, so that few frequencies are computed, and blocks of points

MANY = 400
SMOOTH = sum_lattices.choose_lattices(MU, MANY, -0.3, 0.4, 0.015, "large")


def smooth_masses(block: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
    lattices = [dataclasses.replace(each, block=block or each.block) for each in SMOOTH]
    lower, _, upper = lognormal_sum.sum_below(MU, MANY, lattices, tilted=False)
    law = lognormal_sum.sum_above(MU, MANY, lattices)
    return {"lower": lower, "upper": upper, "above": law.mass, "points": law.points}


def test_few_frequencies_are_computed() -> None:
    lattice = SMOOTH[0]
    summands = lognormal_sum._Summands(lognormal_sum._split_to_cell_ends(MU, lattice), ())
    small = lognormal_sum.transform_masses(summands.plain[0], lattice.size)
    kept, (neglected,) = lognormal_sum._choose_frequencies(small, summands, MANY)
    assert lattice.block > 1
    assert kept < len(small.value) / 8
    assert 0 < neglected < 1e-18
    whole = small.power(MANY)
    assert (np.abs(whole.value[kept:]) <= neglected).all()


def test_blocks_are_sums_of_their_points() -> None:
    """A block has the mass of its points, at its ends with the mean kept."""
    blocks, points = smooth_masses(), smooth_masses(block=1)
    lengths = [(each.size, each.block) for each in SMOOTH]
    assert {block for _, block in lengths} != {1}
    at = 0
    for size, block in lengths:
        for side in ("lower", "upper"):
            sums = points[side][at : at + size].reshape(-1, block).sum(axis=1)
            found = blocks[side][: size // block]
            assert found == pytest.approx(sums, rel=1e-6, abs=1e-12)
            blocks[side] = blocks[side][size // block :]
        at += size
    for power in (0, 1):
        means = [float(found["above"] @ found["points"] ** power) for found in (blocks, points)]
        assert means[0] == pytest.approx(means[1], rel=1e-9)
    spread = [float(found["above"] @ found["points"] ** 2) for found in (blocks, points)]
    assert spread[1] < spread[0] < spread[1] * (1 + 1e-3)


COARSE = next(each for each in SMOOTH if each.stride > 1)


def test_large_summands_on_a_coarser_lattice_have_the_transform_of_their_points() -> None:
    small, large = lognormal_sum._split_to_cell_ends(MU, COARSE)
    spread = np.zeros((len(large) - 1) * COARSE.stride + 1)
    spread[:: COARSE.stride] = large
    points = dataclasses.replace(COARSE, stride=1)
    ((found, error),) = lognormal_sum.compose_class(
        lognormal_sum._Summands((small, large), ()), COARSE, MANY
    )
    ((exact, room),) = lognormal_sum.compose_class(
        lognormal_sum._Summands((small, spread), ()), points, MANY
    )
    assert np.abs(found - exact).max() <= error + room


def test_large_summands_on_a_coarser_lattice_are_larger_in_convex_order() -> None:
    """Mass and mean are kept, and the tails' means are no less."""
    points = dataclasses.replace(COARSE, stride=1)
    laws = []
    for lattice in (points, COARSE):
        mass = lognormal_sum._split_to_cell_ends(MU, lattice)[1]
        laws.append((lattice.places(1, len(mass)), mass))
    (fine, fine_mass), (coarse, coarse_mass) = laws
    assert coarse_mass.sum() == pytest.approx(fine_mass.sum(), rel=1e-9)
    assert coarse_mass @ coarse == pytest.approx(fine_mass @ fine, rel=1e-9)
    for strike in fine[1 :: len(fine) // 20]:
        excess = [float(m @ np.maximum(x - strike, 0.0)) for x, m in laws]
        assert excess[1] >= excess[0] * (1 - 1e-9)
    assert coarse_mass @ coarse**2 > fine_mass @ fine**2


def test_moments_of_merged_masses_bound_those_of_the_points() -> None:
    """Fine blocks bound the moments more narrowly than coarse ones; either bounds them."""
    lattice = SMOOTH[0]
    mass = lognormal_sum._split_to_cell_ends(MU, lattice)[0]
    places = lattice.places(0, len(mass))
    rates = np.array([-3.0, -0.2, 0.1, 2.0])
    exact = np.log(np.exp(rates[:, None] * places) @ mass)
    fine, coarse = (
        lognormal_sum._Blocks(mass, places, blocks).log_moments(rates)
        for blocks in (lognormal_sum._FINE_BLOCKS, lognormal_sum._BLOCKS)
    )
    assert (exact <= fine).all()
    assert (fine <= coarse + 1e-12).all()


@pytest.mark.parametrize("slope", [-18.0, 18.0])
def test_merging_steep_masses_loses_no_small_share(
    slope: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller of a block's two masses decides the moment once the rate outweighs the slope."""
    pairs = lambda points, *_: np.arange(0, points, 2)  # noqa: E731
    # private: blocks of two masses show the share
    monkeypatch.setattr(lognormal_sum, "_block_starts", pairs)
    rate = -math.copysign(20.0, slope)
    for points in range(1000, 1020, 2):
        log_mass = slope * (np.arange(points) % 2)
        places = 2.0 + np.arange(points)
        exact = mp.log(mp.fsum(map(mp.exp, (rate * places + log_mass).tolist())))
        found = lognormal_sum._Blocks(np.exp(log_mass), places, 1).log_moments(np.array([rate]))
        assert float(found[0]) >= exact


@pytest.mark.parametrize("side", ["above", "lower", "upper"])
def test_the_frequencies_that_are_neglected(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With far too few frequencies, bounds hold only with what the others may add."""
    genuine, sign = smooth_masses()[side], 1 if side == "lower" else -1
    choose = lognormal_sum._choose_frequencies

    def holds(share: float) -> bool:
        def few(*args: Any) -> Any:
            kept, neglected = choose(*args)
            return kept, [share * each for each in neglected]

        with monkeypatch.context() as patch:
            # private: so few frequencies show what is neglected
            patch.setattr(lognormal_sum, "_FREQUENCY_LEAST", 1e-4)
            patch.setattr(lognormal_sum, "_choose_frequencies", few)
            found = smooth_masses()[side]
        return bool((sign * (found - genuine) <= 1e-15).all())

    assert holds(1.0)
    assert not holds(0.0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_mass_outside_the_window_is_counted_as_the_worst_loss(direction: Any) -> None:
    """A window that ends within the law: P's mass is all there."""
    first, count = (-20, 50) if direction == "removing" else (-30, 50)
    cells = BallsInBins(MU, BINS).cells(direction, first, count, 0.01)
    assert cells.p.sum() >= 1 - 1e-12
    assert cells.p[-1] > 1e-3


def test_masses_without_the_last_ones() -> None:
    found = law_of_bins._remove_top(np.array([0.5, 0.25, 0.125]), 0.2)
    assert found == pytest.approx([0.5, 0.175, 0.0])


def test_bounds_beyond_the_range_of_numbers_are_infinite_or_trivial() -> None:
    """Nothing is bounded by the largest power of e that is computed."""
    assert lognormal_sum._exp_up(701.0) == math.inf
    assert (
        lognormal_sum._each_exp_up(np.array([0.0, 701.0, math.inf]))[1:].tolist() == [math.inf] * 2
    )
    moments = law_of_bins._moments_above(1.0, 100, np.array([1.0, 1e3, 1e6]))
    assert np.isfinite(moments[0])
    assert moments[1:].tolist() == [math.inf] * 2
    lattice = LATTICES[0]
    masses = np.full((1, len(lattice.points())), 1e-3), 1e-9
    for outward, bound in ((1, 2.0), (-1, 0.0)):
        found = lognormal_sum._untilt(masses, lattice, 0.0, 800.0, outward)
        assert found.bound[0].tolist() == [bound] * len(lattice.points())
        assert np.isinf(found.uncertain).all(), "no block is taken from this tilt"


@pytest.mark.parametrize(("mu", "bins"), [(1.0, 100), (0.5, 10), (0.2, 1000)])
def test_moments_are_upper_bounds_and_tight(mu: float, bins: int) -> None:
    """E[R^a] of a whole a is a! times a coefficient of a power of a series."""
    found = BallsInBins(mu, bins).log_moments("removing", np.array([1.0, 2.0, 3.0]))
    with mp.workdps(30):
        series = [mp.exp(mpf(j * (j - 1)) * mpf(mu) ** 2 / 2) / mp.factorial(j) for j in range(5)]
        power = [mpf(1)] + [mpf(0)] * 4
        for _ in range(bins):
            power = [mp.fsum(power[i] * series[n - i] for i in range(n + 1)) for n in range(5)]
        for a, value in zip((2, 3, 4), found, strict=True):
            exact = mp.log(power[a] * mp.factorial(a)) - a * mp.log(bins)
            assert exact <= value <= exact * mpf("1.05"), a


# --- the kind


def test_a_run_is_its_epochs() -> None:
    sizes = run(dataset_size=60000, batch_size=600)
    same = (sizes | {"epochs": 10}, sizes | {"steps": 1000}, run(sample_rate=0.01, steps=1000))
    assert {hash_of(each) for each in same} == {hash_of(repeated(10, epoch()))}


def test_relations() -> None:
    added, zeroed, replaced = (
        proved_epsilon(epoch(), 1e-5, each) for each in (ADDED, ZEROED, REPLACED)
    )
    assert added.upper == zeroed.upper
    assert added.lower > 0.99 * added.upper
    assert replaced.lower == 0.0  # a known bin: an upper bound only
    assert replaced.upper <= proved_epsilon(GAUSSIAN, 1e-5, REPLACED).upper * 1.001


def test_selections() -> None:
    """k of b costs at most k epochs of one of ⌊b/k⌋, and as many as bins are no sampling."""
    two = proved_epsilon(epoch(bins=101, selections=2), 1e-5)
    assert two.upper == proved_epsilon(repeated(2, epoch(bins=50)), 1e-5).upper
    assert two.lower == 0.0
    assert hash_of(epoch(bins=3, selections=3)) == hash_of(repeated(3, GAUSSIAN))


def test_noise_out_of_range_gives_proved_upper_bounds() -> None:
    for sigma in (0.2, 500.0):
        found = proved_epsilon(epoch(noise_multiplier=sigma), 1e-5)
        assert found.lower == 0.0
        assert found.upper <= proved_epsilon(gaussian(sigma), 1e-5).upper * 1.001


def test_solved_steps_are_whole_epochs() -> None:
    shape = DpSgd(1.0, sample_rate=0.01, steps=0, sampling="balls_in_bins")
    target = solver.Target(ACCOUNTANTS["pld"], ADDED, 1.0, 1e-5)
    found = solver.steps(shape, target)
    assert found.value % 100 == 0
    assert found.guarantee.epsilon <= 1.0
    assert found.next is not None
    assert found.next.epsilon > 1.0


def test_an_epoch_is_one_step_of_the_ledger() -> None:
    plan = StepPlan.of(mechanisms.from_json(run(dataset_size=1000, batch_size=10, epochs=3)))
    assert plan.steps == 3
    assert plan.with_steps(2).canonical == mechanisms.canonical_form(
        mechanisms.from_json(repeated(2, epoch()))
    )


@pytest.mark.parametrize("case", pairwise(bins=[2, 3, 5], noise=[25.6, 60.0], delta=[1e-2, 1e-12]))
def test_few_bins_with_much_noise_have_narrow_bounds(case: Json) -> None:
    """The least ratio needs a rate of about deviations/(μ√b), far above one over a summand."""
    shape = dp_sgd(case["noise"], sampling="balls_in_bins", sample_rate=1 / case["bins"])
    proved = proved_epsilon(shape | {"steps": 20 * case["bins"]}, case["delta"])
    assert proved.upper <= proved.lower + 1e-3 * max(proved.upper, 0.05)


@pytest.mark.parametrize("noise", [150.0, 300.0, 3000.0])
def test_more_noise_than_the_cells_resolve_has_an_upper_bound(noise: float) -> None:
    tree = dp_sgd(noise, sampling="balls_in_bins", sample_rate=0.25, steps=4)
    proved = proved_epsilon(tree, 1e-6)
    assert proved.lower == 0.0
    assert 0 < proved.upper <= proved_epsilon(gaussian(noise), 1e-6).upper
    proved_delta(tree, 0.001)
