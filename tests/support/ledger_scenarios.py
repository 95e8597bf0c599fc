"""A small language for scenarios of the ledger: who does what, and what is then true.

    def test_a_team_takes_its_share(scenario: Scenario) -> None:
        one, two = (scenario.person(team="vision") for _ in range(2))
        scenario.dataset()
        scenario.cap(0.3, team="vision")
        run = one.reserve(300)
        one.grant(run, 50)
        with refused("cap-exhausted", "team 'vision'"):
            two.reserve(10**6)

`tests/integration/conftest.py` makes these fixtures known:

* `scenario`: an empty ledger in this process. At its end `verify` must find no fault, unless the
  test said by `forge` that there is one.
* `web`: the same over HTTP, with an application that the tests of a module share.
* `own_web`: one for this test alone.
* `commands`: the command line on an empty ledger.
* `url`: of an empty database.

They run on SQLite, and at night on PostgreSQL too; a test in which SQL or locks matter says so by
the decorator `SQL_MATTERS`, and one for which one database
is enough by `ON_SQLITE` or `ON_POSTGRESQL`.
"""

from __future__ import annotations

import json
import shlex
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.api.ledger_views import ANSWERS
from accountant_service.errors import CodedError
from accountant_service.ledger import api_keys
from accountant_service.ledger import database as opening
from accountant_service.ledger import repository as storage
from accountant_service.ledger import service as operations
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.caps import Caps
from accountant_service.ledger.errors import BudgetExhaustedError, DatabaseAwayError
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.repository import Repository, Transaction
from accountant_service.ledger.rules import Cap, Dataset, HolderKind, NewDataset, Reservation
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify, verify_snapshot
from accountant_service.mechanisms import DpSgd, Mechanism, to_json
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.databases import database
from training_client.client import AccountingService

Json = dict[str, Any]
Found = TypeVar("Found")
ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
BUDGET: Json = {"epsilon": 3.0, "delta": 1e-5}
# without sampling, for which charges are decided fast; about 1300 steps of it fit
PLAN = DpSgd(60.0, sample_rate=1.0, steps=10, sampling="none")
PLAN_JSON: Json = to_json(PLAN)
_JSON = ("application/json", "application/problem+json")

SQL_MATTERS = pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], scope="session"
)
ON_SQLITE = pytest.mark.parametrize("kind", ["sqlite"], scope="session")
ON_POSTGRESQL = pytest.mark.parametrize(
    "kind", [pytest.param("postgresql", marks=pytest.mark.slow)], scope="session"
)


@contextmanager
def refused(code: str, detail: str = "") -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """Context manager that expects a refusal with a code, whose detail matches a pattern."""
    with pytest.raises(CodedError, match=detail or None) as found:
        yield found
    assert found.value.code == code


def race(*acts: Callable[[], Found]) -> list[Found | CodedError]:
    """Begin acts at one moment, each in its own thread; return their answers or refusals."""
    start = threading.Barrier(len(acts))
    answers: dict[int, Any] = {}

    def run(at: int) -> None:
        start.wait()
        try:
            answers[at] = acts[at]()
        except Exception as error:
            answers[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers.values():
        if isinstance(answer, Exception) and not isinstance(answer, CodedError):
            raise answer
    return [answers[at] for at in range(len(acts))]


def refusals(answers: Sequence[object]) -> list[str]:
    """Return the codes of the refusals among the answers of a race."""
    return [answer.code for answer in answers if isinstance(answer, CodedError)]


def insist(act: Callable[[], Found]) -> Found:
    """Return what an act returns; repeat it while a slow machine's database answers too late."""
    while True:
        with suppress(DatabaseAwayError):
            return act()


class Clock:
    """The clock of the ledger, which a test can advance or set back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._genuine: Callable[[], int] = storage.now
        self._ahead = 0
        for module in (storage, operations, api_keys):
            monkeypatch.setattr(module, "now", self)

    def __call__(self) -> int:
        """Return the time in microseconds since 1970."""
        return self._genuine() + self._ahead

    def stop(self) -> None:
        """Let no time pass but what `wait` says."""
        at = self()
        self._genuine, self._ahead = lambda: at, 0

    def wait(self, seconds: float) -> None:
        """Let time pass; less than nothing if the clock is set back."""
        self._ahead += int(1e6 * seconds)


class Person:
    """A key, and the writes of the person who holds it; each with an Idempotency-Key of its own.

    Attributes:
        record: the key.
        token: its secret.
    """

    def __init__(self, scenario: Scenario, token: str, record: KeyRecord) -> None:
        self._scenario, self._ledger = scenario, scenario.ledger
        self.token, self.record, self.identifier = token, record, record.identifier

    def request(self, once: str | None = None) -> WriteRequest:
        """Return a write request; with the same `once`, a repeat of an earlier one."""
        return WriteRequest(self.record, once or uuid.uuid4().hex, "test", None)

    def create(self, name: str = "d", *, once: str | None = None, **fields: Any) -> Json:
        """Create a dataset; for the fields see `new_dataset`."""
        answer = self._ledger.create_dataset(self.request(once), new_dataset(name, **fields))
        return _read(answer.text)

    def close(self, name: str = "d", *, once: str | None = None) -> Json:
        """Close a dataset."""
        return _read(self._ledger.close_dataset(self.request(once), name).text)

    def choose(self, plan: Mechanism = PLAN, name: str = "d", *, once: str | None = None) -> Json:
        """Set or confirm the reference of a dataset."""
        return _read(self._ledger.set_reference(self.request(once), name, plan).text)

    def delete(self, name: str = "d", *, once: str | None = None) -> Json:
        """Delete a dataset."""
        return _read(self._ledger.delete_dataset(self.request(once), name).text)

    def reserve(
        self, plan: int | Mechanism = PLAN, name: str = "d", *, lease: float = 3600.0,
        once: str | None = None,
    ) -> str:  # fmt: skip
        """Reserve a plan, or a number of steps of `PLAN`; return the reservation's identifier."""
        mechanism = replace(PLAN, steps=plan) if isinstance(plan, int) else plan
        answer = self._ledger.reserve(self.request(once), name, mechanism, lease, "")
        return str(_read(answer.text)["id"])

    def reserve_jointly(
        self, *names: str, plan: int | Mechanism = PLAN, lease: float = 3600.0,
        once: str | None = None,
    ) -> str:  # fmt: skip
        """Reserve one plan on several datasets; return the run's identifier."""
        mechanism = replace(PLAN, steps=plan) if isinstance(plan, int) else plan
        answer = self._ledger.reserve_jointly(self.request(once), names, mechanism, lease, "")
        return str(_read(answer.text)["id"])

    def affords(self, name: str = "d", plan: DpSgd = PLAN) -> int:
        """Return the number of steps of a plan that a refusal says would fit."""
        with pytest.raises(BudgetExhaustedError) as found:
            self.reserve(replace(plan, steps=10**8), name)
        assert found.value.steps is not None
        return found.value.steps

    def grant(
        self, run: str, steps: int = 1, sequence: int = 0, *, once: str | None = None
    ) -> Json:
        """Ask for steps of a run."""
        return _read(self._ledger.grant(self.request(once), run, steps, sequence).text)

    def renew(self, run: str, lease: float = 7200.0) -> Json:
        """Renew the lease of a run."""
        return _read(self._ledger.renew(self.request(), run, lease).text)

    def commit(self, run: str, *, once: str | None = None) -> Json:
        """End a run."""
        return _read(self._ledger.commit(self.request(once), run).text)

    def release(self, run: str, *, once: str | None = None) -> Json:
        """End a run, and give back what was not granted."""
        return _read(self._ledger.release(self.request(once), run).text)

    def look(self, run: str) -> Reservation:
        """Return a reservation, after its lease has ended if it has."""
        return self._ledger.get_reservation(self.record, run)[1]

    def look_at_dataset(self, name: str = "d") -> Dataset:
        """Return a dataset, after the leases that have ended."""
        return self._ledger.get_dataset(self.record, name)


def new_dataset(
    name: str,
    *,
    by: str = "renyi",
    epsilon: float = 3.0,
    delta: float = 1e-5,
    plan: Mechanism | None = PLAN,
) -> NewDataset:
    """Return a dataset that is to be created: 1000 records, add or remove one.

    Args:
        name: of the dataset.
        by: the filter that counts its budget.
        epsilon: of the budget.
        delta: of the budget.
        plan: whose steps the budget is counted in, or is best for.
    """
    return NewDataset(name, 1000, epsilon, delta, ADD_OR_REMOVE, "record", plan, by)


def _read(text: str) -> Json:
    """Read the text of an answer."""
    found: Json = json.loads(text)
    return found


class Scenario:
    """A ledger, the people who use it, and what is true of it.

    Attributes:
        admin: a key that may do everything.
        clock: of the ledger.
    """

    def __init__(self, repository: Repository, clock: Clock | None = None) -> None:
        self.repository, self.ledger = repository, Ledger(repository, ANSWERS)
        self.keys, self.caps = Keys(repository), Caps(repository)
        self._clock, self._forged = clock, False
        self.admin = self.person(Scope.ADMIN)

    def person(self, *scopes: Scope, name: str = "", **fields: Any) -> Person:
        """Create a key, by default one with scope run; for the fields see `Keys.create`."""
        return Person(self, *self.keys.create(scopes or (Scope.RUN,), name, **fields))

    def people(self, *names: str, **fields: Any) -> list[Person]:
        """Create keys of the same fields."""
        return [self.person(name=name, **fields) for name in names]

    def cap(self, share: float, *, team: str = "", key: str = "", name: str = "d") -> None:
        """Set the cap of a team or a key."""
        kind, holder = (HolderKind.TEAM, team) if team else (HolderKind.KEY, key)
        self.caps.set(name, Cap(kind, holder, share), "owner")

    def uncap(self, *, team: str, name: str = "d") -> None:
        """Remove the cap of a team."""
        self.caps.remove(name, HolderKind.TEAM, team, "owner")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        assert self._clock is not None
        self._clock.wait(seconds)

    def dataset(self, name: str = "d") -> Dataset:
        """Return a dataset as it is stored."""
        with self.repository.reading() as reading:
            found = reading.find_dataset(name)
        assert found is not None
        return found

    def runs(self, name: str = "d") -> list[Reservation]:
        """Return the stored reservations of a dataset."""
        dataset = self.dataset(name)
        with self.repository.reading() as reading:
            return reading.list_reservations(dataset)

    def share_taken(self, team: str, name: str = "d") -> float:
        """Return the share of a budget that a team's reservations take, by their charges."""
        taken = sum(run.taken[0] for run in self.runs(name) if run.team == team)
        return self.dataset(name).policy.share_of((taken, 0))

    def entries(self, name: str = "d") -> list[Json]:
        """Return the record of a dataset."""
        dataset = self.dataset(name)
        with self.repository.reading() as reading:
            return [_read(row.body) for row in reading.list_entries(dataset, 0)]

    def kinds(self, name: str = "d") -> list[str]:
        """Return the kinds of the entries in the record of a dataset."""
        return [entry["kind"] for entry in self.entries(name)]

    def audit(self, *actions: str) -> list[tuple[str, str, str, str]]:
        """Return key, action, subject and detail of the audit events with these actions."""
        with self.repository.reading() as reading:
            found = reading.list_audit_events()
        return [
            (each["key"], each["action"], each["subject"], each["detail"])
            for each in found
            if each["action"] in actions
        ]

    def execute(self, *statements: str) -> None:
        """Run SQL statements in one transaction."""
        execute(self.repository, *statements)

    def faults(self) -> list[str]:
        """Return the faults that `verify` finds."""
        return verify(self.repository).faults

    def forge(self, *statements: str) -> list[str]:
        """Run statements that leave faults behind, which are not undone; return the faults."""
        self.execute(*statements)
        self._forged = True
        return self.faults()

    def faults_after(self, *statements: str) -> list[str]:
        """Return the faults that `verify` finds after SQL statements, which are then undone."""
        return faults_after(self.repository, *statements)

    def check(self) -> None:
        """Check what is true of every ledger at the end of a scenario."""
        faults = self.faults()
        assert bool(faults) == self._forged, faults


def execute(repository: Repository, *statements: str) -> None:
    """Run SQL statements in one transaction."""
    with repository.transaction() as transaction:
        for each in statements:
            transaction.connection.exec_driver_sql(each)


class _UndoneError(Exception):
    """A transaction is undone on purpose."""


@contextmanager
def undone(repository: Repository) -> Iterator[Transaction]:
    """Context manager of a transaction that is undone at its end; it may break foreign keys."""
    with suppress(_UndoneError), repository.transaction() as transaction:
        if repository.engine.dialect.name == "sqlite":
            transaction.connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        yield transaction
        raise _UndoneError


def faults_after(repository: Repository, *statements: str) -> list[str]:
    """Return the faults that `verify` finds after SQL statements, which are then undone."""
    with undone(repository) as transaction:
        for each in statements:
            transaction.connection.exec_driver_sql(each)
        return verify_snapshot(transaction).faults


# --- over HTTP


class Caller:
    """Someone with a key who calls a service over HTTP."""

    def __init__(self, http: TestClient, key: str) -> None:
        self.http, self.key = http, key
        self.identifier = key.split("_")[1] if key.count("_") > 1 else ""

    def send(
        self, method: str, path: str, body: Any = None, once: str | None = None
    ) -> httpx.Response:
        """Send a request; return the whole response."""
        headers = {
            "Authorization": f"Bearer {self.key}",
            "Idempotency-Key": once or uuid.uuid4().hex,
        }
        return self.http.request(method, path, json=body, headers=headers)

    def ask(
        self, method: str, path: str, body: Any = None, once: str | None = None
    ) -> tuple[int, Any]:
        """Send a request; return its status and its answer, read if it is JSON."""
        found = self.send(method, path, body, once)
        is_json = found.headers.get("content-type", "").split(";")[0] in _JSON
        return found.status_code, found.json() if is_json else found.text

    def post(self, path: str, body: Any = None, once: str | None = None) -> tuple[int, Any]:
        """Send a POST."""
        return self.ask("POST", path, {} if body is None else body, once)

    def get(self, path: str) -> tuple[int, Any]:
        """Send a GET."""
        return self.ask("GET", path)

    def make(self, path: str, body: Any = None, once: str | None = None) -> Json:
        """Send a POST that must succeed; return its answer."""
        status, found = self.post(path, body, once)
        assert status in (200, 201), found
        assert isinstance(found, dict)
        return found

    def read(self, path: str) -> Any:
        """Send a GET that must succeed; return its answer."""
        status, found = self.get(path)
        assert status == 200, found
        return found

    def dataset(self, name: str, budget: Json = BUDGET, **fields: Any) -> Json:
        """Create a dataset of 60 000 records."""
        return self.make("/v1/datasets", {"name": name, "size": 60_000, "budget": budget, **fields})

    def reserve(self, name: str, plan: Json = PLAN_JSON, **fields: Any) -> Json:
        """Reserve a plan; return the reservation."""
        return self.make(f"/v1/datasets/{name}/reservations", {"mechanism": plan, **fields})

    def try_to_reserve(self, name: str, plan: Json) -> tuple[int, Json]:
        """Ask for a plan, which may be refused; return status and answer."""
        return self.post(f"/v1/datasets/{name}/reservations", {"mechanism": plan})

    def quote(self, name: str, plan: Json) -> Json:
        """Ask what a plan would cost."""
        return self.make(f"/v1/datasets/{name}/quotes", {"mechanism": plan})

    def look(self, name: str) -> Json:
        """Return a dataset."""
        return dict(self.read(f"/v1/datasets/{name}"))

    def certificate(self, run: str) -> Json:
        """Return the certificate of a run."""
        return dict(self.read(f"/v1/reservations/{run}/certificate"))

    def grant(
        self, run: str, steps: int, sequence: int, once: str | None = None
    ) -> tuple[int, Json]:
        """Ask for steps of a run."""
        body = {"steps": steps, "sequence": sequence}
        return self.post(f"/v1/reservations/{run}/grants", body, once)

    def commit(self, run: str) -> tuple[int, Json]:
        """End a run."""
        return self.post(f"/v1/reservations/{run}/commit")

    def refusal(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Send a request that must be refused; return the status and the code."""
        status, found = self.ask(method, path, body)
        assert status >= 400, found
        return status, found["code"]

    def client(self) -> AccountingService:
        """Return the typed client with this key."""

        def forward(sent: httpx.Request) -> httpx.Response:
            """Pass a request to the application."""
            answer = self.http.request(
                sent.method,
                sent.url.raw_path.decode(),
                content=sent.content,
                headers=sent.headers,
            )
            return httpx.Response(answer.status_code, content=answer.content)

        transport = httpx.MockTransport(forward)
        return AccountingService("http://test", api_key=self.key, transport=transport)


class Service:
    """An application on a ledger, and its callers.

    Attributes:
        app, http: the application, and a client of it in this process.
    """

    def __init__(self, http: TestClient) -> None:
        self.http, self.app = http, http.app
        state = http.app.state  # type: ignore[attr-defined]
        self.keys, self.repository = state.keys, state.repository

    @cached_property
    def admin(self) -> Caller:
        """Return a caller who may do everything."""
        return self.caller(Scope.ADMIN)

    def caller(self, *scopes: Scope, **fields: Any) -> Caller:
        """Create a key, by default one with scope run; for the fields see `Keys.create`."""
        return Caller(self.http, self.keys.create(scopes or (Scope.RUN,), **fields)[0])

    def with_key(self, key: str) -> Caller:
        """Return a caller with a key."""
        return Caller(self.http, key)

    def faults(self) -> list[str]:
        """Return the faults that `verify` finds."""
        return verify(self.repository).faults

    def sign_in(self, caller: Caller) -> str:
        """Sign in to the pages; return the token that their forms need."""
        self.http.cookies.clear()
        form = {"csrf": read_form_token(self.http.get("/sign-in").text), "key": caller.key}
        signed = self.http.post("/sign-in", data=form, follow_redirects=False)
        assert signed.status_code == 303
        return read_form_token(self.http.get("/datasets").text)


def read_form_token(page: str) -> str:
    """Return the token of the forms of a page."""
    return page.split('name="csrf" value="')[1].split('"')[0]


@contextmanager
def started(url: str, **settings: Any) -> Iterator[Service]:
    """Context manager of a service on a database."""
    app = create_app(Settings(database_url=url, **settings))
    with TestClient(app, raise_server_exceptions=False) as http:
        yield Service(http)


@contextmanager
def serving(url: str, **settings: Any) -> Iterator[Service]:
    """Context manager of a service on a database, in which `verify` finds no fault at the end."""
    with started(url, **settings) as found:
        yield found
        faults = found.faults()
        assert not faults, faults


class Commands:
    """The command line on a ledger.

    Attributes:
        url: of the ledger's database.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, line: str, *more: str) -> tuple[int, str]:
        """Run a command line, with more arguments; return its status and its output."""
        found = CliRunner().invoke(cli.app, [*shlex.split(line), *more])
        return found.exit_code, found.output

    def make(self, line: str, *more: str) -> str:
        """Run a command that must succeed; return its output without the last line break."""
        status, said = self(line, *more)
        assert status == 0, said
        return said.strip()

    def json(self, line: str, *more: str) -> Any:
        """Run a command that must succeed, with --json; return what it says."""
        return json.loads(self.make(line, *more, "--json"))


# --- fixtures


@pytest.fixture(
    scope="session", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)]
)
def kind(request: pytest.FixtureRequest) -> str:
    """The database of a scenario."""
    return str(request.param)


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    with database(kind, tmp_path) as found:
        yield found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the ledgers in this process."""
    return Clock(monkeypatch)


@pytest.fixture
def scenario(url: str, clock: Clock) -> Iterator[Scenario]:
    """An empty ledger, in which `verify` finds no fault at the end."""
    repository = opening.open_repository(url)
    try:
        found = Scenario(repository, clock)
        yield found
        found.check()
    finally:
        repository.close()


@pytest.fixture(scope="module")
def web(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that the tests of a module share: each has its own datasets and keys."""
    with database(kind, tmp_path_factory.mktemp("service")) as found, serving(found) as made:
        yield made


@pytest.fixture
def own_web(url: str) -> Iterator[Service]:
    """A service on an empty ledger."""
    with serving(url) as found:
        yield found


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """The command line on an empty ledger on SQLite, and no service."""
    found = Commands(f"sqlite:///{tmp_path}/commands.db")
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", found.url)
    monkeypatch.delenv("ACCOUNTANT_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    return found
