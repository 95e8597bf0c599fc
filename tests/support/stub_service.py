"""A stub of the accounting service that answers by a formula, for tests of the client alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import torch

from training_client.client import AccountingService
from training_client.lab.data import Dataset
from training_client.plan import Plan

PLAN = Plan(dataset_size=100, sample_rate=0.1, clip_norm=1.0, noise_multiplier=1.0)


DATASET = {"neighbouring_relation": "add_or_remove_one", "budget": {"epsilon": 2, "delta": 1e-5}}


Answer = Callable[[str, dict[str, Any]], httpx.Response]


def service(answer: Answer) -> AccountingService:
    """Return a client whose requests are answered by a function of path and body."""

    def handle(request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        return answer(request.url.path, json.loads(request.content or b"null"))

    return AccountingService("http://test", transport=httpx.MockTransport(handle))


def claim(epsilon: float, delta: float = 1e-5) -> dict[str, Any]:
    """Return a proven guarantee as the service's JSON."""
    return {"epsilon": epsilon, "delta": delta, "method": "pld", "status": "proven"}


def linear_accountant(path: str, body: dict[str, Any]) -> httpx.Response:
    """Answer as a service in which each step costs ε = 0.1, so that 20 steps fit ε = 2."""
    if path == "/v1/epsilon":
        return httpx.Response(200, json=claim(0.1 * body["mechanism"]["steps"]))
    if path == "/v1/datasets/d":
        return httpx.Response(200, json=DATASET)
    if path == "/v1/curve":
        last = body["mechanism"]["steps"]
        steps = sorted({last * at // body["points"] for at in range(1, body["points"] + 1)})
        curve = {"method": "pld", "status": "proven", "epsilon": [0.1 * each for each in steps]}
        return httpx.Response(200, json={"steps": steps, "curves": [curve]})
    steps = int(body["epsilon"] / 0.1 + 1e-9)
    return httpx.Response(200, json={"steps": steps, "guarantee": claim(0.1 * steps)})


def tiny_data() -> Dataset:
    """Return a data set of 100 random examples with two classes."""
    generator = torch.Generator().manual_seed(0)
    examples = torch.randn(100, 5, generator=generator)
    labels = (examples[:, 0] > 0).long()
    return Dataset(examples, labels, examples, labels, classes=2)
