"""The certified ε of every run, computed once by the accounting service and then stored."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from fastapi.testclient import TestClient
from rich.progress import track

from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from training_client.lab.papers.accounting import build_question
from training_client.lab.papers.experiments import PAPER_CLAIMS, Experiment
from training_client.lab.papers.printed import list_printed_results
from training_client.lab.papers.store import Store

METHOD: Final = "pld"


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


def build_claimed_question(noise: float, epochs: int) -> dict[str, Any]:
    """Return the API request for the ε that papers/001 §5.2 claims for training alone."""
    plan = {"noise_multiplier": noise, "sample_rate": 0.01, "steps": 100 * epochs}
    return {"mechanism": {"kind": "dp_sgd", **plan, "sampling": "poisson"}, "delta": 1e-5}


def _list_questions(experiments: Sequence[Experiment], store: Store) -> Iterator[dict[str, Any]]:
    """Yield the API requests for every certified ε that the report shows."""
    yield from (build_claimed_question(noise, epochs) for noise, epochs, _ in PAPER_CLAIMS)
    others = [
        replace(each, delta=float(reference.argument))
        for printed in list_printed_results()
        for reference in printed.references
        if reference.kind == "shift"
        for each in reference.experiments
    ]
    for experiment in (*experiments, *others):
        if experiment.method.has_guarantee:
            steps = {step for run in store.list_runs(experiment) for step, _ in run["curve"]}
            yield from (build_question(experiment, step) for step in sorted(steps))
