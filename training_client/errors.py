"""The exceptions that stop a training run.

    TrainingStoppedError
    ├── ServiceError               the accounting service gave no usable answer: no step may be made
    │   ├── ServiceUnreachableError    the service did not answer in time
    │   ├── ServiceRefusedError        the service rejected the request (4xx)
    │   └── ServiceConfusedError       the answer breaks the API's contract
    ├── BudgetExhaustedError       the next step would exceed the privacy budget
    ├── UnsupportedModelError      the gradients of a layer cannot be clipped per example
    ├── ProcessLostError           another process of the same run ended or did not answer in time
    ├── NoGuaranteeError           no proven guarantee covers the request
    └── DataError                  the dataset or another input is missing or invalid
        └── NotFetchedError            the dataset must be downloaded by hand

Each message says what to do. On the command line `exit_code` becomes the exit status: 3 when the
budget is exhausted, 4 when the service gives no usable answer, 2 otherwise.
"""

from __future__ import annotations

from typing import ClassVar, Final

_HINTS: Final = {
    "unauthenticated": (
        ". Pass a valid key with --api-key or ACCOUNTANT_API_KEY; create one with "
        "`accountant keys create`"
    ),
}


class TrainingStoppedError(Exception):
    """Base class of errors that stop training, or prevent it."""

    exit_code: ClassVar[int] = 2


class ServiceError(TrainingStoppedError):
    """The accounting service gave no usable answer, so training must not go on."""

    exit_code = 4


class ServiceUnreachableError(ServiceError):
    """The accounting service did not answer in time."""


class ServiceRefusedError(ServiceError):
    """The accounting service rejected the request.

    Attributes:
        code: the error code, as listed in docs/errors.md.
        pointers: JSON pointers to the invalid fields of the request.
    """

    exit_code = 2

    def __init__(self, code: str, detail: str, pointers: tuple[str, ...] = ()) -> None:
        super().__init__(code, detail, pointers)  # unchanged, so that pickling between ranks works
        self.code = code
        self.pointers = pointers

    def __str__(self) -> str:
        code, detail, _ = self.args
        return f"the accounting service refused ({code}): {detail}{_HINTS.get(code, '')}"


class ServiceConfusedError(ServiceError):
    """The service's answer does not follow its API; its URL or version may be wrong."""


class BudgetExhaustedError(TrainingStoppedError):
    """The next step would exceed the privacy budget."""

    exit_code = 3


class UnsupportedModelError(TrainingStoppedError):
    """The gradients of one of the model's layers cannot be clipped per example."""


class UnusualUseError(UnsupportedModelError):
    """The layers of a model do not show its gradients; the model as a whole may."""


class DataError(TrainingStoppedError):
    """The dataset or another input is missing or invalid."""


class NotFetchedError(DataError):
    """The dataset must be downloaded by hand; the message gives the source."""


class ProcessLostError(TrainingStoppedError):
    """Another process of the same run ended, failed or did not answer in time."""


class NoGuaranteeError(TrainingStoppedError):
    """No proven guarantee covers what was requested."""
