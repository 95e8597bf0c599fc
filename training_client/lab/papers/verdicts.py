"""Verdicts on printed results: each follows from the results file by one rule.

A result is *reproduced* if ours with a guarantee is at least as good as the paper's, up to a
tolerance; *reproduced only without privacy* if ours as in the paper is, and ours with a guarantee
is not. If a run that decides is missing, the result is *not run* or *not run in full*. With fewer
epochs than the paper prints, a smaller ε, or a method of ours that is no better than a constant
answer, there is *no verdict*. Otherwise it is *not reproduced*; a result is never reproduced by an
experiment of which a run broke down.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from scipy.stats import t

from training_client.lab.data import DATASETS
from training_client.lab.papers.accounting import find_certified_epsilon
from training_client.lab.papers.experiments import Experiment
from training_client.lab.papers.printed import PrintedResult, Reference
from training_client.lab.papers.runner import count_epochs
from training_client.lab.papers.store import Store
from training_client.lab.papers.tasks import TASKS

NOTHING: Final = "–"
REPRODUCED: Final = "reproduced"
WITHOUT_PRIVACY: Final = "reproduced only without privacy"
NOT_REPRODUCED: Final = "not reproduced"
NOT_RUN: Final = "not run"
OWN_DATA: Final = "needs your copy of"
NOT_IN_FULL: Final = "not run in full"
NO_VERDICT: Final = "no verdict"
OTHER_HARDWARE: Final = "other hardware"
SEEDS: Final = 3  # a verdict needs as many runs
POINT: Final = 0.01  # the tolerance of an accuracy: three seeds differ by about as much
_RELATIVE: Final = 0.05  # the tolerance of an ε and of a loss
_CLOSE: Final = 2.0  # "close" means within this factor
_MOST: Final = 0.5
SHIFT_EPSILON: Final = 0.5  # the ε at which scores at two δ are compared


@dataclass(frozen=True, slots=True)
class Measure:
    """A result of ours that a reference names.

    Attributes:
        text: the result as text.
        value: the number to compare; None if the paper's value was not reached.
        low, high: the ends of the 95 % confidence interval of a difference.
        spent: the certified ε of the whole run, if an accuracy was not reached.
        epochs: the epochs that were trained.
        seeds: the number of runs.
    """

    text: str
    value: float | None
    epochs: float
    seeds: int
    low: float = math.nan
    high: float = math.nan
    spent: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A printed result beside ours.

    Attributes:
        printed: the printed result.
        ours: our result as in the paper; None if it was not run or does not exist.
        private: our result with a guarantee; None if it was not run or does not exist.
        verdict: what follows.
        reason: what the verdict needs to be understood; may be empty.
    """

    printed: PrintedResult
    ours: Measure | None
    private: Measure | None
    verdict: str
    reason: str = ""

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The results of ours that exist."""
        return tuple(each for each in (self.ours, self.private) if each is not None)


def judge(printed: PrintedResult, store: Store, audit: Mapping[str, str]) -> Outcome:
    """Return a printed result with ours and the verdict.

    Args:
        printed: the printed result.
        store: the results file.
        audit: the verdict of the audit on each of its claims.
    """
    if not printed.references:
        verdict = printed.note if printed.note.startswith("see ") else NOT_RUN
        return Outcome(
            printed, None, None, verdict, "" if verdict == printed.note else printed.note
        )
    if printed.ours is not None and printed.ours.kind == "audit":
        claim = printed.ours.argument
        found = next((said for each, said in audit.items() if each.startswith(claim)), None)
        return Outcome(printed, None, None, found or NOT_RUN)
    ours, private = (
        None if each is None else measure(each, printed, store)
        for each in (printed.ours, printed.private)
    )
    verdict, reason = _decide(printed, ours, private)
    decisive = printed.ours if verdict == WITHOUT_PRIVACY else printed.private or printed.ours
    if verdict in (REPRODUCED, WITHOUT_PRIVACY) and decisive is not None:
        reason = _compare_with_trivial(decisive, store)
        return Outcome(printed, ours, private, NO_VERDICT if reason else verdict, reason)
    constant = (_compare_with_trivial(each, store) for each in printed.references)
    return Outcome(printed, ours, private, verdict, reason or next(filter(None, constant), ""))


def _name_missing_data(printed: PrintedResult) -> str:
    """Return which data sets of a result must be your own copy; empty if none must."""
    names = {
        TASKS[experiment.task].dataset
        for reference in printed.references
        for experiment in reference.experiments
    }
    own = sorted(name for name in names if DATASETS[name].has_files is not None)
    return f"{OWN_DATA} {', '.join(own)}" if own else ""


def _compare_with_trivial(reference: Reference, store: Store) -> str:
    """Return that a method of ours is no better than a constant answer; empty if it is better."""
    experiment = reference.experiments[0]
    trivial = store.find_trivial_score(experiment.task)
    scores = list_final_scores(experiment, store)
    if trivial is None or not scores:
        return ""
    mean = statistics.mean(scores)
    is_worse = mean <= trivial if TASKS[experiment.task].higher_is_better else mean >= trivial
    return f"no better than a constant answer ({trivial:.3f})" if is_worse else ""


def _decide(
    printed: PrintedResult, ours: Measure | None, private: Measure | None
) -> tuple[str, str]:
    """Return the verdict on a printed result, and its reason."""
    found = [each for each in (ours, private) if each is not None]
    if not found:
        return NOT_RUN, _name_missing_data(printed)
    if printed.unit == "seconds":
        return OTHER_HARDWARE, ""
    seeds = min(each.seeds for each in found)
    if seeds < SEEDS:
        return NOT_IN_FULL, f"{seeds} of {SEEDS} seeds"
    needs_guarantee = printed.private is not None
    best = private if needs_guarantee else ours
    if best is not None and is_met(printed, best):
        return REPRODUCED, ""
    if ours is not None and private is not None and is_met(printed, ours):
        return WITHOUT_PRIVACY, ""
    if len(found) < len(printed.references):
        return NOT_IN_FULL, ""
    epochs = min(each.epochs for each in found)
    if printed.epochs is not None and epochs < 0.99 * printed.epochs:
        return NO_VERDICT, f"{epochs:g} of {printed.epochs:g} epochs"
    if private is not None and private.spent is not None and private.spent < float(printed.value):
        return NO_VERDICT, f"trained to ε = {private.spent:.3g} only"
    return NOT_REPRODUCED, ""


def is_met(printed: PrintedResult, found: Measure) -> bool:
    """Return whether a result of ours is as good as the printed one, up to the tolerance."""
    if found.value is None:
        return False
    claimed = float(printed.value) if printed.value else None
    if printed.unit.endswith(", at most"):
        return claimed is not None and abs(found.value) <= claimed
    if printed.unit in ("points", "relative percent"):
        return found.low > 0 and (claimed is None or found.value >= claimed - 100 * POINT)
    if printed.unit == "objective":
        return found.value <= _RELATIVE
    if printed.unit == "ratio":
        return 1 / _CLOSE <= found.value <= _CLOSE
    if printed.unit == "share":
        return found.value > _MOST
    if printed.unit == "shift":
        return abs(found.value) <= 100 * POINT
    if claimed is None:
        return False
    if printed.unit == "accuracy":
        return found.value >= claimed - POINT
    return found.value <= claimed * (1 + _RELATIVE)


def measure(reference: Reference, printed: PrintedResult, store: Store) -> Measure | None:
    """Return the result that a reference names; None if it was not run.

    If a run broke down, there is no value: the mean of the others would flatter the method.
    """
    runs = [store.list_runs(each) for each in reference.experiments]
    if not all(runs):
        return None
    if broken := ", ".join(
        f"{each.method.label} {text}"
        for each in reference.experiments
        if (text := describe_breakdown(each, store))
    ):
        epochs = min(count_epochs(each, each.steps) for each in reference.experiments)
        return Measure(broken, None, epochs, min(map(len, runs)))
    return _MEASURES[reference.kind](reference, printed, store)


def describe_breakdown(experiment: Experiment, store: Store) -> str:
    """Return in how many of an experiment's runs it broke down; empty if in none."""
    runs = store.list_runs(experiment)
    broken = sum(run["score"] is None for run in runs)
    return f"broke down in {broken} of {len(runs)}" if broken else ""


def list_final_scores(experiment: Experiment, store: Store) -> list[float]:
    """Return the final scores of the runs that did not break down."""
    return [run["score"] for run in store.list_runs(experiment) if run["score"] is not None]


def compute_mean_curve(experiment: Experiment, store: Store) -> list[tuple[int, float]]:
    """Return pairs of a step and the mean score over the seeds, of which none broke down."""
    runs = [dict(run["curve"]) for run in store.list_runs(experiment)]
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    return [(step, statistics.mean(run[step] for run in runs)) for step in steps]


def _measure_score(reference: Reference, printed: PrintedResult, store: Store) -> Measure:
    """Return the mean final score, or that of the last point with at most an ε."""
    (experiment,) = reference.experiments
    if reference.argument:
        return _measure_score_until(experiment, float(reference.argument), store)
    scores = list_final_scores(experiment, store)
    epochs = count_epochs(experiment, experiment.steps)
    scale = 0.01 if printed.unit == "loss" else 1.0  # scores of the autoencoder are × 100
    digits = 4 if printed.unit == "loss" else 3
    mean = scale * statistics.mean(scores)
    text = f"{mean:.{digits}f}"
    if len(scores) > 1:
        text += f" ± {scale * statistics.stdev(scores):.{digits}f}"
    return Measure(text, mean, epochs, len(scores))


def _measure_score_until(experiment: Experiment, epsilon: float, store: Store) -> Measure:
    """Return the mean score at the last point of the curve whose ε is at most the given one."""
    curve = compute_mean_curve(experiment, store)
    seeds = len(store.list_runs(experiment))
    costs = [(find_certified_epsilon(experiment, step, store), step, y) for step, y in curve]
    inside = [(cost, step, y) for cost, step, y in costs if cost is not None and cost <= epsilon]
    if not inside:
        return Measure("no point with so small an ε", None, 0.0, seeds)
    cost, step, score = inside[-1]
    return Measure(f"{score:.3f} at ε = {cost:.3g}", score, count_epochs(experiment, step), seeds)


def _measure_lead(reference: Reference, printed: PrintedResult, store: Store) -> Measure:
    """Return the difference of two final scores, in points, with Welch's confidence interval.

    In relative percent it is divided by the second score's mean, as its interval is.
    """
    first, second = (list_final_scores(each, store) for each in reference.experiments)
    seeds = min(len(first), len(second))
    epochs = min(count_epochs(each, each.steps) for each in reference.experiments)
    percent = 1.0 if printed.unit == "objective" else 100.0
    if printed.unit.startswith("relative percent"):
        percent /= statistics.mean(second)
    lead = percent * (statistics.mean(first) - statistics.mean(second))
    text = f"{lead:+.2f}".replace("-", "−")
    if seeds < 2:
        return Measure(text, lead, epochs, seeds)
    low, high = (percent * end for end in find_welch_interval(first, second))
    text += f" ({low:+.2f} to {high:+.2f})".replace("-", "−")
    return Measure(text, lead, epochs, seeds, low, high)


def find_welch_interval(first: list[float], second: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the difference of two means (Welch 1947)."""
    lead = statistics.mean(first) - statistics.mean(second)
    parts = [(statistics.variance(each) / len(each), len(each) - 1) for each in (first, second)]
    variance = sum(part for part, _ in parts)
    if variance == 0:  # every run of a method has the same score
        return lead, lead
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
    half = float(t.ppf(0.975, freedom)) * math.sqrt(variance)
    return lead - half, lead + half


def _measure_epsilon(reference: Reference, _: PrintedResult, store: Store) -> Measure:
    """Return the ε at which the mean score first reaches an accuracy."""
    (experiment,) = reference.experiments
    curve = compute_mean_curve(experiment, store)
    seeds, level = len(store.list_runs(experiment)), float(reference.argument)
    step = next((step for step, score in curve if score >= level), None)
    if step is None:
        epochs = count_epochs(experiment, experiment.steps)
        whole = find_certified_epsilon(experiment, experiment.steps, store)
        return Measure(f"not reached in {epochs:g} epochs", None, epochs, seeds, spent=whole)
    epochs = count_epochs(experiment, step)
    spent = find_certified_epsilon(experiment, step, store)
    text = "no guarantee" if spent is None else f"{spent:.3g}"
    return Measure(f"{text} ({epochs:g} epochs)", spent, epochs, seeds)


def _measure_seconds(reference: Reference, _: PrintedResult, store: Store) -> Measure:
    """Return the median time per step."""
    (experiment,) = reference.experiments
    runs = store.list_runs(experiment)
    seconds = statistics.median(run["seconds"] / run["steps"] for run in runs)
    epochs = count_epochs(experiment, experiment.steps)
    return Measure(f"{seconds:.2g}", seconds, epochs, len(runs))


def _measure_estimate(reference: Reference, _: PrintedResult, store: Store) -> Measure:
    """Return the median over runs of √E′[g²] over |g|, both averaged over coordinates."""
    return _measure_watched(
        reference, store, lambda _, last: last["estimate"] / last["gradient"], "{:.2f}"
    )


def _measure_noise(reference: Reference, _: PrintedResult, store: Store) -> Measure:
    """Return the median share of σᵢ below 10 at the last step that is watched."""
    middle = _measure_watched(reference, store, lambda first, _: first["10 to 20"], "{:.2f}")
    found = _measure_watched(reference, store, lambda _, last: last["below 10"], "{:.2f}")
    first = reference.experiments[0].watched[0]
    return replace(found, text=f"{found.text}; {middle.text} from 10 to 20 at step {first}")


def _measure_watched(
    reference: Reference,
    store: Store,
    compute: Callable[[Mapping[str, float], Mapping[str, float]], float],
    style: str,
) -> Measure:
    """Return the median over runs of what the first and the last watched step give."""
    (experiment,) = reference.experiments
    runs = [list(run["watched"].values()) for run in store.list_runs(experiment)]
    value = statistics.median(compute(states[0], states[-1]) for states in runs)
    epochs = count_epochs(experiment, experiment.steps)
    return Measure(style.format(value), value, epochs, len(runs))


def _measure_shift(reference: Reference, _: PrintedResult, store: Store) -> Measure | None:
    """Return by how many points the score at one ε changes with another δ."""
    (experiment,) = reference.experiments
    other = replace(experiment, delta=float(reference.argument))
    found = [_measure_score_until(each, SHIFT_EPSILON, store) for each in (experiment, other)]
    one, another = found
    if one.value is None or another.value is None:
        return None
    shift = 100 * (another.value - one.value)
    return Measure(f"{shift:+.2f}".replace("-", "−"), shift, another.epochs, another.seeds)


_MEASURES: Final[dict[str, Callable[[Reference, PrintedResult, Store], Measure | None]]] = {
    "score": _measure_score,
    "lead": _measure_lead,
    "epsilon": _measure_epsilon,
    "seconds": _measure_seconds,
    "estimate": _measure_estimate,
    "noise": _measure_noise,
    "shift": _measure_shift,
}
