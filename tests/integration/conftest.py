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
from accountant_service.settings import Settings


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    url = f"sqlite:///{tmp_path_factory.mktemp('ledger')}/accountant.db"
    app = create_app(Settings(database_url=url))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def asked() -> list[Any]:
    """Bodies of the questions that came by `transport`."""
    return []


@pytest.fixture
def transport(tmp_path: Path, asked: list[Any]) -> Iterator[httpx.MockTransport]:
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    with TestClient(app) as http:

        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(json.loads(request.content or b"null"))
            answer = http.request(
                request.method, request.url.path, content=request.content, headers=request.headers
            )
            return httpx.Response(answer.status_code, content=answer.content)

        yield httpx.MockTransport(handle)
