"""Lists come in pages, on every way to ask for them."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from accountant_service.api import async_ledger, ledger_views
from accountant_service.cli.access import ServiceAccess
from accountant_service.ledger.api_keys import Scope
from accountant_service.web import account_pages
from tests.support.ledger_scenarios import Json, Service

NAMES = [f"d{number}" for number in range(7)]


@pytest.fixture
def filled(own_web: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Seven datasets, keys and caps, in pages of three."""
    for module in (ledger_views, async_ledger, account_pages):
        monkeypatch.setattr(module, "LIST_PAGE_SIZE", 3)
    for name in NAMES:
        own_web.admin.dataset(name, filter="renyi")
        own_web.admin.send("PUT", f"/v1/datasets/d0/caps/teams/{name}", {"share": 0.5})
    for _ in range(6):
        own_web.caller()
    return own_web


def pages(service: Service, path: str) -> list[list[Json]]:
    """Return all pages of a list."""
    found, cursor = [], ""
    while cursor is not None:
        page = service.admin.read(f"{path}?cursor={cursor}")
        found.append(page["items"])
        cursor = page["next_cursor"]
    return found


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/datasets", "name"), ("/v1/keys", "created_at"), ("/v1/datasets/d0/caps", "team")],
)
def test_a_list_comes_in_pages_in_one_order(filled: Service, path: str, name: str) -> None:
    found = pages(filled, path)
    assert [len(page) for page in found] == [3, 3, 1]
    order = [item[name] for page in found for item in page]
    assert order == sorted(order)
    assert len({str(item) for page in found for item in page}) == 7
    for wrong in ("*", "x" * 999, ":"):
        assert filled.admin.get(f"{path}?cursor={wrong}")[0] == 422


def test_a_bound_key_and_the_command_line_read_all_pages(
    filled: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = filled.caller(Scope.RUN, datasets=("d1", "d3", "d4", "d6"))
    first = bound.read("/v1/datasets")
    assert [each["name"] for each in first["items"]] == ["d1", "d3", "d4"]
    rest = bound.read(f"/v1/datasets?cursor={first['next_cursor']}")
    assert ([each["name"] for each in rest["items"]], rest["next_cursor"]) == (["d6"], None)

    def call(_: Any, path: str) -> Json:
        found: Json = filled.admin.read(path)
        return found

    monkeypatch.setattr(ServiceAccess, "_call", call)  # private: it would need a server
    listed = ServiceAccess("http://service", "key").list_datasets()
    assert [each["name"] for each in listed] == NAMES


def test_pages_of_datasets_and_keys_have_links(filled: Service) -> None:
    filled.sign_in(filled.admin)
    first = filled.http.get("/datasets").text
    assert ("d2" in first, "d3" in first, 'href="/datasets?after=d2"' in first) == (
        True, False, True,
    )  # fmt: skip
    last = filled.http.get("/datasets?after=d5").text
    assert ("d6" in last, "More datasets" in last, "First datasets" in last) == (True, False, True)
    keys = filled.http.get("/keys").text
    assert keys.count('<th scope="row"') == 3
    assert "More keys" in keys


def test_metrics_without_a_key_read_no_dataset(filled: Service) -> None:
    statements: list[str] = []
    event.listen(
        filled.repository.engine,
        "before_cursor_execute",
        lambda _, __, statement, *___: statements.append(statement),
    )
    assert "accountant_ledger_up 1.0" in filled.http.get("/metrics").text
    assert not [each for each in statements if "FROM dataset" in each or "FROM api_key" in each]
    assert 'accountant_budget_epsilon{dataset="d6"}' in filled.admin.send("GET", "/metrics").text
