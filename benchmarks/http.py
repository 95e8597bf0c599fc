"""Compare the service's request rate and latency with a bare FastAPI endpoint, in one run.

    python benchmarks/http.py [--quick]
    python benchmarks/http.py --sustained 60

Both run in one server process with one worker. The same clients call them alternately, so that
other load on the machine affects both alike. Then many uncached requests are sent, and the latency
of the health check is measured meanwhile. With --quick there are fewer and shorter rounds.

With --sustained SECONDS, the load is 80 % of the capacity measured just before, and one request in
fifty is uncached. Latencies count from the time when a request was due, so that a stall shows in
full. Growth of memory counts from a third of that time on, when all caches are full; the cache of
answers is small here.
"""

from __future__ import annotations

import sys
import tempfile

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py shadows a library

import asyncio
import itertools
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.routing import Mount

from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app

CLIENTS = 16
QUICK = sys.argv[1:] == ["--quick"]
SECONDS = 0.5 if QUICK else 2.0
ROUNDS = 2 if QUICK else 5
SUSTAINED_SHARE = 0.8
UNCACHED_EVERY = 50
CACHE_ENTRIES = 256
GROWTH_MAX = 0.05


class Mechanism(BaseModel):
    """The mechanism in the body that the bare endpoint parses."""

    kind: str
    noise_multiplier: float
    sample_rate: float
    steps: int


class Question(BaseModel):
    """The body that the bare endpoint parses."""

    mechanism: Mechanism
    delta: float


BODY = {
    "mechanism": {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000},
    "delta": 1e-5,
}
BARE_ANSWER = {
    "epsilon": 1.5,
    "delta": 1e-5,
    "method": "pld",
    "status": "proven",
    "certified": {"epsilon_lower": 1.49, "epsilon_upper": 1.5},
    "assumptions": [{"statement": "s" * 70, "holds": True, "source": "s" * 60}],
    "mechanism_hash": "sha256:" + 64 * "0",
}


def create_bare_app() -> FastAPI:
    """Return an app with one endpoint that parses the same body and returns a constant."""
    app = FastAPI()

    @app.post("/bare")
    async def bare(question: Question) -> dict[str, object]:
        return BARE_ANSWER | {"delta": question.delta}

    return app


def create_app_with_bare_endpoint() -> Starlette:
    """Return the service, with the bare app mounted at /plain for comparison."""
    folder = tempfile.mkdtemp()
    url = f"sqlite:///{folder}/accountant.db"
    settings = Settings(database_url=url, cache_entries=CACHE_ENTRIES)
    service, bare = create_app(settings), create_bare_app()
    return Starlette(routes=[Mount("/plain", bare), Mount("/", service)])


@contextmanager
def start_server() -> Iterator[tuple[int, int]]:
    """Context manager that starts a server process; yields its port and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(port)])
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def encode_request(path: str, body: object | None) -> bytes:
    """Return the bytes of an HTTP/1.1 request."""
    data = b"" if body is None else json.dumps(body).encode()
    verb = "GET" if body is None else "POST"
    head = (
        f"{verb} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def send_requests(
    port: int, bodies: Iterator[bytes], until: float, times: list[float], interval: float = 0.0
) -> int:
    """Send requests on one connection until a time; append latencies; return failures.

    With an interval, requests are due that often; without one, after the answer to the last.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    failures, due = 0, time.perf_counter() + random.uniform(0, interval)
    while (start := due if interval else time.perf_counter()) < until:
        if interval:
            await asyncio.sleep(max(0.0, start - time.perf_counter()))
            due += interval
        writer.write(next(bodies))
        head = await reader.readuntil(b"\r\n\r\n")
        failures += not head.startswith(b"HTTP/1.1 200")
        found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        await reader.readexactly(int(found[1]) if found else 0)
        times.append(time.perf_counter() - start)
    writer.close()
    return failures


async def run_clients(
    port: int,
    bodies: Iterator[bytes],
    clients: int,
    seconds: float = SECONDS,
    interval: float = 0.0,
) -> tuple[list[float], int]:
    """Send requests from several clients; return all latencies and the number of failures."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    failures = await asyncio.gather(
        *(send_requests(port, bodies, until, times, interval) for _ in range(clients))
    )
    return times, sum(failures)


def compute_percentile_ms(times: list[float], share: float) -> float:
    """Return a percentile of times in seconds, converted to milliseconds."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] * 1e3


def generate_uncached_requests() -> Iterator[bytes]:
    """Yield requests that no cache can answer."""
    rng = random.Random(5)
    while True:
        noise, rate = rng.uniform(0.8, 8), rng.uniform(0.001, 0.05)
        run = BODY["mechanism"] | {"noise_multiplier": noise, "sample_rate": rate}  # type: ignore[operator]
        yield encode_request("/v1/epsilon", {"mechanism": run, "delta": 1e-5})


async def run_uncached_load(port: int) -> tuple[list[float], int, list[float]]:
    """Send uncached requests and health checks; return latencies, failures, health latencies."""
    health: list[float] = []
    check = itertools.repeat(encode_request("/healthz", None))
    until = time.perf_counter() + SECONDS
    (times, failures), _ = await asyncio.gather(
        run_clients(port, generate_uncached_requests(), CLIENTS),
        send_requests(port, check, until, health),
    )
    return times, failures, health


def read_memory_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found[1]) / 1024 if found else float("nan")


def main() -> None:
    """Print latencies and throughput of cached, uncached and bare requests."""
    console = Console(width=100, highlight=False)
    kinds = {
        "bare FastAPI endpoint": encode_request("/plain/bare", BODY),
        "cached question": encode_request("/v1/epsilon", BODY),
    }
    with start_server() as (port, pid):
        idle = read_memory_mb(pid)
        for body in kinds.values():  # warm up, fill the cache
            asyncio.run(send_requests(port, itertools.repeat(body), time.perf_counter() + 0.5, []))
        rounds: dict[str, list[list[float]]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, body in kinds.items():
                times, failures = asyncio.run(run_clients(port, itertools.repeat(body), CLIENTS))
                assert failures == 0, f"{failures} failures in {name}"
                rounds[name].append(times)
        uncached, refused, health = asyncio.run(run_uncached_load(port))
        after = read_memory_mb(pid)
    table = Table(title=f"{CLIENTS} clients, {ROUNDS} rounds of {SECONDS:g} s in turns")
    for column in ("request", "requests/s", "p50 ms", "p99 ms", "/ bare, median of the rounds"):
        table.add_column(column, justify="left" if column == "request" else "right")
    bare = [len(times) for times in rounds["bare FastAPI endpoint"]]
    for name, lists in rounds.items():
        everything = list(itertools.chain(*lists))
        ratio = statistics.median(len(t) / b for t, b in zip(lists, bare, strict=True))
        table.add_row(
            name,
            f"{len(everything) / ROUNDS / SECONDS:.0f}",
            f"{compute_percentile_ms(everything, 0.5):.2f}",
            f"{compute_percentile_ms(everything, 0.99):.2f}",
            f"{ratio:.0%}",
        )
    table.add_row(
        f"uncached questions ({refused} refused)",
        f"{len(uncached) / SECONDS:.0f}",
        f"{compute_percentile_ms(uncached, 0.5):.1f}",
        f"{compute_percentile_ms(uncached, 0.99):.1f}",
        "",
    )
    table.add_row(
        "/healthz meanwhile",
        f"{len(health) / SECONDS:.0f}",
        f"{compute_percentile_ms(health, 0.5):.2f}",
        f"{compute_percentile_ms(health, 0.99):.2f}",
        "",
    )
    console.print(table)
    console.print(f"memory: {idle:.0f} MB idle, {after:.0f} MB after uncached requests")


def generate_mixed_requests() -> Iterator[bytes]:
    """Yield mostly one cached request, and sometimes an uncached one."""
    known, fresh = encode_request("/v1/epsilon", BODY), generate_uncached_requests()
    for number in itertools.count():
        yield next(fresh) if number % UNCACHED_EVERY == 0 else known


def run_sustained_load(seconds: float) -> None:
    """Load the service near its capacity; exit with an error on failures or memory growth."""
    console, bodies = Console(width=100, highlight=False), generate_mixed_requests()
    with start_server() as (port, pid):
        asyncio.run(run_clients(port, bodies, CLIENTS))  # warm up
        times, failures = asyncio.run(run_clients(port, bodies, CLIENTS, 3 * SECONDS))
        capacity, first = len(times) / (3 * SECONDS), read_memory_mb(pid)
        interval = CLIENTS / (SUSTAINED_SHARE * capacity)
        _, early = asyncio.run(run_clients(port, bodies, CLIENTS, seconds / 3, interval))
        before = read_memory_mb(pid)
        times, late = asyncio.run(run_clients(port, bodies, CLIENTS, seconds, interval))
        after = read_memory_mb(pid)
    console.print(f"capacity: {capacity:.0f} requests/s")
    console.print(
        f"{seconds:g} s at {SUSTAINED_SHARE:.0%}: {len(times) / seconds:.0f} requests/s, "
        f"p50 {compute_percentile_ms(times, 0.5):.1f} ms, "
        f"p99 {compute_percentile_ms(times, 0.99):.1f} ms, "
        f"{failures + early + late} errors"
    )
    console.print(
        f"memory: {first:.1f} MB, after {seconds / 3:g} s of this load {before:.1f} MB, "
        f"{seconds:g} s later {after:.1f} MB ({after / before - 1:+.1%})"
    )
    if failures + early + late or after > before * (1 + GROWTH_MAX):
        raise SystemExit(f"requests failed, or memory grew by more than {GROWTH_MAX:.0%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sustained"]:
        run_sustained_load(float(sys.argv[2]))
    elif sys.argv[1:2] == ["--serve"]:
        uvicorn.run(
            create_app_with_bare_endpoint(),
            port=int(sys.argv[2]),
            log_level="warning",
            access_log=False,
        )
    else:
        main()
