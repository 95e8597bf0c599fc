"""A person with several sampled records is replaced by another, or zeroed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import special, stats

from accountant_service.accounting import release_laws
from accountant_service.numerics.laws.dominating_pair import Release
from accountant_service.numerics.laws.gaussian_mixture import several_records
from accountant_service.numerics.laws.replaced_person import ReplacedPersonPair
from accountant_service.numerics.laws.replaced_record import ReplacedRecord
from tests.support import exact_deltas
from tests.support.kinds import (
    ADDED,
    REPLACED,
    ZEROED,
    Json,
    gaussian,
    poisson,
    proved_delta,
    repeated,
    user_level,
)


def release(records: int, rate: float, sigma: float) -> Json:
    return user_level(records, poisson(rate, gaussian(sigma)))


@pytest.mark.parametrize("seed", range(4))
def test_every_replacement_costs_at_most_as_much(seed: int) -> None:
    """Two persons with gradients anywhere in the unit disc, at ε of either sign; a grid sums δ."""
    rng = np.random.default_rng(seed)
    records, rate = int(rng.integers(1, 4)), float(rng.uniform(0.1, 0.9))
    sigma, epsilon = float(rng.uniform(0.6, 2)), float(rng.uniform(-0.7, 0.7))
    spacing = 0.05
    x, y = np.meshgrid(*[np.arange(-9, 9, spacing)] * 2)

    def output_density(gradients: Any) -> Any:
        total = np.zeros_like(x)
        for drawn in itertools.product([False, True], repeat=records):
            weight = np.prod([rate if each else 1 - rate for each in drawn])
            mean = gradients[list(drawn)].sum(axis=0) / sigma
            total += weight * np.exp(-0.5 * ((x - mean[0]) ** 2 + (y - mean[1]) ** 2))
        return total / (2 * np.pi)

    angles = rng.uniform(0, 2 * np.pi, (2, records))
    norms = rng.uniform(0.5, 1, (2, records))
    persons = np.stack([norms * np.cos(angles), norms * np.sin(angles)], axis=-1)
    before, after = (output_density(each) for each in persons)
    worst = float(exact_deltas.replaced_person(epsilon, records, rate, sigma))
    for p, q in ((before, after), (after, before)):
        excess = np.maximum(p - np.exp(epsilon) * q, 0.0).sum() * spacing**2
        assert excess <= worst + 1e-6


def log_density(records: int, rate: float, mu: float, z: Any) -> Any:
    participations = np.arange(records + 1)
    log_weights = stats.binom.logpmf(participations, records, rate)
    terms = log_weights + stats.norm.logpdf(z[:, None] - participations * mu)
    return special.logsumexp(terms, axis=1)


def test_two_releases_compose() -> None:
    """A fine grid of both outputs."""
    records, rate, epsilon = 3, 0.3, 0.7
    z = np.arange(-10, 10, 0.005)
    p, q = (np.exp(log_density(records, rate, 1.0, each)) * 0.005 for each in (z, -z))
    tail_p, tail_q = (np.append(np.cumsum(each[::-1])[::-1], 0.0) for each in (p, q))
    first = np.searchsorted(p / q, np.exp(epsilon) * q / p)
    exact = float(np.sum(p * tail_p[first] - np.exp(epsilon) * q * tail_q[first]))
    found = proved_delta(repeated(2, release(records, rate, 1.0)), epsilon, REPLACED)
    assert found.lower <= exact * (1 + 1e-4)
    assert exact * (1 - 1e-4) <= found.upper <= found.lower * (1 + 2e-3)


@pytest.mark.parametrize(("rate", "mu"), [(0.01, 1.0), (0.6, 0.3)])
def test_one_record_of_each_person_is_a_replaced_record(rate: float, mu: float) -> None:
    person = Release(ReplacedPersonPair(several_records(1, rate, mu)))
    record = ReplacedRecord(mu, rate)
    tilts = np.array([0.3, 2.0, 20.0])
    assert person.log_moments("removing", tilts) == pytest.approx(
        record.log_moments("removing", tilts), rel=1e-7, abs=1e-11
    )
    cells = [each.cells("removing", -40, 80, 0.02) for each in (person, record)]
    assert cells[0].p == pytest.approx(cells[1].p, rel=1e-9, abs=1e-15)
    assert cells[0].q == pytest.approx(cells[1].q, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("records", "rate", "mu"), [(2, 0.3, 1.0), (12, 0.02, 0.5)])
def test_moments_are_bounds(records: int, rate: float, mu: float) -> None:
    pair = ReplacedPersonPair(several_records(records, rate, mu))
    z = np.arange(-70, 70, 0.01)
    after, before = (log_density(records, rate, mu, each) for each in (z, -z))
    for order in (1.5, 4.0, -1.0):
        exact = special.logsumexp(order * after + (1 - order) * before) + np.log(0.01)
        found = float(pair.log_moments(np.array([order]), 1.0)[0])
        assert exact - 1e-12 <= found <= exact + 1e-9


def test_a_zeroed_person_costs_what_an_added_one_does() -> None:
    run = repeated(100, release(4, 0.02, 1.0))
    assert proved_delta(run, 1.0, ZEROED) == proved_delta(run, 1.0, ADDED)
    assert proved_delta(run, 1.0, REPLACED).lower > proved_delta(run, 1.0, ADDED).upper


def test_a_pair_at_half_the_distance_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = several_records
    monkeypatch.setattr(
        release_laws, "several_records", lambda k, rate, mu: genuine(k, rate, mu / 2)
    )
    exact = exact_deltas.replaced_person(0.1, 3, 0.25, 1.0)
    assert proved_delta(release(3, 0.25, 1.0), 0.1, REPLACED).upper < exact


def test_improbable_numbers_of_sampled_records_count_as_infinite_loss_in_both_directions() -> None:
    person = several_records(200, 1e-3, 0.5)
    dropped = person.infinite_masses[1]
    assert 0 < dropped < 1e-40
    pair = Release(ReplacedPersonPair(person))
    assert pair.infinite_mass("removing") >= dropped
    assert pair.infinite_mass("adding") >= dropped
    cells = pair.cells("removing", -10, 20, 0.1)
    assert cells.infinite == 0.0  # nothing is certain
