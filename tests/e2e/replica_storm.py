"""Kill one of three replicas every few seconds, under clients with runs on several datasets.

    python -m tests.e2e.replica_storm [--seconds 300] [--replicas 3]

It starts the profile `replicas` of docker-compose.yml, and needs Docker and the project's own
environment. Nothing that was acknowledged may be lost, and `accountant ledger verify` must find no
fault. It prints the calls a second, and the latency by the seconds since the last kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx

from tests.e2e.storm_client import RUN

CLIENT: Final = Path(__file__).with_name("storm_client.py")
CLIENTS: Final = 16
PAUSE: Final = 5.0  # between two kills
PORT: Final = os.environ.get("PROXY_PORT", "8080")
BUDGET: Final = {"epsilon": 1000, "delta": 1e-5}  # more than the clients can use
Json = dict[str, Any]


def compose(*words: str) -> str:
    """Run docker compose with the profile; return its output."""
    command = ["docker", "compose", "--profile", "replicas", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def open_api(key: str) -> httpx.Client:
    """Return a client of the proxy."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"http://127.0.0.1:{PORT}", headers=headers, timeout=30)


def create_datasets(key: str, names: tuple[str, str]) -> None:
    """Create the datasets of all runs."""
    with open_api(key) as http:
        for name in names:
            body = {"name": name, "size": 60_000, "budget": BUDGET, "planned_mechanism": RUN}
            body |= {"accept_weak": True}
            headers = {"Idempotency-Key": uuid.uuid4().hex}
            http.post("/v1/datasets", json=body, headers=headers).raise_for_status()


def kill_replicas(seconds: float) -> list[int]:
    """Kill a replica and start it again, until the time is over; return the times of the kills."""
    chance, kills, end = random.Random(7), [], time.monotonic() + seconds
    while (due := time.monotonic() + PAUSE) < end:
        time.sleep(max(due - time.monotonic(), 0.0))
        one = chance.choice(compose("ps", "--all", "--quiet", "replica").split())
        kills.append(time.monotonic_ns())
        subprocess.run(["docker", "kill", one], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["docker", "start", one], check=True, stdout=subprocess.DEVNULL)
    return kills


def find_lost(key: str, calls: list[Json]) -> Iterator[str]:
    """Yield a fault for each run that is not stored as it was last acknowledged."""
    last: dict[str, Json] = {}
    for call in sorted(calls, key=lambda call: int(call["end"])):
        if call["kind"] != "read" and call["status"] < 300:
            last[call["answer"]["id"]] = call["answer"]
    with open_api(key) as http:
        for run, told in last.items():
            stored = http.get(f"/v1/reservations/{run}").raise_for_status().json()
            for name in ("state", "steps_granted"):
                if stored[name] != told[name]:
                    yield f"{run}: {name} is {stored[name]}, and was {told[name]}"


def print_latencies(calls: list[Json], kills: list[int]) -> None:
    """Print the median and the 99th percentile by whole seconds since the last kill."""
    groups: dict[int, list[float]] = defaultdict(list)
    for call in calls:
        at = bisect_right(kills, call["start"])
        since = int((call["start"] - kills[at - 1]) / 1e9) if at else -1
        groups[since].append((call["end"] - call["start"]) / 1e6)
    for since, found in sorted(groups.items()):
        found.sort()
        half, most = found[len(found) // 2], found[len(found) * 99 // 100]
        words = f"{since} s after a kill" if since >= 0 else "before any kill"
        print(f"{words}: {len(found)} calls, median {half:.1f} ms, p99 {most:.1f} ms")


def main() -> int:
    """Run the storm."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.replica_storm", description=__doc__.splitlines()[0]
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=300.0, help="that the storm lasts")
    parser.add_argument("--replicas", type=int, default=3, help="behind the proxy")
    asked = parser.parse_args()
    names = f"d{secrets.token_hex(4)}", f"e{secrets.token_hex(4)}"
    compose("up", "--build", "--wait", "--scale", f"replica={asked.replicas}")
    key = compose("run", "--rm", "-T", "key", "--scope", "admin")
    create_datasets(key, names)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = [folder / f"client-{at}.jsonl" for at in range(CLIENTS)]
        clients = [subprocess.Popen([sys.executable, CLIENT, key, *names, log, PORT])
                   for log in logs]  # fmt: skip
        kills = kill_replicas(asked.seconds)
        (folder / "stop").touch()
        codes = [client.wait(600) for client in clients]
        calls = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    print(f"{len(kills)} kills, {len(calls) / asked.seconds:.0f} calls a second")
    print_latencies(calls, kills)
    faults = [f"a client ended with {code}" for code in codes if code]
    faults += find_lost(key, calls)
    verified = ["docker", "compose", "exec", "-T", "service", "accountant", "ledger", "verify"]
    if subprocess.run(verified, check=False).returncode:
        faults.append("accountant ledger verify found faults")
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
