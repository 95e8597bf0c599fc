"""The ledger's answers as the JSON of the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from accountant_service import mechanisms
from accountant_service.ledger.filters import (
    AdditionFilter,
    EitherFilter,
    PrivacyFilter,
    RenyiFilter,
    RenyiMixtureFilter,
    RenyiSumFilter,
)
from accountant_service.ledger.filters.addition import write_units
from accountant_service.ledger.filters.base import Amounts, subtract
from accountant_service.ledger.filters.reference import SLACK_UNITS
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.plans import (
    BudgetPreview,
    CombinedQuote,
    Quote,
    ReferenceChoice,
    fit_all,
)
from accountant_service.ledger.repository import RunPlace, Transaction
from accountant_service.ledger.rules import (
    Cap,
    CapUse,
    Dataset,
    HolderKind,
    Reservation,
    State,
)
from accountant_service.ledger.series import bound_loss_in_all
from accountant_service.ledger.series_catalog import SeriesState
from accountant_service.ledger.service import (
    BurnDownPoint,
    Deletion,
    EntriesPage,
    RunParts,
    Subject,
)
from accountant_service.numerics.floats import rounding
from accountant_service.questions import views

LIST_PAGE_SIZE: Final = 200  # datasets, keys or caps
RUN_CURSOR: Final = r"^([01]:\d{1,18}:[0-9a-f]{1,32})?$"
Json = dict[str, Any]
Item = TypeVar("Item")


class _Answers:
    """The answers to writes as JSON, and the short form in which the ledger stores them.

    In the short form what the row of the run or the dataset states for good is null.
    """

    def encode(self, dataset: Dataset, result: Subject) -> tuple[str, str]:
        """Return the answer about a changed reservation or dataset: as sent, and as stored.

        A new dataset comes with a preview of how many steps its budget covers. It is created once,
        so this answer is stored whole.
        """
        if isinstance(result, BudgetPreview):
            text = json.dumps(dataset_view(dataset) | preview_view(result))
            return text, text
        if isinstance(result, Deletion):  # no row is left to restore anything from
            text = json.dumps(dataset_view(dataset) | {"state": "deleted"})
            return text, text
        view = dataset_view(dataset) if result is None else run_view(result)
        fixed = _FIXED_OF_DATASETS if result is None else _FIXED_OF_RUNS
        return json.dumps(view), json.dumps(view | dict.fromkeys(fixed))

    def restore(self, stored: str, reading: Transaction) -> str:
        """Return a stored answer as it was sent; those of earlier versions are stored whole."""
        view = json.loads(stored)
        if "mechanism" in view and view["mechanism"] is None:
            run = reading.find_reservation(view["id"])
            if run is not None:
                found = {"mechanism": run.mechanism, "purpose": run.purpose}
                return json.dumps(view | found)
        if "accounting" in view and view["accounting"] is None:
            dataset = reading.find_dataset(view["name"])
            if dataset is not None:
                found = {name: dataset_view(dataset)[name] for name in _FIXED_OF_DATASETS}
                return json.dumps(view | found)
        return stored


ANSWERS: Final = _Answers()
_FIXED_OF_RUNS: Final = ("mechanism", "purpose")
_FIXED_OF_DATASETS: Final = ("privacy_unit", "accounting")  # of a closed one


def preview_view(preview: BudgetPreview) -> Json:
    """Return as JSON how many steps of example runs a new budget covers, with warnings."""
    return {"admits": _admitted_view(preview), "warnings": list(preview.warnings)}


def _admitted_view(preview: BudgetPreview) -> list[Json]:
    """Return as JSON how many steps of example runs fit."""
    return [{"step": mechanisms.to_json(each.step), "steps": each.steps} for each in preview.runs]


def reference_quote_view(choice: ReferenceChoice) -> Json:
    """Return as JSON what would still fit with a reference, and what fits now."""
    return {
        "accounting": _accounting_view(choice.policy),
        "before": _admitted_view(choice.before),
        "after": _admitted_view(choice.after),
    }


def dataset_view(dataset: Dataset) -> Json:
    """Return a dataset as JSON, with what is spent, held and left of its budget."""
    policy, balance = dataset.policy, dataset.balance
    spent, taken = policy.epsilon_of(balance.spent), policy.epsilon_of(balance.taken)
    spent_share, share = (
        min(policy.share_of(each), 1.0) for each in (balance.spent, balance.taken)
    )
    return {
        "name": dataset.name,
        "size": dataset.size,
        "privacy_unit": dataset.privacy_unit,
        "neighbouring_relation": policy.relation.value,
        "budget": {"epsilon": policy.epsilon, "delta": policy.delta},
        "spent": {"epsilon": spent, "share": spent_share} | _amount_view(policy, balance.spent),
        "held": {"epsilon": max(taken - spent, 0.0), "share": max(share - spent_share, 0.0)}
        | _amount_view(policy, balance.held),
        "remaining": {
            "epsilon": max(rounding.subtract_rounding_down(policy.epsilon, taken), 0.0),
            "share": max(rounding.subtract_rounding_down(1.0, share), 0.0),
        }
        | _remaining_view(policy, balance.taken),
        "accounting": _accounting_view(policy),
        "version": dataset.version,
        "state": "open" if dataset.closed_at is None else "closed",
        "closed_at": None if dataset.closed_at is None else _to_seconds(dataset.closed_at),
        "series": dataset.series,
    }


def _remaining_view(policy: PrivacyFilter, taken: Amounts) -> Json:
    """Return the amounts left of a budget as JSON; empty if the filter does not define them."""
    if isinstance(policy, EitherFilter):
        return _side_views(policy, taken, _remaining_view)
    if isinstance(policy, RenyiMixtureFilter):
        return {}  # no amount at each of its orders says what is left
    if isinstance(policy, RenyiSumFilter):
        return _delta_view(max(policy.summed - taken[-1], 0))
    left = subtract(policy.whole, taken)
    return _amount_view(policy, tuple(max(each, 0) for each in left))


def _side_views(
    policy: EitherFilter, amounts: Amounts, view: Callable[[PrivacyFilter, Amounts], Json]
) -> Json:
    """Return a view of the amounts of each side."""
    parts = policy.split(amounts)
    return {"sides": [{"misses": misses} | view(side, own) for side, misses, own in parts]}


def _amount_view(policy: PrivacyFilter, amounts: Amounts) -> Json:
    """Return amounts of a budget as JSON, in the units of its filter and as ε."""
    if isinstance(policy, EitherFilter):
        return _side_views(policy, amounts, _amount_view)
    if isinstance(policy, AdditionFilter):
        return _added_view(amounts)
    if isinstance(policy, RenyiSumFilter):
        return {"micronats": list(amounts[:-1])} | _delta_view(amounts[-1])
    if policy.reference_part is None:
        return {"micronats": amounts[0] if len(amounts) == 1 else list(amounts)}
    counted = {"reference_steps": amounts[0], "slack": amounts[1] / SLACK_UNITS}
    return counted | (_added_view(amounts[2:]) if len(amounts) > 2 else {})


def _added_view(amounts: Amounts) -> Json:
    """Return the ε and the δ of releases that are added up, as decimals in texts: exact."""
    return {"added_epsilon": write_units(amounts[0])} | _delta_view(amounts[1])


def _delta_view(units: int) -> Json:
    """Return the δ of releases that are added up, as a decimal in a text: exact."""
    return {"added_delta": write_units(units)}


def _accounting_view(policy: PrivacyFilter) -> Json:
    """Return a dataset's privacy filter as JSON: its name, parameters and description."""
    return _filter_view(policy) | {"scope": "filter_budget"}


def _filter_view(policy: PrivacyFilter) -> Json:
    """Return a filter as JSON: its name, parameters and description."""
    if isinstance(policy, RenyiFilter):
        kind: Json = {"order": policy.order, "budget_micronats": policy.budget}
    elif isinstance(policy, EitherFilter):
        kind = {"sides": [_filter_view(side) for side in policy.sides]}
    else:
        kind = policy.entry_fields()
    return {"filter": policy.name} | kind | {"description": policy.description}


def reservation_view(dataset: Dataset, reservation: Reservation) -> Json:
    """Return a reservation as JSON."""
    return {
        "id": reservation.identifier,
        "dataset": dataset.name,
        "state": reservation.state.value,
        "mechanism": reservation.mechanism,
        "mechanism_hash": reservation.mechanism_hash,
        "steps_reserved": reservation.steps_reserved,
        "steps_granted": reservation.steps_granted,
        "charge": {"share": dataset.policy.share_of(reservation.charge.reserved)}
        | _amount_view(dataset.policy, reservation.charge.reserved),
        "expires_at": _to_seconds(reservation.expires_at),
        "purpose": reservation.purpose,
        "neighbouring_relation": dataset.policy.relation.value,
    } | ({} if reservation.joint is None else {"run": reservation.joint.identifier})


def run_view(parts: RunParts) -> Json:
    """Return a run as JSON: its reservation, or those of all its datasets as one."""
    (dataset, run), joint = parts[0], parts[0][1].joint
    view = reservation_view(dataset, run)
    if joint is None:
        return view
    charges = {owner.name: reservation_view(owner, each)["charge"] for owner, each in parts}
    ended = [each.state.value for _, each in parts if each.state is not State.OPEN]
    return view | {
        "id": joint.identifier,
        "dataset": None,
        "datasets": sorted(charges),
        "state": ended[0] if ended else State.OPEN.value,
        "charge": None,
        "charges": dict(sorted(charges.items())),
    }


def parse_run_cursor(cursor: str) -> RunPlace | None:
    """Return the place in the list of runs after which a page begins; None for the first page."""
    if not cursor:
        return None
    has_ended, expires_at, identifier = cursor.split(":")
    return has_ended == "1", int(expires_at), identifier


def write_run_cursor(place: RunPlace | None) -> str | None:
    """Return the cursor of the page after a place in the list of runs; None if there is none."""
    return None if place is None else f"{place[0]:d}:{place[1]}:{place[2]}"


def quote_view(quote: Quote) -> Json:
    """Return a quote for one plan as JSON."""
    found = quote.guarantee
    guarantee = None if found is None else views.guarantee(found).model_dump()
    return {
        "fits": quote.fits,
        "affordable": {
            "steps": quote.affordable_steps,
            "noise_multiplier": quote.least_noise_multiplier,
        },
        "affordable_alone": quote.affordable_alone,
        "share_of_budget": quote.share,
        "epsilon_after": quote.epsilon_after,
        "guarantee": None if guarantee is None else guarantee | {"scope": "fixed_plan"},
    }


def combined_quote_view(quote: CombinedQuote) -> Json:
    """Return the quote of several plans together as JSON."""
    return {"fits": quote.fits, "epsilon_after": quote.epsilon_after}


def joint_quote_view(parts: Sequence[tuple[Dataset, Quote]]) -> Json:
    """Return the quotes of one plan on several datasets as one quote, as JSON."""
    found = [(quote.affordable_steps, quote.least_noise_multiplier) for _, quote in parts]
    steps, noise_multiplier = fit_all(found)
    datasets = [dataset for dataset, _ in parts]
    return {
        "fits": all(quote.fits for _, quote in parts),
        "affordable": {"steps": steps, "noise_multiplier": noise_multiplier},
        "size": sum(dataset.size for dataset in datasets),
        "items": [{"dataset": dataset.name} | quote_view(quote) for dataset, quote in parts],
        "protection": protection_view([dataset_view(each)["budget"] for each in datasets]),
    }


def protection_view(budgets: Sequence[Json]) -> Json:
    """Return what budgets prove for a person in one dataset, and in all of them, as JSON."""
    together = bound_loss_in_all([(each["epsilon"], each["delta"]) for each in budgets])
    return {
        "one": {name: max(each[name] for each in budgets) for name in ("epsilon", "delta")},
        "all": None if together is None else dict(zip(("epsilon", "delta"), together, strict=True)),
    }


def series_view(state: SeriesState) -> Json:
    """Return a series as JSON: its template, the number of its datasets, and its caps."""
    series, template = state.series, state.series.template
    planned = template.planned_mechanism
    return {
        "name": series.name,
        "budget": {"epsilon": template.epsilon, "delta": template.delta},
        "neighbouring_relation": template.relation.value,
        "privacy_unit": template.privacy_unit,
        "planned_mechanism": None if planned is None else mechanisms.to_json(planned),
        "filter": template.filter,
        "accept_weak": template.accept_weak,
        "dataset_count": len(state.names),
        "last_dataset": state.names[-1] if state.names else None,
        "caps": [_holder_view(cap) | {"share": cap.share} for cap in state.caps],
        "created_at": _to_seconds(series.created_at),
    }


def window_view(series: str, datasets: Sequence[Json]) -> Json:
    """Return the last datasets of a series as JSON, with what they prove together."""
    return {
        "series": series,
        "size": sum(each["size"] for each in datasets),
        "items": list(datasets),
        "protection": protection_view([each["budget"] for each in datasets]),
    }


def entries_view(page: EntriesPage) -> Json:
    """Return a page of ledger entries as JSON, with the cursor of the next page."""
    entries = page.entries
    return {
        "items": entries,
        "next_cursor": str(entries[-1]["number"]) if page.has_more else None,
    }


def page_view(
    found: Sequence[Item], view: Callable[[Item], Json], cursor: Callable[[Item], str]
) -> Json:
    """Return a page of a list as JSON, with the cursor of the next page if there is one.

    Args:
        found: the items of the page, and one more if there are more.
        view: returns the JSON of an item.
        cursor: returns the cursor after an item.
    """
    page = found[:LIST_PAGE_SIZE]
    following = cursor(page[-1]) if len(found) > LIST_PAGE_SIZE else None
    return {"items": [view(item) for item in page], "next_cursor": following}


def burn_down_view(points: list[BurnDownPoint]) -> list[Json]:
    """Return a budget's history as JSON: at each time, the ε spent, and the ε spent or held."""
    return [
        {"at": _to_seconds(point.at), "spent": point.spent, "taken": point.taken}
        for point in points
    ]


def cap_view(policy: PrivacyFilter, use: CapUse) -> Json:
    """Return a cap as JSON, with the share of the budget that its key or team has taken."""
    cap = use.cap
    return _holder_view(cap) | {
        "share": cap.share,
        "share_taken": min(policy.largest_share_of(use.taken), 1.0),
    }


def _holder_view(cap: Cap) -> Json:
    """Return the team or the key that a cap limits as JSON."""
    return {
        "team": cap.holder if cap.kind is HolderKind.TEAM else None,
        "key": cap.holder if cap.kind is HolderKind.KEY else None,
    }


def key_view(key: KeyRecord) -> Json:
    """Return an API key as JSON, without its digest."""
    return {
        "id": key.identifier,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "datasets": None if key.datasets is None else list(key.datasets),
        "team": key.team,
        "requests_per_minute": key.requests_per_minute,
        "created_at": _to_seconds(key.created_at),
        "expires_at": None if key.expires_at is None else _to_seconds(key.expires_at),
        "revoked_at": None if key.revoked_at is None else _to_seconds(key.revoked_at),
        "last_used_at": None if key.last_used_at is None else _to_seconds(key.last_used_at),
    }


def _to_seconds(microseconds: int) -> float:
    """Convert microseconds to seconds."""
    return microseconds / 1e6
