"""Every way a well-formed question can have no answer, each with a stable code.

AccountingError
├── MethodNotApplicableError   the method has no formula for a part of the mechanism
├── NoFiniteEpsilonError       no finite ε (or no positive δ) exists or can be represented
├── TooExpensiveError          the work would exceed what one question may cost
├── ToleranceNotReachedError   the proved interval is wider than was asked
└── UnreachableTargetError     no allowed parameter reaches the target
"""

from __future__ import annotations

from typing import ClassVar


class AccountingError(Exception):
    """A question without an answer.

    Attributes:
        code: stable, kebab-case; one heading each in docs/errors.md.
        title: the code in words.
        detail: what happened and the way out.
        pointer: JSON pointer into the mechanism, where one part is to blame.
    """

    code: ClassVar[str] = "accounting-error"
    title: ClassVar[str] = "The question has no answer"

    def __init__(self, detail: str, pointer: str | None = None) -> None:
        self.detail = detail
        self.pointer = pointer
        super().__init__(detail)


class MethodNotApplicableError(AccountingError):
    """The method has no formula for this mechanism."""

    code = "method-not-applicable"
    title = "The method has no formula for this mechanism"


class NoFiniteEpsilonError(AccountingError):
    """No finite ε holds at this δ."""

    code = "no-finite-epsilon"
    title = "No finite ε holds"


class TooExpensiveError(AccountingError):
    """More work than one question may cost."""

    code = "too-expensive"
    title = "The question needs too much work"


class ToleranceNotReachedError(AccountingError):
    """The proved interval is wider than was asked, and the work limit is spent."""

    code = "tolerance-not-reached"
    title = "The tolerance was not reached"


class UnreachableTargetError(AccountingError):
    """No allowed value reaches the target."""

    code = "unreachable-target"
    title = "No allowed value reaches the target"
