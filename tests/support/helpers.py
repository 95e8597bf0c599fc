"""Short names for what tests ask most."""

from __future__ import annotations

import random
from typing import Any

from accountant_service import mechanisms
from accountant_service.accountants import ACCOUNTANTS, Question
from accountant_service.guarantee import Guarantee, NeighbouringRelation

ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
ZERO_OUT = NeighbouringRelation.ZERO_OUT_ONE


def run(q: float, sigma: float, steps: int, **more: Any) -> dict[str, Any]:
    """A dp_sgd description."""
    described = {"kind": "dp_sgd", "noise_multiplier": sigma, "sample_rate": q, "steps": steps}
    return described | more


def gaussian(sigma: float) -> dict[str, Any]:
    return {"kind": "gaussian", "noise_multiplier": sigma}


def question(
    description: dict[str, Any], relation: NeighbouringRelation = ADD_OR_REMOVE
) -> Question:
    form = mechanisms.canonical_form(mechanisms.from_json(description))
    return Question(form, relation)


def epsilon(
    method: str,
    description: dict[str, Any],
    delta: float,
    relation: NeighbouringRelation = ADD_OR_REMOVE,
) -> Guarantee:
    return ACCOUNTANTS[method].epsilon(question(description, relation), delta)


def delta(
    method: str,
    description: dict[str, Any],
    at: float,
    relation: NeighbouringRelation = ADD_OR_REMOVE,
) -> Guarantee:
    return ACCOUNTANTS[method].delta(question(description, relation), at)


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())
