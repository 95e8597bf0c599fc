"""The server of the last revision writes beside this one while the database is upgraded."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from accountant_service.ledger import database as opening
from accountant_service.ledger import entry_columns, exporting
from accountant_service.ledger.exporting import EntryQuery
from accountant_service.ledger.repair import repair
from accountant_service.ledger.rules import EntryKind
from accountant_service.ledger.schema_revision import MIGRATIONS, REVISION, read_revision
from accountant_service.ledger.verification import verify
from tests.support.databases import database
from tests.support.ledger_scenarios import PLAN_JSON
from tests.support.server import Server, program

ROOT = Path(__file__).parents[2]
CLIENTS = 4
RUNS_BEFORE, RUNS_BESIDE = 8, 40  # of all clients


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service before the newest migration, from the history of this repository."""
    (newest,) = MIGRATIONS.glob(f"versions/{REVISION}_*.py")
    try:
        added = _git("log", "-1", "--diff-filter=A", "--format=%H", "--", str(newest)).decode()
        before = f"{added.strip()}^" if added.strip() else "HEAD"
        archive = _git("archive", before, "accountant_service")
    except (OSError, subprocess.CalledProcessError) as error:
        assert not os.environ.get("CI"), "the history of the repository is needed"
        pytest.skip(f"no history of this repository: {error}")
    folder = tmp_path_factory.mktemp("previous")
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return folder


class Client(threading.Thread):
    """A trainer that reserves, is granted and commits runs, on any of the servers in turn."""

    def __init__(self, servers: list[Server], key: str, counts: dict[str, int]) -> None:
        super().__init__()
        self.servers, self.key, self.counts = servers, key, counts
        self.ended: list[tuple[str, int]] = []  # acknowledged runs, with their steps
        self.failures: list[str] = []
        self.is_stopping = False

    def run(self) -> None:
        while not self.is_stopping:
            run = self.send("/v1/datasets/d/reservations", {"mechanism": PLAN_JSON})
            if run is None:
                continue
            path, granted = f"/v1/reservations/{run['id']}", 0
            for steps in (1, 2):
                answer = self.send(f"{path}/grants", {"steps": steps, "sequence": granted})
                granted += steps
                assert answer is None or answer["steps_granted"] == granted
            if self.send(f"{path}/commit", {}) is not None:
                self.ended.append((run["id"], granted))

    def send(self, path: str, body: Any) -> Any:
        """Return the answer to a write, repeated at any server until it has one."""
        headers = {"Authorization": f"Bearer {self.key}", "Idempotency-Key": uuid.uuid4().hex}
        for attempt in range(200):
            server = self.servers[(hash(path) + attempt + len(self.ended)) % len(self.servers)]
            with suppress(OSError):
                status, text = server.ask("POST", path, body, headers)
                if status < 300:
                    kind = path.rpartition("/")[2]
                    self.counts[kind] = self.counts.get(kind, 0) + 1
                    return json.loads(text)
                if status not in (429, 503):
                    self.failures.append(f"{status} {text!r}")
                    return None
            time.sleep(0.05)
        self.failures.append(f"no answer to {path}")
        return None


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with database("postgresql", tmp_path) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_while_the_previous_server_writes_beside_this_one(
    previous: Path, url: str, tmp_path: Path
) -> None:
    servers = [Server(url, tmp_path, source=previous)]
    clients: list[Client] = []
    try:
        servers[0].wait()
        key = _create_key(previous, url, tmp_path)
        budget = {"epsilon": 3.0, "delta": 1e-5}
        dataset = {"name": "d", "size": 1000, "budget": budget, "filter": "renyi"}
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "first"}
        assert servers[0].ask("POST", "/v1/datasets", dataset, headers)[0] == 201
        counts, ready = dict[str, int](), servers[:1]
        clients += [Client(ready, key, counts) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        _wait_for(clients, RUNS_BEFORE)
        servers.append(Server(url, tmp_path))  # upgrades the database under the older one
        servers[1].wait()
        ready.append(servers[1])
        _wait_for(clients, RUNS_BEFORE + RUNS_BESIDE)
        for client in clients:
            client.is_stopping = True
            client.join()
        assert [each for client in clients for each in client.failures] == []
        servers[0].kill()
        runs = [each for client in clients for each in client.ended]
        for run, granted in runs:
            status, text = servers[1].ask("GET", f"/v1/reservations/{run}", None, headers)
            assert (status, json.loads(text)["steps_granted"]) == (200, granted)
            path = f"/v1/reservations/{run}/certificate"
            assert servers[1].ask("GET", path, None, headers)[0] == 200
    finally:
        for client in clients:
            client.is_stopping = True
        for server in servers:
            server.kill()
    with closing(opening.open_repository(url)) as repository:
        with repository.reading() as reading:
            assert read_revision(reading.connection) == REVISION
            count = "SELECT count(*) FROM entry WHERE at IS NULL"
            left = reading.connection.exec_driver_sql(count).scalar_one()
            query = EntryQuery(None, frozenset([EntryKind.GRANT]))
            grants = len(list(exporting.iterate_entries(reading, query)))
        assert grants == counts["grants"] >= 2 * len(runs)
        assert verify(repository).faults == []
        entry_columns.derive_all(repository)
        assert repair(repository, is_trial=True).mended == []
    print(f"{len(runs)} runs, {grants} grants, {left} entries by the older server")


def _create_key(previous: Path, url: str, folder: Path) -> str:
    """Create an administrator's key with the previous version's command."""
    environment = os.environ | {"ACCOUNTANT_DATABASE_URL": url, "PYTHONPATH": str(previous)}
    made = subprocess.run(
        [*program(previous), "keys", "create", "--scope", "admin"],
        env=environment, check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    return made.stdout.decode().strip()


def _wait_for(clients: list[Client], runs: int) -> None:
    """Wait until the clients have ended so many runs."""
    deadline = time.monotonic() + 240
    while sum(len(client.ended) for client in clients) < runs:
        assert [each for client in clients for each in client.failures] == []
        assert time.monotonic() < deadline, "the servers are too slow"
        time.sleep(0.05)
