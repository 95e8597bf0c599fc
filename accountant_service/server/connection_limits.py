"""Limits on connections that act before the application sees a request.

uvicorn's parser keeps whatever a client sends: a URL or a header without end, heads that are never
completed, any number of connections. Here each is bounded, and a client that does not read its
answer is disconnected. Decision 0022 says why this stands beside uvicorn.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import select
import socket
import time
from functools import cache, lru_cache
from ipaddress import ip_address, ip_network
from typing import Any, Final, NoReturn
from weakref import WeakSet

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from accountant_service.api import error_responses
from accountant_service.api.client_networks import client_network
from accountant_service.operations.settings import Settings
from accountant_service.questions import problems
from accountant_service.server.middleware import CONNECTION

_SLICE_BYTES: Final = 4096  # parsed at once, so that limits act within a large packet
_HEADERS_MAX: Final = 100
_PIPELINED_MAX: Final = 4  # requests of one connection that wait for the answer to another
_VERSIONS: Final = ("1.0", "1.1")
# after a refusal, so that the client can read it: a socket with unread data would be reset
_DRAINED_BYTES_MAX: Final = 1 << 18
_DRAIN_SECONDS: Final = 1.0
# data that the system keeps for a connection in each direction; by itself it would keep megabytes
_SYSTEM_BUFFER_BYTES: Final = 1 << 17
# as on Ethernet: with the segments of the loopback device a client on this machine has sent
# megabytes before the server can refuse the first of them
_SEGMENT_BYTES_MAX: Final = 1460
# beginnings of uvicorn's warnings about requests: strangers can cause any number of them
_WARNINGS: Final = ("Invalid HTTP request", "Unsupported upgrade", "No supported WebSocket")
_LOGGED_EVERY_SECONDS: Final = 1.0

# what is refused before the application sees it: by code the status, the title and the detail
REFUSALS: Final = {
    "head-too-large": (
        431,
        "The request's head is too large",
        "the request line and the headers together may have ACCOUNTANT_HEAD_BYTES_MAX bytes, and "
        f"{_HEADERS_MAX} headers",
    ),
    "invalid-http": (
        400,
        "This is not a valid HTTP request",
        "send HTTP/1.1 with one Host header, or HTTP/1.0; headers, lengths and chunks must be "
        f"well-formed, and at most {_PIPELINED_MAX} requests may wait on one connection",
    ),
    "too-many-connections": (
        503,
        "The client's address has too many connections",
        "each connection of this address has a request in progress; use fewer at a time",
    ),
}


def _encode_refusal(code: str) -> bytes:
    """Return the whole answer to a request that the application does not see."""
    status, title, detail = REFUSALS[code]
    body = json.dumps(problems.document(status, code, title, detail)).encode()
    fields = {"content-type": error_responses.MEDIA_TYPE, "content-length": str(len(body))}
    fields |= {"connection": "close"} | ({"retry-after": "2"} if status == 503 else {})
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return STATUS_LINE[status] + head.encode() + b"\r\n" + body


_HEAD_TOO_LARGE, _INVALID_HTTP, _TOO_MANY_CONNECTIONS = map(_encode_refusal, REFUSALS)


class LimitedConfig(uvicorn.Config):
    """uvicorn's configuration, with limits on the sockets that several workers share."""

    def bind_socket(self) -> socket.socket:
        """Return the bound socket."""
        bound = super().bind_socket()
        _limit_buffers(bound)
        return bound


class LimitedServer(uvicorn.Server):
    """uvicorn's server, with limits on the sockets that it opens itself."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets."""
        logging.getLogger("uvicorn.error").addFilter(_OncePerSecond())
        await super().startup(sockets)
        for server in self.servers:
            for each in server.sockets:
                _limit_buffers(each)


class _OncePerSecond(logging.Filter):
    """Passes each of uvicorn's warnings about unusable requests at most once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        kind = next((each for each in _WARNINGS if str(record.msg).startswith(each)), None)
        if kind is None:
            return True
        now = time.monotonic()
        if now - self._passed_at.get(kind, -math.inf) < _LOGGED_EVERY_SECONDS:
            return False
        self._passed_at[kind] = now
        return True


def _limit_buffers(listening: Any) -> None:
    """Limit the data that the system keeps for each connection that a socket accepts."""
    for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listening.setsockopt(socket.SOL_SOCKET, buffer, _SYSTEM_BUFFER_BYTES)
    if hasattr(socket, "TCP_MAXSEG"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES_MAX)


class _RefusedError(Exception):
    """The parser must stop: this request is refused."""


class LimitedProtocol(HttpToolsProtocol):
    """HTTP protocol with limits on heads, trailers, connections and unread answers.

    * A head (request line and headers) has at most `ACCOUNTANT_HEAD_BYTES_MAX` bytes and 100
      headers: 431. Trailers are ignored. A connection with more trailers, or with so many bytes
      between chunks, is closed.
    * Of a request that is answered before it is complete, at most `ACCOUNTANT_BODY_BYTES_MAX`
      more bytes are read.
    * Whenever no request is in progress, a head is complete within `ACCOUNTANT_HEAD_SECONDS_MAX`,
      or the connection is closed.
    * HTTP/1.1 needs one Host header; versions other than 1.0 and 1.1 are refused: 400.
    * One address has at most `ACCOUNTANT_CONNECTIONS_PER_ADDRESS_MAX` connections. For a further
      one its oldest connection without a request is closed; if all have one, the answer is 503.
    * The transport pauses writing as soon as data waits to be sent, and resumes when all of it has
      been sent. A connection that stays paused for longer than `ACCOUNTANT_UNREAD_SECONDS_MAX` is
      aborted, which frees the data that waited.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _network: str | None = None
    _bytes_between = 0  # received since the last head, part of a body or end of a request
    _has_progressed = False  # whether one of these was in the slice that is being parsed
    _is_body = False  # whether the head of the current request is complete
    _trailers = 0  # of the current request
    _unwanted_bytes = 0  # of requests that were answered before they were complete
    _refusal: bytes | None = None  # what to answer when the parser stops
    _drained_bytes: int | None = None  # discarded since a refusal

    # --- connections

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cycles: WeakSet[RequestResponseCycle] = WeakSet()  # of requests in progress
        self.left = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and make the transport pause writing once a byte is unsent."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport.set_write_buffer_limits(high=0)
        self._start_head_timer()
        self._network = _limited_network(self.client[0] if self.client else None)
        if self._network is not None and not _CONNECTIONS.admit(self._network, self):
            self.send_400_response(_TOO_MANY_CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, as the connection has ended."""
        self._stop_head_timer()
        self._stop_unread_timer()
        if self._network is not None:
            _CONNECTIONS.remove(self._network, self)
        self.left.set()
        # uvicorn marks the last request only; an answer to an earlier one would raise an exception
        for each in self._cycles:
            each.disconnected = each.disconnected or not each.response_complete
            each.message_event.set()
        super().connection_lost(exc)

    @property
    def is_busy(self) -> bool:
        """True while a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def is_gone(self) -> bool:
        """Return whether the client has left.

        While reading is paused, the end of the connection is not read: the socket is asked.
        """
        if self.transport.is_closing():
            return True
        connected = self.transport.get_extra_info("socket")
        if connected is None or not hasattr(select, "POLLRDHUP"):
            return False
        poll = select.poll()
        poll.register(connected.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    # --- requests

    def data_received(self, data: bytes) -> None:
        """Parse data in slices, and refuse a head or trailers that are too large."""
        limit = _settings().head_bytes_max
        if self._is_body and not self.is_busy:  # nobody reads the rest of the request
            self._unwanted_bytes += len(data)
            if self._unwanted_bytes > _settings().body_bytes_max:
                self.transport.abort()
                return
        for start in range(0, len(data), _SLICE_BYTES):
            if self._drained_bytes is not None:
                self._drain(len(data) - start)
                return
            piece = data[start : start + _SLICE_BYTES]
            self._has_progressed = False
            super().data_received(piece)
            self._bytes_between = 0 if self._has_progressed else self._bytes_between + len(piece)
            if self._bytes_between > limit and self._drained_bytes is None:
                self.send_400_response(_HEAD_TOO_LARGE)
        if not self.is_busy and self._head_timer is None and self._drained_bytes is None:
            self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; ignore a trailer, which is no part of the request that began."""
        if self._is_body:
            self._trailers += 1
            if self._trailers > _HEADERS_MAX:
                self._refuse(_HEAD_TOO_LARGE)
            return
        if len(self.headers) == _HEADERS_MAX:
            self._refuse(_HEAD_TOO_LARGE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start a request whose head keeps the limits."""
        self._has_progressed = self._is_body = True
        self._trailers = 0
        if self._bytes_between + _SLICE_BYTES > _settings().head_bytes_max:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > _settings().head_bytes_max:
                self._refuse(_HEAD_TOO_LARGE)
        version = self.parser.get_http_version()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if version not in _VERSIONS or hosts > 1 or (version == "1.1" and not hosts):
            self._refuse(_INVALID_HTTP)
        if len(self.pipeline) >= _PIPELINED_MAX:
            self._refuse(_INVALID_HTTP)
        self._stop_head_timer()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._cycles.add(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the next head."""
        self._has_progressed, self._is_body = True, False
        super().on_message_complete()

    # --- refusals

    def _refuse(self, answer: bytes) -> NoReturn:
        """Stop the parser, within one of its callbacks, and answer with a problem."""
        self._refusal = answer
        raise _RefusedError

    def send_400_response(self, msg: str | bytes) -> None:
        """Answer with a problem and close the connection once the client may have read it.

        Args:
            msg: the answer; from uvicorn a text, if the parser has stopped.
        """
        if isinstance(msg, str):
            msg = self._refusal or _INVALID_HTTP
        self._stop_head_timer()
        self._drained_bytes = 0
        if self.is_busy:  # it would be read as the answer to the request in progress
            self.transport.close()
            return
        self.transport.write(msg)
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(_DRAIN_SECONDS, self.transport.abort)

    def _drain(self, size: int) -> None:
        """Discard data that a client goes on sending after a refusal; abort if it is too much."""
        self._drained_bytes = (self._drained_bytes or 0) + size
        if self._drained_bytes > _DRAINED_BYTES_MAX:
            self.transport.abort()

    # --- timers

    def _start_head_timer(self) -> None:
        """Close the connection if no head is complete in time."""
        self._head_timer = self.loop.call_later(_settings().head_seconds_max, self._end_head)

    def _stop_head_timer(self) -> None:
        """Stop the time limit of a head, if it is running."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_head(self) -> None:
        """Close a connection whose head is late."""
        self._head_timer = None
        self.transport.close()

    def pause_writing(self) -> None:
        """Start the timeout after which the connection is aborted."""
        super().pause_writing()
        seconds = _settings().unread_seconds_max
        self._unread_timer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timeout, as the client has read all data."""
        self._stop_unread_timer()
        super().resume_writing()

    def _stop_unread_timer(self) -> None:
        """Stop the timeout of an unread answer, if it is running."""
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


class _Connections:
    """The open connections of this process, by network, the oldest first."""

    def __init__(self) -> None:
        self._open: dict[str, dict[LimitedProtocol, None]] = {}

    def admit(self, network: str, connection: LimitedProtocol) -> bool:
        """Add a connection; if its network has too many, close one that has no request.

        Returns:
            False if each of them has one, so that the new connection must be refused.
        """
        known = self._open.setdefault(network, {})
        known[connection] = None
        if len(known) <= _settings().connections_per_address_max:
            return True
        idle = next((each for each in known if not each.is_busy and each is not connection), None)
        if idle is None:
            return False
        self.remove(network, idle)
        idle.transport.abort()
        return True

    def remove(self, network: str, connection: LimitedProtocol) -> None:
        """Forget a connection that has ended, if it is known."""
        known = self._open.get(network, {})
        known.pop(connection, None)
        if not known:
            self._open.pop(network, None)


_CONNECTIONS: Final = _Connections()


@lru_cache(maxsize=4096)
def _limited_network(address: str | None) -> str | None:
    """Return the network whose connections are counted; None for proxies and Unix sockets."""
    if address is None:
        return None
    proxies = [ip_network(each) for each in _settings().trusted_proxies.split(",") if each]
    is_proxy = any(ip_address(address) in each for each in proxies)
    return None if is_proxy else client_network(address)


@cache
def _settings() -> Settings:
    """Return the settings, which uvicorn has no way to pass to a protocol."""
    return Settings()
