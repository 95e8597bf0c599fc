"""Webhooks: told of what was committed, in order, at least once, never in the way of a grant."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.api.ledger_views import encode_answer
from accountant_service.app import create_app
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import database as opening
from accountant_service.ledger import webhook_delivery
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.errors import BudgetExhaustedError
from accountant_service.ledger.repository import KeyRecord, Repository, Transaction, now
from accountant_service.ledger.rules import NewDataset
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.ledger.webhook_delivery import WebhookDelivery
from accountant_service.ledger.webhooks import Webhook, compute_pause, create_webhook, sign
from accountant_service.mechanisms import DpSgd
from accountant_service.settings import Settings
from tests.support.server import Server

# without sampling, for which charges are decided fast
RUN = DpSgd(20.0, sample_rate=1.0, steps=100, sampling="none")
Json = dict[str, Any]


class Receiver:
    """A local HTTP server that keeps what is posted to it, and answers with a chosen status."""

    def __init__(self) -> None:
        self.status, self.delay = 200, 0.0
        self.requests: list[tuple[str, dict[str, str], str]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                receiver.requests.append((self.path, dict(self.headers), body))
                time.sleep(receiver.delay)
                self.send_response(receiver.status)
                if receiver.status == 302:
                    self.send_header("Location", f"{receiver.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def events(self) -> list[Json]:
        """The bodies posted so far."""
        return [json.loads(body) for _, _, body in self.requests]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def request(key: KeyRecord) -> WriteRequest:
    return WriteRequest(key, uuid.uuid4().hex, "test", None)


class Bench:
    """A dataset, and deliveries that the test makes itself."""

    def __init__(self, repository: Repository, name: str = "d") -> None:
        self.repository, self.name = repository, name
        self.ledger = Ledger(repository, encode_answer)
        self.key = Keys(repository).create([Scope.OWNER, Scope.RUN])[1]
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        new = NewDataset(name, 1000, 3.0, 1e-5, relation, "record", RUN, "renyi")
        self.ledger.create_dataset(request(self.key), new)
        self.most = self.affordable()
        self.attempts: list[bool] = []
        self.delivery = WebhookDelivery(repository, self.attempts.append)

    def affordable(self) -> int:
        with pytest.raises(BudgetExhaustedError) as refused:
            self.reserve(10**8)
        assert refused.value.steps is not None
        return refused.value.steps

    def reserve(self, steps: int) -> str:
        plan = replace(RUN, steps=steps)
        answer = self.ledger.reserve(request(self.key), self.name, plan, 3600, "")
        return str(json.loads(answer.text)["id"])

    def add(self, url: str, dataset: str | None = "d") -> Webhook:
        made = create_webhook(url, dataset, (0.5, 0.8), now())
        with self.repository.transaction() as transaction:
            transaction.add_webhook(made)
        return made

    def waiting(self, webhook: Webhook) -> list[Any]:
        with self.repository.reading() as reading:
            return reading.list_waiting_events(webhook.identifier)

    def make_due(self) -> None:
        """Let the time pass after which failed events are due."""
        with self.repository.transaction() as transaction:
            transaction.connection.exec_driver_sql("UPDATE webhook_event SET due_at = 0")

    def deliver(self) -> None:
        while self.delivery.deliver_due():
            pass


def test_events_are_signed_and_arrive_in_order(repository: Repository, receiver: Receiver) -> None:
    bench = Bench(repository)
    hook = bench.add(f"{receiver.url}/here")
    bench.reserve(int(0.4 * bench.most))
    bench.reserve(int(0.2 * bench.most))
    bench.reserve(bench.affordable())
    bench.ledger.close_dataset(request(bench.key), "d")
    assert len(bench.waiting(hook)) == 4
    bench.deliver()
    told = [(event["type"], event.get("share"), event["entry"]) for event in receiver.events]
    assert told == [
        ("budget.share_passed", 0.5, 3),
        ("budget.share_passed", 0.8, 4),
        ("budget.exhausted", None, 4),
        ("dataset.closed", None, 5),
    ]
    assert receiver.events[0]["share_taken"] == pytest.approx(0.6, abs=0.01)
    for path, headers, body in receiver.requests:
        assert path == "/here"
        assert headers["Accountant-Event-Id"] == json.loads(body)["id"]
        stamp, signature = (part[2:] for part in headers["Accountant-Signature"].split(","))
        assert abs(int(stamp) - time.time()) < 60
        expected = hmac.new(hook.secret.encode(), f"{stamp}.{body}".encode(), hashlib.sha256)
        assert f"={expected.hexdigest()}" == signature
    with repository.reading() as reading:
        dataset = reading.find_dataset("d")
        assert dataset is not None
        heads = {row.number: row.hash for row in reading.list_entries(dataset, 0)}
    assert [event["head"] for event in receiver.events] == [heads[e] for e in (3, 4, 4, 5)]
    assert bench.waiting(hook) == []
    bench.deliver()
    assert len(receiver.requests) == 4, "once each"
    assert verify(repository).faults == []


def test_a_receiver_that_is_down_gets_them_later_in_order(
    repository: Repository, receiver: Receiver
) -> None:
    bench = Bench(repository)
    hook = bench.add(receiver.url)
    receiver.status = 503
    bench.reserve(int(0.6 * bench.most))
    bench.reserve(int(0.3 * bench.most))
    bench.deliver()
    assert [event["share"] for event in receiver.events] == [0.5], "the second waits for the first"
    first = bench.waiting(hook)[0]
    assert (first.attempts, first.last_error) == (1, "the answer is 503")
    assert first.due_at > now()
    bench.make_due()
    bench.deliver()
    assert bench.attempts == [False, False]
    receiver.status = 200
    bench.make_due()
    bench.deliver()
    assert [event["share"] for event in receiver.events] == [0.5, 0.5, 0.5, 0.8]
    assert len({event["id"] for event in receiver.events}) == 2, "a repeat has the same identifier"
    assert bench.waiting(hook) == []


def test_one_dataset_does_not_wait_for_another(local: Repository, receiver: Receiver) -> None:
    one, two = Bench(local), Bench(local, "e")
    down, hook = one.add("http://127.0.0.1:9"), one.add(receiver.url, None)
    one.reserve(int(0.6 * one.most))
    two.reserve(int(0.6 * two.most))
    one.deliver()
    assert sorted(event["dataset"] for event in receiver.events) == ["d", "e"]
    assert one.waiting(hook) == []
    (stuck,) = one.waiting(down)
    assert stuck.last_error.startswith("no answer")


def test_redirects_are_not_followed(local: Repository, receiver: Receiver) -> None:
    bench = Bench(local)
    hook = bench.add(f"{receiver.url}/here")
    receiver.status = 302
    bench.reserve(int(0.6 * bench.most))
    bench.deliver()
    assert [path for path, _, _ in receiver.requests] == ["/here"]
    assert bench.waiting(hook)[0].last_error == "the answer is 302"


def test_two_servers_do_not_post_the_same_event_at_once(
    repository: Repository, receiver: Receiver
) -> None:
    bench = Bench(repository)
    bench.add(receiver.url)
    receiver.delay = 0.3
    bench.reserve(int(0.6 * bench.most))
    servers = [WebhookDelivery(repository, lambda _: None) for _ in range(4)]
    threads = [threading.Thread(target=server.deliver_due) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(receiver.requests) == 1


def test_a_write_that_is_rolled_back_tells_nothing(
    local: Repository, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(local)
    hook = bench.add(receiver.url)

    def fail(*_: Any) -> None:
        raise RuntimeError("killed before the commit")

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "store_answer", fail)
        with pytest.raises(RuntimeError):
            bench.reserve(int(0.6 * bench.most))
    assert bench.waiting(hook) == []
    bench.reserve(int(0.6 * bench.most))
    assert len(bench.waiting(hook)) == 1


def test_a_grant_does_not_wait_for_a_slow_receiver(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_delivery, "_PAUSE_SECONDS", 0.02)
    url = f"sqlite:///{tmp_path}/ledger.db"
    with TestClient(create_app(Settings(database_url=url))) as http:
        bench = Bench(http.app.state.repository)  # type: ignore[attr-defined]
        bench.add(receiver.url)
        receiver.delay = 3.0
        run = bench.reserve(int(0.6 * bench.most))
        deadline = time.monotonic() + 20
        while not receiver.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert receiver.requests
        begun = time.monotonic()
        for sequence in range(5):
            bench.ledger.grant(request(bench.key), run, 1, sequence)
        assert time.monotonic() - begun < 2.0, "while the receiver has not answered"


def test_keys_are_told_to_webhooks_of_all_datasets_only(
    local: Repository, receiver: Receiver
) -> None:
    bench = Bench(local)
    bench.add(receiver.url, None)
    other = bench.add("http://127.0.0.1:9")
    keys = Keys(local)
    made = keys.create([Scope.RUN])[1].identifier
    keys.revoke(made, "admin")
    bench.deliver()
    assert [(event["type"], event["key"]) for event in receiver.events] == [
        ("key.created", made), ("key.revoked", made),
    ]  # fmt: skip
    assert bench.waiting(other) == []


def test_pauses_double_up_to_an_hour() -> None:
    assert [compute_pause(each) for each in (1, 2, 3, 10, 11, 1000)] == [
        5, 10, 20, 2560, 3600, 3600,
    ]  # fmt: skip


def test_a_signature_is_that_of_the_documentation() -> None:
    value = sign("whsec_key", 1795278797, '{"id": "1"}')
    digest = hmac.new(b"whsec_key", b'1795278797.{"id": "1"}', hashlib.sha256).hexdigest()
    assert value == f"t=1795278797,v1={digest}"


@pytest.mark.parametrize(
    "url", ["ftp://host/", "host/path", "file:///etc/passwd", "https://", "https://me:pw@host/"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        create_webhook(url, None, (0.5,), 0)


# --- a server that is killed, and commands


def wait_for(receiver: Receiver, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(receiver.requests) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(receiver.requests) >= count


@pytest.mark.slow
def test_a_server_killed_between_commit_and_delivery_delivers_after_its_restart(
    tmp_path: Path, receiver: Receiver
) -> None:
    """Killed while the receiver has the event and has not answered: told again, with its id."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    repository = opening.open_repository(url)
    bench = Bench(repository)
    bench.add(receiver.url)
    receiver.delay = 30.0
    bench.reserve(int(0.6 * bench.most))
    server = Server(url, tmp_path)
    try:
        wait_for(receiver, 1)
        server.kill()
        bench.reserve(int(0.3 * bench.most))
        receiver.delay = 0.0
        bench.make_due()  # the claim of the killed server ends after a minute
        server.start()
        wait_for(receiver, 3)
    finally:
        server.kill()
        repository.close()
    assert [event["share"] for event in receiver.events] == [0.5, 0.5, 0.8]
    assert receiver.events[0] == receiver.events[1]


def test_webhooks_on_the_command_line(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: str) -> tuple[int, str]:
        found = CliRunner().invoke(cli.app, ["webhook", *arguments])
        return found.exit_code, found.output

    status, secret = call("add", receiver.url, "--share", "0.8", "--share", "0.3")
    assert (status, secret.startswith("whsec_")) == (0, True)
    (row,) = json.loads(call("list", "--json")[1])
    assert (row["shares"], row["dataset"], row["waiting"]) == ([0.3, 0.8], None, 0)
    assert "secret" not in row
    assert secret.strip() not in call("list")[1]
    assert call("test", row["id"]) == (0, f"{receiver.url} accepted the event\n")
    assert receiver.events[0]["type"] == "webhook.test"
    receiver.status = 500
    status, said = call("test", row["id"])
    assert (status, "the answer is 500" in said) == (1, True)
    CliRunner().invoke(cli.app, ["keys", "create", "--scope", "run"])
    assert json.loads(call("list", "--json")[1])[0]["waiting"] == 1
    assert call("remove", row["id"]) == (0, f"removed {row['id']}\n")
    assert json.loads(call("list", "--json")[1]) == []
    for wrong in (
        ("add", "nowhere"),
        ("add", receiver.url, "--share", "1.5"),
        ("add", receiver.url, "--dataset", "none"),
        ("remove", "none"),
        ("test", "none"),
    ):
        assert call(*wrong)[0] == 2, wrong


def test_metrics_show_passed_shares_and_waiting_events(tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path}/m.db", budget_shares="0.25, 0.9")
    with TestClient(create_app(settings)) as http:
        bench = Bench(http.app.state.repository)  # type: ignore[attr-defined]
        token = Keys(bench.repository).create([Scope.MONITOR])[0]
        bench.add("http://127.0.0.1:9")
        bench.reserve(int(0.6 * bench.most))
        headers = {"Authorization": f"Bearer {token}"}
        shown = http.get("/metrics", headers=headers).text
    assert 'accountant_budget_share_passed{dataset="d",share="0.25"} 1.0' in shown
    assert 'accountant_budget_share_passed{dataset="d",share="0.9"} 0.0' in shown
    assert "accountant_webhook_events_waiting 1.0" in shown
    for wrong in ("half", "0.5,2", "0", "nan"):
        with pytest.raises(ValueError, match="shares"):
            Settings(budget_shares=wrong)
