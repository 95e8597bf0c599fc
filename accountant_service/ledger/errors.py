"""Reasons for which the ledger refuses a request, each with a stable code.

LedgerError
├── BudgetExhaustedError       the plan does not fit in the remaining budget
│   └── CapExhaustedError      the plan does not fit under a cap of its key or team
├── DatasetClosedError         the dataset is closed: it takes no further reservation
├── DatasetUsedError           the dataset has entries besides its creation, so it stays
├── DatasetSizeError           the mechanism is for another number of records
├── DatasetsDifferError        the datasets of one run have another relation or privacy unit
├── UnsuitableReferenceError   the mechanism cannot be the reference of a budget
├── ReferenceFixedError        the owner may not choose the reference of this dataset any more
├── ChargeUndecidedError       the time limit ended before a plan's charge was known
├── ChargeOutdatedError        the dataset changed while a charge was computed
├── ReservationClosedError     the reservation has ended
├── ReservationOpenError       the reservation has not ended yet
├── StaleSequenceError         the client's count of granted steps is not the ledger's
├── WeakGuaranteeError         the budget of a new dataset protects hardly anyone
├── NameTakenError             a dataset or a series of this name exists
├── SeriesLabelError           a label of a series has another length than those before it
├── SeriesTooShortError        a series has fewer datasets than a request takes
├── IdempotencyKeyRequiredError, IdempotencyKeyReusedError
├── UnauthenticatedError, ForbiddenError, UnknownSubjectError
├── TooManyRunsError           the key has too many open runs, or too many that spent nothing
├── QuotaExceededError         the key has sent more requests than its quota allows
├── StoredRowError             a row of the database cannot be read: nothing is granted
└── DatabaseAwayError          the database does not answer: nothing is granted
    ├── DatabaseReadOnlyError  the database answers but takes no writes: nothing is granted
    └── DatabaseSchemaError    the database's tables are not those of this server
"""

from __future__ import annotations

from accountant_service.errors import CodedError


class LedgerError(CodedError, code="ledger-error", title="The ledger refuses the request"):
    """The ledger refuses a request."""


class BudgetExhaustedError(
    LedgerError, code="budget-exhausted", title="The budget does not allow it", status=409
):
    """The plan does not fit in the remaining budget.

    Attributes:
        steps: the number of steps of this mechanism that fit.
        noise_multiplier: the least with which the whole plan fits, where it is known.
    """

    def __init__(self, detail: str, steps: int | None) -> None:
        self.steps = steps
        self.noise_multiplier: float | None = None
        super().__init__(detail)

    def explain(self, steps: int | None, noise_multiplier: float | None) -> None:
        """Add to the error how many steps fit, and the least noise with which all of them fit."""
        self.steps, self.noise_multiplier = steps, noise_multiplier
        self.detail = f"{self.detail}; {steps or 0} steps of this mechanism fit"


class CapExhaustedError(
    BudgetExhaustedError,
    code="cap-exhausted",
    title="The cap of a key or team does not allow it",
    status=409,
):
    """The plan does not fit under a cap of the key or of its team."""


class DatasetClosedError(
    LedgerError, code="dataset-closed", title="The dataset is closed", status=409
):
    """The dataset was closed, for good: it takes no further reservation."""


class DatasetUsedError(LedgerError, code="dataset-used", title="The dataset is used", status=409):
    """A dataset that is to be deleted has entries besides its creation."""


class DatasetSizeError(
    LedgerError,
    code="dataset-size-mismatch",
    title="The mechanism is for another number of records",
):
    """The mechanism states a number of records that is not the dataset's."""


class DatasetsDifferError(
    LedgerError, code="datasets-differ", title="The datasets of one run differ"
):
    """The datasets of one run have not the same neighbouring relation and privacy unit."""


class UnsuitableReferenceError(
    LedgerError,
    code="unsuitable-reference",
    title="The mechanism cannot be the reference of a budget",
):
    """This mechanism cannot be the reference mechanism in whose steps a budget is counted."""


class ReferenceFixedError(
    LedgerError, code="reference-fixed", title="The reference cannot be set any more", status=409
):
    """A dataset has no reference that its owner may choose, or steps of another one are taken."""


class ChargeUndecidedError(
    LedgerError, code="exchange-undecided", title="The charge could not be decided in time"
):
    """The time limit ended before the cost of a plan was computed."""


class ChargeOutdatedError(
    LedgerError, code="charge-outdated", title="The dataset changed meanwhile", status=409
):
    """The dataset changed while a plan's cost was computed: compute it again."""


class ReservationClosedError(
    LedgerError, code="reservation-closed", title="The reservation has ended", status=409
):
    """The reservation has ended."""


class ReservationOpenError(
    LedgerError, code="reservation-open", title="The reservation is still open", status=409
):
    """The reservation has not ended yet."""


class StaleSequenceError(
    LedgerError, code="stale-sequence", title="The sequence is stale", status=409
):
    """The client missed a grant, or requests the same grant twice."""


class WeakGuaranteeError(
    LedgerError, code="weak-guarantee", title="The budget protects hardly anyone"
):
    """The budget of a new dataset has ε > 20 or δ ≥ 1/size, and `accept_weak` is not true."""

    mechanism_at = ""  # the pointer is one into the request


class NameTakenError(LedgerError, code="name-taken", title="The name is taken", status=409):
    """A dataset or a series of this name exists, and is another one."""


class SeriesLabelError(LedgerError, code="series-label", title="The label does not fit its series"):
    """The label of a new dataset has another number of characters than those before it."""

    mechanism_at = ""  # the pointer is one into the request


class SeriesTooShortError(
    LedgerError, code="series-too-short", title="The series has fewer datasets", status=409
):
    """A request takes more of the last datasets of a series than there are."""

    mechanism_at = ""


class IdempotencyKeyRequiredError(
    LedgerError,
    code="idempotency-key-required",
    title="An Idempotency-Key is required",
    status=400,
):
    """A write was sent without an Idempotency-Key."""


class IdempotencyKeyReusedError(
    LedgerError,
    code="idempotency-key-reused",
    title="The Idempotency-Key was used for another request",
):
    """The Idempotency-Key was used for another request."""


class UnauthenticatedError(
    LedgerError, code="unauthenticated", title="A valid API key is required", status=401
):
    """The request has no valid API key."""


class ForbiddenError(
    LedgerError, code="forbidden", title="The key does not allow this", status=403
):
    """The API key lacks the scope, is bound to datasets, or the run belongs to another key."""


class UnknownSubjectError(LedgerError, code="not-found", title="There is nothing here", status=404):
    """The dataset, run or key that a request names does not exist or may not be seen."""


class QuotaExceededError(
    LedgerError, code="quota-exceeded", title="The key has used its quota of requests", status=429
):
    """The key has sent more requests than its quota allows; the request had no effect.

    Attributes:
        retry_after: whole seconds until a request is admitted.
    """

    def __init__(self, detail: str, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(detail)


class TooManyRunsError(
    LedgerError, code="too-many-runs", title="The key has too many runs", status=409
):
    """The key has too many open runs of a dataset, or too many that spent nothing lately."""


class StoredRowError(
    LedgerError, code="stored-row-unreadable", title="A stored row cannot be read", status=503
):
    """A row of the database is not as the ledger writes it; no budget was spent."""


class DatabaseAwayError(
    LedgerError, code="database-away", title="The database does not answer", status=503
):
    """The database does not answer; no budget was spent."""


class DatabaseReadOnlyError(
    DatabaseAwayError, code="database-read-only", title="The database takes no writes"
):
    """The database takes no writes; no budget was spent."""


class DatabaseSchemaError(
    DatabaseAwayError, code="database-schema", title="This server must not use the database"
):
    """The database's tables are not those of this server; no budget was spent.

    A newer server upgraded them, the ledger was moved to another database, or an older backup was
    restored.
    """
