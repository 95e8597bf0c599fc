"""The server as a process: how it stops, several workers, and clients that hold on to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.databases import database
from tests.support.helpers import nightly
from tests.support.server import PROGRAMS, Server

pytestmark = pytest.mark.slow
WORKERS = pytest.mark.parametrize("workers", ["1", nightly("2")])
KINDS = pytest.mark.parametrize("kind", ["sqlite", nightly("postgresql")])
# a few seconds of work on one core: it must outlast the first look at the metrics on a busy machine
SLOW: dict[str, Any] = {
    "mechanism": {
        "kind": "composed",
        "mechanisms": [
            {"kind": "dp_sgd", "noise_multiplier": 0.5 + i / 50, "sample_rate": 1e-3, "steps": 999}
            for i in range(60)
        ],
    },
    "delta": 1e-7,
}


def accountant(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The program beside the server."""
    return subprocess.run(
        [PROGRAMS / "accountant", *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@contextmanager
def serving(
    folder: Path, *arguments: str, url: str | None = None, **settings: str
) -> Iterator[Server]:
    """A server with temporary files, and a ledger if not elsewhere, in a folder; it ends well."""
    (folder / "tmp").mkdir()
    settings["TMPDIR"] = str(folder / "tmp")
    server = Server(url or f"sqlite:///{folder}/ledger.db", folder, *arguments, **settings)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            assert server.stop() in (0, -signal.SIGTERM)
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that ends requests that take long to arrive and answers that nobody reads."""
    with serving(
        tmp_path_factory.mktemp("impatient"),
        ACCOUNTANT_BODY_SECONDS_MAX="1",
        ACCOUNTANT_UNREAD_SECONDS_MAX="1",
        ACCOUNTANT_BATCH_BYTES_MAX=str(1 << 27),
    ) as server:
        yield server


@WORKERS
def test_a_call_in_flight_is_finished_before_the_server_stops(workers: str, tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", workers) as server:
        answers: list[tuple[int, bytes]] = []
        call = threading.Thread(
            target=lambda: answers.append(server.ask("POST", "/v1/compare", SLOW))
        )
        call.start()
        while server.total("accountant_requests_in_progress") < 2:  # the scrape is one of them
            assert call.is_alive(), "it was answered before it was interrupted"
            time.sleep(0.01)
        assert server.stop() in (0, -signal.SIGTERM)
        call.join()
        assert answers[0][0] == 200
        assert json.loads(answers[0][1])["guarantees"]
        with pytest.raises(OSError, match="refused"):
            server.ask("GET", "/healthz")


def busy_workers(shared: Path) -> set[int]:
    """Return the process numbers of the workers that have answered something."""
    return {int(file.stem.split("_")[1]) for file in shared.glob("histogram_*.db")}


# uvicorn replaces a worker that does not answer for 5 s: on a busy machine none ever started
SLOW_START = """
import sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    time.sleep(6)
"""


@KINDS
def test_two_workers_keep_one_budget_and_their_metrics_add_up(kind: str, tmp_path: Path) -> None:
    """They may take long to start."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    with database(kind, tmp_path) as url:
        environment = {"ACCOUNTANT_DATABASE_URL": url}
        made = accountant("keys", "create", "--scope", "admin", **environment)
        settings = {"PYTHONPATH": str(tmp_path), "ACCOUNTANT_LOG_LEVEL": "info"}
        with serving(tmp_path, "--workers", "2", url=url, **settings) as server:
            assert "Started parent process" in server.log
            assert "died" not in server.log
            require_one_budget(server, made.stdout.strip())
            require_common_metrics(server, tmp_path / "tmp")
        assert accountant("ledger", "verify", **environment).returncode == 0


def require_one_budget(server: Server, token: str) -> None:
    """Clients race for a budget that only some of them can have."""

    def write(path: str, body: Any) -> int:
        """Make a write with a key of its own, and return the status."""
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": os.urandom(8).hex()}
        return server.ask("POST", path, body, headers)[0]

    budget = {"epsilon": 2.0, "delta": 1e-5}
    assert write("/v1/datasets", {"name": "d", "size": 9, "budget": budget}) == 201
    run = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 100}
    with ThreadPoolExecutor(8) as clients:
        plans = [("/v1/datasets/d/reservations", {"mechanism": run})] * 40
        answers = Counter(clients.map(lambda plan: write(*plan), plans))
    assert set(answers) == {201, 409}
    assert server.total("accountant_ledger_writes_total") == answers[201] + 1


def require_common_metrics(server: Server, temporary: Path) -> None:
    """Metrics are those of both workers, also of killed ones, and are removed at the end."""
    (shared,) = temporary.glob("accountant-metrics-*")
    before = server.total("accountant_request_seconds_count")
    busy = busy_workers(shared)
    stopped = busy if len(busy) == 1 else ()  # on an idle machine one may answer everything
    for worker in stopped:
        os.kill(worker, signal.SIGSTOP)
    for _ in range(20):
        assert server.ask("GET", "/v1/methods")[0] == 200
    for worker in stopped:
        os.kill(worker, signal.SIGCONT)
    assert len(busy_workers(shared)) == 2
    assert server.total("accountant_request_seconds_count") == before + 21
    for worker in busy_workers(shared):  # their counts are kept, and requests in progress are not
        os.kill(worker, signal.SIGKILL)
    server.wait()
    assert server.total("accountant_request_seconds_count") > before + 21
    assert server.total("accountant_requests_in_progress") == 1
    assert server.stop() == 0
    assert not shared.exists()


def test_a_database_that_is_away_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    away = "postgresql+psycopg://nobody@127.0.0.1:9/none"
    server = Server(away, tmp_path, "--workers", "2")
    assert server.process.wait(60) == 2
    assert "error: the database does not answer" in server.log
    assert "Traceback" not in server.log


def test_a_request_whose_body_never_arrives_is_ended(impatient: Server) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as client:
        client.sendall(b"POST /v1/epsilon HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        client.settimeout(10)
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_idle_and_slow_clients_do_not_block_the_server(impatient: Server) -> None:
    """A thousand connections, half of them sending a header byte by byte; others are answered."""

    async def hold(port: int, until: asyncio.Event, dribble: bool) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: " if dribble else b"")
        while not until.is_set():
            await asyncio.sleep(0.5)
            if dribble:
                writer.write(b"a")
        writer.close()

    async def besieged(server: Server) -> list[float]:
        done = asyncio.Event()
        holders = [asyncio.create_task(hold(server.port, done, i % 2 == 0)) for i in range(1000)]
        await asyncio.sleep(2)
        times = []
        for _ in range(50):
            begun = time.perf_counter()
            status, _ = await asyncio.to_thread(server.ask, "GET", "/readyz")
            assert status == 200
            times.append(time.perf_counter() - begun)
        done.set()
        await asyncio.gather(*holders)
        return times

    assert max(asyncio.run(besieged(impatient))) < 2


@pytest.mark.parametrize(
    ("trusted", "limited"),
    [
        nightly(None, True),
        nightly(" , ", True),
        nightly("192.0.2.7", True),
        ("192.0.2.7, 127.0.0.0/8", False),
    ],
)
def test_a_forwarded_address_counts_only_from_trusted_proxies(
    trusted: str | None, limited: bool, tmp_path: Path
) -> None:
    """Otherwise a client that names a new address in each request would have no limit."""
    settings = {"ACCOUNTANT_RATE_LIMIT": "0.001", "ACCOUNTANT_RATE_BURST": "3"}
    if trusted is not None:
        settings["ACCOUNTANT_TRUSTED_PROXIES"] = trusted
    with serving(tmp_path, FORWARDED_ALLOW_IPS="*", **settings) as server:
        statuses = [
            server.ask("GET", "/v1/methods", headers={"X-Forwarded-For": f"198.51.100.{at}"})[0]
            for at in range(6)
        ]
        assert statuses == [200] * 3 + [429 if limited else 200] * 3


# --- clients and computations that would hold it up

ENDLESS = {"sample_rate": 1e-8, "steps": 10**8, "epsilon": 0.5, "delta": 1e-10}
RUN = SLOW["mechanism"]["mechanisms"][0]
TRADE_OFF = {"path": "/v1/trade-off", "body": {"mechanism": RUN, "points": 1000}}


@contextmanager
def unread(server: Server, path: str, body: Any) -> Iterator[socket.socket]:
    """A client that asks and does not read."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        yield client


def computing(temporary: Path) -> list[int]:
    """The processes that the server's processes started for computations."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"accountant_service.computing.fork_server" not in (folder / "cmdline").read_bytes():
                continue
            environment = (folder / "environ").read_bytes()
            if f"TMPDIR={temporary}\0".encode() in environment:
                found.append(int(folder.name))
    return found


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


@WORKERS
def test_the_server_stops_in_time_with_requests_in_flight(workers: str, tmp_path: Path) -> None:
    settings = {"ACCOUNTANT_SHUTDOWN_SECONDS": "2", "ACCOUNTANT_COMPUTATION_SECONDS_MAX": "300"}
    with ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, "--workers", workers, **settings))
        for _ in range(4):
            stack.enter_context(unread(server, "/v1/noise-multiplier", ENDLESS))
        batch = {"requests": [TRADE_OFF] * 200}
        stack.enter_context(unread(server, "/v1/batch", batch))
        assert eventually(lambda: len(computing(tmp_path / "tmp")) >= 2), (
            "nothing is being computed"
        )
        time.sleep(1)
        begun = time.monotonic()
        assert server.stop() in (0, -signal.SIGTERM)
        assert time.monotonic() - begun < 8
        assert eventually(lambda: not computing(tmp_path / "tmp"))


def test_computations_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, ACCOUNTANT_COMPUTATION_SECONDS_MAX="2") as server:
        with unread(server, "/v1/noise-multiplier", ENDLESS):
            assert eventually(lambda: len(computing(tmp_path / "tmp")) >= 2)
            server.kill()
        assert eventually(lambda: not computing(tmp_path / "tmp"))


def test_a_client_that_does_not_read_is_cut_off(impatient: Server) -> None:
    with unread(impatient, "/v1/batch", {"requests": [TRADE_OFF] * 1000}) as client:
        assert eventually(lambda: impatient.total("accountant_requests_in_progress") == 2)
        assert eventually(lambda: impatient.total("accountant_requests_in_progress") == 1)
        client.settimeout(20)
        last = b""
        with suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                last = piece
        assert not last.endswith(b"0\r\n\r\n"), "it was sent to its end"
