"""The ledger through HTTP, on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import QueuePool, create_engine
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from accountant_service import calculator, cli, mechanisms
from accountant_service.api.ledger_views import encode_answer
from accountant_service.app import create_app
from accountant_service.computation_processes import ProcessPool
from accountant_service.errors import NoFiniteEpsilonError, TooExpensiveError
from accountant_service.ledger import certificate, hash_chain, plans
from accountant_service.ledger import database as opening
from accountant_service.ledger import repository as storage
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.errors import ChargeUndecidedError, DatabaseAwayError
from accountant_service.ledger.filters import reference
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.rules import Dataset, Reservation
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.settings import Settings
from tests.support.databases import database

RUN = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 60}
BUDGET = {"epsilon": 3.0, "delta": 1e-5}
FIXTURES = Path(__file__).parents[1] / "contract" / "fixtures"
SHUFFLED = RUN | {"sampling": "shuffled"}
BAD = "invalid-request"
NO_STEPS = {"share": 0.0, "reference_steps": 0, "slack": 0.0}
# steps without sampling: exchanges between these are decided fast
EQUAL = {"kind": "dp_sgd", "noise_multiplier": 20.0, "sample_rate": 1.0, "sampling": "none",
         "steps": 12}  # fmt: skip
OTHER = EQUAL | {"noise_multiplier": 30.0}
Json = dict[str, Any]


class Caller:
    """Someone with a key."""

    def __init__(self, http: TestClient, key: str) -> None:
        self.http, self.key = http, key

    def post(self, path: str, body: Any = None, repeat: str | None = None) -> tuple[int, Json]:
        headers = {
            "Authorization": f"Bearer {self.key}",
            "Idempotency-Key": repeat or uuid.uuid4().hex,
        }
        answer = self.http.post(path, json={} if body is None else body, headers=headers)
        return answer.status_code, answer.json()

    def get(self, path: str) -> tuple[int, Json]:
        answer = self.http.get(path, headers={"Authorization": f"Bearer {self.key}"})
        return answer.status_code, answer.json()

    def dataset(self, name: str, budget: Json = BUDGET, **fields: Any) -> Json:
        body = {"name": name, "size": 60_000, "budget": budget, **fields}
        status, found = self.post("/v1/datasets", body)
        assert status == 201, found
        return found

    def reserve(self, name: str, run: Json = RUN, **fields: Any) -> Json:
        status, found = self.post(f"/v1/datasets/{name}/reservations", {"mechanism": run, **fields})
        assert status == 201, found
        return found

    def grant(self, run: str, steps: int, sequence: int) -> tuple[int, Json]:
        body = {"steps": steps, "sequence": sequence}
        return self.post(f"/v1/reservations/{run}/grants", body)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with database(request.param, tmp_path_factory.mktemp("ledger")) as found:
        yield found


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[TestClient]:
    app = create_app(Settings(database_url=url))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def keys(http: TestClient) -> Keys:
    found: Keys = http.app.state.keys  # type: ignore[attr-defined]
    return found


@pytest.fixture(scope="module")
def admin(http: TestClient, keys: Keys) -> Caller:
    return Caller(http, keys.create([Scope.ADMIN])[0])


@pytest.fixture
def repository(http: TestClient) -> Repository:
    found: Repository = http.app.state.repository  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("kind", "unit"),
    [
        pytest.param("reference", "reference_steps", marks=pytest.mark.slow),
        ("renyi", "micronats"),
    ],
)
def test_the_life_of_a_run(kind: str, unit: str, admin: Caller, repository: Repository) -> None:
    name = f"life-{kind}"
    made = admin.dataset(name, filter=kind, planned_mechanism=RUN)
    nothing = {
        "epsilon": 0.0,
        **({"share": 0.0, "micronats": 0} if unit == "micronats" else NO_STEPS),
    }
    assert made["spent"] == nothing
    assert made["remaining"]["epsilon"] == BUDGET["epsilon"]
    status, quote = admin.post(f"/v1/datasets/{name}/quotes", {"mechanism": RUN})
    assert (status, quote["fits"]) == (200, True)
    assert quote["guarantee"]["scope"] == "fixed_plan"
    assert quote["affordable"]["steps"] > 60
    run = admin.reserve(name, purpose="a first try")
    assert (run["state"], run["steps_reserved"], run["steps_granted"]) == ("open", 60, 0)
    status, run = admin.grant(run["id"], 20, 0)
    assert (status, run["steps_granted"]) == (200, 20)
    held = admin.get(f"/v1/datasets/{name}")[1]
    assert held["held"][unit] > 0
    status, problem = admin.grant(run["id"], 20, 0)
    assert (status, problem["code"]) == (409, "stale-sequence")
    status, problem = admin.grant(run["id"], 41, 20)
    assert (status, problem["code"]) == (409, "budget-exhausted")
    for _ in range(2):  # a repeat is answered alike
        status, run = admin.post(f"/v1/reservations/{run['id']}/commit")
        assert (status, run["state"]) == (200, "committed")
    status, problem = admin.post(f"/v1/reservations/{run['id']}/release")
    assert (status, problem["code"]) == (409, "reservation-closed")
    status, problem = admin.grant(run["id"], 1, 20)
    assert (status, problem["code"]) == (409, "reservation-closed")
    after = admin.get(f"/v1/datasets/{name}")[1]
    assert after["held"][unit] == 0
    assert after["spent"][unit] == held["spent"][unit] > 0
    items = admin.get(f"/v1/datasets/{name}/entries")[1]["items"]
    assert [item["kind"] for item in items] == ["create", "reserve", "grant", "commit"]
    assert verify(repository).faults == []


RESPONSE = {"kind": "randomized_response", "categories": 4, "flip_probability": 0.5}
ROUNDS: dict[str, Json] = {
    "reports": {"kind": "shuffled_reports", "reports": 2000, "mechanism": RESPONSE},
    "bands": {
        "kind": "banded_matrix_factorization",
        "noise_multiplier": 9.0,
        "coefficients": [1.0, 0.5],
        "steps": 40,
        "groups": 4,
        "sample_rate": 0.1,
    },
    "tree": {"kind": "tree_aggregation", "noise_multiplier": 40.0, "steps": 100},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_shuffled_reports_and_correlated_noise_are_charged(
    name: str, admin: Caller, repository: Repository
) -> None:
    """Rounds of one kind are the reference; a round is also exchanged for other steps."""
    plan = {"kind": "repeated", "count": 3, "mechanism": ROUNDS[name]}
    admin.dataset(f"rounds-{name}", planned_mechanism=plan)
    run = admin.reserve(f"rounds-{name}", plan)
    assert run["steps_reserved"] == 3
    status, run = admin.grant(run["id"], 2, 0)
    assert (status, run["steps_granted"]) == (200, 2)
    assert admin.post(f"/v1/reservations/{run['id']}/commit")[0] == 200
    spent = admin.get(f"/v1/datasets/rounds-{name}")[1]["spent"]
    assert spent["reference_steps"] > 0  # a Gaussian reference is divided into finer steps
    alone = {"mechanism": plan | {"count": 2}, "delta": BUDGET["delta"]}
    assert spent["epsilon"] >= admin.post("/v1/epsilon", alone)[1]["epsilon"] * (1 - 1e-3)
    admin.dataset(f"steps-{name}", planned_mechanism=EQUAL)
    other = admin.reserve(f"steps-{name}", ROUNDS[name])
    assert admin.grant(other["id"], 1, 0)[0] == 200
    assert admin.get(f"/v1/datasets/steps-{name}")[1]["spent"]["reference_steps"] > 0
    assert verify(repository).faults == []


@pytest.mark.slow
def test_a_certificate_can_be_checked_by_anyone(admin: Caller, tmp_path: Path) -> None:
    admin.dataset("public")
    run = admin.reserve("public", RUN | {"steps": 300})
    admin.grant(run["id"], 200, 0)
    path = f"/v1/reservations/{run['id']}/certificate"
    assert admin.get(path)[1]["code"] == "reservation-open"
    admin.post(f"/v1/reservations/{run['id']}/commit")
    status, document = admin.get(path)
    assert (status, document["guarantee"]["scope"]) == (200, "fixed_plan")
    assert (document["steps_reserved"], document["steps"]) == (300, 200)
    asked = {"mechanism": RUN | {"steps": 300}, "delta": BUDGET["delta"]}
    alone = admin.post("/v1/epsilon", asked)[1]
    assert document["guarantee"]["epsilon"] == alone["epsilon"]
    assert document["mechanism_hash"] == alone["mechanism_hash"]
    assert document["budget"]["epsilon"] == BUDGET["epsilon"]
    assert "the number of records is public" in str(document["guarantee"]["assumptions"])
    for public_key in (document["public_key"], document["public_key"].upper()):
        assert certificate.check(document, public_key)[0] == []
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(document))
    command = ["verify", str(file), "--public-key", document["public_key"].upper()]
    told = CliRunner().invoke(cli.app, command)
    assert (told.exit_code, told.stderr) == (0, "")
    assert "all 300 steps reserved; 200 of them were granted" in told.stdout
    assert "it assumes: the number of records is public" in told.stdout
    as_json = json.loads(CliRunner().invoke(cli.app, [*command, "--json"]).stdout)
    assert (as_json["steps_reserved"], as_json["steps_granted"]) == (300, 200)
    assert (as_json["faults"], as_json["not_covered"]) == ([], [])
    better = document | {"guarantee": document["guarantee"] | {"epsilon": 0.1}}
    shorter = document | {"mechanism": document["mechanism"] | {"steps": 20}}
    for altered in (better, shorter, document | {"dataset": "other"}, {}, {"format": 1}):
        assert certificate.check(altered)[0], altered
        file.write_text(json.dumps(altered))
        assert CliRunner().invoke(cli.app, ["verify", str(file)]).exit_code == 1
    assert certificate.check(document, "00" * 32)[0]


@pytest.mark.parametrize("end", ["commit", "release", "expire"])
def test_however_a_run_stops_its_certificate_claims_what_it_reserved(
    end: str, admin: Caller
) -> None:
    admin.dataset(f"stopped-{end}")
    lease = 1.0 if end == "expire" else 3600.0
    run = admin.reserve(f"stopped-{end}", RUN | {"steps": 300}, lease_seconds=lease)
    admin.grant(run["id"], 7, 0)
    if end == "expire":
        time.sleep(1.1)
    else:
        admin.post(f"/v1/reservations/{run['id']}/{end}")
    document = admin.get(f"/v1/reservations/{run['id']}/certificate")[1]
    plan = {"mechanism": run["mechanism"], "delta": BUDGET["delta"]}
    whole = admin.post("/v1/epsilon", plan)[1]["epsilon"]
    assert (document["guarantee"]["epsilon"], document["steps"]) == (whole, 7)
    assert (document["mechanism"], document["mechanism_hash"]) == (
        run["mechanism"],
        run["mechanism_hash"],
    )


def test_an_end_declared_before_the_first_step_is_a_smaller_reservation(admin: Caller) -> None:
    """The long plan is given up before anything was granted: the claim is of the short one."""
    admin.dataset("declared")
    long = admin.reserve("declared", RUN | {"steps": 300})
    admin.post(f"/v1/reservations/{long['id']}/release")
    short = admin.reserve("declared", RUN | {"steps": 20})
    admin.grant(short["id"], 20, 0)
    admin.post(f"/v1/reservations/{short['id']}/commit")
    document = admin.get(f"/v1/reservations/{short['id']}/certificate")[1]
    plan = {"mechanism": RUN | {"steps": 20}, "delta": BUDGET["delta"]}
    assert document["guarantee"]["epsilon"] == admin.post("/v1/epsilon", plan)[1]["epsilon"]
    assert admin.grant(short["id"], 1, 20)[1]["code"] == "reservation-closed"


def test_steps_that_are_not_those_of_the_mechanism_are_found() -> None:
    """Whatever key signs a certificate, its numbers must agree with each other."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    signer = {"public_key": key.public_key().public_bytes_raw().hex()}
    text = (FIXTURES / "certificates" / "certificate-1-whole.json").read_text()
    whole = certificate.read(text) | signer | {"format": certificate.FORMAT}
    right = [(300, 300), (300, 0)]
    for reserved, granted in (*right, (1500, 300), (20, 20), (300, 301), (300, -1)):
        document = whole | {"steps_reserved": reserved, "steps": granted}
        document["signature"] = key.sign(certificate._signed_bytes(document)).hex()
        faults, _ = certificate.check(document)
        assert (faults == []) == ((reserved, granted) in right), (reserved, granted, faults)


@pytest.mark.parametrize(("size", "faults"), [(1000, 0), (999, 0), (1001, 1), (10**9, 1)])
def test_a_certificate_whose_mechanism_states_more_records_than_its_dataset_is_refused(
    size: int, faults: int
) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    text = (FIXTURES / "certificates" / "certificate-3-stopped.json").read_text()
    reports = {"kind": "shuffled_reports", "reports": size, "mechanism": RESPONSE}
    plan = {"kind": "repeated", "count": 2, "mechanism": reports}
    delta = certificate.read(text)["guarantee"]["delta"]
    claim = calculator.epsilon(mechanisms.from_json(plan), delta)
    document = certificate.read(text) | {
        "mechanism": plan,
        "mechanism_hash": claim.mechanism_hash,
        "guarantee": {"epsilon": claim.epsilon, "delta": delta, "status": "proven"},
        "steps_reserved": 2,
        "steps": 2,
        "dataset_size": 1000,
        "public_key": key.public_key().public_bytes_raw().hex(),
    }
    document["signature"] = key.sign(certificate._signed_bytes(document)).hex()
    named = f"/mechanism/reports of its mechanism is {size}, of 1000 records"
    assert certificate.check(document)[0] == [named] * faults


@pytest.mark.parametrize(
    "inside", ['"steps": 300,', '"delta": 1e-05,', '"noise_multiplier": 1.1,', '"entries": 4,']
)
def test_a_certificate_with_a_duplicate_field_name_is_refused(inside: str, tmp_path: Path) -> None:
    """At any depth: one reader takes the first value, another the last."""
    text = (FIXTURES / "certificates" / "certificate-1-whole.json").read_text()
    name = inside.split(":")[0]
    at = text.index(name)
    file = tmp_path / "certificate.json"
    file.write_text(text[:at] + inside + text[at:])
    told = CliRunner().invoke(cli.app, ["verify", str(file)])
    assert told.exit_code == 1
    assert f"the name {name[1:-1]!r} occurs more than once" in told.stderr


@pytest.mark.parametrize("text", ["[]", "3", '{"format": NaN}', "[" * 100_000, ""])
def test_a_certificate_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    file.write_text(text)
    told = CliRunner().invoke(cli.app, ["verify", str(file)])
    assert told.exit_code == 1
    assert "it is not a certificate" in told.stderr


NESTED = {"kind": "fixed_size_sampled", "dataset_size": 60_000, "batch_size": 600,
          "mechanism": {"kind": "gaussian", "noise_multiplier": 2.0}}  # fmt: skip
SIZED = {"kind": "dp_sgd", "noise_multiplier": 2.0, "dataset_size": 60_000, "batch_size": 600,
         "steps": 10}  # fmt: skip


@pytest.mark.parametrize("size", [10**9, 60_001, 59_999])
@pytest.mark.parametrize(
    ("wrap", "pointer"),
    [
        (lambda size: SIZED | {"dataset_size": size}, "/dataset_size"),
        (lambda size: SIZED | {"dataset_size": size, "sampling": "fixed_size"}, "/dataset_size"),
        (lambda size: NESTED | {"dataset_size": size}, "/dataset_size"),
        (
            lambda size: {
                "kind": "composed",
                "mechanisms": [
                    SIZED,
                    {"kind": "repeated", "count": 5, "mechanism": NESTED | {"dataset_size": size}},
                ],
            },
            "/mechanisms/1/mechanism/dataset_size",
        ),
        (
            lambda size: {
                "kind": "poisson_sampled",
                "sample_rate": 1,
                "mechanism": SIZED | {"dataset_size": size},
            },
            "/mechanism/dataset_size",
        ),
        (
            lambda size: {"kind": "parallel", "mechanisms": [NESTED | {"dataset_size": size}]},
            "/mechanisms/0/dataset_size",
        ),
        (
            lambda size: {
                "kind": "truncated_poisson_sampled",
                "dataset_size": 60_000,
                "sample_rate": 1,
                "batch_size_max": 60_000,
                "mechanism": SIZED | {"dataset_size": size},
            },
            "/mechanism/dataset_size",
        ),
    ],
)
def test_a_mechanism_for_another_number_of_records_is_refused(
    wrap: Any, pointer: str, size: int, admin: Caller
) -> None:
    """A rate is a batch size over the number of records that there are, not one that is said."""
    name = f"sized-{uuid.uuid4().hex}"
    admin.dataset(name)
    for path, body, at in (
        (f"/v1/datasets/{name}/quotes", {"mechanism": wrap(size)}, "/mechanism"),
        (f"/v1/datasets/{name}/reservations", {"mechanism": wrap(size)}, "/mechanism"),
        (
            "/v1/datasets",
            {"name": "n" + name, "size": 60_000, "budget": BUDGET, "planned_mechanism": wrap(size)},
            "/planned_mechanism",
        ),
    ):
        status, problem = admin.post(path, body)
        assert (status, problem["code"]) == (422, "dataset-size-mismatch"), path
        assert [fault["pointer"] for fault in problem["errors"]] == [at + pointer]
    _, batch = admin.post(f"/v1/datasets/{name}/quotes/batch", {"mechanisms": [wrap(size)]})
    problem = batch["items"][0]["problem"]
    assert problem["code"] == "dataset-size-mismatch"
    assert problem["errors"][0]["pointer"] == "/mechanisms/0" + pointer
    assert batch["together"]["fits"] is False
    assert admin.get(f"/v1/datasets/{name}")[1]["version"] == 1
    assert admin.post(f"/v1/datasets/{name}/quotes", {"mechanism": wrap(60_000)})[0] == 200


def test_more_reports_than_records_are_refused(admin: Caller) -> None:
    """Each of a million reports hides the others better than each of a thousand does."""
    name = f"sized-{uuid.uuid4().hex}"
    admin.dataset(name)
    plan = {"kind": "repeated", "count": 2, "mechanism": ROUNDS["reports"] | {"reports": 60_001}}
    for path in ("quotes", "reservations"):
        status, problem = admin.post(f"/v1/datasets/{name}/{path}", {"mechanism": plan})
        assert (status, problem["code"]) == (422, "dataset-size-mismatch")
        assert [e["pointer"] for e in problem["errors"]] == ["/mechanism/mechanism/reports"]
        assert "reports is 60001, but there are 60000 records" in problem["detail"]


@pytest.mark.parametrize("name", ["reference", "renyi"])
@pytest.mark.parametrize("kind", ["bands", "part"])
def test_a_hypothesis_that_fails_for_replaced_records_is_checked_by_every_filter(
    name: str, kind: str, admin: Caller
) -> None:
    """A replaced record may move to another group, or to a part without releases."""
    dataset = f"replaced-{name}-{kind}"
    admin.dataset(dataset, neighbouring_relation="replace_one", filter=name)
    nothing: Json = {"kind": "composed", "mechanisms": []}
    noise = {"kind": "gaussian", "noise_multiplier": 40.0}
    part = {"kind": "parallel", "mechanisms": [noise, nothing]}
    plan = {"bands": ROUNDS["bands"], "part": part}[kind]
    for path in ("quotes", "reservations"):
        status, problem = admin.post(f"/v1/datasets/{dataset}/{path}", {"mechanism": plan})
        assert status == 422, problem
    whole = {"mechanism": {"kind": "parallel", "mechanisms": [noise]}}
    assert admin.post(f"/v1/datasets/{dataset}/quotes", whole)[0] == 200
    if kind == "part":  # the same releases, charged before, prove nothing about a part
        admin.reserve(dataset, noise)
        status, problem = admin.post(f"/v1/datasets/{dataset}/reservations", {"mechanism": part})
        assert status == 422, problem
        assert "each record belongs to one part" in problem["detail"]


@pytest.mark.parametrize("name", ["reference", "renyi"])
def test_a_part_without_releases_costs_what_the_other_part_costs(
    name: str, admin: Caller, repository: Repository
) -> None:
    """Ledgers of earlier versions stored such runs, with the hash of the part that releases."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    dataset = f"parts-{name}"
    admin.dataset(dataset, filter=name)
    noise: Json = {"kind": "gaussian", "noise_multiplier": 40.0}
    part = {"kind": "parallel", "mechanisms": [noise, {"kind": "composed", "mechanisms": []}]}
    alone = admin.reserve(dataset, noise)
    run = admin.reserve(dataset, part)
    assert run["mechanism_hash"] == alone["mechanism_hash"]
    assert run["mechanism"] == part
    admin.grant(run["id"], 1, 0)
    admin.post(f"/v1/reservations/{run['id']}/commit")
    assert verify(repository).faults == []
    document = admin.get(f"/v1/reservations/{run['id']}/certificate")[1]
    assert certificate.check(document)[0] == []
    asked = {"mechanism": noise, "delta": BUDGET["delta"]}
    assert document["guarantee"]["epsilon"] == admin.post("/v1/epsilon", asked)[1]["epsilon"]
    assert document["guarantee"]["gaussian_dp"] is not None
    key = Ed25519PrivateKey.generate()
    earlier = document | {
        "mechanism_hash": run["mechanism_hash"],
        "public_key": key.public_key().public_bytes_raw().hex(),
    }
    earlier["signature"] = key.sign(certificate._signed_bytes(earlier)).hex()
    assert certificate.check(earlier)[0] == []


@pytest.mark.slow
def test_equal_refusals_compute_once_what_would_fit(
    admin: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes most of a second of the key's turn: a job that retries would jam it."""
    computed: list[str] = []
    run = ProcessPool.run

    async def count(pool: ProcessPool, function: Any, *arguments: Any) -> Any:
        computed.append(function.__name__)
        return await run(pool, function, *arguments)

    monkeypatch.setattr(ProcessPool, "run", count)
    name = f"refused-{uuid.uuid4().hex}"
    admin.dataset(name, {"epsilon": 1.0, "delta": 1e-5})
    long = {"mechanism": RUN | {"steps": 100_000}}
    answers = [admin.post(f"/v1/datasets/{name}/reservations", long) for _ in range(3)]
    assert [status for status, _ in answers] == [409] * 3
    assert answers[0][1]["affordable"]["steps"] > 0
    assert all(problem["affordable"] == answers[0][1]["affordable"] for _, problem in answers)
    assert computed.count("find_affordable") == 1
    admin.reserve(name, RUN | {"steps": 1})
    _, problem = admin.post(f"/v1/datasets/{name}/reservations", long)
    assert computed.count("find_affordable") == 2, "the budget has changed"
    assert problem["affordable"]["steps"] < answers[0][1]["affordable"]["steps"]


def test_a_refusal_stands_when_nothing_tells_what_would_fit(
    admin: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ProcessPool.run

    async def fail(pool: ProcessPool, function: Any, *arguments: Any) -> Any:
        if function.__name__ == "find_affordable":
            raise TooExpensiveError("more than 10 s of CPU time")
        return await run(pool, function, *arguments)

    monkeypatch.setattr(ProcessPool, "run", fail)
    name = f"refused-{uuid.uuid4().hex}"
    admin.dataset(name, {"epsilon": 1.0, "delta": 1e-5})
    long = {"mechanism": RUN | {"steps": 100_000}}
    assert admin.post(f"/v1/datasets/{name}/reservations", long)[1]["code"] == "budget-exhausted"
    monkeypatch.undo()
    status, problem = admin.post(f"/v1/datasets/{name}/reservations", long)
    assert (status, problem["affordable"]["steps"] > 0) == (409, True), "a failure is not kept"


def test_a_run_that_does_not_fit_is_refused_with_one_that_does(admin: Caller) -> None:
    admin.dataset("small", {"epsilon": 3.0, "delta": 1e-5})
    long = RUN | {"steps": 100_000}
    status, quote = admin.post("/v1/datasets/small/quotes", {"mechanism": long})
    assert (status, quote["fits"]) == (200, False)
    status, problem = admin.post("/v1/datasets/small/reservations", {"mechanism": long})
    assert (status, problem["code"]) == (409, "budget-exhausted")
    assert problem["affordable"] == quote["affordable"]
    steps, noise = problem["affordable"]["steps"], problem["affordable"]["noise_multiplier"]
    status, quote = admin.post(
        "/v1/datasets/small/quotes", {"mechanism": long | {"noise_multiplier": noise}}
    )
    assert quote["fits"]
    status, quote = admin.post(
        "/v1/datasets/small/quotes", {"mechanism": RUN | {"steps": steps + 1}}
    )
    assert not quote["fits"]
    admin.reserve("small", RUN | {"steps": steps})
    status, problem = admin.post("/v1/datasets/small/reservations", {"mechanism": RUN})
    assert (status, problem["affordable"]["steps"]) == (409, 0)


def test_quotes_of_many_plans(admin: Caller) -> None:
    """Each by itself and all together; what cannot be charged is named in its place."""
    admin.dataset("planning")
    _, one = admin.post("/v1/datasets/planning/quotes", {"mechanism": RUN})
    half = RUN | {"steps": one["affordable"]["steps"] // 2}
    path = "/v1/datasets/planning/quotes/batch"
    status, found = admin.post(path, {"mechanisms": [RUN, half, half]})
    assert status == 200
    assert found["items"][0] == one
    assert [item["fits"] for item in found["items"]] == [True, True, True]
    assert found["together"] == {"fits": False, "epsilon_after": None}
    _, both = admin.post(path, {"mechanisms": [half, half]})
    assert both["together"]["fits"] is True
    assert both["together"]["epsilon_after"] <= BUDGET["epsilon"]
    _, mixed = admin.post(path, {"mechanisms": [RUN, SHUFFLED]})
    assert mixed["items"][1]["problem"]["code"] == "unsuitable-reference"
    assert mixed["items"][1]["problem"]["errors"][0]["pointer"] == "/mechanisms/1"
    assert mixed["together"] == {"fits": False, "epsilon_after": None}
    assert admin.post(path, {"mechanisms": []})[0] == 422
    assert admin.get("/v1/datasets/planning")[1]["version"] == 1  # nothing was charged


@pytest.mark.slow
def test_plans_that_can_be_reserved_one_after_the_other_fit_together(admin: Caller) -> None:
    """Each exchange takes a share of the slack that is left, not of the slack at first."""
    admin.dataset("phases")
    admin.reserve("phases", RUN | {"steps": 60})
    plans = [RUN | {"steps": 60, "noise_multiplier": 1.1 + 0.05 * phase} for phase in range(6)]
    status, found = admin.post("/v1/datasets/phases/quotes/batch", {"mechanisms": plans})
    assert (status, found["together"]["fits"]) == (200, True)
    for each in plans:
        admin.reserve("phases", each)
    dataset, _ = stored(admin, "phases")
    after = dataset.policy.epsilon_of(dataset.balance.taken)
    assert after == pytest.approx(found["together"]["epsilon_after"], rel=1e-3)


def stored(admin: Caller, name: str) -> tuple[Dataset, list[Reservation]]:
    """A dataset and its reservations as the database has them."""
    with admin.http.app.state.repository.reading() as reading:  # type: ignore[attr-defined]
        dataset = reading.find_dataset(name)
        return dataset, reading.list_reservations(dataset)


@pytest.mark.slow
def test_a_quote_without_a_finite_epsilon_is_a_quote(
    admin: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infinite(*_: Any) -> None:
        raise NoFiniteEpsilonError("none at all")

    monkeypatch.setattr(calculator, "prove_epsilon", infinite)
    admin.dataset("endless")
    found = plans.quote_plan(stored(admin, "endless")[0], mechanisms.from_json(RUN))
    assert found.fits
    assert found.guarantee is None


def test_the_running_total_is_labelled_and_counts_what_was_granted(admin: Caller) -> None:
    admin.dataset("sum")
    status, nothing = admin.get("/v1/datasets/sum/running-total")
    assert (status, nothing["epsilon"], nothing["scope"]) == (200, 0.0, "running_total")
    for steps in (20, 60):
        run = admin.reserve("sum")["id"]
        admin.grant(run, steps, 0)
    _, total = admin.get("/v1/datasets/sum/running-total")
    whole = {"mechanism": RUN | {"steps": 80}, "delta": BUDGET["delta"]}
    alone = admin.http.post("/v1/epsilon", json=whole).json()
    assert total["epsilon"] == alone["epsilon"]
    assert total["epsilon"] <= admin.get("/v1/datasets/sum")[1]["spent"]["epsilon"]
    assert (total["status"], total["certified"]) == ("estimate", None)  # runs may have been stopped
    assert "planned before any result" in total["certified_reason"]


def test_a_plan_of_no_steps_is_certified_as_nothing(admin: Caller) -> None:
    admin.dataset("nothing")
    run = admin.reserve("nothing", RUN | {"steps": 0})["id"]
    admin.grant(run, 1, 0)
    assert admin.post(f"/v1/reservations/{run}/commit")[0] == 200
    _, document = admin.get(f"/v1/reservations/{run}/certificate")
    assert document["guarantee"]["epsilon"] == 0.0
    assert admin.get("/v1/datasets/nothing")[1]["spent"] == {"epsilon": 0.0, **NO_STEPS}
    assert admin.get("/v1/datasets/nothing/running-total")[1]["epsilon"] == 0.0


def test_a_plan_too_expensive_for_pld_is_certified_by_subsampled_rdp(
    admin: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accountant_service.accountants.pld._RELEASES_MAX", 1)
    admin.dataset("many")
    for noise in (1.0, 2.0):
        run = admin.reserve("many", RUN | {"noise_multiplier": noise})["id"]
        admin.grant(run, 10, 0)
    dataset, runs = stored(admin, "many")
    assert plans.estimate_running_total(dataset.policy, runs).method == "subsampled_rdp"


def test_quotes_that_take_too_long_say_so(admin: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accountant_service.api.async_ledger._QUOTES_SECONDS_MAX", -1.0)
    admin.dataset("slow")
    _, found = admin.post("/v1/datasets/slow/quotes/batch", {"mechanisms": [RUN]})
    assert found["items"][0]["problem"]["code"] == "too-expensive"


def test_computations_can_be_closed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/closed.db"
    app = create_app(Settings(database_url=url, open_computation=False))
    with TestClient(app) as http:
        ask = {"mechanism": RUN, "delta": 1e-5}
        for path, body in (("/v1/epsilon", ask), ("/v1/batch", {"requests": []})):
            assert http.post(path, json=body).json()["code"] == "unauthenticated"
            for scope in Scope:
                token, _ = app.state.keys.create([scope])
                answer = http.post(path, json=body, headers={"Authorization": f"Bearer {token}"})
                assert answer.status_code != 401
        assert http.get("/healthz").status_code == 200
        assert http.get("/v1/methods").status_code == 200


def test_a_repeat_is_answered_alike_and_charges_once(admin: Caller) -> None:
    admin.dataset("again")
    body, key = {"mechanism": RUN}, uuid.uuid4().hex
    first = admin.post("/v1/datasets/again/reservations", body, key)
    assert first == admin.post("/v1/datasets/again/reservations", body, key)
    assert len(admin.get("/v1/datasets/again/entries")[1]["items"]) == 2
    other = {"mechanism": RUN | {"steps": 61}}
    status, problem = admin.post("/v1/datasets/again/reservations", other, key)
    assert (status, problem["code"]) == (422, "idempotency-key-reused")
    answer = admin.http.post(
        "/v1/datasets/again/reservations",
        json=body,
        headers={"Authorization": f"Bearer {admin.key}"},
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "idempotency-key-required")


def test_the_same_request_raced_against_itself_happens_once(admin: Caller) -> None:
    admin.dataset("raced")
    key = uuid.uuid4().hex
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(
                lambda _: admin.post("/v1/datasets/raced/reservations", {"mechanism": RUN}, key),
                range(8),
            )
        )
    assert {status for status, _ in found} == {201}
    assert len({answer["id"] for _, answer in found}) == 1
    assert len(admin.get("/v1/datasets/raced/entries")[1]["items"]) == 2


@pytest.mark.slow
def test_racing_reservations_never_overspend(admin: Caller, repository: Repository) -> None:
    """Runs like the reference and other ones, to the end and not, until nothing fits any more."""
    name = f"race-{uuid.uuid4().hex}"
    admin.dataset(name, {"epsilon": 3.0, "delta": 1e-5}, planned_mechanism=EQUAL)
    whole = admin.get(f"/v1/datasets/{name}")[1]["remaining"]

    def take(number: int) -> int:
        run = (EQUAL, OTHER)[number % 4 == 0] | {"steps": 15}
        status, found = admin.post(f"/v1/datasets/{name}/reservations", {"mechanism": run})
        if status == 201:
            assert admin.grant(found["id"], 15 - number % 2, 0)[0] == 200
            assert admin.post(f"/v1/reservations/{found['id']}/commit")[0] == 200
        return status

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(take, range(24)))
    assert set(statuses) == {201, 409}
    after = admin.get(f"/v1/datasets/{name}")[1]
    assert 0 < after["spent"]["reference_steps"] <= whole["reference_steps"]
    assert 0 <= after["spent"]["slack"] <= whole["slack"] == 1.0
    assert after["spent"]["epsilon"] <= 3.0
    assert verify(repository).faults == []


@pytest.mark.parametrize("kind", ["reference", "renyi"])
def test_a_lease_that_ends_frees_what_was_never_granted(kind: str, admin: Caller) -> None:
    name = f"lease-{kind}"
    unit = "micronats" if kind == "renyi" else "reference_steps"
    admin.dataset(name, filter=kind, planned_mechanism=RUN)
    run = admin.reserve(name, lease_seconds=2.0)
    admin.grant(run["id"], 10, 0)
    spent = admin.get(f"/v1/datasets/{name}")[1]["spent"]
    status, renewed = admin.post(f"/v1/reservations/{run['id']}/renew", {"lease_seconds": 2.5})
    assert (status, renewed["expires_at"] > run["expires_at"]) == (200, True)
    time.sleep(2.6)
    found = admin.get(f"/v1/datasets/{name}")[1]
    assert (found["held"][unit], found["spent"]) == (0, spent)
    assert admin.get(f"/v1/reservations/{run['id']}")[1]["state"] == "expired"
    status, problem = admin.grant(run["id"], 1, 10)
    assert (status, problem["code"]) == (409, "reservation-closed")


@pytest.mark.parametrize("asked", ["dataset", "reservation", "reservations", "quote"])
def test_an_exchanged_run_whose_lease_ends_gives_back_what_its_other_steps_dominate(
    asked: str, admin: Caller, repository: Repository
) -> None:
    """Whatever is asked first: the exchange back is computed outside of the transaction."""
    name = f"lease-exchanged-{asked}"
    admin.dataset(name, planned_mechanism=EQUAL)
    run = admin.reserve(name, OTHER, lease_seconds=1.0)
    admin.grant(run["id"], 4, 0)
    before = admin.get(f"/v1/datasets/{name}")[1]
    time.sleep(1.1)
    whole = EQUAL | {"steps": before["accounting"]["reference_steps"]}
    if asked == "reservation":
        assert admin.get(f"/v1/reservations/{run['id']}")[1]["state"] == "expired"
    if asked == "reservations":  # refused, but not without an ended lease
        plan = {"mechanism": whole}
        assert admin.post(f"/v1/datasets/{name}/reservations", plan)[0] == 409
    if asked == "quote":
        assert admin.post(f"/v1/datasets/{name}/quotes", {"mechanism": EQUAL})[0] == 200
    after = admin.get(f"/v1/datasets/{name}")[1]
    assert after["held"] == {"epsilon": 0.0, **NO_STEPS}
    taken = [
        each["spent"]["reference_steps"] + each["held"]["reference_steps"]
        for each in (before, after)
    ]
    assert 0 < after["spent"]["reference_steps"] == taken[1] < taken[0]
    assert before["spent"]["reference_steps"] <= taken[1]
    last = admin.get(f"/v1/datasets/{name}/entries")[1]["items"][-1]
    assert (last["kind"], last["key"]) == ("expire", "system")
    assert verify(repository).faults == []


def test_ended_leases_that_take_too_long_are_left_for_the_next_request(
    admin: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "leases-in-turn"
    admin.dataset(name, planned_mechanism=EQUAL)
    runs = [admin.reserve(name, OTHER, lease_seconds=1.0) for _ in range(2)]
    for run in runs:
        admin.grant(run["id"], 1, 0)
    time.sleep(1.1)
    monkeypatch.setattr("accountant_service.api.async_ledger._RETURNS_SECONDS_MAX", -1.0)
    held = [admin.get(f"/v1/datasets/{name}")[1]["held"]["reference_steps"] for _ in range(2)]
    assert held[0] > held[1] == 0


def test_an_exchange_that_is_not_decided_in_time_is_refused_and_costs_nothing(
    admin: Caller, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.dataset("undecided", planned_mechanism=RUN)
    before = admin.get("/v1/datasets/undecided")[1]
    _, key = Keys(repository).create([Scope.ADMIN])
    write = WriteRequest(key, uuid.uuid4().hex, "POST /v1/datasets/undecided/reservations", {})
    plan = mechanisms.from_json(RUN | {"sample_rate": 0.02, "noise_multiplier": 1.4})
    ledger = Ledger(repository, encode_answer)
    monkeypatch.setattr(reference, "_SECONDS_MAX", 0.0)
    with pytest.raises(ChargeUndecidedError, match="nothing was charged") as refused:
        ledger.reserve(write, "undecided", plan, 60.0, "")
    assert (refused.value.code, refused.value.status) == ("exchange-undecided", 422)
    assert admin.get("/v1/datasets/undecided")[1] == before
    monkeypatch.undo()
    ledger.reserve(write, "undecided", plan, 60.0, "")  # the same request, once there is time
    assert admin.get("/v1/datasets/undecided")[1]["held"]["reference_steps"] > 0
    assert verify(repository).faults == []


@pytest.mark.slow
def test_ending_early_and_exchanging_there_and_back_never_gains(
    admin: Caller, repository: Repository
) -> None:
    """Ten steps made one by one, each of a run that ends then, cost no less than ten at once."""
    admin.dataset("once", planned_mechanism=EQUAL)
    run = admin.reserve("once", OTHER | {"steps": 3})
    admin.grant(run["id"], 3, 0)
    admin.post(f"/v1/reservations/{run['id']}/commit")
    at_once = admin.get("/v1/datasets/once")[1]["spent"]["reference_steps"]
    admin.dataset("often", planned_mechanism=EQUAL)
    for _ in range(3):
        run = admin.reserve("often", OTHER)
        admin.grant(run["id"], 1, 0)
        status, found = admin.post(f"/v1/reservations/{run['id']}/commit")
        assert (status, found["state"], found["steps_granted"]) == (200, "committed", 1)
    assert admin.get("/v1/datasets/often")[1]["spent"]["reference_steps"] >= at_once
    assert admin.get("/v1/datasets/often")[1]["held"] == {"epsilon": 0.0, **NO_STEPS}
    assert verify(repository).faults == []


def test_the_first_reservation_chooses_the_reference_and_the_next_keep_it(
    admin: Caller, repository: Repository
) -> None:
    made = admin.dataset("choosing")
    assert made["accounting"]["reference"] is None
    # more steps of it than there are of any later reference
    quiet = admin.reserve("choosing", EQUAL | {"noise_multiplier": 60.0, "steps": 1000})
    admin.post(f"/v1/reservations/{quiet['id']}/release")
    run = admin.reserve("choosing", EQUAL)
    found = admin.get("/v1/datasets/choosing")[1]["accounting"]
    assert (found["reference"]["kind"], found["planned"]) == ("gaussian", False)
    first = found["reference"]["noise_multiplier"]
    admin.post(f"/v1/reservations/{run['id']}/release")  # nothing was released: open again
    run = admin.reserve("choosing", OTHER)
    found = admin.get("/v1/datasets/choosing")[1]["accounting"]
    assert found["reference"]["noise_multiplier"] != first
    admin.grant(run["id"], 1, 0)
    admin.post(f"/v1/reservations/{run['id']}/commit")
    admin.reserve("choosing", EQUAL)
    assert admin.get("/v1/datasets/choosing")[1]["accounting"] == found
    ledger = admin.http.app.state.ledger  # type: ignore[attr-defined]
    history = getattr(ledger, "_ledger", ledger).compute_burn_down(
        Keys(repository).create([Scope.ADMIN])[1], "choosing", 100
    )
    assert all(0 <= point.spent <= point.taken <= BUDGET["epsilon"] for point in history)
    assert verify(repository).faults == []


def test_keys_are_limited_to_their_scopes_and_datasets(admin: Caller, keys: Keys) -> None:
    admin.dataset("ours")
    admin.dataset("theirs")
    team = Caller(admin.http, keys.create([Scope.RUN], datasets=("ours",))[0])
    run = admin.reserve("theirs")
    assert team.post("/v1/datasets/ours/quotes", {"mechanism": RUN})[0] == 200
    for path in ("/v1/datasets/theirs", f"/v1/reservations/{run['id']}", "/v1/datasets/none"):
        assert team.get(path)[0] == 404
    assert team.grant(run["id"], 1, 0)[0] == 404
    assert [d["name"] for d in team.get("/v1/datasets")[1]["items"]] == ["ours"]
    status, problem = team.post("/v1/datasets", {"name": "x", "size": 1, "budget": BUDGET})
    assert (status, problem["code"]) == (403, "forbidden")
    assert team.get("/v1/keys")[0] == 403
    for key, said in (
        ("", "send an API key"),
        ("pa_x_y", "is unknown"),
        (admin.key[:-1] + "!", "is unknown"),
        ("nonsense", "begins with pa_"),
    ):
        status, problem = Caller(admin.http, key).get("/v1/datasets")
        assert (status, problem["code"]) == (401, "unauthenticated")
        assert said in problem["detail"]


def test_keys_are_shown_once_and_can_be_revoked(admin: Caller) -> None:
    status, made = admin.post("/v1/keys", {"scopes": ["run"], "name": "team"})
    assert (status, made["scopes"]) == (201, ["run"])
    team = Caller(admin.http, made["key"])
    assert team.get("/v1/datasets")[0] == 200
    listed = admin.get("/v1/keys")[1]["items"]
    assert made["key"] not in str(listed)
    assert any(key["id"] == made["id"] and key["last_used_at"] for key in listed)
    headers = {"Authorization": f"Bearer {admin.key}"}
    assert admin.http.delete(f"/v1/keys/{made['id']}", headers=headers).status_code == 200
    assert team.get("/v1/datasets")[0] == 401
    assert admin.http.delete("/v1/keys/none", headers=headers).status_code == 404


def test_audit_events_name_the_key_that_created_and_revoked_a_key(
    admin: Caller, repository: Repository
) -> None:
    made = admin.post("/v1/keys", {"scopes": ["run"], "name": "team"})[1]["id"]
    headers = {"Authorization": f"Bearer {admin.key}"}
    assert admin.http.delete(f"/v1/keys/{made}", headers=headers).status_code == 200
    with repository.reading() as reading:
        events = [each for each in reading.list_audit_events() if each["subject"] == made]
    creator = admin.key.split("_")[1]
    assert [(each["key"], each["action"]) for each in events] == [
        (creator, "key-created"), (creator, "key-revoked")
    ]  # fmt: skip


def test_audit_events_record_who_did_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", f"sqlite:///{tmp_path}/ledger.db")
    run = CliRunner().invoke
    token = run(cli.app, ["keys", "create", "--scope", "admin"]).stdout.strip()
    identifier = token.split("_")[1]
    assert run(cli.app, ["keys", "revoke", identifier]).exit_code == 0
    events = json.loads(run(cli.app, ["ledger", "events", "--json"]).stdout)
    assert [(event["key"], event["action"], event["subject"]) for event in events] == [
        ("command-line", "key-created", identifier), ("command-line", "key-revoked", identifier)
    ]  # fmt: skip
    assert "key-revoked" in run(cli.app, ["ledger", "events"]).stdout


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/datasets", {"name": "bad name", "size": 1, "budget": BUDGET}, 422, BAD),
        ("/v1/datasets", {"name": "a", "size": 0, "budget": BUDGET}, 422, BAD),
        ("/v1/datasets", {"name": "a", "size": 1, "budget": BUDGET | {"epsilon": 0}}, 422, BAD),
        ("/v1/datasets", {"name": "a", "size": 1}, 422, BAD),
        ("/v1/datasets", {"name": "a", "size": 1, "budget": BUDGET, "filter": "gdp"}, 422, BAD),
        ("/v1/datasets/bad/reservations", {"mechanism": {"kind": "magic"}}, 422, BAD),
        ("/v1/datasets/bad/reservations", {"mechanism": SHUFFLED}, 422, "unsuitable-reference"),
        ("/v1/datasets/renyi/reservations", {"mechanism": SHUFFLED}, 422, "method-not-applicable"),
        ("/v1/datasets/bad/reservations", {"mechanism": RUN, "lease_seconds": 0}, 422, BAD),
        ("/v1/datasets/none/reservations", {"mechanism": RUN}, 404, "not-found"),
        ("/v1/reservations/none/commit", {}, 404, "not-found"),
        ("/v1/reservations/none/grants", {"steps": 0, "sequence": 0}, 422, BAD),
        ("/v1/keys", {"scopes": ["king"]}, 422, BAD),
    ],
)  # fmt: skip
def test_bad_input_is_named(admin: Caller, path: str, body: Json, status: int, code: str) -> None:
    new = {"name": "bad", "size": 1, "budget": BUDGET}
    admin.post("/v1/datasets", new)
    admin.post("/v1/datasets", new | {"name": "renyi", "filter": "renyi"})
    found, problem = admin.post(path, body)
    assert (found, problem["code"]) == (status, code), problem


def test_a_dataset_name_can_be_used_once(admin: Caller) -> None:
    admin.dataset("twice")
    status, problem = admin.post("/v1/datasets", {"name": "twice", "size": 9, "budget": BUDGET})
    assert (status, problem["code"]) == (409, "name-taken")


def test_entries_are_paged(admin: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.dataset("pages")
    run = admin.reserve("pages")
    for k in range(5):
        admin.grant(run["id"], 1, k)
    monkeypatch.setattr("accountant_service.ledger.service.PAGE_SIZE", 3)
    seen: list[int] = []
    cursor = ""
    while True:
        _, page = admin.get(f"/v1/datasets/pages/entries?cursor={cursor}")
        seen += [item["number"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == list(range(1, 8))


TABLES = ("dataset", "reservation", "entry")  # a row after those that it refers to
TAMPERING = [
    "UPDATE entry SET body = replace(body, '\"steps\":20', '\"steps\":10') WHERE number = 3",
    "UPDATE entry SET hash = replace(hash, substr(hash, 1, 1), 'g') WHERE number = 3",
    "DELETE FROM entry WHERE number = 4",
    "DELETE FROM entry WHERE number = 5",
    "UPDATE dataset SET spent = '[59, 0]'",
    "UPDATE dataset SET spent = '[60, -1]'",
    "UPDATE dataset SET held = '[1, 0]'",
    "UPDATE dataset SET epsilon = 30",
    "UPDATE dataset SET policy = replace(policy, 'steps\": ', 'steps\": 1')",
    "UPDATE dataset SET policy = replace(policy, 'planned\": false', 'planned\": true')",
    "UPDATE dataset SET policy = replace(policy, 'share\": 0.001', 'share\": 0.002')",
    "UPDATE dataset SET policy = replace(policy, 'multiplier\": 1.0', 'multiplier\": 1.1')",
    'UPDATE dataset SET policy = \'{"filter": "renyi", "order": 5.0}\'',
    "UPDATE reservation SET steps_granted = steps_granted - 1",
    "UPDATE reservation SET charge = replace(charge, '60', '1')",
    "UPDATE reservation SET charge = replace(charge, 'true', 'false')",
    'UPDATE reservation SET charge = \'{"unit_attonats": "1"}\'',
    "UPDATE dataset SET relation = 'replace_one'",
    "UPDATE dataset SET size = 2 * size",
    "UPDATE dataset SET privacy_unit = 'household'",
    "UPDATE dataset SET created_at = created_at + 1",
    "UPDATE reservation SET expires_at = expires_at + 1",
    "UPDATE reservation SET purpose = 'another'",
    "UPDATE reservation SET key_id = 'another'",
    "UPDATE reservation SET mechanism = replace(mechanism, '0.01', '0.02')",
    "UPDATE reservation SET state = 'released'",
]


def execute(repository: Repository, *statements: str) -> None:
    """Run statements in one transaction."""
    with repository.transaction() as transaction:
        for each in statements:
            transaction.connection.exec_driver_sql(each)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def one_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Repository]:
    """A ledger with one dataset and one run, and a copy of each table."""
    with database(request.param, tmp_path_factory.mktemp("tampering")) as url:
        app = create_app(Settings(database_url=url))
        with TestClient(app) as http:
            admin = Caller(http, app.state.keys.create([Scope.ADMIN])[0])
            admin.dataset("d")
            run = admin.reserve("d")
            for sequence in (0, 20, 40):
                assert admin.grant(run["id"], 20, sequence)[0] == 200
            repository = app.state.repository
            execute(repository, *(f"CREATE TABLE kept_{t} AS SELECT * FROM {t}" for t in TABLES))
            yield repository


@pytest.fixture
def untouched(one_run: Repository) -> Iterator[Repository]:
    """The ledger of one run; what a test does to it is undone."""
    yield one_run
    execute(one_run, *(f"DELETE FROM {t}" for t in reversed(TABLES)))
    execute(one_run, *(f"INSERT INTO {t} SELECT * FROM kept_{t}" for t in TABLES))


@pytest.mark.parametrize("statement", TAMPERING)
def test_tampering_is_detected(statement: str, untouched: Repository) -> None:
    assert verify(untouched).faults == []
    execute(untouched, statement)
    faults = verify(untouched).faults
    assert faults, statement
    if "number" in statement:
        number = statement.rsplit("= ", 1)[1]
        assert any(number in fault for fault in faults), faults


@pytest.mark.slow
def test_verify_sees_one_state_while_others_write(admin: Caller, repository: Repository) -> None:
    admin.dataset("busy")
    run = admin.reserve("busy", RUN | {"steps": 1000})
    verified, statuses = Event(), list[int]()

    def write() -> None:
        while len(statuses) < 1000 and not verified.is_set():
            statuses.append(admin.grant(run["id"], 1, len(statuses))[0])

    with ThreadPoolExecutor(1) as pool:
        writing, checks = pool.submit(write), 0
        try:
            while not writing.done() and (checks < 3 or len(statuses) < 20):
                assert verify(repository).faults == []
                checks += 1
        finally:
            verified.set()
        writing.result()
    assert set(statuses) == {200}
    assert checks >= 3


@pytest.mark.parametrize("path", ["/v1/datasets/%00", "/v1/reservations/%00", "/v1/datasets/a%0A"])
def test_text_that_no_database_can_store_is_refused(admin: Caller, path: str) -> None:
    admin.post("/v1/datasets", {"name": "nul", "size": 1, "budget": BUDGET})
    assert admin.get(path)[1]["code"] == BAD
    unit = {"name": "nul2", "size": 1, "budget": BUDGET, "privacy_unit": "a\0b"}
    assert admin.post("/v1/datasets", unit)[1]["code"] == BAD
    plan = {"mechanism": RUN, "purpose": "\0"}
    assert admin.post("/v1/datasets/nul/reservations", plan)[1]["code"] == BAD
    assert admin.post("/v1/keys", {"scopes": ["run"], "name": "\0"})[1]["code"] == BAD


def test_an_exhausted_connection_pool_gives_a_temporary_error(tmp_path: Path) -> None:
    engine = create_engine(
        f"sqlite:///{tmp_path}/a.db",
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        pool_timeout=0.1,
    )
    repository = Repository(engine)
    with (
        repository.reading(),
        pytest.raises(DatabaseAwayError, match="does not answer"),
        repository.reading(),
    ):
        pass
    repository.close()


def test_a_database_from_the_future_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    opening.open_repository(url).close()
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(opening.NewerDatabaseError, match="newer"):
        opening.open_repository(url)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("make", ["at once", "by the chain"])
def test_migrations_and_create_all_make_the_same_tables(
    kind: str, make: str, tmp_path: Path
) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from accountant_service.ledger.tables import METADATA

    with database(kind, tmp_path) as url:
        repository = Repository(storage.connect(url))
        with repository.transaction() as transaction:
            if make == "at once":
                assert opening.upgrade(transaction.connection)[0] is None
            else:
                opening._run_migrations(transaction.connection)
            context = MigrationContext.configure(transaction.connection)
            assert compare_metadata(context, METADATA) == []
            before, after = opening.upgrade(transaction.connection)
            assert before == after == context.get_current_revision()
        repository.close()


def test_a_database_that_is_away_grants_nothing() -> None:
    away = Repository(storage.connect("postgresql+psycopg://postgres@127.0.0.1:1/none"))
    with pytest.raises(Exception, match="does not answer"), away.transaction():
        pass
    away.close()


def answer_without_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    """Reserve while the connection is lost; return status, error code and Retry-After."""
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    with TestClient(app, raise_server_exceptions=False) as http:
        admin = Caller(http, app.state.keys.create([Scope.ADMIN])[0])
        admin.dataset("d")
        repository = app.state.repository

        def gone(*_: Any) -> None:
            raise OperationalError("BEGIN", {}, Exception("the connection is lost"))

        with monkeypatch.context() as patch:
            patch.setattr(repository.engine, "begin", gone)
            headers = {"Authorization": f"Bearer {admin.key}", "Idempotency-Key": "a"}
            answer = http.post(
                "/v1/datasets/d/reservations", json={"mechanism": RUN}, headers=headers
            )
        assert admin.get("/v1/datasets/d")[1]["version"] == 1
        return answer.status_code, answer.json()["code"], answer.headers.get("Retry-After", "")


@pytest.mark.slow
def test_a_write_without_a_database_is_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer_without_database(tmp_path, monkeypatch)
    assert found == (503, "database-away", "2")


def test_an_outage_that_is_not_recognised_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the test above: nothing is granted either, but nobody is told why."""
    monkeypatch.setattr(storage, "_CONNECTION_FAILURES", ())
    assert answer_without_database(tmp_path, monkeypatch)[0] == 500


@pytest.mark.parametrize("chained", [True, False])
def test_it_is_the_chain_that_shows_an_altered_time(
    chained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the hashes protect fields that no balance depends on."""
    if not chained:
        monkeypatch.setattr(hash_chain, "hash_entry", lambda *_: hash_chain.GENESIS)
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    with TestClient(app) as http:
        admin = Caller(http, app.state.keys.create([Scope.ADMIN])[0])
        admin.dataset("d")
        admin.reserve("d")
        repository = app.state.repository
        assert verify(repository).faults == []
        later = "UPDATE entry SET body = replace(body, '\"at\":', '\"at\":9') WHERE number = 2"
        with repository.transaction() as transaction:
            transaction.connection.exec_driver_sql(later)
        assert bool(verify(repository).faults) == chained
