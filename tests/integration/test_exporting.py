"""Exports of the record over HTTP and on the command line, which a stranger verifies offline."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from accountant_service.ledger import database as opening
from accountant_service.ledger import entry_columns, exporting, hash_chain, verification
from accountant_service.ledger import repository as storage
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.exporting import EntryQuery
from accountant_service.ledger.repository import EntryFilter
from accountant_service.ledger.rules import EntryKind
from accountant_service.ledger.tables import ENTRY
from tests.support.databases import database, record_plans
from tests.support.earlier_ledgers import open_unmigrated
from tests.support.ledger_scenarios import (
    PLAN_JSON,
    SQL_MATTERS,
    Caller,
    Commands,
    Json,
    Scenario,
    Service,
    serving,
)
from tests.support.server import Server


class Audited(Service):
    """A service with the datasets `a` and `b`, a run on each, and an auditor."""

    auditor: Caller

    def fill(self) -> None:
        """Create the auditor, the datasets and the runs."""
        admin, self.auditor = self.admin, self.caller(Scope.AUDITOR)
        for name in ("b", "a"):
            admin.dataset(name, filter="renyi")
            run = admin.reserve(name, purpose='said "no",\n=1+1')["id"]
            for sequence in range(4):
                admin.grant(run, 1, sequence)
            admin.commit(run)
        admin.make("/v1/datasets/a/close")


@pytest.fixture(scope="module")
def service(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    with database(kind, tmp_path_factory.mktemp("export")) as url, serving(url) as filled:
        found = Audited(filled.http)
        found.fill()
        yield found


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of three, so that every export has several."""
    monkeypatch.setattr(exporting, "PAGE_SIZE", 3)


def lines_of(service: Audited, query: str = "") -> list[str]:
    found: list[str] = service.auditor.read(f"/v1/entries?format=jsonl{query}").splitlines()
    return found


def test_the_whole_record_is_exported_in_order_and_verifies(service: Audited) -> None:
    lines = lines_of(service)
    entries = [json.loads(line) for line in lines]
    order = [(entry["dataset"], entry["number"]) for entry in entries]
    assert order == [("a", n) for n in range(1, 9)] + [("b", n) for n in range(1, 8)]
    report = verification.verify_export(lines)
    assert report.faults == []
    for name in ("a", "b"):
        stored = service.admin.read(f"/v1/datasets/{name}/entries")["items"]
        assert [e for e in entries if e["dataset"] == name] == [
            {"dataset": name, **each} for each in stored
        ]
        assert report.heads[name] == (len(stored), stored[-1]["hash"])


def test_pages_of_json_are_the_same_entries(service: Audited) -> None:
    found: list[Json] = []
    cursor = ""
    while True:
        page = service.auditor.read(f"/v1/entries?cursor={cursor}")
        assert len(page["items"]) <= 3
        found += page["items"]
        if page["next_cursor"] is None:
            break
        cursor = page["next_cursor"]
    assert found == [json.loads(line) for line in lines_of(service)]


def test_csv_has_one_row_for_each_entry_and_its_exact_text(service: Audited) -> None:
    answer = service.auditor.send("GET", "/v1/entries?format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert 'filename="entries.csv"' in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert len(rows) == len(lines_of(service))
    head = hash_chain.GENESIS
    for row in (row for row in rows if row["dataset"] == "a"):
        head = hash_chain.hash_entry(head, row["entry"])
        assert head == row["hash"]
        assert json.loads(row["entry"])["kind"] == row["kind"]


def test_a_text_that_a_spreadsheet_would_run_is_quoted() -> None:
    for start in "=+-@\t\r\n":
        formula = f'{start}HYPERLINK("http://example.org")'
        [row] = csv.reader(io.StringIO(exporting.write_csv([[formula, "a=b", "", -1, -0.5, None]])))
        assert row == [f"'{formula}", "a=b", "", "-1", "-0.5", ""]


def test_filters(service: Audited) -> None:
    def kinds(query: str) -> list[tuple[str, str]]:
        found = [json.loads(line) for line in lines_of(service, query)]
        return [(entry["dataset"], entry["kind"]) for entry in found]

    assert kinds("&dataset=a&kind=create&kind=close") == [("a", "create"), ("a", "close")]
    assert kinds("&kind=commit") == [("a", "commit"), ("b", "commit")]
    assert kinds("&dataset=missing") == []
    every = [json.loads(line) for line in lines_of(service, "&dataset=b")]
    middle = datetime.fromtimestamp(every[3]["at"] / 1e6, UTC).isoformat().replace("+00:00", "Z")
    late = [json.loads(line) for line in lines_of(service, f"&dataset=b&since={middle}")]
    early = [json.loads(line) for line in lines_of(service, f"&dataset=b&until={middle}")]
    assert early + late == every
    assert early[-1]["number"] == 3
    for wrong in ("since=noon", "since=2026-01-01T00:00:00", "kind=none", "cursor=x", "format=xml"):
        assert service.admin.get(f"/v1/entries?{wrong}")[0] == 422, wrong


@SQL_MATTERS
@pytest.mark.parametrize("page", [1, 2, 5, 200])
def test_pages_of_any_length_have_each_wanted_entry_once(
    scenario: Scenario, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a server of revision 0006 writes, whose entries lack their kind and time."""
    monkeypatch.setattr(exporting, "PAGE_SIZE", page)
    admin = scenario.admin
    for name in ("a", "b", "c", "d", "e"):
        admin.create(name)
    for name, grants in (("b", 9), ("d", 1)):
        run = admin.reserve(name=name)
        for turn in range(grants):
            admin.grant(run, 1, turn)
            scenario.wait(-20 if turn == 4 else 1)  # the clock is set back
    scenario.execute(
        "UPDATE entry SET kind = NULL, at = NULL WHERE number IN (2, 5)",
    )
    with scenario.repository.reading() as reading:
        every = list(exporting.iterate_entries(reading, EntryQuery()))
    assert [(each.dataset, each.fields["number"]) for each in every] == [
        (name, number)
        for name, last in (("a", 1), ("b", 11), ("c", 1), ("d", 3), ("e", 1))
        for number in range(1, last + 1)
    ]
    middle = every[6].fields["at"]
    grant, create = EntryKind.GRANT, EntryKind.CREATE
    for kinds, since, until in (
        ([grant], None, None), ([create, grant], None, middle), ([], middle, None),
        ([create], middle, None), ([EntryKind.CLOSE], None, None), ([], None, middle),
        ([grant], middle, middle + 3_000_000),
    ):  # fmt: skip
        query = EntryQuery(None, frozenset(kinds), exporting.Period(since, until))
        with scenario.repository.reading() as reading:
            found = list(exporting.iterate_entries(reading, query))
        assert found == [each for each in every if query.matches(each.fields)]
    entry_columns.derive_all(scenario.repository)
    with scenario.repository.reading() as reading:
        left = reading.connection.exec_driver_sql("SELECT count(*) FROM entry WHERE at IS NULL")
        assert left.scalar_one() == 0


@SQL_MATTERS
@pytest.mark.slow
def test_a_page_reads_no_more_rows_after_many_entries(url: str) -> None:
    """Each page is found by an index: neither sorted nor counted through."""
    with closing(opening.open_repository(url)) as repository:
        found = Scenario(repository)
        found.admin.create("d")
        with repository.transaction() as transaction:
            rows = [
                {"dataset": found.dataset().identifier, "number": number, "body": "{}", "hash": "",
                 "kind": "commit" if number % 1000 == 0 else "grant", "at": number}
                for number in range(2, 20_000)
            ]  # fmt: skip
            transaction.connection.execute(ENTRY.insert(), rows)
            transaction.connection.exec_driver_sql("UPDATE dataset SET version = 19999")
        plans = record_plans(repository, "entry")
        with repository.reading() as reading:  # the database has no statistics yet
            assert reading.list_all_entries(EntryFilter(since=10**17), ("d", 0), 200)[0] == []
        with repository.transaction() as transaction:
            transaction.connection.exec_driver_sql("ANALYZE")
        for wanted, after in (
            (EntryFilter(), 10_000), (EntryFilter(kinds=("commit",)), 0),
            (EntryFilter(kinds=("commit", "grant")), 10_000), (EntryFilter(since=19_900), 0),
            (EntryFilter(since=10), 10_000),
        ):  # fmt: skip
            with repository.reading() as reading:
                assert reading.list_all_entries(wanted, ("d", after), 200)[0]
    assert plans
    for plan in plans:
        assert "Seq Scan on entry" not in plan, plan
        assert "SCAN entry" not in plan, plan
        assert "TEMP B-TREE" not in plan, plan
        assert sum(map(int, re.findall(r"Removed by Filter: (\d+)", plan))) <= 500, plan


def test_audit_events_are_exported(service: Audited) -> None:
    events = service.auditor.read("/v1/events?format=jsonl").splitlines()
    actions = [json.loads(line)["action"] for line in events]
    assert actions[:3] == ["secret-created", "key-created", "key-created"]
    assert "dataset-closed" in actions
    paged = service.auditor.read("/v1/events")
    assert paged["items"] == [json.loads(line) for line in events[:3]]
    rest = service.auditor.read(f"/v1/events?format=jsonl&cursor={paged['next_cursor']}")
    assert rest.splitlines() == events[3:]
    closes = service.auditor.read("/v1/events?action=dataset-closed&format=jsonl")
    (closed,) = closes.splitlines()
    assert json.loads(closed)["subject"] == "a"
    rows = list(csv.DictReader(io.StringIO(service.auditor.read("/v1/events?format=csv"))))
    assert [row["action"] for row in rows] == actions


def test_only_auditors_and_administrators_export(service: Audited) -> None:
    for path in ("/v1/entries", "/v1/events"):
        for scope in Scope:
            allowed = scope in (Scope.ADMIN, Scope.AUDITOR)
            assert service.caller(scope).get(path)[0] == (200 if allowed else 403), scope
        assert service.http.get(path).status_code == 401


def test_a_bound_auditor_exports_its_datasets_only(service: Audited) -> None:
    bound = service.caller(Scope.AUDITOR, datasets=("b", "later"))
    for query in ("", "&dataset=a&dataset=b"):
        lines = bound.read(f"/v1/entries?format=jsonl{query}").splitlines()
        assert {json.loads(line)["dataset"] for line in lines} == {"b"}
    assert bound.read("/v1/entries?dataset=a")["items"] == []
    for path in ("/v1/events", "/v1/datasets", "/v1/datasets/b"):
        assert bound.get(path)[0] == 403


def edit(lines: list[str], at: int, **changed: Any) -> list[str]:
    entry = json.loads(lines[at]) | changed
    return [*lines[:at], json.dumps(entry), *lines[at + 1 :]]


def rehash(lines: list[str]) -> list[str]:
    """Return lines with the hashes that a forger would compute."""
    head, found = hash_chain.GENESIS, []
    for line in lines:
        entry = json.loads(line)
        body = {name: value for name, value in entry.items() if name not in ("dataset", "hash")}
        head = hash_chain.hash_entry(head, hash_chain.encode_entry(body))
        found.append(json.dumps(entry | {"hash": head}))
    return found


def test_what_was_altered_in_an_export_is_found(service: Audited) -> None:
    lines = lines_of(service, "&dataset=a")
    spent = {"spent_micronats": [each + 1 for each in json.loads(lines[2])["spent_micronats"]]}
    twice = lines[2][:-1] + ', "steps": 1}'
    cases = {
        "altered": edit(lines, 1, purpose="other"),
        "missing": lines[:3] + lines[4:],
        "differs": rehash(edit(lines, 2, **spent)),
        "begin with": lines[1:],
        "not 'c'": [json.dumps(json.loads(line) | {"dataset": "c"}) for line in lines],
        "more than once": [*lines[:2], twice, *lines[3:]],
        "line 1 cannot be read": ["not JSON", *lines],
        "was closed": rehash([*lines[:1], edit(lines, 7, number=2)[7], *[
            json.dumps(json.loads(line) | {"number": at}) for at, line in enumerate(lines[1:2], 3)
        ]]),
        "size": rehash(edit(lines, 0, size="many")),
    }  # fmt: skip
    for fault, altered in cases.items():
        faults = verification.verify_export(altered).faults
        assert any(fault in found for found in faults), (fault, faults)


@pytest.mark.parametrize(
    "revision", ["0001", *(pytest.param(f"000{at}", marks=pytest.mark.slow) for at in (3, 4, 5, 6))]
)
def test_exports_of_earlier_ledgers_verify(revision: str, tmp_path: Path) -> None:
    """Datasets of every filter, exchanges, and runs that ended early."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    open_unmigrated(url, revision).close()
    with closing(opening.open_repository(url)) as repository, repository.snapshot() as reading:
        found = list(exporting.iterate_entries(reading, exporting.EntryQuery()))
    lines = [json.dumps(entry.to_json()) for entry in found]
    report = verification.verify_export(lines)
    assert report.faults == []
    assert len(lines) == sum(number for number, _ in report.heads.values()) > 3


def test_a_page_that_fails_ends_the_answer_instead_of_shortening_it(
    service: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, calls = storage.Transaction.list_all_entries, []

    def fail_later(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("the disk failed")
        return genuine(*arguments)

    monkeypatch.setattr(storage.Transaction, "list_all_entries", fail_later)
    raising = Caller(TestClient(service.app), service.auditor.key)
    with pytest.raises(RuntimeError, match="the disk failed"):
        raising.read("/v1/entries?format=jsonl")


@pytest.mark.slow
def test_exporting_and_verifying_on_the_command_line(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.make("dataset create d -n 1000 -E 3 -d 1e-5 --filter renyi")
    commands.make("run reserve d -m", json.dumps(PLAN_JSON))
    file = tmp_path / "export.jsonl"
    file.write_text(commands("ledger export")[1])
    head = json.loads(file.read_text().splitlines()[-1])["hash"]
    check = f"ledger verify --file {file}"
    assert commands(check) == (0, f"d: 2 entries, head {head}\nall is well\n")
    assert commands.json(check) == {"datasets": {"d": {"entries": 2, "head": head}}, "faults": []}
    file.write_text(file.read_text().replace('"size": 1000', '"size": 9999'))
    status, said = commands(check)
    assert (status, "entry 1 or its hash was altered" in said) == (1, True)
    rows = list(csv.DictReader(io.StringIO(commands("ledger export --csv")[1])))
    assert [row["kind"] for row in rows] == ["create", "reserve"]
    one = commands.make("ledger export --kind create --since 2020-01-01")
    assert len(one.splitlines()) == 1
    assert commands("ledger export --until 2020-01-01T00:00:00Z") == (0, "")
    assert commands("ledger export --dataset none")[0] == 2
    assert commands("ledger export --since noon")[0] == 2
    status, said = commands("ledger export --service")
    assert (status, "ACCOUNTANT_API_KEY" in said) == (2, True)
    token, weak = (commands.make(f"keys create --scope {each}") for each in ("auditor", "run"))
    server = Server(commands.url, tmp_path)
    try:
        server.wait()
        monkeypatch.setenv("ACCOUNTANT_SERVICE", f"http://127.0.0.1:{server.port}")
        monkeypatch.setenv("ACCOUNTANT_API_KEY", token)
        assert commands("ledger export --service") == commands("ledger export")
        as_csv = commands.make("ledger export --service --csv --kind create")
        assert as_csv.startswith("dataset,number,kind")
        monkeypatch.setenv("ACCOUNTANT_API_KEY", weak)
        status, said = commands("ledger export --service")
        assert (status, "forbidden" in said) == (2, True)
    finally:
        server.kill()


def test_an_export_with_values_that_no_ledger_writes_names_their_line(service: Audited) -> None:
    lines = lines_of(service, "&dataset=a")
    faults = verification.verify_export(edit(lines, 1, purpose="\ud800")).faults
    assert "line 2 cannot be read" in faults[0]
    endless = [lines[0], lines[1].replace('"number": 2', '"number": 1e999'), *lines[2:]]
    assert "line 2 cannot be read" in verification.verify_export(endless).faults[0]


def test_a_run_of_two_datasets_is_named_in_an_export(service: Audited) -> None:
    lines = lines_of(service)
    runs = [json.loads(line).get("reservation") for line in lines]
    first, second = dict.fromkeys(run for run in runs if run)
    same = rehash_each([line.replace(second, first) for line in lines])
    faults = verification.verify_export(same).faults
    assert faults
    assert all("is one of 'a' too" in fault for fault in faults), faults


def rehash_each(lines: list[str]) -> list[str]:
    """Return the lines of several datasets with the hashes that a forger would compute."""
    names = dict.fromkeys(json.loads(line)["dataset"] for line in lines)
    return [
        line
        for name in names
        for line in rehash([each for each in lines if json.loads(each)["dataset"] == name])
    ]
