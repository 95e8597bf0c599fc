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

Report = Callable[[Progress], None]


@contextmanager
def shown(console: Console, steps: int) -> Iterator[Report]:
    """A bar with step, loss, ε allowed and the time left; lines where there is no terminal."""
    if not console.is_terminal:
        yield _lines(console, steps)
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[spent]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("training", total=steps, loss=float("nan"), spent="")
        yield lambda now: bar.update(task, completed=now.step, loss=now.loss, spent=_spent(now))


def _spent(now: Progress) -> str:
    finite = math.isfinite(now.epsilon_allowed)
    return f"ε ≤ {up(now.epsilon_allowed)}" if finite else "no guarantee"


def _lines(console: Console, steps: int) -> Report:
    """Ten lines a run."""
    every = max(1, steps // 10)

    def report(now: Progress) -> None:
        if now.step % every == 0:
            console.print(f"step {now.step}: loss {now.loss:.3f}, {_spent(now)}")

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
