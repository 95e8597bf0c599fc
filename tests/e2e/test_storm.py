"""Racing client processes and servers killed with SIGKILL: nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import database as opening
from accountant_service.ledger.keys import Keys, Scope
from accountant_service.ledger.model import Reservation
from accountant_service.ledger.service import Ledger, Request
from accountant_service.ledger.verification import verify
from tests.databases import database

PROGRAMS = Path(sys.executable).parent
CLIENT = Path(__file__).with_name("storm_client.py")


class Server:
    """A server process that can be killed and started again on its port."""

    def __init__(self, url: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._environment = os.environ | {"ACCOUNTANT_DATABASE_URL": url}
        self._log = folder / f"server-{self.port}.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [PROGRAMS / "accountant", "serve", "--port", str(self.port)],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.mark.parametrize(("kind", "servers"), [("sqlite", 1), ("postgresql", 2)])
@pytest.mark.parametrize(
    "kills", [4, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_storm(kind: str, servers: int, kills: int, tmp_path: Path) -> None:
    with database(kind, tmp_path) as url:
        repository = opening.open_repository(url)
        token, admin = Keys(repository).create([Scope.ADMIN])
        epsilon = 1.5 if kills < 10 else 60.0  # used up, or more than the storm can use
        Ledger(repository).create_dataset(
            Request(admin, "first", "storm", None), "d", 60_000, epsilon, 1e-5,
            NeighbouringRelation.ADD_OR_REMOVE_ONE, "record", None,
        )  # fmt: skip
        running = [Server(url, tmp_path) for _ in range(servers)]
        for server in running:
            server.wait()
        ports = [str(server.port) for server in running]
        logs = [tmp_path / f"client-{i}.jsonl" for i in range(8)]
        clients = [
            subprocess.Popen([sys.executable, CLIENT, token, "d", log, *ports]) for log in logs
        ]
        chance, killed = random.Random(7), 0
        while killed < kills and any(client.poll() is None for client in clients):
            time.sleep(chance.uniform(0.05, 0.5))
            server = chance.choice(running)
            server.kill()
            killed += 1
            server.start()
            server.wait()
        if kills > 10:
            assert killed == kills
        (tmp_path / "stop").touch()
        codes = [client.wait(240) for client in clients]
        for server in running:
            server.kill()
        assert codes == [0] * 8, [log.read_bytes()[-500:] for log in tmp_path.glob("*.log")]
        report = verify(repository)
        assert report.faults == []
        with repository.reading() as reading:
            dataset = reading.dataset("d")
            assert dataset is not None
            assert dataset.balance.taken <= dataset.policy.budget
            assert dataset.policy.epsilon_of(dataset.balance.spent) <= epsilon
            everything_acknowledged_is_stored(logs, reading.reservations(dataset))
        repository.close()
        print(f"{kind}: {killed} kills, {report.entries} entries, {dataset.balance}")


def everything_acknowledged_is_stored(logs: list[Path], stored: list[Reservation]) -> None:
    granted = {run.identifier: run.steps_granted for run in stored}
    texts = [log.read_text() for log in logs if log.exists()]
    facts = [json.loads(line) for text in texts for line in text.splitlines()]
    assert facts
    for fact in facts:
        assert granted[fact["reservation"]] >= fact["granted"]
    acknowledged: dict[str, int] = {}
    for fact in facts:
        run = fact["reservation"]
        acknowledged[run] = max(acknowledged.get(run, 0), fact["granted"])
    # a client waits for every answer: what is stored beyond that was on its way when it ended
    assert sum(granted.values()) == sum(acknowledged.values())
