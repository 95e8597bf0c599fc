"""Webhooks: told of what was committed, in order, at least once, never in the way of a grant."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from accountant_service.ledger import database as opening
from accountant_service.ledger import plans, webhook_delivery
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.repository import Transaction, now
from accountant_service.ledger.series import Template
from accountant_service.ledger.series_catalog import SeriesCatalog
from accountant_service.ledger.webhook_delivery import WebhookDelivery
from accountant_service.ledger.webhooks import Webhook, compute_pause, create_webhook, sign
from accountant_service.operations.settings import Settings
from tests.support.ledger_scenarios import (
    ADD_OR_REMOVE,
    ON_SQLITE,
    SQL_MATTERS,
    Commands,
    Json,
    Scenario,
    race,
    serving,
)
from tests.support.server import Server


class Receiver:
    """A local HTTP server that keeps what is posted to it, and answers with a chosen status."""

    def __init__(self) -> None:
        self.status, self.delay, self.drips = 200, 0.0, False
        self.requests: list[tuple[str, dict[str, str], str]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                receiver.requests.append((self.path, dict(self.headers), body))
                time.sleep(receiver.delay)
                while receiver.drips:
                    self.wfile.write(b"x")
                    time.sleep(0.05)
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


class Bench:
    """A dataset, and deliveries that the test makes itself."""

    def __init__(self, scenario: Scenario, name: str = "d") -> None:
        self.scenario, self.name, self.admin = scenario, name, scenario.admin
        self.admin.create(name)
        self.most = self.admin.affords(name)
        self.attempts: list[bool] = []
        self.delivery = WebhookDelivery(scenario.repository, self.attempts.append)

    def reserve(self, share: float) -> str:
        """Reserve a share of the budget."""
        return self.admin.reserve(int(share * self.most), self.name)

    def add(self, url: str, dataset: str | None = "d") -> Webhook:
        made = create_webhook(url, dataset, (0.5, 0.8), now())
        with self.scenario.repository.transaction() as transaction:
            transaction.add_webhook(made, "test")
        return made

    def waiting(self, webhook: Webhook) -> list[Any]:
        with self.scenario.repository.reading() as reading:
            return reading.list_waiting_events(webhook.identifier)

    def make_due(self) -> None:
        """Let the time pass after which failed events are due."""
        self.scenario.execute("UPDATE webhook_event SET due_at = 0")

    def deliver(self) -> None:
        while self.delivery.deliver_due():
            pass


@pytest.fixture
def bench(scenario: Scenario) -> Bench:
    return Bench(scenario)


def test_events_are_signed_and_arrive_in_order(bench: Bench, receiver: Receiver) -> None:
    hook = bench.add(f"{receiver.url}/here")
    bench.reserve(0.4)
    bench.reserve(0.2)
    bench.admin.reserve(bench.admin.affords())
    bench.admin.close()
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
    with bench.scenario.repository.reading() as reading:
        stored = reading.list_entries(bench.scenario.dataset(), 0)
    heads = {row.number: row.hash for row in stored}
    assert [event["head"] for event in receiver.events] == [heads[e] for e in (3, 4, 4, 5)]
    assert bench.waiting(hook) == []
    bench.deliver()
    assert len(receiver.requests) == 4, "once each"


def test_a_run_on_several_datasets_tells_of_each(bench: Bench, receiver: Receiver) -> None:
    """Webhooks say which shares of which dataset one joint run takes."""
    bench.add(receiver.url, dataset=None)
    bench.admin.create("e")
    most = min(bench.admin.affords(), bench.admin.affords("e"))
    bench.admin.reserve_jointly("d", "e", plan=int(0.6 * most))
    bench.deliver()
    told = [(event["type"], event.get("share"), event["dataset"]) for event in receiver.events]
    assert sorted(told) == [("budget.share_passed", 0.5, name) for name in ("d", "e")]
    taken = {event["dataset"]: event["share_taken"] for event in receiver.events}
    for name in ("d", "e"):
        dataset = bench.scenario.dataset(name)
        assert taken[name] == dataset.policy.share_of(dataset.balance.taken)


def test_a_receiver_that_is_down_gets_them_later_in_order(bench: Bench, receiver: Receiver) -> None:
    hook = bench.add(receiver.url)
    receiver.status = 503
    bench.reserve(0.6)
    bench.reserve(0.3)
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


def test_one_dataset_does_not_wait_for_another(scenario: Scenario, receiver: Receiver) -> None:
    one, two = Bench(scenario), Bench(scenario, "e")
    down, hook = one.add("http://127.0.0.1:9"), one.add(receiver.url, None)
    one.reserve(0.6)
    two.reserve(0.6)
    one.deliver()
    assert sorted(event["dataset"] for event in receiver.events) == ["d", "e"]
    assert one.waiting(hook) == []
    (stuck,) = one.waiting(down)
    assert stuck.last_error.startswith("no answer")


def test_a_receiver_that_drips_its_answer_delays_nobody(
    scenario: Scenario, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read ends in time, the answer never: the limit is one for the whole call."""
    # private: ten seconds are longer than a test may take
    monkeypatch.setattr(webhook_delivery.post_event, "__defaults__", (0.4,))
    bench, other = Bench(scenario), Receiver()
    slow, quick = bench.add(receiver.url), bench.add(other.url)
    receiver.drips = True
    bench.reserve(0.6)
    bench.reserve(0.3)
    bench.deliver()
    receiver.drips = False
    assert [event["share"] for event in other.events] == [0.5, 0.8]
    assert bench.waiting(quick) == []
    assert [event.last_error for event in bench.waiting(slow)] == [
        "no answer: it was not complete within 0.4 s", "",
    ]  # fmt: skip
    assert len(receiver.requests) == 1
    other.close()


def test_redirects_are_not_followed(bench: Bench, receiver: Receiver) -> None:
    hook = bench.add(f"{receiver.url}/here")
    receiver.status = 302
    bench.reserve(0.6)
    bench.deliver()
    assert [path for path, _, _ in receiver.requests] == ["/here"]
    assert bench.waiting(hook)[0].last_error == "the answer is 302"


@SQL_MATTERS
def test_two_servers_do_not_post_the_same_event_at_once(bench: Bench, receiver: Receiver) -> None:
    bench.add(receiver.url)
    receiver.delay = 0.3
    bench.reserve(0.6)
    race(*(WebhookDelivery(bench.scenario.repository, print).deliver_due for _ in range(4)))
    assert len(receiver.requests) == 1


def test_a_write_that_is_rolled_back_tells_nothing(
    bench: Bench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = bench.add(receiver.url)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed before the commit")

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "store_answer", fail)
        with pytest.raises(RuntimeError):
            bench.reserve(0.6)
    assert bench.waiting(hook) == []
    bench.reserve(0.6)
    assert len(bench.waiting(hook)) == 1


@ON_SQLITE
def test_a_grant_does_not_wait_for_a_slow_receiver(
    url: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: no setting makes a server look for events more often than once a second
    monkeypatch.setattr(webhook_delivery, "_PAUSE_SECONDS", 0.02)
    with serving(url) as found:
        bench = Bench(Scenario(found.repository))
        bench.add(receiver.url)
        receiver.delay = 3.0
        run = bench.reserve(0.6)
        wait_for(receiver, 1)
        begun = time.monotonic()
        for sequence in range(5):
            bench.admin.grant(run, 1, sequence)
        assert time.monotonic() - begun < 2.0, "while the receiver has not answered"


def test_keys_are_told_to_webhooks_of_all_datasets_only(bench: Bench, receiver: Receiver) -> None:
    bench.add(receiver.url, None)
    other = bench.add("http://127.0.0.1:9")
    made = bench.scenario.person().identifier
    bench.scenario.keys.revoke(made, "admin")
    bench.deliver()
    assert [(event["type"], event["key"]) for event in receiver.events] == [
        ("key.created", made), ("key.revoked", made),
    ]  # fmt: skip
    assert bench.waiting(other) == []


@SQL_MATTERS
def test_a_webhook_of_a_series_is_told_of_all_its_datasets_and_of_no_other(
    scenario: Scenario, receiver: Receiver
) -> None:
    bench, catalog = Bench(scenario), SeriesCatalog(scenario.repository)
    template = Template(1.0, 1e-9, ADD_OR_REMOVE, "record")
    catalog.create(scenario.admin.record, "sales", template)
    bench.add(receiver.url, "sales")
    for label in ("2026-10", "2026-11"):  # later than the webhook
        policy = plans.choose_policy(template.example)
        catalog.add_dataset(scenario.admin.record, "sales", label, 1000, policy)
    scenario.admin.create("sales-2027")  # is in no series
    for name in ("sales-2026-11", "sales-2027", "d", "sales-2026-10"):
        scenario.admin.close(name)
    bench.deliver()
    assert [(event["type"], event["dataset"]) for event in receiver.events] == [
        ("dataset.closed", "sales-2026-11"), ("dataset.closed", "sales-2026-10"),
    ]  # fmt: skip


def test_pauses_double_up_to_an_hour() -> None:
    assert [compute_pause(each) for each in (1, 2, 3, 10, 11, 1000)] == [
        5, 10, 20, 2560, 3600, 3600,
    ]  # fmt: skip


def test_a_signature_is_that_of_the_documentation() -> None:
    value = sign("whsec_key", 1795278797, '{"id": "1"}')
    digest = hmac.new(b"whsec_key", b'1795278797.{"id": "1"}', hashlib.sha256).hexdigest()
    assert value == f"t=1795278797,v1={digest}"


def test_other_addresses_are_refused() -> None:
    for url in ("ftp://host/", "host/path", "file:///etc/passwd", "https://", "https://me:pw@host"):
        with pytest.raises(ValueError, match="address"):
            create_webhook(url, None, (0.5,), 0)


# --- a server that is killed, and commands


def wait_for(receiver: Receiver, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(receiver.requests) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(receiver.requests) >= count


def test_a_delivery_killed_after_the_receiver_has_the_event_is_told_again_with_its_id(
    bench: Bench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the point between the answer and its record; at night a server is killed there."""
    genuine = webhook_delivery.post_event

    def killed(*of: Any) -> None:
        genuine(*of)
        raise KeyboardInterrupt

    bench.add(receiver.url)
    bench.reserve(0.6)
    with monkeypatch.context() as patch:
        patch.setattr(webhook_delivery, "post_event", killed)
        with pytest.raises(KeyboardInterrupt):
            bench.deliver()
    bench.reserve(0.3)
    bench.deliver()
    assert len(receiver.events) == 1, "claimed for a minute"
    bench.make_due()
    bench.deliver()
    assert [event["share"] for event in receiver.events] == [0.5, 0.5, 0.8]
    assert receiver.events[0] == receiver.events[1]


@pytest.mark.nightly
def test_a_server_killed_between_commit_and_delivery_delivers_after_its_restart(
    tmp_path: Path, receiver: Receiver
) -> None:
    """Killed while the receiver has the event and has not answered: told again, with its id."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with closing(opening.open_repository(url)) as repository:
        bench = Bench(Scenario(repository))
        bench.add(receiver.url)
        receiver.delay = 30.0
        bench.reserve(0.6)
        server = Server(url, tmp_path)
        try:
            wait_for(receiver, 1)
            server.kill()
            bench.reserve(0.3)
            receiver.delay = 0.0
            bench.make_due()  # the claim of the killed server ends after a minute
            server.start()
            wait_for(receiver, 3)
        finally:
            server.kill()
    assert [event["share"] for event in receiver.events] == [0.5, 0.5, 0.8]
    assert receiver.events[0] == receiver.events[1]


def test_webhooks_on_the_command_line(commands: Commands, receiver: Receiver) -> None:
    commands.make("db upgrade")
    secret = commands.make(f"webhook add {receiver.url} --share 0.8 --share 0.3")
    assert secret.startswith("whsec_")
    (row,) = commands.json("webhook list")
    assert (row["shares"], row["dataset"], row["waiting"]) == ([0.3, 0.8], None, 0)
    assert "secret" not in row
    assert secret not in commands.make("webhook list")
    assert commands.make("webhook test", row["id"]) == f"{receiver.url} accepted the event"
    assert receiver.events[0]["type"] == "webhook.test"
    receiver.status = 500
    status, said = commands("webhook test", row["id"])
    assert (status, "the answer is 500" in said) == (1, True)
    commands.make("keys create --scope run")
    assert commands.json("webhook list")[0]["waiting"] == 1
    assert commands.make("webhook remove", row["id"]) == f"removed {row['id']}"
    assert commands.json("webhook list") == []
    commands.make("series create sales -E 1 -d 1e-9")
    commands.make(f"webhook add {receiver.url} --dataset sales")
    assert [row["dataset"] for row in commands.json("webhook list")] == ["sales"]
    for wrong in (
        "add nowhere",
        f"add {receiver.url} --share 1.5",
        f"add {receiver.url} --dataset none",
        "remove none",
        "test none",
    ):
        assert commands(f"webhook {wrong}")[0] == 2, wrong


@ON_SQLITE
def test_metrics_show_passed_shares_and_waiting_events(url: str) -> None:
    with serving(url, budget_shares="0.25, 0.9") as found:
        bench = Bench(Scenario(found.repository))
        bench.add("http://127.0.0.1:9")
        bench.reserve(0.6)
        shown = found.caller(Scope.MONITOR).read("/metrics")
    assert 'accountant_budget_share_passed{dataset="d",share="0.25"} 1.0' in shown
    assert 'accountant_budget_share_passed{dataset="d",share="0.9"} 0.0' in shown
    assert "accountant_webhook_events_waiting 1.0" in shown
    for wrong in ("half", "0.5,2", "0", "nan"):
        with pytest.raises(ValueError, match="shares"):
            Settings(budget_shares=wrong)
