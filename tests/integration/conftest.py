"""A client of the application, in this process."""

from __future__ import annotations

from collections.abc import Iterator

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
