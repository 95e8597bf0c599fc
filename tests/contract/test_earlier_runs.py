"""Ledgers, run folders and claims that the version of 2026-11-23 wrote can still be read.

The fixtures were written by that version's own commands: a run that ended (`whole`), one whose
reservation was released early (`released`), and two that were killed in the middle (`stopped`,
and `projected` with AdaDP and a private projection). `ledger-0002.sql` is their ledger, and
`tokens.json` has the API keys of the two that can be resumed.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.ledger import database, repository
from accountant_service.ledger.verification import verify
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.training_bench import Bench

FIXTURES = Path(__file__).parent / "fixtures"
RUNS = FIXTURES / "runs"
WRITTEN_AT_NS = 1_795_474_840_000_000_000  # while the leases of the fixtures last


@pytest.fixture
def ledger_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ledger of the version before, at the time when it was written."""
    file = tmp_path / "ledger.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript((FIXTURES / "ledger-0002.sql").read_text())
    clock = SimpleNamespace(**(vars(time) | {"time_ns": lambda: WRITTEN_AT_NS}))
    monkeypatch.setattr(repository, "time", clock)
    return file


@pytest.fixture
def api(ledger_file: Path) -> Iterator[TestClient]:
    with TestClient(create_app(Settings(database_url=f"sqlite:///{ledger_file}"))) as client:
        yield client


def test_the_ledger_verifies(ledger_file: Path) -> None:
    opened = database.open_repository(f"sqlite:///{ledger_file}")
    try:
        report = verify(opened)
    finally:
        opened.close()
    assert report.faults == []
    assert report.datasets == 4


@pytest.mark.parametrize("name", ["whole", "released"])
def test_a_certificate_verifies_and_agrees_with_the_claim(name: str) -> None:
    certificate = json.loads((RUNS / name / "certificate.json").read_text())
    claim: dict[str, Any] = json.loads((RUNS / name / "privacy.json").read_text())
    done = CliRunner().invoke(cli.app, ["verify", str(RUNS / name / "certificate.json"), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["faults"], told["not_covered"]) == ([], [])
    assert told["steps_reserved"] == claim["steps_planned"]
    assert certificate["guarantee"]["epsilon"] == claim["epsilon"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("stopped", 70), ("projected", 40)])
def test_a_killed_run_of_the_earlier_version_can_be_resumed(
    name: str, steps: int, api: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    shutil.copytree(RUNS / name, tmp_path / "run")
    bench = Bench(api, tmp_path / "run", monkeypatch)
    bench.name, bench.token = json.loads((RUNS / "tokens.json").read_text())[name]
    again = bench.train("run", "--resume")
    assert again.exit_code == 0, again.output
    certificate, claim = bench.read("certificate.json"), bench.read("privacy.json")
    assert certificate["steps"] == certificate["steps_reserved"] == claim["steps_planned"] == steps
    assert claim["model_sha256"] == bench.digest()
    assert "checkpoint.pt" not in bench.left()
