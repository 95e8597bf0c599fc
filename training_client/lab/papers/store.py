"""The results file: a JSON line for every finished result, so that a run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from training_client.errors import DataError
from training_client.lab.papers.experiments import FIRST_SEED, TUNING_SEED, Experiment
from training_client.lab.papers.tasks import TASKS

ResultLine = Mapping[str, Any]
_FIELDS: Final = {  # that each kind of line must have
    "tuning": ("task", "method", "learning_rate", "score"),
    "run": ("experiment", "seed", "steps", "score", "curve"),
    "epsilon": ("mechanism", "delta", "epsilon"),
    "trivial": ("task", "score"),
}
KINDS: Final = tuple(_FIELDS)
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


def describe_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings of an experiment that its name does not show, as JSON."""
    method, task = experiment.method, TASKS[experiment.task]
    schedule = method.schedule
    return {
        "optimizer": method.optimizer,
        "clip_norm": method.clip_norm,
        "state": method.state,
        "options": dict(method.options),
        "schedule": None if schedule is None else [schedule.share, schedule.steps],
        "has_raw_public": method.has_raw_public,
        "noise_schedule": method.noise_schedule,
        "relevance_noise": method.relevance_noise,
        "rho": method.rho,
        "sample_rate": experiment.sample_rate or task.sample_rate,
        "hidden": experiment.hidden or task.hidden,
        "public_rows": task.public_rows if method.public_rows is None else method.public_rows,
    }


class Store:
    """The lines of a results file; new results are appended.

    Args:
        file: created with the first line if it does not exist.

    Raises:
        DataError: the file is not a results file; it is left as it is.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        text = _read(file)
        whole = text[: text.rfind("\n") + 1]
        found = [_parse(file, number, line) for number, line in _number_lines(whole)]
        rest = text[len(whole) :]
        if rest and not rest.startswith('{"kind"'):
            raise DataError(f"{file} is not a results file: choose another --results")
        self._cut_off = len(whole.encode()) if rest else None
        self.lines = {identify(line): line for line in found}

    def __contains__(self, line: ResultLine) -> bool:
        """Return whether a line with the same identity is stored."""
        return identify(line) in self.lines

    def get(self, line: ResultLine) -> ResultLine | None:
        """Return the stored line with the same identity as the given one, or None."""
        return self.lines.get(identify(line))

    def add(self, line: ResultLine) -> None:
        """Append a result line to the file, in place of a last line that was cut off."""
        self.lines[identify(line)] = line
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab") as file:
            if self._cut_off is not None:
                file.truncate(self._cut_off)
                self._cut_off = None
            file.write((json.dumps(line) + "\n").encode())

    def list_kind(self, kind: str) -> Iterator[ResultLine]:
        """Yield all lines of one type (`kind`), such as runs."""
        return (line for line in self.lines.values() if line["kind"] == kind)

    def list_runs(self, experiment: Experiment) -> list[ResultLine]:
        """Return the finished runs of an experiment, sorted by seed."""
        found = [
            line
            for line in self.list_kind("run")
            if line["experiment"] == experiment.name and line["steps"] == experiment.steps
        ]
        return sorted(found, key=lambda line: line["seed"])

    def find_trivial_score(self, task: str) -> float | None:
        """Return the score of the best constant answer on a task; None if it was not computed."""
        known = self.get({"kind": "trivial", "task": task})
        return None if known is None else float(known["score"])

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

    def find_rate(self, experiment: Experiment) -> float | None:
        """Return an experiment's learning rate: the paper's, or else the tuned one."""
        if experiment.learning_rate is not None:
            return experiment.learning_rate
        method = experiment.method
        return self.find_best_rate(experiment.task, method.tuned_as or method.label)


def require_same_settings(store: Store, experiments: Sequence[Experiment]) -> None:
    """Raise unless the stored runs are of these experiments, with their settings and seeds.

    Raises:
        DataError: names the first run that is of another experiment, setting or seed.
    """
    known = {(each.name, each.steps): describe_settings(each) for each in experiments}
    steps = dict(known.keys())
    rates = {each.name: each.learning_rate for each in experiments}
    for line in store.list_kind("run"):
        _require_known_seed(store.file, line, FIRST_SEED)
        name = line["experiment"]
        if name not in steps:
            raise DataError(f"{store.file}: unknown experiment {name!r}{_ADVICE}")
        if (name, line["steps"]) not in known:
            raise DataError(
                f"{store.file}: {name} was run for {line['steps']} steps, not {steps[name]}"
                f"{_ADVICE}"
            )
        expected = known[name, line["steps"]]
        stored = dict(line.get("settings", {}))
        if rates[name] is not None:
            expected = expected | {"learning_rate": rates[name]}
            stored["learning_rate"] = line.get("learning_rate")
        for setting, value in stored.items():
            if expected.get(setting) != value:
                raise DataError(
                    f"{store.file}: {name} was run with {setting} {value!r}, not "
                    f"{expected.get(setting)!r}{_ADVICE}"
                )
    for line in store.list_kind("tuning"):
        _require_known_seed(store.file, line, TUNING_SEED)


_ADVICE: Final = ": another version wrote this file; choose another --results"


def _require_known_seed(file: Path, line: ResultLine, first: int) -> None:
    """Raise unless the seed of a line is one that its kind has."""
    seed = line.get("seed")
    is_known = seed == TUNING_SEED if line["kind"] == "tuning" else seed in range(first, 1_000_000)
    if not is_known or isinstance(seed, bool):
        raise DataError(
            f"{file}: unknown seed {seed!r} of a line of kind {line['kind']!r}: results have seeds "
            f"from {FIRST_SEED}, and seed {TUNING_SEED} chooses learning rates"
        )


def _read(file: Path) -> str:
    """Return the text of a results file; raise if it is not text."""
    if not file.exists():
        return ""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not a results file: choose another --results") from None


def _number_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text with their numbers from 1."""
    return enumerate(text.splitlines(), 1)


def _parse(file: Path, number: int, line: str) -> ResultLine:
    """Return a line of a results file; raise if it is not one."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("kind") not in KINDS:
        raise DataError(f"{file}:{number} is not a result: choose another --results")
    if missing := [name for name in _FIELDS[found["kind"]] if name not in found]:
        raise DataError(f"{file}:{number} has no {', '.join(missing)}: choose another --results")
    return found
