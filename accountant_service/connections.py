"""Connections whose client does not read: cut off after a time, whatever was sent last."""

from __future__ import annotations

import asyncio
from functools import cache

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from accountant_service.settings import Settings


class PatientProtocol(HttpToolsProtocol):
    """HTTP for a client that must read what it asked for.

    The transport pauses writing as soon as something waits to be sent, and resumes when all of it
    has been. A connection that stays paused for longer than `ACCOUNTANT_UNREAD_SECONDS_MAX` is
    aborted, which frees what waited.
    """

    _cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pause writing from the first byte that waits."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        """Start to count."""
        super().pause_writing()
        self._cut = self.loop.call_later(_seconds(), self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read everything."""
        self._stop_counting()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_counting()
        super().connection_lost(exc)

    def _stop_counting(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None


@cache
def _seconds() -> float:
    return Settings().unread_seconds_max
