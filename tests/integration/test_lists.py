"""Lists come in pages, on every way to ask for them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from contextlib import closing
from itertools import cycle
from typing import Any

import pytest
from sqlalchemy import event, select

from accountant_service.api import async_ledger, ledger_views
from accountant_service.cli.access import ServiceAccess
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.repair import repair
from accountant_service.ledger.rules import Cap, HolderKind, State
from accountant_service.ledger.tables import API_KEY, RESERVATION
from accountant_service.web import account_pages
from tests.support.databases import record_plans
from tests.support.ledger_scenarios import (
    BUDGET,
    ON_SQLITE,
    SQL_MATTERS,
    Json,
    Scenario,
    Service,
    execute,
)

NAMES = [f"d{number}" for number in range(7)]


@pytest.fixture
def filled(own_web: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Seven datasets, series, keys and caps, in pages of three."""
    for module in (ledger_views, async_ledger, account_pages):
        monkeypatch.setattr(module, "LIST_PAGE_SIZE", 3)
    for name in NAMES:
        own_web.admin.dataset(name, filter="renyi")
        own_web.admin.send("PUT", f"/v1/datasets/d0/caps/teams/{name}", {"share": 0.5})
        own_web.admin.send("PUT", f"/v1/series/s{name}", {"budget": BUDGET})
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
    [
        ("/v1/datasets", "name"),
        ("/v1/series", "name"),
        ("/v1/keys", "created_at"),
        ("/v1/datasets/d0/caps", "team"),
    ],
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
    links = [f'href="/datasets/{name}"' in first for name in ("d2", "d3")]
    assert (*links, 'href="/datasets?after=d2"' in first) == (True, False, True)
    last = filled.http.get("/datasets?after=d5").text
    assert ('href="/datasets/d6"' in last, "More datasets" in last, "First datasets" in last) == (
        True,
        False,
        True,
    )
    keys = filled.http.get("/keys").text
    assert keys.count('<th scope="row"') == 3
    assert "More keys" in keys


@ON_SQLITE
def test_the_page_of_a_dataset_has_pages_of_runs(own_web: Service) -> None:
    own_web.admin.dataset("d", filter="renyi")
    made = {own_web.admin.reserve("d")["id"] for _ in range(21)}
    own_web.sign_in(own_web.admin)
    first = own_web.http.get("/datasets/d").text
    more = re.search(r'href="(/datasets/d\?runs=[^"]+)#runs">More runs', first)
    assert more
    rest = own_web.http.get(html.unescape(more[1])).text
    shown = [set(re.findall(r'"row"><a href="/runs/(\w+)"', page)) for page in (first, rest)]
    assert [len(page) for page in shown] == [20, 1]
    assert set.union(*shown) == made
    assert ("First runs" in first, "First runs" in rest, "More runs" in rest) == (
        False,
        True,
        False,
    )
    assert own_web.http.get("/datasets/d?runs=20").text.count("More runs") == 1  # of an older link


EARLIER_OFFSET = "200"


@pytest.fixture
def runs(own_web: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Seven runs in pages of three: open and ended in each way, two with one lease's end."""
    monkeypatch.setattr(async_ledger, "RUNS_MAX", 3)
    own_web.admin.dataset("d", filter="renyi")
    made = [own_web.admin.reserve("d", lease_seconds=900 + at)["id"] for at in range(7)]
    for run in made[:2]:
        own_web.admin.grant(run, 1, 0)
        assert own_web.admin.commit(run)[0] == 200
    own_web.admin.make(f"/v1/reservations/{made[2]}/release")
    execute(
        own_web.repository,
        f"UPDATE reservation SET state = 'expired' WHERE id = '{made[3]}'",
        f"UPDATE reservation SET expires_at = 5 WHERE id IN ('{made[0]}', '{made[2]}')",
    )
    return own_web


@SQL_MATTERS
def test_runs_come_in_pages_open_ones_first_then_the_latest_lease(runs: Service) -> None:
    found = pages(runs, "/v1/datasets/d/reservations")
    assert [len(page) for page in found] == [3, 3, 1]
    order = [
        (run["state"] != "open", -run["expires_at"], run["id"]) for page in found for run in page
    ]
    assert order == sorted(order)
    assert len(set(order)) == 7
    assert {ended for ended, _, _ in order} == {False, True}
    repair(runs.repository)  # at the end `verify` must find no fault


@ON_SQLITE
@pytest.mark.parametrize("path", ["reservations", "entries"])
def test_a_cursor_of_another_kind_is_refused_with_a_way_out(runs: Service, path: str) -> None:
    repair(runs.repository)
    wrong = ["x", "1:2", "-1", "1e3", "9" * 40, *([EARLIER_OFFSET] if path != "entries" else [])]
    for cursor in wrong:
        status, problem = runs.admin.get(f"/v1/datasets/d/{path}?cursor={cursor}")
        assert (status, problem["code"]) == (422, "invalid-request")
        assert "the next_cursor of the page before; leave it out" in problem["detail"]


def add_runs(found: Scenario, changes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Create a dataset, and store copies of one run of it with changed columns; return these."""
    found.admin.create("d")
    found.admin.reserve(1)
    with found.repository.transaction() as transaction:
        row = transaction.list_reservation_rows(found.dataset())[0]
        rows = [row | {"id": f"{at:x}"} | each for at, each in enumerate(changes)]
        transaction.connection.execute(RESERVATION.insert(), rows)
        transaction.connection.exec_driver_sql("ANALYZE")
    return rows


@SQL_MATTERS
def test_a_page_of_runs_reads_no_more_rows_after_many(url: str) -> None:
    """Each page is found by an index: neither sorted nor counted through."""
    with closing(opening.open_repository(url)) as repository:
        found = Scenario(repository)
        states = zip(range(20_000), cycle(State), strict=False)
        add_runs(found, ({"expires_at": at, "state": state} for at, state in states))
        dataset = found.dataset()
        plans = record_plans(repository, "reservation")
        with repository.reading() as reading:
            for after in (None, (False, 10_000, "0"), (True, 10_000, "0"), (True, 0, "")):
                page, following = reading.list_reservations_page(dataset, after, 200)
                assert len(page) == (200 if following else 0)
    assert plans
    for plan in plans:
        assert "Seq Scan on reservation" not in plan, plan
        assert "SCAN reservation" not in plan, plan
        assert "USING INDEX ix_reservation_due (dataset=?)" not in plan, plan
        assert sum(map(int, re.findall(r"Removed by Filter: (\d+)", plan))) <= 10, plan
        assert all(int(rows) <= 1000 for rows in re.findall(r"actual.*? rows=(\d+)", plan)), plan


@SQL_MATTERS
def test_a_page_of_keys_is_found_by_an_index(url: str) -> None:
    with closing(opening.open_repository(url)) as repository:
        found = Scenario(repository)
        with repository.transaction() as transaction:
            row = dict(transaction.connection.execute(select(API_KEY)).mappings().one())
            rows = [row | {"id": f"{at:x}", "created_at": at} for at in range(5000)]
            transaction.connection.execute(API_KEY.insert(), rows)
            transaction.connection.exec_driver_sql("ANALYZE")
        plans = record_plans(repository, "api_key")
        for after in ((-1, ""), (2500, "9c4"), (4999, "0")):
            page = found.keys.list_keys(after, 200)
            assert len(page) == 200 if after[0] < 4999 else len(page) == 2
            assert (page[0].created_at, page[0].identifier) > after
    assert len(plans) == 3
    for plan in plans:
        assert "ix_api_key_order" in plan, plan
        assert "TEMP B-TREE" not in plan, plan  # SQLite sorts nothing
        assert all(int(rows) <= 200 for rows in re.findall(r"actual.*? rows=(\d+)", plan)), plan


@SQL_MATTERS
def test_a_page_of_caps_reads_no_run(url: str) -> None:
    with closing(opening.open_repository(url)) as repository:
        found = Scenario(repository)
        holders = (
            {
                "key_id": f"k{at % 30}",
                "team": f"t{at % 7}" if at % 2 else None,
                "taken": json.dumps([10**19 * (at % 3) + at]),
            }
            for at in range(3000)
        )
        rows, dataset = add_runs(found, holders), found.dataset()
        with repository.transaction() as transaction:
            for at in range(30):
                transaction.set_cap(dataset, Cap(HolderKind.KEY, f"k{at}", 0.5))
            for at in range(8):  # t7 has taken nothing
                transaction.set_cap(dataset, Cap(HolderKind.TEAM, f"t{at}", 0.5))
        plans = record_plans(repository, "reservation")
        uses = found.caps.list_uses("d", ("key", "k3"), 20)[1]
        assert plans == []
        uses += found.caps.list_uses("d", ("team", ""))[1]
    for use in uses:
        column = "key_id" if use.cap.kind is HolderKind.KEY else "team"
        taken = [json.loads(each["taken"]) for each in rows if each[column] == use.cap.holder]
        assert use.taken == (tuple(map(sum, zip(*taken, strict=True))) if taken else (0,))
    assert [use.cap.holder for use in uses[-8:]] == [f"t{at}" for at in range(8)]


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
