"""The how-to's programs, killed at random moments: no step without a charge, and they go on."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accountant_service.api.ledger_views import encode_answer
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.rules import NewDataset, Reservation
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from tests.support.databases import free_port
from tests.support.pages import ROOT, Page
from tests.support.server import Server

PAGE = ROOT / "docs" / "how-to" / "several-processes.md"
STEPS = 120
LOST = "ProcessLostError: a process that trains with this one ended"
COUNTING = """
import os, time
from training_client.private_step.private_sum import PrivateSum
genuine, count = PrivateSum.release, os.open({file!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def release(self, *of):
    os.write(count, b".")
    time.sleep(0.01)
    return genuine(self, *of)
PrivateSum.release = release
"""


def shown_program(name: str) -> str:
    """Return a program that the page shows."""
    texts = (block.text for block in Page.read(PAGE).blocks)
    text = next(each for each in texts if each.startswith(f"cat > {name} "))
    return text.partition("\n")[2].rpartition("EOF")[0]


class Bench:
    """A program of the page, with a ledger behind it; each process counts the steps it begins."""

    def __init__(self, folder: Path, program: str) -> None:
        url = f"sqlite:///{folder}/ledger.db"
        self.repository: Repository = opening.open_repository(url)
        token, admin = Keys(self.repository).create([Scope.ADMIN])
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        Ledger(self.repository, encode_answer).create_dataset(
            WriteRequest(admin, "first", "bench", None),
            NewDataset("posts", 3000, 4.0, 1e-5, relation, "record"),
        )
        self.server, self.folder, self.run = Server(url, folder), folder, folder / "run"
        self.server.wait()
        self.environment = os.environ | {
            "ACCOUNTANT_API_KEY": token, "RUN": str(self.run), "PYTHONPATH": f"{folder}:{ROOT}",
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        (folder / "posts.py").write_text(shown_program("posts.py"))
        self.program = shown_program(program).replace(":8000", f":{self.server.port}")

    def start(self, processes: int) -> list[subprocess.Popen[str]]:
        """Start the program in processes as torchrun does, or alone."""
        port = str(free_port())
        return [self._start(rank, processes, port) for rank in range(processes)]

    def _start(self, rank: int, processes: int, port: str) -> subprocess.Popen[str]:
        file = self.folder / f"train{rank}.py"
        file.write_text(COUNTING.format(file=str(self.count_file(rank))) + self.program)
        launched = {
            "RANK": str(rank), "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, file], env=self.environment | (launched if processes > 1 else {}),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def count_file(self, rank: int) -> Path:
        return self.folder / f"steps-{rank}"

    def begun(self, rank: int) -> int:
        """Return the number of steps that a rank began, in all its processes."""
        file = self.count_file(rank)
        return file.stat().st_size if file.exists() else 0

    def reservation(self) -> Reservation:
        """Return the one reservation: the program goes on with it."""
        with self.repository.reading() as reading:
            dataset = reading.find_dataset("posts")
            assert dataset is not None
            (found,) = reading.list_reservations(dataset)
        return found

    def kill_after(self, steps: int, victim: int, processes: list[subprocess.Popen[str]]) -> None:
        """Kill one process somewhat after its next steps; the others must end by themselves."""
        limit, deadline = self.begun(victim) + steps, time.monotonic() + 120
        while self.begun(victim) < limit:
            assert time.monotonic() < deadline
            assert processes[victim].poll() is None, processes[victim].communicate()[0]
            time.sleep(0.002)
        time.sleep(random.random() * 0.02)
        processes[victim].send_signal(signal.SIGKILL)
        for process in processes:
            output, _ = process.communicate(timeout=120)
            if process is processes[victim]:
                assert process.returncode == -signal.SIGKILL
            else:
                assert process.returncode > 0
                assert LOST in output or "in get_model_state_dict" in output  # PyTorch's own call

    def require_charged(self, processes: int) -> None:
        """No process began more steps than are charged."""
        granted = self.reservation().steps_granted
        for rank in range(processes):
            assert self.begun(rank) <= granted

    def require_finished(self, processes: list[subprocess.Popen[str]]) -> str:
        """Wait for the rest of the run; return what rank 0 printed."""
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), outputs
        run = self.reservation()
        assert (run.state, run.steps_granted) == ("committed", STEPS)
        claim = json.loads((self.run / "certificate.json").read_text())
        assert (claim["steps"], claim["reservation"]) == (STEPS, run.identifier)
        assert verify(self.repository).faults == []
        return outputs[0]

    def close(self) -> None:
        self.server.kill()
        self.repository.close()


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    found = Bench(tmp_path, getattr(request, "param", "train.py"))
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["train.py", "sharded.py"], indirect=True)
def test_no_step_is_uncharged_when_a_process_is_killed(bench: Bench) -> None:
    """Kill rank 1, then rank 0, then let both finish; the steps begun are at most those charged."""
    for victim in (1, 0):
        processes = bench.start(2)
        bench.kill_after(random.randint(1, 25), victim, processes)
        bench.require_charged(2)
    output = bench.require_finished(bench.start(2))
    assert f"after step {STEPS}" in output
    bench.require_charged(2)


@pytest.mark.slow
def test_a_text_classifier_in_25_lines_is_killed_and_goes_on(bench: Bench) -> None:
    loop = bench.program.partition("# the loop\n")[2].partition("# the end of the loop")[0]
    assert 10 < len(loop.splitlines()) <= 25
    (process,) = bench.start(1)
    bench.kill_after(35, 0, [process])
    assert bench.begun(0) <= bench.reservation().steps_granted < STEPS
    output = bench.require_finished(bench.start(1))
    accuracy = re.search(r"test accuracy ([\d.]+)", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.75  # a third would be chance
