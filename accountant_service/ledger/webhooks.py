"""Webhooks: addresses that are told about budgets, and the events that they are told.

An event is stored in the transaction of the ledger entry that it is about, and sent afterwards, so
none is lost and none is told of a write that did not happen. See `webhook_delivery`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from accountant_service.ledger.columns import Stored
from accountant_service.ledger.filters.base import Amounts, Charge, add
from accountant_service.ledger.rules import Dataset

SHARES: Final = (0.5, 0.8, 0.95)  # of a budget, unless others are given
SIGNATURE_HEADER: Final = "Accountant-Signature"
EVENT_HEADER: Final = "Accountant-Event-Id"
_SECRET_PREFIX: Final = "whsec_"
_EVENTS_PER_ENTRY_MAX: Final = 100
_FIRST_PAUSE_SECONDS: Final = 5
_PAUSE_SECONDS_MAX: Final = 3600
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL to which the service posts events about budgets.

    Attributes:
        identifier: public.
        url: to which events are posted.
        secret: the key of the signatures.
        dataset: the name of the only dataset, or of the only series of datasets, that it is told
            about; None for all, and for keys.
        shares: of a budget, ascending: it is told when one is passed.
        created_at: microseconds since 1970.
    """

    identifier: Annotated[str, Stored("id", length=32, is_primary=True)]
    url: str
    secret: str
    dataset: Annotated[str | None, Stored(length=200)]
    shares: tuple[float, ...]
    created_at: int


@dataclass(frozen=True, slots=True)
class Event:
    """An event that is to be posted to one webhook.

    Attributes:
        identifier: the same at every attempt, so that a receiver recognises a repeat.
        webhook: the webhook's identifier.
        dataset: the dataset's name; empty if it is about an API key.
        number: events of a dataset are posted in the order of these.
        body: JSON.
        attempts: begun so far.
        due_at: when the next attempt may begin, in microseconds since 1970.
        last_error: why the last attempt failed; empty before one has.
    """

    identifier: Annotated[str, Stored("id", length=32, is_primary=True)]
    webhook: Annotated[str, Stored(length=32, refers_to="webhook.id")]
    dataset: Annotated[str, Stored(length=200)]
    number: int
    body: str
    attempts: Annotated[int, Stored(length=4)]
    due_at: int
    last_error: str = ""


def create_webhook(
    url: str, dataset: str | None, shares: Sequence[float], created_at: int
) -> Webhook:
    """Create a webhook with a new secret for its signatures.

    Raises:
        ValueError: the address or a share is not valid.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the address must begin with https:// or http://, not {url!r}")
    if parts.username is not None or parts.fragment:
        raise ValueError("the address must have no user, password or fragment")
    chosen = tuple(sorted(set(shares)))
    if not all(0 < share < 1 for share in chosen):
        raise ValueError(f"shares must be between 0 and 1, not {list(shares)}")
    secret = _SECRET_PREFIX + secrets.token_urlsafe(32)
    return Webhook(secrets.token_hex(8), url, secret, dataset, chosen, created_at)


def sign(secret: str, at: int, body: str) -> str:
    """Return the signature header of an event: the time, and an HMAC-SHA-256 of time and body.

    Args:
        secret: the webhook's.
        at: seconds since 1970, when the body is sent: a receiver refuses an old one.
        body: of the request.
    """
    signed = f"{at}.{body}".encode()
    return f"t={at},v1={hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()}"


def compute_pause(attempts: int) -> int:
    """Return the seconds to wait after this many failed posts: they double, up to an hour."""
    doublings = min(max(attempts - 1, 0), 20)
    return min(_FIRST_PAUSE_SECONDS << doublings, _PAUSE_SECONDS_MAX)


def describe_changes(
    webhook: Webhook, before: Dataset, after: Dataset, at: int, charge: Charge | None = None
) -> Iterator[Event]:
    """Yield the events that tell a webhook how a dataset changed.

    Args:
        webhook: one for this dataset.
        before: the dataset before the entry.
        after: the dataset with the entry.
        at: the entry's time.
        charge: of the reservation that the entry records, if it is one.
    """
    share_before, share = (_share_taken(each) for each in (before, after))
    told: list[Json] = [
        {"type": "budget.share_passed", "share": passed}
        for passed in webhook.shares
        if share_before < passed <= share
    ]
    if charge is not None and _has_exhausted(charge, before, after):
        told.append({"type": "budget.exhausted"})
    if before.closed_at is None and after.closed_at is not None:
        told.append({"type": "dataset.closed"})
    about = {"dataset": after.name, "share_taken": share, "entry": after.version}
    for position, fields in enumerate(told[:_EVENTS_PER_ENTRY_MAX]):
        number = after.version * _EVENTS_PER_ENTRY_MAX + position
        yield _create_event(webhook, after.name, number, fields | about | {"head": after.head}, at)


def describe_key_change(webhook: Webhook, kind: str, key: str, at: int) -> Event:
    """Return the event that tells of an API key's creation or revocation."""
    return _create_event(webhook, "", at, {"type": kind, "key": key}, at)


def describe_trial(webhook: Webhook, at: int) -> Event:
    """Return a test event, sent to try whether a webhook works."""
    return _create_event(webhook, "", at, {"type": "webhook.test"}, at)


def _create_event(webhook: Webhook, dataset: str, number: int, fields: Json, at: int) -> Event:
    """Create an event with a new identifier."""
    identifier = uuid.uuid4().hex
    body = json.dumps({"id": identifier, "at": at / 1e6} | fields)
    return Event(identifier, webhook.identifier, dataset, number, body, 0, at)


def _has_exhausted(charge: Charge, before: Dataset, after: Dataset) -> bool:
    """Return whether reserving a plan used up the budget: no further step like it fits.

    Args:
        charge: of the plan; a further step costs its share of it, rounded up.
        before: the dataset before the reservation.
        after: the dataset with the reservation.
    """
    step: Amounts = tuple(-(-each // charge.steps) for each in charge.reserved)
    fitted, fits = (after.policy.admits(add(each.balance.taken, step)) for each in (before, after))
    return fitted and not fits


def _share_taken(dataset: Dataset) -> float:
    """Return the fraction of a dataset's budget that is spent or held, from 0 to 1."""
    taken = dataset.balance.taken
    return min(1.0, dataset.policy.share_of(taken)) if any(taken) else 0.0
