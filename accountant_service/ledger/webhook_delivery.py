"""Delivery of stored events to webhooks, in a background thread.

Of each webhook and dataset only the oldest event is posted, so that they arrive in order. A server
claims an event by moving its due time into the future, and deletes it when the receiver has
answered 2xx. If the server dies in between, the event is posted again: at least once, with the same
identifier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, Final
from urllib import error as http_errors
from urllib import request as http

from accountant_service.ledger import webhooks
from accountant_service.ledger.background_work import BackgroundWork
from accountant_service.ledger.repository import Repository, now
from accountant_service.ledger.webhooks import Event, Webhook
from accountant_service.version import __version__

_TIMEOUT_SECONDS: Final = 10.0
_CLAIM_SECONDS: Final = 60  # longer than an attempt: after it another server may try
_PAUSE_SECONDS: Final = 1.0
_AWAY_SECONDS: Final = 10.0  # while the database is away
_EVENTS_AT_ONCE: Final = 20
_ERROR_LENGTH_MAX: Final = 200


class _NoRedirects(http.HTTPRedirectHandler):
    """URL handler that refuses redirects, so that events go only to the configured address."""

    def redirect_request(self, *_: Any) -> None:
        """Return None, which makes a redirect an error."""


# no proxies: the address that was set is the one that is called
_OPENER: Final = http.build_opener(_NoRedirects(), http.ProxyHandler({}))


def post_event(webhook: Webhook, event: Event) -> str:
    """Post an event to its webhook; return why that failed, or an empty text."""
    at = int(time.time())
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"privacy-accountant/{__version__}",
        webhooks.EVENT_HEADER: event.identifier,
        webhooks.SIGNATURE_HEADER: webhooks.sign(webhook.secret, at, event.body),
    }
    request = http.Request(webhook.url, event.body.encode(), headers, method="POST")
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_SECONDS):
            return ""
    except http_errors.HTTPError as error:
        error.close()
        return f"the answer is {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"no answer: {reason}"[:_ERROR_LENGTH_MAX]


class WebhookDelivery:
    """A thread that posts stored events to their webhooks.

    Args:
        repository: the ledger's.
        on_attempt: called after each attempt, with whether it succeeded.
    """

    def __init__(self, repository: Repository, on_attempt: Callable[[bool], None]) -> None:
        self._repository, self._on_attempt = repository, on_attempt
        self._work = BackgroundWork(
            "webhooks", self._deliver, delay=_PAUSE_SECONDS, pause_after_failure=_AWAY_SECONDS
        )

    def start(self) -> None:
        """Start the thread."""
        self._work.start()

    def close(self) -> None:
        """Stop the thread after its current attempt, if any."""
        self._work.close()

    def deliver_due(self) -> int:
        """Attempt to post the events that are due; return their number."""
        with self._repository.reading() as reading:
            hooks = {each.identifier: each for each in reading.list_webhooks()}
            due = reading.list_due_events(now(), _EVENTS_AT_ONCE) if hooks else []
        for event in due:
            if self._work.is_stopping:
                break
            if event.webhook in hooks and self._claim(event):
                self._attempt(hooks[event.webhook], event)
        return len(due)

    def _claim(self, event: Event) -> bool:
        """Claim an event for this server for a time; return False if another server has it."""
        with self._repository.transaction() as transaction:
            return transaction.claim_event(event, now() + _CLAIM_SECONDS * 1_000_000)

    def _attempt(self, webhook: Webhook, event: Event) -> None:
        """Post a claimed event, and store whether that succeeded."""
        failure = post_event(webhook, event)
        with self._repository.transaction() as transaction:
            if failure:
                pause = webhooks.compute_pause(event.attempts + 1)
                transaction.postpone_event(event, now() + pause * 1_000_000, failure)
            else:
                transaction.delete_event(event)
        self._on_attempt(not failure)

    def _deliver(self) -> float:
        """Attempt to post the events that are due; return the seconds until the next attempt."""
        return 0.0 if self.deliver_due() else _PAUSE_SECONDS
