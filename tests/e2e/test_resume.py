"""A trainer killed at random moments: no step without a charge, and it goes on where it may.

The second tier kills one run at a few moments; the night kills many, also at chosen moments.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path

import httpx
import pytest

from accountant_service.ledger.rules import Reservation
from accountant_service.ledger.verification import verify
from tests.support.killed_program import KilledProgram

TRAINER = Path(__file__).with_name("counting_trainer.py")
STEPS = 400
SHORT = 300  # a few blocks
LONG = 2000  # more than four kills can cost: each may leave a block of up to 350 steps unused


class Bench(KilledProgram):
    """A ledger with one dataset, its server, and trainers that draw on it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ("d", 60_000, 3.0))
        self.count = folder / "steps"

    def trainer(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(TRAINER), str(self.count), "run", "--dataset", "d"]
        command += ["--service", f"http://127.0.0.1:{self.server.port}", "--hidden", "8"]
        command += ["--checkpoint-every", "7", "--batch-size", "6"]
        if "--resume" not in arguments:
            command += ["--steps", str(STEPS)]
        return self.launch([*command, "--output", str(self.folder / "run"), *arguments])

    def begun_or_resumed(self, *arguments: str) -> subprocess.Popen[str]:
        """Whichever the folder allows; there is budget for another plan where one is lost."""
        if self.checkpoint.exists():
            return self.trainer("--resume", *arguments)
        return self.trainer("--steps", f"{SHORT}", "--noise-multiplier", "2", *arguments)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "run" / "checkpoint.pt"

    @property
    def ended(self) -> bool:
        return (self.folder / "run" / "certificate.json").exists() and not self.checkpoint.exists()

    def require_charged(self) -> None:
        """Steps run are at most steps charged; where nothing can be resumed none were."""
        made = self.made()  # first: a trainer that still runs has its steps charged before
        runs = self.runs()
        assert made <= sum(run.steps_granted for run in runs)
        if not self.checkpoint.exists() and not self.ended:
            assert made == sum(run.steps_granted for run in runs) == 0

    def require_whole(self) -> None:
        """One run, of exactly its plan; those lost before their first step are charged nothing."""
        *lost, run = sorted(self.runs(), key=lambda each: each.steps_granted)
        assert (run.state, run.steps_granted, run.steps_reserved) == ("committed", SHORT, SHORT)
        assert [(each.state, each.steps_granted) for each in lost] == len(lost) * [("open", 0)]
        assert self.made() <= SHORT
        claim = json.loads((self.folder / "run" / "certificate.json").read_text())
        assert (claim["steps"], claim["reservation"]) == (SHORT, run.identifier)
        assert verify(self.repository).faults == []

    def made(self) -> int:
        return self.count.stat().st_size if self.count.exists() else 0

    def runs(self, kind: str = "dp_sgd") -> list[Reservation]:
        return [each for each in self.reservations() if each.mechanism["kind"] == kind]


class Gate(ThreadingHTTPServer):
    """Passes questions on to a server, and kills who asks one of them.

    Args:
        port: of the server.
        question: how the path of that one ends.
        turn: which of several it is, from 1.
        answered: only once the server has answered, of which nothing is passed on.
    """

    def __init__(self, port: int, question: str, turn: int, *, answered: bool) -> None:
        gate = self

        class Passing(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                here = self.path.endswith(question)
                gate.seen += here
                here &= gate.seen == turn
                if here and not answered:
                    gate.kill()
                    return
                known = ("Authorization", "Idempotency-Key", "Content-Type")
                headers = {each: self.headers[each] for each in known if each in self.headers}
                url = f"http://127.0.0.1:{port}{self.path}"
                answer = httpx.request(
                    self.command, url, content=content, headers=headers, timeout=30.0
                )
                if here:
                    gate.kill()
                    return
                self.send_response(answer.status_code)
                self.send_header("Content-Length", f"{len(answer.content)}")
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        super().__init__(("127.0.0.1", 0), Passing)
        self.seen = 0
        self.trainer: subprocess.Popen[str] | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def kill(self) -> None:
        assert self.trainer is not None
        self.trainer.kill()
        self.trainer.wait()


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


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("optimizer", "more", "projections"),
    [("adadp", (), 0), ("dp_adam", ("--pca", "20", "--pca-noise", "20"), 1)],
)
def test_kills_and_resumes_never_make_a_step_that_was_not_charged(
    bench: Bench, optimizer: str, more: tuple[str, ...], projections: int, night_seed: int
) -> None:
    chance = random.Random(night_seed)
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


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_kills_in_any_phase_of_scheduled_noise_leave_no_step_uncharged(
    bench: Bench, night_seed: int
) -> None:
    """Each phase has its reservation; the run goes on in the phase that the ledger is in."""
    chance = random.Random(night_seed)
    phases = (120, 60, 220)
    schedule = "120:1,60:0.9,220:0.8"
    trainer = bench.trainer("--noise-multiplier", "3", "--noise-schedule", schedule)
    wait_for(bench, 8, trainer)  # there is a checkpoint
    for until in (60, 130, 190):  # blocks have 50 steps or more
        wait_for(bench, max(bench.made(), until) + chance.randint(0, 20), trainer)
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
        held = bench.runs()
        assert bench.made() <= sum(run.steps_granted for run in held)
        assert sorted(run.steps_reserved for run in held) == sorted(phases)
        assert {run.state for run in held} == {"open"}
        trainer = bench.trainer("--resume")
    output, _ = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, output
    assert {(run.state, run.steps_granted - run.steps_reserved) for run in bench.runs()} == {
        ("committed", 0)
    }
    assert bench.made() <= sum(phases)
    document = json.loads((bench.folder / "run" / "certificate.json").read_text())
    found = [(each["steps"], each["steps_reserved"]) for each in document["certificates"]]
    assert found == [(steps, steps) for steps in phases]
    assert not bench.checkpoint.exists()
    assert verify(bench.repository).faults == []


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds from the start of a process to its end, if nobody kills it."""
    bench = Bench(tmp_path_factory.mktemp("life"))
    started = time.monotonic()
    bench.begun_or_resumed().communicate(timeout=120)
    found = time.monotonic() - started
    bench.require_whole()
    bench.close()
    return found


def kill_at_any_moment(bench: Bench, life: float, chance: random.Random, kills: int) -> None:
    """Kill each process of one run at a random moment, and let the last finish."""
    for _ in range(kills):
        until = time.monotonic() + chance.uniform(0.0, life)
        trainer = bench.begun_or_resumed()
        while trainer.poll() is None and time.monotonic() < until:
            bench.require_charged()
            time.sleep(0.02)
        trainer.kill()
        trainer.communicate()
        bench.require_charged()
        if bench.ended:
            break
    else:
        output, _ = bench.begun_or_resumed().communicate(timeout=120)
        assert bench.ended, output
    bench.require_charged()
    bench.require_whole()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_at_any_moment_of_a_process_leaves_no_step_uncharged(
    bench: Bench, life: float
) -> None:
    """Half of its life may be over before its first step."""
    kill_at_any_moment(bench, life, random.Random(1), kills=2)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(4))
def test_kills_at_any_moment_leave_no_step_uncharged(
    bench: Bench, life: float, number: int, night_seed: int
) -> None:
    kill_at_any_moment(bench, life, random.Random(f"{night_seed}, {number}"), kills=5)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("question", "turn", "answered"),
    [
        *product(("/reservations", "/commit", "/certificate"), (1,), (True, False)),
        *product(("/grants",), (1, 2), (True, False)),
    ],
)
def test_a_kill_while_the_ledger_is_asked_leaves_no_step_uncharged(
    bench: Bench, question: str, turn: int, answered: bool
) -> None:
    """Killed before the ledger records the call, and after it did but before it answered."""
    gate = Gate(bench.server.port, question, turn, answered=answered)
    gate.trainer = bench.begun_or_resumed("--service", f"http://127.0.0.1:{gate.server_port}")
    gate.trainer.communicate(timeout=60)
    gate.shutdown()
    gate.server_close()
    assert gate.trainer.returncode == -signal.SIGKILL
    bench.require_charged()
    assert not bench.ended
    states = [each.state for each in bench.runs()]
    reserved = question != "/reservations" or answered
    committed = question == "/certificate" or (question == "/commit" and answered)
    assert states == reserved * ["committed" if committed else "open"]
    output, _ = bench.begun_or_resumed().communicate(timeout=120)
    assert bench.ended, output
    bench.require_whole()


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_service_that_goes_away_stops_the_run_and_loses_nothing(bench: Bench) -> None:
    """The granted block is finished, no more; with a service again the run goes on."""
    bench.environment["PATIENCE_SECONDS"] = "20"
    trainer = bench.trainer()
    wait_for(bench, 20, trainer)
    bench.server.kill()
    output, _ = trainer.communicate(timeout=300)
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
