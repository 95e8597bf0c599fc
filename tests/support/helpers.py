"""Short helpers for frequent questions: mechanism descriptions, ε and δ by method."""

from __future__ import annotations

import random
from typing import Any

import pytest

from accountant_service import importing, mechanisms
from accountant_service.accounting.guarantee import Guarantee, NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.numerics.laws.dominating_pair import Composition, GaussianPair, Release

ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
ZERO_OUT = NeighbouringRelation.ZERO_OUT_ONE


def plan(kind: str, **fields: Any) -> StepPlan:
    """Return a mechanism of a kind, divided into the ledger's steps."""
    return StepPlan.of(mechanisms.from_json({"kind": kind, **fields}))


def run(q: float, sigma: float, steps: int, **more: Any) -> dict[str, Any]:
    """Return the description of a DP-SGD run, as JSON."""
    described = {"kind": "dp_sgd", "noise_multiplier": sigma, "sample_rate": q, "steps": steps}
    return described | more


def gaussian(sigma: float) -> dict[str, Any]:
    """Return the description of one Gaussian release, as JSON."""
    return {"kind": "gaussian", "noise_multiplier": sigma}


def nightly(*values: object) -> object:
    """Return a case that only `make test-nightly` runs: it repeats what the others show."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def question(
    description: dict[str, Any], relation: NeighbouringRelation = ADD_OR_REMOVE
) -> Question:
    """Return an accountant's question about a described mechanism."""
    form = mechanisms.canonical_form(mechanisms.from_json(description))
    return Question(form, relation)


def epsilon(
    method: str,
    description: dict[str, Any],
    delta: float,
    relation: NeighbouringRelation = ADD_OR_REMOVE,
) -> Guarantee:
    """Return a method's guarantee at δ for a described mechanism."""
    return ACCOUNTANTS[method].epsilon(question(description, relation), delta)


def delta(
    method: str,
    description: dict[str, Any],
    at: float,
    relation: NeighbouringRelation = ADD_OR_REMOVE,
) -> Guarantee:
    """Return a method's guarantee at ε = `at` for a described mechanism."""
    return ACCOUNTANTS[method].delta(question(description, relation), at)


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform between those of `low` and `high`."""
    return float(low * (high / low) ** rng.random())


def codes(answer: importing.Answer) -> set[str]:
    """Return the codes of an import's findings."""
    return {finding.code for finding in answer.findings}


def releases(*parts: tuple[float, float, int]) -> Composition:
    """Return sampled Gaussian releases: sample rate, noise multiplier and count of each."""
    return [(Release(GaussianPair(1 / sigma), q), count) for q, sigma, count in parts]
