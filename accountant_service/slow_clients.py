"""Closes connections whose client does not read its answer."""

from __future__ import annotations

import asyncio
from functools import cache

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from accountant_service.settings import Settings


class SlowClientProtocol(HttpToolsProtocol):
    """HTTP protocol that aborts connections whose client does not read the response.

    The transport pauses writing as soon as data waits to be sent, and resumes when all of it has
    been sent. A connection that stays paused for longer than `ACCOUNTANT_UNREAD_SECONDS_MAX` is
    aborted, which frees the data that waited.
    """

    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make the transport pause writing as soon as one byte is unsent."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        """Start the timeout after which the connection is aborted."""
        super().pause_writing()
        self._timeout = self.loop.call_later(_unread_seconds_max(), self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timeout, as the client has read all data."""
        self._cancel_timeout()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout, as the connection has ended."""
        self._cancel_timeout()
        super().connection_lost(exc)

    def _cancel_timeout(self) -> None:
        """Cancel the timeout if it is running."""
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None


@cache
def _unread_seconds_max() -> float:
    """Return the seconds after which a connection with an unread response is aborted."""
    return Settings().unread_seconds_max
