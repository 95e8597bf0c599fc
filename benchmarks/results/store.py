"""The results file: a JSON line for every finished result, so that a run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results.experiments import Experiment
from benchmarks.results.tasks import TASKS

ResultLine = Mapping[str, Any]
IDENTIFYING_FIELDS = (
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


def identify(line: ResultLine) -> str:
    """Return a result line's identity, which is equal for lines that hold the same result."""
    return json.dumps(
        {name: line[name] for name in IDENTIFYING_FIELDS if name in line}, sort_keys=True
    )


class Store:
    """The lines of a results file; new results are appended.

    Args:
        file: created with the first line if it does not exist.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        text = file.read_text() if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # drop a last line that was cut off
            file.write_text(whole)
        self.lines = {identify(line): line for line in map(json.loads, whole.splitlines())}

    def __contains__(self, line: ResultLine) -> bool:
        """Return whether a line with the same identity is stored."""
        return identify(line) in self.lines

    def get(self, line: ResultLine) -> ResultLine | None:
        """Return the stored line with the same identity as the given one, or None."""
        return self.lines.get(identify(line))

    def add(self, line: ResultLine) -> None:
        """Append a result line to the file."""
        self.lines[identify(line)] = line
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def list_kind(self, kind: str) -> Iterator[ResultLine]:
        """Yield all lines of a kind, such as runs."""
        return (line for line in self.lines.values() if line["kind"] == kind)

    def list_runs(self, experiment: Experiment) -> list[ResultLine]:
        """Return the finished runs of an experiment, sorted by seed."""
        found = [
            line
            for line in self.list_kind("run")
            if line["experiment"] == experiment.name and line["steps"] == experiment.steps
        ]
        return sorted(found, key=lambda line: line["seed"])

    def list_tuning_scores(self, task: str, method: str) -> dict[float, float | None]:
        """Return a method's tuning scores by learning rate; None for a run that broke down."""
        return {
            line["learning_rate"]: line["score"]
            for line in self.list_kind("tuning")
            if (line["task"], line["method"]) == (task, method)
        }

    def find_best_rate(self, task: str, method: str) -> float | None:
        """Return a method's best learning rate; None before all rates of the grid were tried."""
        task = TASKS[task].tuned_on or task
        scores = {
            rate: s for rate, s in self.list_tuning_scores(task, method).items() if s is not None
        }
        if len(self.list_tuning_scores(task, method)) < len(TASKS[task].grid) or not scores:
            return None
        best = max if TASKS[task].higher_is_better else min
        return best(scores, key=lambda rate: scores[rate])
