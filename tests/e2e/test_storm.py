"""Racing client processes and servers killed with SIGKILL: nothing acknowledged is lost."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.api.ledger_views import ANSWERS
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.filters.reference import SLACK_UNITS, ReferenceFilter
from accountant_service.ledger.rules import Dataset, NewDataset
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.mechanisms import from_json, to_json
from tests.e2e.storm_client import PLANS, RUN
from tests.support.databases import database, private_server
from tests.support.helpers import nightly
from tests.support.linearizability import Call, faults
from tests.support.server import Server

CLIENT = Path(__file__).with_name("storm_client.py")


class Storm:
    """Clients and servers, from the first call to the reckoning.

    All runs are on dataset d, and some on dataset e as well, which therefore always has room.
    """

    def __init__(self, url: str, folder: Path, servers: int, epsilon: float) -> None:
        self.repository = opening.open_repository(url)
        token, admin = Keys(self.repository).create([Scope.ADMIN])
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        for name in ("d", "e"):
            Ledger(self.repository, ANSWERS).create_dataset(
                WriteRequest(admin, name, "storm", None),
                NewDataset(
                    name, 60_000, epsilon, 1e-5, relation, "record", from_json(RUN),
                    accept_weak=True,
                ),
            )  # fmt: skip
        self.epsilon, self.folder = epsilon, folder
        self.servers = [Server(url, folder) for _ in range(servers)]
        for server in self.servers:
            server.wait()
        ports = [str(server.port) for server in self.servers]
        self.logs = [folder / f"client-{i}.jsonl" for i in range(8)]
        self.clients = [
            subprocess.Popen([sys.executable, CLIENT, token, "d", "e", log, *ports])
            for log in self.logs
        ]

    @property
    def rages(self) -> bool:
        """True while a client still has budget to ask for."""
        return any(client.poll() is None for client in self.clients)

    def answered(self) -> int:
        """Return the number of calls that were answered."""
        return sum(len(log.read_text().splitlines()) for log in self.logs if log.exists())

    def wait_for(self, answers: int) -> None:
        """Until so many calls have had one."""
        deadline = time.monotonic() + 60
        while self.answered() < answers:
            assert time.monotonic() < deadline, "nothing is answered any more"
            time.sleep(0.05)

    def end(self) -> str:
        """Stop it, and hold every promise against what is stored; a line of figures."""
        (self.folder / "stop").touch()
        codes = [client.wait(240) for client in self.clients]
        for server in self.servers:
            server.kill()
        assert codes == [0] * 8, [log.read_bytes()[-500:] for log in self.folder.glob("*.log")]
        report = verify(self.repository)
        assert report.faults == []
        lines = [line for log in self.logs if log.exists() for line in log.read_text().splitlines()]
        calls = [Call.from_line(line) for line in lines]
        joint = [call for call in calls if "e" in (call.answer.get("datasets") or ())]
        dataset, entries = self.judge("d", calls)
        self.judge("e", joint)
        charged = {name: _charged(entries, plan) for name, plan in PLANS.items()}
        assert all(charged.values()), "one of the plans was never reserved"
        assert joint, "no run was on both datasets"
        self.repository.close()
        early = sum(e["kind"] in ("commit", "release") and e["steps"] > 0 for e in entries)
        counts = ", ".join(f"{len(each)} {name}" for name, each in charged.items())
        both = f"{len(joint)} of runs on both datasets"
        return f"{len(calls)} calls, {both}, {counts}, {early} ended early, {dataset.balance}"

    def judge(self, name: str, calls: list[Call]) -> tuple[Dataset, list[dict[str, Any]]]:
        """Hold the calls about a dataset against its record; return the dataset and its entries."""
        with self.repository.reading() as reading:
            dataset = reading.find_dataset(name)
            assert dataset is not None
            entries = [json.loads(row.body) for row in reading.list_entries(dataset, 0, 1 << 30)]
        policy = dataset.policy
        assert isinstance(policy, ReferenceFilter)
        assert policy.admits(dataset.balance.taken)
        assert policy.epsilon_of(dataset.balance.spent) <= self.epsilon
        charged = {plan: _charged(entries, PLANS[plan]) for plan in PLANS}
        # a client waits for every answer before it ends: nothing may be stored beyond these
        costs = {plan: (max(each, default=12) + 1, 0) for plan, each in charged.items()}
        costs |= {each: (12, 0) for each, plan in PLANS.items() if _is_reference(policy, plan)}
        assert faults(calls, entries, (policy.steps, SLACK_UNITS), costs) == []
        return dataset, entries


def _charged(entries: list[dict[str, Any]], plan: dict[str, Any]) -> list[int]:
    """The reference steps that each reservation of a plan holds.

    They grow a little as slack is used up: a refusal is judged by the largest, and one more.
    """
    described = to_json(from_json(plan))
    return [
        entry["charged_reference_steps"]
        for entry in entries
        if entry["kind"] == "reserve" and entry["mechanism"] == described
    ]


def _is_reference(policy: ReferenceFilter, plan: dict[str, Any]) -> bool:
    return policy.reference == from_json(plan | {"steps": 1})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "servers", "kills"),
    [
        ("postgresql", 2, 4),
        *(
            nightly(*place, kills)
            for place in (("sqlite", 1), ("postgresql", 2))
            for kills in (10, 60)
        ),
    ],
)
def test_servers_are_killed(kind: str, servers: int, kills: int, tmp_path: Path) -> None:
    with database(kind, tmp_path) as url:
        epsilon = 1.5 if kills < 10 else 60.0  # used up, or more than the storm can use
        storm = Storm(url, tmp_path, servers, epsilon)
        chance, killed = random.Random(7), 0
        while killed < kills and storm.rages:
            time.sleep(chance.uniform(0.05, 0.5))
            server = chance.choice(storm.servers)
            server.kill()
            killed += 1
            server.start()
            server.wait()
        if kills > 10:
            assert killed == kills
        print(f"{kind}: {killed} kills, {storm.end()}")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_database_crashes(tmp_path: Path) -> None:
    """Without it nothing is granted; with it again everything goes on, nobody restarts a server."""
    with private_server() as postgresql:
        storm = Storm(postgresql.url, tmp_path, 2, 60.0)
        chance = random.Random(9)
        for _ in range(10):
            time.sleep(chance.uniform(0.5, 1.5))
            postgresql.crash()
            before = storm.answered()
            time.sleep(chance.uniform(0.2, 1.0))
            after = storm.answered()
            assert after <= before + 8  # each client's last answer may still have been on its way
            postgresql.start()
            storm.wait_for(after + 8)
        print(f"10 crashes of the database, {storm.end()}")
