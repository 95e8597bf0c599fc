"""Measure what the checks that examples do not mix cost in a run of DP-SGD: time and memory.

    python benchmarks/model_checks.py [--models encoder,bert] [--rounds 5] [--json FILE]

At the first, 16th, 256th … batch a few examples are run beside altered ones, and the whole batch
has one more forward pass. Time: that of all checks in a run of 200 steps, as a share of the time of
the run; the other steps are taken from the median of a few. A step is made before, so that imports
are not counted. Memory: the peak of all tensors in steps with a check, relative to steps without.
Every model runs in its own process.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # replaces this folder: its http.py shadows the standard library's

import json
import statistics
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.training_step import (
    CASES,
    Case,
    make_step,
    measure_memory_mib,
    measure_step_ms,
    run_in_process,
)
from training_client.integrations.patches import tune_process
from training_client.private_step.clipper import Clipper
from training_client.private_step.model_checks import is_checked

CONSOLE: Final = Console(width=100)
RUN_STEPS: Final = 200
STEP: Final = "dp_sgd"
CHECK: Final = "_check_model_periodically"  # the method of `Clipper` that checks the model


@dataclass(frozen=True)
class Row:
    """The cost of the checks of one model.

    Attributes:
        model: its name.
        batch: examples in a batch.
        checks_ms: CPU time of each check in a run of 200 steps.
        step_ms: CPU time of a step without a check.
        time_share: of all checks in the run.
        memory_ratio: peak of tensors in steps with a check over that in steps without.
    """

    model: str
    batch: int
    checks_ms: list[float]
    step_ms: float
    time_share: float
    memory_ratio: float


def measure_time(case: Case, rounds: int, device: str) -> tuple[list[float], float]:
    """Return the milliseconds of every check in a run, and of a step without a check."""
    checked = [batch for batch in range(1, RUN_STEPS + 1) if is_checked(batch)]
    make_step(STEP, case, device)()  # imports what the model needs
    step, check_model = make_step(STEP, case, device), getattr(Clipper, CHECK)
    times: list[float] = []  # of each batch's check, also where there is none
    steps: list[float] = []

    def timed(*arguments: Any) -> list[Any]:
        """Check the model, if it is time, and note how long that takes."""
        found: list[Any] = []
        times.append(measure_step_ms(lambda: found.extend(check_model(*arguments)), device))
        return found

    with patch.object(Clipper, CHECK, timed), tune_process():
        for batch in range(1, max(*checked, rounds) + 1):
            found = measure_step_ms(step, device)
            if not is_checked(batch):
                steps.append(found)
    checks = [times[batch - 1] for batch in checked]
    others = [time for batch, time in enumerate(times, 1) if not is_checked(batch)]
    assert max(others) < min(checks), "a batch was checked that should not be, or not checked"
    return checks, statistics.median(steps)


def measure_unchecked_memory_mib(case: Case, device: str) -> float:
    """Return the peak memory of steps in MiB if the model is not checked."""
    with patch.object(Clipper, CHECK, lambda *_: []):
        return measure_memory_mib(STEP, case, device)


def measure(case: Case, rounds: int, device: str) -> Row:
    """Return the cost of the checks for one model."""
    checks, step = run_in_process(measure_time, case, rounds, device)
    plain = run_in_process(measure_unchecked_memory_mib, case, device)
    whole = run_in_process(measure_memory_mib, STEP, case, device)
    share = sum(checks) / (RUN_STEPS * step + sum(checks))
    return Row(
        case.name, case.batch, [round(each, 1) for each in checks], round(step, 1),
        round(share, 4), round(whole / plain, 3),
    )  # fmt: skip


def main(
    models: Annotated[
        str | None, typer.Option(help="names of models, with commas between; all by default")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="steps to time; at least 16 are")] = 16,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="also write all rows to this file")
    ] = None,
) -> None:
    """Print a table with one row for each model and batch size."""
    known = {case.name for case in CASES}
    names = (models or ",".join(known)).split(",")
    if not known.issuperset(names):
        raise typer.BadParameter(f"unknown model: use {', '.join(sorted(known))}")
    rows = [measure(case, rounds, device) for case in CASES if case.name in names]
    table = Table(title=f"Checks in a run of {RUN_STEPS} steps of {STEP}", title_justify="left")
    for column in ("model", "batch", "checks, ms", "step, ms", "share of the run", "memory"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(
            row.model, str(row.batch), " + ".join(f"{each:.1f}" for each in row.checks_ms),
            f"{row.step_ms:.1f}", f"{row.time_share:.2%}", f"{row.memory_ratio:.2f}",
        )  # fmt: skip
    CONSOLE.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
