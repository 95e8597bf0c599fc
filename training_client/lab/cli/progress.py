"""Progress bars, and the signals that end a run."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from training_client.lab.number_format import format_upper_bound
from training_client.lab.train import Progress

Report = Callable[[int, str], None]


@contextmanager
def progress_bar(console: Console, total: int, unit: str) -> Iterator[Report]:
    """Context manager: show a progress bar; on other outputs than terminals, print ten lines.

    Args:
        console: the console to print to.
        total: the number of units.
        unit: the name of what is counted, such as "step".

    Yields:
        A function to call after each unit, with its number from 1 and a short text.
    """
    if not console.is_terminal:
        yield _line_printer(console, total, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(unit, total=total, text="")
        yield lambda number, text: bar.update(task, completed=number, text=text)


def describe_progress(now: Progress) -> str:
    """Return a step's loss, and ε of the steps allowed so far, as text."""
    finite = math.isfinite(now.epsilon_allowed)
    spent = f"ε ≤ {format_upper_bound(now.epsilon_allowed)}" if finite else "no guarantee"
    return f"loss {now.loss:.3f}, {spent}"


def _line_printer(console: Console, total: int, unit: str) -> Report:
    """Return a progress callback that prints a line after each tenth of the run."""
    every = max(1, total // 10)

    def report(number: int, text: str) -> None:
        """Print a progress line if step `number` completes another tenth of the run."""
        if number % every == 0:
            console.print(f"{unit} {number}: {text}", markup=False)

    return report


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Context manager: turn SIGTERM into KeyboardInterrupt, so that cleanup code runs."""

    def stop(*_: object) -> None:
        """Signal handler: raise KeyboardInterrupt."""
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def catch_signals() -> Iterator[Callable[[], bool]]:
    """Context manager: catch SIGINT and SIGTERM; yield a function that says if one came."""
    received: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, lambda number, _: received.append(number)) for kind in kinds]
    try:
        yield lambda: bool(received)
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
