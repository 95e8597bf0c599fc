"""Limits of a connection, before the application sees a request."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from accountant_service.api.client_networks import client_network
from accountant_service.api.error_responses import NOTES, RequestNotes
from accountant_service.operations.metrics import Metrics
from accountant_service.operations.rate_limit import RateLimiter
from accountant_service.operations.settings import Settings
from accountant_service.server import connection_limits
from accountant_service.server.connection_limits import (
    LimitedConfig,
    LimitedProtocol,
    LimitedServer,
)
from accountant_service.server.middleware import KeylessTurns
from tests.support.databases import free_port

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
LIMIT = 32 << 10
REQUEST = HEAD + b"\r\n"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the number of bytes of the body and the names of the headers.

    At `/early` the body is not waited for.
    """
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    names = [name.decode() for name, _ in scope["headers"]]
    body = json.dumps({"size": size, "names": names}).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def listening(
    monkeypatch: pytest.MonkeyPatch, application: ASGIApp = application, **settings: Any
) -> Iterator[int]:
    """A server with these settings in this process; its port."""
    # private: uvicorn makes the protocol, which reads its settings from the environment once
    monkeypatch.setattr(connection_limits, "_settings", lambda: Settings(**settings))
    connection_limits._limited_network.cache_clear()
    port = free_port()
    config = LimitedConfig(
        application, port=port, http=LimitedProtocol, ws="none", lifespan="off", log_config=None,
        timeout_keep_alive=1,
    )  # fmt: skip
    server = LimitedServer(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with listening(monkeypatch, head_seconds_max=0.4) as found:
        yield found


def exchange(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send parts on a new connection, and return what arrives until it is closed or silent."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(0.25 if pause == 0 else 5)
        received = b""
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            while piece := client.recv(1 << 16):
                received += piece
        except TimeoutError:
            return received
        except OSError:
            pass
        return received + b"<closed>"


def fields(size: int, count: int = 1) -> bytes:
    """Headers of so many bytes in all."""
    return b"".join(b"X%d: %s\r\n" % (at, b"y" * (size // count)) for at in range(count))


def test_a_head_has_a_largest_size(port: int) -> None:
    for head in (HEAD, HEAD + fields(31_000), HEAD + fields(31_000, 98)):
        assert exchange(port, head + b"\r\n").startswith(b"HTTP/1.1 200"), len(head)
    for head in (
        HEAD + fields(LIMIT),
        HEAD + fields(1000, 100),
        HEAD + fields(20_000, 5000),
        b"GET /" + b"a" * LIMIT + b" HTTP/1.1\r\nHost: x\r\n",
        b"GET /?" + b"a" * 200_000,
    ):
        answer = exchange(port, head + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 431"), len(head)
        assert b'"head-too-large"' in answer
        assert answer.endswith(b"<closed>")
    assert exchange(port, HEAD + fields(20_000_000)).endswith(b"<closed>"), "no end of it is read"


def test_a_head_is_complete_in_time_or_closed(port: int) -> None:
    for begun in ([], [b"GET / HT"], [HEAD, b"X: "], [b"\r\n"] * 8, [b"a"] * 8):
        start = time.monotonic()
        assert exchange(port, *begun, pause=0.1).endswith(b"<closed>"), begun
        assert time.monotonic() - start < 1.5, begun
    start = time.monotonic()
    late = exchange(port, REQUEST, *[b"\r\n"] * 30, pause=0.1)
    assert late.endswith(b"<closed>")
    assert time.monotonic() - start < 2, "after an answer too"


@pytest.mark.parametrize(
    "request_text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"CONNECT host:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_other_requests_are_refused_with_a_problem(port: int, request_text: bytes) -> None:
    answer = exchange(port, request_text)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"invalid-http"' in answer
    assert answer.endswith(b"<closed>")


def test_http_1_0_needs_no_host(port: int) -> None:
    assert b"200 OK" in exchange(port, b"GET / HTTP/1.0\r\n\r\n")


def test_trailers_are_ignored_and_bounded(port: int) -> None:
    answer = exchange(port, CHUNKED + b"0\r\nX-Admin: yes\r\n\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["names"] == ["host", "transfer-encoding"]
    assert exchange(port, CHUNKED + b"0\r\n" + fields(1000, 200)) == b"<closed>"
    for endless in (b"0\r\nX: " + b"x" * (LIMIT + 8192), b"3;" + b"x" * (LIMIT + 8192)):
        assert exchange(port, CHUNKED + endless) == b"<closed>"
    assert b'"size": 9003' in exchange(port, CHUNKED + b"3\r\nabc\r\n" * 3000 + b"0\r\n\r\n")


def test_of_an_answered_request_little_more_is_read(port: int) -> None:
    early = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
    assert b"200 OK" in exchange(port, early + b"x" * 10_000)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(early)
        assert client.recv(1000)
        with pytest.raises(ConnectionError):
            client.sendall(b"x" * 90_000_000)


def test_few_requests_wait_on_one_connection(port: int) -> None:
    assert exchange(port, REQUEST * 4).count(b"200 OK") == 4
    assert exchange(port, REQUEST * 1000).count(b"200 OK") < 200


def test_an_address_has_a_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a further one the oldest idle one is closed; busy ones are kept."""
    settings = {"connections_per_address_max": 3, "head_seconds_max": 60}
    with listening(monkeypatch, **settings) as port, ExitStack() as stack:

        def connect(sent: bytes = b"") -> socket.socket:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.settimeout(5)
            client.sendall(sent)
            time.sleep(0.05)
            return client

        idle = [connect() for _ in range(3)]
        for _ in range(5):
            assert b"200 OK" in exchange(port, REQUEST)
        assert idle[0].recv(1) == b""
        busy = [connect(CHUNKED) for _ in range(3)]
        refused = exchange(port, REQUEST)
        assert refused.startswith(b"HTTP/1.1 503")
        assert b'"too-many-connections"' in refused
        busy[0].sendall(b"0\r\n\r\n")
        assert b"200 OK" in busy[0].recv(1000)
        assert b"200 OK" in exchange(port, REQUEST)


def turns(begun: list[str], rates: RateLimiter, **options: Any) -> KeylessTurns:
    """Turns for an application that notes the paths of requests; at `/ledger` keys are valid."""

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        scope[NOTES] = RequestNotes("a test", has_key=scope["path"] == "/ledger")
        await application(scope, receive, send)

    return KeylessTurns(noted, rates, Metrics(), "session", **options)


@pytest.mark.parametrize("key", [b"", b"Authorization: Bearer no-key\r\n"])
def test_a_request_whose_client_leaves_takes_no_turn_and_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, key: bytes
) -> None:
    """Two come at once, and one after two seconds: the 50 between have left, by all means.

    The server does not read that those left whose body is large, or that sent two requests.
    """
    begun: list[str] = []
    chunked = CHUNKED.replace(b"Host", key + b"Host")
    many = HEAD + key + b"Content-Length: 70000\r\n\r\n" + b"x" * 70000
    two = (HEAD + key + b"\r\n") * 2
    app = turns(begun, RateLimiter(0.5, 2))
    with listening(monkeypatch, app, connections_per_address_max=100) as port:
        for _ in range(2):
            assert b"200 OK" in exchange(port, REQUEST)
        start = time.monotonic()
        for sent in (
            chunked,
            many,
            two,
            chunked + b"0\r\n" + fields(1000, 200),
            chunked + b"3;" + b"x" * LIMIT,
        ):
            for _ in range(10):
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(sent)
        assert b"200 OK" in exchange(port, REQUEST, pause=0.01)
    assert time.monotonic() - start < 5
    assert len(begun) <= 4, "the first of them had its turn before it left"


def test_a_key_that_was_valid_in_the_last_minute_waits_for_no_turn() -> None:
    now = [0.0]
    rates = RateLimiter(5, 1, lambda: 0.0)  # each of these waits longer than the one before
    http = TestClient(turns([], rates, clock=lambda: now[0]))
    given = {"Authorization": "Bearer a-key"}, {"Cookie": "session=one; other=0"}

    def seconds(path: str, headers: dict[str, str]) -> float:
        begun = time.monotonic()
        assert http.get(path, headers=headers).is_success
        return time.monotonic() - begun

    for headers in given:
        http.get("/ledger", headers=headers)
        paths = "/ledger", "/calculator", "/ledger"
        assert max(seconds(path, headers) for path in paths) < 0.15
    assert seconds("/calculator", {"Cookie": "other=1; session=one"}) < 0.15
    assert seconds("/calculator", {"Cookie": "session=another"}) > 0.15
    now[0] = 61.0
    assert seconds("/calculator", given[0]) > 0.15, "it may have been revoked"
    assert seconds("/ledger", given[0]) > 0.35, "the first one shows that it is valid"
    assert seconds("/calculator", given[0]) < 0.15


def test_probes_that_give_up_waiting_make_nobody_wait_longer() -> None:
    """Four a second, at a rate of one: each waits half a second, and the turn of one second."""
    rates, begun = RateLimiter(1, 2), []

    async def ask(path: str) -> None:
        scope = {"type": "http", "path": path, "headers": [], "client": ("192.0.2.1", 1)}

        async def receive() -> Message:
            return {"type": "http.request"}

        async def send(_: Message) -> None:
            pass

        await app(scope, receive, send)

    async def run() -> float:
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(ask("/healthz"))
                await asyncio.sleep(0.25)
        start = time.monotonic()
        await ask("/v1/methods")
        return time.monotonic() - start

    app = turns(begun, rates)
    assert asyncio.run(run()) < 2.5, "it was 13 s"
    assert len(begun) == 17


def test_a_number_of_requests_of_an_address_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    app = turns([], RateLimiter(0.1, 1))
    settings = {"connections_per_address_max": 1000, "trusted_proxies": "127.0.0.0/8"}
    with listening(monkeypatch, app, **settings) as port, ExitStack() as stack:
        for _ in range(258):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(REQUEST)
        time.sleep(0.3)
        refused = exchange(port, REQUEST, pause=0.01)
        assert refused.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 2560" in refused.lower()
        assert b"200 OK" in exchange(port, REQUEST.replace(b"/ ", b"/readyz "), pause=0.01)


def test_a_warning_about_requests_is_logged_once_a_second() -> None:
    once = connection_limits._OncePerSecond()  # private: uvicorn's own logger uses it

    def is_logged(text: str) -> bool:
        return once.filter(logging.LogRecord("uvicorn.error", 30, "", 0, text, None, None))

    both = "Invalid HTTP request received.", "Unsupported upgrade request."
    assert [is_logged(each) for each in both * 2] == [True, True, False, False]
    assert [is_logged("Application startup complete.") for _ in range(2)] == [True, True]
    time.sleep(1.05)
    assert is_logged(both[0])


def test_connections_of_a_proxy_are_those_of_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"connections_per_address_max": 3, "trusted_proxies": "127.0.0.0/8"}
    with listening(monkeypatch, **settings) as port, ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(CHUNKED)
        assert b"200 OK" in exchange(port, REQUEST)


def test_a_client_counts_by_its_network() -> None:
    assert client_network("192.0.2.7") == client_network("::ffff:192.0.2.7") == "192.0.2.7"
    assert (
        client_network("2001:db8:1:2::1")
        == client_network("2001:db8:1:2:ffff::")
        == ("2001:db8:1:2::/64")
    )
    assert client_network("2001:db8:1:3::1") != client_network("2001:db8:1:2::1")
    assert client_network("testclient") == "testclient"
