"""Tests of what CONTRIBUTING's examples add; they run in the copy that has the examples.

`test_contributing.py` starts them, beside the conformance tests of the added method and optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from accountant_service import cli, epsilon
from accountant_service.errors import InvalidArgumentError
from accountant_service.ledger import exporting
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.database import open_repository
from accountant_service.ledger.exporting import EntryQuery
from accountant_service.ledger.repair import repair
from accountant_service.ledger.verification import verify, verify_export
from accountant_service.mechanisms import from_json
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.training_bench import Bench
from training_client.client import AccountingService
from training_client.client.arguments import EpsilonArguments
from training_client.errors import ServiceRefusedError

KIND = {"kind": "concentrated_gaussian", "rho": 0.5}
STEP = {"kind": "concentrated_gaussian", "rho": 0.001}
RUN = {"kind": "repeated", "count": 5, "mechanism": STEP}
METHOD = "unsampled_gaussian"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The database of the ledger."""
    return f"sqlite:///{tmp_path_factory.mktemp('ledger')}/ledger.db"


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[TestClient]:
    """The application on a ledger of its own."""
    with TestClient(create_app(Settings(database_url=url))) as client:
        yield client


@pytest.fixture
def key(api: TestClient) -> dict[str, str]:
    """The header of a key that may do everything."""
    token, _ = api.app.state.keys.create([Scope.ADMIN], "lab")  # type: ignore[attr-defined]
    return {"Authorization": f"Bearer {token}"}


def write(api: TestClient, key: dict[str, str], path: str, body: Any) -> Any:
    """Make a write, and return the answer."""
    answer = api.post(f"/v1{path}", json=body, headers=key | {"Idempotency-Key": path})
    assert answer.is_success, answer.text
    return answer.json()


def ask(*words: str) -> Any:
    """Return the JSON answer of a command."""
    done = CliRunner().invoke(cli.app, [*words, "--json"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_kind_and_the_method_are_accounted_for(api: TestClient) -> None:
    """As the Gaussian release of σ = 1 that this one equals."""
    described = ("--mechanism", json.dumps(KIND), "-d", "1e-5")
    equal = ask(
        "epsilon", "--mechanism", '{"kind": "gaussian", "noise_multiplier": 1}', "-d", "1e-5"
    )
    for method in ("pld", METHOD):
        body = {"mechanism": KIND, "delta": 1e-5, "method": method}
        served = api.post("/v1/epsilon", json=body).json()
        assert served["status"] == "proven"
        assert served["epsilon"] == pytest.approx(equal["epsilon"], rel=1e-8)
        assert ask("epsilon", *described, "--method", method) == served
    compared = {each["method"]: each for each in ask("compare", *described)["guarantees"]}
    assert compared[METHOD]["epsilon"] == pytest.approx(compared["pld"]["epsilon"], rel=1e-8)
    assert (
        METHOD in CliRunner().invoke(cli.app, ["epsilon", "--help"], env={"COLUMNS": "200"}).stdout
    )


def test_the_kind_is_known_at_every_edge(api: TestClient) -> None:
    """Schema, faults, solver, Python function, form and words: from one class."""
    schemas = api.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ConcentratedGaussianMechanism"]["examples"] == [KIND]
    assert schemas["Mechanism"]["discriminator"]["mapping"].keys() >= {KIND["kind"]}
    wrong = api.post("/v1/epsilon", json={"mechanism": KIND | {"rho": -1}, "delta": 1e-5})
    assert wrong.status_code == 422
    assert [each["pointer"] for each in wrong.json()["errors"]] == ["/mechanism/rho"]
    target = {"parameter": "/rho", "epsilon": 2.0, "delta": 1e-5}
    solved = api.post("/v1/solve", json={"mechanism": KIND, **target}).json()
    assert epsilon(delta=1e-5, mechanism=solved["mechanism"]).epsilon <= 2.0
    page = api.get("/", params={"release_kind": KIND["kind"], "delta": "x"}).text
    assert "Concentrated Gaussian" in page
    assert 'name="release_rho"' in page
    assert from_json(KIND).describe_step() == "concentrated gaussian, rho = 0.5"


def test_a_run_of_the_kind_is_quoted_reserved_granted_and_certified(
    api: TestClient, key: dict[str, str], tmp_path: Path
) -> None:
    budget = {"epsilon": 3.0, "delta": 1e-5}
    write(api, key, "/datasets", {"name": "d", "size": 1000, "budget": budget})
    assert write(api, key, "/datasets/d/quotes", {"mechanism": RUN})["fits"]
    reserved = write(api, key, "/datasets/d/reservations", {"mechanism": RUN})
    run = f"/reservations/{reserved['id']}"
    granted = write(api, key, f"{run}/grants", {"steps": 2, "sequence": 0})
    assert granted["steps_granted"] == 2
    write(api, key, f"{run}/commit", {})
    document = api.get(f"/v1{run}/certificate", headers=key).json()
    assert document["mechanism"] == RUN
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(document))
    assert ask("verify", str(file), "--public-key", document["public_key"])["faults"] == []


def test_the_optimizer_trains(
    api: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(api, tmp_path / "run", monkeypatch)
    bench.give(3.0)
    done = bench.run("--dataset", bench.name, "--optimizer", "dp_adamax")
    assert done.exit_code == 0, done.output
    assert bench.read("privacy.json")["model_sha256"] == bench.digest()


def test_the_page_shows_the_methods(api: TestClient) -> None:
    shown = api.get("/methods")
    assert shown.status_code == 200
    assert "Gaussian mechanism without sampling" in shown.text


def test_the_field_is_known_at_every_edge(api: TestClient) -> None:
    """Schema, limits, command, function, page and typed client, from one description."""
    asked: dict[str, Any] = {"mechanism": KIND, "delta": 1e-5}
    schema = api.get("/openapi.json").json()["components"]["schemas"]["EpsilonRequest"]
    assert schema["properties"]["purpose"]["description"].startswith("what the answer is for")
    served = api.post("/v1/epsilon", json=asked | {"purpose": "a paper"}).json()
    assert served == api.post("/v1/epsilon", json=asked).json()
    assert api.post("/v1/delta", json={"purpose": "x" * 101}).status_code == 422
    described = ("--mechanism", json.dumps(KIND), "-d", "1e-5")
    assert ask("epsilon", *described, "--purpose", "a paper") == served
    shown = CliRunner().invoke(cli.app, ["compare", "--help"], env={"COLUMNS": "200"}).stdout
    assert "What the answer is for; it changes nothing." in shown
    assert epsilon(**asked, purpose="a paper").epsilon == served["epsilon"]
    with pytest.raises(InvalidArgumentError, match="purpose"):
        epsilon(**asked, purpose="x" * 101)
    page = api.get("/", params={"purpose": "a paper"}).text
    assert "what the answer is for; may be empty" in page
    assert "≤ ε ≤" in page
    assert "Purpose must have at most 100" in api.get("/", params={"purpose": "x" * 101}).text
    assert "purpose: what the answer is for" in (EpsilonArguments.__doc__ or "")

    def send(request: httpx.Request) -> httpx.Response:
        """Answer a request by the application."""
        answer = api.request(request.method, request.url.path, json=json.loads(request.content))
        return httpx.Response(answer.status_code, content=answer.content)

    with AccountingService("http://test", transport=httpx.MockTransport(send)) as service:
        assert service.epsilon(**asked, purpose="a paper").epsilon == served["epsilon"]
        with pytest.raises(ServiceRefusedError, match="purpose"):
            service.epsilon(**asked, purpose="x" * 101)


def test_the_column_is_recorded_exported_verified_and_repaired(
    api: TestClient, key: dict[str, str], url: str
) -> None:
    """The row and the entry state it, and a row that was altered is found and mended."""
    budget = {"epsilon": 3.0, "delta": 1e-5}
    write(api, key, "/datasets", {"name": "named", "size": 1000, "budget": budget})
    run = write(api, key, "/datasets/named/reservations", {"mechanism": RUN})["id"]
    write(api, key, f"/reservations/{run}/commit", {})
    with closing(open_repository(url)) as repository:

        def read_names() -> list[str]:
            """Return what the row states, and what the entries state."""
            with repository.reading() as reading:
                entries = list(exporting.iterate_entries(reading, EntryQuery(("named",))))
                found: Any = reading.find_reservation(run)
            lines = [json.dumps(entry.to_json()) for entry in entries]
            assert verify_export(lines).faults == []
            return [found.key_name, *(each.fields.get("key_name") for each in entries)]

        assert read_names() == ["lab", None, "lab", None]
        assert verify(repository).faults == []
        with repository.transaction() as transaction:
            transaction.connection.exec_driver_sql("UPDATE reservation SET key_name = 'other'")
        assert any("key_name='other'" in fault for fault in verify(repository).faults)
        assert repair(repository).left == []
        assert read_names()[0] == "lab"
        assert verify(repository).faults == []
