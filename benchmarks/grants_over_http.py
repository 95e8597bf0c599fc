"""Compare grants over HTTP on PostgreSQL with the bare transaction, in turns and in one run.

    python benchmarks/grants_over_http.py [SECONDS]

The server is a process with one worker, and the clients are one other process. The bare transaction
is that of `benchmarks/ledger.py`, from threads of a process. The machine's load affects both alike:
compare the ratios. The server's CPU time per grant hardly depends on the load.
"""

from __future__ import annotations

import sys
from pathlib import Path

# http.py shadows a library; the root is for tests.support
sys.path = [str(Path(__file__).parents[1]), *(p for p in sys.path if not p.endswith("benchmarks"))]

import asyncio
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from benchmarks.ledger import Workload, measure_throughput
from tests.support.databases import database
from tests.support.server import Server

CLIENTS = (1, 8, 32)
ROUNDS = 5
CONSOLE = Console(width=110)


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def grant_until(port: int, key: str, run: str, start: int, end: float) -> list[float]:
    """Grant a run's steps one by one on a connection until a time; return each grant's seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took: list[float] = []
    while (begun := time.perf_counter()) < end:
        body = json.dumps({"steps": 1, "sequence": start + len(took)})
        writer.write(
            f"POST /v1/reservations/{run}/grants HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {key}\r\nIdempotency-Key: {uuid.uuid4().hex}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        answer = await reader.readexactly(int(found[1]) if found else 0)
        assert head.startswith(b"HTTP/1.1 200"), answer
        took.append(time.perf_counter() - begun)
    writer.close()
    return took


def send_grants(port: int, key: str, seconds: float, runs: Sequence[str], done: int) -> None:
    """Grant from a client for each run; print each grant's seconds as JSON. In a process alone."""

    async def send() -> list[list[float]]:
        end = time.perf_counter() + seconds
        return await asyncio.gather(*(grant_until(port, key, run, done, end) for run in runs))

    print(json.dumps(asyncio.run(send())))


class Clients:
    """Clients of a server in a process of their own, each with a run."""

    def __init__(self, server: Server, url: str, clients: int) -> None:
        self._server = server
        self.repository = opening.open_repository(url)
        self._work = Workload(self.repository, clients)
        token, _ = Keys(self.repository).create([Scope.ADMIN])
        self._token = token

    def grant(self, seconds: float) -> tuple[float, list[float], float]:
        """Return grants per second, each grant's milliseconds, the server's CPU ms per grant."""
        before = read_cpu_seconds(self._server.process.pid)
        words = [str(self._server.port), self._token, str(seconds), *self._work.runs]
        done = subprocess.run(
            [sys.executable, __file__, "--send", *words], check=True, capture_output=True
        )
        took = [1e3 * each for client in json.loads(done.stdout) for each in client]
        cpu = 1e3 * (read_cpu_seconds(self._server.process.pid) - before)
        return len(took) / seconds, took, cpu / len(took)


def main() -> None:
    """Print a table of the throughput of grants over HTTP and of the bare transaction."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    table = Table(title="Grants over HTTP, PostgreSQL, one worker", title_justify="left")
    for column in ("clients", "grants/s", "bare/s", "ratio", "p50 ms", "p99 ms", "server CPU ms"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder, database("postgresql", Path(folder)) as url:
        opening.open_repository(url).close()
        server = Server(url, Path(folder))
        server.wait()
        try:
            for count in CLIENTS:
                rates, bare, took, cpu = [], [], [], []
                for _ in range(ROUNDS):
                    clients = Clients(server, url, count)
                    bare.append(
                        measure_throughput(
                            Workload(clients.repository, count).run_bare_transaction,
                            count,
                            seconds / ROUNDS,
                        )[0]
                    )
                    rate, each, used = clients.grant(seconds / ROUNDS)
                    rates.append(rate)
                    took += each
                    cpu.append(used)
                    clients.repository.close()
                ratio = statistics.median(a / b for a, b in zip(rates, bare, strict=True))
                centiles = statistics.quantiles(took, n=100)
                table.add_row(
                    f"{count}", f"{statistics.median(rates):.0f}", f"{statistics.median(bare):.0f}",
                    f"{ratio:.2f}", f"{centiles[49]:.1f}", f"{centiles[98]:.1f}",
                    f"{statistics.median(cpu):.2f}",
                )  # fmt: skip
        finally:
            server.kill()
    CONSOLE.print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--send"]:
        send_grants(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5:], 0)
    else:
        main()
