"""The facts of a report about a dataset or a run, from which every format is written.

Facts about a run come from its certificate alone, so they can be computed anywhere. Facts about a
dataset come from the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.disclosure.attack_rates import (
    AttackRates,
    bound_attacks_by_epsilon,
    bound_attacks_on_mechanism,
)
from accountant_service.errors import AccountingError
from accountant_service.ledger import certificate
from accountant_service.ledger.rules import Dataset, Reservation
from accountant_service.mechanisms import Mechanism, Repeated
from accountant_service.numerics.floats import rounding
from accountant_service.version import __version__

FORMAT: Final = "privacy-accountant-report/1"
RUNS_MAX: Final = 200  # listed in the report of a dataset
Json = Mapping[str, Any]


class _Part(BaseModel):
    """Base of the parts of a report: immutable, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Promise(_Part):
    """An (ε, δ) guarantee, with upper bounds on the success of membership attacks.

    Attributes:
        scope: `fixed_plan` for one run alone, `filter_budget` for everything from the dataset.
    """

    scope: Literal["fixed_plan", "filter_budget"]
    epsilon: float
    delta: float
    attacks: AttackRates


class DatasetFacts(_Part):
    """The protected dataset: its size, privacy unit and neighbouring relation.

    Attributes:
        size: number of records; None if the certificate is of a format that does not state it.
    """

    name: str
    size: int | None
    privacy_unit: str
    neighbouring_relation: NeighbouringRelation
    trust_model: str
    created: str | None = Field(None, description="ISO 8601 date and time, UTC")
    closed: str | None = Field(
        None, description="ISO 8601 date and time, UTC; null while it takes further runs"
    )


class FilterFacts(_Part):
    """The privacy filter that enforces the dataset's budget."""

    name: str
    description: str
    reference: str | None = Field(None, description="one reference step, in words")
    reference_steps: int | None = None
    slack_share: float | None = None


class BudgetUse(_Part):
    """The shares of the budget that are spent, held and left."""

    spent: float
    held: float
    left: float


class RunFacts(_Part):
    """A run that has ended, as its certificate states it.

    Attributes:
        steps_reserved: None if the certificate is of a format that does not state it.
        plan: the guarantee of this run alone.
        gaps: what the certificate does not cover.
        clip_norm: as the training program declared it; the ledger cannot check it.
        model_sha256: as the training program declared it.
    """

    identifier: str
    state: str
    mechanism: dict[str, Any]
    mechanism_hash: str
    step: str = Field(description="one step in words")
    sampling: str
    steps_reserved: int | None
    steps_granted: int
    plan: Promise
    method: str
    status: str
    epsilon_lower: float | None
    assumptions: tuple[str, ...]
    gaps: tuple[str, ...] = ()
    clip_norm: float | None = None
    model_sha256: str | None = None
    ended: str | None = Field(None, description="ISO 8601 date and time, UTC")


class RunLine(_Part):
    """A summary of one run, for the report of its dataset."""

    identifier: str
    purpose: str
    state: str
    step: str
    steps_reserved: int
    steps_granted: int
    share: float = Field(description="share of the budget spent or held")


class LedgerState(_Part):
    """The ledger's state in a report: number of entries, last hash, public signing key."""

    entries: int
    head: str
    public_key: str | None = None


class Facts(_Part):
    """All facts of a report about a dataset or a run.

    Attributes:
        run: in the report of a run.
        use: of the budget, in the report of a dataset.
        runs: at most `RUNS_MAX`, in the report of a dataset.
        runs_in_all: the number of runs of the dataset.
    """

    format: Literal["privacy-accountant-report/1"] = FORMAT
    subject: Literal["dataset", "run"]
    dataset: DatasetFacts
    budget: Promise
    filter: FilterFacts
    record: LedgerState
    issued: str = Field(description="ISO 8601 date and time, UTC")
    accountant_version: str
    run: RunFacts | None = None
    use: BudgetUse | None = None
    runs: tuple[RunLine, ...] = ()
    runs_in_all: int = 0


def facts_of_certificate(document: Json) -> Facts:
    """Return the facts of a run from its certificate.

    Args:
        document: a certificate that `certificate.check` found no fault in, of any format.

    Raises:
        AccountingError: the mechanism cannot be accounted for.
    """
    relation = NeighbouringRelation(document["neighbouring_relation"])
    listed = document.get("datasets")
    subject = document if listed is None else _join_datasets(listed)
    budget, dates = subject["budget"], document.get("dates") or {}
    if listed is not None:
        dates = {**subject["dates"], **dates}
    issued = dates.get("issued") or certificate.format_time(int(1e6 * document["issued_at"]))
    recorded = budget.get("filter") or {}
    return Facts(
        subject="run",
        dataset=DatasetFacts(
            name=subject["dataset"],
            size=document.get("dataset_size"),
            privacy_unit=document["privacy_unit"],
            neighbouring_relation=relation,
            trust_model=document["trust_model"],
            created=dates.get("dataset_created"),
            closed=dates.get("dataset_closed"),
        ),
        budget=_guarantee_of_budget(budget["epsilon"], budget["delta"], relation, recorded),
        filter=_filter_facts(recorded, budget["composition"]),
        record=LedgerState(**subject["record"], public_key=document["public_key"]),
        issued=issued,
        accountant_version=document["accountant_version"],
        run=_run_of_certificate(document, relation, dates),
    )


def _join_datasets(listed: Sequence[Json]) -> Json:
    """Return several datasets of a certificate as one, with a budget that holds for each of them.

    The largest ε and δ are promised to a record of any one of them.
    """
    budgets = [each["budget"] for each in listed]
    names = [each["dataset"] for each in listed]
    ended = [each["dates"]["run_ended"] for each in listed]
    return {
        "dataset": ", ".join(names),
        "budget": {
            "epsilon": max(each["epsilon"] for each in budgets),
            "delta": max(each["delta"] for each in budgets),
            "composition": "each dataset has a budget of its own. "
            + "; ".join(
                f"{name}: ε = {each['epsilon']:g}, δ = {each['delta']:g}, {each['composition']}"
                for name, each in zip(names, budgets, strict=True)
            ),
        },
        "record": {
            "entries": sum(each["record"]["entries"] for each in listed),
            "head": ", ".join(
                f"{name} {each['record']['head']}" for name, each in zip(names, listed, strict=True)
            ),
        },
        "dates": {"run_ended": max((at for at in ended if at is not None), default=None)},
    }


def _run_of_certificate(document: Json, relation: NeighbouringRelation, dates: Json) -> RunFacts:
    """Return the facts about the run that a certificate states."""
    plan, claim = mechanisms.from_json(document["mechanism"]), document["guarantee"]
    declared, certified = document.get("declared") or {}, claim.get("certified") or {}
    return RunFacts(
        identifier=document["reservation"],
        state=document["state"],
        mechanism=document["mechanism"],
        mechanism_hash=document["mechanism_hash"],
        step=plan.describe_step(),
        sampling=document["sampling"],
        steps_reserved=document.get("steps_reserved"),
        steps_granted=document["steps"],
        plan=Promise(
            scope="fixed_plan",
            epsilon=claim["epsilon"],
            delta=claim["delta"],
            attacks=_bound_attacks(plan, relation, claim["epsilon"], claim["delta"]),
        ),
        method=claim["method"],
        status=claim["status"],
        epsilon_lower=certified.get("epsilon_lower"),
        assumptions=tuple(claim.get("assumptions", ())),
        gaps=tuple(certificate.list_gaps(dict(document))),
        ended=dates.get("run_ended"),
        **declared,
    )


def facts_of_dataset(
    dataset: Dataset,
    runs: Sequence[Reservation],
    runs_in_all: int,
    issued_at: int,
    public_key: str | None = None,
) -> Facts:
    """Collect from the ledger what the report of a dataset states.

    Args:
        dataset: as the ledger has it.
        runs: its reservations, or the first of them.
        runs_in_all: the number of its reservations.
        issued_at: microseconds since 1970.
        public_key: of the ledger, in hexadecimal.
    """
    policy, balance = dataset.policy, dataset.balance
    recorded = {"filter": policy.name} | policy.entry_fields()
    spent, taken = (min(1.0, policy.share_of(each)) for each in (balance.spent, balance.taken))
    return Facts(
        subject="dataset",
        dataset=DatasetFacts(
            name=dataset.name,
            size=dataset.size,
            privacy_unit=dataset.privacy_unit,
            neighbouring_relation=policy.relation,
            trust_model=certificate.TRUST_MODEL,
            created=certificate.format_time(dataset.created_at),
            closed=None
            if dataset.closed_at is None
            else certificate.format_time(dataset.closed_at),
        ),
        budget=_guarantee_of_budget(policy.epsilon, policy.delta, policy.relation, recorded),
        filter=_filter_facts(recorded, policy.description),
        record=LedgerState(entries=dataset.version, head=dataset.head, public_key=public_key),
        issued=certificate.format_time(issued_at),
        accountant_version=__version__,
        use=BudgetUse(
            spent=spent,
            held=max(0.0, taken - spent),
            left=max(0.0, rounding.subtract_rounding_down(1.0, taken)),
        ),
        runs=tuple(_run_line(dataset, run) for run in runs[:RUNS_MAX]),
        runs_in_all=runs_in_all,
    )


def _run_line(dataset: Dataset, run: Reservation) -> RunLine:
    """Return the one-line summary of a run in its dataset's report."""
    return RunLine(
        identifier=run.identifier,
        purpose=run.purpose,
        state=run.state.value,
        step=mechanisms.from_json(run.mechanism).describe_step(),
        steps_reserved=run.steps_reserved,
        steps_granted=run.steps_granted,
        share=min(1.0, dataset.policy.share_of(run.taken)),
    )


def _guarantee_of_budget(
    epsilon: float, delta: float, relation: NeighbouringRelation, recorded: Json
) -> Promise:
    """Return the guarantee of a dataset's whole budget, with bounds on attacks.

    Args:
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: the neighbouring relation.
        recorded: the filter as entries and certificates record it; empty if unknown.
    """
    attacks = bound_attacks_by_epsilon(epsilon, delta)
    reference, steps = recorded.get("reference"), recorded.get("reference_steps") or 0
    # what was added up before the reference was chosen comes on top of its steps
    is_all = all(recorded.get(name, "0") == "0" for name in ("added_epsilon", "added_delta"))
    if reference is not None and steps >= 1 and is_all:
        slack = rounding.up(recorded["slack_share"] * delta)
        stack = Repeated(steps, mechanisms.from_json(reference))
        attacks = _bound_attacks(stack, relation, epsilon, delta, slack)
    return Promise(scope="filter_budget", epsilon=epsilon, delta=delta, attacks=attacks)


def _bound_attacks(
    mechanism: Mechanism,
    relation: NeighbouringRelation,
    epsilon: float,
    delta: float,
    slack: float = 0.0,
) -> AttackRates:
    """Bound attack rates by the mechanism's privacy profile; if unknown, by ε and δ alone."""
    try:
        return bound_attacks_on_mechanism(mechanism, relation, delta, slack)
    except AccountingError:
        return bound_attacks_by_epsilon(epsilon, delta)


def _filter_facts(recorded: Json, description: str) -> FilterFacts:
    """Return the facts about a privacy filter that an entry or a certificate records."""
    reference = recorded.get("reference")
    return FilterFacts(
        name=recorded.get("filter", "renyi"),
        description=description,
        reference=None if reference is None else mechanisms.from_json(reference).describe_step(),
        reference_steps=recorded.get("reference_steps") or None,
        slack_share=recorded.get("slack_share"),
    )
