"""The referee: a claim beside the proved interval.

A claim below a proved lower bound is false, whoever printed it. Any method can be refuted; one
whose hypotheses were checked never should be, and the tests hold that it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accountant_service import digits
from accountant_service.accountants.base import Accountant, Question, relative_width
from accountant_service.accountants.registry import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.errors import (
    AccountingError,
    BoundsContradictError,
    ToleranceNotReachedError,
)
from accountant_service.guarantee import Guarantee, Status

Certified = Guarantee | AccountingError  # the proved answer to a question, or why there is none


def epsilon(accountant: Accountant, question: Question, delta: float) -> Guarantee:
    """The accountant's guarantee at δ, judged."""
    guarantee = accountant.epsilon(question, delta)
    return guarantee if _referees_itself(accountant) else judge(guarantee, certify(question, delta))


def delta(accountant: Accountant, question: Question, epsilon: float) -> Guarantee:
    """The accountant's guarantee at ε, judged."""
    guarantee = accountant.delta(question, epsilon)
    if _referees_itself(accountant):
        return guarantee
    referee = ACCOUNTANTS[DEFAULT_METHOD]
    return judge(guarantee, _answer_or_error(lambda: referee.delta(question, epsilon)))


def certify(question: Question, delta: float) -> Certified:
    """The certified guarantee at δ, or why there is none."""
    referee = ACCOUNTANTS[DEFAULT_METHOD]
    return _answer_or_error(lambda: referee.epsilon(question, delta))


def require(guarantee: Guarantee, tolerance: float | None) -> Guarantee:
    """The guarantee, if its interval is as narrow as was asked.

    Args:
        guarantee: judged, so that it carries the certified interval if there is one.
        tolerance: the relative width asked for, if any; for ε relative to at least
            `two_sided.EPSILON_NEGLIGIBLE`.

    Raises:
        ToleranceNotReachedError: it is wider, or there is none.
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
        lower, upper = digits.down(interval.lower, 9), digits.up(interval.upper, 9)
        raise ToleranceNotReachedError(
            f"the proved interval [{lower}, {upper}] has a relative "
            f"width of {reached:.2g}, and {tolerance:g} was asked for: that is as far as the work "
            "limit goes; ask for a larger tolerance, or none"
        )
    return guarantee


def judge(guarantee: Guarantee, certified: Certified) -> Guarantee:
    """The guarantee with the proved interval beside it, and refuted if it lies below.

    Args:
        guarantee: any method's claim.
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


def _referees_itself(accountant: Accountant) -> bool:
    return accountant.name == DEFAULT_METHOD


def _answer_or_error(ask: Callable[[], Guarantee]) -> Certified:
    try:
        return ask()
    except BoundsContradictError:
        raise  # no other number of this question is to be trusted either
    except AccountingError as error:
        return error
