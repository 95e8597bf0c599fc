"""What the optimizers reach, beside what their papers print: docs/training-results.md.

    python benchmarks/training_results.py run [--only mnist,adult] [--seeds 3] [--quick]
    python benchmarks/training_results.py report

`run` trains whatever the results file does not hold yet, may be stopped at any time, and writes the
page and its plots at its end. `report` writes them from that file alone.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # in the place of this folder, whose http.py hides a library

from typing import Annotated

import typer

from benchmarks.results import runner
from benchmarks.results.accounting import certify
from benchmarks.results.experiments import EXPERIMENTS, quick
from benchmarks.results.report import write
from benchmarks.results.store import Store
from benchmarks.results.tasks import TASKS

RESULTS = ROOT / "docs/training-results.jsonl"
PAGE = ROOT / "docs/training-results.md"
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
File = Annotated[Path, typer.Option(help="the results file")]
Page = Annotated[Path, typer.Option(help="what is written, with its plots beside it")]


@app.command()
def run(
    only: Annotated[str, typer.Option(help=f"some of {','.join(TASKS)}")] = ",".join(TASKS),
    seeds: Annotated[int, typer.Option(min=1, help="runs of each experiment")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="processes of one thread each")] = 1,
    file: File = RESULTS,
    page: Page = PAGE,
    briefly: Annotated[
        bool, typer.Option("--quick", help="20 steps of each, one seed, kept nowhere")
    ] = False,
) -> None:
    """Tune the learning rates, train, and write the page."""
    chosen = [each for each in EXPERIMENTS if each.task in only.split(",")]
    with tempfile.TemporaryDirectory() as nowhere:
        if briefly:
            chosen, seeds = [quick(each) for each in chosen], 1
            file = Path(nowhere) / "results.jsonl"
        store = Store(file)
        runner.execute(list(runner.tunings(chosen)), store, workers, "learning rates")
        runner.execute(list(runner.runs(chosen, seeds, store)), store, workers, "results")
        certify(chosen, store)
        if not briefly:
            write(store, page)


@app.command()
def report(file: File = RESULTS, page: Page = PAGE) -> None:
    """Write the page and its plots."""
    write(Store(file), page)


if __name__ == "__main__":
    app()
