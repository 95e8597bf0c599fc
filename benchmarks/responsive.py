"""Grants' latency while others send hostile but well-formed requests; memory; time to stop.

    python benchmarks/responsive.py [SECONDS]

A server of its own is asked for grants one after another, first alone, then during each attack, so
many seconds each (8 by default). Attackers are processes of low priority, as if on machines of
their own. Memory is the proportional set size. That of the server is bounded here; the processes it
started have a limit for each.
The last attack locks a dataset's row and needs PostgreSQL; it is left out, with a line that says
so, where there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# http.py hides a library; the tests' databases are used
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from tests.databases import SERVER as POSTGRESQL
from tests.databases import database, free_port

SECONDS = 8.0
RATIO_MAX, P99_MAX = 15.0, 0.25
GROWTH_MB_MAX, STOP_SECONDS_MAX = 250.0, 32.0
PROGRAMS = Path(sys.executable).parent
CONSOLE = Console(width=100, highlight=False)
Json = dict[str, Any]


def run(rate: float, noise: float, steps: int) -> Json:
    return {"kind": "dp_sgd", "noise_multiplier": noise, "sample_rate": rate, "steps": steps}


RUN = run(0.01, 1.1, 1000)
RELEASES = [{"kind": "gaussian", "noise_multiplier": 50 + k / 1000} for k in range(9900)]
TRADE_OFF = {"path": "/v1/trade-off", "body": {"mechanism": RUN, "points": 1000}}
BATCH = ("/v1/batch", {"requests": [TRADE_OFF] * 1000})
SAMPLE_RATE = (
    "/v1/sample-rate",
    {"delta": 1e-5, "epsilon": 2, "noise_multiplier": 0.01, "steps": 1000},
)
HARD = (
    "/v1/noise-multiplier",
    {"sample_rate": 1e-8, "steps": 10**8, "epsilon": 0.5, "delta": 1e-10},
)
OPEN_ATTACKS: dict[str, tuple[str, Json]] = {
    "batches of 1000 trade-offs": BATCH,
    "a tree of 9900 releases": (
        "/v1/epsilon",
        {"mechanism": {"kind": "composed", "mechanisms": RELEASES}, "delta": 1e-5},
    ),
    "sample rate at σ = .01": SAMPLE_RATE,
    "noise for 1e8 rare steps": HARD,
    "compare at σ = .01, 1e-7": (
        "/v1/compare",
        {"mechanism": run(0.01, 0.01, 1000), "delta": 1e-5, "tolerance": 1e-7},
    ),
}
QUOTES = {"mechanisms": [run(0.01 + k / 1e5, 0.7, 5000) for k in range(100)]}
ATTACKERS, QUOTERS, WAITING_GRANTS, UNREAD = 3, 45, 40, 5


class Service:
    """A server process with an administrator's key."""

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
        self._await()

    @staticmethod
    def create_key(environment: dict[str, str]) -> str:
        made = subprocess.run(
            [PROGRAMS / "accountant", "keys", "create", "--scope", "admin"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return made.stdout.strip().splitlines()[-1]

    def another_key(self) -> str:
        return self.create_key(self._environment)

    def _await(self) -> None:
        for _ in range(600):
            try:
                if ask(self.port, "GET", "/healthz")[0] == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server did not start")

    def write(self, path: str, body: Json, key: str = "", once: str = "") -> tuple[int, Json]:
        headers = headers_of(key or self.key) | {"Idempotency-Key": once or uuid.uuid4().hex}
        status, answer = ask(self.port, "POST", path, json.dumps(body).encode(), headers)
        return status, json.loads(answer)

    def reserve(self, name: str) -> str:
        """A dataset with a long run; the run's identifier."""
        budget = {"epsilon": 8.0, "delta": 1e-5}
        self.write("/v1/datasets", {"name": name, "size": 60_000, "budget": budget})
        plan = {"mechanism": run(0.001, 2.0, 10**6)}
        status, made = self.write(f"/v1/datasets/{name}/reservations", plan)
        assert status == 201, made
        identifier: str = made["id"]
        return identifier

    def memory_mb(self) -> tuple[float, float]:
        """Of the server, and of the processes it started."""
        started = descendants(self.process.pid)
        return proportional_mb(self.process.pid), sum(map(proportional_mb, started))


def ask(
    port: int, verb: str, path: str, body: bytes | None = None, headers: Any = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(verb, path, body, sent)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def headers_of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def descendants(process: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == process:
            yield int(folder.name)
            yield from descendants(int(folder.name))


def proportional_mb(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


class Grants:
    """Grants of one run, one after another."""

    def __init__(self, service: Service, name: str) -> None:
        self._service, self._path = service, f"/v1/reservations/{service.reserve(name)}/grants"
        self._sequence = 0

    def p99(self, seconds: float) -> float:
        times, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            begun = time.perf_counter()
            body = {"steps": 1, "sequence": self._sequence}
            status, answer = self._service.write(self._path, body)
            times.append(time.perf_counter() - begun)
            assert status == 200, answer
            self._sequence = answer["steps_granted"]
            time.sleep(0.02)
        return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def attack(port: int, path: str, body: bytes, key: str, clients: int) -> None:
    """Ask again and again, from so many clients, until this process is ended."""
    os.nice(10)

    def client() -> None:
        while True:
            try:
                ask(port, "POST", path, body, headers_of(key))
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


@contextmanager
def attacked(
    service: Service, path: str, body: Json, clients: int = ATTACKERS, key: str = ""
) -> Iterator[None]:
    """The service while clients send this question."""
    raw = json.dumps(body).encode()
    context = multiprocessing.get_context("spawn")
    attackers = context.Process(target=attack, args=(service.port, path, raw, key, clients))
    attackers.start()
    time.sleep(2.0)
    try:
        yield
    finally:
        attackers.kill()
        attackers.join()


@contextmanager
def unread(port: int, path: str, body: Json) -> Iterator[None]:
    """A client that asks and never reads."""
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        yield


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        grants: by attack, the p99 of grants alone and during it, in seconds.
        idle_mb: memory before any attack, of the server and of the processes it started.
        peak_mb: the most of either at the end of an attack, and while clients do not read.
        stop_seconds: from SIGTERM to the end, while attacked.
    """

    grants: dict[str, tuple[float, float]]
    idle_mb: tuple[float, float]
    peak_mb: tuple[float, float]
    stop_seconds: float

    def faults(self) -> list[str]:
        late = [
            name
            for name, (idle, attacked) in self.grants.items()
            if attacked > max(P99_MAX, RATIO_MAX * idle)
        ]
        grown = self.peak_mb[0] > self.idle_mb[0] + GROWTH_MB_MAX
        slow = self.stop_seconds > STOP_SECONDS_MAX
        return late + ["memory"] * grown + ["SIGTERM"] * slow


def measure(folder: Path, seconds: float) -> Measured:
    service = Service(folder, f"sqlite:///{folder}/ledger.db")
    try:
        return _measure(service, seconds)
    finally:
        service.process.kill()


def _measure(service: Service, seconds: float) -> Measured:
    grants, found = Grants(service, "d"), {}
    service.reserve("other")
    ask(service.port, "POST", "/v1/epsilon", json.dumps({"mechanism": RUN, "delta": 1e-5}).encode())
    idle, idle_mb = grants.p99(seconds), service.memory_mb()
    peaks = []
    for name, (path, body) in OPEN_ATTACKS.items():
        with attacked(service, path, body):
            found[name] = idle, grants.p99(seconds)
            peaks.append(service.memory_mb())
    with attacked(
        service, "/v1/datasets/other/quotes/batch", QUOTES, QUOTERS, service.another_key()
    ):
        found[f"{QUOTERS} batches of quotes"] = idle, grants.p99(seconds)
        peaks.append(service.memory_mb())
    with ExitStack() as held:
        for _ in range(UNREAD):
            held.enter_context(unread(service.port, *BATCH))
        time.sleep(seconds)
        peaks.append(service.memory_mb())
        with attacked(service, *HARD):
            begun = time.perf_counter()
            service.process.send_signal(signal.SIGTERM)
            service.process.wait(120)
            stopped = time.perf_counter() - begun
    largest = max(server for server, _ in peaks), max(started for _, started in peaks)
    return Measured(found, idle_mb, largest, stopped)


def locked_row(folder: Path, seconds: float) -> tuple[float, float]:
    """The p99 of grants on one dataset, alone and while others wait for another one's row."""
    with database("postgresql", folder) as url:
        service = Service(folder, url)
        try:
            grants, waiting = Grants(service, "free"), service.reserve("locked")
            idle = grants.p99(seconds)
            with psycopg.connect(url.replace("+psycopg", "")) as holder:
                holder.execute("SELECT * FROM dataset WHERE name = 'locked' FOR UPDATE")
                path = f"/v1/reservations/{waiting}/grants"
                body = {"steps": 1, "sequence": 0}
                ask_again: Callable[[], Any] = lambda: [  # noqa: E731
                    service.write(path, body) for _ in itertools.repeat(0)
                ]
                for _ in range(WAITING_GRANTS):
                    threading.Thread(target=forgiving(ask_again), daemon=True).start()
                time.sleep(2.0)
                during = grants.p99(seconds)
        finally:
            service.process.kill()
            service.process.wait()
    return idle, during


def forgiving(act: Callable[[], Any]) -> Callable[[], None]:
    def acting() -> None:
        try:
            act()
        except (OSError, http.client.HTTPException):
            return

    return acting


def has_postgresql() -> bool:
    try:
        psycopg.connect(f"postgresql://{POSTGRESQL}", connect_timeout=3).close()
    except psycopg.OperationalError:
        return False
    return True


def print_table(measured: Measured) -> None:
    table = Table(title="p99 of grants")
    for column in ("attack", "alone ms", "attacked ms", "ratio"):
        table.add_column(column, justify="left" if column == "attack" else "right")
    for name, (idle, during) in measured.grants.items():
        ratio = f"{during / idle:.1f}"
        table.add_row(name, f"{1e3 * idle:.0f}", f"{1e3 * during:.0f}", ratio)
    CONSOLE.print(table)
    for what, idle, peak in zip(
        ("server", "processes it started"), measured.idle_mb, measured.peak_mb, strict=True
    ):
        CONSOLE.print(f"memory of the {what}: {idle:.0f} MB idle, {peak:.0f} MB attacked")
    CONSOLE.print(f"SIGTERM: {measured.stop_seconds:.0f} s")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    with tempfile.TemporaryDirectory() as name:
        measured = measure(Path(name), seconds)
        if has_postgresql():
            found = locked_row(Path(name), seconds)
            measured.grants[f"{WAITING_GRANTS} grants at a locked row (PostgreSQL)"] = found
        else:
            CONSOLE.print("no PostgreSQL on 127.0.0.1:5432: the locked row is left out")
    print_table(measured)
    if faults := measured.faults():
        raise SystemExit("too slow or too large: " + ", ".join(faults))


if __name__ == "__main__":
    main()
