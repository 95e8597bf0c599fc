"""The application in this process: a client of it, and a transport for the training client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.lazy_modules import LazyModule
from tests.support.ledger_client import LedgerClient
from tests.support.ledger_scenarios import (  # noqa: F401
    clock,
    commands,
    kind,
    own_web,
    scenario,
    url,
    web,
)
from tests.support.training_bench import Bench
from training_client.client import AccountingService


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    file = tmp_path_factory.mktemp("ledger") / "accountant.db"
    app = create_app(Settings(database_url=f"sqlite:///{file}"))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def asked() -> list[Any]:
    """Bodies of the questions that came by `transport`."""
    return []


@pytest.fixture
def transport(api: TestClient, asked: list[Any]) -> httpx.MockTransport:
    """A transport to `api`, which records the bodies of requests."""

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content or b"null"))
        answer = api.request(
            request.method, request.url.path, content=request.content, headers=request.headers
        )
        return httpx.Response(answer.status_code, content=answer.content)

    return httpx.MockTransport(handle)


@pytest.fixture
def ledger(api: TestClient, transport: httpx.MockTransport) -> LedgerClient:
    """A client of the ledger of `api`, with a dataset of the test's own."""
    return LedgerClient(api, transport)


@pytest.fixture
def bench(api: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The trainer's commands on a small data set, with `api` as their service."""
    return Bench(api, tmp_path / "run", monkeypatch)


@pytest.fixture
def service(transport: httpx.MockTransport) -> AccountingService:
    """A client of `api` without a key."""
    return AccountingService("http://test", transport=transport)


@pytest.fixture(params=["InLightning", "InHuggingFace"])
def framework(request: pytest.FixtureRequest) -> Any:
    """Each training framework; they are imported by the tests that use them."""
    return getattr(LazyModule("tests.integration.frameworks"), request.param)()
