"""A training program that tests kill and start again, with a ledger behind it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.api.ledger_views import ANSWERS
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.rules import NewDataset, Reservation
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from tests.support.databases import free_port
from tests.support.pages import ROOT
from tests.support.server import Server

COUNTING = """
import runpy
from pathlib import Path
from tests.support.killed_ranks import Victim, count_steps
count_steps(Path({count!r}), pause=0.01)
if {victim!r} is not None:
    Victim(Path({folder!r}), *{victim!r}).watch({rank})
runpy.run_path({program!r}, run_name="__main__")
"""


def loop_of(program: str) -> list[str]:
    """Return the lines of a program that it marks as the loop."""
    loop = program.partition("# the loop\n")[2].partition("# the end of the loop")[0]
    return loop.strip().splitlines()


class KilledProgram:
    """A training program, with a ledger and its server; each process counts the steps it begins.

    Attributes:
        server: the server, which the program must be told.
        environment: of the program; it has a key for the ledger.

    Args:
        folder: for the ledger and the counts.
        dataset: name, number of records and ε of the budget in the ledger.
        python: the interpreter; this one by default.
    """

    def __init__(
        self, folder: Path, dataset: tuple[str, int, float], python: Path | None = None
    ) -> None:
        url = f"sqlite:///{folder}/ledger.db"
        self.repository: Repository = opening.open_repository(url)
        token, admin = Keys(self.repository).create([Scope.ADMIN])
        self.name, size, epsilon = dataset
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        Ledger(self.repository, ANSWERS).create_dataset(
            WriteRequest(admin, "first", "bench", None),
            NewDataset(self.name, size, epsilon, 1e-5, relation, "record", accept_weak=True),
        )
        self.folder, self.python = folder, python or Path(sys.executable)
        self._started: list[subprocess.Popen[str]] = []
        self.server = Server(url, folder)
        self.server.wait()
        self.environment = os.environ | {
            "ACCOUNTANT_API_KEY": token, "PYTHONPATH": f"{folder}:{ROOT}",
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip

    def start(
        self,
        program: Path,
        arguments: Sequence[str] = (),
        processes: int = 1,
        victim: tuple[int, str, int] | None = None,
    ) -> list[subprocess.Popen[str]]:
        """Start the program in processes as torchrun does, or alone.

        Args:
            program: the program.
            arguments: of the program.
            processes: how many.
            victim: rank, moment and step of a process that kills itself; see `Victim`.
        """
        port = str(free_port())
        met = tempfile.mkdtemp(dir=self.folder)
        started = []
        for rank in range(processes):
            file = self.folder / f"counted-{rank}.py"
            counts = str(self.count_file(rank))
            file.write_text(
                COUNTING.format(
                    count=counts, program=str(program), victim=victim, folder=met, rank=rank
                )
            )
            launched = {
                "RANK": str(rank), "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            more = launched if processes > 1 else {}
            started.append(self.launch([self.python, file, *arguments], more))
        return started

    def launch(
        self, command: Sequence[str | Path], environment: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        """Start a command with the program's environment and further variables."""
        process = subprocess.Popen(
            command, env=self.environment | dict(environment),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def count_file(self, rank: int) -> Path:
        """Return the file to which a rank adds a byte at the beginning of each step."""
        return self.folder / f"steps-{rank}"

    def begun(self, rank: int = 0) -> int:
        """Return the number of steps that a rank began, in all its processes."""
        file = self.count_file(rank)
        return file.stat().st_size if file.exists() else 0

    def reservations(self) -> list[Reservation]:
        """Return the reservations of the dataset."""
        with self.repository.reading() as reading:
            dataset = reading.find_dataset(self.name)
            assert dataset is not None
            return list(reading.list_reservations(dataset))

    def reservation(self) -> Reservation:
        """Return the one reservation: the program goes on with it."""
        (found,) = self.reservations()
        return found

    def kill_after(
        self, steps: int, processes: list[subprocess.Popen[str]], victim: int = 0
    ) -> dict[int, str]:
        """Kill one process somewhat after its next steps; the others must fail by themselves.

        Returns:
            What each of the others printed.
        """
        limit, deadline = self.begun(victim) + steps, time.monotonic() + 240
        while self.begun(victim) < limit:
            assert time.monotonic() < deadline
            assert processes[victim].poll() is None, processes[victim].communicate()[0]
            time.sleep(0.002)
        time.sleep(random.random() * 0.02)
        processes[victim].send_signal(signal.SIGKILL)
        return self.require_killed(processes, victim)

    def require_killed(self, processes: list[subprocess.Popen[str]], victim: int) -> dict[int, str]:
        """Wait until one process is killed, and the others failed; return what they printed."""
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        assert processes[victim].returncode == -signal.SIGKILL, outputs[victim]
        others = {rank: text for rank, text in enumerate(outputs) if rank != victim}
        assert all(processes[rank].returncode > 0 for rank in others)
        return others

    def require_charged(self, processes: int = 1) -> None:
        """No process began more steps than are charged."""
        granted = self.reservation().steps_granted
        for rank in range(processes):
            assert self.begun(rank) <= granted

    def require_finished(
        self, processes: list[subprocess.Popen[str]], run: Path, steps: int, seconds: float = 240
    ) -> tuple[str, dict[str, Any]]:
        """Wait for the rest of the run; return what rank 0 printed, and the certificate's claim.

        Args:
            processes: as they were started.
            run: the folder with the results.
            steps: the number of steps in the plan.
            seconds: how long to wait for each process.
        """
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), outputs
        held = self.reservation()
        assert (held.state, held.steps_granted) == ("committed", steps)
        claim = json.loads((run / "certificate.json").read_text())
        assert (claim["steps"], claim["reservation"]) == (steps, held.identifier)
        assert verify(self.repository).faults == []
        return outputs[0], claim

    def close(self) -> None:
        """Stop what a failed test left running and the server, and close the ledger."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        self.server.kill()
        self.repository.close()
