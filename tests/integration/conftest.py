"""A client of the application, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from accountant_service.app import create_app
from accountant_service.settings import Settings


@pytest.fixture(scope="session")
def api() -> Iterator[TestClient]:
    with TestClient(create_app(Settings()), raise_server_exceptions=False) as client:
        yield client
