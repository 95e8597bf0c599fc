"""What the accounting service certifies of every run, asked once and kept in the results file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final

from fastapi.testclient import TestClient
from rich.progress import track

from accountant_service.app import create_app
from accountant_service.settings import Settings
from benchmarks.results.experiments import CLAIMED, PASSES, Experiment
from benchmarks.results.store import Store
from benchmarks.results.tasks import PROJECTION_NOISE, TASKS

METHOD: Final = "pld"


def mechanism(experiment: Experiment, steps: int) -> dict[str, Any]:
    """What so many steps of an experiment release about one record."""
    task, noise = TASKS[experiment.task], experiment.noise_multiplier
    if experiment.method.in_passes:  # a record is in PASSES batches, whichever they are
        once = {"kind": "gaussian", "noise_multiplier": noise}
        return {"kind": "repeated", "count": PASSES, "mechanism": once}
    training = {
        "kind": "dp_sgd",
        "noise_multiplier": noise,
        "sample_rate": task.sample_rate,
        "steps": steps,
        "sampling": "poisson",
    }
    if not task.projected:
        return training
    projection = {"kind": "gaussian", "noise_multiplier": PROJECTION_NOISE[noise]}
    return {"kind": "composed", "mechanisms": [projection, training]}


def certify(experiments: Sequence[Experiment], store: Store) -> None:
    """Ask for every point of every curve that is not known yet."""
    asked = {json.dumps(each, sort_keys=True): each for each in _questions(experiments, store)}
    missing = [each for each in asked.values() if {"kind": "epsilon", **each} not in store]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(database_url=f"sqlite:///{folder}/accountant.db")
        with TestClient(create_app(settings)) as service:
            for body in track(missing, "guarantees"):
                answer = service.post("/v1/epsilon", json={**body, "method": METHOD}).json()
                known = {"epsilon": answer["epsilon"], "status": answer["status"]}
                store.add({"kind": "epsilon", **body, **known})


def question(experiment: Experiment, steps: int) -> dict[str, Any]:
    """What the service is asked."""
    delta = experiment.delta or TASKS[experiment.task].delta
    return {"mechanism": mechanism(experiment, steps), "delta": delta}


def claimed(noise: float, epochs: int) -> dict[str, Any]:
    """The question that papers/001 §5.2 answers: its training alone, with q = 0.01."""
    plan = {"noise_multiplier": noise, "sample_rate": 0.01, "steps": 100 * epochs}
    return {"mechanism": {"kind": "dp_sgd", **plan, "sampling": "poisson"}, "delta": 1e-5}


def _questions(experiments: Sequence[Experiment], store: Store) -> Iterator[dict[str, Any]]:
    yield from (claimed(noise, epochs) for noise, epochs, _ in CLAIMED)
    for experiment in experiments:
        if experiment.method.proven:
            steps = {step for run in store.runs(experiment) for step, _ in run["curve"]}
            yield from (question(experiment, step) for step in sorted(steps))


def epsilon(experiment: Experiment, steps: int, store: Store) -> float | None:
    """The certified ε of so many steps; None without a guarantee, or without an answer yet."""
    if not experiment.method.proven:
        return None
    known = store.get({"kind": "epsilon", **question(experiment, steps)})
    return None if known is None else float(known["epsilon"])
