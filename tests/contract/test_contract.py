"""Answers recorded once: the service still gives them, and the client reads them.

A change of the wire shows here first. `python -m tests.contract.test_contract` records them anew.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from training_client.client import AccountingService
from training_client.errors import ServiceRefusedError

FIXTURES = Path(__file__).parent / "fixtures"
PLAN = {"noise_multiplier": 1.1, "sample_rate": 0.01}
RUN = {"kind": "dp_sgd", **PLAN, "steps": 1000, "sampling": "poisson"}
ASKED = {"delta": 1e-5, "method": "pld", "neighbouring_relation": "add_or_remove_one"}
TARGET = {"epsilon": 2.0, "delta": 1e-5, "method": "pld"}
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "epsilon": ("/v1/epsilon", {"mechanism": RUN, **ASKED}),
    "noise-multiplier": (
        "/v1/noise-multiplier",
        {"sample_rate": 0.01, "steps": 1000, **TARGET},
    ),
    "steps": ("/v1/steps", {**PLAN, **TARGET}),
    "refused": ("/v1/epsilon", {"mechanism": {**RUN, "steps": -1}, **ASKED}),
}


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return found


def ask_all() -> dict[str, dict[str, Any]]:
    """Return what a new service answers to each question."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(database_url=f"sqlite:///{folder}/accountant.db")
        with TestClient(create_app(settings)) as api:
            for name, (path, body) in QUESTIONS.items():
                answer = api.post(path, json=body)
                found[name] = {"path": path, "body": body, "status": answer.status_code}
                found[name]["answer"] = answer.json()
    return found


def same(found: Any, expected: Any) -> None:
    """Equal shape and words; numbers to 1e-6, for other machines' arithmetic."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected.keys() - {"mechanism_hash"}:  # of a solved noise: all its digits
            same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6)
    else:
        assert found == expected


def test_the_service_still_answers_as_recorded() -> None:
    for name, found in ask_all().items():
        same(found, recorded(name))


def client() -> AccountingService:
    """A client whose service plays the recordings, if asked exactly what was recorded."""

    def play(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        for name in QUESTIONS:
            record = recorded(name)
            if record["path"] == request.url.path and record["body"] == body:
                return httpx.Response(record["status"], json=record["answer"])
        raise AssertionError(f"asked what was never recorded: {request.url.path} {body}")

    return AccountingService("http://recorded", transport=httpx.MockTransport(play))


def test_the_client_sends_and_reads_the_recorded_requests() -> None:
    with client() as service:
        claim = service.epsilon(RUN, 1e-5)
        assert claim.epsilon == recorded("epsilon")["answer"]["epsilon"]
        assert claim.status == "proven"
        sigma = service.noise_multiplier(sample_rate=0.01, steps=1000, epsilon=2.0, delta=1e-5)
        assert sigma == recorded("noise-multiplier")["answer"]["noise_multiplier"]
        steps = service.steps(**PLAN, epsilon=2.0, delta=1e-5)
        assert steps == recorded("steps")["answer"]["steps"]
        with pytest.raises(ServiceRefusedError) as caught:
            service.epsilon({**RUN, "steps": -1}, 1e-5)
        assert caught.value.code == "invalid-request"
        assert caught.value.pointers == ("/mechanism/steps",)


if __name__ == "__main__":
    for question, found in ask_all().items():
        (FIXTURES / f"{question}.json").write_text(json.dumps(found, indent=2) + "\n")
