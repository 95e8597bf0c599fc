"""The application in this process: a client of it, and a transport for the training client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from accountant_service.app import create_app
from accountant_service.ledger.api_keys import Scope
from accountant_service.settings import Settings
from tests.support.ledger_scenarios import (  # noqa: F401
    clock,
    commands,
    kind,
    own_web,
    scenario,
    url,
    web,
)
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
def app_alone(tmp_path: Path) -> Iterator[TestClient]:
    """One whose ledger is empty."""
    with TestClient(create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))) as client:
        yield client


@pytest.fixture
def transport(app_alone: TestClient, asked: list[Any]) -> httpx.MockTransport:
    """To `app_alone`."""

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content or b"null"))
        answer = app_alone.request(
            request.method, request.url.path, content=request.content, headers=request.headers
        )
        return httpx.Response(answer.status_code, content=answer.content)

    return httpx.MockTransport(handle)


@pytest.fixture
def ledger(app_alone: TestClient, transport: httpx.MockTransport) -> AccountingService:
    """That of `app_alone`, with a dataset called patients."""
    key = app_alone.app.state.keys.create([Scope.ADMIN])[0]  # type: ignore[attr-defined]
    budget = {"epsilon": 8.0, "delta": 1e-5}
    answer = app_alone.post(
        "/v1/datasets",
        json={"name": "patients", "size": 400, "budget": budget},
        headers={"Authorization": f"Bearer {key}", "Idempotency-Key": "patients"},
    )
    assert answer.status_code == 201
    return AccountingService("http://test", api_key=key, transport=transport)


@pytest.fixture
def service(transport: httpx.MockTransport) -> AccountingService:
    """That of `app_alone`, without a key."""
    return AccountingService("http://test", transport=transport)


@pytest.fixture(params=["InLightning", "InHuggingFace"])
def framework(request: pytest.FixtureRequest) -> Any:
    """Each training framework; they are imported by the tests that use them."""
    from tests.integration import frameworks

    return getattr(frameworks, request.param)()
