"""Measure what it costs to prove that examples do not mix, in a run of DP-SGD: time and memory.

    python benchmarks/model_checks.py [--models encoder,bert] [--rounds 20] [--json FILE]

Before the first step a few examples are followed through every operation; in every step the
operations are compared with those that were proved. Time: that of the proof, and the difference
between steps with and without the comparison, which alternate in one process; as a share of a run
of 200 steps. A step is made before, so that imports are not counted. Memory: the peak of all
tensors in the first step, with the proof, relative to steps without. Every model runs in its own
process.
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
from training_client.private_step.layers.model_checks import CheckedModel

CONSOLE: Final = Console(width=100)
RUN_STEPS: Final = 200
STEP: Final = "dp_sgd"


@dataclass(frozen=True)
class Row:
    """The cost of the proofs of one model.

    Attributes:
        model: its name.
        batch: examples in a batch.
        proof_ms: CPU time of the proof before the first step.
        compared_ms: CPU time of the comparison in each step.
        step_ms: CPU time of a step without it.
        time_share: of both in the run.
        memory_ratio: peak of tensors with a proof over that without.
    """

    model: str
    batch: int
    proof_ms: float
    compared_ms: float
    step_ms: float
    time_share: float
    memory_ratio: float


def measure_time(case: Case, rounds: int, device: str) -> tuple[float, float, float]:
    """Return the milliseconds of a proof, and of steps with and without a comparison."""
    prove, compare = CheckedModel._prove, CheckedModel._run_proved
    proofs: list[float] = []

    def timed(*arguments: Any) -> Any:
        """Prove, and note how long that takes."""
        found: list[Any] = []
        proofs.append(measure_step_ms(lambda: found.append(prove(*arguments)), device))
        return found[0]

    with tune_process():
        make_step(STEP, case, device)()  # imports what the model needs
        step = make_step(STEP, case, device)
        with patch.object(CheckedModel, "_prove", timed):
            step()
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for is_compared, times in found.items():
                run = compare if is_compared else CheckedModel._pass
                with patch.object(CheckedModel, "_run_proved", run):
                    times.append(measure_step_ms(step, device))
    assert len(proofs) == 1, "other operations were passed in a later step"
    return proofs[0], statistics.median(found[True]), statistics.median(found[False])


def measure_unproved_memory_mib(case: Case, device: str) -> float:
    """Return the peak memory of steps in MiB if nothing is proved."""
    with patch.object(CheckedModel, "_run_proved", CheckedModel._pass):
        return measure_memory_mib(STEP, case, device)


def measure(case: Case, rounds: int, device: str) -> Row:
    """Return the cost of the proofs for one model."""
    proof, compared, step = run_in_process(measure_time, case, rounds, device)
    plain = run_in_process(measure_unproved_memory_mib, case, device)
    whole = run_in_process(measure_memory_mib, STEP, case, device)
    more = max(compared - step, 0.0)
    share = (proof + RUN_STEPS * more) / (proof + RUN_STEPS * (step + more))
    return Row(
        case.name, case.batch, round(proof, 1), round(more, 2), round(step, 1), round(share, 4),
        round(whole / plain, 3),
    )  # fmt: skip


def main(
    models: Annotated[
        str | None, typer.Option(help="names of models, with commas between; all by default")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="pairs of steps to time")] = 20,
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
    table = Table(title=f"Proofs in a run of {RUN_STEPS} steps of {STEP}", title_justify="left")
    for column in (
        "model",
        "batch",
        "proof, ms",
        "comparison, ms",
        "step, ms",
        "share of the run",
        "memory",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(
            row.model, str(row.batch), f"{row.proof_ms:.1f}", f"{row.compared_ms:.2f}",
            f"{row.step_ms:.1f}", f"{row.time_share:.2%}", f"{row.memory_ratio:.2f}",
        )  # fmt: skip
    CONSOLE.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
