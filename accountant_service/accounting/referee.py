"""Check a method's claim against the proved interval of the default method.

A claim below a proved lower bound is false, even if it was published, and is marked as refuted.
Tests check that a method whose hypotheses hold is never refuted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accountant_service.accounting.guarantee import Guarantee, Status
from accountant_service.accounting.methods.base import Accountant, Question, relative_width
from accountant_service.accounting.methods.registry import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.errors import (
    AccountingError,
    BoundsContradictError,
    ToleranceNotReachedError,
)
from accountant_service.writing import number_format

CertifiedAnswer = Guarantee | AccountingError  # the proved answer, or why there is none


def epsilon(accountant: Accountant, question: Question, delta: float) -> Guarantee:
    """Return a method's (ε, δ) guarantee at δ, checked against the proved interval."""
    guarantee = accountant.epsilon(question, delta)
    if _is_default_method(accountant):
        return accountant.with_lower_bound(question, guarantee)
    return check_claim(guarantee, certify(question, delta))


def delta(accountant: Accountant, question: Question, epsilon: float) -> Guarantee:
    """Return a method's (ε, δ) guarantee at ε, checked against the proved interval."""
    guarantee = accountant.delta(question, epsilon)
    if _is_default_method(accountant):
        return accountant.with_lower_bound(question, guarantee)
    referee = ACCOUNTANTS[DEFAULT_METHOD]
    return check_claim(
        guarantee,
        _answer_or_error(
            lambda: referee.with_lower_bound(question, referee.delta(question, epsilon))
        ),
    )


def certify(question: Question, delta: float) -> CertifiedAnswer:
    """Compute the guarantee at δ by the default method (`pld`), with a proved interval around ε."""
    referee = ACCOUNTANTS[DEFAULT_METHOD]
    return _answer_or_error(
        lambda: referee.with_lower_bound(question, referee.epsilon(question, delta))
    )


def require_tolerance(guarantee: Guarantee, tolerance: float | None) -> Guarantee:
    """Return the guarantee; raise if its proved interval is wider than the tolerance.

    Args:
        guarantee: a checked guarantee, which has the certified interval if there is one.
        tolerance: the largest relative width allowed; None allows any. The width of an interval of
            ε is relative to at least `bounds.EPSILON_NEGLIGIBLE`.

    Raises:
        ToleranceNotReachedError: the interval is wider, or there is none.
    """
    if tolerance is None:
        return guarantee
    interval = guarantee.certified
    if interval is None:
        raise ToleranceNotReachedError(
            f"there is no proved interval: {guarantee.certified_reason}; ask without a tolerance"
        )
    reached = relative_width(interval, guarantee.solved_for)
    if reached > tolerance:
        lower, upper = (
            number_format.round_down(interval.lower, 9),
            number_format.round_up(interval.upper, 9),
        )
        raise ToleranceNotReachedError(
            f"the proved interval [{lower}, {upper}] has a relative width of {reached:.2g}, more "
            f"than the tolerance {tolerance:g}, and the work limit is reached: ask for a larger "
            "tolerance, or none"
        )
    return guarantee


def check_claim(guarantee: Guarantee, certified: CertifiedAnswer) -> Guarantee:
    """Add the proved interval to a guarantee; mark the guarantee refuted if it lies below.

    Args:
        guarantee: any method's guarantee.
        certified: the certified answer to the same question, or why there is none.
    """
    if isinstance(certified, AccountingError):
        return replace(guarantee, certified=None, certified_reason=certified.detail)
    if certified.certified is None:
        return replace(guarantee, certified=None, certified_reason=certified.certified_reason)
    claim = guarantee.epsilon if guarantee.solved_for == "epsilon" else guarantee.delta
    refuted = claim < certified.certified.lower
    status = Status.REFUTED if refuted else guarantee.status
    return replace(
        guarantee, certified=certified.certified, status=status, warnings=certified.warnings
    )


def _is_default_method(accountant: Accountant) -> bool:
    """Return whether this is the default method, whose answer is the proved interval of ε."""
    return accountant.name == DEFAULT_METHOD


def _answer_or_error(answer: Callable[[], Guarantee]) -> CertifiedAnswer:
    """Call a function; return its guarantee, or the accounting error that it raises."""
    try:
        return answer()
    except BoundsContradictError:
        raise  # then no number of this question can be trusted
    except AccountingError as error:
        return error
