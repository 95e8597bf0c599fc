"""The how-to's programs, killed at random and at chosen moments: no step is uncharged.

The programs charge ten steps at a time. Here they charge each step alone, so that a single step too
many is seen, wherever a process is killed.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.support.findings import require_none
from tests.support.killed_program import KilledProgram, loop_of
from tests.support.killed_ranks import MOMENTS
from tests.support.pages import ROOT, Page

FOLDER = ROOT / "examples" / "several_processes"
STEPS, FEW_STEPS = 120, 60
BLOCKS = "block=10, block_max=10"
KINDS = ["replicated", "sharded"]
LOST = "ProcessLostError: a process that trains with this one ended"


class Bench:
    """A program of the page, with a ledger behind it.

    Args:
        folder: for the program and the ledger.
        program: its file.
        steps: the number of steps; unless it is the page's, each is charged alone.
    """

    def __init__(self, folder: Path, program: str, steps: int = FEW_STEPS) -> None:
        self.steps = steps
        self.killed = KilledProgram(folder, ("posts", 3000, 4.0))
        self.run, self.program = folder / "run", folder / program
        self.killed.environment["RUN"] = str(self.run)
        self.killed.environment["ACCOUNTANT_SERVICE"] = (
            f"http://127.0.0.1:{self.killed.server.port}"
        )
        text = (FOLDER / program).read_text()
        assert text.count(BLOCKS) == text.count(f"mechanism({STEPS})") == 1
        if steps != STEPS:
            text = text.replace(f"mechanism({STEPS})", f"mechanism({steps})")
            text = text.replace(BLOCKS, "block=1, block_max=1")
        self.program.write_text(text)
        shutil.copy(FOLDER / "posts.py", folder)

    def start(
        self, processes: int, victim: tuple[int, str, int] | None = None
    ) -> list[subprocess.Popen[str]]:
        return self.killed.start(self.program, processes=processes, victim=victim)

    def kill_after(self, steps: int, victim: int, processes: list[subprocess.Popen[str]]) -> None:
        """Kill one process; the others must say why they end."""
        self.require_reasons(self.killed.kill_after(steps, processes, victim))

    def require_reasons(self, outputs: dict[int, str]) -> None:
        """Each process must say why it ended."""
        for output in outputs.values():
            assert LOST in output or "in get_model_state_dict" in output  # PyTorch's own call

    def require_finished(self, processes: list[subprocess.Popen[str]]) -> str:
        return self.killed.require_finished(processes, self.run, self.steps)[0]


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    found = Bench(tmp_path, *request.param)
    yield found
    found.killed.close()


@pytest.mark.nightly
@pytest.mark.parametrize("bench", [["train.py"], ["sharded.py"]], indirect=True, ids=KINDS)
def test_no_step_is_uncharged_when_a_process_is_killed(bench: Bench, night_seed: int) -> None:
    """Kill rank 1, then rank 0, then let both finish; the steps begun are at most those charged."""
    chance = random.Random(night_seed)
    for victim in (1, 0):
        processes = bench.start(2)
        bench.kill_after(chance.randint(1, 15), victim, processes)
        bench.killed.require_charged(2)
    output = bench.require_finished(bench.start(2))
    assert f"after step {FEW_STEPS}" in output
    bench.killed.require_charged(2)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bench", [["train.py"], ["sharded.py"]], indirect=True, ids=KINDS)
def test_no_step_is_uncharged_at_any_moment(bench: Bench, size: int) -> None:
    """Kill rank 0 and the last at each moment of one run, in its third step after each start."""
    granted = 0
    for moment, victim in product(MOMENTS, (0, size - 1)):
        processes = bench.start(size, (victim, moment, granted + 3))
        bench.require_reasons(bench.killed.require_killed(processes, victim))
        bench.killed.require_charged(size)
        granted = bench.killed.reservation().steps_granted
    bench.require_finished(bench.start(size))
    bench.killed.require_charged(size)


def test_the_text_classifier_has_25_lines_and_the_page_shows_some() -> None:
    program = (FOLDER / "train.py").read_text()
    assert 10 < len(loop_of(program)) <= 25
    blocks = Page.read(ROOT / "docs/how-to/several-processes.md").blocks
    shown = next(each.text for each in blocks if each.language == "python")
    lines = {each.strip() for each in program.splitlines()}
    require_none(each for each in shown.splitlines() if each.strip() not in lines)


@pytest.mark.nightly
@pytest.mark.parametrize("bench", [["train.py", STEPS]], indirect=True, ids=["page"])
def test_a_text_classifier_is_killed_and_goes_on(bench: Bench) -> None:
    bench.kill_after(35, 0, bench.start(1))
    assert bench.killed.begun() <= bench.killed.reservation().steps_granted < STEPS
    output = bench.require_finished(bench.start(1))
    accuracy = re.search(r"test accuracy ([\d.]+)", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.75  # a third would be chance
