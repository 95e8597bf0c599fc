"""A client of a ledger in this process, with datasets of one test's own."""

from __future__ import annotations

import uuid

import httpx
from fastapi.testclient import TestClient

from accountant_service.ledger.api_keys import Scope
from training_client.client import AccountingService


class LedgerClient(AccountingService):
    """A client with an administrator's key, and a dataset that no other test uses.

    Attributes:
        patients: the name of the dataset.

    Args:
        api: the application.
        transport: to the application.
    """

    def __init__(self, api: TestClient, transport: httpx.MockTransport) -> None:
        self._api = api
        self._key = api.app.state.keys.create([Scope.ADMIN])[0]  # type: ignore[attr-defined]
        super().__init__("http://test", api_key=self._key, transport=transport)
        self.patients = self.add_dataset("patients")

    def add_dataset(self, kind: str) -> str:
        """Add a dataset of 400 records; return its name, which begins with `kind`."""
        name = f"{kind}-{uuid.uuid4().hex[:8]}"
        body = {"name": name, "size": 400, "budget": {"epsilon": 8.0, "delta": 1e-5}}
        headers = {"Authorization": f"Bearer {self._key}", "Idempotency-Key": name}
        assert self._api.post("/v1/datasets", json=body, headers=headers).status_code == 201
        return name
