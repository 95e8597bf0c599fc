"""Middleware for every request: identifier, access log, metrics and rates."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from typing import Final

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
    """Middleware that lets the answers to one address without a valid key leave at a bounded rate.

    What an address sends above that rate waits, also on the same connection. Requests of others,
    and all with a key, do not.

    Args:
        app: the application.
        rates: counts the requests of each address.
    """

    def __init__(self, app: ASGIApp, rates: RateLimiter) -> None:
        self._app, self._rates = app, rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application; its answer waits for the address's turn."""

        async def send_in_turn(message: Message) -> None:
            is_first = message["type"] == "http.response.start"
            if is_first and not scope[error_responses.NOTES].has_key:
                delay = self._rates.delay(_network_of(scope))
                await asyncio.sleep(min(delay, _PROBE_DELAY) if scope["path"] in _PROBES else delay)
            await send(message)

        await self._app(scope, receive, send_in_turn)


def _network_of(scope: Scope) -> str:
    return client_network(scope["client"][0]) if scope.get("client") else "unknown"
