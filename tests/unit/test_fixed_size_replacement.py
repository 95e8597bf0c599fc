"""Fixed-size samples of which one record is replaced: the symmetric pair dominates."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from scipy import special

from accountant_service import mechanisms
from accountant_service.accounting import calculator, release_laws
from accountant_service.accounting.guarantee import Status
from accountant_service.accounting.methods import ACCOUNTANTS, subsampled_rdp
from accountant_service.errors import BoundsContradictError
from accountant_service.numerics import certified_interval
from accountant_service.numerics.laws import without_replacement
from accountant_service.numerics.laws.dominating_pair import GaussianPair, Release
from accountant_service.numerics.laws.fixed_size_replacement import FixedSizeReplacement
from tests.support import definition, oracles
from tests.support.helpers import (
    REPLACE,
    ZERO_OUT,
    epsilon,
    log_uniform,
    question,
)
from tests.support.kinds import Json, dp_sgd, fixed_size, gaussian

pytestmark = pytest.mark.usefixtures("without_memory")  # engines are replaced here
Patch = pytest.MonkeyPatch


def run(size: int, batch: int, sigma: float, steps: int) -> Json:
    sizes = {"dataset_size": size, "batch_size": batch, "steps": steps}
    return dp_sgd(sigma, sampling="fixed_size", **sizes)


def delta_of_mixtures(means: list[complex], q: float, sigma: float, at: float) -> float:
    """δ of (1−q)·N(y) + q·N(x) against (1−q)·N(y) + q·N(x′) in the plane, by midpoints."""
    edges = np.linspace(-1 - 7 * sigma, 1 + 7 * sigma, 321)
    axis = 0.5 * (edges[1:] + edges[:-1])
    plane = axis[:, None] + 1j * axis
    y, first, second = (
        np.exp(-0.5 * np.abs(plane - mean) ** 2 / sigma**2) / (2 * math.pi * sigma**2)
        for mean in means
    )
    p, other = (1 - q) * y + q * first, (1 - q) * y + q * second
    area = float(edges[1] - edges[0]) ** 2
    return float(np.maximum(p - math.exp(at) * other, 0).sum() * area)


def largest_excess(pair_delta: Any) -> float:
    """Return the largest excess of δ of random mixtures over that of a pair, at random ε."""
    rng, found = random.Random(7), -math.inf
    for _ in range(20):
        q, sigma = rng.uniform(0.02, 0.98), log_uniform(rng, 0.4, 3)
        means = [np.exp(2j * math.pi * rng.random()) for _ in range(3)]
        if rng.random() < 0.5:  # the worst ones: on one line, two of them together
            means = rng.sample([-1.0, 1.0, rng.choice([-1.0, 1.0])], 3)
        for at in (0.0, rng.uniform(-2, 2), rng.uniform(-2, 2)):
            exact = delta_of_mixtures(means, q, sigma, at)
            found = max(found, exact - float(pair_delta(at, q, sigma)))
    return found


def test_no_mixtures_in_the_plane_cost_more_than_the_pair_at_any_real_epsilon() -> None:
    assert largest_excess(oracles.fixed_size_replacement_delta) < 1e-4  # of the midpoint rule


def test_a_pair_at_half_the_distance_does_not_dominate() -> None:
    def too_near(at: float, q: float, sigma: float) -> float:
        return float(oracles.fixed_size_replacement_delta(at, q, 2 * sigma))

    assert largest_excess(too_near) > 1e-2


def test_the_removing_pair_alone_does_not_dominate_below_zero() -> None:
    """A pair that is right for ε ≥ 0 only must not be composed (arXiv 2405.20769)."""

    def one_sided(at: float, q: float, sigma: float) -> float:
        z = np.linspace(-9 * sigma, 2 + 9 * sigma, 4001)
        absent, present = special.ndtr(-z / sigma), special.ndtr((2 - z) / sigma)
        return float(((1 - q - math.exp(at)) * absent + q * present).max())

    assert largest_excess(one_sided) > 1e-2


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    ("q", "mu"), [(0.3, 0.5), (0.01, 2.0), (0.9, 0.2), (0.9, 3.0), (1e-6, 1.0)]
)
def test_log_moments_are_upper_bounds_and_tight(q: float, mu: float) -> None:
    tilts = np.array([0.01, 0.5, 3.0])
    found = FixedSizeReplacement(mu, q).log_moments("removing", tilts)
    for tilt, value in zip(tilts, found, strict=True):
        with mp.workdps(25):
            s, rate, m = mp.mpf(float(tilt)), mp.mpf(q), mp.mpf(mu)

            def term(z: mp.mpf, s: mp.mpf = s, rate: mp.mpf = rate, m: mp.mpf = m) -> mp.mpf:
                ratio = 1 + rate * mp.expm1(m * z - m * m / 2)
                return mp.npdf(z) * (ratio**s - 1) * (ratio - ratio**-s)

            ends = [m / 2 + (m * s + 14) * i / 12 for i in range(13)]
            exact = mp.log1p(mp.quad(term, ends))
        assert exact <= mp.mpf(float(value)) <= exact * (1 + mp.mpf(1) / 10**4)


def test_moments_without_the_part_above_would_be_too_small(monkeypatch: Patch) -> None:
    """Twice the part with r < 1 taken off: a bound of it in the wrong direction shows."""
    release, tilts = FixedSizeReplacement(0.5, 0.3), np.array([0.5])
    genuine = FixedSizeReplacement._negative_loss_moments
    right = release.log_moments("removing", tilts)[0]
    # private: no question shows a moment that is a share of 1e-4 too small
    monkeypatch.setattr(
        FixedSizeReplacement, "_negative_loss_moments", lambda *a: genuine(*a) * (1 + 2e-4)
    )
    assert release.log_moments("removing", tilts)[0] < right * (1 - 2e-5)


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_cells_are_symmetric_and_complete(offset: float) -> None:
    spacing = 0.05
    cells = FixedSizeReplacement(1.3, 0.2).cells(
        "removing", -30, 60 - 2 * (offset > 0), spacing, offset
    )
    assert cells.p.sum() == pytest.approx(1.0, abs=1e-12)
    edges = (np.arange(-30, -30 + len(cells.gap) + 1) + offset) * spacing
    if offset:
        edges = edges[:-1]
        assert len(cells.p) == len(cells.q) == len(cells.gap) + 2
    gap = cells.p[1:-1] - cells.q[1:-1] * np.exp(edges[: len(cells.gap)])
    assert (np.abs(gap - cells.gap) <= cells.gap_rounding + 1e-15).all()
    losses = np.log(cells.p[1:-1] / cells.q[1:-1])
    low = (np.arange(-30, -30 + len(cells.gap)) + offset) * spacing
    assert (losses >= low - 1e-9).all()
    assert (losses <= low + spacing + 1e-9).all()


def test_pld_answers_and_costs_less_than_theorem_9() -> None:
    found = epsilon("pld", run(1000, 10, 1.0, 1000), 1e-5, REPLACE)
    assert found.status is Status.PROVEN
    assert found.epsilon == pytest.approx(14.8208, rel=2e-4)  # Theorem 9: 21.05
    assert found.certified is not None
    assert found.certified.lower == 0.0  # no two datasets attain the pair
    rdp = epsilon("subsampled_rdp", run(1000, 10, 1.0, 1000), 1e-5, REPLACE)
    assert found.epsilon < rdp.epsilon < 17.0


def test_it_costs_at_least_two_datasets_that_exist() -> None:
    """All other records contribute −C: the record is at +C, or at −C like them."""
    for q, sigma, steps in itertools.product((0.01, 0.2), (1.0, 4.0), (1, 100)):
        pair = certified_interval.epsilon_bounds(
            [(FixedSizeReplacement(2 / sigma, q), steps)], 1e-5, 1e-3
        )
        attained = certified_interval.epsilon_bounds(
            [(Release(GaussianPair(2 / sigma), q), steps)], 1e-5, 1e-3
        )
        assert attained.lower <= pair.upper
        if steps == 1:
            assert pair.upper <= attained.upper * 1.002


@pytest.mark.spread(first=2, second=4)
@pytest.mark.parametrize(("relation", "replacement"), [(REPLACE, -1), (ZERO_OUT, 0)])
@pytest.mark.parametrize(("size", "batch"), [(2, 1), (5, 2), (6, 5)])
@pytest.mark.parametrize("epsilon", [0.0, 0.7])
def test_two_datasets_that_exist_have_the_lower_bound(
    size: int, batch: int, epsilon: float, relation: Any, replacement: int
) -> None:
    """All batches of both are listed: all records but one are like its replacement."""
    sigma = 0.8

    one, other = [1] + [replacement] * (size - 1), [replacement] * size
    sums = [Counter(map(sum, itertools.combinations(each, batch))) for each in (one, other)]

    def excess(z: Any) -> Any:
        """P − e^ε·Q at an output: each density is the mean of normal ones at all batches' sums."""
        p, q = (
            sum(mp.npdf(z, mean, sigma) * count for mean, count in each.items()) / each.total()
            for each in sums
        )
        return p - mp.exp(epsilon) * q

    with mp.workdps(30):
        ends = (-batch - 5, batch + 5)
        crossing = mp.findroot(excess, ends, solver="bisect", tol=1e-50, maxsteps=99, verify=False)
        exact = mp.quad(excess, [crossing, *(crossing + k for k in (3, 6, 20))])
    described = mechanisms.from_json(fixed_size(size, batch, gaussian(sigma)))
    found = calculator.delta(described, epsilon, relation=relation).certified
    assert found is not None
    assert found.lower <= exact <= found.upper
    assert found.lower >= exact * (1 - 1e-3)


def test_a_fixed_size_sample_costs_more_than_the_theorem_of_papers_000_says() -> None:
    """Its own example: L = 600, N = 60 000, σ = .9, 1800 steps: 6.92, and at least 24.59."""
    described = mechanisms.from_json(run(60_000, 600, 0.9, 1800))
    claim = calculator.epsilon(described, 1e-5, "adadp_rdp", REPLACE)
    assert claim.status is Status.REFUTED
    assert claim.certified is not None
    assert claim.epsilon == pytest.approx(6.9214, abs=5e-5)
    assert claim.certified.lower == pytest.approx(24.597, abs=5e-4)
    zeros = epsilon("pld", dp_sgd(0.9, sample_rate=0.01, steps=1800), 1e-5, REPLACE)
    assert zeros.epsilon == pytest.approx(4.6703, abs=5e-5)  # if all others contributed 0


@pytest.mark.parametrize("relation", [REPLACE, ZERO_OUT])
def test_the_divergence_is_at_most_theorem_9s(relation: Any) -> None:
    orders = np.array([2.0, 5.5, 40.0, 256.0])
    found = subsampled_rdp.log_moments(question(run(1000, 10, 2.0, 1), relation), orders)
    assert (found <= without_replacement.log_moments(orders, 0.01, 1.0)).all()
    assert found[0] < 0.6 * without_replacement.log_moments(orders, 0.01, 1.0)[0]


def test_a_pair_at_the_wrong_distance_contradicts_the_definition(monkeypatch: Patch) -> None:
    tree = fixed_size(3, 1, gaussian(1.5))
    exact = definition.delta(tree, REPLACE, 3, [0.4])[0]
    described = mechanisms.from_json(tree)
    assert calculator.delta(described, 0.4, relation=REPLACE).delta >= exact
    monkeypatch.setattr(
        release_laws, "FixedSizeReplacement", lambda mu, rate: FixedSizeReplacement(0.5 * mu, rate)
    )
    found = ACCOUNTANTS["pld"].delta(question(tree, REPLACE), 0.4)
    assert found.delta < 0.9 * exact
    with pytest.raises(BoundsContradictError):  # two datasets that exist cost more
        calculator.delta(described, 0.4, relation=REPLACE)


def test_it_costs_more_with_larger_batches_more_steps_and_less_noise() -> None:
    def cost(batch: int, sigma: float, steps: int) -> float:
        return epsilon("pld", run(1000, batch, sigma, steps), 1e-6, REPLACE).epsilon

    start = cost(10, 2.0, 200)
    assert start < min(cost(12, 2.0, 200), cost(10, 1.8, 200), cost(10, 2.0, 240))
    assert cost(999, 2.0, 200) <= cost(1000, 2.0, 200)
