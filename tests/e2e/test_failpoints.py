"""A server killed at every statement and around every commit: all of a write happens, or nothing.

Each point kills a server in the middle of one write. Then what is stored must be the state before
the write or after it, the whole record must check, and the same request with the same key, sent to
another server on the same database, must be answered as if nothing had happened.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.verification import verify
from accountant_service.ledger.webhook_delivery import WebhookDelivery
from accountant_service.ledger.webhooks import create_webhook
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.databases import database, free_port
from tests.support.helpers import nightly

RUN = {"kind": "dp_sgd", "noise_multiplier": 60.0, "sample_rate": 1.0, "sampling": "none",
       "steps": 100}  # fmt: skip
OTHER = RUN | {"noise_multiplier": 90.0}
KINDS = ("reserve", "grant", "commit", "release", "renew", "reserve-other", "grant-other",
         "commit-other", "close", "reference")  # fmt: skip
DATABASES = ("sqlite", "postgresql")
IN_CI = {("sqlite", "grant"), ("postgresql", "commit-other")}
POINTS_MAX = 40
ANSWER_SECONDS = 120  # a server that is slow on a busy machine was not killed


class Forge:
    """Makes servers that fail at a point; one process that has imported everything forks them."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("failing_server.py")],
            env=os.environ | {"ACCOUNTANT_DATABASE_URL": url, "PYTHONPATH": os.getcwd()},
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def server(self, point: int, mutant: str) -> int:
        """The port of a new one, which listens."""
        port = free_port()
        assert self._process.stdin is not None
        print(port, point, mutant, file=self._process.stdin, flush=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return port
        raise AssertionError("the server did not start")

    def close(self) -> None:
        """No more of them, and those that are left end."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class Bench:
    """One dataset, one run, a server that works, and others that fail."""

    def __init__(self, http: TestClient, forge: Forge) -> None:
        self.http, self.forge = http, forge
        self.token, _ = http.app.state.keys.create([Scope.ADMIN])  # type: ignore[attr-defined]
        self.repository = http.app.state.repository  # type: ignore[attr-defined]
        self.webhook = create_webhook("http://127.0.0.1:9", None, (), 0)
        with self.repository.transaction() as transaction:
            transaction.add_webhook(self.webhook, "test")
        self.name = uuid.uuid4().hex
        self.create_dataset()
        self.plan = (f"/v1/datasets/{self.name}/reservations", {"mechanism": RUN})
        self.run = self.send(*self.plan).json()["id"]

    def create_dataset(self) -> None:
        """Create the current dataset, with more budget than the writes can spend."""
        budget = {"epsilon": 50.0, "delta": 1e-5}
        body = {"name": self.name, "size": 1000, "budget": budget, "accept_weak": True}
        self.send("/v1/datasets", body)

    def send(self, path: str, body: Any, key: str | None = None, port: int = 0) -> httpx.Response:
        """A write, to the server that works unless a port is given."""
        headers = {
            "Authorization": f"Bearer {self.token}",
            "Idempotency-Key": key or uuid.uuid4().hex,
        }
        if port:
            url = f"http://127.0.0.1:{port}{path}"
            return httpx.post(url, json=body, headers=headers, timeout=ANSWER_SECONDS)
        return self.http.post(path, json=body, headers=headers)

    def version(self) -> int:
        """Return the number of entries in the dataset's history."""
        with self.repository.reading() as reading:
            return int(reading.find_dataset(self.name).version)

    def count_events(self) -> int:
        """Return the number of events about the dataset that wait for a webhook."""
        with self.repository.reading() as reading:
            waiting = reading.list_waiting_events(self.webhook.identifier)
        return sum(event.dataset == self.name for event in waiting)

    def next_write(self, kind: str) -> tuple[str, Any]:
        """A write of a kind that has not been made."""
        if kind.endswith("-other"):
            return self.next_write_of_another_mechanism(kind.removesuffix("-other"))
        if kind == "reserve":
            return self.plan
        if kind == "close":
            return self.next_closing()
        if kind == "reference":
            self.name = uuid.uuid4().hex
            self.create_dataset()
            return f"/v1/datasets/{self.name}/reference", {"mechanism": RUN}
        if kind == "grant":
            with self.repository.reading() as reading:
                granted = reading.find_reservation(self.run).steps_granted
            return f"/v1/reservations/{self.run}/grants", {"steps": 1, "sequence": granted}
        run = self.send(*self.plan).json()["id"]
        return f"/v1/reservations/{run}/{kind}", {}

    def next_closing(self) -> tuple[str, Any]:
        """The closing of a dataset that has an open run, which is the current one from now on."""
        self.name = uuid.uuid4().hex
        self.create_dataset()
        self.send(f"/v1/datasets/{self.name}/reservations", {"mechanism": RUN})
        return f"/v1/datasets/{self.name}/close", {}

    def next_write_of_another_mechanism(self, kind: str) -> tuple[str, Any]:
        """A write that exchanges reference steps, or exchanges some of them back."""
        plan = (self.plan[0], {"mechanism": OTHER})
        if kind == "reserve":
            return plan
        path = f"/v1/reservations/{self.send(*plan).json()['id']}"
        if kind == "grant":
            return f"{path}/grants", {"steps": 30, "sequence": 0}
        self.send(f"{path}/grants", {"steps": 30, "sequence": 0})
        return f"{path}/{kind}", {}


@pytest.fixture(params=DATABASES)
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    with database(request.param, tmp_path) as url:
        app, forge = create_app(Settings(database_url=url)), Forge(url)
        monkeypatch.setattr(WebhookDelivery, "start", lambda _: None)
        with TestClient(app) as http:
            yield Bench(http, forge)
        forge.close()


def faults_at_every_point(bench: Bench, kind: str, mutant: str = "none") -> list[str]:
    """Kill a server at each point of one kind of write; what was found wrong afterwards."""
    found: list[str] = []
    stored = []
    for point in itertools.count(1):
        assert point < POINTS_MAX
        path, body = bench.next_write(kind)
        before, key = bench.version(), uuid.uuid4().hex
        port = bench.forge.server(point, mutant)
        try:
            answer = bench.send(path, body, key, port)
        except (httpx.NetworkError, httpx.ProtocolError):
            pass  # it was killed; a slow answer raises another exception
        else:  # the point lies beyond the write
            found += [] if answer.is_success else [f"at last: {answer.text}"]
            found += [] if bench.version() == before + 1 else ["acknowledged and not stored"]
            break
        stored.append(bench.version() - before)
        if kind == "close" and bench.count_events() != stored[-1]:
            found.append(f"{bench.count_events()} events of {stored[-1]} entries at point {point}")
        if stored[-1] not in (0, 1):
            found.append(f"{stored[-1]} entries at point {point}")
        again = [bench.send(path, body, key) for _ in range(2)]
        if not again[0].is_success or again[0].json() != again[1].json():
            found.append(f"a repeat after point {point} was answered {again[0].text}")
        if kind == "close" and bench.count_events() != 1:
            found.append(f"point {point} and repeats made {bench.count_events()} events")
        if bench.version() != before + 1:
            found.append(f"point {point} and repeats made {bench.version() - before} entries")
        found += verify(bench.repository).faults
    assert 0 in stored  # before the commit, and after it
    assert mutant != "none" or sum(stored) == 1
    print(f"{kind}: {len(stored)} points, {sum(stored)} of them after the commit")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "kind"),
    [each if each in IN_CI else nightly(*each) for each in itertools.product(DATABASES, KINDS)],
    indirect=["bench"],
)
def test_all_or_nothing_at_every_point(bench: Bench, kind: str) -> None:
    assert faults_at_every_point(bench, kind) == []


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", ["autocommit", "forgetful", "hasty"])
def test_a_mutant_is_found_out(bench: Bench, mutant: str) -> None:
    assert faults_at_every_point(bench, "grant", mutant) != []
