"""Operating the service: metrics, the log, limits, settings and traces."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from accountant_service.api.shared_call import SharedCall
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.webhook_delivery import WebhookDelivery
from accountant_service.operations import logs, tracing
from accountant_service.operations.problem import Problem
from accountant_service.operations.rate_limit import RateLimiter
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from scripts.page_parts import DOCS
from tests.support.databases import private_server

RUN = {"kind": "dp_sgd", "noise_multiplier": 1.0625, "sample_rate": 0.015625, "steps": 64}
QUESTION = {"mechanism": RUN, "delta": 1e-5}
BUDGET = {"epsilon": 2.0, "delta": 1e-5}
PAGE = (DOCS / "operations.md").read_text()


def service(folder: Path, **settings: Any) -> FastAPI:
    url = f"sqlite:///{folder}/ledger.db"
    return create_app(Settings(**{"database_url": url} | settings))


@pytest.fixture(autouse=True)
def no_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread looks for events to post: connections in use are those of requests."""
    monkeypatch.setattr(WebhookDelivery, "start", lambda _: None)


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return service(tmp_path)


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def bearer(app: FastAPI, *scopes: Scope, datasets: tuple[str, ...] | None = None) -> dict[str, str]:
    token, _ = app.state.keys.create(scopes, datasets=datasets)
    return {"Authorization": f"Bearer {token}"}


def write(http: TestClient, key: dict[str, str], path: str, body: Any, once: str) -> Any:
    answer = http.post(path, json=body, headers=key | {"Idempotency-Key": once})
    assert answer.status_code < 300, answer.text
    return answer.json()


def scenario(http: TestClient, key: dict[str, str]) -> None:
    """A dataset, two grants one of which is repeated, a refusal; a question asked twice."""
    write(http, key, "/v1/datasets", {"name": "d", "size": 9, "budget": BUDGET}, "1")
    plan = {"mechanism": RUN, "purpose": "a-purpose-to-look-for"}
    run = write(http, key, "/v1/datasets/d/reservations", plan, "2")["id"]
    for sequence, once in ((0, "3"), (8, "4"), (8, "4")):
        grants = f"/v1/reservations/{run}/grants"
        write(http, key, grants, {"steps": 8, "sequence": sequence}, once)
    again = {"steps": 8, "sequence": 0}
    refused = http.post(grants, json=again, headers=key | {"Idempotency-Key": "5"})
    assert refused.json()["code"] == "stale-sequence"
    for _ in range(2):
        assert http.post("/v1/epsilon", json=QUESTION).status_code == 200
    assert http.get("/nothing?secret=query-to-look-for").status_code == 404


def samples(text: str) -> dict[tuple[str, frozenset[str]], float]:
    """Each sample by its name and the values of its labels."""
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# --- metrics


@pytest.mark.slow
def test_metrics_are_those_of_the_page_and_count_requests_and_charges(
    app: FastAPI, http: TestClient
) -> None:
    key = bearer(app, Scope.ADMIN)
    scenario(http, key)
    text = http.get("/metrics", headers=key).text
    found = samples(text)

    def value(name: str, *labels: str) -> float:
        return found["accountant_" + name, frozenset(labels)]

    grants = "/v1/reservations/{identifier}/grants"
    assert value("request_seconds_count", "POST", grants, "2xx") == 3
    assert value("request_seconds_count", "POST", grants, "4xx") == 1
    assert value("request_seconds_count", "GET", "unknown", "4xx") == 1
    assert value("ledger_writes_total", "grant") == 2, "a repeat is no grant"
    assert value("steps_granted_total") == 16
    assert value("refusals_total", "stale-sequence") == 1
    assert value("computation_seconds_count", "/v1/epsilon") == 1
    assert value("cache_hits_total", "/v1/epsilon") == 1
    assert value("database_connections_in_use") == 0
    assert value("ledger_up") == 1
    assert value("budget_epsilon", "d") == 2
    assert 0 < value("budget_taken_epsilon", "d") < 2
    assert 0 < value("budget_remaining_ratio", "d") < 1
    assert value("budget_remaining_reference_steps", "d") > 0
    printed = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    assert printed == set(re.findall(r"^\| `(accountant_\w+)`", PAGE, re.M)), "the page has each"
    require_budgets_for_those_who_may_see(app, http)


def require_budgets_for_those_who_may_see(app: FastAPI, http: TestClient) -> None:
    """Require that metrics have budgets only for keys that may see them."""
    shown = 'accountant_budget_epsilon{dataset="d"} 2.0'
    monitor = bearer(app, Scope.MONITOR)
    assert shown in http.get("/metrics", headers=monitor).text
    assert 'dataset="' not in http.get("/metrics").text
    other = bearer(app, Scope.OWNER, datasets=("other",))
    assert 'dataset="' not in http.get("/metrics", headers=other).text
    assert http.get("/metrics", headers={"Authorization": "Bearer pa_no_no"}).status_code == 401


@pytest.mark.slow
def test_a_scrape_does_not_wait_for_a_database_that_is_away() -> None:
    with private_server() as postgresql:
        app = create_app(Settings(database_url=postgresql.url))
        with TestClient(app) as http:
            assert "accountant_ledger_up 1.0" in http.get("/metrics").text
            postgresql.crash()
            begun = time.monotonic()
            assert "accountant_ledger_up 0.0" in http.get("/metrics").text
            assert time.monotonic() - begun < 5
            postgresql.start()
            text = http.get("/metrics").text
            assert "accountant_ledger_up 1.0" in text
            assert "accountant_database_connections_in_use 0.0" in text


def test_who_asks_at_the_same_time_shares_an_answer_that_is_not_older_than_the_question() -> None:
    begun: list[int] = []

    async def count() -> int:
        begun.append(len(begun))
        at = len(begun)
        await asyncio.sleep(0.01)
        if at == 3:
            raise RuntimeError("the third fails")
        return at

    async def ask() -> list[Any]:
        shared = SharedCall(count)
        first = asyncio.ensure_future(shared())
        await asyncio.sleep(0.005)
        later = await asyncio.gather(*(shared() for _ in range(50)))
        failing = await asyncio.gather(*(shared() for _ in range(9)), return_exceptions=True)
        return [await first, set(later), {str(each) for each in failing}, await shared()]

    assert asyncio.run(ask()) == [1, {2}, {"the third fails"}, 4]


# --- the log


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    logs.configure("info")
    stream = io.StringIO()
    configured = root.handlers[0]
    assert isinstance(configured, logging.StreamHandler)
    configured.setStream(stream)
    logging.getLogger("httpx2").setLevel("WARNING")  # the test's own client
    yield stream
    root.handlers = handlers
    root.setLevel(level)


@pytest.mark.slow
def test_the_log_contains_each_request_and_no_secret(
    app: FastAPI, http: TestClient, log: io.StringIO
) -> None:
    key = bearer(app, Scope.ADMIN)
    scenario(http, key)
    text = log.getvalue()
    lines = [json.loads(line) for line in text.splitlines()]
    requests = [line for line in lines if line["logger"] == "accountant_service.access"]
    assert len(requests) == 9
    assert {"request_id", "method", "route", "status", "milliseconds", "timestamp"} <= set(
        requests[0]
    )
    assert (requests[0]["route"], requests[0]["status"]) == ("/v1/datasets", 201)
    assert [line["code"] for line in requests if line.get("code")] == [
        "stale-sequence",
        "not-found",
    ]
    token = key["Authorization"].removeprefix("Bearer ")
    for secret in (token, token[-20:], "to-look-for", "1.0625", "0.015625", "noise_multiplier"):
        assert secret not in text


def test_a_fault_is_logged_without_what_its_message_quotes(
    app: FastAPI, http: TestClient, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("quotes a-secret")

    with monkeypatch.context() as patch:
        patch.setattr(app.state.repository, "ping", broken)
        answer = http.get("/readyz", headers={"X-Request-ID": "mine-1"})
    assert answer.json()["code"] == "internal-error"
    assert answer.headers["X-Request-ID"] == "mine-1"
    text = log.getvalue()
    assert "a-secret" not in text
    faults = [line for line in map(json.loads, text.splitlines()) if "exception" in line]
    assert faults[0]["exception"] == "RuntimeError"
    assert any(frame.endswith(" broken") for frame in faults[0]["frames"])
    assert 'accountant_refusals_total{code="internal-error"} 1.0' in http.get("/metrics").text


@pytest.mark.slow
def test_a_request_keeps_its_own_identifier_if_it_is_one(http: TestClient) -> None:
    assert http.get("/healthz", headers={"X-Request-ID": "a.B-3_"}).headers["X-Request-ID"] == (
        "a.B-3_"
    )
    for bad in ("", "a b", "x" * 65, '"},{"forged":"'):
        given = http.get("/healthz", headers={"X-Request-ID": bad}).headers["X-Request-ID"]
        assert re.fullmatch("[0-9a-f]{32}", given)


# --- limits


def test_a_burst_passes_and_then_the_rate() -> None:
    now = 0.0
    limiter = RateLimiter(rate=2, burst=3, clock=lambda: now)
    for _ in range(3):
        limiter.admit("one")
    with pytest.raises(Problem) as refused:
        limiter.admit("one")
    assert refused.value.headers == {"Retry-After": "1"}
    limiter.admit("another")
    now = 0.5
    limiter.admit("one")
    with pytest.raises(Problem):
        limiter.admit("one")


def test_an_address_beyond_its_rate_limit_gets_retry_after(tmp_path: Path) -> None:
    with TestClient(service(tmp_path, rate_limit=0.5, rate_burst=2)) as http:
        answers = [http.get("/v1/methods") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].json()["code"] == "too-many-requests"
        assert 1 <= int(answers[2].headers["Retry-After"]) <= 2
        assert answers[2].headers["X-Request-ID"]
        assert {http.get("/healthz").status_code for _ in range(9)} == {200}, "probes are let in"
        assert 'refusals_total{code="too-many-requests"} 1.0' in http.get("/metrics").text


def test_answers_to_an_address_without_a_key_wait_for_their_turn(tmp_path: Path) -> None:
    app = service(tmp_path, keyless_rate=5)
    key = bearer(app, Scope.ADMIN)

    def seconds(path: str, headers: dict[str, str] | None = None) -> float:
        begun = time.monotonic()
        for _ in range(4):
            http.get(path, headers=headers)
        return time.monotonic() - begun

    with TestClient(app) as http:
        assert seconds("/v1/methods") + seconds("/v1/methods") < 0.4, "the first ten come at once"
        assert seconds("/v1/methods") >= 0.3
        assert seconds("/v1/datasets", {"Authorization": "Bearer no-key"}) >= 0.7
        assert seconds("/healthz") >= 0.7, "the fourth waits for the others"
        http.get("/v1/datasets", headers=key)
        assert seconds("/v1/datasets", key) < 0.15, "no key waits that was valid lately"


def test_a_key_is_limited_wherever_it_is_used(tmp_path: Path) -> None:
    app = service(tmp_path, rate_limit=0.01, rate_burst=2)
    key = bearer(app, Scope.ADMIN)
    codes = []
    for address in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
        with TestClient(app, client=(address, 1)) as http:
            codes.append(http.get("/v1/datasets", headers=key).status_code)
    assert codes == [200, 200, 429]


# --- settings


def test_a_secret_may_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("a b@c\n")
    monkeypatch.setenv("ACCOUNTANT_DATABASE_PASSWORD_FILE", str(tmp_path / "password"))
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", "postgresql+psycopg://me@host/ledger")
    settings = Settings()
    assert settings.database == "postgresql+psycopg://me:a b%40c@host/ledger"
    assert "b@c" not in repr(settings)


def test_a_wrong_setting_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCOUNTANT_RATE_BURST", "a-secret-in-the-wrong-place")
    with pytest.raises(ValidationError) as wrong:
        Settings()
    assert "a-secret" not in str(wrong.value)


@pytest.mark.parametrize("text", ["*", "proxy.example", "10.0.0.1/8", "127.0.0.1 10.0.0.1"])
def test_trusted_proxies_must_be_addresses(text: str) -> None:
    with pytest.raises(ValidationError, match="must be IP addresses or networks") as wrong:
        Settings(trusted_proxies=text)
    assert text not in str(wrong.value)


def test_no_proxy_is_trusted_by_default() -> None:
    assert Settings().trusted_proxies == ""
    assert Settings(trusted_proxies=" 10.0.0.2 ,::1, 10.0.0.0/8,").trusted_proxies == (
        "10.0.0.2,::1,10.0.0.0/8"
    )


# --- traces


@pytest.mark.slow
def test_requests_and_statements_are_traced_without_their_values(tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    app = service(tmp_path)
    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    genuine = sqlalchemy.create_engine
    stop = tracing.install(app, app.state.repository.engine, provider)
    try:
        key = bearer(app, Scope.ADMIN)
        with TestClient(app) as http:
            scenario(http, key)
            http.get("/healthz")
    finally:
        stop()
    assert sqlalchemy.create_engine is genuine, "later engines are not traced"
    spans = exporter.get_finished_spans()
    names = {span.name for span in spans}
    assert "POST /v1/reservations/{identifier}/grants" in names
    assert not any("healthz" in name for name in names)
    assert any("db.statement" in (span.attributes or {}) for span in spans)
    told = " ".join(span.to_json() for span in spans)
    assert key["Authorization"].removeprefix("Bearer ") not in told
    assert "a-purpose-to-look-for" not in told


@pytest.mark.slow
def test_spans_are_sent_to_the_address_in_the_standard_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with TestClient(service(tmp_path)) as http:
            http.get("/v1/methods")
        collector.shutdown()
    assert {path for path, _ in received} == {"/v1/traces"}, "what waited was sent at the end"
    assert any(b"GET /v1/methods" in body for _, body in received)
    assert any(b"privacy-accountant" in body for _, body in received)
