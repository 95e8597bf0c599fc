"""Every bound of every engine holds in each direction by itself, by ball arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accountant_service.numerics.floats.special_functions import Array, lattice_points
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Direction,
    GaussianPair,
    LaplacePair,
    Release,
)
from accountant_service.numerics.laws.gaussian_mixture import several_records
from accountant_service.numerics.laws.replaced_laplace import ReplacedLaplacePair
from accountant_service.numerics.laws.replaced_person import ReplacedPersonPair
from accountant_service.numerics.laws.replaced_record import ReplacedRecord
from tests.enclosures import oracle
from tests.enclosures.engines import (
    COSTLY,
    DRAWS,
    QUESTIONS,
    Case,
    Draw,
    Tally,
    compare,
    compare_random_cases,
)
from tests.enclosures.oracle import LAPLACE, NORMAL, arb

QUICK = tuple(draw for draw in DRAWS if draw not in COSTLY)
NEAR_ONE = 1 - 2.0**-53


def rate_near_one(direction: Direction, epsilon: float) -> Case:
    law, pair = Release(GaussianPair(10.0), NEAR_ONE), oracle.poisson(NORMAL, NEAR_ONE, 10.0)
    return Case("near 1", [(law, 1)], direction, epsilon, lambda e: pair.delta(e, direction))


@pytest.mark.parametrize(("direction", "epsilon"), [("adding", 36.537), ("removing", 60.0)])
def test_a_sample_rate_near_one(direction: Direction, epsilon: float) -> None:
    """One upper bound was 1.86e-19 where δ is 0.1553: its inverse had no rounding term."""
    tally = Tally()
    compare(rate_near_one(direction, epsilon), tally)
    assert not tally.outside
    assert ("near 1", "lattice", "δ at ε", direction) in tally.counts


def test_a_wrong_inverse_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def inexact(release: Release, loss: Array) -> Array:
        with np.errstate(divide="ignore"):
            return np.log1p(np.maximum(np.expm1(loss) / release.sample_rate, -1.0))

    # private: the inverse as it was
    monkeypatch.setattr(Release, "_log_ratio_at", inexact)
    monkeypatch.setattr(Release, "_inverse_error", lambda _, loss, __: np.zeros_like(loss))
    tally = Tally()
    compare(rate_near_one("adding", 36.537), tally)
    assert tally.outside


@pytest.mark.parametrize("q", [1e-6, 0.3, 0.5, 0.75, 1 - 1e-6, NEAR_ONE])
@pytest.mark.parametrize(
    "pair", [GaussianPair(0.5), GaussianPair(20.0), LaplacePair(3.0), ReplacedLaplacePair(3.0, 0.5)]
)
def test_a_sampled_loss_is_divided_within_the_error_of_its_edges(pair: Any, q: float) -> None:
    release = Release(pair, q)
    for first, spacing in ((-900, 0.05), (-2000, 1e-3), (100, 0.2)):
        cells = release.cells("removing", first, 1800, spacing)
        edges = lattice_points(first, 1801, spacing)
        ratios = release._log_ratio_at(edges)  # private: the inverse is not a result
        for k in range(0, 1801, 37):
            exact = (1 - arb(q) + arb(q) * arb(float(ratios[k])).exp()).log()
            at = arb(first + k) * arb(spacing)
            off = abs(exact - at.max((1 - arb(q)).log()))
            assert not off > cells.edge_error[k], (q, k, edges[k])


@pytest.mark.parametrize("q", [1e-3, 0.5, NEAR_ONE])
def test_an_output_is_within_the_error_of_its_edge(q: float) -> None:
    """Laws that invert their own loss say how far they are off."""
    person = several_records(5, q, 0.7)
    record, laplace = ReplacedRecord(1.5, q), ReplacedLaplacePair(3.0, q)
    # private: the inverses are not results
    replaced_person = ReplacedPersonPair(person)
    cases: list[tuple[Any, oracle.MixturePair, Callable[[Array], Array]]] = [
        (Release(person), oracle.person(5, q, 0.7), lambda x: person._outputs_at(x)[0]),
        (
            Release(replaced_person),
            oracle.person(5, q, 0.7, is_replaced=True),
            lambda x: replaced_person._outputs_at(x)[0],
        ),
        (record, oracle.replaced(NORMAL, q, 1.5), record._output_at),
        (Release(laplace), oracle.replaced(LAPLACE, q, 3.0), laplace._scaled_output),
    ]
    first, count, spacing = -60, 120, 0.05
    edges = lattice_points(first, count + 1, spacing)
    for law, pair, outputs in cases:
        cells, found = law.cells("removing", first, count, spacing), outputs(edges)
        for k in range(0, count + 1, 4):
            exact = pair.loss(arb(float(found[k])))
            is_reached = math.isfinite(found[k]) and abs(found[k]) != found.max()
            off = abs(exact - arb(first + k) * arb(spacing))
            assert not (is_reached and off > cells.edge_error[k]), (law, k)


@pytest.mark.spread(first=2, second=5)
@pytest.mark.parametrize("draw", QUICK, ids=lambda draw: draw.__name__.removeprefix("_draw_"))
def test_a_few_random_cases_of_each_kind(draw: Draw) -> None:
    tally = compare_random_cases(2026, 2, (draw,))
    assert not tally.outside
    assert tally.counts


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_two_gaussian_releases_are_one(direction: Direction) -> None:
    """Cells of the first output enclose the closed form of two unsampled Gaussian releases."""
    found = oracle.Twice(oracle.poisson(NORMAL, 1.0, 0.9)).delta(1.5, direction)
    assert found.contains(oracle.gaussian_delta(1.5, arb(0.9) * arb(2).sqrt()))
    assert float(found.rad()) < 1e-3 * float(found.mid())


@pytest.mark.slow
def test_every_engine_answers_every_question_in_each_direction() -> None:
    """As .venv/bin/python -m tests.enclosures --points 100 does, with fewer cases and kinds."""
    tally = compare_random_cases(39, 3, QUICK)
    assert not tally.outside, "\n".join(tally.outside)
    found = {(engine, question, direction) for _, engine, question, direction in tally.counts}
    for direction in DIRECTIONS:
        for engine in ("line integral", "lattice", "enumeration"):
            assert {(engine, question, direction) for question in QUESTIONS} <= found
        for engine in ("Rényi", "closed form"):
            assert {(engine, question, direction) for question in QUESTIONS[:2]} <= found
        assert ("little noise", "δ at ε", direction) in found
        assert {("trade-off", each, direction) for each in ("δ at ε", "attack")} <= found
    assert {("rare events", question, "removing") for question in QUESTIONS} <= found


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_many_random_cases(night_seed: int) -> None:
    tally = compare_random_cases(night_seed, 250)
    print(tally.table())
    assert not tally.outside, "\n".join(tally.outside)
