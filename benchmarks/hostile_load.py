"""Measure grant latency, memory and stop time of a service under hostile, valid requests.

    python benchmarks/hostile_load.py [--quick]

A client requests grants one after another, first alone, then during each attack, for 8 seconds each
(3 with --quick). It ends with an error if a limit is exceeded. Attackers are processes of low
priority, as if they ran on other machines. Memory is the proportional set size. The benchmark
limits that of the server process; its child processes have their own limits. The last attack locks
a dataset's row in PostgreSQL; it is skipped if no server is available.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# http.py shadows a library; the root is for tests.support
sys.path = [str(ROOT), *(p for p in sys.path if not p.endswith("benchmarks"))]

import http.client
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from tests.support.databases import SERVER as POSTGRESQL
from tests.support.databases import database, free_port

SECONDS = 8.0
QUICK_SECONDS = 3.0
RATIO_MAX, P99_MAX = 15.0, 0.25
GROWTH_MB_MAX, STOP_SECONDS_MAX = 250.0, 32.0
PROGRAMS = Path(sys.executable).parent
CONSOLE = Console(width=100, highlight=False)
Json = dict[str, Any]


def describe_run(rate: float, noise: float, steps: int) -> Json:
    """Return the JSON of a DP-SGD run."""
    return {"kind": "dp_sgd", "noise_multiplier": noise, "sample_rate": rate, "steps": steps}


RUN_MECHANISM = describe_run(0.01, 1.1, 1000)
RELEASES = [{"kind": "gaussian", "noise_multiplier": 50 + k / 1000} for k in range(9900)]
TRADE_OFF = {"path": "/v1/trade-off", "body": {"mechanism": RUN_MECHANISM, "points": 1000}}
BATCH_ATTACK = ("/v1/batch", {"requests": [TRADE_OFF] * 1000})
SAMPLE_RATE = (
    "/v1/sample-rate",
    {"delta": 1e-5, "epsilon": 2, "noise_multiplier": 0.01, "steps": 1000},
)
SLOW_SOLVE = (
    "/v1/noise-multiplier",
    {"sample_rate": 1e-8, "steps": 10**8, "epsilon": 0.5, "delta": 1e-10},
)
OPEN_ATTACKS: dict[str, tuple[str, Json]] = {
    "batches of 1000 trade-offs": BATCH_ATTACK,
    "a tree of 9900 releases": (
        "/v1/epsilon",
        {"mechanism": {"kind": "composed", "mechanisms": RELEASES}, "delta": 1e-5},
    ),
    "sample rate at σ = .01": SAMPLE_RATE,
    "noise for 1e8 rare steps": SLOW_SOLVE,
    "compare at σ = .01, 1e-7": (
        "/v1/compare",
        {"mechanism": describe_run(0.01, 0.01, 1000), "delta": 1e-5, "tolerance": 1e-7},
    ),
}
QUOTES = {"mechanisms": [describe_run(0.01 + k / 1e5, 0.7, 5000) for k in range(100)]}
ATTACKERS, QUOTERS, BLOCKED_GRANTS, NON_READERS = 3, 45, 40, 5
FLOODERS = 10
GET_HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED_HEAD = b"POST /v1/epsilon HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
MANY_HEADERS = b"".join(b"a%d:b\r\n" % at for at in range(8000))
# what is sent first on a connection, and then again and again until it is closed
ENDLESS_ATTACKS: dict[str, tuple[bytes, bytes]] = {
    "an endless URL": (b"GET /", b"a" * 65536),
    "endless headers": (GET_HEAD, MANY_HEADERS),
    "one endless header": (GET_HEAD + b"a: ", b"b" * 65536),
    "endless trailers": (CHUNKED_HEAD + b"1\r\n{\r\n0\r\n", MANY_HEADERS),
    "an endless line between chunks": (CHUNKED_HEAD + b"1;a=", b"b" * 65536),
    "requests that wait for no answer": (b"", GET_HEAD + b"\r\n"),
    "an endless body of a page": (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n",
        b"b" * 65536,
    ),
}
PUBLIC_DOCUMENTS = (
    "/openapi.json", "/docs", "/docs?x=1", "/help", "/v1/methods",
    "/static/vendor/htmx-2.0.11.min.js", "/metrics", "/readyz", "/healthz",
)  # fmt: skip


class Service:
    """A server process, and an API key with the admin scope for it."""

    def __init__(self, folder: Path, url: str, **settings: str) -> None:
        self.port = free_port()
        environment = os.environ | {"ACCOUNTANT_DATABASE_URL": url} | settings
        self.key = self.create_key(environment)
        self._environment = environment
        with (folder / f"log-{self.port}").open("wb") as log:
            self.process = subprocess.Popen(
                [PROGRAMS / "accountant", "serve", "--port", str(self.port)],
                env=environment,
                stderr=log,
            )
        self._wait_until_healthy()

    @staticmethod
    def create_key(environment: dict[str, str]) -> str:
        """Create an API key with the admin scope; return its token."""
        made = subprocess.run(
            [PROGRAMS / "accountant", "keys", "create", "--scope", "admin"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return made.stdout.strip().splitlines()[-1]

    def create_another_key(self) -> str:
        """Create one more API key; return its token."""
        return self.create_key(self._environment)

    def _wait_until_healthy(self) -> None:
        """Wait until the server answers its health check."""
        for _ in range(600):
            try:
                if send_request(self.port, "GET", "/healthz")[0] == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server did not start")

    def post(self, path: str, body: Json) -> tuple[int, Json]:
        """Send a write to the ledger; return the status and the answer."""
        headers = make_headers(self.key) | {"Idempotency-Key": uuid.uuid4().hex}
        status, answer = send_request(self.port, "POST", path, json.dumps(body).encode(), headers)
        return status, json.loads(answer)

    def reserve(self, name: str) -> str:
        """Create a dataset and reserve a long run on it; return the reservation's identifier."""
        budget = {"epsilon": 8.0, "delta": 1e-5}
        self.post("/v1/datasets", {"name": name, "size": 60_000, "budget": budget})
        plan = {"mechanism": describe_run(0.001, 2.0, 10**6)}
        status, made = self.post(f"/v1/datasets/{name}/reservations", plan)
        assert status == 201, made
        identifier: str = made["id"]
        return identifier

    def memory_mb(self) -> tuple[float, float]:
        """Return the memory, in MB, of the server process and of all its child processes."""
        started = list_descendants(self.process.pid)
        return measure_memory_mb(self.process.pid), sum(map(measure_memory_mb, started))


def send_request(
    port: int, verb: str, path: str, body: bytes | None = None, headers: Any = None
) -> tuple[int, bytes]:
    """Send a request to a local port; return the status and the body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(verb, path, body, sent)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def make_headers(key: str) -> dict[str, str]:
    """Return the Authorization header for an API key; none if the key is empty."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def list_descendants(process: int) -> Iterator[int]:
    """Yield the ids of a process's child processes, and of theirs."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == process:
            yield int(folder.name)
            yield from list_descendants(int(folder.name))


def measure_memory_mb(process: int) -> float:
    """Return the memory of a process in MB (proportional set size); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


class GrantClient:
    """A client that requests grants for one reservation, one after another."""

    def __init__(self, service: Service, name: str) -> None:
        self._service, self._path = service, f"/v1/reservations/{service.reserve(name)}/grants"
        self._sequence = 0

    def measure_p99(self, seconds: float) -> float:
        """Request grants for some seconds; return the 99th percentile of the latency."""
        times, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            begun = time.perf_counter()
            body = {"steps": 1, "sequence": self._sequence}
            status, answer = self._service.post(self._path, body)
            times.append(time.perf_counter() - begun)
            assert status == 200, answer
            self._sequence = answer["steps_granted"]
            time.sleep(0.02)
        return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def send_attack(port: int, path: str, body: bytes, key: str, clients: int) -> None:
    """Send the same request again and again from several clients, until this process is killed."""
    os.nice(10)

    def client() -> None:
        """Send the same request again and again, from one client."""
        while True:
            try:
                send_request(port, "POST", path, body, make_headers(key))
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


@contextmanager
def run_attack(
    service: Service, path: str, body: Json, clients: int = ATTACKERS, key: str = ""
) -> Iterator[None]:
    """Context manager that attacks the service with the same request from several clients."""
    raw = json.dumps(body).encode()
    with run_attacker(send_attack, service.port, path, raw, key, clients):
        yield


def send_endlessly(port: int, first: bytes, more: bytes, clients: int) -> None:
    """Send data without end, each time on a new connection when the server has closed the last."""
    os.nice(10)

    def client() -> None:
        """Send data from one client."""
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                    connection.sendall(first)
                    while True:
                        connection.sendall(more)
            except OSError:
                time.sleep(0.01)

    for _ in range(clients):
        threading.Thread(target=client, daemon=True).start()
    threading.Event().wait()


def request_endlessly(port: int, path: str, clients: int) -> None:
    """Ask for a document again and again on several connections that are kept."""
    os.nice(10)

    def client() -> None:
        """Ask from one client."""
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                while True:
                    connection.request("GET", path)
                    connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()

    for _ in range(clients):
        threading.Thread(target=client, daemon=True).start()
    threading.Event().wait()


@contextmanager
def run_attacker(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Context manager of a process that attacks the service until it is killed."""
    attacker = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    attacker.start()
    time.sleep(2.0)
    try:
        yield
    finally:
        attacker.kill()
        attacker.join()


@contextmanager
def open_half_heads(port: int, count: int) -> Iterator[None]:
    """Context manager: clients that begin a request and never complete its head."""
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(GET_HEAD + b"X: ")
        yield


@contextmanager
def open_non_reading_client(port: int, path: str, body: Json) -> Iterator[None]:
    """Context manager: a client that sends a request and never reads the answer."""
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        yield


@dataclass(frozen=True, slots=True)
class Measurement:
    """Grant latencies, memory and stop time of a service under attack by hostile requests.

    Attributes:
        grants: p99 of grants in seconds, alone and during the attack, by attack.
        idle_mb: memory of the server and of its child processes before any attack.
        peak_mb: largest memory of either at the end of an attack, or with clients that do not read.
        stop_seconds: time from SIGTERM to the end of the server during an attack.
    """

    grants: dict[str, tuple[float, float]]
    idle_mb: tuple[float, float]
    peak_mb: tuple[float, float]
    stop_seconds: float

    def list_faults(self) -> list[str]:
        """Return the names of the limits that were exceeded."""
        late = [
            name
            for name, (idle, attacked) in self.grants.items()
            if attacked > max(P99_MAX, RATIO_MAX * idle)
        ]
        grown = self.peak_mb[0] > self.idle_mb[0] + GROWTH_MB_MAX
        slow = self.stop_seconds > STOP_SECONDS_MAX
        return late + ["memory"] * grown + ["SIGTERM"] * slow


def measure(folder: Path, seconds: float) -> Measurement:
    """Measure every attack except the locked row, on a new service with SQLite."""
    service = Service(folder, f"sqlite:///{folder}/ledger.db")
    try:
        return _measure_service(service, seconds)
    finally:
        service.process.kill()


def _measure_service(service: Service, seconds: float) -> Measurement:
    """Measure all attacks on a running service."""
    grants, found = GrantClient(service, "d"), {}
    service.reserve("other")
    send_request(
        service.port,
        "POST",
        "/v1/epsilon",
        json.dumps({"mechanism": RUN_MECHANISM, "delta": 1e-5}).encode(),
    )
    idle, idle_mb = grants.measure_p99(seconds), service.memory_mb()
    peaks = []
    for name, (path, body) in OPEN_ATTACKS.items():
        with run_attack(service, path, body):
            found[name] = idle, grants.measure_p99(seconds)
            peaks.append(service.memory_mb())
    with run_attack(
        service, "/v1/datasets/other/quotes/batch", QUOTES, QUOTERS, service.create_another_key()
    ):
        found[f"{QUOTERS} batches of quotes"] = idle, grants.measure_p99(seconds)
        peaks.append(service.memory_mb())
    for name, attack in _list_connection_attacks(service.port):
        with attack:
            found[name] = idle, grants.measure_p99(seconds)
            peaks.append(service.memory_mb())
    with ExitStack() as held:
        for _ in range(NON_READERS):
            held.enter_context(open_non_reading_client(service.port, *BATCH_ATTACK))
        time.sleep(seconds)
        peaks.append(service.memory_mb())
        with run_attack(service, *SLOW_SOLVE):
            begun = time.perf_counter()
            service.process.send_signal(signal.SIGTERM)
            service.process.wait(120)
            stopped = time.perf_counter() - begun
    largest = max(server for server, _ in peaks), max(started for _, started in peaks)
    return Measurement(found, idle_mb, largest, stopped)


def _list_connection_attacks(port: int) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Yield the attacks that need no key and no valid request, with their names."""
    for name, parts in ENDLESS_ATTACKS.items():
        yield name, run_attacker(send_endlessly, port, *parts, FLOODERS)
    yield "200 heads that never end", open_half_heads(port, 200)
    for path in PUBLIC_DOCUMENTS:
        yield f"GET {path}", run_attacker(request_endlessly, port, path, FLOODERS)


def measure_locked_row(folder: Path, seconds: float) -> tuple[float, float]:
    """Return the p99 of grants, alone and while grants on another dataset wait for a lock."""
    with database("postgresql", folder) as url:
        service = Service(folder, url)
        try:
            grants, waiting = GrantClient(service, "free"), service.reserve("locked")
            idle = grants.measure_p99(seconds)
            with psycopg.connect(url.replace("+psycopg", "")) as holder:
                holder.execute("SELECT * FROM dataset WHERE name = 'locked' FOR UPDATE")
                path = f"/v1/reservations/{waiting}/grants"
                body = {"steps": 1, "sequence": 0}
                ask_again: Callable[[], Any] = lambda: [  # noqa: E731
                    service.post(path, body) for _ in itertools.repeat(0)
                ]
                for _ in range(BLOCKED_GRANTS):
                    threading.Thread(
                        target=ignore_connection_errors(ask_again), daemon=True
                    ).start()
                time.sleep(2.0)
                during = grants.measure_p99(seconds)
        finally:
            service.process.kill()
            service.process.wait()
    return idle, during


def ignore_connection_errors(call: Callable[[], Any]) -> Callable[[], None]:
    """Return the call with connection errors ignored."""

    def call_and_ignore_errors() -> None:
        """Make the call, and ignore connection errors."""
        try:
            call()
        except (OSError, http.client.HTTPException):
            return

    return call_and_ignore_errors


def has_postgresql() -> bool:
    """Return whether a PostgreSQL server is available for tests."""
    try:
        psycopg.connect(f"postgresql://{POSTGRESQL}", connect_timeout=3).close()
    except psycopg.OperationalError:
        return False
    return True


def print_table(measured: Measurement) -> None:
    """Print the measurements as a table."""
    table = Table(title="p99 of grants")
    for column in ("attack", "alone ms", "attacked ms", "ratio"):
        table.add_column(column, justify="left" if column == "attack" else "right")
    for name, (idle, during) in measured.grants.items():
        ratio = f"{during / idle:.1f}"
        table.add_row(name, f"{1e3 * idle:.0f}", f"{1e3 * during:.0f}", ratio)
    CONSOLE.print(table)
    for name, idle, peak in zip(
        ("server", "child processes"), measured.idle_mb, measured.peak_mb, strict=True
    ):
        CONSOLE.print(f"memory of the {name}: {idle:.0f} MB idle, {peak:.0f} MB attacked")
    CONSOLE.print(f"time to stop after SIGTERM: {measured.stop_seconds:.0f} s")


def main() -> None:
    """Measure all attacks, print the table, and exit with an error if a limit is exceeded."""
    seconds = QUICK_SECONDS if sys.argv[1:] == ["--quick"] else SECONDS
    with tempfile.TemporaryDirectory() as name:
        measured = measure(Path(name), seconds)
        if has_postgresql():
            found = measure_locked_row(Path(name), seconds)
            measured.grants[f"{BLOCKED_GRANTS} grants at a locked row (PostgreSQL)"] = found
        else:
            CONSOLE.print("no PostgreSQL on 127.0.0.1:5432: the attack on a locked row is skipped")
    print_table(measured)
    if faults := measured.list_faults():
        raise SystemExit("limits exceeded: " + ", ".join(faults))


if __name__ == "__main__":
    main()
