"""The client has a method for each route, and for each command that a service can answer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fastapi.testclient import TestClient

from accountant_service.ledger.api_keys import Scope
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from scripts.client_calls import Route, list_routes, method_of
from tests.support.command_tree import walk_commands
from training_client.charging import LedgerDataset
from training_client.client import AccountingService
from training_client.client.calls import RouteCalls
from training_client.errors import ServiceUnreachableError

ROUTES = {f"{each.verb} {each.path}": each for each in list_routes()}
LOCAL = "the machine's own database or files"
# The client's method for each command; another program has no way to those that are local
METHODS = {
    "epsilon": "epsilon",
    "delta": "delta",
    "noise-multiplier": "noise_multiplier",
    "steps": "steps",
    "sample-rate": "sample_rate",
    "solve": "solve",
    "compare": "compare",
    "plan": "plan",
    "import": "import_document",
    "audit": LOCAL,
    "serve": LOCAL,
    "verify": LOCAL,
    "dataset create": "create_dataset",
    "dataset list": "list_datasets",
    "dataset show": "dataset",
    "dataset quote": "quote",
    "dataset close": "close_dataset",
    "dataset reference": "set_reference",
    "dataset delete": "delete_dataset",
    "series create": "create_series",
    "series add": "add_to_series",
    "series list": "list_series",
    "series show": "get_series",
    "series window": "window",
    "run list": "list_reservations",
    "run show": "reservation",
    "run reserve": "reserve",
    "run grant": "grant",
    "run commit": "commit",
    "run release": "release",
    "run renew": "renew",
    "run certificate": "certificate",
    "charge": "charge",
    "report dataset": "dataset_report",
    "report run": "run_report",
    "report certificate": LOCAL,
    "keys create": "create_key",
    "keys list": "list_keys",
    "keys limit": "change_key",
    "keys revoke": "revoke_key",
    "keys reset": LOCAL,
    "ledger verify": LOCAL,
    "ledger repair": LOCAL,
    "ledger show": "list_datasets",
    "ledger quote": "quote",
    "ledger export": "export_entries",
    "ledger entries": "export_entries",
    "ledger events": "export_events",
    "caps set": "set_team_cap",
    "caps list": "list_caps",
    "caps remove": "remove_team_cap",
    "webhook add": LOCAL,
    "webhook list": LOCAL,
    "webhook remove": LOCAL,
    "webhook test": LOCAL,
    "db upgrade": LOCAL,
    "db backup": LOCAL,
    "db move": LOCAL,
}


def test_each_command_has_a_method_of_the_client_or_is_local() -> None:
    """A new command that the service can answer must be named here, with its method."""
    commands = {
        " ".join(words) for words, command in walk_commands() if not hasattr(command, "commands")
    }
    assert commands == set(METHODS)
    owner = {"charge": LedgerDataset}
    named = {name for name in METHODS.values() if name != LOCAL}
    assert {
        name for name in named if not hasattr(owner.get(name, AccountingService), name)
    } == set()


def make_client(handle: Any) -> AccountingService:
    return AccountingService("http://test", transport=httpx.MockTransport(handle))


@pytest.mark.parametrize("name", list(ROUTES))
def test_each_route_has_a_method_that_calls_it(name: str) -> None:
    route, sent = ROUTES[name], []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json={"items": []})

    method = getattr(RouteCalls, method_of(route), None)
    if method is None:  # a method with answers of its own, which other tests call
        assert callable(getattr(AccountingService, method_of(route)))
        return
    with make_client(handle) as client:
        found = getattr(client, method_of(route))(**_arguments_of(route, method))
        if isinstance(found, Iterator):
            assert list(found) == []
    [request] = sent
    shown = "/".join("{}" if part.startswith("{") else part for part in route.path.split("/"))
    path = request.url.raw_path.decode().partition("?")[0].replace("a%2Fb", "{}")
    assert (request.method, path) == (route.verb, shown)
    assert ("Idempotency-Key" in request.headers) == route.takes_key
    if route.body is not None:
        assert {each.name for each in route.body} == set(_json_of(request))
    for each in route.parameters("query"):
        assert f"{each.name}=" in unquote(str(request.url))


def _arguments_of(route: Route, method: Any) -> dict[str, Any]:
    """Return a value for each argument of a method; those in the path need escapes."""
    names = inspect.signature(method).parameters.keys() - {"self", "idempotency_key"}
    inside = {each.name for each in route.parameters("path")}
    return {name: "a/b" if name in inside else "x" for name in names}


def _json_of(request: httpx.Request) -> Any:
    return httpx.Response(200, content=request.content).json()


def test_a_key_is_created_by_one_request() -> None:
    """A repeat would make another key, of which nobody knows."""
    asked = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(503, json={"detail": "busy"})

    with make_client(handle) as client, pytest.raises(ServiceUnreachableError, match="busy"):
        client.create_key(["run"])
    assert len(asked) == 1


def test_an_owner_s_work_is_done_by_the_client(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    token, _ = app.state.keys.create([Scope.ADMIN])
    with TestClient(app) as http:

        def handle(request: httpx.Request) -> httpx.Response:
            answer = http.request(
                request.method,
                request.url.raw_path.decode(),
                content=request.content,
                headers=dict(request.headers),
            )
            return httpx.Response(answer.status_code, content=answer.content)

        with AccountingService(
            "http://test", api_key=token, transport=httpx.MockTransport(handle)
        ) as service:
            _work(service)


def _work(service: AccountingService) -> None:
    budget = {"epsilon": 2.0, "delta": 1e-6}
    made = service.create_dataset("mnist", budget, 60_000, privacy_unit="person")
    assert made["privacy_unit"] == "person"
    again = service.create_dataset("b", budget, 10, accept_weak=True, idempotency_key="k")
    assert service.create_dataset("b", budget, 10, accept_weak=True, idempotency_key="k") == again
    assert [each["name"] for each in service.list_datasets()] == ["b", "mnist"]
    service.create_series("sales", budget)
    assert service.add_to_series("sales", "2026-10", 1000)["name"] == "sales-2026-10"
    assert service.set_team_cap("mnist", "vision", 0.5)["share"] == 0.5
    key = service.create_key(["run"], name="trainer", datasets=["mnist"])
    assert key["id"] in {each["id"] for each in service.list_keys()}
    assert service.change_key(key["id"], 60)["requests_per_minute"] == 60
    service.remove_team_cap("mnist", "vision")
    assert list(service.list_caps("mnist")) == []
    run = {"kind": "gaussian", "noise_multiplier": 10.0}
    with LedgerDataset(service, "mnist").charge(run):
        pass
    assert [each["state"] for each in service.list_reservations("mnist")] == ["committed"]
    kinds = {each["kind"] for each in service.export_entries(dataset=["mnist"])}
    assert {"reserve", "commit"} <= kinds
    assert list(service.export_events(since="2020-01-01T00:00:00Z"))
    assert b"mnist" in service.dataset_report("mnist", format="registry")
    question = {"path": "/v1/epsilon", "body": {"delta": 1e-5, "mechanism": run}}
    assert service.batch([question])["results"][0]["body"]["epsilon"] > 0
    service.revoke_key(key["id"])
