"""A ledger restored from a backup: no step that was made before the restore is made again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from torch import nn

from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.training_bench import ROWS, Bench
from training_client.budget import LedgerBudget
from training_client.client import AccountingService
from training_client.errors import DataError, NoGuaranteeError, ServiceRefusedError
from training_client.lab.models import cross_entropy
from training_client.optimizers import PrivateOptimizer, make_optimizer
from training_client.phased_budget import ChargedBudget, PhasedLedgerBudget
from training_client.plan import Plan, Schedule

PLAN = Plan(ROWS, 0.05, 1.0, 4.0)
PHASED = Plan(ROWS, 0.05, 1.0, 4.0, noise_schedule=Schedule.by_steps([(3, 1.0), (9, 0.9)]))


class Restorable(Bench):
    """A bench with a ledger of its own, which can be backed up and restored."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, apps: ExitStack) -> None:
        self._files, self._apps = folder, apps
        super().__init__(self._open("ledger"), folder / "run", monkeypatch)
        self.ledger = self.service("http://test", api_key=self.token)

    def _open(self, name: str) -> TestClient:
        """Start a service on the database of this name."""
        app = create_app(Settings(database_url=f"sqlite:///{self._files}/{name}.db"))
        return self._apps.enter_context(TestClient(app))

    def back_up(self) -> None:
        """Copy the ledger as it is now."""
        with (
            sqlite3.connect(self._files / "ledger.db") as now,
            sqlite3.connect(self._files / "copy.db") as copy,
        ):
            now.backup(copy)

    def restore(self) -> None:
        """Put the copy in the place of the ledger."""
        self.api = self._open("copy")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Restorable]:
    torch.set_num_threads(1)
    with ExitStack() as apps:
        found = Restorable(tmp_path, monkeypatch, apps)
        found.give(8.0)
        yield found


def run_until(
    bench: Restorable, killed_at: int, backup_at: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Train with a backup before one step, and as if the process were killed before another."""
    genuine, made = PrivateOptimizer.step, list[int]()

    def step(*of: Any) -> float:
        if len(made) + 1 == backup_at:
            bench.back_up()
        if len(made) + 1 == killed_at:
            raise KeyboardInterrupt
        made.append(1)
        return genuine(*of)

    with monkeypatch.context() as patched:
        patched.setattr(PrivateOptimizer, "step", step)
        done = bench.run(
            "--noise-multiplier", "4", "--steps", "70", "--dataset", bench.name,
            "--checkpoint-every", "50",
        )  # fmt: skip
    assert done.exit_code == 130, done.output
    return made


@pytest.mark.slow
def test_steps_made_after_the_checkpoint_are_not_made_again(
    bench: Restorable, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_until(bench, killed_at=63, backup_at=50, monkeypatch=monkeypatch)
    assert len(made) == 62
    bench.restore()
    again = bench.counted(monkeypatch)
    done = bench.train("run", "--resume")
    said = " ".join(done.output.split())
    assert done.exit_code == 2, said
    assert "the ledger has granted only 50 of them" in said
    assert "docs/how-to/backup.md" in said
    assert again == []
    # as the page says: the missing steps are entered, and the run goes on
    (identifier,) = torch.load(bench.folder / "checkpoint.pt", weights_only=True)["reservations"]
    bench.ledger.grant(bench.ledger.reservation(identifier), 20)
    done = bench.train("run", "--resume")
    assert done.exit_code == 0, done.output
    assert len(made) + len(again) <= bench.read("certificate.json")["steps"]
    assert bench.left() == {"certificate.json", "model.pt", "privacy.json"}


@pytest.mark.slow
def test_an_older_run_s_record_does_not_stop_a_new_run_in_its_folder(
    bench: Restorable, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.back_up()
    run_until(bench, killed_at=63, backup_at=0, monkeypatch=monkeypatch)
    bench.restore()
    assert "not-found" in bench.train("run", "--resume").output
    (bench.folder / "checkpoint.pt").unlink()
    run_until(bench, killed_at=3, backup_at=0, monkeypatch=monkeypatch)
    done = bench.train("run", "--resume")
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_a_projection_that_the_ledger_forgot_is_not_used(
    bench: Restorable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was released, and charged after the backup; no step was granted yet."""
    genuine = LedgerBudget.begin

    def begin(budget: LedgerBudget) -> Any:
        bench.back_up()
        return genuine(budget)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LedgerBudget, "begin", begin)
        patched.setattr(LedgerBudget, "take", killed)
        done = bench.run(
            "--noise-multiplier", "8", "--pca", "2", "--pca-noise", "20", "--dataset", bench.name
        )
    assert done.exit_code == 130, done.output
    assert (bench.folder / "checkpoint.pt").exists()
    bench.restore()
    again = bench.counted(monkeypatch)
    done = bench.train("run", "--resume")
    assert done.exit_code == 2, done.output
    assert "granted only 0 of them" in " ".join(done.output.split())
    assert again == []


Resume = Callable[[str | Path | None], ChargedBudget]


def own_loop(bench: Restorable, scheduled: bool) -> Resume:
    """Reserve steps; return a function that makes their budget as a new process would."""
    service: AccountingService = bench.ledger
    if scheduled:
        held = PhasedLedgerBudget.reserve(service, PHASED, bench.name, 12).reservations
        return lambda record: PhasedLedgerBudget.resume(
            service, PHASED, bench.name, held, block=3, record=record
        )
    one = service.reserve(bench.name, PLAN.mechanism(12)).identifier
    return lambda record: LedgerBudget(
        service, PLAN, bench.name, 1e-5, service.reservation(one), block=3, block_max=3,
        record=record,
    )  # fmt: skip


def make_steps(budget: ChargedBudget, last: int) -> PrivateOptimizer:
    optimizer = make_optimizer("dp_sgd", nn.Linear(6, 4), budget)
    while optimizer.steps_made < last:
        optimizer.expect_examples(2)
        optimizer.step(torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64), cross_entropy)
    return optimizer


@pytest.mark.parametrize("scheduled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_loop_of_one_s_own_with_a_record_is_refused(
    bench: Restorable, scheduled: bool, tmp_path: Path
) -> None:
    record = tmp_path / "results" / "granted.json"
    resume = own_loop(bench, scheduled)
    budget = resume(record)
    optimizer = make_steps(budget, 3)
    kept = optimizer.state_dict()
    bench.back_up()
    make_steps(budget, 5)  # and killed before the next checkpoint
    assert sum(json.loads(record.read_text()).values()) == budget.made > 5
    resume(record)
    bench.restore()
    with pytest.raises(NoGuaranteeError, match=r"granted\.json.* the ledger has granted only"):
        resume(str(record))
    without = make_optimizer("dp_sgd", nn.Linear(6, 4), resume(None))
    without.load_state_dict(kept)  # nothing knows of the steps made since


def test_a_block_that_cannot_be_recorded_is_not_used(bench: Restorable, tmp_path: Path) -> None:
    budget = own_loop(bench, scheduled=False)(tmp_path / "results" / "granted.json")
    (tmp_path / "results").touch()  # no folder can be made there
    optimizer = make_optimizer("dp_sgd", nn.Linear(6, 4), budget)
    batch = torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)
    before = [each.clone() for each in optimizer.parameters]
    optimizer.expect_examples(2)
    with pytest.raises(FileExistsError):
        optimizer.step(*batch, cross_entropy)
    with pytest.raises((ServiceRefusedError, NoGuaranteeError)):  # nor if it is tried again
        optimizer.step(*batch, cross_entropy)
    assert budget.made == 0
    assert all(map(torch.equal, before, optimizer.parameters))


@pytest.mark.slow
def test_a_record_holds_several_runs_and_is_never_half_written(
    bench: Restorable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "granted.json"
    for _ in range(2):
        make_steps(own_loop(bench, scheduled=False)(record), 4)
    assert list(json.loads(record.read_text()).values()) == [6, 6]
    whole = record.read_bytes()
    budget = own_loop(bench, scheduled=False)(record)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        make_steps(budget, 1)
    assert record.read_bytes() == whole


def test_an_unreadable_record_is_refused(bench: Restorable, tmp_path: Path) -> None:
    record = tmp_path / "granted.json"
    resume = own_loop(bench, scheduled=False)
    for text in ("", "{", "[]", '{"r": "many"}', '{"r": 1.5}'):
        record.write_text(text)
        with pytest.raises(DataError, match=r"granted\.json .*docs/how-to/backup\.md"):
            resume(record)
