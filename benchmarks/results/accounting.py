"""The certified ε of every run, computed once by the accounting service and then stored."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final

from fastapi.testclient import TestClient
from rich.progress import track

from accountant_service.app import create_app
from accountant_service.settings import Settings
from benchmarks.results.experiments import PAPER_CLAIMS, PASSES, Experiment
from benchmarks.results.store import Store
from benchmarks.results.tasks import PROJECTION_NOISE, TASKS

METHOD: Final = "pld"


def describe_mechanism(experiment: Experiment, steps: int) -> dict[str, Any]:
    """Return, as JSON, the mechanism of an experiment's first steps."""
    task, noise = TASKS[experiment.task], experiment.noise_multiplier
    if experiment.method.in_passes:  # every record is in exactly PASSES batches
        once = {"kind": "gaussian", "noise_multiplier": noise}
        return {"kind": "repeated", "count": PASSES, "mechanism": once}
    training = {
        "kind": "dp_sgd",
        "noise_multiplier": noise,
        "sample_rate": task.sample_rate,
        "steps": steps,
        "sampling": "poisson",
    }
    if not task.has_private_projection:
        return training
    projection = {"kind": "gaussian", "noise_multiplier": PROJECTION_NOISE[noise]}
    return {"kind": "composed", "mechanisms": [projection, training]}


def certify(experiments: Sequence[Experiment], store: Store) -> None:
    """Compute the certified ε of every curve's points, and store those not stored yet."""
    questions = {
        json.dumps(each, sort_keys=True): each for each in _list_questions(experiments, store)
    }
    missing = [each for each in questions.values() if {"kind": "epsilon", **each} not in store]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(database_url=f"sqlite:///{folder}/accountant.db")
        with TestClient(create_app(settings)) as service:
            for body in track(missing, "guarantees"):
                answer = service.post("/v1/epsilon", json={**body, "method": METHOD}).json()
                known = {"epsilon": answer["epsilon"], "status": answer["status"]}
                store.add({"kind": "epsilon", **body, **known})


def build_question(experiment: Experiment, steps: int) -> dict[str, Any]:
    """Return the API request for the ε of an experiment after a number of steps."""
    delta = experiment.delta or TASKS[experiment.task].delta
    return {"mechanism": describe_mechanism(experiment, steps), "delta": delta}


def build_claimed_question(noise: float, epochs: int) -> dict[str, Any]:
    """Return the API request for the ε that papers/001 §5.2 claims for training alone."""
    plan = {"noise_multiplier": noise, "sample_rate": 0.01, "steps": 100 * epochs}
    return {"mechanism": {"kind": "dp_sgd", **plan, "sampling": "poisson"}, "delta": 1e-5}


def _list_questions(experiments: Sequence[Experiment], store: Store) -> Iterator[dict[str, Any]]:
    """Yield the API requests for every certified ε that the report shows."""
    yield from (build_claimed_question(noise, epochs) for noise, epochs, _ in PAPER_CLAIMS)
    for experiment in experiments:
        if experiment.method.has_guarantee:
            steps = {step for run in store.list_runs(experiment) for step, _ in run["curve"]}
            yield from (build_question(experiment, step) for step in sorted(steps))


def find_certified_epsilon(experiment: Experiment, steps: int, store: Store) -> float | None:
    """Return the certified ε after a number of steps; None without a guarantee or answer."""
    if not experiment.method.has_guarantee:
        return None
    known = store.get({"kind": "epsilon", **build_question(experiment, steps)})
    return None if known is None else float(known["epsilon"])
