"""Processes that train together, one of which kills itself at a chosen moment of a step.

A process counts the steps it begins in a file, which outlives it. The counts are independent of
the budget, so that a test can compare them with what a ledger charged.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

from training_client.private_step.private_sum import PrivateSum
from training_client.private_step.processes.shared_budget import SharedBudget
from training_client.private_step.processes.step_processes import SharedStep
from training_client.private_step.rounded_gaussian import NoiseGrid
from training_client.private_step.trained_parameters import TrainedParameters

MOMENTS: Final = {
    "answer": "rank 0 has charged the step, and has not told the others",
    "gather": "before whole parameters are gathered, if the model is sharded",
    "pass": "in the forward pass",
    "noise": "rank 0 has drawn the noise, and sums are not added up",
    "update": "the parameters are updated, and the step has not returned",
}
_SECONDS_MAX: Final = 30.0


def count_steps(file: Path, pause: float = 0.0) -> None:
    """Append a byte to a file whenever this process begins a step on a batch; then wait a while."""
    genuine = PrivateSum.release

    def release(self: PrivateSum, *given: Any) -> Any:
        """Count the step and make it."""
        append_byte(file)
        time.sleep(pause)
        return genuine(self, *given)

    PrivateSum.release = release  # type: ignore[method-assign]


def append_byte(file: Path) -> None:
    """Append a byte to a file, which a killed process cannot take back."""
    with file.open("ab") as opened:
        opened.write(b".")


def count_of(file: Path) -> int:
    """Return how many bytes were appended to a file."""
    return file.stat().st_size if file.exists() else 0


@dataclass
class Victim:
    """The process that kills itself, and when; every process of the group must `watch` for it.

    Attributes:
        folder: empty; processes tell each other there which moment they reached.
        rank: of the process that is killed.
        moment: one of `MOMENTS`.
        step: the step that has this moment.
    """

    folder: Path
    rank: int
    moment: str
    step: int = 3
    _own_rank: int = field(default=0, init=False)
    _current: int = field(default=0, init=False)  # the step that was taken last

    def watch(self, rank: int) -> None:
        """Make this process end when it is the victim and reaches the moment."""
        self._own_rank = rank
        self._watch_budget()
        self._watch("gather", TrainedParameters, "gathered")
        self._watch("pass", torch.nn.Linear, "forward")
        if rank == 0:
            self._watch("noise", NoiseGrid, "draw_like", after=True)
        else:
            self._watch("noise", SharedStep, "add_up")
        self._watch("update", torch.optim.Adam, "step", after=True)

    def _watch(self, moment: str, owner: Any, name: str, *, after: bool = False) -> None:
        """Note that a moment is reached when a function is called, or when it returns."""
        genuine = getattr(owner, name)

        @wraps(genuine)
        def watched(*given: Any, **named: Any) -> Any:
            """Call the function."""
            if not after:
                self._reach(moment)
            found = genuine(*given, **named)
            if after:
                self._reach(moment)
            return found

        setattr(owner, name, watched)

    def _watch_budget(self) -> None:
        """Note which step is taken, and when rank 0 is about to send the budget's answer."""
        take, broadcast = SharedBudget.take, distributed.broadcast_object_list

        def watched_take(budget: SharedBudget, step: int) -> None:
            """Take a step."""
            self._current = step
            distributed.broadcast_object_list = watched_broadcast
            try:
                take(budget, step)
            finally:
                distributed.broadcast_object_list = broadcast

        def watched_broadcast(*given: Any, **named: Any) -> None:
            """Send or receive the answer."""
            self._reach("answer")
            broadcast(*given, **named)

        SharedBudget.take = watched_take  # type: ignore[method-assign]

    def _reach(self, moment: str) -> None:
        """End this process if the moment is its last; rank 0 must have reached it before."""
        if (moment, self._current) != (self.moment, self.step):
            return
        (self.folder / str(self._own_rank)).touch()
        if self._own_rank == self.rank:
            deadline = time.monotonic() + _SECONDS_MAX
            while not (self.folder / "0").exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGKILL)
