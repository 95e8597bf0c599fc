"""The server as a process: how it stops, several workers, and clients that hold on to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.databases import database, free_port

PROGRAMS = Path(sys.executable).parent
KINDS = pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)]
)
NOTHING: Mapping[str, str] = {}
# about two seconds of work on one core
SLOW: dict[str, Any] = {
    "mechanism": {
        "kind": "composed",
        "mechanisms": [
            {"kind": "dp_sgd", "noise_multiplier": 0.5 + i / 50, "sample_rate": 1e-3, "steps": 999}
            for i in range(40)
        ],
    },
    "delta": 1e-7,
}


class Server:
    """A server process, its log and the folder of its temporary files."""

    def __init__(self, folder: Path, *arguments: str, **settings: str) -> None:
        self.port, self.temporary, self._log = free_port(), folder / "tmp", folder / "log"
        self.temporary.mkdir()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [PROGRAMS / "accountant", "serve", "--port", str(self.port), *arguments],
                cwd=folder,
                env=os.environ | {"TMPDIR": str(self.temporary)} | settings,
                stderr=log,
            )

    def wait(self) -> None:
        """Until it is ready."""
        for _ in range(1200):
            assert self.process.poll() is None, self.log
            try:
                if self.ask("GET", "/readyz")[0] == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(self.log)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = NOTHING
    ) -> tuple[int, bytes]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def total(self, metric: str) -> float:
        """A metric, added up over its labels."""
        _, text = self.ask("GET", "/metrics")
        families = text_string_to_metric_families(text.decode())
        return sum(s.value for family in families for s in family.samples if s.name == metric)

    def stop(self) -> int:
        """Ask it to stop; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    @property
    def log(self) -> str:
        """The server's log so far."""
        return self._log.read_text()


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
def serving(folder: Path, *arguments: str, **settings: str) -> Iterator[Server]:
    server = Server(folder, *arguments, **settings)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            assert server.stop() in (0, -signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
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
    """The process numbers of the workers that have answered something."""
    return {int(file.stem.split("_")[1]) for file in shared.glob("histogram_*.db")}


@pytest.mark.slow
@KINDS
def test_two_workers_serve_and_their_metrics_add_up(kind: str, tmp_path: Path) -> None:
    with (
        database(kind, tmp_path) as url,
        serving(tmp_path, "--workers", "2", ACCOUNTANT_DATABASE_URL=url) as server,
    ):
        shared = list(server.temporary.glob("accountant-metrics-*"))
        assert len(shared) == 1
        before = server.total("accountant_request_seconds_count")
        busy = busy_workers(shared[0])
        idle_too = len(busy) == 1  # on an idle machine one worker may answer everything
        for worker in busy if idle_too else ():
            os.kill(worker, signal.SIGSTOP)
        for _ in range(20):
            assert server.ask("GET", "/v1/methods")[0] == 200
        for worker in busy if idle_too else ():
            os.kill(worker, signal.SIGCONT)
        assert len(busy_workers(shared[0])) == 2
        assert server.total("accountant_request_seconds_count") == before + 21
        for worker in busy_workers(
            shared[0]
        ):  # what it had in progress is forgotten, its counts kept
            os.kill(worker, signal.SIGKILL)
        server.wait()
        assert server.total("accountant_request_seconds_count") > before + 21
        assert server.total("accountant_requests_in_progress") == 1
        assert server.stop() == 0
        assert not list(server.temporary.glob("accountant-metrics-*"))
        assert "Traceback" not in server.log


@pytest.mark.slow
@KINDS
def test_two_workers_keep_one_budget(kind: str, tmp_path: Path) -> None:
    """Clients race for a budget that only some of them can have."""
    with database(kind, tmp_path) as url:
        environment = {"ACCOUNTANT_DATABASE_URL": url}
        made = accountant("keys", "create", "--scope", "admin", **environment)
        key = {"Authorization": f"Bearer {made.stdout.strip()}"}
        with serving(tmp_path, "--workers", "2", **environment) as server:

            def write(path: str, body: Any) -> int:
                once = {"Idempotency-Key": os.urandom(8).hex()}
                return server.ask("POST", path, body, key | once)[0]

            budget = {"epsilon": 2.0, "delta": 1e-5}
            assert write("/v1/datasets", {"name": "d", "size": 9, "budget": budget}) == 201
            run = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 100}
            with ThreadPoolExecutor(8) as clients:
                plans = [("/v1/datasets/d/reservations", {"mechanism": run})] * 40
                answers = Counter(clients.map(lambda plan: write(*plan), plans))
            assert set(answers) == {201, 409}
            assert server.total("accountant_ledger_writes_total") == answers[201] + 1
        assert accountant("ledger", "verify", **environment).returncode == 0


@pytest.mark.slow
def test_a_database_that_is_away_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    away = "postgresql+psycopg://nobody@127.0.0.1:9/none"
    server = Server(tmp_path, "--workers", "2", ACCOUNTANT_DATABASE_URL=away)
    assert server.process.wait(60) == 2
    assert "error: the database does not answer" in server.log
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_request_whose_body_never_arrives_is_ended(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ACCOUNTANT_BODY_SECONDS_MAX="0.3") as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        client.sendall(b"POST /v1/epsilon HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        client.settimeout(10)
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.slow
def test_idle_and_slow_clients_do_not_block_the_server(tmp_path: Path) -> None:
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

    with serving(tmp_path) as server:
        assert max(asyncio.run(besieged(server))) < 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trusted", "limited"),
    [({}, True), ({"ACCOUNTANT_TRUSTED_PROXIES": " , "}, True),
     ({"ACCOUNTANT_TRUSTED_PROXIES": "192.0.2.7"}, True),
     ({"ACCOUNTANT_TRUSTED_PROXIES": "192.0.2.7, 127.0.0.0/8"}, False)],
)  # fmt: skip
def test_a_forwarded_address_counts_only_from_trusted_proxies(
    trusted: dict[str, str], limited: bool, tmp_path: Path
) -> None:
    """Otherwise a client that names a new address in each request would have no limit."""
    settings = {"ACCOUNTANT_RATE_LIMIT": "0.001", "ACCOUNTANT_RATE_BURST": "3"}
    with serving(tmp_path, FORWARDED_ALLOW_IPS="*", **settings, **trusted) as server:
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


def computing(server: Server) -> list[int]:
    """The processes that the server's processes started for computations."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"accountant_service.fork_server" not in (folder / "cmdline").read_bytes():
                continue
            environment = (folder / "environ").read_bytes()
            if f"TMPDIR={server.temporary}".encode() in environment:
                found.append(int(folder.name))
    return found


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_server_stops_in_time_with_requests_in_flight(workers: str, tmp_path: Path) -> None:
    settings = {"ACCOUNTANT_SHUTDOWN_SECONDS": "2", "ACCOUNTANT_COMPUTATION_SECONDS_MAX": "300"}
    with ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, "--workers", workers, **settings))
        for _ in range(4):
            stack.enter_context(unread(server, "/v1/noise-multiplier", ENDLESS))
        batch = {"requests": [TRADE_OFF] * 200}
        stack.enter_context(unread(server, "/v1/batch", batch))
        assert eventually(lambda: len(computing(server)) >= 2), "nothing is being computed"
        time.sleep(1)
        begun = time.monotonic()
        assert server.stop() in (0, -signal.SIGTERM)
        assert time.monotonic() - begun < 8
        assert eventually(lambda: not computing(server))
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_computations_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, ACCOUNTANT_COMPUTATION_SECONDS_MAX="2") as server:
        with unread(server, "/v1/noise-multiplier", ENDLESS):
            assert eventually(lambda: len(computing(server)) >= 2)
            server.process.kill()
            server.process.wait()
        assert eventually(lambda: not computing(server))


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    batch = {"requests": [TRADE_OFF] * 1000}
    with (
        serving(
            tmp_path, ACCOUNTANT_UNREAD_SECONDS_MAX="1", ACCOUNTANT_BATCH_BYTES_MAX=str(1 << 27)
        ) as server,
        unread(server, "/v1/batch", batch) as client,
    ):
        assert eventually(lambda: server.total("accountant_requests_in_progress") == 2)
        assert eventually(lambda: server.total("accountant_requests_in_progress") == 1)
        client.settimeout(20)
        last = b""
        with suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                last = piece
        assert not last.endswith(b"0\r\n\r\n"), "it was sent to its end"
