"""Train the optimizers and compare them with their papers: docs/training-results.md.

    python benchmarks/training_results.py run [--only mnist,adult] [--seeds 3] [--quick]
    python benchmarks/training_results.py report

`run` trains the experiments that the results file lacks, and writes the page and its plots at the
end; it can be stopped and started again at any time. `report` writes them from that file alone.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # replaces this folder: its http.py shadows the standard library's

from typing import Annotated

import typer

from benchmarks.results import runner
from benchmarks.results.accounting import certify
from benchmarks.results.experiments import EXPERIMENTS, shorten
from benchmarks.results.report import write_page
from benchmarks.results.store import Store
from benchmarks.results.tasks import TASKS

RESULTS = ROOT / "docs/training-results.jsonl"
PAGE = ROOT / "docs/training-results.md"
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
File = Annotated[Path, typer.Option(help="the results file")]
Page = Annotated[Path, typer.Option(help="the page to write; its plots go into images/ beside it")]


@app.command()
def run(
    only: Annotated[str, typer.Option(help=f"tasks to run, of {','.join(TASKS)}")] = ",".join(
        TASKS
    ),
    seeds: Annotated[int, typer.Option(min=1, help="runs of each experiment")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="processes of one thread each")] = 1,
    file: File = RESULTS,
    page: Page = PAGE,
    is_trial: Annotated[
        bool, typer.Option("--quick", help="20 steps of each, one seed, results not stored")
    ] = False,
) -> None:
    """Tune the learning rates, train, and write the results page."""
    chosen = [each for each in EXPERIMENTS if each.task in only.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if is_trial:
            chosen, seeds = [shorten(each) for each in chosen], 1
            file = Path(folder) / "results.jsonl"
        store = Store(file)
        runner.run_jobs(list(runner.list_tuning_jobs(chosen)), store, workers, "learning rates")
        runner.run_jobs(
            list(runner.list_result_jobs(chosen, seeds, store)), store, workers, "results"
        )
        certify(chosen, store)
        if not is_trial:
            write_page(store, page)


@app.command()
def report(file: File = RESULTS, page: Page = PAGE) -> None:
    """Write the results page and its plots from the stored results."""
    write_page(Store(file), page)


if __name__ == "__main__":
    app()
