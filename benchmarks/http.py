"""Requests per second and latency of the service beside a bare FastAPI endpoint, in one run.

    python benchmarks/http.py
    python benchmarks/http.py --sustained 60

Both run in one server process with one worker, and are asked in turns by the same clients, so
that whatever else the machine does touches both alike. Then a storm of questions never asked
before, and the health check's latency meanwhile.

With --sustained: so many seconds at 80 % of the capacity measured just before, one question in
fifty a new one. Latencies count from when a question was due, so that a stall shows in full. The
memory's growth counts from when the load has lasted a third of that time: all caches are full by
then, that of the answers too, which is kept small here.
"""

from __future__ import annotations

import sys
import tempfile

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py hides a library

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

from accountant_service.app import create_app
from accountant_service.settings import Settings

CLIENTS = 16
SECONDS = 2.0
ROUNDS = 5
SUSTAINED_SHARE = 0.8
FRESH_EVERY = 50
CACHE_ENTRIES = 256
GROWTH_MAX = 0.05


class Mechanism(BaseModel):
    kind: str
    noise_multiplier: float
    sample_rate: float
    steps: int


class Question(BaseModel):
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


def create_bare() -> FastAPI:
    """One endpoint that reads a body of the same shape and answers a constant of the same size."""
    app = FastAPI()

    @app.post("/bare")
    async def bare(question: Question) -> dict[str, object]:
        return BARE_ANSWER | {"delta": question.delta}

    return app


def create_both() -> Starlette:
    """The service, with the bare endpoint mounted beside it as an application of its own."""
    folder = tempfile.mkdtemp()
    url = f"sqlite:///{folder}/accountant.db"
    settings = Settings(database_url=url, cache_entries=CACHE_ENTRIES)
    service, bare = create_app(settings), create_bare()
    return Starlette(routes=[Mount("/plain", bare), Mount("/", service)])


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """A server process on a free port: the port and the process."""
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


def request(path: str, body: object | None) -> bytes:
    """The bytes of one HTTP/1.1 request."""
    data = b"" if body is None else json.dumps(body).encode()
    verb = "GET" if body is None else "POST"
    head = (
        f"{verb} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def client(
    port: int, bodies: Iterator[bytes], until: float, times: list[float], interval: float = 0.0
) -> int:
    """Ask until the time is up, one after another on one connection; count what is not 200.

    With an interval a question is due that often; without one, when the last was answered.
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


async def load(
    port: int,
    bodies: Iterator[bytes],
    clients: int,
    seconds: float = SECONDS,
    interval: float = 0.0,
) -> tuple[list[float], int]:
    """Durations of all requests that `clients` clients make in a round, and the failures."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    done = await asyncio.gather(
        *(client(port, bodies, until, times, interval) for _ in range(clients))
    )
    return times, sum(done)


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] * 1e3


def fresh_questions() -> Iterator[bytes]:
    """Questions no cache has seen."""
    rng = random.Random(5)
    while True:
        noise, rate = rng.uniform(0.8, 8), rng.uniform(0.001, 0.05)
        run = BODY["mechanism"] | {"noise_multiplier": noise, "sample_rate": rate}  # type: ignore[operator]
        yield request("/v1/epsilon", {"mechanism": run, "delta": 1e-5})


async def storm(port: int) -> tuple[list[float], int, list[float]]:
    """Uncached questions from many clients, and the health check asked meanwhile."""
    health: list[float] = []
    check = itertools.repeat(request("/healthz", None))
    until = time.perf_counter() + SECONDS
    (times, failures), _ = await asyncio.gather(
        load(port, fresh_questions(), CLIENTS), client(port, check, until, health)
    )
    return times, failures, health


def memory_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found[1]) / 1024 if found else float("nan")


def main() -> None:
    console = Console(width=100, highlight=False)
    kinds = {
        "bare FastAPI endpoint": request("/plain/bare", BODY),
        "cached question": request("/v1/epsilon", BODY),
    }
    with server() as (port, pid):
        idle = memory_mb(pid)
        for body in kinds.values():  # warm up, fill the cache
            asyncio.run(client(port, itertools.repeat(body), time.perf_counter() + 0.5, []))
        rounds: dict[str, list[list[float]]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, body in kinds.items():
                times, failures = asyncio.run(load(port, itertools.repeat(body), CLIENTS))
                assert failures == 0, f"{failures} failures in {name}"
                rounds[name].append(times)
        stormed, refused, health = asyncio.run(storm(port))
        after = memory_mb(pid)
    table = Table(title=f"{CLIENTS} clients, {ROUNDS} rounds of {SECONDS:g} s in turns")
    for column in ("asked", "requests/s", "p50 ms", "p99 ms", "of bare, round by round (median)"):
        table.add_column(column, justify="left" if column == "asked" else "right")
    bare = [len(times) for times in rounds["bare FastAPI endpoint"]]
    for name, lists in rounds.items():
        everything = list(itertools.chain(*lists))
        ratio = statistics.median(len(t) / b for t, b in zip(lists, bare, strict=True))
        table.add_row(
            name,
            f"{len(everything) / ROUNDS / SECONDS:.0f}",
            f"{percentile(everything, 0.5):.2f}",
            f"{percentile(everything, 0.99):.2f}",
            f"{ratio:.0%}",
        )
    table.add_row(
        f"uncached questions ({refused} refused)",
        f"{len(stormed) / SECONDS:.0f}",
        f"{percentile(stormed, 0.5):.1f}",
        f"{percentile(stormed, 0.99):.1f}",
        "",
    )
    table.add_row(
        "/healthz during that storm",
        f"{len(health) / SECONDS:.0f}",
        f"{percentile(health, 0.5):.2f}",
        f"{percentile(health, 0.99):.2f}",
        "",
    )
    console.print(table)
    console.print(f"memory: {idle:.0f} MB idle, {after:.0f} MB after the storm")


def mixture() -> Iterator[bytes]:
    """Mostly one question; now and then one that no cache has seen."""
    known, fresh = request("/v1/epsilon", BODY), fresh_questions()
    for number in itertools.count():
        yield next(fresh) if number % FRESH_EVERY == 0 else known


def sustained(seconds: float) -> None:
    """Most of the capacity for a long time: no errors, no growth."""
    console, bodies = Console(width=100, highlight=False), mixture()
    with server() as (port, pid):
        asyncio.run(load(port, bodies, CLIENTS))  # warm up
        times, failures = asyncio.run(load(port, bodies, CLIENTS, 3 * SECONDS))
        capacity, first = len(times) / (3 * SECONDS), memory_mb(pid)
        interval = CLIENTS / (SUSTAINED_SHARE * capacity)
        _, early = asyncio.run(load(port, bodies, CLIENTS, seconds / 3, interval))
        before = memory_mb(pid)
        times, late = asyncio.run(load(port, bodies, CLIENTS, seconds, interval))
        after = memory_mb(pid)
    console.print(f"capacity: {capacity:.0f} requests/s")
    console.print(
        f"{seconds:g} s at {SUSTAINED_SHARE:.0%}: {len(times) / seconds:.0f} requests/s, "
        f"p50 {percentile(times, 0.5):.1f} ms, p99 {percentile(times, 0.99):.1f} ms, "
        f"{failures + early + late} errors"
    )
    console.print(
        f"memory: {first:.1f} MB, after {seconds / 3:g} s of this load {before:.1f} MB, "
        f"{seconds:g} s later {after:.1f} MB ({after / before - 1:+.1%})"
    )
    if failures + early + late or after > before * (1 + GROWTH_MAX):
        raise SystemExit("errors, or memory that grows")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sustained"]:
        sustained(float(sys.argv[2]))
    elif sys.argv[1:2] == ["--serve"]:
        uvicorn.run(create_both(), port=int(sys.argv[2]), log_level="warning", access_log=False)
    else:
        main()
