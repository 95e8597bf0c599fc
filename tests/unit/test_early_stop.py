"""Stopping because of what was seen: ε of the steps made claims too little, ε of the plan does not.

The adversary reads the privacy loss along a run of unsampled Gaussian steps, and stops at the first
step at which the loss exceeds the ε that a certificate of a run stopped there would state. If a
certificate were right whenever it is issued, the probability of that, less e^ε times the same
probability without the record, would add up to at most δ. It is computed here by quadrature.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger import certificate, hash_chain
from accountant_service.ledger.filters import ReferenceFilter
from accountant_service.ledger.filters.reference import ReferenceCharge
from accountant_service.ledger.rules import Balance, Dataset, Reservation, State
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import from_json
from accountant_service.numerics.floats.special_functions import Array

DELTA = 1e-5
NOISE = 20.0
STOPS = 4 ** np.arange(7)  # steps after which the run may be stopped
RUN = {"kind": "dp_sgd", "noise_multiplier": NOISE, "sampling": "none", "sample_rate": 1.0}
PLAN = RUN | {"steps": int(STOPS[-1])}
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)


def quadrature(low: float, high: float) -> tuple[Array, Array]:
    """Nodes between two numbers, and their weights."""
    half = (high - low) / 2
    return low + half * (NODES + 1), half * WEIGHTS


def normal(deviation: float, at: Array) -> Array:
    density: Array = np.exp(-0.5 * (at / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))
    return density


def excess(epsilons: list[float]) -> float:
    """δ that the adversary attains against certificates that state these ε at the stops.

    With the record in the data the loss after t steps is t/(2σ²) + W/σ for a Brownian motion W;
    `nodes` and `masses` are of W on the paths that have not been stopped.
    """
    attained, nodes, masses, before = 0.0, np.zeros(1), np.ones(1), 0
    for steps, epsilon in zip(STOPS, epsilons, strict=True):
        limit = NOISE * epsilon - steps / (2 * NOISE)  # of W: beyond it the loss exceeds ε
        reach, spread = 10 * math.sqrt(steps), math.sqrt(steps - before)
        stopped, widths = quadrature(limit, limit + reach)
        arriving = normal(spread, stopped[:, None] - nodes) @ masses
        attained += float(widths * arriving @ -np.expm1((limit - stopped) / NOISE))
        going_on, widths = quadrature(-reach, min(limit, reach))
        masses = widths * (normal(spread, going_on[:, None] - nodes) @ masses)
        nodes, before = going_on, int(steps)
    return attained


def certified(granted: int) -> certificate.Document:
    """Return the certificate of a run that was stopped after a number of steps."""
    plan = StepPlan.of(from_json(PLAN))
    relation, balance = NeighbouringRelation.ADD_OR_REMOVE_ONE, Balance((0, 0), (0, 0))
    policy = ReferenceFilter(8.0, DELTA, relation, plan.step_mechanism, plan.steps)
    charge = ReferenceCharge(plan.steps, plan.steps, is_reference=True)
    dataset = Dataset("d", "d", 100, "record", policy, balance, 1, hash_chain.GENESIS, 0)
    run = Reservation(
        "r", "d", State.COMMITTED, PLAN, plan.canonical.hash, charge, plan.steps, granted, 0, "",
        "k", None, charge.reserved,
    )  # fmt: skip
    return certificate.issue([(dataset, run, certificate.RunEnd(None))], bytes(32), 0)


def test_epsilon_of_the_steps_made_is_exceeded_by_who_stops_after_looking() -> None:
    """The quadrature finds δ itself for one stop, and 6.7 times as much for seven (docs)."""
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    made = [
        calculator.prove_epsilon(from_json(RUN | {"steps": int(steps)}), relation, DELTA).epsilon
        for steps in STOPS
    ]
    never = [1e3] * (len(STOPS) - 1)
    assert excess([*never, made[-1]]) == pytest.approx(DELTA, rel=1e-6)
    assert excess(made) / DELTA == pytest.approx(6.69, abs=0.01)


def test_no_stopping_rule_exceeds_what_certificates_state() -> None:
    issued = [certified(int(steps)) for steps in STOPS]
    assert excess([each["guarantee"]["epsilon"] for each in issued]) <= DELTA * (1 + 1e-6)
    for steps, each in zip(STOPS, issued, strict=True):
        assert (each["steps_reserved"], each["steps"]) == (PLAN["steps"], steps)
        assert each["mechanism"]["steps"] == PLAN["steps"]
        assert certificate.check(each)[0] == []
