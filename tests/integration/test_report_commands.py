"""Datasets, runs and reports on the command line: in the database, and through the service."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.disclosure.facts import Facts
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.database import open_repository
from accountant_service.ledger.verification import verify
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.helpers import nightly
from tests.support.server import Server

Command = Callable[..., str]
PLAN = ("-b", "10", "-s", "20", "-t", "30")


def run_command(*words: str) -> str:
    """Run a command that succeeds, and return its output."""
    found = CliRunner().invoke(cli.app, list(words), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def command(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    """Runs commands in a new ledger, in a folder of their own."""
    url = f"sqlite:///{tmp_path}/accountant.db"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", url)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("ACCOUNTANT_API_KEY", raising=False)
    if getattr(request, "param", "database") == "database":
        yield run_command
        return
    token, _ = Keys(open_repository(url)).create([Scope.OWNER, Scope.RUN], "me", None, None, None)
    server = Server(url, tmp_path)
    try:
        server.wait()
        monkeypatch.setenv("ACCOUNTANT_API_KEY", token)
        monkeypatch.setenv("ACCOUNTANT_SERVICE", f"http://127.0.0.1:{server.port}")
        yield run_command
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["database", "service"], indirect=True)
def test_a_run_from_a_new_dataset_to_its_reports(command: Command, tmp_path: Path) -> None:
    created = command("dataset", "create", "people", "-n", "1000", "-E", "1", "-d", "1e-5",
                      "--unit", "person")  # fmt: skip
    assert "created people: 1000 records, privacy unit person, ε = 1, δ = 1e-5" in created
    quoted = command("dataset", "quote", "people", *PLAN)
    assert quoted.startswith("fits; it takes ")
    run = command("run", "reserve", "people", *PLAN, "--purpose", "first").strip()
    assert "steps: 5 of 30 granted" in command("run", "grant", run, "-t", "5")
    assert "steps: 12 of 30 granted" in command("run", "grant", run, "-t", "7")
    assert "lease ends: 20" in command("run", "renew", run, "--lease-seconds", "7200")
    Path("model.pt").write_bytes(b"model")
    assert "committed" in command("run", "commit", run, "--clip-norm", "1", "--model", "model.pt")
    assert run in command("run", "list", "people")
    assert "first" in command("run", "show", run)
    command("run", "certificate", run, "-o", "certificate.json")
    document = json.loads(Path("certificate.json").read_text())
    digest = hashlib.sha256(b"model").hexdigest()
    assert document["declared"] == {"clip_norm": 1.0, "model_sha256": digest}
    assert "\nvalid, if that key is the issuer's\n" in command("verify", "certificate.json")
    assert_verified_for_the_model_alone(command, digest)
    for subject in (["certificate.json"], ["run", run], ["dataset", "people"]):
        command("report", *subject, "-o", "report.yaml")
        assert yaml.safe_load(Path("report.yaml").read_text())["tier"] == 3
        card = command("report", *subject, "-f", "model-card")
        assert "- **Records**: 1000" in card
    assert digest in command("report", "certificate.json")
    facts = Facts.model_validate_json(command("report", "dataset", "people", "-f", "json"))
    assert [(each.purpose, each.steps_granted) for each in facts.runs] == [("first", 12)]
    assert "│ people" in command("dataset", "list")
    assert "12 reference steps" in command("dataset", "show", "people")
    report = verify(open_repository(f"sqlite:///{tmp_path}/accountant.db"))
    assert (report.faults, report.datasets) == ([], 1)


def assert_verified_for_the_model_alone(command: Command, digest: str) -> None:
    """`verify --model` accepts the committed model's file, and no other file or certificate."""
    told = command("verify", "certificate.json", "--model", "model.pt")
    assert told.endswith(
        f"it is about this model: SHA-256 {digest}\nvalid, if that key is the issuer's\n"
    )
    as_json = json.loads(command("verify", "certificate.json", "--model", "model.pt", "--json"))
    assert (as_json["faults"], as_json["model_sha256"]) == ([], digest)
    Path("other.pt").write_bytes(b"modem")
    other = hashlib.sha256(b"modem").hexdigest()
    refused = CliRunner().invoke(cli.app, ["verify", "certificate.json", "--model", "other.pt"])
    assert refused.exit_code == 1
    assert (
        f"it is about another model: it names SHA-256 {digest}, this is {other}" in refused.stderr
    )
    assert refused.stdout.endswith("not valid\n")
    assert "it is about this model" not in refused.stdout
    document = json.loads(Path("certificate.json").read_text())
    document["declared"]["model_sha256"] = other
    Path("forged.json").write_text(json.dumps(document))
    forged = CliRunner().invoke(cli.app, ["verify", "forged.json", "--model", "other.pt"])
    assert forged.exit_code == 1
    assert "the signature does not match" in forged.stderr
    assert "it is about this model" not in forged.stdout


@pytest.mark.slow
def test_a_delta_too_large_for_the_dataset_is_warned_about(command: Command) -> None:
    created = command(
        "dataset", "create", "few", "-n", "10", "-E", "1", "-d", "0.1", "--accept-weak"
    )
    assert "warning: δ = 0.1 is not below 1/10" in created


@pytest.mark.slow
def test_a_run_ends_once_and_an_open_one_has_no_report(command: Command) -> None:
    command("dataset", "create", "p", "-n", "1000", "-E", "1", "-d", "1e-5")
    run = command("run", "reserve", "p", *PLAN).strip()
    refused = CliRunner().invoke(cli.app, ["report", "run", run])
    assert refused.exit_code == 2
    assert "commit or release the reservation first" in refused.stderr
    assert "released" in command("run", "release", run)
    again = CliRunner().invoke(cli.app, ["run", "commit", run])
    assert (again.exit_code, "reservation-closed" in again.stderr) == (2, True)


@pytest.fixture
def visitor(tmp_path: Path) -> Iterator[tuple[TestClient, dict[str, str]]]:
    """A client with a key, and a dataset."""
    with TestClient(create_app(Settings(database_url=f"sqlite:///{tmp_path}/l.db"))) as client:
        token = client.app.state.keys.create([Scope.ADMIN])[0]  # type: ignore[attr-defined]
        headers = {"Authorization": f"Bearer {token}"}
        body = {"name": "p", "size": 100, "budget": {"epsilon": 1, "delta": 1e-5}}
        made = client.post("/v1/datasets", json=body, headers=headers | {"Idempotency-Key": "1"})
        assert made.status_code == 201
        yield client, headers


@pytest.mark.slow
def test_the_service_answers_with_a_report_in_each_format(
    visitor: tuple[TestClient, dict[str, str]],
) -> None:
    client, headers = visitor
    for wanted, kind, begins in (
        ("json", "application/json", b"{"),
        ("html", "text/html", b"<!doctype html>"),
        ("pdf", "application/pdf", b"%PDF-"),
        ("registry", "application/yaml", b"url_slug: releases_from_p"),
        ("model-card", "text/markdown", b"## Privacy"),
        ("nist", "text/markdown", b"| Level |"),
    ):
        answer = client.get(f"/v1/datasets/p/report?format={wanted}", headers=headers)
        assert (answer.status_code, answer.headers["Content-Type"].split(";")[0]) == (200, kind)
        assert answer.content.lstrip().startswith(begins)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


@pytest.mark.slow
def test_facts_that_a_program_declares_are_in_the_record_and_checked(
    visitor: tuple[TestClient, dict[str, str]],
) -> None:
    client, headers = visitor
    plan = {"kind": "dp_sgd", "noise_multiplier": 20.0, "sample_rate": 0.01, "steps": 3}
    made = client.post(
        "/v1/datasets/p/reservations",
        json={"mechanism": plan},
        headers=headers | {"Idempotency-Key": "2"},
    ).json()
    path = f"/v1/reservations/{made['id']}/commit"
    stated = {"clip_norm": 0.5, "model_sha256": "ab" * 32}
    for _ in range(2):  # a retry gets the same answer
        ended = client.post(path, json=stated, headers=headers | {"Idempotency-Key": "4"})
        assert ended.status_code == 200
    last = client.get("/v1/datasets/p/entries", headers=headers).json()["items"][-1]
    assert (last["kind"], last["declared"]) == ("commit", stated)
    certificate = client.get(f"/v1/reservations/{made['id']}/certificate", headers=headers).json()
    assert certificate["declared"] == stated
    assert verify(client.app.state.repository).faults == []  # type: ignore[attr-defined]


@pytest.mark.nightly
@pytest.mark.parametrize("encoding", ["ascii", nightly("latin-1"), "utf-8"])
def test_output_is_possible_in_every_encoding(encoding: str, tmp_path: Path) -> None:
    code = "from accountant_service.cli import app; app()"
    arguments = ["compare", "-q", ".01", "-s", "1.1", "-t", "1000", "-d", "1e-5"]
    plan = ["plan", "-E", "2", "-d", "1e-5", "-n", "60000", "-e", "5", "-b", "256", "--points", "2"]
    for words in (arguments, ["epsilon", *arguments[1:]], ["epsilon", "--help"], plan):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            check=True,
            cwd=tmp_path,
            env={"PYTHONIOENCODING": encoding, "COLUMNS": "100", "PYTHONPATH": ":".join(sys.path)},
        )
        text = done.stdout.decode(encoding)
        assert ("ε" in text) == (encoding == "utf-8")
        assert "≤" in text or "epsilon" in text or words is plan
        assert "?" not in text
