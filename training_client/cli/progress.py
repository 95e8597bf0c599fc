"""What is shown while a run lasts, and how it is asked to end."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from training_client.digits import up
from training_client.train import Progress

Report = Callable[[int, str], None]


@contextmanager
def shown(console: Console, total: int, what: str) -> Iterator[Report]:
    """A bar with what is said of each step, and the time left; lines where there is no terminal.

    Args:
        console: where.
        total: of steps.
        what: is counted, such as a step or a round.

    Yields:
        What takes a step's number, from 1, and a few words.
    """
    if not console.is_terminal:
        yield _lines(console, total, what)
        return
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[said]}", markup=False),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(what, total=total, said="")
        yield lambda number, said: bar.update(task, completed=number, said=said)


def in_words(now: Progress) -> str:
    """Loss, and ε allowed."""
    finite = math.isfinite(now.epsilon_allowed)
    spent = f"ε ≤ {up(now.epsilon_allowed)}" if finite else "no guarantee"
    return f"loss {now.loss:.3f}, {spent}"


def _lines(console: Console, total: int, what: str) -> Report:
    """Ten lines a run."""
    every = max(1, total // 10)

    def report(number: int, said: str) -> None:
        if number % every == 0:
            console.print(f"{what} {number}: {said}", markup=False)

    return report


@contextmanager
def interrupted() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does, so that what is held is given back."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def signals() -> Iterator[Callable[[], bool]]:
    """Whether the run was asked to end, by Ctrl-C or SIGTERM; it ends between two steps."""
    asked: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, lambda number, _: asked.append(number)) for kind in kinds]
    try:
        yield lambda: bool(asked)
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
