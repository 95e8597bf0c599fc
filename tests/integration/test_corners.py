"""The corners of what is accepted: no failure, no NaN, no interval upside down, no long wait."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest

from accountant_service import mechanisms
from accountant_service.accounting import calculator, solver
from accountant_service.accounting.guarantee import Guarantee, NeighbouringRelation, Status
from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.errors import AccountingError
from accountant_service.mechanisms import DpSgd
from tests.support.helpers import log_uniform, nightly, run

SIGMAS = [0.01, 0.011, 0.2, 1.0, 1e3, 1e6]
RATES = [0.0, 1e-12, 1e-7, 0.3, 0.999999999, 1.0]
COUNTS = [0, 1, 2, 1000, 10**9 - 1]
DELTAS = [1e-50, 1e-15, 1e-5, 0.5, 0.9999999999]
EPSILONS = [0.0, 1e-9, 1.0, 30.0, 1e6]


def corner(rng: random.Random) -> dict[str, Any]:
    """A mechanism with at least one extreme."""
    sigma = rng.choice([*SIGMAS, log_uniform(rng, 0.3, 10)])
    q = rng.choice([*RATES, log_uniform(rng, 1e-5, 1)])
    count = rng.choice([*COUNTS, round(log_uniform(rng, 1, 1e5))])
    laplace = {"kind": "laplace", "noise_multiplier": sigma}
    sampled = {"kind": "poisson_sampled", "sample_rate": q, "mechanism": laplace}
    size = rng.choice([1, 2, 1000, 10**9])
    sizes = {"dataset_size": size, "batch_size": rng.randint(1, size), "steps": count}
    return rng.choice(
        [
            run(q, sigma, count),
            run(q, sigma, count, sampling="shuffled"),
            {"kind": "repeated", "count": count, "mechanism": laplace},
            {"kind": "repeated", "count": count, "mechanism": sampled},
            {"kind": "dp_sgd", "noise_multiplier": sigma, **sizes, "sampling": "fixed_size"},
            {"kind": "composed", "mechanisms": [run(q, sigma, count), laplace]},
        ]
    )


def check(claim: Guarantee) -> None:
    value = claim.epsilon if claim.solved_for == "epsilon" else claim.delta
    assert math.isfinite(value)
    assert value >= 0
    if claim.certified:
        assert claim.certified.lower <= claim.certified.upper * (1 + 1e-9)
    proven = all(assumption.holds for assumption in claim.assumptions)
    assert not (proven and claim.status is Status.REFUTED), "a proven claim was refuted"


@pytest.mark.slow
def test_corners_are_answered_or_refused_soundly() -> None:
    for seed in range(20):
        ask_at_a_corner(seed)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_corners_are_answered_or_refused_soundly(night_seed: int) -> None:
    for seed in (*range(20, 60), *range(1000 * night_seed, 1000 * night_seed + 200)):
        ask_at_a_corner(seed)


def ask_at_a_corner(seed: int) -> None:
    """Ask for ε and δ at a random corner; its seed is shown if that fails."""
    print("corner", seed)
    rng = random.Random(seed)
    described = mechanisms.from_json(corner(rng))
    relation = rng.choice(list(NeighbouringRelation))
    method = rng.choice(list(ACCOUNTANTS))
    delta, epsilon = rng.choice(DELTAS), rng.choice(EPSILONS)
    start = time.process_time()  # whatever else the machine does
    for ask in (
        lambda: calculator.epsilon(described, delta, method, relation),
        lambda: calculator.delta(described, epsilon, method, relation),
    ):
        try:
            check(ask())
        except AccountingError:
            continue  # a refusal is an answer here
    assert time.process_time() - start < 10


@pytest.mark.spread(second=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "sigma", "steps"),
    [  # each pair of values once
        (1e-9, 0.01, 1),
        (1e-9, 0.1, 10**9),
        (0.01, 0.01, 10**9),
        (0.01, 0.1, 1),
        (0.5, 0.01, 1),
        (0.5, 0.1, 10**9),
    ],
)
def test_the_referee_always_answers_for_sampled_gaussians(
    q: float, sigma: float, steps: int
) -> None:
    """However large ε is: the closed form without sampling is a bound."""
    for delta in (1e-12, 1e-5, 0.1):
        check(calculator.epsilon(mechanisms.from_json(run(q, sigma, steps)), delta))


@pytest.mark.parametrize("prior", [1e-9, 0.5, 1 - 1e-9])
def test_the_trade_off_at_extreme_priors(prior: float) -> None:
    laplace = {"kind": "laplace", "noise_multiplier": 0.01}
    for described in (run(0.1, 1.0, 10), run(1.0, 0.05, 3), laplace):
        found = calculator.trade_off(mechanisms.from_json(described), prior, 11)
        assert 0 <= found.success.lower <= found.success.upper <= 1
        assert 0 <= found.advantage.lower <= found.advantage.upper <= 1
        assert all(0 <= r.lower <= r.upper <= 1 for r in found.false_negative_rates)


AIMS = [  # each method and each target; all pairs at night
    *(("mma", target) for target in (1e-9, 1.0, 1e6)),
    pytest.param("pld", 1.0, marks=pytest.mark.slow),
    pytest.param("subsampled_rdp", 1e-9, marks=pytest.mark.slow),
    pytest.param("advanced_composition", 1e6, marks=pytest.mark.slow),
    *(nightly("pld", target) for target in (1e-9, 1e6)),
    *(nightly("subsampled_rdp", target) for target in (1.0, 1e6)),
    *(nightly("advanced_composition", target) for target in (1e-9, 1.0)),
]


@pytest.mark.parametrize(("method", "target"), AIMS)
def test_solvers_keep_to_the_target_at_the_corners(method: str, target: float) -> None:
    aim = solver.Target(ACCOUNTANTS[method], NeighbouringRelation.ADD_OR_REMOVE_ONE, target, 1e-5)
    plan = DpSgd(noise_multiplier=1.0, sample_rate=0.01, steps=100)
    answered = 0
    for solve in (solver.noise_multiplier, solver.steps, solver.sample_rate):
        try:
            assert solve(plan, aim).guarantee.epsilon <= target
        except AccountingError:
            continue
        answered += 1
    assert answered == 3 or target != 1.0, "an ordinary target is answered, not refused"


def test_a_delta_beyond_the_greatest_loss_is_zero() -> None:
    """The greatest loss is known exactly; below it δ is above 0."""
    laplace = mechanisms.from_json({"kind": "laplace", "noise_multiplier": 1.0})
    claim = calculator.delta(laplace, 2.0)
    assert claim.certified is not None
    assert (claim.certified.lower, claim.delta) == (0.0, 0.0)
    below = calculator.delta(laplace, 0.999999)
    assert below.delta > 0


@pytest.mark.parametrize("method", ["pld", "subsampled_rdp", "moments_accountant", "zcdp"])
def test_an_underflowing_delta_is_not_zero(method: str) -> None:
    described = mechanisms.from_json({"kind": "gaussian", "noise_multiplier": 10.0})
    assert calculator.delta(described, 1000.0, method).delta >= 1e-300


def test_shuffled_epochs_have_an_upper_bound_only() -> None:
    shuffled = mechanisms.from_json(run(0.5, 1.0, 2, sampling="shuffled"))
    claim = calculator.epsilon(shuffled, 1e-5, relation=NeighbouringRelation.ZERO_OUT_ONE)
    assert claim.status is Status.PROVEN
    assert claim.certified is not None
    assert claim.certified.lower == 0.0
    unproved = calculator.epsilon(shuffled, 1e-5, "mma")
    assert unproved.certified is None
    assert unproved.status is Status.ESTIMATE, "an unproved interval refutes nothing"


def test_a_fixed_size_sample_of_everything_is_no_plain_gaussian() -> None:
    sizes = {"dataset_size": 1000, "steps": 1, "sampling": "fixed_size"}
    whole, nearly = (
        mechanisms.from_json({"kind": "dp_sgd", "noise_multiplier": 4.0, "batch_size": b, **sizes})
        for b in (1000, 999)
    )
    assert calculator.epsilon(whole, 1e-5).epsilon >= calculator.epsilon(nearly, 1e-5).epsilon


@pytest.mark.slow
def test_guessing_at_a_lopsided_prior_is_not_overstated() -> None:
    """One sampled step at prior 0.9: the best guess is "present", right in exactly 0.9."""
    found = calculator.trade_off(mechanisms.from_json(run(0.01, 0.6, 1)), 0.9, 11)
    assert found.success.lower <= 0.9 <= found.success.upper


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "epsilon"),
    [
        (0.01, 2.0, 100, 1.0),
        (0.01, 2.0, 5, 0.32),
        (0.0136, 2.61, 1, 0.02876),
        (1e-4, 0.6, 10**4, 1.0),
    ],
)
def test_delta_is_answered_where_the_other_direction_costs_nothing(
    q: float, sigma: float, steps: int, epsilon: float
) -> None:
    described = mechanisms.from_json(run(q, sigma, steps))
    proved = calculator.delta(described, epsilon).delta
    assert proved <= calculator.delta(described, epsilon, "subsampled_rdp").delta
