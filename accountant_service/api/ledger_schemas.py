"""The ledger's bodies, field by field; names are the wire contract."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from accountant_service.api.schemas import (
    AffordableView,
    DeltaField,
    MechanismField,
    ProblemView,
)
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger.keys import Scope

LEASE_SECONDS: Final = 3600.0
_LEASE_MAX: Final = 30 * 86400.0
_STEPS_MAX: Final = 10**12


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


LeaseField = Annotated[
    float, Field(ge=1, le=_LEASE_MAX, description="after which what was not granted is free again")
]
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_TEXT: Final = r"^[^\x00]*$"  # PostgreSQL keeps no NUL
NameField = Annotated[str, Field(min_length=1, max_length=200, pattern=NAME_PATTERN)]


class BudgetBody(_Body):
    """(ε, δ) that a dataset may give out, for good."""

    epsilon: Annotated[float, Field(gt=0, le=1000)]
    delta: DeltaField


class DatasetRequest(_Body):
    """A dataset and what it may give out."""

    name: NameField
    size: Annotated[int, Field(ge=1, le=10**15)]
    budget: BudgetBody
    neighbouring_relation: Annotated[NeighbouringRelation, Field(strict=False)] = (
        NeighbouringRelation.ADD_OR_REMOVE_ONE
    )
    privacy_unit: Annotated[str, Field(min_length=1, max_length=1000, pattern=_TEXT)] = "record"
    planned_mechanism: Annotated[
        MechanismField | None,
        Field(description="what the dataset is meant for: the filter's order is chosen for it"),
    ] = None


class QuoteRequest(_Body):
    """Would this plan fit?"""

    mechanism: MechanismField


class QuotesRequest(_Body):
    """Would these plans fit?"""

    mechanisms: Annotated[list[MechanismField], Field(min_length=1, max_length=100)]


class ReservationRequest(_Body):
    """Hold budget for this plan."""

    mechanism: MechanismField
    lease_seconds: LeaseField = LEASE_SECONDS
    purpose: Annotated[str, Field(max_length=1000, pattern=_TEXT)] = ""


class GrantRequest(_Body):
    """Charge the next steps, before their noise is drawn."""

    steps: Annotated[int, Field(ge=1, le=_STEPS_MAX)]
    sequence: Annotated[
        int, Field(ge=0, le=_STEPS_MAX, description="steps granted so far, as the client knows")
    ]


class RenewRequest(_Body):
    """Extend the lease, from now on."""

    lease_seconds: LeaseField = LEASE_SECONDS


class NothingRequest(_Body):
    """An empty object."""


class KeyRequest(_Body):
    """A new API key."""

    scopes: Annotated[list[Annotated[Scope, Field(strict=False)]], Field(min_length=1)]
    name: Annotated[str, Field(max_length=200, pattern=_TEXT)] = ""
    datasets: list[NameField] | None = None
    expires_in_seconds: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None


class AmountView(BaseModel):
    """A part of the budget."""

    epsilon: float
    micronats: int


class BudgetView(BaseModel):
    """The budget."""

    epsilon: float
    delta: float


class AccountingView(BaseModel):
    """The frozen policy."""

    filter: Literal["renyi"]
    order: float
    budget_micronats: int
    scope: Literal["filter_budget"]


class DatasetView(BaseModel):
    """A dataset."""

    name: str
    size: int
    privacy_unit: str
    neighbouring_relation: NeighbouringRelation
    budget: BudgetView
    spent: AmountView
    held: AmountView
    remaining: AmountView
    accounting: AccountingView
    version: int


class DatasetsView(BaseModel):
    """The datasets a key may see."""

    items: list[DatasetView]


class QuoteView(BaseModel):
    """Whether a plan fits."""

    fits: bool
    affordable: AffordableView
    epsilon_after: float = Field(description="of the filter, were the plan charged in full")
    guarantee: dict[str, Any] | None = Field(
        description="of this plan alone, scope fixed_plan; null if it has no finite ε"
    )


class ProblemItemView(BaseModel):
    """A plan that cannot be charged."""

    problem: ProblemView


class TogetherView(BaseModel):
    """All plans, one after the other."""

    fits: bool
    epsilon_after: float | None = Field(description="null if one of them cannot be charged")


class QuotesView(BaseModel):
    """A quote of each plan by itself, and of all of them."""

    items: list[QuoteView | ProblemItemView]
    together: TogetherView


class ReservationView(BaseModel):
    """A reservation."""

    id: str
    dataset: str
    state: Literal["open", "committed", "released", "expired"]
    mechanism: dict[str, Any]
    mechanism_hash: str
    steps_reserved: int
    steps_granted: int
    expires_at: float = Field(description="seconds since 1970")
    purpose: str
    neighbouring_relation: NeighbouringRelation


class EntriesView(BaseModel):
    """A page of the record."""

    items: list[dict[str, Any]]
    next_cursor: str | None


class KeyView(BaseModel):
    """A key, without what only its owner knows."""

    id: str
    name: str
    scopes: list[str]
    datasets: list[str] | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class NewKeyView(KeyView):
    """A new key, shown this once."""

    key: str


class KeysView(BaseModel):
    """All keys."""

    items: list[KeyView]


_RUN: Final = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000}
_BUDGET: Final = {"epsilon": 3.0, "delta": 1e-05}
_AFFORDABLE: Final = {"steps": 2730, "noise_multiplier": 0.861}
_ACCOUNTING: Final = {
    "filter": "renyi",
    "order": 5.54,
    "budget_micronats": 1041228,
    "scope": "filter_budget",
}
_DATASET: Final = {
    "name": "patients",
    "size": 60000,
    "privacy_unit": "record",
    "neighbouring_relation": "add_or_remove_one",
    "budget": _BUDGET,
    "spent": {"epsilon": 2.01, "micronats": 51250},
    "held": {"epsilon": 0.05, "micronats": 50000},
    "remaining": {"epsilon": 0.94, "micronats": 939978},
    "accounting": _ACCOUNTING,
    "version": 4,
}
_RESERVATION: Final = {
    "id": "2971f435474842618b5ac0cd7158106f",
    "dataset": "patients",
    "state": "open",
    "mechanism": _RUN,
    "mechanism_hash": "sha256:404040cf70b9ac59bb6ce69ab25e4321ce121f7c8698dbf82ddfb0e958ab6b3b",
    "steps_reserved": 1000,
    "steps_granted": 50,
    "expires_at": 1795278815.9,
    "purpose": "a first model",
    "neighbouring_relation": "add_or_remove_one",
}
_KEY: Final = {
    "id": "1c3aee0336e2d586",
    "name": "team",
    "scopes": ["run"],
    "datasets": ["patients"],
    "created_at": 1795278797.7,
    "expires_at": None,
    "revoked_at": None,
    "last_used_at": None,
}
_QUOTE: Final = {
    "fits": True,
    "affordable": _AFFORDABLE,
    "epsilon_after": 2.47,
    "guarantee": {"epsilon": 1.65, "delta": 1e-05, "scope": "fixed_plan"},
}
_PROBLEM: Final = {
    "type": "urn:privacy-accountant:problem:too-expensive",
    "title": "The question needs too much work",
    "status": 422,
    "detail": "compose fewer different releases",
    "code": "too-expensive",
}
_TOGETHER: Final = {"fits": True, "epsilon_after": 2.61}
EXAMPLES: Final[dict[str, Any]] = {
    "BudgetBody": _BUDGET,
    "BudgetView": _BUDGET,
    "DatasetRequest": {"name": "patients", "size": 60000, "budget": _BUDGET},
    "QuoteRequest": {"mechanism": _RUN},
    "ReservationRequest": {"mechanism": _RUN, "purpose": "a first model"},
    "GrantRequest": {"steps": 50, "sequence": 0},
    "RenewRequest": {"lease_seconds": 3600},
    "NothingRequest": {},
    "KeyRequest": {"scopes": ["run"], "name": "team", "datasets": ["patients"]},
    "AffordableView": _AFFORDABLE,
    "AmountView": {"epsilon": 2.01, "micronats": 51250},
    "AccountingView": _ACCOUNTING,
    "DatasetView": _DATASET,
    "DatasetsView": {"items": [_DATASET]},
    "QuoteView": _QUOTE,
    "QuotesRequest": {"mechanisms": [_RUN]},
    "ProblemItemView": {"problem": _PROBLEM},
    "QuotesView": {"items": [_QUOTE], "together": _TOGETHER},
    "TogetherView": _TOGETHER,
    "ReservationView": _RESERVATION,
    "EntriesView": {
        "items": [{"number": 1, "kind": "create", "hash": "5d41402abc4b2a76b9719d911017c592"}],
        "next_cursor": None,
    },
    "KeyView": _KEY,
    "NewKeyView": _KEY | {"key": "pa_1c3aee0336e2d586_…"},
    "KeysView": {"items": [_KEY]},
    "Scope": "run",
}
