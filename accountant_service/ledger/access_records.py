"""Faults of keys, caps, series, webhooks and secrets: their rows beside their audit events.

These rows are in no hash chain. Anyone who can write to the database can also forge audit events;
but a row that was altered alone, by a program or by hand, shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import Select, Table, select

from accountant_service.ledger.columns import read_model
from accountant_service.ledger.errors import StoredRowError
from accountant_service.ledger.fingerprints import PREFIX
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.reading_rows import UNREADABLE, find_type_faults, read_row
from accountant_service.ledger.repository import (
    SECRET_BYTES,
    Transaction,
    key_fingerprint,
    read_audit_event,
    read_cap,
    secret_fingerprint,
    series_fingerprint,
    webhook_fingerprint,
)
from accountant_service.ledger.series import Series
from accountant_service.ledger.tables import (
    API_KEY,
    AUDIT_EVENT,
    CAP,
    DATASET,
    SECRET,
    SERIES,
    SERIES_CAP,
    WEBHOOK,
    WEBHOOK_EVENT,
)
from accountant_service.ledger.webhooks import Webhook

_ACTIONS: Final = (
    "key-created", "key-revoked", "key-quota-set", "keys-reset", "cap-set", "cap-removed",
    "webhook-added", "webhook-removed", "secret-created", "dataset-deleted", "series-created",
    "series-extended", "series-cap-set", "series-cap-removed",
)  # fmt: skip
Event = dict[str, Any]


def find_faults(transaction: Transaction) -> Iterator[str]:
    """Yield the faults of all keys, caps, webhooks, secrets and audit events."""
    unreadable: list[str] = []
    events = [
        event
        for event in _read_all(transaction, AUDIT_EVENT, read_audit_event, unreadable)
        if event["action"] in _ACTIONS
    ]
    events.sort(key=lambda event: (event["at"], event["id"]))
    keys = _read_all(transaction, API_KEY, partial(read_model, KeyRecord), unreadable)
    webhooks = _read_all(transaction, WEBHOOK, partial(read_model, Webhook), unreadable)
    series = _read_all(transaction, SERIES, partial(read_model, Series), unreadable)
    yield from unreadable
    yield from _find_key_faults(keys, events)
    yield from _find_webhook_faults(webhooks, events)
    yield from _find_waiting_event_faults(transaction)
    of_datasets = select(DATASET.c.name, CAP).join(CAP, CAP.c.dataset == DATASET.c.id)
    of_series = select(SERIES_CAP.c.series.label("name"), SERIES_CAP)
    yield from _find_cap_faults(transaction, events, "dataset", "cap", of_datasets)
    yield from _find_cap_faults(transaction, events, "series", "series-cap", of_series)
    yield from _find_series_faults(transaction, series, events)
    yield from _find_secret_faults(transaction, events)


def find_ambiguous_keys(transaction: Transaction) -> Iterator[str]:
    """Yield a warning for each name that a dataset and a series have and a key is bound to.

    Ledgers of earlier versions may have one. The key is for the dataset and for all of the series.
    """
    of_both = select(DATASET.c.name).join(SERIES, SERIES.c.name == DATASET.c.name)
    both = set(transaction.connection.execute(of_both).scalars())
    for key in _read_all(transaction, API_KEY, partial(read_model, KeyRecord), []):
        for name in sorted(both & {*(key.datasets or ())} if key.revoked_at is None else ()):
            yield (
                f"key {key.identifier} is bound to {name!r}, the name of a dataset and of a "
                "series, and is for both: revoke it, and create one for the datasets by name"
            )


def _read_all(
    transaction: Transaction,
    table: Table,
    read: Callable[[Mapping[Any, Any]], Any],
    faults: list[str],
) -> list[Any]:
    """Return what the rows of a table describe; add a fault for each that cannot be read."""
    found = []
    for row in transaction.connection.execute(select(table)).mappings():
        try:
            found.append(read_row(table, row, read))
        except StoredRowError as error:
            faults.append(error.detail)
    return found


def _find_key_faults(keys: Sequence[KeyRecord], events: Sequence[Event]) -> Iterator[str]:
    """Yield a fault for each API key that is not as the audit events say."""
    created = {each["subject"]: each["detail"] for each in events if _is(each, "key-created")}
    revoked = {each["subject"] for each in events if _is(each, "key-revoked")}
    reset_at = max((each["at"] for each in events if _is(each, "keys-reset")), default=-1)
    quotas = {each["subject"]: each["detail"] for each in events if _is(each, "key-quota-set")}
    for key in keys:
        of_key = f"key {key.identifier}"
        stated = created.pop(key.identifier, None)
        if stated is None:
            yield f"{of_key}: no audit event says that it was created"
        elif stated.startswith(PREFIX) and stated != key_fingerprint(key):
            yield f"{of_key}: it was altered since it was created"
        is_revoked = key.identifier in revoked or key.created_at < reset_at
        if is_revoked and key.revoked_at is None:
            yield f"{of_key}: it was revoked according to the audit events, and is valid"
        if not is_revoked and key.revoked_at is not None and reset_at < 0:
            yield f"{of_key}: no audit event says that it was revoked"
        count = key.requests_per_minute
        quota = "none" if count is None else f"{count} requests a minute"
        if quotas.get(key.identifier, quota) != quota:
            yield f"{of_key}: its quota is {quota}, not {quotas[key.identifier]}"
    for identifier in created:
        yield f"key {identifier}: the audit events say that it was created, but it has no row"


def _find_webhook_faults(webhooks: Sequence[Any], events: Sequence[Event]) -> Iterator[str]:
    """Yield a fault for each webhook that is not as the audit events say."""
    added = {each["subject"]: each["detail"] for each in events if _is(each, "webhook-added")}
    removed = {each["subject"] for each in events if _is(each, "webhook-removed")}
    for webhook in webhooks:
        of_webhook = f"webhook {webhook.identifier}"
        stated = added.pop(webhook.identifier, None)
        if stated is None:
            yield f"{of_webhook}: no audit event says that it was added"
            continue
        url, _, shown = stated.partition(" ")
        if url != webhook.url or (shown and shown != webhook_fingerprint(webhook)):
            yield f"{of_webhook}: it was altered since it was added"
        if webhook.identifier in removed:
            yield f"{of_webhook}: it was removed according to the audit events, but has a row"
    for identifier in added.keys() - removed:
        yield f"webhook {identifier}: the audit events say that it was added, but it has no row"


def _find_waiting_event_faults(transaction: Transaction) -> Iterator[str]:
    """Yield a fault for each event that waits for a webhook and cannot be sent."""
    for row in transaction.connection.execute(select(WEBHOOK_EVENT)).mappings():
        wrong = list(find_type_faults(WEBHOOK_EVENT, row))
        try:
            if not wrong and json.loads(row["body"]).get("id") != row["id"]:
                wrong = ["its body has another id"]
        except UNREADABLE as error:
            wrong = [f"its body cannot be read: {error!r}"]
        yield from (f"webhook event {row['id']}: {fault}" for fault in wrong)


def _find_cap_faults(
    transaction: Transaction, events: Sequence[Event], owner: str, action: str, caps: Select[Any]
) -> Iterator[str]:
    """Yield a fault for each cap that is not the one that was set last.

    Args:
        transaction: that reads.
        events: the audit events.
        owner: what the caps are of, in words.
        action: how the names of the audit events about them begin.
        caps: their rows, each with the name of its owner.
    """
    stated: dict[tuple[str, str], str] = {}
    for event in events:
        if _is(event, f"{action}-set"):
            holder, _, share = event["detail"].rpartition(": ")
            stated[event["subject"], holder] = share
        elif _is(event, f"{action}-removed"):
            stated.pop((event["subject"], event["detail"]), None)
    for row in transaction.connection.execute(caps).mappings():
        try:
            cap = read_row(CAP if owner == "dataset" else SERIES_CAP, row, read_cap)
        except StoredRowError as error:
            yield error.detail
            continue
        place = row["name"], f"{cap.kind} {cap.holder}"
        share = stated.pop(place, None)
        if share is None:
            yield f"{owner} {place[0]!r}: no audit event says that the cap of {place[1]} was set"
        elif share != repr(cap.share):
            yield f"{owner} {place[0]!r}: the cap of {place[1]} is {cap.share!r}, not {share}"
    for (name, holder), share in stated.items():
        yield f"{owner} {name!r}: the cap of {holder} was set to {share}, but it has no row"


def _find_series_faults(
    transaction: Transaction, series: Sequence[Series], events: Sequence[Event]
) -> Iterator[str]:
    """Yield a fault for each series, and each dataset in one, that is not as the events say.

    Keys that are bound to a series may use its datasets, so which these are must not be altered.
    """
    created = {each["subject"]: each["detail"] for each in events if _is(each, "series-created")}
    members: dict[str, str] = {}
    for event in events:
        if _is(event, "series-extended"):
            members[event["subject"]] = event["detail"]
        elif _is(event, "dataset-deleted"):
            members.pop(event["subject"], None)
    for each in series:
        stated = created.pop(each.name, None)
        if stated is None:
            yield f"series {each.name!r}: no audit event says that it was created"
        elif stated != series_fingerprint(each):
            yield f"series {each.name!r}: it was altered since it was created"
    for name in created:
        yield f"series {name!r}: the audit events say that it was created, but it has no row"
    for row in transaction.connection.execute(select(DATASET.c.name, DATASET.c.series)):
        stated = members.pop(row.name, None)
        if row.series != stated:
            yield f"dataset {row.name!r}: it is in series {row.series!r}, not {stated!r}"


def _find_secret_faults(transaction: Transaction, events: Sequence[Event]) -> Iterator[str]:
    """Yield a fault for each server secret that is not the one that was created."""
    stated: dict[str, str] = {}
    for event in events:
        if _is(event, "keys-reset"):  # deletes all
            stated.clear()
        elif _is(event, "secret-created"):
            stated[event["subject"]] = event["detail"]
    for row in transaction.connection.execute(select(SECRET)).mappings():
        of_secret = f"secret {row['name']!r}"
        created = stated.pop(row["name"], None)
        wrong = list(find_type_faults(SECRET, row))
        if wrong or len(row["value"]) != SECRET_BYTES:
            yield f"{of_secret}: it is not {SECRET_BYTES} bytes"
        elif created is not None and created != secret_fingerprint(row["name"], row["value"]):
            yield f"{of_secret}: it was altered since it was created"
    for name in stated:
        yield f"secret {name!r}: the audit events say that it was created, but it has no row"


def _is(event: Event, action: str) -> bool:
    """Return whether an audit event records an action."""
    return bool(event["action"] == action)
