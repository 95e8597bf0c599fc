"""`accountant-train paper`: run the experiments of a paper, and go on where they were stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from filelock import FileLock, Timeout
from rich.console import Console

from training_client.errors import DataError, NotFetchedError
from training_client.lab.cli.app import command, exit_on_error
from training_client.lab.cli.lists import print_table
from training_client.lab.cli.options import DataDir
from training_client.lab.cli.progress import progress_bar, sigterm_as_interrupt
from training_client.lab.data import DATASETS, load
from training_client.lab.papers import runner
from training_client.lab.papers.experiments import Experiment
from training_client.lab.papers.printed import (
    list_experiments,
    list_places,
    list_printed_results,
    shorten_place,
)
from training_client.lab.papers.published import ALL_EXPERIMENTS
from training_client.lab.papers.store import Store, require_same_settings
from training_client.lab.papers.tasks import TASKS

RESULTS: Final = Path("docs/training-results.jsonl")
_STOPPED_BY_SIGNAL: Final = 130


@command(
    "paper",
    epilog="Exit codes: 0 done, 2 wrong input or missing data, 130 stopped by a signal (finished "
    "runs are stored). Example: accountant-train paper 000 --only table-1 --seeds 3",
)
def run_paper(
    paper: Annotated[str, typer.Argument(help="000, 001, 002, 003 or 004.")],
    only: Annotated[
        str | None, typer.Option(help="One table, figure or section, such as table-1.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each experiment.")] = 3,
    epochs_max: Annotated[
        float | None, typer.Option(min=0, help="Leave out experiments of more epochs.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes of one thread each.")] = 1,
    left: Annotated[
        bool, typer.Option("--left", help="Say what is left and for how long; run nothing.")
    ] = False,
    results: Annotated[
        Path, typer.Option(help="The results file: a line per finished run is appended.")
    ] = RESULTS,
    data_dir: DataDir = Path("data"),
) -> None:
    """Run the experiments of a paper that the results file lacks.

    Each finished run is stored at once, so the command can be stopped and started again.
    """
    console = Console(highlight=False, soft_wrap=True)
    with exit_on_error():
        wanted = [
            each
            for each in list_experiments(paper, only)
            if epochs_max is None or runner.count_epochs(each, each.steps) <= epochs_max
        ]
        if not wanted:
            console.print(_describe_nothing(paper, only))
            return
        with sigterm_as_interrupt(), _lock(results):
            store = Store(results)
            require_same_settings(store, ALL_EXPERIMENTS)
            plan = Plan(wanted, seeds, store, data_dir)
            plan.print_left(console, paper, only)
            if left:
                return
            possible = plan.leave_out_missing_data(console)
            try:
                _run(plan, possible, workers, console)
            except KeyboardInterrupt:
                console.print(f"Stopped. {plan.describe_left()}. The same command goes on.")
                raise typer.Exit(_STOPPED_BY_SIGNAL) from None
            console.print(f"{plan.describe_left()}. The results are in {results}.", markup=False)


class Plan:
    """The runs that a command has to make.

    Args:
        experiments: what is to be run.
        seeds: the number of runs of each.
        store: the results file.
        folder: where data sets are kept.
    """

    def __init__(
        self, experiments: Sequence[Experiment], seeds: int, store: Store, folder: Path
    ) -> None:
        self.experiments, self.seeds, self.store, self.folder = experiments, seeds, store, folder

    def list_tuning_jobs(self, experiments: Sequence[Experiment]) -> list[runner.Job]:
        """Return the missing runs that choose learning rates."""
        needed = runner.find_tuning_experiments(experiments, ALL_EXPERIMENTS)
        return runner.keep_missing(runner.list_tuning_jobs(needed, self.folder), self.store)

    def list_result_jobs(self, experiments: Sequence[Experiment]) -> list[runner.Job]:
        """Return the missing runs, the shortest first; those of untuned methods as well."""
        return runner.list_missing_jobs(experiments, self.seeds, self.store, self.folder)

    def list_jobs(self, experiments: Sequence[Experiment]) -> list[runner.Job]:
        """Return all missing runs of some experiments."""
        return [*self.list_tuning_jobs(experiments), *self.list_result_jobs(experiments)]

    def print_left(self, console: Console, paper: str, only: str | None) -> None:
        """Print a table of the runs that are left, and the time they take."""
        rows = []
        for task in dict.fromkeys(each.task for each in self.experiments):
            of_task = [each for each in self.experiments if each.task == task]
            jobs = self.list_jobs(of_task)
            total = len(of_task) * self.seeds
            rows.append((task, f"{total}", f"{len(jobs)}", self.estimate(jobs)))
        title = f"papers/{paper}" + ("" if only is None else f", {only}")
        print_table(title, ("task", "runs", "left", "time left"), rows, console)
        console.print(f"{self.describe_left()}.")

    def describe_left(self) -> str:
        """Return the number of runs that are left, and their time, as text."""
        jobs = self.list_jobs(self.experiments)
        if not jobs:
            return "Nothing is left"
        runs = "run is" if len(jobs) == 1 else "runs are"
        return f"{len(jobs)} {runs} left: {self.estimate(jobs)}"

    def estimate(self, jobs: Sequence[runner.Job]) -> str:
        """Return the time that jobs take, by the measured time of similar runs, as text."""
        if not jobs:
            return "–"
        times = [runner.estimate_seconds(job, self.store) for job in jobs]
        known = [each for each in times if each is not None]
        if not known:
            return "not measured yet"
        unknown = len(times) - len(known)
        more = f", and {unknown} runs like none before" if unknown else ""
        return f"about {format_duration(sum(known))}{more}"

    def leave_out_missing_data(self, console: Console) -> list[Experiment]:
        """Return the experiments whose data are there; print which are left out, and why.

        Raises:
            DataError: the data of no experiment are there.
        """
        missing = {
            name: error
            for name in dict.fromkeys(TASKS[each.task].dataset for each in self.experiments)
            if (error := _find_missing(name, self.folder)) is not None
        }
        possible = [each for each in self.experiments if TASKS[each.task].dataset not in missing]
        if not possible:
            raise DataError("; ".join(missing.values()))
        for error in missing.values():
            console.print(f"Left out: {error}", markup=False)
        return possible


def _find_missing(name: str, folder: Path) -> str | None:
    """Return why a data set is missing; None if it is there, or is downloaded when needed."""
    has_files = DATASETS[name].has_files
    if name != "fashion-mnist" and (has_files is None or has_files(folder)):
        return None
    try:
        load(name, folder)
    except NotFetchedError as error:
        return str(error)
    return None


def _run(plan: Plan, possible: Sequence[Experiment], workers: int, console: Console) -> None:
    """Make the missing runs: those that choose learning rates first."""
    for unit, list_jobs in (
        ("learning rate", plan.list_tuning_jobs),
        ("run", plan.list_result_jobs),
    ):
        jobs = [job for job in list_jobs(possible) if job.is_ready]
        if not jobs:
            continue
        with progress_bar(console, len(jobs), unit) as report:
            runner.run_jobs(jobs, plan.store, workers, report)
    for task in dict.fromkeys(each.task for each in possible):
        if plan.store.find_trivial_score(task) is None:
            plan.store.add(runner.compute_trivial_score(task, plan.folder))


def _describe_nothing(paper: str, only: str | None) -> str:
    """Return why a paper, or a place of it, has no experiments."""
    place = f"papers/{paper}" if only is None else f"papers/{paper}, {only}"
    notes = sorted(
        {
            each.note
            for each in list_printed_results()
            if (each.paper, shorten_place(each.place)) == (paper, only) and each.note
        }
    )
    reason = f" ({'; '.join(notes)})" if notes else ""
    others = ", ".join(list_places(paper))
    return (
        f"{place}: nothing to train{reason}. `accountant audit` recomputes its formulas. Places "
        f"with printed results: {others}"
    )


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as 2 h 5 min."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def _lock(results: Path) -> Iterator[None]:
    """Context manager that locks a results file for one command.

    Raises:
        DataError: another command writes to it.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(results.with_name(f".{results.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise DataError(
            f"another command writes to {results}: wait for it to end, or choose another --results"
        ) from None
    try:
        yield
    finally:
        lock.release()
