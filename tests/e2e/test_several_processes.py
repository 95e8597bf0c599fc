"""The how-to's programs, killed at random moments: no step without a charge, and they go on."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.killed_program import KilledProgram, loop_of
from tests.support.pages import ROOT, Page

PAGE = ROOT / "docs" / "how-to" / "several-processes.md"
STEPS = 120
LOST = "ProcessLostError: a process that trains with this one ended"


def shown_program(name: str) -> str:
    """Return a program that the page shows."""
    texts = (block.text for block in Page.read(PAGE).blocks)
    text = next(each for each in texts if each.startswith(f"cat > {name} "))
    return text.partition("\n")[2].rpartition("EOF")[0]


class Bench:
    """A program of the page, with a ledger behind it."""

    def __init__(self, folder: Path, program: str) -> None:
        self.killed = KilledProgram(folder, ("posts", 3000, 4.0))
        self.run, self.program = folder / "run", folder / program
        self.killed.environment["RUN"] = str(self.run)
        text = shown_program(program).replace(":8000", f":{self.killed.server.port}")
        self.program.write_text(text)
        (folder / "posts.py").write_text(shown_program("posts.py"))

    def start(self, processes: int) -> list[subprocess.Popen[str]]:
        return self.killed.start(self.program, processes=processes)

    def kill_after(self, steps: int, victim: int, processes: list[subprocess.Popen[str]]) -> None:
        """Kill one process; the others must say why they end."""
        for output in self.killed.kill_after(steps, processes, victim).values():
            assert LOST in output or "in get_model_state_dict" in output  # PyTorch's own call

    def require_finished(self, processes: list[subprocess.Popen[str]]) -> str:
        return self.killed.require_finished(processes, self.run, STEPS)[0]


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    found = Bench(tmp_path, getattr(request, "param", "train.py"))
    yield found
    found.killed.close()


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["train.py", "sharded.py"], indirect=True)
def test_no_step_is_uncharged_when_a_process_is_killed(bench: Bench) -> None:
    """Kill rank 1, then rank 0, then let both finish; the steps begun are at most those charged."""
    for victim in (1, 0):
        processes = bench.start(2)
        bench.kill_after(random.randint(1, 25), victim, processes)
        bench.killed.require_charged(2)
    output = bench.require_finished(bench.start(2))
    assert f"after step {STEPS}" in output
    bench.killed.require_charged(2)


@pytest.mark.slow
def test_a_text_classifier_in_25_lines_is_killed_and_goes_on(bench: Bench) -> None:
    assert 10 < len(loop_of(bench.program.read_text())) <= 25
    bench.kill_after(35, 0, bench.start(1))
    assert bench.killed.begun() <= bench.killed.reservation().steps_granted < STEPS
    output = bench.require_finished(bench.start(1))
    accuracy = re.search(r"test accuracy ([\d.]+)", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.75  # a third would be chance
