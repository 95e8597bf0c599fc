"""The questions to the accounting service about every run, and its stored answers."""

from __future__ import annotations

from typing import Any

from training_client.lab.papers.experiments import PASSES, Experiment
from training_client.lab.papers.store import Store
from training_client.lab.papers.tasks import TASKS, projection_noise


def describe_mechanism(experiment: Experiment, steps: int) -> dict[str, Any]:
    """Return, as JSON, the mechanism of an experiment's first steps."""
    task, noise = TASKS[experiment.task], experiment.noise_multiplier
    if experiment.method.in_passes:  # every record is in exactly PASSES batches
        return {"kind": "repeated", "count": PASSES, "mechanism": _gaussian(noise)}
    parts = [
        {
            "kind": "dp_sgd",
            "noise_multiplier": noise * factor,
            "sample_rate": experiment.sample_rate or task.sample_rate,
            "steps": count,
            "sampling": "poisson",
        }
        for count, factor in experiment.noise_pieces(steps)
    ]
    if experiment.method.rho:
        parts = [{"kind": "zcdp", "rho": experiment.method.rho}]
    if experiment.method.relevance_noise:
        parts.insert(0, _gaussian(experiment.method.relevance_noise))
    if task.has_private_projection:
        parts.insert(0, _gaussian(projection_noise(noise)))
    return parts[0] if len(parts) == 1 else {"kind": "composed", "mechanisms": parts}


def _gaussian(noise_multiplier: float) -> dict[str, Any]:
    return {"kind": "gaussian", "noise_multiplier": noise_multiplier}


def build_question(experiment: Experiment, steps: int) -> dict[str, Any]:
    """Return the API request for the ε of an experiment after a number of steps."""
    delta = experiment.delta or TASKS[experiment.task].delta
    return {"mechanism": describe_mechanism(experiment, steps), "delta": delta}


def find_certified_epsilon(experiment: Experiment, steps: int, store: Store) -> float | None:
    """Return the certified ε after a number of steps; None without a guarantee or answer."""
    if not experiment.method.has_guarantee:
        return None
    known = store.get({"kind": "epsilon", **build_question(experiment, steps)})
    return None if known is None else float(known["epsilon"])
