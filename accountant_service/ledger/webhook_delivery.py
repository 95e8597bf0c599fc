"""Delivery of stored events to webhooks, in a thread for each receiver.

Of each webhook and dataset only the oldest event is posted, so that they arrive in order. A server
claims an event by moving its due time into the future, and deletes it when the receiver has
answered 2xx. If the server dies in between, the event is posted again: at least once, with the same
identifier. A receiver that is slow delays its own events and no other receiver's.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlsplit

from accountant_service.ledger import webhooks
from accountant_service.ledger.background_work import BackgroundWork
from accountant_service.ledger.repository import Repository, now
from accountant_service.ledger.webhooks import Event, Webhook
from accountant_service.version import __version__

_ATTEMPT_SECONDS: Final = 10.0  # from the connection to the status of the answer
_CLAIM_SECONDS: Final = 60  # longer than an attempt: after it another server may try
_PAUSE_SECONDS: Final = 1.0
_AWAY_SECONDS: Final = 10.0  # while the database is away
_EVENTS_AT_ONCE: Final = 20  # of one webhook
_RECEIVERS_AT_ONCE: Final = 16
_ERROR_LENGTH_MAX: Final = 200


def post_event(webhook: Webhook, event: Event, seconds: float = _ATTEMPT_SECONDS) -> str:
    """Post an event to its webhook; return why that failed, or an empty text.

    No redirect is followed and no proxy used: the address that was set is the one that is called.
    Of the answer only the status is read.

    Args:
        webhook: the receiver.
        event: what it is told.
        seconds: until the status must have arrived, whatever the receiver sends meanwhile.
    """
    at, address = int(time.time()), urlsplit(webhook.url)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"privacy-accountant/{__version__}",
        "Connection": "close",
        webhooks.EVENT_HEADER: event.identifier,
        webhooks.SIGNATURE_HEADER: webhooks.sign(webhook.secret, at, event.body),
    }
    path = (address.path or "/") + (f"?{address.query}" if address.query else "")
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    failure = ""
    try:
        connection = kind(address.netloc, timeout=seconds)
        with _ended_after(connection, seconds) as has_ended:
            try:
                connection.request("POST", path, event.body.encode(), headers)
                status = connection.getresponse().status
                failure = "" if 200 <= status < 300 else f"the answer is {status}"
            finally:
                if has_ended.is_set():
                    raise TimeoutError(f"it was not complete within {seconds:g} s")
    except (OSError, HTTPException, ValueError) as error:
        failure = f"no answer: {error}"[:_ERROR_LENGTH_MAX]
    return failure


@contextmanager
def _ended_after(connection: HTTPConnection, seconds: float) -> Iterator[threading.Event]:
    """Context manager that ends a connection after some seconds, even within a read.

    The time limit of a socket is one for each read, which a receiver that sends a byte now and then
    never exceeds.
    """
    has_ended = threading.Event()

    def end() -> None:
        """End the connection, so that a thread that reads from it gets an error."""
        has_ended.set()
        with suppress(OSError):  # it is not connected
            if connection.sock is not None:
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield has_ended
    finally:
        timer.cancel()
        connection.close()


class WebhookDelivery:
    """Threads that post stored events to their webhooks: one looks, and each receiver has one.

    Args:
        repository: the ledger's.
        on_attempt: called after each attempt, with whether it succeeded.
    """

    def __init__(self, repository: Repository, on_attempt: Callable[[bool], None]) -> None:
        self._repository, self._on_attempt = repository, on_attempt
        self._work = BackgroundWork(
            "webhooks", self._deliver, delay=_PAUSE_SECONDS, pause_after_failure=_AWAY_SECONDS
        )
        self._posting: dict[str, Future[None]] = {}  # by webhook

    def start(self) -> None:
        """Start the thread."""
        self._work.start()

    def close(self) -> None:
        """Stop the threads after the events that they are posting, if any."""
        self._work.close()

    def deliver_due(self) -> int:
        """Post the events that are due, and wait until it is done; return their number.

        Raises:
            DatabaseAwayError: the database does not answer.
        """
        count = self._begin_due()
        begun, self._posting = self._posting, {}
        for post in begun.values():
            post.result()
        return count

    def _begin_due(self) -> int:
        """Begin to post the events that are due, to each receiver that has no post in progress.

        Raises:
            Exception: an earlier post could not be recorded, for instance because the database is
                away. Other receivers' posts have begun.
        """
        ended = [name for name, post in self._posting.items() if post.done()]
        errors = [self._posting.pop(name).exception() for name in ended]
        count = 0
        with self._repository.reading() as reading:
            for hook in reading.list_webhooks():
                if hook.identifier in self._posting or len(self._posting) >= _RECEIVERS_AT_ONCE:
                    continue
                due = reading.list_due_events(hook.identifier, now(), _EVENTS_AT_ONCE)
                if due:
                    self._posting[hook.identifier] = _run_in_thread(self._post_all, hook, due)
                count += len(due)
        for error in errors:
            if error is not None:
                raise error
        return count

    def _post_all(self, webhook: Webhook, due: list[Event]) -> None:
        """Post a webhook's due events one after the other, until none is left or one fails."""
        while due:
            for event in due:
                if self._work.is_stopping:
                    return
                if self._claim(event) and not self._post_claimed(webhook, event):
                    return
            with self._repository.reading() as reading:
                due = reading.list_due_events(webhook.identifier, now(), _EVENTS_AT_ONCE)

    def _claim(self, event: Event) -> bool:
        """Claim an event for this server for a time; return False if another server has it."""
        with self._repository.transaction() as transaction:
            return transaction.claim_event(event, now() + _CLAIM_SECONDS * 1_000_000)

    def _post_claimed(self, webhook: Webhook, event: Event) -> bool:
        """Post a claimed event, and store whether that succeeded; return it."""
        failure = post_event(webhook, event)
        with self._repository.transaction() as transaction:
            if failure:
                pause = webhooks.compute_pause(event.attempts + 1)
                transaction.postpone_event(event, now() + pause * 1_000_000, failure)
            else:
                transaction.delete_event(event)
        self._on_attempt(not failure)
        return not failure

    def _deliver(self) -> float:
        """Begin to post the events that are due; return the seconds until the next try."""
        self._begin_due()
        return _PAUSE_SECONDS


def _run_in_thread(call: Callable[..., None], *arguments: Any) -> Future[None]:
    """Run a call in a thread that does not keep the program from ending; return its outcome."""
    outcome: Future[None] = Future()

    def run() -> None:
        """Run the call."""
        try:
            call(*arguments)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name="webhook", daemon=True).start()
    return outcome
