"""Caps of keys and teams: shares of one budget, held in the transaction that reserves.

And the runs that a key may change: its own, those of its team, and all with scope owner.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.api.ledger_views import encode_answer
from accountant_service.app import create_app
from accountant_service.errors import CodedError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import database as opening
from accountant_service.ledger import hash_chain, plans, rules
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.caps import Caps
from accountant_service.ledger.errors import (
    BudgetExhaustedError,
    CapExhaustedError,
    ForbiddenError,
    LedgerError,
    UnknownSubjectError,
)
from accountant_service.ledger.filters.base import count_units_within, subtract
from accountant_service.ledger.filters.reference import SLACK_UNITS, ReferenceFilter
from accountant_service.ledger.repository import KeyRecord, Repository, StoredAnswer, Transaction
from accountant_service.ledger.rules import Cap, CapUse, HolderKind, NewDataset
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.mechanisms import DpSgd
from accountant_service.settings import Settings

BUDGET = {"epsilon": 3.0, "delta": 1e-5}
WRITERS = 12
FIXTURES = Path(__file__).parents[1] / "contract" / "fixtures"
Json = dict[str, Any]


def run_of(steps: int) -> DpSgd:
    return DpSgd(1.1, sample_rate=0.01, steps=steps)


class Bench:
    """A dataset with a Rényi filter, and keys: two of one team, and one of nobody."""

    def __init__(self, repository: Repository, kind: str = "renyi") -> None:
        self.repository, self.ledger = repository, Ledger(repository, encode_answer)
        self.keys, self.caps = Keys(repository), Caps(repository)
        self.owner = self.keys.create([Scope.OWNER])[1]
        self.one, self.two = (
            self.keys.create([Scope.RUN], name, team="vision")[1] for name in ("one", "two")
        )
        self.lone = self.keys.create([Scope.RUN], "lone")[1]
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        new = NewDataset("d", 1000, 3.0, 1e-5, relation, "record", run_of(1), kind)
        self.ledger.create_dataset(request(self.owner), new)
        self.most = self.affordable(self.lone)

    def reserve(self, key: KeyRecord, steps: int) -> str:
        found = self.ledger.reserve(request(key), "d", run_of(steps), 3600, "")
        return str(json.loads(found.text)["id"])

    def affordable(self, key: KeyRecord) -> int:
        """The steps that a refusal says would fit; a plan of so many is made by nobody."""
        with pytest.raises(BudgetExhaustedError) as refused:
            self.reserve(key, 10**8)
        assert refused.value.steps is not None
        return refused.value.steps

    def cap(self, share: float, kind: HolderKind = HolderKind.TEAM, holder: str = "vision") -> None:
        self.caps.set("d", Cap(kind, holder, share), "owner")

    def share_taken(self) -> float:
        """The share of the budget that all reservations of the team take, by their charges."""
        with self.repository.reading() as reading:
            dataset = reading.find_dataset("d")
            assert dataset is not None
            runs = [run for run in reading.list_reservations(dataset) if run.team == "vision"]
        return dataset.policy.share_of((sum(run.taken[0] for run in runs), 0))


def request(key: KeyRecord, idempotency: str | None = None) -> WriteRequest:
    return WriteRequest(key, idempotency or uuid.uuid4().hex, "test", None)


@pytest.mark.parametrize("kind", ["renyi", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_team_takes_its_share_and_nothing_more(repository: Repository, kind: str) -> None:
    bench = Bench(repository, kind)
    bench.cap(0.3)
    fits = bench.affordable(bench.one)
    assert fits == pytest.approx(0.3 * bench.most, abs=1)
    with pytest.raises(CapExhaustedError, match=r"team 'vision' may take a share of 0\.3"):
        bench.reserve(bench.one, fits + 1)
    bench.reserve(bench.one, fits - 50)
    assert bench.affordable(bench.two) == pytest.approx(50, abs=1), "held for the team's other key"
    assert bench.affordable(bench.lone) == pytest.approx(bench.most - fits + 50, abs=1)
    bench.reserve(bench.two, 40)
    assert 0.28 < bench.share_taken() <= 0.3
    (use,) = bench.caps.list_uses("d")[1]
    assert use.cap == Cap(HolderKind.TEAM, "vision", 0.3)
    assert verify(repository).faults == []


def test_what_a_run_gives_back_is_free_under_the_cap(local: Repository) -> None:
    bench = Bench(local)
    bench.cap(0.3)
    fits = bench.affordable(bench.one)
    for end in (bench.ledger.release, bench.ledger.commit):
        before = bench.affordable(bench.one)
        run = bench.reserve(bench.one, before)
        assert bench.affordable(bench.two) == 0
        bench.ledger.grant(request(bench.one), run, 100, 0)
        assert bench.affordable(bench.two) == 0, "a grant changes nothing"
        end(request(bench.one), run)
        assert bench.affordable(bench.two) == pytest.approx(before - 100, abs=1)
    assert bench.affordable(bench.two) == pytest.approx(fits - 200, abs=2)
    assert verify(local).faults == []


def test_a_lease_that_ends_frees_the_share_of_its_team(local: Repository) -> None:
    bench = Bench(local)
    bench.cap(0.3)
    fits = bench.affordable(bench.one)
    bench.ledger.reserve(request(bench.one), "d", run_of(fits), 0.5, "")
    time.sleep(0.6)
    bench.reserve(bench.two, fits)
    assert verify(local).faults == []


def test_caps_of_a_key_and_of_its_team_both_hold(local: Repository) -> None:
    bench = Bench(local)
    bench.cap(0.3)
    bench.cap(0.1, HolderKind.KEY, bench.one.identifier)
    assert bench.affordable(bench.one) == pytest.approx(0.1 * bench.most, abs=1)
    assert bench.affordable(bench.two) == pytest.approx(0.3 * bench.most, abs=1)
    bench.reserve(bench.two, int(0.25 * bench.most))
    assert bench.affordable(bench.one) == pytest.approx(0.05 * bench.most, abs=2)
    assert bench.caps.list_by_holder() == {
        (HolderKind.KEY, bench.one.identifier): [("d", 0.1)],
        (HolderKind.TEAM, "vision"): [("d", 0.3)],
    }


def test_a_cap_below_what_is_taken_stops_further_runs_only(local: Repository) -> None:
    bench = Bench(local)
    run = bench.reserve(bench.one, 500)
    bench.cap(0.0)
    bench.ledger.grant(request(bench.one), run, 500, 0)
    assert bench.affordable(bench.two) == 0
    bench.reserve(bench.lone, 10)
    bench.caps.remove("d", HolderKind.TEAM, "vision", "owner")
    bench.reserve(bench.two, 10)
    with pytest.raises(UnknownSubjectError, match="no cap of team 'vision'"):
        bench.caps.remove("d", HolderKind.TEAM, "vision", "owner")
    with local.reading() as reading:
        events = [event for event in reading.list_audit_events() if "cap" in event["action"]]
    assert [(event["action"], event["subject"], event["detail"]) for event in events] == [
        ("cap-set", "d", "team vision: 0.0"), ("cap-removed", "d", "team vision"),
    ]  # fmt: skip


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_share_is_from_0_to_1(local: Repository, share: float) -> None:
    bench = Bench(local)
    with pytest.raises(LedgerError, match="from 0 to 1"):
        bench.cap(share)
    assert bench.caps.list_uses("d")[1] == []


def test_a_repeated_reservation_is_answered_alike_whatever_the_cap_is(local: Repository) -> None:
    bench = Bench(local)
    bench.cap(0.3)
    refused, admitted = uuid.uuid4().hex, uuid.uuid4().hex

    def reserve(steps: int, idempotency: str) -> StoredAnswer:
        write = request(bench.one, idempotency)
        return bench.ledger.reserve(write, "d", run_of(steps), 3600, "")

    with pytest.raises(CapExhaustedError):
        reserve(bench.most // 2, refused)
    first = reserve(100, admitted)
    bench.cap(0.0)
    assert reserve(100, admitted) == first
    bench.cap(1.0)
    assert reserve(bench.most // 2, refused).status == 201, "a refusal is not stored"
    assert len(bench.ledger.list_reservations(bench.one, "d", 0, 9)[1]) == 2


@pytest.mark.slow
def test_a_cap_limits_the_slack_of_its_holder(local: Repository) -> None:
    bench = Bench(local, "reference")
    bench.cap(0.2)
    unlike = DpSgd(1.5, sample_rate=0.01, steps=50)

    def reserve(key: KeyRecord) -> str:
        found = bench.ledger.reserve(request(key), "d", unlike, 3600, "")
        return str(json.loads(found.text)["id"])

    runs = [reserve(bench.one if at % 2 else bench.two) for at in range(12)]
    (use,) = bench.caps.list_uses("d")[1]
    assert 0.1 * SLACK_UNITS < use.taken[1] <= 0.2 * SLACK_UNITS
    with local.reading() as reading:
        entries = [json.loads(row.body) for row in reading.list_entries(dataset_of(local), 1)]
    assert all(
        entry["caps"] == [{"team": "vision", "share": 0.2, "slack": True}] for entry in entries
    )
    reserve(bench.lone)
    with local.reading() as reading:
        lone = reading.list_reservations(dataset_of(local))
    assert next(run.taken[1] for run in lone if run.team is None) > 0.15 * SLACK_UNITS
    bench.cap(0.0)
    with pytest.raises(CapExhaustedError, match=r"has taken 0\.1"):
        reserve(bench.one)
    for run in runs:
        bench.ledger.release(request(bench.one), run)
    assert verify(local).faults == []


def test_a_holder_without_slack_may_still_reserve_reference_steps() -> None:
    policy = ReferenceFilter(
        1.0, 1e-5, NeighbouringRelation.ADD_OR_REMOVE_ONE, run_of(1), 100, is_planned=True
    )
    cap = Cap(HolderKind.TEAM, "vision", 0.25)
    use = CapUse(cap, (10, SLACK_UNITS // 4))
    assert rules.fits_cap(policy, use, (15, 0))
    assert not rules.fits_cap(policy, use, (16, 0))
    assert not rules.fits_cap(policy, use, (15, 1))
    assert rules.fits_cap(policy, replace(use, taken=(10, SLACK_UNITS // 4 - 1)), (15, 1))
    earlier = replace(use, cap=replace(cap, limits_slack=False))
    assert rules.fits_cap(policy, earlier, (15, SLACK_UNITS)), "as an earlier version's entry"
    assert policy.limit_slack((0, 0), 0.25, use.taken) == (0, SLACK_UNITS)
    assert policy.apply_cap((0, 0), 0.25, use.taken) == (85, SLACK_UNITS)


@pytest.mark.slow
def test_a_quote_under_a_cap_of_slack_fits_what_a_reservation_gets(local: Repository) -> None:
    bench = Bench(local, "reference")
    bench.cap(0.1)
    unlike = DpSgd(1.5, sample_rate=0.01, steps=50)
    for _ in range(4):
        dataset, caps = dataset_of(local), bench.ledger.find_cap_uses(bench.one, dataset_of(local))
        quote = plans.quote_plan(dataset, unlike, caps, 0.0)
        assert quote.fits
        bench.ledger.reserve(request(bench.one), "d", unlike, 3600, "")
        after = dataset_of(local).balance.taken
        assert subtract(after, dataset.balance.taken) == quote.charged
    together = None
    for _ in range(3):
        together = plans.charge_next(dataset_of(local), unlike, together, caps)
    assert plans.combine_quotes(dataset_of(local), together, caps).fits


def dataset_of(repository: Repository) -> rules.Dataset:
    with repository.reading() as reading:
        found = reading.find_dataset("d")
    assert found is not None
    return found


# --- races


@dataclass
class Race:
    """The outcome of a race of one team's reservations."""

    admitted: int
    refused: int
    share_taken: float
    faults: list[str]


def race(bench: Bench) -> Race:
    """Twelve writers of one team reserve a tenth of the budget each; three fit under the cap."""
    bench.cap(0.35)
    start, results = threading.Barrier(WRITERS), []

    def writer(key: KeyRecord) -> None:
        start.wait()
        try:
            bench.reserve(key, bench.most // 10)
        except CodedError as error:
            results.append(type(error))
        else:
            results.append(None)

    threads = [
        threading.Thread(target=writer, args=(bench.one if at % 2 else bench.two,))
        for at in range(WRITERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == WRITERS
    refused = results.count(CapExhaustedError)
    return Race(results.count(None), refused, bench.share_taken(), verify(bench.repository).faults)


def test_racing_keys_of_a_team_keep_its_cap(repository: Repository) -> None:
    outcome = race(Bench(repository))
    assert (outcome.admitted, outcome.refused) == (3, WRITERS - 3)
    assert outcome.share_taken <= 0.35
    assert outcome.faults == []


def read_outside(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: caps are read before the race, as a check outside the transaction would."""
    bench.cap(0.35)
    with bench.repository.reading() as reading:
        dataset = reading.find_dataset("d")
        assert dataset is not None
        known = reading.find_cap_uses(dataset, "", "vision")
    monkeypatch.setattr(Transaction, "find_cap_uses", lambda *_: known)


def test_a_cap_checked_outside_the_transaction_does_not_hold(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(repository)
    read_outside(bench, monkeypatch)
    outcome = race(bench)
    assert outcome.share_taken > 0.35
    assert any("do not fit under a cap" in fault for fault in outcome.faults)


def test_a_cap_that_does_not_count_what_is_held_does_not_hold(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(repository)
    genuine = Transaction._sum_taken

    def spent_only(self: Transaction, dataset: Any, cap: Cap) -> Any:
        held = [run.held[0] for run in self.list_reservations(dataset) if run.team == cap.holder]
        return (genuine(self, dataset, cap)[0] - sum(held),)

    monkeypatch.setattr(Transaction, "_sum_taken", spent_only)
    outcome = race(bench)
    assert outcome.share_taken > 0.35
    assert any("do not fit under a cap" in fault for fault in outcome.faults)


# --- the record


def test_verify_finds_a_run_beyond_its_cap_and_changed_rows(local: Repository) -> None:
    bench = Bench(local)
    bench.cap(0.3)
    bench.reserve(bench.one, 100)
    assert verify(local).faults == []
    with local.reading() as reading:
        dataset = reading.find_dataset("d")
        assert dataset is not None
        entry = json.loads(reading.list_entries(dataset, 1)[0].body)
    assert entry["team"] == "vision"
    assert entry["caps"] == [{"team": "vision", "share": 0.3}]
    for statement in (
        "UPDATE reservation SET taken = '[0]'",
        "UPDATE reservation SET team = 'other'",
        "UPDATE reservation SET team = NULL",
    ):
        assert faults_after(local, statement), statement
    for fields in (
        {"caps": [{"team": "vision", "share": 0.001}]},
        {"caps": [{"team": "other", "share": 1.0}]},
        {"caps": [{"key": bench.two.identifier, "share": 1.0}]},
        {"caps": [{"team": "vision", "share": "all"}]},
        {"caps": 3},
        {"team": 3},
    ):
        body = hash_chain.encode_entry(entry | fields)
        digest = hash_chain.hash_entry(previous_hash(local), body)
        forged = (
            f"UPDATE entry SET body = '{body}', hash = '{digest}' WHERE number = 2",
            f"UPDATE dataset SET head = '{digest}'",
        )
        assert faults_after(local, *forged), fields
    assert verify(local).faults == []


def previous_hash(repository: Repository) -> str:
    with repository.reading() as reading:
        found = reading.connection.execute(text("SELECT hash FROM entry WHERE number = 1"))
        return str(found.scalar())


def faults_after(repository: Repository, *statements: str) -> list[str]:
    """Return the faults that `verify` finds after statements; then undo these."""
    stored = {}
    with repository.transaction() as transaction:
        for table in ("reservation", "entry", "dataset"):
            rows = transaction.connection.exec_driver_sql(f"SELECT * FROM {table}")
            stored[table] = [dict(row._mapping) for row in rows]
        for statement in statements:
            transaction.connection.exec_driver_sql(statement)
    faults = verify(repository).faults
    with repository.transaction() as transaction:
        transaction.connection.exec_driver_sql("DELETE FROM entry")
        transaction.connection.exec_driver_sql("DELETE FROM reservation")
        (dataset,) = stored["dataset"]
        restore = text("UPDATE dataset SET head = :head")
        transaction.connection.execute(restore, {"head": dataset["head"]})
        for table in ("reservation", "entry"):
            for row in stored[table]:
                names = ", ".join(row)
                places = ", ".join(f":{name}" for name in row)
                insert = text(f"INSERT INTO {table} ({names}) VALUES ({places})")
                transaction.connection.execute(insert, row)
    return faults


@pytest.mark.parametrize("fixture", ["ledger-0001", "ledger-0002"])
def test_an_earlier_ledger_knows_what_each_run_takes(fixture: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "old.db")) as connection:
        connection.executescript((FIXTURES / f"{fixture}.sql").read_text())
    repository = opening.open_repository(f"sqlite:///{tmp_path}/old.db")
    try:
        with repository.reading() as reading:
            datasets = reading.list_datasets()
            runs = {each.name: reading.list_reservations(each) for each in datasets}
        assert any(runs.values())
        for each in datasets:
            assert sum(run.taken[0] for run in runs[each.name]) == each.balance.taken[0]
        assert verify(repository).faults == []
    finally:
        repository.close()


def test_shares_round_down() -> None:
    assert [count_units_within(0.3, each) for each in (0, 1, 9, 10, 11)] == [0, 0, 2, 3, 3]
    assert count_units_within(1.0, 7) == 7
    assert count_units_within(0.0, 7) == 0
    assert all(count_units_within(count / 97, 97) == count for count in range(98)), (
        "exact where the share is a number of units"
    )


def test_a_cap_admits_exactly_its_units() -> None:
    policy = ReferenceFilter(
        1.0, 1e-5, NeighbouringRelation.ADD_OR_REMOVE_ONE, run_of(1), 97, is_planned=True
    )
    for count in range(98):
        use = CapUse(Cap(HolderKind.TEAM, "vision", count / 97), (0, 0))
        assert rules.fits_cap(policy, use, (count, 0))
        assert not rules.fits_cap(policy, use, (count + 1, 0))
        assert rules.fits_cap(policy, replace(use, taken=(97, 0)), (0, 0)), "costs nothing"


# --- whose run it is

CHANGES: dict[str, Callable[[Ledger, WriteRequest, str], StoredAnswer]] = {
    "grant": lambda ledger, write, run: ledger.grant(write, run, 1, 0),
    "renew": lambda ledger, write, run: ledger.renew(write, run, 60.0),
    "commit": lambda ledger, write, run: ledger.commit(write, run),
    "release": lambda ledger, write, run: ledger.release(write, run),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_belongs_to_its_key_its_team_and_the_owners(local: Repository, change: str) -> None:
    bench, apply = Bench(local), CHANGES[change]
    admin, both = (bench.keys.create([scope])[1] for scope in (Scope.ADMIN, Scope.OWNER))
    for may in (bench.one, bench.two, bench.owner, admin, both):
        assert apply(bench.ledger, request(may), bench.reserve(bench.one, 5)).status == 200
    other_team = bench.keys.create([Scope.RUN], team="speech")[1]
    for owned, others in ((bench.one, (bench.lone, other_team)), (bench.lone, (bench.one,))):
        run = bench.reserve(owned, 5)
        for other in others:
            with pytest.raises(ForbiddenError, match="belongs to another key"):
                apply(bench.ledger, request(other), run)
            assert bench.ledger.get_reservation(other, run)[1].steps_granted == 0
        assert apply(bench.ledger, request(owned), run).status == 200
    nobody = bench.keys.create([Scope.RUN])[1]
    with pytest.raises(ForbiddenError, match="belongs to another key"):
        apply(bench.ledger, request(nobody), bench.reserve(bench.lone, 5))
    assert verify(local).faults == []


def test_a_team_key_continues_a_run_after_the_first_key_is_revoked(local: Repository) -> None:
    bench = Bench(local)
    run = bench.reserve(bench.one, 20)
    bench.ledger.grant(request(bench.one), run, 10, 0)
    bench.keys.revoke(bench.one.identifier, "admin")
    assert bench.ledger.grant(request(bench.two), run, 10, 10).status == 200
    assert bench.ledger.commit(request(bench.two), run).status == 200


# --- HTTP, pages and commands


class Web:
    """A service over HTTP."""

    def __init__(self, http: TestClient) -> None:
        self.http, self.keys = http, http.app.state.keys  # type: ignore[attr-defined]

    def ask(self, key: str, method: str, path: str, body: Any = None) -> tuple[int, Json]:
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": uuid.uuid4().hex}
        found = self.http.request(method, path, json=body, headers=headers)
        return found.status_code, found.json() if found.content else {}


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    with TestClient(create_app(Settings(database_url=f"sqlite:///{tmp_path}/web.db"))) as http:
        yield Web(http)


@pytest.mark.parametrize("orders", ["one", "several"])
def test_caps_over_http(orders: str, web: Web) -> None:
    admin, owner, reader = (
        web.keys.create([each])[0] for each in (Scope.ADMIN, Scope.OWNER, Scope.RUN)
    )
    status, key = web.ask(admin, "POST", "/v1/keys", {"scopes": ["run"], "team": "vision"})
    assert (status, key["team"]) == (201, "vision")
    run = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1}
    body = {"name": "d", "size": 1000, "budget": BUDGET, "filter": "renyi"}
    if orders == "one":
        body["planned_mechanism"] = run
    assert web.ask(owner, "POST", "/v1/datasets", body)[0] == 201
    cap = "/v1/datasets/d/caps/teams/vision"
    expected = {"team": "vision", "key": None, "share": 0.3, "share_taken": 0.0}
    assert web.ask(owner, "PUT", cap, {"share": 0.3}) == (200, expected)
    assert web.ask(reader, "PUT", cap, {"share": 0.3})[0] == 403
    assert web.ask(reader, "DELETE", cap)[0] == 403
    assert web.ask(reader, "GET", "/v1/datasets/d/caps") == (200, {"items": [expected]})
    assert web.ask(owner, "PUT", "/v1/datasets/d/caps/keys/none", {"share": 0.3})[0] == 404
    own = f"/v1/datasets/d/caps/keys/{key['id']}"
    assert web.ask(owner, "PUT", own, {"share": 1})[1]["key"] == key["id"]
    for share in (-0.1, 1.5, "0.3", None):
        assert web.ask(owner, "PUT", cap, {"share": share})[0] == 422
    plan = {
        "mechanism": {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1500}
    }
    status, quote = web.ask(key["key"], "POST", "/v1/datasets/d/quotes", plan)
    assert (status, quote["fits"]) == (200, False)
    status, problem = web.ask(key["key"], "POST", "/v1/datasets/d/reservations", plan)
    assert (status, problem["code"]) == (409, "cap-exhausted")
    assert problem["affordable"] == quote["affordable"]
    fits = plan["mechanism"] | {"steps": quote["affordable"]["steps"]}
    batch = {"mechanisms": [fits, fits]}
    together = web.ask(key["key"], "POST", "/v1/datasets/d/quotes/batch", batch)[1]
    assert [each["fits"] for each in together["items"]] == [True, True]
    assert not together["together"]["fits"], "although the budget would allow both"
    quieter = plan["mechanism"] | {"noise_multiplier": quote["affordable"]["noise_multiplier"]}
    for mechanism in (fits, quieter):
        found = web.ask(key["key"], "POST", "/v1/datasets/d/quotes", {"mechanism": mechanism})[1]
        assert found["fits"]
    assert web.ask(key["key"], "POST", "/v1/datasets/d/reservations", {"mechanism": fits})[0] == 201
    run = web.ask(admin, "POST", "/v1/datasets/d/reservations", {"mechanism": fits | {"steps": 5}})[
        1
    ]
    status, problem = web.ask(key["key"], "POST", f"/v1/reservations/{run['id']}/release", {})
    assert (status, problem["code"]) == (403, "forbidden")
    assert web.ask(owner, "POST", f"/v1/reservations/{run['id']}/release", {})[0] == 200
    assert web.ask(owner, "DELETE", cap)[0] == 204
    assert web.ask(owner, "DELETE", cap)[0] == 404
    assert web.ask(owner, "DELETE", own)[0] == 204


def test_a_bound_owner_caps_keys_of_its_dataset_only(web: Web) -> None:
    admin = web.keys.create([Scope.ADMIN])[0]
    body = {"size": 1000, "budget": BUDGET, "filter": "renyi"}
    for name in ("ours", "theirs"):
        assert web.ask(admin, "POST", "/v1/datasets", body | {"name": name})[0] == 201
    owner = web.keys.create([Scope.OWNER], datasets=("ours",))[0]
    ours, theirs = (
        web.keys.create([Scope.RUN], datasets=(name,))[1].identifier for name in ("ours", "theirs")
    )
    assert web.ask(owner, "PUT", f"/v1/datasets/ours/caps/keys/{ours}", {"share": 0.5})[0] == 200
    hidden = web.ask(owner, "PUT", f"/v1/datasets/ours/caps/keys/{theirs}", {"share": 0.5})
    assert hidden[0] == 404
    for path in ("caps", "caps/teams/a", f"caps/keys/{theirs}"):
        method = "GET" if path == "caps" else "PUT"
        found = web.ask(owner, method, f"/v1/datasets/theirs/{path}", {"share": 0.5})
        assert found[0] == 404


def test_the_page_of_keys_shows_teams_and_caps(web: Web) -> None:
    admin = web.keys.create([Scope.ADMIN])[0]
    run = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1}
    body = {"name": "d", "size": 1000, "budget": BUDGET, "filter": "renyi"}
    body["planned_mechanism"] = run
    web.ask(admin, "POST", "/v1/datasets", body)
    web.ask(admin, "PUT", "/v1/datasets/d/caps/teams/vision", {"share": 0.25})
    shown = web.http.get("/sign-in").text
    csrf = shown.split('name="csrf" value="')[1].split('"')[0]
    web.http.post("/sign-in", data={"csrf": csrf, "key": admin})
    csrf = web.http.get("/keys").text.split('name="csrf" value="')[1].split('"')[0]
    form = {"csrf": csrf, "scopes": "run", "name": "trainer"}
    refused = web.http.post("/keys", data=form | {"team": "a b"})
    assert refused.status_code == 422
    assert 'value="a b"' in refused.text
    made = web.http.post("/keys", data=form | {"team": "vision"})
    assert made.status_code == 201
    assert "team: 0.25 of d" in made.text
    assert web.keys.list_keys()[-1].team == "vision"


def test_caps_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", f"sqlite:///{tmp_path}/ledger.db")

    def call(*arguments: str) -> tuple[int, str]:
        found = CliRunner().invoke(cli.app, list(arguments))
        return found.exit_code, found.output

    status, token = call("keys", "create", "--scope", "run", "--team", "vision")
    assert status == 0
    assert json.loads(call("keys", "list", "--json")[1])[0]["team"] == "vision"
    assert call("keys", "create", "--scope", "run", "--team", "a b")[0] == 2
    repository = opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")
    bench = Bench(repository)
    status, said = call("caps", "set", "d", "--team", "vision", "--share", "0.3")
    assert (status, said) == (0, "team vision may take 0.3 of the budget of d; taken: 0\n")
    identifier = token.split("_")[1]
    assert call("caps", "set", "d", "--key", identifier, "--share", "0.1")[0] == 0
    assert bench.affordable(bench.one) == pytest.approx(0.3 * bench.most, abs=1)
    repository.close()
    rows = json.loads(call("caps", "list", "d", "--json")[1])
    assert [(row["team"], row["key"], row["share"]) for row in rows] == [
        (None, identifier, 0.1), ("vision", None, 0.3),
    ]  # fmt: skip
    assert "vision" in call("caps", "list", "d")[1]
    assert call("caps", "remove", "d", "--team", "vision") == (
        0,
        "removed the cap of team vision\n",
    )
    for wrong in (
        ("remove", "d", "--team", "vision"),
        ("set", "none", "--team", "vision", "--share", "0.3"),
        ("set", "d", "--key", "none", "--share", "0.3"),
        ("set", "d", "--team", "vision", "--share", "1.3"),
        ("set", "d", "--team", "vision", "--share", "nan"),
        ("set", "d", "--share", "0.3"),
        ("set", "d", "--team", "vision", "--key", identifier, "--share", "0.3"),
        ("list", "none"),
    ):
        assert call("caps", *wrong)[0] == 2, wrong
    events = json.loads(call("ledger", "events", "--json")[1])
    assert [event["action"] for event in events][-3:] == ["cap-set", "cap-set", "cap-removed"]
