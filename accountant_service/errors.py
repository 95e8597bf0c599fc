"""Failures that are answered with a stable code, and those of a calculation.

CodedError                     any failure with a stable code and an HTTP status
├── AccountingError            the question has no answer
│   ├── MethodNotApplicableError   the method has no formula for a part of the mechanism
│   ├── NoFiniteEpsilonError       no finite ε (or no positive δ) exists or can be represented
│   ├── TooExpensiveError          the work would exceed what one question may cost
│   ├── ToleranceNotReachedError   the proved interval is wider than requested
│   ├── UnreachableTargetError     no allowed parameter reaches the target
│   └── BoundsContradictError      two proved bounds contradict each other
├── FormatUnavailableError     a report cannot be written in a format on this machine
└── LedgerError                the ledger refuses a request: see `accountant_service.ledger.errors`

InvalidArgumentError           an argument of a function of the package, not of a request
"""

from __future__ import annotations

from typing import Any, ClassVar


class CodedError(Exception):
    """Base class of errors that the API reports with a stable code.

    A subclass gives its code, title and status as class arguments; a missing one is inherited.

    Attributes:
        code: stable, kebab-case; each code has a heading in docs/errors.md.
        title: the code in words.
        status: the HTTP status of the answer.
        detail: what happened, and what to do.
        pointer: JSON pointer into the mechanism, where one part of it is the cause.
        mechanism_at: JSON pointer of the mechanism in the request.
    """

    code: ClassVar[str]
    title: ClassVar[str]
    status: ClassVar[int] = 422
    mechanism_at: str = "/mechanism"

    def __init_subclass__(
        cls, code: str | None = None, title: str | None = None, status: int | None = None
    ) -> None:
        """Set the code, the title and the HTTP status of an error class."""
        cls.code = cls.code if code is None else code
        cls.title = cls.title if title is None else title
        cls.status = cls.status if status is None else status

    def __init__(self, detail: str, pointer: str | None = None) -> None:
        self.detail = detail
        self.pointer = pointer
        super().__init__(detail)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling `__init__`: a subclass may take other arguments."""
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[CodedError], args: tuple[Any, ...]) -> CodedError:
    """Recreate an error from its pickle, without calling its `__init__`."""
    return kind.__new__(kind, *args)


class FormatUnavailableError(
    CodedError, code="format-unavailable", title="The report cannot be written in this format"
):
    """A library that writes a format of reports is not installed."""


class AccountingError(CodedError, code="accounting-error", title="The question has no answer"):
    """Base class of errors in which a privacy cost cannot be computed."""


class MethodNotApplicableError(
    AccountingError,
    code="method-not-applicable",
    title="The method has no formula for this mechanism",
):
    """The accounting method has no formula for a part of the mechanism."""


class NoFiniteEpsilonError(
    AccountingError, code="no-finite-epsilon", title="No finite ε is proved"
):
    """No finite ε holds at this δ, or the method proves none; the detail says which."""


class TooExpensiveError(
    AccountingError, code="too-expensive", title="The question needs too much work"
):
    """The computation would exceed the limit of work for one request."""


class ToleranceNotReachedError(
    AccountingError, code="tolerance-not-reached", title="The tolerance was not reached"
):
    """The proved interval is wider than requested, and the work limit is reached."""


class UnreachableTargetError(
    AccountingError, code="unreachable-target", title="No allowed value reaches the target"
):
    """No allowed value of the parameter that is solved for meets the privacy target."""


class BoundsContradictError(
    AccountingError, code="bounds-contradict", title="Two proved bounds contradict each other"
):
    """Two proved bounds of one number contradict each other: a defect of this service."""


class InvalidArgumentError(ValueError):
    """An argument of one of the package's functions is missing, unknown or out of range.

    Attributes:
        faults: pairs of an argument's name and what is wrong with it.
    """

    def __init__(self, *faults: tuple[str, str]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{name} {message}".lstrip() for name, message in faults))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the faults, from which the message is built."""
        return type(self), self.faults
