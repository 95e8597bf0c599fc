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
        once = {"kind": "gaussian", "noise_multiplier": noise}
        return {"kind": "repeated", "count": PASSES, "mechanism": once}
    training = {
        "kind": "dp_sgd",
        "noise_multiplier": noise,
        "sample_rate": experiment.sample_rate or task.sample_rate,
        "steps": steps,
        "sampling": "poisson",
    }
    if not task.has_private_projection:
        return training
    projection = {"kind": "gaussian", "noise_multiplier": projection_noise(noise)}
    return {"kind": "composed", "mechanisms": [projection, training]}


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
