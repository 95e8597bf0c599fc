"""Request and answer models of the ledger API. Field names are the wire contract."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.filter_names import DEFAULT_FILTER, FILTERS, FilterName
from accountant_service.ledger.quotas import REQUESTS_PER_MINUTE_MAX
from accountant_service.ledger.rules import SHA256_PATTERN, Declaration, NewDataset
from accountant_service.ledger.series import Template
from accountant_service.mechanisms import MechanismError
from accountant_service.questions.models import (
    AffordableView,
    DeltaField,
    MechanismField,
    ProblemView,
)

LEASE_SECONDS: Final = 3600.0
_LEASE_SECONDS_MAX: Final = 30 * 86400.0
_STEPS_MAX: Final = 10**12


class _Body(BaseModel):
    """Base of request bodies: strict types, no unknown fields, finite numbers only."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


LeaseField = Annotated[
    float,
    Field(
        ge=1,
        le=_LEASE_SECONDS_MAX,
        description="seconds until steps that were not granted return to the budget",
    ),
]
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_TEXT: Final = r"^[^\x00]*$"  # PostgreSQL stores no NUL characters
NAME_LENGTH_MAX: Final = 200
SERIES_NAME_LENGTH_MAX: Final = 100
LABEL_LENGTH_MAX: Final = 99  # so that the series' name, a dash and the label are a dataset's name
_UNIT: Final = (
    "what one record stands for. The budget and all amounts hold for one record, even if runs are "
    "described for several records of a person (`user_level`)"
)
NameField = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH_MAX, pattern=NAME_PATTERN)]


class BudgetBody(_Body):
    """The privacy budget (ε, δ) of a dataset. It cannot be changed."""

    epsilon: Annotated[float, Field(gt=0, le=1000)]
    delta: DeltaField


class _TemplateBody(_Body):
    """The budget of a new dataset, or of all datasets of a series, and how it is counted."""

    budget: Annotated[BudgetBody, Field(description="ε and δ for all runs that ever use it")]
    neighbouring_relation: Annotated[
        NeighbouringRelation,
        Field(strict=False, description="in what two datasets differ that must look alike"),
    ] = NeighbouringRelation.ADD_OR_REMOVE_ONE
    privacy_unit: Annotated[
        str, Field(min_length=1, max_length=1000, pattern=_TEXT, description=_UNIT)
    ] = "record"
    planned_mechanism: Annotated[
        MechanismField | None,
        Field(
            description="mechanism you plan to run: with the filter `reference` its step becomes "
            "the unit of the budget; with `renyi` the order is chosen for it"
        ),
    ] = None
    filter: Annotated[
        FilterName,
        Field(
            description="how releases are charged: "
            + "; ".join(f"`{name}`: {words}" for name, words in FILTERS.items())
        ),
    ] = DEFAULT_FILTER
    accept_weak: Annotated[
        bool,
        Field(
            description="must be true for ε above 20, or δ not below one over `size`: such a "
            "budget protects hardly anyone"
        ),
    ] = False

    @model_validator(mode="after")
    def _check_filter(self) -> Self:
        """Check that the filter can count a budget with δ = 0."""
        parts = {"renyi": 1, "either": 2}.get(self.filter)  # into which δ is divided
        if parts is not None and self.budget.delta / parts == 0:
            message = "must be reference: a Rényi divergence bounds no ε at δ = 0"
            raise MechanismError(("/filter", message))
        return self

    def _shared_fields(self) -> dict[str, Any]:
        """Return the fields that a new dataset and a template of datasets have in common."""
        return {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "relation": self.neighbouring_relation,
            "privacy_unit": self.privacy_unit,
            "planned_mechanism": self.planned_mechanism,
            "filter": self.filter,
            "accept_weak": self.accept_weak,
        }


SizeField = Annotated[int, Field(ge=1, le=10**15, description="number of records")]


class DatasetRequest(_TemplateBody):
    """A new dataset with its privacy budget."""

    name: Annotated[NameField, Field(description="name of the dataset, which must be new")]
    size: SizeField

    def to_new_dataset(self) -> NewDataset:
        """Return the dataset that this request asks to create.

        Raises:
            WeakGuaranteeError: the budget protects hardly anyone, and that was not accepted.
        """
        return NewDataset(self.name, self.size, **self._shared_fields())


class SeriesRequest(_TemplateBody):
    """The template of a series: what all of its datasets have in common. It cannot be changed."""

    @model_validator(mode="after")
    def _check_plan(self) -> Self:
        """Check that the planned mechanism does not state a number of records.

        The datasets of a series differ in it.
        """
        plan = self.planned_mechanism
        for each in () if plan is None else mechanisms.find_dataset_size_mismatches(0, plan):
            message = "must not be stated: the datasets of a series differ in their size"
            raise MechanismError((f"/planned_mechanism{each.pointer}", message))
        return self

    def to_template(self) -> Template:
        """Return the template that this request describes.

        Raises:
            WeakGuaranteeError: ε protects hardly anyone, and that was not accepted.
        """
        return Template(**self._shared_fields())


class SeriesAddress(_Body):
    """The names in the address of a series and of one of its datasets."""

    name: Annotated[
        str, Field(min_length=1, max_length=SERIES_NAME_LENGTH_MAX, pattern=NAME_PATTERN)
    ]
    label: Annotated[
        str | None, Field(min_length=1, max_length=LABEL_LENGTH_MAX, pattern=NAME_PATTERN)
    ] = None


class SeriesDatasetRequest(_Body):
    """The next dataset of a series; everything else is in the series' template."""

    size: SizeField


class QuoteRequest(_Body):
    """A plan to quote."""

    mechanism: MechanismField


class ReferenceRequest(_Body):
    """A mechanism whose step is to be the reference of a dataset."""

    mechanism: MechanismField


class QuotesRequest(_Body):
    """Several plans to quote."""

    mechanisms: Annotated[
        list[MechanismField],
        Field(min_length=1, max_length=100, description="plans, each of which is quoted alone"),
    ]


class ReservationRequest(_Body):
    """A plan to reserve budget for."""

    mechanism: MechanismField
    lease_seconds: LeaseField = LEASE_SECONDS
    purpose: Annotated[
        str, Field(max_length=1000, pattern=_TEXT, description="what the run is for, in your words")
    ] = ""


DATASETS_MAX: Final = 36  # of one run: each is locked while the others are charged


class _JointBody(_Body):
    """Base of requests about one run on several datasets."""

    datasets: Annotated[
        list[NameField],
        Field(
            min_length=1,
            max_length=DATASETS_MAX,
            description="names; each is charged the whole plan, or none is. The mechanism's "
            "`dataset_size`, if it has one, is the number of records of all of them",
        ),
    ]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Check that no dataset is named twice."""
        for at, name in enumerate(self.datasets):
            if name in self.datasets[:at]:
                raise MechanismError((f"/datasets/{at}", f"{name!r} is named twice"))
        return self


class JointReservationRequest(ReservationRequest, _JointBody):
    """A plan to reserve budget for on several datasets, which is one run on all their records."""


class JointQuoteRequest(_JointBody):
    """A plan to quote on several datasets, which would be one run on all their records."""

    mechanism: MechanismField


class WindowBody(_Body):
    """The last datasets of a series."""

    last: Annotated[int, Field(ge=1, le=DATASETS_MAX, description="how many datasets")]


class WindowQuoteRequest(WindowBody):
    """A plan to quote on the last datasets of a series."""

    mechanism: MechanismField


class GrantRequest(_Body):
    """Steps to charge before their noise is drawn."""

    steps: Annotated[
        int, Field(ge=1, le=_STEPS_MAX, description="number of further steps to charge now")
    ]
    sequence: Annotated[
        int,
        Field(
            ge=0,
            le=_STEPS_MAX,
            description="number of steps granted so far, as known to the client",
        ),
    ]


class RenewRequest(_Body):
    """A new lease, starting now."""

    lease_seconds: LeaseField = LEASE_SECONDS


class CommitRequest(_Body):
    """The end of a finished run, with facts that its program may state for the certificate."""

    clip_norm: Annotated[
        float | None,
        Field(gt=0, description="bound on what one record contributes to a step; not checked"),
    ] = None
    model_sha256: Annotated[
        str | None,
        Field(
            pattern=f"^{SHA256_PATTERN}$",
            description="hash of the trained model's file, in lower-case hexadecimal; not checked",
        ),
    ] = None

    def to_declaration(self) -> Declaration:
        """Return the facts that the training program states about its run."""
        return Declaration(self.clip_norm, self.model_sha256)


class NothingRequest(_Body):
    """An empty object."""


class EventView(BaseModel):
    """An audit event: who did what to which subject."""

    id: str
    at: int = Field(description="microseconds since 1970")
    key: str = Field(description="identifier of the API key, or `command-line`")
    action: str
    subject: str
    detail: str


class EventsView(BaseModel):
    """A page of audit events."""

    items: list[EventView]
    next_cursor: str | None


QuotaField = Annotated[
    Annotated[int, Field(ge=1, le=REQUESTS_PER_MINUTE_MAX)] | None,
    Field(
        description="quota of the key over all servers of the database: so many requests at once, "
        "and then at an even rate; null for no quota"
    ),
]


class KeyRequest(_Body):
    """A new API key."""

    scopes: Annotated[
        list[Annotated[Scope, Field(strict=False)]],
        Field(min_length=1, description="what the key may do"),
    ]
    name: Annotated[
        str, Field(max_length=200, pattern=_TEXT, description="who or what uses the key")
    ] = ""
    datasets: Annotated[
        list[NameField] | None, Field(description="names of the only datasets it is for")
    ] = None
    team: Annotated[
        NameField | None,
        Field(description="team whose runs and caps the key shares; it cannot be changed"),
    ] = None
    expires_in_seconds: Annotated[
        Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None,
        Field(description="seconds until the key expires; without it, it never does"),
    ] = None
    requests_per_minute: QuotaField = None


class KeyChange(_Body):
    """The new quota of an API key."""

    requests_per_minute: Annotated[QuotaField, Field()]


class CapRequest(_Body):
    """A limit on what a key or team may take of the budget."""

    share: Annotated[float, Field(ge=0, le=1, description="share of the budget, from 0 to 1")]


class FilterAmountView(BaseModel):
    """A part of the budget, in the units of a filter."""

    micronats: int | list[int] | None = Field(
        None, description="Rényi divergence in millionths of a nat; a list for several orders"
    )
    reference_steps: int | None = Field(None, description="steps of the reference mechanism")
    slack: float | None = Field(None, description="share of the slack for exchanges")
    added_epsilon: str | None = Field(None, description="ε of releases that are added up: exact")
    added_delta: str | None = Field(None, description="δ of releases that are added up: exact")


class SideAmountView(FilterAmountView):
    """A part of one side of a filter `either`."""

    misses: int = Field(description="number of runs that the side could not take")


class ChargeView(FilterAmountView):
    """A part of the budget, in the units of its filter and as a share."""

    share: float | None = Field(None, description="share of the whole budget")
    sides: list[SideAmountView] | None = Field(
        None, description="the part of each side of a filter `either`"
    )


class AmountView(ChargeView):
    """A part of the budget, as ε and in the units of its filter."""

    epsilon: float


class BudgetView(BaseModel):
    """The privacy budget of a dataset."""

    epsilon: float
    delta: float


class FilterView(BaseModel):
    """A privacy filter."""

    filter: FilterName
    reference: dict[str, Any] | None = Field(
        None, description="one reference step; null until the first reservation"
    )
    reference_steps: int | None = Field(None, description="number of reference steps in all")
    planned: bool | None = Field(
        None,
        description="whether the reference was given when the dataset was created, or by its owner",
    )
    slack_share: float | None = Field(None, description="share of δ that exchanges may lose")
    added_epsilon: str | None = Field(
        None, description="ε added up before the reference was chosen, and not counted in its steps"
    )
    added_delta: str | None = Field(None, description="the same of δ")
    summed_delta: str | None = Field(
        None, description="δ that releases may take by addition with `renyi`"
    )
    order: float | None = Field(
        None, description="Rényi order of a `renyi` filter with a planned mechanism"
    )
    budget_micronats: int | None = Field(
        None, description="Rényi divergence of the whole budget at `order`, in 1e-6 nats"
    )
    orders: list[float] | None = Field(
        None, description="Rényi orders of a `renyi` filter without a planned mechanism"
    )
    weights: list[float] | None = Field(None, description="the weight of each of the `orders`")
    general_weights: list[float] | None = Field(
        None, description="the weights before the first run shifted some to its best order"
    )
    description: str | None = Field(None, description="the filter in words")


class AccountingView(FilterView):
    """The privacy filter of a dataset. It cannot be changed."""

    sides: list[FilterView] | None = Field(
        None, description="the two filters of `either`: one of them has admitted everything"
    )
    scope: Literal["filter_budget"]


class DatasetView(BaseModel):
    """A dataset: its budget, and what is spent, held and remaining."""

    name: str
    size: int
    privacy_unit: str = Field(description=_UNIT)
    neighbouring_relation: NeighbouringRelation
    budget: BudgetView
    spent: AmountView
    held: AmountView
    remaining: AmountView
    accounting: AccountingView
    version: int
    state: Literal["open", "closed", "deleted"] = Field(
        description="`closed` datasets take no further reservation; `deleted` is only in the "
        "answer to the deletion"
    )
    closed_at: float | None = Field(description="Unix time in seconds; null while it is open")
    series: str | None = Field(None, description="the series that it was created in")


class AdmittedRunView(BaseModel):
    """The steps of an example run that a whole budget admits."""

    step: dict[str, Any] = Field(description="one step of the run")
    steps: int | None = Field(
        description="most steps as the only further run; null if that is not known"
    )


class NewDatasetView(DatasetView):
    """A dataset that is new or has a new reference, with examples of what its budget admits."""

    admits: list[AdmittedRunView] = Field(
        description="the planned mechanism, if there is one, and ordinary runs: each as the only "
        "further run"
    )
    warnings: list[str] = Field(description="what may be wrong with the budget, and what to do")


class ReferenceQuoteView(BaseModel):
    """The filter that a dataset would have with a reference, and what would still fit."""

    accounting: AccountingView
    before: list[AdmittedRunView] = Field(
        description="steps of the mechanism and of ordinary runs that fit now"
    )
    after: list[AdmittedRunView] = Field(
        description="steps of the same runs that would fit with the reference"
    )


class DatasetsView(BaseModel):
    """A page of the datasets that the key may see."""

    items: list[DatasetView]
    next_cursor: str | None


class QuoteView(BaseModel):
    """A quote: whether the plan fits the remaining budget, and what would fit."""

    fits: bool
    affordable: AffordableView
    affordable_alone: int | None = Field(
        None, description="most steps that would fit as the only plan of the whole budget"
    )
    share_of_budget: float | None = Field(
        None, description="share of the budget that the plan takes; null if it does not fit"
    )
    epsilon_after: float | None = Field(
        description="ε spent or held if the whole plan were charged; null if it does not fit"
    )
    guarantee: dict[str, Any] | None = Field(
        description="guarantee of this plan alone (scope fixed_plan); null if it has no finite ε"
    )


class SeriesCapView(BaseModel):
    """A cap that each dataset of a series has."""

    team: str | None = Field(description="the team that it limits; null for a cap of a key")
    key: str | None = Field(description="the key that it limits; null for a cap of a team")
    share: float = Field(description="share of each dataset's budget that the holder may take")


class ProtectionView(BaseModel):
    """The guarantee of several budgets together, for a person with one record in each dataset."""

    one: BudgetView = Field(
        description="for a person with a record in one of the datasets: the largest budget"
    )
    all: BudgetView | None = Field(
        description="for a person with a record in each of them (group privacy, since one run may "
        "see all of these records); null if nothing is proved"
    )


class DatasetQuoteView(QuoteView):
    """The quote of a plan on several datasets, as far as one of them is concerned."""

    dataset: str


class JointQuoteView(BaseModel):
    """A quote for one run on several datasets: what it would take of each, and what fits all."""

    fits: bool = Field(description="whether it fits each of them")
    affordable: AffordableView
    size: int = Field(description="number of records of all datasets")
    items: list[DatasetQuoteView]
    protection: ProtectionView


class SeriesView(BaseModel):
    """A series: the template of its datasets, how many there are, and their caps."""

    name: str
    budget: BudgetView = Field(description="of each dataset")
    neighbouring_relation: NeighbouringRelation
    privacy_unit: str
    planned_mechanism: dict[str, Any] | None
    filter: FilterName
    accept_weak: bool
    dataset_count: int
    last_dataset: str | None = Field(description="the name of the last dataset; null if none is")
    caps: list[SeriesCapView]
    created_at: float = Field(description="Unix time in seconds")


class SeriesListView(BaseModel):
    """A page of the series that the key may see."""

    items: list[SeriesView]
    next_cursor: str | None


class WindowView(BaseModel):
    """The last datasets of a series, which one run may be on."""

    series: str
    size: int = Field(description="number of records of all these datasets")
    items: list[DatasetView] = Field(description="in their order, the last one at the end")
    protection: ProtectionView


class ProblemItemView(BaseModel):
    """A plan that cannot be charged."""

    problem: ProblemView


class TogetherView(BaseModel):
    """A quote of all plans together, one after the other."""

    fits: bool
    epsilon_after: float | None = Field(
        description="ε spent or held after all of them; null if they do not fit"
    )


class QuotesView(BaseModel):
    """A quote of each plan alone, and of all plans together."""

    items: list[QuoteView | ProblemItemView]
    together: TogetherView


class ReservationView(BaseModel):
    """A reservation: its plan, its state and the steps granted."""

    id: str
    dataset: str | None = Field(description="null for a run on several datasets")
    datasets: list[str] | None = Field(None, description="of a run on several: their names")
    run: str | None = Field(
        None,
        description="in lists: the run on several datasets whose part on this one is shown; each "
        "part's id stands for the whole run",
    )
    state: Literal["open", "committed", "released", "expired"]
    mechanism: dict[str, Any]
    mechanism_hash: str
    steps_reserved: int
    steps_granted: int
    charge: ChargeView | None = Field(
        description="what the whole plan takes of the budget; null for a run on several datasets"
    )
    charges: dict[str, ChargeView] | None = Field(
        None, description="what it takes of each dataset's budget, by the dataset's name"
    )
    expires_at: float = Field(description="Unix time in seconds")
    purpose: str
    neighbouring_relation: NeighbouringRelation


class ReservationsView(BaseModel):
    """A page of a dataset's reservations."""

    items: list[ReservationView]
    next_cursor: str | None


class EntriesView(BaseModel):
    """A page of the ledger's entries."""

    items: list[dict[str, Any]]
    next_cursor: str | None


class KeyView(BaseModel):
    """An API key without its secret."""

    id: str
    name: str
    scopes: list[str]
    datasets: list[str] | None
    team: str | None
    requests_per_minute: int | None = Field(description="the key's quota; null for none")
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class NewKeyView(KeyView):
    """A new API key with its secret, which is shown only once."""

    key: str
    warnings: list[str] = Field(description="the datasets that do not exist yet, in sentences")


class KeysView(BaseModel):
    """A page of API keys, without their secrets."""

    items: list[KeyView]
    next_cursor: str | None


class CapView(BaseModel):
    """A cap, and what its holder has taken."""

    team: str | None = Field(description="the team that it limits; null for a cap of a key")
    key: str | None = Field(description="the key that it limits; null for a cap of a team")
    share: float = Field(description="share of the budget that the holder may take")
    share_taken: float = Field(
        description="share of the budget spent or held by the holder: the larger of the shares of "
        "its reference steps and of its slack"
    )


class CapsView(BaseModel):
    """A page of the caps of a dataset."""

    items: list[CapView]
    next_cursor: str | None


_RUN: Final = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000}
_BUDGET: Final = {"epsilon": 3.0, "delta": 1e-05}
_AFFORDABLE: Final = {"steps": 2708, "noise_multiplier": 0.861}
_STEP: Final = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1}
_ACCOUNTING: Final = {
    "filter": "reference",
    "reference": _STEP,
    "reference_steps": 3712,
    "planned": False,
    "slack_share": 0.001,
    "description": "reference filter: the budget is 3712 reference steps (DP-SGD, q = 0.01, "
    "σ = 1.1, Poisson sampling); any other run is charged as the fewest of them that are known "
    "to dominate it, for which 0.1 % of δ is set aside",
    "scope": "filter_budget",
}
_DATASET: Final = {
    "name": "patients",
    "size": 60000,
    "privacy_unit": "record",
    "neighbouring_relation": "add_or_remove_one",
    "budget": _BUDGET,
    "spent": {"epsilon": 0.53, "share": 0.0135, "reference_steps": 50, "slack": 0.0},
    "held": {"epsilon": 0.99, "share": 0.2562, "reference_steps": 950, "slack": 0.0},
    "remaining": {"epsilon": 1.48, "share": 0.7303, "reference_steps": 2708, "slack": 1.0},
    "accounting": _ACCOUNTING,
    "version": 4,
    "state": "open",
    "closed_at": None,
    "series": None,
}
_ADMITTED: Final = {"step": _STEP, "steps": 3708}
_NEW_DATASET: Final = _DATASET | {
    "spent": {"epsilon": 0.0, "share": 0.0, "reference_steps": 0, "slack": 0.0},
    "held": {"epsilon": 0.0, "share": 0.0, "reference_steps": 0, "slack": 0.0},
    "remaining": {"epsilon": 3.0, "share": 1.0, "reference_steps": 3712, "slack": 1.0},
    "accounting": _ACCOUNTING | {"planned": True},
    "version": 1,
    "admits": [_ADMITTED],
    "warnings": [],
}
_CHARGE: Final = {"share": 0.2697, "reference_steps": 1000, "slack": 0.0}
_RESERVATION: Final = {
    "id": "2971f435474842618b5ac0cd7158106f",
    "dataset": "patients",
    "state": "open",
    "mechanism": _RUN,
    "mechanism_hash": "sha256:404040cf70b9ac59bb6ce69ab25e4321ce121f7c8698dbf82ddfb0e958ab6b3b",
    "steps_reserved": 1000,
    "steps_granted": 50,
    "charge": _CHARGE,
    "expires_at": 1795278815.9,
    "purpose": "a first model",
    "neighbouring_relation": "add_or_remove_one",
}
_KEY: Final = {
    "id": "1c3aee0336e2d586",
    "name": "trainer",
    "scopes": ["run"],
    "datasets": ["patients"],
    "team": "vision",
    "requests_per_minute": 600,
    "created_at": 1795278797.7,
    "expires_at": None,
    "revoked_at": None,
    "last_used_at": None,
}
_EVENT: Final = {
    "id": "9f1c2a7d5b0e4c61a3d8f2b7c4e6a910",
    "at": 1795278797700000,
    "key": "1c3aee0336e2d586",
    "action": "dataset-closed",
    "subject": "patients",
    "detail": "",
}
_CAP: Final = {"team": "vision", "key": None, "share": 0.3, "share_taken": 0.12}
_QUOTE: Final = {
    "fits": True,
    "affordable": _AFFORDABLE,
    "affordable_alone": 3708,
    "share_of_budget": 0.2697,
    "epsilon_after": 2.07,
    "guarantee": {"epsilon": 1.65, "delta": 1e-05, "scope": "fixed_plan"},
}
_PROTECTION: Final = {"one": _BUDGET, "all": {"epsilon": 6.0, "delta": 2.11e-04}}
_MONTH: Final = _DATASET | {"name": "sales-2026-11", "size": 1400, "series": "sales"}
_SERIES_CAP: Final = {"team": "vision", "key": None, "share": 0.3}
_SERIES: Final = {
    "name": "sales",
    "budget": _BUDGET,
    "neighbouring_relation": "add_or_remove_one",
    "privacy_unit": "sale",
    "planned_mechanism": None,
    "filter": "reference",
    "accept_weak": False,
    "dataset_count": 2,
    "last_dataset": "sales-2026-11",
    "caps": [_SERIES_CAP],
    "created_at": 1795278797.7,
}
_MONTH_QUOTE: Final = _QUOTE | {"dataset": "sales-2026-11"}
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
    "ReferenceRequest": {"mechanism": _RUN},
    "ReferenceQuoteView": {
        "accounting": _ACCOUNTING | {"planned": True},
        "before": [_ADMITTED],
        "after": [_ADMITTED],
    },
    "ReservationRequest": {"mechanism": _RUN, "purpose": "a first model"},
    "JointReservationRequest": {
        "datasets": ["sales-2026-10", "sales-2026-11"],
        "mechanism": _RUN,
        "purpose": "a model of two months",
    },
    "JointQuoteRequest": {"datasets": ["sales-2026-10", "sales-2026-11"], "mechanism": _RUN},
    "WindowQuoteRequest": {"last": 2, "mechanism": _RUN},
    "SeriesRequest": {"budget": _BUDGET, "privacy_unit": "sale"},
    "SeriesDatasetRequest": {"size": 1400},
    "SeriesView": _SERIES,
    "SeriesListView": {"items": [_SERIES], "next_cursor": None},
    "SeriesCapView": _SERIES_CAP,
    "ProtectionView": _PROTECTION,
    "WindowView": {
        "series": "sales",
        "size": 1400,
        "items": [_MONTH],
        "protection": _PROTECTION | {"all": _BUDGET},
    },
    "DatasetQuoteView": _MONTH_QUOTE,
    "JointQuoteView": {
        "fits": True,
        "affordable": _AFFORDABLE,
        "size": 2800,
        "items": [_MONTH_QUOTE | {"dataset": "sales-2026-10"}, _MONTH_QUOTE],
        "protection": _PROTECTION,
    },
    "GrantRequest": {"steps": 50, "sequence": 0},
    "RenewRequest": {"lease_seconds": 3600},
    "CommitRequest": {"clip_norm": 1.0},
    "NothingRequest": {},
    "KeyRequest": {
        "scopes": ["run"],
        "name": "trainer",
        "datasets": ["patients"],
        "team": "vision",
    },
    "KeyChange": {"requests_per_minute": 600},
    "CapRequest": {"share": 0.3},
    "CapView": _CAP,
    "CapsView": {"items": [_CAP]},
    "AffordableView": _AFFORDABLE,
    "AmountView": _DATASET["spent"],
    "ChargeView": _CHARGE,
    "SideAmountView": {"reference_steps": 50, "slack": 0.0, "misses": 0},
    "AdmittedRunView": _ADMITTED,
    "NewDatasetView": _NEW_DATASET,
    "AccountingView": _ACCOUNTING,
    "FilterView": {name: each for name, each in _ACCOUNTING.items() if name != "scope"},
    "DatasetView": _DATASET,
    "DatasetsView": {"items": [_DATASET]},
    "QuoteView": _QUOTE,
    "QuotesRequest": {"mechanisms": [_RUN]},
    "ProblemItemView": {"problem": _PROBLEM},
    "QuotesView": {"items": [_QUOTE], "together": _TOGETHER},
    "TogetherView": _TOGETHER,
    "ReservationView": _RESERVATION,
    "ReservationsView": {"items": [_RESERVATION], "next_cursor": None},
    "EntriesView": {
        "items": [{"number": 1, "kind": "create", "hash": "5d41402abc4b2a76b9719d911017c592"}],
        "next_cursor": None,
    },
    "EventView": _EVENT,
    "EventsView": {"items": [_EVENT], "next_cursor": None},
    "EntryKind": "grant",
    "ExportFormat": "jsonl",
    "KeyView": _KEY,
    "NewKeyView": _KEY | {"key": "pa_1c3aee0336e2d586_…", "warnings": []},
    "KeysView": {"items": [_KEY]},
    "Scope": "run",
    "Format": "html",
}
