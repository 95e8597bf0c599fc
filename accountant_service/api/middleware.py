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
from contextlib import suppress
from typing import Final
from weakref import WeakValueDictionary

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from accountant_service.api import error_responses, problems
from accountant_service.api.client_networks import client_network
from accountant_service.api.rate_limit import RateLimiter
from accountant_service.metrics import Metrics

_LOG: Final = logging.getLogger("accountant_service.access")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_PROBE_DELAY: Final = 0.5  # seconds, at most: what waits for a probe gives up after a few
_VALID_MAX: Final = 4096  # credentials
_VALID_SECONDS: Final = 60.0  # a key may be revoked
_DIGEST_KEY: Final = secrets.token_bytes(32)
IS_GONE: Final = "accountant.is_gone"  # in a request's scope: says whether its client has left


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
            except problems.Problem as refusal:
                app = error_responses.error_response(scope, refusal)
        await app(scope, receive, send)


class KeylessTurns:
    """Middleware that lets an address without a valid key start requests at a bounded rate.

    What an address sends above that rate waits, also on the same connection, and is dropped if its
    client leaves meanwhile. Requests of others, and with a key that was valid lately, do not wait.

    Args:
        app: the application.
        rates: counts the requests of each address.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, app: ASGIApp, rates: RateLimiter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app, self._rates, self._clock = app, rates, clock
        self._queues: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._valid_until: OrderedDict[bytes, float] = OrderedDict()  # by digest, the latest last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application when it is the turn of its address."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _credentials_of(scope)
        if self._valid_until.get(given, 0.0) <= self._clock():
            seconds = _PROBE_DELAY if scope["path"] in _PROBES else None
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._take_turn(scope)
            if _is_gone(scope):
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
        try:
            await self._app(scope, receive, send)
        finally:
            if scope[error_responses.NOTES].has_key:
                self._note_valid(given)

    async def _take_turn(self, scope: Scope) -> None:
        """Wait until all before have had their turns, and for the rate; who is gone has none."""
        network = _network_of(scope)
        async with self._queues.setdefault(network, asyncio.Lock()):
            if not _is_gone(scope):
                await asyncio.sleep(self._rates.delay(network))

    def _note_valid(self, given: bytes) -> None:
        """Keep in mind for a while that credentials are valid."""
        self._valid_until[given] = self._clock() + _VALID_SECONDS
        self._valid_until.move_to_end(given)
        if len(self._valid_until) > _VALID_MAX:
            self._valid_until.popitem(last=False)


def _credentials_of(scope: Scope) -> bytes:
    """Return a digest of what a request identifies itself with."""
    given = [each for each in scope["headers"] if each[0] in {b"authorization", b"cookie"}]
    return hashlib.blake2b(repr(given).encode(), key=_DIGEST_KEY).digest()


def _is_gone(scope: Scope) -> bool:
    """Return whether the client has left, where the server says so."""
    is_gone = scope.get(IS_GONE)
    return is_gone is not None and is_gone()


def _network_of(scope: Scope) -> str:
    return client_network(scope["client"][0]) if scope.get("client") else "unknown"
