"""A trainer killed at random moments: no step without a charge, and it goes on where it may."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import database as opening
from accountant_service.ledger.keys import Keys, Scope
from accountant_service.ledger.model import Reservation
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.service import Ledger, Request
from accountant_service.ledger.verification import verify
from tests.e2e.test_storm import Server

TRAINER = Path(__file__).with_name("counting_trainer.py")
STEPS = 400
LONG = 2000  # more than four kills can cost: each may leave a block of up to 350 steps unused


class Bench:
    """A ledger with one dataset, its server, and trainers that draw on it."""

    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder}/ledger.db"
        self.repository: Repository = opening.open_repository(url)
        token, admin = Keys(self.repository).create([Scope.ADMIN])
        Ledger(self.repository).create_dataset(
            Request(admin, "first", "bench", None), "d", 60_000, 3.0, 1e-5,
            NeighbouringRelation.ADD_OR_REMOVE_ONE, "record", None,
        )  # fmt: skip
        self.server = Server(url, folder)
        self.server.wait()
        self.folder, self.count = folder, folder / "steps"
        self._environment = os.environ | {"ACCOUNTANT_API_KEY": token}

    def trainer(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(TRAINER), str(self.count), "run", "--dataset", "d"]
        command += ["--service", f"http://127.0.0.1:{self.server.port}", "--hidden", "8"]
        command += ["--steps", str(STEPS), "--checkpoint-every", "7", "--batch-size", "6"]
        command += ["--output", str(self.folder / "run"), *arguments]
        return subprocess.Popen(
            command, env=self._environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def made(self) -> int:
        return self.count.stat().st_size if self.count.exists() else 0

    def runs(self, kind: str = "dp_sgd") -> list[Reservation]:
        with self.repository.reading() as reading:
            dataset = reading.dataset("d")
            assert dataset is not None
            found = reading.reservations(dataset)
        return [each for each in found if each.mechanism["kind"] == kind]

    def close(self) -> None:
        self.server.kill()
        self.repository.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.close()


def wait_for(bench: Bench, steps: int, trainer: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while bench.made() < steps and trainer.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("optimizer", "more", "projections"),
    [("adadp", (), 0), ("dp_adam", ("--pca", "20", "--pca-noise", "20"), 1)],
)
def test_kills_and_resumes_never_make_a_step_that_was_not_charged(
    bench: Bench, optimizer: str, more: tuple[str, ...], projections: int
) -> None:
    chance = random.Random(11)
    trainer = bench.trainer("--optimizer", optimizer, "--steps", f"{LONG}", *more)
    wait_for(bench, 8, trainer)  # there is a checkpoint
    for _ in range(4):
        wait_for(bench, bench.made() + chance.randint(1, 70), trainer)
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
        (run,) = bench.runs()
        assert bench.made() <= run.steps_granted < run.steps_reserved == LONG
        trainer = bench.trainer("--resume")
    output, _ = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, output
    (run,) = bench.runs()
    assert (run.state, run.steps_granted) == ("committed", LONG)
    charged = [(each.state, each.steps_granted) for each in bench.runs("gaussian")]
    assert charged == projections * [("committed", 1)]
    assert bench.made() <= LONG
    claim = json.loads((bench.folder / "run" / "certificate.json").read_text())
    assert claim["steps"] == LONG
    assert not (bench.folder / "run" / "checkpoint.pt").exists()
    assert verify(bench.repository).faults == []
    again = bench.trainer("--resume")
    assert "no checkpoint" in again.communicate(timeout=60)[0]
    assert again.returncode == 2


@pytest.mark.slow
def test_sigterm_commits_what_was_trained(bench: Bench) -> None:
    trainer = bench.trainer()
    wait_for(bench, 20, trainer)
    trainer.terminate()
    output, _ = trainer.communicate(timeout=60)
    assert trainer.returncode == 130, output
    assert "it was asked to end" in output
    (run,) = bench.runs()
    assert run.state == "committed"
    assert bench.made() <= run.steps_granted < STEPS
    assert json.loads((bench.folder / "run" / "certificate.json").read_text())["steps"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_exactly_as_many_steps_run_as_are_affordable(bench: Bench, seed: int) -> None:
    noise = random.Random(seed).uniform(0.9, 2.0)
    refused = bench.trainer("--noise-multiplier", f"{noise}", "--steps", "1000000000")
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 3, output
    assert bench.made() == 0
    affordable = int(output.split(" such steps would")[0].split()[-1])
    short = min(affordable, 60)
    bench.count.unlink(missing_ok=True)
    trainer = bench.trainer("--noise-multiplier", f"{noise}", "--steps", str(short))
    trainer.communicate(timeout=120)
    assert trainer.returncode == 0
    assert bench.made() == short
    beyond = bench.trainer("--noise-multiplier", f"{noise}", "--steps", str(affordable - short + 1))
    beyond.communicate(timeout=60)
    assert beyond.returncode == 3
    assert bench.made() == short


@pytest.mark.slow
def test_a_service_that_goes_away_stops_the_run_and_loses_nothing(bench: Bench) -> None:
    """The granted block is finished, no more; with a service again the run goes on."""
    trainer = bench.trainer()
    wait_for(bench, 20, trainer)
    bench.server.kill()
    output, _ = trainer.communicate(timeout=120)
    assert trainer.returncode == 4, output
    assert "--resume" in output
    (run,) = bench.runs()
    assert bench.made() == run.steps_granted < STEPS
    assert (bench.folder / "run" / "model.pt").exists()
    bench.server.start()
    bench.server.wait()
    again = bench.trainer("--resume")
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert bench.made() == STEPS  # nothing was charged in vain
