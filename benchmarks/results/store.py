"""The results file: a JSON line for whatever is finished, so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results.experiments import Experiment
from benchmarks.results.tasks import TASKS

Line = Mapping[str, Any]
IDENTITY = (
    "kind",
    "task",
    "experiment",
    "method",
    "learning_rate",
    "seed",
    "steps",
    "mechanism",
    "delta",
)


def identity(line: Line) -> str:
    """What a line is the answer to: two lines of one identity say the same."""
    return json.dumps({name: line[name] for name in IDENTITY if name in line}, sort_keys=True)


class Store:
    """Lines of a file, and more to come.

    Args:
        file: made on the first line.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        text = file.read_text() if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the last line was cut off
            file.write_text(whole)
        self.lines = {identity(line): line for line in map(json.loads, whole.splitlines())}

    def __contains__(self, line: Line) -> bool:
        return identity(line) in self.lines

    def get(self, line: Line) -> Line | None:
        """The whole of a line, of which only what identifies it needs to be known."""
        return self.lines.get(identity(line))

    def add(self, line: Line) -> None:
        """Write one more line."""
        self.lines[identity(line)] = line
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of_kind(self, kind: str) -> Iterator[Line]:
        """All lines of a kind."""
        return (line for line in self.lines.values() if line["kind"] == kind)

    def runs(self, experiment: Experiment) -> list[Line]:
        """The finished runs of an experiment, by seed."""
        found = [
            line
            for line in self.of_kind("run")
            if line["experiment"] == experiment.name and line["steps"] == experiment.steps
        ]
        return sorted(found, key=lambda line: line["seed"])

    def tuning(self, task: str, method: str) -> dict[float, float | None]:
        """Scores by learning rate; None for a run that broke down."""
        return {
            line["learning_rate"]: line["score"]
            for line in self.of_kind("tuning")
            if (line["task"], line["method"]) == (task, method)
        }

    def chosen_rate(self, task: str, method: str) -> float | None:
        """The best learning rate of the grid, once all of it was tried."""
        task = TASKS[task].tuned_on or task
        scores = {rate: s for rate, s in self.tuning(task, method).items() if s is not None}
        if len(self.tuning(task, method)) < len(TASKS[task].grid) or not scores:
            return None
        best = max if TASKS[task].higher_is_better else min
        return best(scores, key=lambda rate: scores[rate])
