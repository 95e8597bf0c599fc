"""Backup and restore as docs/how-to/backup.md says, while a run goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.api.ledger_views import ANSWERS
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.rules import NewDataset
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.mechanisms import DpSgd
from tests.support.databases import private_server

RUN = DpSgd(1.0, sample_rate=0.01, steps=100)


class Run:
    """A run that is granted ten of a hundred steps before the backup, and more after it."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.token, self.key = Keys(repository).create([Scope.ADMIN])
        ledger = Ledger(repository, ANSWERS)
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        new = NewDataset("d", 1000, 3.0, 1e-5, relation, "record")
        ledger.create_dataset(request(self.key), new)
        ledger.reserve(request(self.key), "d", RUN, 3600, "")
        with repository.reading() as reading:
            dataset = reading.find_dataset("d")
            assert dataset is not None
            self.identifier = reading.list_reservations(dataset)[0].identifier
        self.last = request(self.key)
        self.answer = ledger.grant(self.last, self.identifier, 10, 0)

    def goes_on(self) -> None:
        Ledger(self.repository, ANSWERS).grant(request(self.key), self.identifier, 20, 10)

    def continues_on(self, restored: Repository) -> None:
        """The copy is whole, remembers, refuses what it does not know, and grants anew."""
        assert verify(restored).faults == []
        ledger, key = Ledger(restored, ANSWERS), Keys(restored).authenticate(self.token)
        assert ledger.grant(self.last, self.identifier, 10, 0) == self.answer
        assert ledger.get_reservation(key, self.identifier)[1].steps_granted == 10
        ledger.grant(request(key), self.identifier, 20, 10)
        assert verify(restored).faults == []


def request(key: KeyRecord) -> WriteRequest:
    return WriteRequest(key, uuid.uuid4().hex, "backup", None)


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        assert not os.environ.get("CI"), f"{name} is needed"
        pytest.skip(f"no {name} on this machine")
    return found


@pytest.mark.slow
def test_sqlite(tmp_path: Path) -> None:
    repository = opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")
    run = Run(repository)
    copy = tmp_path / "copy.db"
    subprocess.run([program("sqlite3"), tmp_path / "ledger.db", f".backup {copy}"], check=True)
    run.goes_on()
    restored = opening.open_repository(f"sqlite:///{copy}")
    run.continues_on(restored)
    restored.close()
    repository.close()


@pytest.mark.slow
def test_postgresql() -> None:
    with private_server() as server:
        repository = opening.open_repository(server.url)
        run = Run(repository)
        at: dict[str, Any] = {"check": True, "stdout": subprocess.PIPE}
        place = ["-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres"]
        dump = subprocess.run([program("pg_dump"), *place, "postgres"], **at).stdout
        run.goes_on()
        subprocess.run([program("createdb"), *place, "copy"], check=True)
        restore = [program("psql"), *place, "-v", "ON_ERROR_STOP=1", "-q", "copy"]
        subprocess.run(restore, input=dump, **at)
        restored = opening.open_repository(server.url.removesuffix("postgres") + "copy")
        run.continues_on(restored)
        restored.close()
        repository.close()
