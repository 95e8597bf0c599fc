"""Middleware for every request: identifier, access log, metrics and rates."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakValueDictionary

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from accountant_service.api import error_responses
from accountant_service.api.client_networks import client_network
from accountant_service.operations.metrics import Metrics
from accountant_service.operations.problem import Problem
from accountant_service.operations.rate_limit import RateLimiter
from accountant_service.questions import problems

_LOG: Final = logging.getLogger("accountant_service.access")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_PROBE_DELAY: Final = 0.5  # seconds, at most: what waits for a probe gives up after a few
_VALID_MAX: Final = 4096  # credentials that are remembered as valid
_VALID_SECONDS: Final = 60.0  # they are remembered for so long: a key may be revoked
_WAITING_MAX: Final = 256  # requests of one address; behind a proxy connections do not bound them
_DIGEST_KEY: Final = secrets.token_bytes(32)
CONNECTION: Final = "accountant.connection"  # in a request's scope, where the server has put it


class AccessLog:
    """Middleware that gives each request an identifier, and measures, counts and logs it.

    Args:
        app: the application.
        metrics: counts the requests.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, and log it when it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identifier = _request_identifier(scope)
        notes = scope[error_responses.NOTES] = error_responses.RequestNotes(identifier)
        bind_contextvars(request_id=identifier)
        status, begun = 500, time.perf_counter()  # 500: the status after an exception

        async def send_with_identifier(message: Message) -> None:
            """Send a message, with the request identifier in the response headers."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[error_responses.REQUEST_ID] = identifier
            await send(message)

        try:
            with self._metrics.in_progress.track_inprogress():
                await self._app(scope, receive, send_with_identifier)
        except Exception:
            notes.code = problems.INTERNAL_ERROR
            raise
        finally:
            self._log_request(scope, status, time.perf_counter() - begun, notes.code)

    def _log_request(self, scope: Scope, status: int, seconds: float, code: str | None) -> None:
        """Measure, count and log a request that has ended."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "unknown")
        self._metrics.requests.labels(method, route, f"{status // 100}xx").observe(seconds)
        if code is not None:
            self._metrics.refusals.labels(code).inc()
        level = logging.WARNING if status >= 500 else logging.INFO
        if _LOG.isEnabledFor(level):
            fields = {"method": method, "route": route, "status": status}
            fields["milliseconds"] = round(1e3 * seconds, 3)
            _LOG.log(level, "request", extra=fields if code is None else fields | {"code": code})


def _request_identifier(scope: Scope) -> str:
    """Return the request identifier that the client sent; a new one if missing or malformed."""
    given = Headers(scope=scope).get(error_responses.REQUEST_ID, "")
    return given if _IDENTIFIER.fullmatch(given) else secrets.token_hex(16)


class AddressRateLimit:
    """Middleware that refuses requests above an address's rate limit, before reading bodies.

    Args:
        app: the application.
        limiter: counts the requests of each address.
    """

    def __init__(self, app: ASGIApp, limiter: RateLimiter) -> None:
        self._app, self._limiter = app, limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it with status 429."""
        app = self._app
        if scope["type"] == "http" and scope["path"] not in _PROBES:
            try:
                self._limiter.admit(_network_of(scope))
            except Problem as refusal:
                app = error_responses.error_response(scope, refusal)
        await app(scope, receive, send)


class Connection(Protocol):
    """A client's connection, as the server puts it into a request's scope.

    Attributes:
        left: set when the connection has ended.
    """

    left: asyncio.Event

    def is_gone(self) -> bool:
        """Return whether the client has left, even if the server has not noticed yet."""


class KeylessTurns:
    """Middleware that lets an address without a valid key begin requests at a bounded rate.

    What an address sends above that rate waits, also on the same connection, and is dropped when
    its client leaves. Requests of others, and with a key that was valid in the last minute, do not
    wait. While 256 requests of an address wait, further ones get status 429.

    Args:
        app: the application.
        rates: counts the requests of each address.
        metrics: counts the requests that wait, and those that are dropped.
        cookie: the name of the cookie that holds a session.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        rates: RateLimiter,
        metrics: Metrics,
        cookie: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._rates, self._metrics = app, rates, metrics
        self._cookie, self._clock = cookie, clock
        self._queues: WeakValueDictionary[str, _Queue] = WeakValueDictionary()
        self._valid_until: OrderedDict[bytes, float] = OrderedDict()  # by digest, the latest last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application when it is the turn of its address."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given, app = self._digest_credentials(scope), self._app
        if self._valid_until.get(given, 0.0) <= self._clock():
            try:
                if not await self._wait(scope):
                    self._metrics.requests_dropped.inc()
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    return
            except Problem as refusal:
                app = error_responses.error_response(scope, refusal)

        async def send_and_note(message: Message) -> None:
            """Send a message; keep in mind for a while that the credentials are valid."""
            if message["type"] == "http.response.start" and _has_key(scope):
                self._valid_until[given] = self._clock() + _VALID_SECONDS
                self._valid_until.move_to_end(given)
                if len(self._valid_until) > _VALID_MAX:
                    self._valid_until.popitem(last=False)
            await send(message)

        await app(scope, receive, send_and_note)

    async def _wait(self, scope: Scope) -> bool:
        """Wait for a turn; return whether the client is still there.

        Raises:
            Problem: too many requests of the address wait.
        """
        network, connection = _network_of(scope), scope.get(CONNECTION)
        queue = self._queues.setdefault(network, _Queue())
        if not queue.lock.locked() and self._rates.take(network):
            return True
        is_probe = scope["path"] in _PROBES
        if queue.waiting >= _WAITING_MAX and not is_probe:
            raise self._rates.refusal(_WAITING_MAX)
        ends = [asyncio.ensure_future(self._take_turn(queue, network, connection))]
        if connection is not None:
            ends.append(asyncio.ensure_future(connection.left.wait()))
        queue.waiting += 1
        try:
            with self._metrics.waiting.track_inprogress():
                await asyncio.wait(
                    ends,
                    timeout=_PROBE_DELAY if is_probe else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            queue.waiting -= 1
            for each in ends:
                each.cancel()
        return connection is None or not connection.is_gone()

    async def _take_turn(self, queue: _Queue, network: str, connection: Connection | None) -> None:
        """Wait for the requests before this one, and for the rate; not if the client has left."""
        async with queue.lock:
            if connection is not None and connection.is_gone():
                return
            try:
                await asyncio.sleep(self._rates.delay(network))
            except asyncio.CancelledError:  # or the next request would wait longer
                self._rates.give_back(network)
                raise

    def _digest_credentials(self, scope: Scope) -> bytes:
        """Return a digest of what a request identifies itself with."""
        request = HTTPConnection(scope)
        given = request.headers.get("authorization"), request.cookies.get(self._cookie)
        return hashlib.blake2b(repr(given).encode(), key=_DIGEST_KEY).digest()


class _Queue:
    """Waiting requests of an address."""

    def __init__(self) -> None:
        self.lock, self.waiting = asyncio.Lock(), 0


def _has_key(scope: Scope) -> bool:
    notes = scope.get(error_responses.NOTES)
    return notes is not None and notes.has_key


def _network_of(scope: Scope) -> str:
    return client_network(scope["client"][0]) if scope.get("client") else "unknown"
