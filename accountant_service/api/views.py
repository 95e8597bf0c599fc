"""From meaning to the JSON of the wire: one function per kind of answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accountant_service.accountants import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.calculator import Comparison, Curve, Inapplicable, TradeOff
from accountant_service.guarantee import Assumption, Guarantee, Interval
from accountant_service.solver import Solution

Json = dict[str, Any]


def guarantee(claim: Guarantee) -> Json:
    """A guarantee as api.md shows it."""
    return {
        "epsilon": claim.epsilon,
        "delta": claim.delta,
        "method": claim.method,
        "status": claim.status.value,
        "certified": _certified(claim),
        "certified_reason": claim.certified_reason,
        "warnings": list(claim.warnings),
        "neighbouring_relation": claim.neighbouring_relation.value,
        "sampling": claim.sampling,
        "assumptions": _assumptions(claim.assumptions),
        "optimal_order": claim.optimal_order,
        "conversion": claim.conversion,
        "mechanism_hash": claim.mechanism_hash,
        "accountant_version": claim.accountant_version,
    }


def _assumptions(assumptions: Sequence[Assumption]) -> list[Json]:
    return [{"statement": a.statement, "holds": a.holds, "source": a.source} for a in assumptions]


def _certified(claim: Guarantee) -> Json | None:
    if claim.certified is None:
        return None
    name = claim.solved_for
    return {f"{name}_lower": claim.certified.lower, f"{name}_upper": claim.certified.upper}


def solution(name: str, solved: Solution) -> Json:
    """A solved parameter under its own name, with its guarantee and, for steps, the next one."""
    answer = {name: solved.value, "guarantee": guarantee(solved.guarantee)}
    if solved.next is None:
        return answer
    undecided = None if solved.undecided is None else {"margin": solved.undecided}
    return answer | {"next": guarantee(solved.next), "undecided": undecided}


def inapplicable(answer: Inapplicable) -> Json:
    """A method without an answer."""
    return {"method": answer.method, "code": answer.error.code, "reason": answer.error.detail}


def comparison(compared: Comparison) -> Json:
    """All methods side by side."""
    proved = compared.certified
    known = isinstance(proved, Guarantee)
    return {
        "certified": guarantee(proved) if isinstance(proved, Guarantee) else None,
        "certified_reason": None if known else str(proved),
        "guarantees": [
            inapplicable(each) if isinstance(each, Inapplicable) else guarantee(each)
            for each in compared.answers
        ],
    }


def curves(steps: Sequence[int], drawn: Sequence[Curve | Inapplicable]) -> Json:
    """ε along the steps."""
    return {
        "steps": list(steps),
        "curves": [
            inapplicable(each)
            if isinstance(each, Inapplicable)
            else {
                "method": each.method,
                "status": each.status.value,
                "epsilon": list(each.epsilons),
                "warnings": list(each.warnings),
                "assumptions": _assumptions(each.assumptions),
            }
            for each in drawn
        ],
    }


def trade_off(found: TradeOff, prior: float) -> Json:
    """What an attacker can achieve."""
    return {
        "false_positive_rates": list(found.false_positive_rates),
        "false_negative_rates_lower": [rate.lower for rate in found.false_negative_rates],
        "false_negative_rates_upper": [rate.upper for rate in found.false_negative_rates],
        "membership_advantage": _interval(found.advantage),
        "prior": prior,
        "attack_success": _interval(found.success),
        "posterior_lower": [each.lower for each in found.posteriors],
        "posterior_upper": [each.upper for each in found.posteriors],
        "gaussian_dp": {"mu": found.mu, "error": found.mu_error},
        "mechanism_hash": found.mechanism_hash,
        "assumptions": _assumptions(found.assumptions),
    }


def _interval(proved: Interval) -> Json:
    return {"lower": proved.lower, "upper": proved.upper}


def methods() -> Json:
    """The registry, as a table."""
    return {
        "methods": [
            {
                "method": each.name,
                "title": each.title,
                "source": each.source,
                "needs": each.needs,
                "proves": each.proves,
                "default": each.name == DEFAULT_METHOD,
            }
            for each in ACCOUNTANTS.values()
        ]
    }
