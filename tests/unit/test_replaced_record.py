"""Poisson samples of which one record is replaced: the pair dominates, and its bounds hold."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from numpy.typing import NDArray

from accountant_service import mechanisms
from accountant_service.accounting import calculator, release_laws
from accountant_service.accounting.guarantee import Status
from accountant_service.accounting.methods import ACCOUNTANTS, subsampled_rdp
from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import saddle_point
from accountant_service.numerics.engines.lattice_refinement import RefinedLattice
from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.laws import replaced_record
from accountant_service.numerics.laws.characteristic_function import TiltedReplacedRecord
from accountant_service.numerics.laws.dominating_pair import GaussianPair, Release
from accountant_service.numerics.laws.replaced_record import ReplacedRecord
from tests.support import definition, oracles
from tests.support.helpers import (
    REPLACE,
    delta,
    epsilon,
    log_uniform,
    question,
    run,
)
from tests.support.kinds import composed, gaussian, poisson

pytestmark = pytest.mark.usefixtures("without_memory")  # engines are replaced here
Array = NDArray[np.float64]
Patch = pytest.MonkeyPatch

# --- the definition: no geometry and no other records cost more than the pair


def density(points: Array, mean: Array, sigma: float) -> Array:
    """The density of a normal law in the plane."""
    square = ((points - mean) ** 2).sum(axis=-1)
    return np.asarray(np.exp(-0.5 * square / sigma**2) / (2 * math.pi * sigma**2))


def in_disc(rng: random.Random) -> Array:
    """A vector of norm at most 1; often on the circle."""
    angle, radius = rng.uniform(0, 2 * math.pi), min(1.0, rng.uniform(0, 2))
    return radius * np.array([math.cos(angle), math.sin(angle)])


def plane(reach: float) -> tuple[Array, float]:
    """Midpoints of square cells, and the area of a cell."""
    edges = np.linspace(-reach, reach, 321)
    middle = 0.5 * (edges[1:] + edges[:-1])
    points = np.stack(np.meshgrid(middle, middle), axis=-1)
    return points, float(edges[1] - edges[0]) ** 2


def sampled(points: Array, records: list[Array], q: float, sigma: float) -> Array:
    """The density of the noisy sum of a Poisson sample."""
    total = np.zeros(points.shape[:-1])
    for taken in itertools.product((0, 1), repeat=len(records)):
        mean = sum((r for r, t in zip(records, taken, strict=True) if t), np.zeros(2))
        total += (
            q ** sum(taken) * (1 - q) ** (len(taken) - sum(taken)) * density(points, mean, sigma)
        )
    return total


def largest_excess(rng: random.Random, others: int, pair_delta: Any) -> float:
    """Return the largest excess of δ of a random replacement over that of a pair."""
    q, sigma = rng.uniform(0.02, 0.98), log_uniform(rng, 0.4, 3)
    rest = [in_disc(rng) for _ in range(others)]
    points, area = plane(2.0 + others + 7 * sigma)
    p, other = (sampled(points, [in_disc(rng), *rest], q, sigma) for _ in range(2))
    found = -math.inf
    for at in [0.0, *(rng.uniform(-2, 2) for _ in range(5))]:
        value = float(np.maximum(p - math.exp(at) * other, 0).sum() * area)
        found = max(found, value - float(pair_delta(at, q, sigma)))
    return found


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("others", [0, 2])
def test_no_replacement_in_the_plane_costs_more_than_the_pair_at_any_real_epsilon(
    others: int,
) -> None:
    rng = random.Random(others)
    excesses = [
        largest_excess(rng, others, oracles.replaced_record_delta)
        for _ in range(12 if others else 6)
    ]
    assert max(excesses) < 1e-5  # of the midpoint rule


@pytest.mark.slow
def test_a_pair_at_half_the_distance_does_not_dominate() -> None:
    """μ in place of 2μ between the two contributions: C from absence is all that it allows."""

    def too_near(at: float, q: float, sigma: float) -> float:
        return float(oracles.replaced_record_delta(at, q, 2 * sigma))

    rng = random.Random(0)
    assert any(largest_excess(rng, 0, too_near) > 1e-3 for _ in range(25))


def test_opposite_records_on_the_circle_attain_it() -> None:
    points, area = plane(9.0)
    far = np.array([0.6, 0.8])
    p, other = (sampled(points, [each], 0.3, 1.0) for each in (far, -far))
    for at in (-1.0, 0.0, 0.2, 0.6):
        value = float(np.maximum(p - math.exp(at) * other, 0).sum() * area)
        assert value == pytest.approx(float(oracles.replaced_record_delta(at, 0.3, 1.0)), rel=2e-4)


def test_the_bounds_of_a_pair_at_the_wrong_distance_contradict_the_definition(
    monkeypatch: Patch,
) -> None:
    tree = poisson(0.3, gaussian(1.0))
    exact = definition.delta(tree, REPLACE, 2, [0.4])[0]
    described = mechanisms.from_json(tree)
    assert calculator.delta(described, 0.4, relation=REPLACE).delta >= exact
    monkeypatch.setattr(
        release_laws, "ReplacedRecord", lambda mu, rate: ReplacedRecord(0.5 * mu, rate)
    )
    assert calculator.delta(described, 0.4, relation=REPLACE).delta < 0.9 * exact


# --- one release, in closed form


def test_without_sampling_it_tends_to_the_gaussian_mechanism() -> None:
    nearly_all = certified_interval.epsilon_bounds(
        [(ReplacedRecord(0.25, 1 - 1e-9), 9)], 1e-5, 1e-6
    )
    assert nearly_all.upper == pytest.approx(float(oracles.gaussian_epsilon(1e-5, 1.5)), rel=1e-6)


# --- log-moments


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    ("q", "sigma"),
    [(0.3, 2.0), (0.01, 1.0), (0.9, 0.6), (1e-6, 0.4), (0.999, 9.0)],
)
def test_log_moments_are_upper_bounds_and_tight(q: float, sigma: float) -> None:
    tilts = np.array([0.01, 0.7, 5.0, 25.0])
    found = ReplacedRecord(1 / sigma, q).log_moments("removing", tilts)
    for tilt, value in zip(tilts, found, strict=True):
        exact = oracles.replaced_record_moment(float(tilt), q, sigma)
        assert exact <= mp.mpf(value) <= exact * (1 + mp.mpf(10) ** -9)


def test_tiny_rates_keep_the_digits_of_the_moment() -> None:
    tilts = np.array([2.0])
    small, large = (
        float(ReplacedRecord(1.0, q).log_moments("removing", tilts)[0]) for q in (1e-9, 1e-6)
    )
    assert small * 1e6 == pytest.approx(large, rel=1e-4)


@pytest.mark.parametrize(
    ("constant", "value", "term", "without"),
    [
        ("_LOG_ERROR", -2.0, "spacing", None),
        ("_TAIL_DEVIATIONS", 1.0, "log_tail", lambda *_: np.array([-np.inf])),
    ],
)
def test_the_errors_of_the_quadrature_are_added(
    constant: str, value: float, term: str, without: Any, monkeypatch: Patch
) -> None:
    """Few nodes are covered by the error bounds; the sum alone would be below the moment."""
    exact = oracles.replaced_record_moment(3.0, 0.2, 0.7)
    release, tilts = ReplacedRecord(1 / 0.7, 0.2), np.array([3.0])
    # private: the sum's own error is far below what an answer shows
    monkeypatch.setattr(replaced_record, constant, value)
    assert release.log_moments("removing", tilts)[0] >= exact
    if without is not None:
        monkeypatch.setattr(ReplacedRecord, term, without)
        assert release.log_moments("removing", tilts)[0] < exact


# --- the loss and its cells


def test_outputs_and_losses_are_inverse() -> None:
    rng = random.Random(1)
    for _ in range(40):
        release = ReplacedRecord(log_uniform(rng, 0.01, 60), log_uniform(rng, 1e-12, 0.999))
        loss = np.array([-300.0, -2.0, -1e-3, 1e-9, 0.5, 30.0, 500.0])
        z = release._output_at(loss)
        assert release.loss(z) == pytest.approx(loss, rel=1e-7)
        assert (release.loss(-z) == -release.loss(z)).all()


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_cells_hold_the_masses_and_gaps_of_the_densities(offset: float) -> None:
    mp.mp.dps = 30
    q, mu = 0.2, 1.3
    cells = ReplacedRecord(mu, q).cells("removing", -6, 14, 0.07, offset)
    edges = (np.arange(-6, 9) + offset) * 0.07
    release = ReplacedRecord(mu, q)

    def mass(low: mp.mpf, high: mp.mpf, sign: int) -> mp.mpf:
        return sum(
            weight * (mp.ncdf(high - mean) - mp.ncdf(low - mean))
            for weight, mean in ((1 - mp.mpf(q), 0), (mp.mpf(q), sign * mp.mpf(mu)))
        )

    z = [-mp.inf, *(mp.mpf(float(x)) for x in release._output_at(edges)), mp.inf]
    for i, (low, high) in enumerate(itertools.pairwise(z)):
        p, other = mass(low, high, 1), mass(low, high, -1)
        assert abs(cells.p[i] - p) <= cells.p_rounding[i]
        assert abs(cells.q[i] - other) <= cells.q_rounding[i]
        if 0 < i < len(z) - 2:
            gap = p - other * mp.exp(mp.mpf(float(edges[i - 1])))
            assert abs(cells.gap[i - 1] - gap) <= cells.gap_rounding[i - 1]


# --- compositions


def test_a_thousand_steps_cost_what_the_pair_costs() -> None:
    found = epsilon("pld", run(0.01, 1.0, 1000), 1e-5, REPLACE)
    assert found.status is Status.PROVEN
    assert found.certified is not None
    assert found.certified.lower <= 2.84344026 <= found.certified.upper
    assert found.epsilon == pytest.approx(2.84344, abs=1e-4)
    rdp = epsilon("subsampled_rdp", run(0.01, 1.0, 1000), 1e-5, REPLACE)
    assert found.epsilon < rdp.epsilon < 1.15 * found.epsilon  # was 21.05


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "at", "published"),
    [
        (0.01, 2.0, 10_000, 1e-6, 4.9073975),
        (0.01, 2.0, 10_000, 1e-5, 4.3960306),
        (0.01, 1.0, 10_000, 1e-6, 11.9568577),
        (0.005, 2.0, 10_000, 1e-6, 2.2652867),
    ],
)
def test_it_agrees_with_the_tests_of_fourier_accountant(
    q: float, sigma: float, steps: int, at: float, published: float
) -> None:
    found = certified_interval.epsilon_bounds([(ReplacedRecord(1 / sigma, q), steps)], at, 1e-8)
    assert found.upper - found.lower < 1e-8 * found.upper
    assert found.upper == pytest.approx(published, rel=3e-7)


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    ("q", "sigma", "steps"),
    [(0.01, 1.0, 1000), (0.3, 3.0, 50), (0.02, 0.5, 20)],
)
def test_the_lattice_and_the_line_integral_agree(q: float, sigma: float, steps: int) -> None:
    releases = [(ReplacedRecord(1 / sigma, q), steps)]
    narrow = certified_interval.epsilon_bounds(releases, 1e-5, 1e-6)
    saddle = saddle_point.find_at_delta(releases, "removing", math.log(1e-5))
    upper, lower = RefinedLattice.around(releases, saddle, math.log(1e-5), 1e-3).profiles()
    assert upper is not None
    assert lower is not None
    assert lower.epsilon(1e-5) <= narrow.upper
    assert narrow.lower <= upper.epsilon(1e-5) <= 1.01 * lower.epsilon(1e-5)


def test_it_composes_with_other_releases() -> None:
    parts = [run(0.01, 1.0, 500), run(0.02, 1.5, 200), gaussian(9.0)]
    together = epsilon("pld", composed(*parts), 1e-5, REPLACE)
    assert together.certified is not None
    assert together.certified.upper <= together.certified.lower * 1.001
    assert together.epsilon > max(epsilon("pld", part, 1e-5, REPLACE).epsilon for part in parts)


@pytest.mark.parametrize("method", ["pld", "subsampled_rdp"])
def test_it_costs_more_with_more_sampling_steps_and_less_noise(method: str) -> None:
    def cost(q: float, sigma: float, steps: int) -> float:
        return epsilon(method, run(q, sigma, steps), 1e-6, REPLACE).epsilon

    start = cost(0.01, 1.0, 400)
    assert start < min(cost(0.012, 1.0, 400), cost(0.01, 0.9, 400), cost(0.01, 1.0, 480))
    whole = epsilon(method, run(1.0, 1.0, 400), 1e-6, REPLACE).epsilon
    assert cost(0.999, 1.0, 400) <= whole


@pytest.mark.slow
def test_it_costs_at_least_the_removal_and_at_most_the_doubled_sensitivity() -> None:
    rng = random.Random(4)
    for _ in range(8):
        q, sigma = log_uniform(rng, 1e-4, 0.9), log_uniform(rng, 0.5, 5)
        steps = int(log_uniform(rng, 1, 3000))
        found = certified_interval.epsilon_bounds(
            [(ReplacedRecord(1 / sigma, q), steps)], 1e-5, 1e-3
        )
        removed = certified_interval.epsilon_bounds(
            [(Release(GaussianPair(1 / sigma), q), steps)], 1e-5, 1e-3
        )
        unsampled = float(oracles.gaussian_epsilon(1e-5, 2 * math.sqrt(steps) / sigma))
        assert removed.lower <= found.upper
        assert found.lower <= unsampled


def test_a_curve_and_a_trade_off_use_it() -> None:
    described = mechanisms.from_json(run(0.01, 1.0, 200))
    curve = ACCOUNTANTS["pld"].curve(question(run(0.01, 1.0, 1), REPLACE), [50, 100, 200], 1e-5)
    alone = epsilon("pld", run(0.01, 1.0, 200), 1e-5, REPLACE)
    assert curve[-1] is not None
    assert curve[-1].epsilon == pytest.approx(alone.epsilon, rel=1e-6)
    found = calculator.trade_off(described, 0.5, 11, relation=REPLACE)
    added = calculator.trade_off(described, 0.5, 11)
    assert found.advantage.lower > added.advantage.upper
    # one law for both directions: the trade-off function is its own inverse
    assert delta("pld", run(0.01, 1.0, 200), 0.0, REPLACE).delta == pytest.approx(
        found.advantage.upper, rel=1e-2
    )


def test_the_renyi_divergence_is_that_of_the_pair() -> None:
    orders = np.array([1.5, 2.0, 7.3, 30.0])
    found = subsampled_rdp.log_moments(question(run(0.02, 1.5, 10), REPLACE), orders)
    for order, value in zip(orders, found, strict=True):
        exact = 10 * oracles.replaced_record_moment(float(order) - 1, 0.02, 1.5)
        assert exact <= mp.mpf(value) <= exact * (1 + mp.mpf(10) ** -9)


# --- the characteristic function


@pytest.mark.slow
def test_the_decay_bounds_the_characteristic_function_everywhere() -> None:
    rng = random.Random(5)
    closest = -math.inf
    for _ in range(12):
        q, mu = log_uniform(rng, 1e-5, 0.95), log_uniform(rng, 0.02, 3)
        law = TiltedReplacedRecord(ReplacedRecord(mu, q), log_uniform(rng, 0.01, 60))
        edges = np.geomspace(0.05, 400, 90) / max(law.standard_deviation, mu / 20)
        if law.count_nodes(float(edges[-1])) > 2e5:
            continue
        bound = law.log_decay(edges[:-1], edges[1:])
        inside = np.exp(np.linspace(np.log(edges[:-1]), np.log(edges[1:]), 5))
        true = law.characteristic(np.sort(inside, axis=None)).log_value.real.reshape(-1, 5).max(1)
        significant = true > -25  # below, the quadrature's own error shows
        assert (true[significant] <= bound[significant] + 1e-9).all()
        beyond = np.array([law.log_decay_beyond(float(edge)) for edge in edges[:-1]])
        assert (true[significant] <= beyond[significant] + 1e-9).all()
        gaps = (true - bound)[significant & (true < -0.05)]
        closest = max(closest, *gaps.tolist(), -99.0)
    assert closest > -1.5  # the bound is not vacuous


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    ("q", "sigma", "tilt"),
    [(0.7, 1.5, 0.6), (0.02, 1.0, 4.0), (0.97, 0.6, 2.0)],
)
def test_values_are_within_their_errors(q: float, sigma: float, tilt: float) -> None:
    law = TiltedReplacedRecord(ReplacedRecord(1 / sigma, q), tilt)
    frequencies = np.array([0.0, 0.5, 3.0, 20.0])
    found = law.characteristic(frequencies)
    with mp.workdps(30):
        step, weights, losses = mp.mpf(1) / 64, [], []
        rate, mu = mp.mpf(q), 1 / mp.mpf(sigma)
        for k in range(-14 * 64, int(64 * (14 + mu * (2 * tilt + 1)))):
            z = k * step
            top, bottom = (1 - rate + rate * mp.exp(x * mu * z - mu * mu / 2) for x in (1, -1))
            losses.append(mp.log(top / bottom))
            weights.append(step * mp.npdf(z) * top ** (tilt + 1) * bottom ** (-mp.mpf(tilt)))
        total = mp.fsum(weights)
        assert abs(found.log_moment - mp.log(total)) <= found.moment_error
        for v, value, error in zip(frequencies, found.log_value, found.error, strict=True):
            exact = (
                mp.fsum(w * mp.expj(v * x) for w, x in zip(weights, losses, strict=True)) / total
            )
            assert abs(mp.exp(mp.mpc(value)) - exact) <= error + 1e-25


def test_a_steepness_that_is_too_small_breaks_the_decay(monkeypatch: Patch) -> None:
    """The variation of the density is what bounds high frequencies: without it nothing holds."""
    release = ReplacedRecord(1.0, 0.02)
    genuine = TiltedReplacedRecord._steepness
    # private: bounds of high frequencies are far above what they bound, in any answer
    monkeypatch.setattr(TiltedReplacedRecord, "_steepness", lambda *a: 1e-3 * genuine(*a))
    law = TiltedReplacedRecord(release, 4.0)
    edges = np.geomspace(0.1, 50, 60) / law.standard_deviation
    true = law.characteristic(edges).log_value.real
    assert (true > [law.log_decay_beyond(float(edge)) for edge in edges]).any()


def test_masses_of_cells_that_are_too_large_break_the_decay(monkeypatch: Patch) -> None:
    release = ReplacedRecord(1.0, 0.02)
    genuine = TiltedReplacedRecord._log_cell_mass_lower
    # private: as above
    monkeypatch.setattr(
        TiltedReplacedRecord, "_log_cell_mass_lower", lambda *a: genuine(*a) + math.log(1.3)
    )
    law = TiltedReplacedRecord(release, 4.0)
    edges = np.geomspace(0.01, 5, 60) / law.standard_deviation
    true = law.characteristic(edges).log_value.real
    assert (true > law.log_decay(edges, edges * (1 + 1e-9))).any()


def test_the_line_integral_misses_the_pair_if_the_truncation_is_not_counted(
    monkeypatch: Patch,
) -> None:
    """A law that ends before its mode has a truncation error, which refuses the integral."""
    monkeypatch.setattr(ReplacedRecord, "largest_node", lambda *_: 3.0)
    with pytest.raises(SlowDecayError):
        TiltedReplacedRecord(ReplacedRecord(1.0, 0.3), 6.0)


def test_the_argument_of_the_ratio_is_bounded() -> None:
    rng = random.Random(6)
    x = np.linspace(-40, 40, 4001)
    for _ in range(60):
        q, mu = rng.uniform(0.01, 0.999), log_uniform(rng, 0.05, 5)
        y = np.array([rng.uniform(0.05, 0.98)]) * math.pi / mu
        exponent = mu * (x + 1j * y) - mu**2 / 2
        top = 1 - q + q * np.exp(exponent)
        bottom = 1 - q + q * np.exp(-mu * (x + 1j * y) - mu**2 / 2)
        total = np.angle(top) - np.angle(bottom)
        assert total.max() <= ReplacedRecord(mu, q).argument_bound(y)[0] * (1 + 1e-12)
