"""Around every request: an identifier, its time, one line in the log, and how often it may come."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from accountant_service.api import problems
from accountant_service.api.limits import Limiter
from accountant_service.metrics import Metrics

_LOG: Final = logging.getLogger("accountant_service.access")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})


class Access:
    """Gives each request an identifier, and counts, times and logs it.

    Args:
        app: what answers.
        metrics: where it is counted.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identifier = _identifier(scope)
        notes = scope[problems.NOTES] = problems.Notes(identifier)
        bind_contextvars(request_id=identifier)
        status, begun = 500, time.perf_counter()  # 500: what an exception is answered with

        async def identified(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[problems.REQUEST_ID] = identifier
            await send(message)

        try:
            with self._metrics.in_progress.track_inprogress():
                await self._app(scope, receive, identified)
        except Exception:
            notes.code = problems.INTERNAL_ERROR
            raise
        finally:
            self._note(scope, status, time.perf_counter() - begun, notes.code)

    def _note(self, scope: Scope, status: int, seconds: float, code: str | None) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "unknown")
        self._metrics.requests.labels(method, route, f"{status // 100}xx").observe(seconds)
        if code is not None:
            self._metrics.refusals.labels(code).inc()
        level = logging.WARNING if status >= 500 else logging.INFO
        if _LOG.isEnabledFor(level):
            told = {"method": method, "route": route, "status": status}
            told["milliseconds"] = round(1e3 * seconds, 3)
            _LOG.log(level, "request", extra=told if code is None else told | {"code": code})


def _identifier(scope: Scope) -> str:
    """The client's own, if it is one; else a new one."""
    given = Headers(scope=scope).get(problems.REQUEST_ID, "")
    return given if _IDENTIFIER.fullmatch(given) else secrets.token_hex(16)


class AddressLimit:
    """Refuses an address that asks too often, before anything is read.

    Args:
        app: what answers.
        limiter: how often is too often.
    """

    def __init__(self, app: ASGIApp, limiter: Limiter) -> None:
        self._app, self._limiter = app, limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        app = self._app
        if scope["type"] == "http" and scope["path"] not in _PROBES:
            try:
                self._limiter.admit(scope["client"][0] if scope.get("client") else "unknown")
            except problems.Problem as refusal:
                app = problems.refusal(scope, refusal)
        await app(scope, receive, send)
