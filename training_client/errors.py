"""Everything that can stop a training run, and what to do about it.

    TrainingStoppedError
    ├── ServiceError               the accounting service gave no usable answer: nothing may run
    │   ├── ServiceUnreachableError    no answer, for as long as was waited
    │   ├── ServiceRefusedError        a 4xx problem: the question itself is wrong
    │   └── ServiceConfusedError       an answer that is not in the contract
    ├── BudgetExhaustedError       the next step would pass the privacy budget
    ├── UnsupportedModelError      the model has a part whose gradient cannot be clipped here
    ├── NoGuaranteeError           what was asked for is covered by no theorem
    └── DataError                  the data set is missing or not what it should be
        └── NotFetchedError            it is one that must be fetched by hand

Each carries an `exit_code` for command lines: 3 when the budget refuses, 4 when the service
gives no answer, 2 otherwise.
"""

from __future__ import annotations

from typing import ClassVar


class TrainingStoppedError(Exception):
    """Training stopped, or never began; the message says why and what to do."""

    exit_code: ClassVar[int] = 2


class ServiceError(TrainingStoppedError):
    """The accounting service gave no usable answer. Without an answer there is no training."""

    exit_code = 4


class ServiceUnreachableError(ServiceError):
    """No answer, for as long as was waited."""


class ServiceRefusedError(ServiceError):
    """The service refused the question.

    Attributes:
        code: the problem's stable code, as in the service's docs/errors.md.
        pointers: the JSON pointers it complained about.
    """

    exit_code = 2

    def __init__(self, code: str, detail: str, pointers: tuple[str, ...] = ()) -> None:
        super().__init__(code, detail, pointers)  # as they came, so that ranks can exchange it
        self.code = code
        self.pointers = pointers

    def __str__(self) -> str:
        code, detail, _ = self.args
        way_out = ""
        if code == "unauthenticated":
            way_out = (
                ". Give one that it knows by --api-key or ACCOUNTANT_API_KEY; "
                "`accountant keys create` makes one"
            )
        return f"the accounting service refused ({code}): {detail}{way_out}"


class ServiceConfusedError(ServiceError):
    """The answer is not what the contract promises: is this the right service and version?"""


class BudgetExhaustedError(TrainingStoppedError):
    """The next step would pass the privacy budget."""

    exit_code = 3


class UnsupportedModelError(TrainingStoppedError):
    """The model has a part whose per-example gradients cannot be clipped here."""


class DataError(TrainingStoppedError):
    """The data set is missing or not what it should be."""


class NotFetchedError(DataError):
    """The data set is one that must be fetched by hand; the message says how."""


class NoGuaranteeError(TrainingStoppedError):
    """What was asked for is covered by no theorem, and that was not asked for."""
