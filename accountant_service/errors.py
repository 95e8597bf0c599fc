"""Every way a well-formed question can have no answer, each with a stable code.

AccountingError
├── MethodNotApplicableError   the method has no formula for a part of the mechanism
├── NoFiniteEpsilonError       no finite ε (or no positive δ) exists or can be represented
├── TooExpensiveError          the work would exceed what one question may cost
├── ToleranceNotReachedError   the proved interval is wider than was asked
├── UnreachableTargetError     no allowed parameter reaches the target
├── BoundsContradictError      two proved bounds contradict each other
└── LedgerError                the ledger says no
    ├── BudgetExhaustedError       the plan does not fit in what is left
    ├── DatasetSizeError           the mechanism is for another number of records
    ├── ReservationClosedError     the reservation has ended
    ├── ReservationOpenError       or has not
    ├── StaleSequenceError         the client has missed a grant
    ├── NameTakenError             a dataset of this name exists
    ├── IdempotencyKeyRequiredError, IdempotencyKeyReusedError
    ├── UnauthenticatedError, ForbiddenError, UnknownSubjectError
    └── DatabaseAwayError          the database does not answer: no grant
        └── DatabaseReadOnlyError      it answers, but takes no writes: no grant either
"""

from __future__ import annotations

from typing import Any, ClassVar


class AccountingError(Exception):
    """A question without an answer.

    Attributes:
        code: stable, kebab-case; one heading each in docs/errors.md.
        title: the code in words.
        status: the HTTP status it is answered with.
        detail: what happened and the way out.
        pointer: JSON pointer into the mechanism, where one part is to blame.
        mechanism_at: JSON pointer of the mechanism in the request.
    """

    code: ClassVar[str] = "accounting-error"
    title: ClassVar[str] = "The question has no answer"
    status: ClassVar[int] = 422
    mechanism_at: str = "/mechanism"

    def __init__(self, detail: str, pointer: str | None = None) -> None:
        self.detail = detail
        self.pointer = pointer
        super().__init__(detail)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as it stands: a subclass may take other arguments than the detail."""
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[AccountingError], args: tuple[Any, ...]) -> AccountingError:
    return kind.__new__(kind, *args)


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


class BoundsContradictError(AccountingError):
    """Two proved bounds of one number contradict each other: a defect of this service."""

    code = "bounds-contradict"
    title = "Two proved bounds contradict each other"


class LedgerError(AccountingError):
    """The ledger says no."""

    code = "ledger-error"
    title = "The ledger says no"


class BudgetExhaustedError(LedgerError):
    """The plan does not fit in what is left.

    Attributes:
        steps: how many steps of this mechanism would.
        affordable: those, and the noise with which the plan would fit, where that is known.
    """

    code = "budget-exhausted"
    title = "The budget does not allow it"
    status = 409

    def __init__(self, detail: str, steps: int) -> None:
        self.steps = steps
        self.affordable: dict[str, Any] = {"steps": steps, "noise_multiplier": None}
        super().__init__(detail)


class DatasetSizeError(LedgerError):
    """The mechanism is for another number of records than the dataset has."""

    code = "dataset-size-mismatch"
    title = "The mechanism is for another number of records"


class ReservationClosedError(LedgerError):
    """The reservation has ended."""

    code = "reservation-closed"
    title = "The reservation has ended"
    status = 409


class ReservationOpenError(LedgerError):
    """The reservation has not ended yet."""

    code = "reservation-open"
    title = "The reservation is still open"
    status = 409


class StaleSequenceError(LedgerError):
    """The client does not know of a grant, or asks for one twice."""

    code = "stale-sequence"
    title = "The sequence is stale"
    status = 409


class NameTakenError(LedgerError):
    """A dataset of this name exists."""

    code = "name-taken"
    title = "The name is taken"
    status = 409


class IdempotencyKeyRequiredError(LedgerError):
    """A write came without an Idempotency-Key."""

    code = "idempotency-key-required"
    title = "An Idempotency-Key is required"
    status = 400


class IdempotencyKeyReusedError(LedgerError):
    """An Idempotency-Key came back with another request."""

    code = "idempotency-key-reused"
    title = "The Idempotency-Key was used for another request"


class UnauthenticatedError(LedgerError):
    """No key, or none that is valid."""

    code = "unauthenticated"
    title = "A valid API key is required"
    status = 401


class ForbiddenError(LedgerError):
    """The key lacks the scope."""

    code = "forbidden"
    title = "The key does not allow this"
    status = 403


class UnknownSubjectError(LedgerError):
    """There is no such thing, for this key."""

    code = "not-found"
    title = "There is nothing here"
    status = 404


class DatabaseAwayError(LedgerError):
    """The database does not answer; nothing was charged."""

    code = "database-away"
    title = "The database does not answer"
    status = 503


class DatabaseReadOnlyError(DatabaseAwayError):
    """The database takes no writes; nothing was charged."""

    code = "database-read-only"
    title = "The database takes no writes"
