"""The referee: a claim beside the proved interval.

A claim below a proved lower bound is false, whoever printed it. Any method can be refuted; one
whose hypotheses were checked never should be, and the tests hold that it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accountant_service.accountants.base import Accountant, Question
from accountant_service.accountants.registry import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.errors import AccountingError
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
    return replace(guarantee, certified=certified.certified, status=status)


def _referees_itself(accountant: Accountant) -> bool:
    return accountant.name == DEFAULT_METHOD


def _answer_or_error(ask: Callable[[], Guarantee]) -> Certified:
    try:
        return ask()
    except AccountingError as error:
        return error
