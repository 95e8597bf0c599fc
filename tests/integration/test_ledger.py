"""The ledger through HTTP."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import QueuePool, create_engine, text
from sqlalchemy.exc import OperationalError

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.api import ledger_routes
from accountant_service.api.ledger_schemas import DatasetRequest
from accountant_service.computing.processes import ProcessPool
from accountant_service.errors import NoFiniteEpsilonError, TooExpensiveError
from accountant_service.ledger import api_keys, certificate, hash_chain, plans
from accountant_service.ledger import database as opening
from accountant_service.ledger import repository as storage
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.errors import DatabaseAwayError
from accountant_service.ledger.filters import LateReferenceFilter, addition, proofs, reference
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.rules import Dataset, Reservation
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.writing.canonical_json import canonical_json
from tests.support.databases import database
from tests.support.earlier_ledgers import FIXTURES
from tests.support.ledger_scenarios import (
    BUDGET,
    ON_SQLITE,
    PLAN,
    SQL_MATTERS,
    Caller,
    Clock,
    Commands,
    Json,
    Scenario,
    Service,
    faults_after,
    refused,
    serving,
)

RUN = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 60}
SHUFFLED = RUN | {"sampling": "shuffled"}
NO_STEPS = {"share": 0.0, "reference_steps": 0, "slack": 0.0}
NOTHING_ADDED = {"added_epsilon": "0", "added_delta": "0"}
# steps without sampling: exchanges between these are decided fast
EQUAL = {"kind": "dp_sgd", "noise_multiplier": 20.0, "sample_rate": 1.0, "sampling": "none",
         "steps": 12}  # fmt: skip
OTHER = EQUAL | {"noise_multiplier": 30.0}


@pytest.fixture(scope="module")
def admin(web: Service) -> Caller:
    return web.admin


@pytest.fixture
def name() -> str:
    """The name of a dataset of this test alone."""
    return f"d-{uuid.uuid4().hex}"


@pytest.mark.parametrize(
    ("by", "unit"),
    [
        pytest.param("reference", "reference_steps", marks=pytest.mark.slow),
        ("renyi", "micronats"),
    ],
)
def test_the_life_of_a_run(by: str, unit: str, admin: Caller, name: str) -> None:
    made = admin.dataset(name, filter=by, planned_mechanism=RUN)
    nothing = {"share": 0.0, "micronats": 0} if unit == "micronats" else NO_STEPS
    assert made["spent"] == {"epsilon": 0.0, **nothing}
    assert made["remaining"]["epsilon"] == BUDGET["epsilon"]
    quote = admin.quote(name, RUN)
    assert (quote["fits"], quote["guarantee"]["scope"]) == (True, "fixed_plan")
    assert quote["affordable"]["steps"] > 60
    run = admin.reserve(name, RUN, purpose="a first try")
    assert (run["state"], run["steps_reserved"], run["steps_granted"]) == ("open", 60, 0)
    status, run = admin.grant(run["id"], 20, 0)
    assert (status, run["steps_granted"]) == (200, 20)
    of = f"/v1/reservations/{run['id']}"
    held = admin.look(name)
    assert held["held"][unit] > 0
    for steps, sequence, code in ((20, 0, "stale-sequence"), (41, 20, "budget-exhausted")):
        status, problem = admin.grant(run["id"], steps, sequence)
        assert (status, problem.get("code")) == (409, code)
    for _ in range(2):  # a repeat is answered alike
        assert admin.make(f"{of}/commit")["state"] == "committed"
    assert admin.refusal("POST", f"{of}/release", {}) == (409, "reservation-closed")
    status, problem = admin.grant(run["id"], 1, 20)
    assert (status, problem["code"]) == (409, "reservation-closed")
    after = admin.look(name)
    assert after["held"][unit] == 0
    assert after["spent"][unit] == held["spent"][unit] > 0
    assert kinds(admin, name) == ["create", "reserve", "grant", "commit"]


@pytest.mark.slow
def test_a_dataset_of_training_takes_queries(admin: Caller, name: str) -> None:
    """After DP-SGD, noisy counts of any size are quoted and charged, in little time and memory."""
    admin.dataset(name, budget={"epsilon": 3.0, "delta": 1e-5})
    run = RUN | {"noise_multiplier": 1.1, "steps": 100}
    for first in ({"kind": "approximate_dp", "epsilon": 0.4, "delta": 0}, run):
        made = admin.reserve(name, first)
        assert admin.grant(made["id"], made["steps_reserved"], 0)[0] == 200
    spent = admin.look(name)["spent"]["reference_steps"]
    for scale in (5, 8, 10, 20):
        query = {"kind": "laplace", "noise_multiplier": scale}
        quote = admin.quote(name, query)
        assert quote["fits"]
        assert quote["affordable"]["steps"] >= scale
        assert admin.grant(admin.reserve(name, query)["id"], 1, 0)[0] == 200
        before, spent = spent, admin.look(name)["spent"]["reference_steps"]
        assert 0 < spent - before < 1000
    assert admin.quote(name, {"kind": "approximate_dp", "epsilon": 0.1, "delta": 0})["fits"]


def kinds(caller: Caller, name: str) -> list[str]:
    """Return the kinds of the entries of a dataset."""
    return [item["kind"] for item in caller.read(f"/v1/datasets/{name}/entries")["items"]]


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
@pytest.mark.parametrize("kind_of_round", ROUNDS)
def test_shuffled_reports_and_correlated_noise_are_charged(
    kind_of_round: str, admin: Caller, name: str
) -> None:
    """Rounds of one kind are the reference; a round is also exchanged for other steps."""
    one = ROUNDS[kind_of_round]
    plan = {"kind": "repeated", "count": 3, "mechanism": one}
    admin.dataset(name, planned_mechanism=plan)
    run = admin.reserve(name, plan)
    assert run["steps_reserved"] == 3
    assert admin.grant(run["id"], 2, 0)[1]["steps_granted"] == 2
    admin.commit(run["id"])
    spent = admin.look(name)["spent"]
    assert spent["reference_steps"] > 0  # a Gaussian reference is divided into finer steps
    alone = {"mechanism": plan | {"count": 2}, "delta": BUDGET["delta"]}
    assert spent["epsilon"] >= admin.make("/v1/epsilon", alone)["epsilon"] * (1 - 1e-3)
    admin.dataset(f"steps-{name}", planned_mechanism=EQUAL)
    other = admin.reserve(f"steps-{name}", one)
    assert admin.grant(other["id"], 1, 0)[0] == 200
    assert admin.read(f"/v1/datasets/steps-{name}")["spent"]["reference_steps"] > 0


# --- certificates


def sign(document: Json, **changes: Any) -> Json:
    """Sign a changed certificate by a key of its own."""
    key = Ed25519PrivateKey.generate()
    changed = document | changes | {"public_key": key.public_key().public_bytes_raw().hex()}
    unsigned = {field: value for field, value in changed.items() if field != "signature"}
    signature = key.sign(canonical_json(unsigned, ascii_only=True).encode())
    return unsigned | {"signature": signature.hex()}


def read_fixture(name: str) -> Json:
    return certificate.read((FIXTURES / "certificates" / f"certificate-{name}.json").read_text())


def epsilon_of(caller: Caller, mechanism: Json) -> float:
    """Return the ε of a mechanism alone."""
    asked = {"mechanism": mechanism, "delta": BUDGET["delta"]}
    return float(caller.make("/v1/epsilon", asked)["epsilon"])


@pytest.mark.slow
def test_a_certificate_can_be_checked_by_anyone(
    admin: Caller, name: str, commands: Commands, tmp_path: Path
) -> None:
    admin.dataset(name)
    run = admin.reserve(name, RUN | {"steps": 300})
    admin.grant(run["id"], 200, 0)
    path = f"/v1/reservations/{run['id']}/certificate"
    assert admin.get(path)[1]["code"] == "reservation-open"
    admin.commit(run["id"])
    document = admin.read(path)
    assert document["guarantee"]["scope"] == "fixed_plan"
    assert (document["steps_reserved"], document["steps"]) == (300, 200)
    asked = {"mechanism": RUN | {"steps": 300}, "delta": BUDGET["delta"]}
    alone = admin.make("/v1/epsilon", asked)
    assert document["guarantee"]["epsilon"] == alone["epsilon"]
    assert document["mechanism_hash"] == alone["mechanism_hash"]
    assert document["budget"]["epsilon"] == BUDGET["epsilon"]
    assert "the number of records is public" in str(document["guarantee"]["assumptions"])
    for public_key in (document["public_key"], document["public_key"].upper()):
        assert certificate.check(document, public_key)[0] == []
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(document))
    command = f"verify {file} --public-key {document['public_key'].upper()}"
    told = commands.make(command)
    assert "all 300 steps reserved; 200 of them were granted" in told
    assert "it assumes: the number of records is public" in told
    as_json = commands.json(command)
    assert (as_json["steps_reserved"], as_json["steps_granted"]) == (300, 200)
    assert (as_json["faults"], as_json["not_covered"]) == ([], [])
    better = document | {"guarantee": document["guarantee"] | {"epsilon": 0.1}}
    shorter = document | {"mechanism": document["mechanism"] | {"steps": 20}}
    for changed in (better, shorter, document | {"dataset": "other"}, {}, {"format": 1}):
        assert certificate.check(changed)[0], changed
        file.write_text(json.dumps(changed))
        assert commands(f"verify {file}")[0] == (1 if changed else 2)
    assert certificate.check(document, "00" * 32)[0]


@pytest.mark.slow
def test_however_a_run_stops_its_certificate_claims_what_it_reserved(
    admin: Caller, name: str, clock: Clock
) -> None:
    admin.dataset(name)
    whole = epsilon_of(admin, RUN | {"steps": 300})
    for end in ("commit", "release", "expire"):
        run = admin.reserve(name, RUN | {"steps": 300})
        admin.grant(run["id"], 7, 0)
        if end == "expire":
            clock.wait(3601)
        else:
            admin.make(f"/v1/reservations/{run['id']}/{end}")
        document = admin.certificate(run["id"])
        assert (document["guarantee"]["epsilon"], document["steps"]) == (whole, 7), end
        for field in ("mechanism", "mechanism_hash"):
            assert document[field] == run[field]


def test_an_end_declared_before_the_first_step_is_a_smaller_reservation(
    admin: Caller, name: str
) -> None:
    """The long plan is given up before anything was granted: the claim is of the short one."""
    admin.dataset(name)
    long = admin.reserve(name, RUN | {"steps": 300})
    admin.make(f"/v1/reservations/{long['id']}/release")
    short = admin.reserve(name, RUN | {"steps": 20})
    admin.grant(short["id"], 20, 0)
    admin.commit(short["id"])
    document = admin.certificate(short["id"])
    assert document["guarantee"]["epsilon"] == epsilon_of(admin, RUN | {"steps": 20})
    assert admin.grant(short["id"], 1, 20)[1]["code"] == "reservation-closed"


def test_steps_that_are_not_those_of_the_mechanism_are_found() -> None:
    """Whatever key signs a certificate, its numbers must agree with each other."""
    whole = read_fixture("1-whole") | {"format": certificate.FORMAT}
    right = [(300, 300), (300, 0)]
    for reserved, granted in (*right, (1500, 300), (20, 20), (300, 301), (300, -1)):
        document = sign(whole, steps_reserved=reserved, steps=granted)
        faults, _ = certificate.check(document)
        assert (faults == []) == ((reserved, granted) in right), (reserved, granted, faults)


def test_a_certificate_whose_mechanism_states_more_records_than_its_dataset_is_refused() -> None:
    stopped = read_fixture("3-stopped")
    delta = stopped["guarantee"]["delta"]
    for size, faults in ((1000, 0), (999, 0), (1001, 1), (10**9, 1)):
        reports = {"kind": "shuffled_reports", "reports": size, "mechanism": RESPONSE}
        plan = {"kind": "repeated", "count": 2, "mechanism": reports}
        claim = calculator.epsilon(mechanisms.from_json(plan), delta)
        document = sign(
            stopped,
            mechanism=plan,
            mechanism_hash=claim.mechanism_hash,
            guarantee={"epsilon": claim.epsilon, "delta": delta, "status": "proven"},
            steps_reserved=2,
            steps=2,
            dataset_size=1000,
        )
        named = f"/mechanism/reports of its mechanism is {size}, of 1000 records"
        assert certificate.check(document)[0] == [named] * faults


def test_a_file_that_is_no_certificate_is_refused(commands: Commands, tmp_path: Path) -> None:
    """Also one with a name twice, at any depth: one reader takes the first, another the last."""
    text = (FIXTURES / "certificates" / "certificate-1-whole.json").read_text()
    cases = dict.fromkeys(("[]", "3", '{"format": NaN}', "[" * 100_000, ""), "is not a certificate")
    for inside in (
        '"steps": 300,', '"delta": 1e-05,', '"noise_multiplier": 1.1,', '"entries": 4,'
    ):  # fmt: skip
        field = inside.split(":")[0]
        at = text.index(field)
        cases[text[:at] + inside + text[at:]] = f"{field[1:-1]} is given more than once"
    file = tmp_path / "certificate.json"
    for content, said in cases.items():
        file.write_text(content)
        status, told = commands(f"verify {file}")
        assert (status, said in told) == (2, True), told


# --- mechanisms that a dataset does not take


NESTED = {"kind": "fixed_size_sampled", "dataset_size": 60_000, "batch_size": 600,
          "mechanism": {"kind": "gaussian", "noise_multiplier": 2.0}}  # fmt: skip
SIZED = {"kind": "dp_sgd", "noise_multiplier": 2.0, "dataset_size": 60_000, "batch_size": 600,
         "steps": 10}  # fmt: skip


def sized(size: int) -> list[tuple[Json, str]]:
    """Return mechanisms for a number of records, and where each says it."""
    run, nested = SIZED | {"dataset_size": size}, NESTED | {"dataset_size": size}
    repeated = {"kind": "repeated", "count": 5, "mechanism": nested}
    rate = {"sample_rate": 1, "mechanism": run}
    truncated = {"kind": "truncated_poisson_sampled", "dataset_size": 60_000,
                 "batch_size_max": 60_000}  # fmt: skip
    return [
        (run, "/dataset_size"),
        (run | {"sampling": "fixed_size"}, "/dataset_size"),
        (nested, "/dataset_size"),
        (
            {"kind": "composed", "mechanisms": [SIZED, repeated]},
            "/mechanisms/1/mechanism/dataset_size",
        ),
        ({"kind": "poisson_sampled"} | rate, "/mechanism/dataset_size"),
        ({"kind": "parallel", "mechanisms": [nested]}, "/mechanisms/0/dataset_size"),
        (truncated | rate, "/mechanism/dataset_size"),
    ]


def test_a_weak_budget_needs_an_explicit_yes(admin: Caller, name: str) -> None:
    weak = {"name": name, "size": 100, "budget": {"epsilon": 200, "delta": 0.5}}
    for body in (weak, weak | {"accept_weak": False}):
        status, problem = admin.post("/v1/datasets", body)
        assert (status, problem["code"]) == (422, "weak-guarantee")
        assert "ε = 200 is above 20" in problem["detail"]
        assert "δ = 0.5 is not below 1/100" in problem["detail"]
        assert "set accept_weak" in problem["detail"]
    made = admin.make("/v1/datasets", weak | {"accept_weak": True})
    assert made["budget"] == weak["budget"]
    strong = {"name": f"{name}-strong", "size": 1, "budget": {"epsilon": 20, "delta": 0.9}}
    admin.make("/v1/datasets", strong | {"accept_weak": True})
    events = [json.loads(line) for line in admin.read("/v1/events?format=jsonl").splitlines()]
    details = {each["subject"]: each["detail"] for each in events}
    assert details[strong["name"]] == "", "nothing was weak"
    assert details[name].startswith("weak budget accepted: ε = 200 is above 20: ")
    assert "δ = 0.5 is not below 1/100" in details[name]


def test_a_request_without_the_yes_is_hashed_as_before_there_was_one() -> None:
    body = {"name": "d", "size": 100, "budget": {"epsilon": 1, "delta": 1e-5}}
    asked = DatasetRequest.model_validate(body)
    assert "accept_weak" not in ledger_routes._body_as_json(asked)  # private: what is hashed


@pytest.mark.slow
def test_a_mechanism_for_another_number_of_records_is_refused(admin: Caller, name: str) -> None:
    """A rate is a batch size over the number of records that there are, not one that is said."""
    admin.dataset(name)
    sizes = (10**9, 60_001, 59_999)
    others = [sized(size) for size in sizes]
    new = {"name": "new", "size": 60_000, "budget": BUDGET}
    for at, (right, pointer) in enumerate(sized(60_000)):
        plan = others[at % len(sizes)][at][0]
        for path, body, where in (
            (f"/v1/datasets/{name}/quotes", {"mechanism": plan}, "/mechanism"),
            (f"/v1/datasets/{name}/reservations", {"mechanism": plan}, "/mechanism"),
            ("/v1/datasets", new | {"planned_mechanism": plan}, "/planned_mechanism"),
        ):
            status, problem = admin.post(path, body)
            assert (status, problem["code"]) == (422, "dataset-size-mismatch"), path
            assert [fault["pointer"] for fault in problem["errors"]] == [where + pointer]
        batch = admin.make(f"/v1/datasets/{name}/quotes/batch", {"mechanisms": [plan]})
        problem = batch["items"][0]["problem"]
        assert problem["code"] == "dataset-size-mismatch"
        assert problem["errors"][0]["pointer"] == "/mechanisms/0" + pointer
        assert batch["together"]["fits"] is False
        admin.quote(name, right)
    for size in sizes:
        plan = sized(size)[0][0]
        refused_with = admin.refusal("POST", f"/v1/datasets/{name}/quotes", {"mechanism": plan})
        assert refused_with == (422, "dataset-size-mismatch")
    assert admin.look(name)["version"] == 1


def test_more_reports_than_records_are_refused(admin: Caller, name: str) -> None:
    """Each of a million reports hides the others better than each of a thousand does."""
    admin.dataset(name)
    plan = {"kind": "repeated", "count": 2, "mechanism": ROUNDS["reports"] | {"reports": 60_001}}
    for path in ("quotes", "reservations"):
        status, problem = admin.post(f"/v1/datasets/{name}/{path}", {"mechanism": plan})
        assert (status, problem["code"]) == (422, "dataset-size-mismatch")
        assert [e["pointer"] for e in problem["errors"]] == ["/mechanism/mechanism/reports"]
        assert "reports is 60001, but there are 60000 records" in problem["detail"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["reference", "renyi"])
def test_a_hypothesis_that_fails_for_replaced_records_is_checked_by_every_filter(
    by: str, admin: Caller, name: str
) -> None:
    """A replaced record may move to another group, or to a part without releases."""
    admin.dataset(name, neighbouring_relation="replace_one", filter=by)
    noise = {"kind": "gaussian", "noise_multiplier": 40.0}
    nothing = {"kind": "composed", "mechanisms": []}
    part = {"kind": "parallel", "mechanisms": [noise, nothing]}
    for plan in (ROUNDS["bands"], part):
        for path in ("quotes", "reservations"):
            status, problem = admin.post(f"/v1/datasets/{name}/{path}", {"mechanism": plan})
            assert status == 422, problem
    whole = {"mechanism": {"kind": "parallel", "mechanisms": [noise]}}
    admin.make(f"/v1/datasets/{name}/quotes", whole)
    # the same releases, charged before, prove nothing about a part
    admin.reserve(name, noise)
    status, problem = admin.try_to_reserve(name, part)
    assert status == 422, problem
    assert "each record belongs to one part" in problem["detail"]


@pytest.mark.parametrize("by", ["renyi", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_part_without_releases_costs_what_the_other_part_costs(
    by: str, admin: Caller, name: str
) -> None:
    """Ledgers of earlier versions stored such runs, with the hash of the part that releases."""
    admin.dataset(name, filter=by)
    noise: Json = {"kind": "gaussian", "noise_multiplier": 40.0}
    part = {"kind": "parallel", "mechanisms": [noise, {"kind": "composed", "mechanisms": []}]}
    alone, run = admin.reserve(name, noise), admin.reserve(name, part)
    assert run["mechanism_hash"] == alone["mechanism_hash"]
    assert run["mechanism"] == part
    admin.grant(run["id"], 1, 0)
    admin.commit(run["id"])
    document = admin.certificate(run["id"])
    assert certificate.check(document)[0] == []
    assert document["guarantee"]["epsilon"] == epsilon_of(admin, noise)
    assert document["guarantee"]["gaussian_dp"] is not None
    earlier = sign(document, mechanism_hash=run["mechanism_hash"])
    assert certificate.check(earlier)[0] == []


# --- quotes and refusals


@pytest.mark.slow
def test_equal_refusals_compute_once_what_would_fit(
    admin: Caller, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes most of a second of the key's turn: a job that retries would jam it."""
    computed: list[str] = []
    run = ProcessPool.run

    async def count(pool: ProcessPool, function: Any, *arguments: Any) -> Any:
        computed.append(function.__name__)
        return await run(pool, function, *arguments)

    monkeypatch.setattr(ProcessPool, "run", count)
    admin.dataset(name, {"epsilon": 1.0, "delta": 1e-5})
    long = RUN | {"steps": 100_000}
    answers = [admin.try_to_reserve(name, long) for _ in range(3)]
    assert [status for status, _ in answers] == [409] * 3
    assert answers[0][1]["affordable"]["steps"] > 0
    assert all(problem["affordable"] == answers[0][1]["affordable"] for _, problem in answers)
    assert computed.count("find_affordable") == 1
    admin.reserve(name, RUN | {"steps": 1})
    _, problem = admin.try_to_reserve(name, long)
    assert computed.count("find_affordable") == 2, "the budget has changed"
    assert problem["affordable"]["steps"] < answers[0][1]["affordable"]["steps"]


@pytest.mark.slow
def test_a_refusal_stands_when_nothing_tells_what_would_fit(
    admin: Caller, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ProcessPool.run

    async def fail(pool: ProcessPool, function: Any, *arguments: Any) -> Any:
        if function.__name__ == "find_affordable":
            raise TooExpensiveError("more than 10 s of CPU time")
        return await run(pool, function, *arguments)

    admin.dataset(name, {"epsilon": 1.0, "delta": 1e-5})
    long = RUN | {"steps": 100_000}
    with monkeypatch.context() as patch:
        patch.setattr(ProcessPool, "run", fail)
        status, problem = admin.try_to_reserve(name, long)
    assert (status, problem["code"]) == (409, "budget-exhausted")
    status, problem = admin.try_to_reserve(name, long)
    assert (status, problem["affordable"]["steps"] > 0) == (409, True), "a failure is not kept"


def test_a_run_that_does_not_fit_is_refused_with_one_that_does(admin: Caller, name: str) -> None:
    admin.dataset(name)
    long = RUN | {"steps": 100_000}
    quote = admin.quote(name, long)
    assert not quote["fits"]
    status, problem = admin.try_to_reserve(name, long)
    assert (status, problem["code"]) == (409, "budget-exhausted")
    assert problem["affordable"] == quote["affordable"]
    steps, noise = problem["affordable"]["steps"], problem["affordable"]["noise_multiplier"]
    assert admin.quote(name, long | {"noise_multiplier": noise})["fits"]
    assert not admin.quote(name, RUN | {"steps": steps + 1})["fits"]
    admin.reserve(name, RUN | {"steps": steps})
    status, problem = admin.try_to_reserve(name, RUN)
    assert (status, problem["affordable"]["steps"]) == (409, 0)


@pytest.mark.slow
def test_quotes_of_many_plans(admin: Caller, name: str) -> None:
    """Each by itself and all together; what cannot be charged is named in its place."""
    admin.dataset(name)
    one = admin.quote(name, RUN)
    half = RUN | {"steps": one["affordable"]["steps"] // 2}
    path = f"/v1/datasets/{name}/quotes/batch"
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
    assert admin.get(f"/v1/datasets/{name}")[1]["version"] == 1  # nothing was charged


@pytest.mark.slow
def test_plans_that_can_be_reserved_one_after_the_other_fit_together(
    admin: Caller, name: str
) -> None:
    """Each exchange takes a share of the slack that is left, not of the slack at first."""
    admin.dataset(name)
    admin.reserve(name, RUN | {"steps": 60})
    plans = [RUN | {"steps": 60, "noise_multiplier": 1.1 + 0.05 * phase} for phase in range(6)]
    status, found = admin.post(f"/v1/datasets/{name}/quotes/batch", {"mechanisms": plans})
    assert (status, found["together"]["fits"]) == (200, True)
    for each in plans:
        admin.reserve(name, each)
    dataset, _ = stored(admin, name)
    after = dataset.policy.epsilon_of(dataset.balance.taken)
    assert after == pytest.approx(found["together"]["epsilon_after"], rel=1e-3)


def stored(admin: Caller, name: str) -> tuple[Dataset, list[Reservation]]:
    """A dataset and its reservations as the database has them."""
    with admin.http.app.state.repository.reading() as reading:  # type: ignore[attr-defined]
        dataset = reading.find_dataset(name)
        return dataset, reading.list_reservations(dataset)


@pytest.mark.slow
def test_a_quote_without_a_finite_epsilon_is_a_quote(
    admin: Caller, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infinite(*_: Any) -> None:
        raise NoFiniteEpsilonError("none at all")

    monkeypatch.setattr(calculator, "prove_epsilon", infinite)
    admin.dataset(name)
    found = plans.quote_plan(stored(admin, name)[0], mechanisms.from_json(RUN))
    assert found.fits
    assert found.guarantee is None


def test_the_running_total_is_labelled_and_counts_what_was_granted(
    admin: Caller, name: str
) -> None:
    admin.dataset(name)
    status, nothing = admin.get(f"/v1/datasets/{name}/running-total")
    assert (status, nothing["epsilon"], nothing["scope"]) == (200, 0.0, "running_total")
    for steps in (20, 60):
        run = admin.reserve(name, RUN)["id"]
        admin.grant(run, steps, 0)
    _, total = admin.get(f"/v1/datasets/{name}/running-total")
    whole = {"mechanism": RUN | {"steps": 80}, "delta": BUDGET["delta"]}
    alone = admin.http.post("/v1/epsilon", json=whole).json()
    assert total["epsilon"] == alone["epsilon"]
    assert total["epsilon"] <= admin.get(f"/v1/datasets/{name}")[1]["spent"]["epsilon"]
    assert (total["status"], total["certified"]) == ("estimate", None)  # runs may have been stopped
    assert "planned before any result" in total["certified_reason"]


def test_a_plan_of_no_steps_is_certified_as_nothing(admin: Caller, name: str) -> None:
    admin.dataset(name)
    run = admin.reserve(name, RUN | {"steps": 0})["id"]
    admin.grant(run, 1, 0)
    assert admin.post(f"/v1/reservations/{run}/commit")[0] == 200
    _, document = admin.get(f"/v1/reservations/{run}/certificate")
    assert document["guarantee"]["epsilon"] == 0.0
    spent = admin.get(f"/v1/datasets/{name}")[1]["spent"]
    assert spent == {"epsilon": 0.0, **NO_STEPS, **NOTHING_ADDED}
    assert admin.get(f"/v1/datasets/{name}/running-total")[1]["epsilon"] == 0.0


def test_a_plan_too_expensive_for_pld_is_certified_by_subsampled_rdp(
    admin: Caller, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: a plan beyond the real limit takes minutes
    monkeypatch.setattr("accountant_service.accounting.methods.pld._RELEASES_MAX", 1)
    admin.dataset(name)
    for noise in (1.0, 2.0):
        run = admin.reserve(name, RUN | {"noise_multiplier": noise})["id"]
        admin.grant(run, 10, 0)
    dataset, runs = stored(admin, name)
    assert plans.estimate_running_total(dataset.policy, runs).method == "subsampled_rdp"


def test_quotes_that_take_too_long_say_so(
    admin: Caller, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: no setting changes the seconds for all quotes of a request
    monkeypatch.setattr("accountant_service.api.async_ledger._QUOTES_SECONDS_MAX", -1.0)
    admin.dataset(name)
    _, found = admin.post(f"/v1/datasets/{name}/quotes/batch", {"mechanisms": [RUN]})
    assert found["items"][0]["problem"]["code"] == "too-expensive"


def test_computations_can_be_closed(url: str) -> None:
    with serving(url, open_computation=False) as found:
        ask = {"mechanism": RUN, "delta": 1e-5}
        callers = [found.caller(scope) for scope in Scope]
        for path, body in (("/v1/epsilon", ask), ("/v1/batch", {"requests": []})):
            assert found.http.post(path, json=body).json()["code"] == "unauthenticated"
            assert all(each.post(path, body)[0] != 401 for each in callers)
        assert found.http.get("/healthz").status_code == 200
        assert found.http.get("/v1/methods").status_code == 200


# --- repeats, races and leases


@SQL_MATTERS
def test_a_repeat_is_answered_alike_and_happens_once(admin: Caller, name: str) -> None:
    """Also of requests that are raced against each other."""
    admin.dataset(name)
    path, body, once = f"/v1/datasets/{name}/reservations", {"mechanism": RUN}, uuid.uuid4().hex
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: admin.post(path, body, once), range(8)))
    assert {status for status, _ in found} == {201}
    assert len({answer["id"] for _, answer in found}) == 1
    assert admin.post(path, body, once) == found[0]
    assert kinds(admin, name) == ["create", "reserve"]
    status, problem = admin.post(path, {"mechanism": RUN | {"steps": 61}}, once)
    assert (status, problem["code"]) == (422, "idempotency-key-reused")
    headers = {"Authorization": f"Bearer {admin.key}"}
    answer = admin.http.post(path, json=body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "idempotency-key-required")


def test_a_new_server_asks_no_database_for_what_it_remembers(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop asks what is remembered, and a database that hangs would stop it."""
    token, _ = scenario.keys.create([Scope.RUN])

    def refuse(*_: Any) -> bytes:
        raise AssertionError("the database was asked")

    monkeypatch.setattr(scenario.repository, "get_or_create_secret", refuse)
    assert api_keys.Keys(scenario.repository).remembered(token) is None


@pytest.mark.parametrize("asks", ["the next step", "an earlier answer"])
@pytest.mark.parametrize("change", ["revoked", "quota", "expired"])
def test_a_remembered_key_grants_until_it_changes(
    admin: Caller, web: Service, name: str, change: str, asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that was read within a minute is not read again: the write itself sees a change."""
    admin.dataset(name)
    ends = {"expires_at": storage.now() + 30_000_000} if change == "expired" else {}
    job = web.caller(Scope.RUN, **ends)
    run = job.reserve(name)["id"]

    def step(made: int) -> tuple[int, Any]:
        path = f"/v1/reservations/{run}/grants"
        return job.post(path, {"steps": 1, "sequence": made}, once=f"{change} {asks} {made}")

    assert step(0)[0] == 200
    with monkeypatch.context() as patch:
        patch.setattr(web.keys, "authenticate", None)
        assert step(1)[0] == 200
    if change == "revoked":
        web.keys.revoke(job.identifier, "test")
    elif change == "quota":
        web.keys.set_quota(job.identifier, 1, "test")
        assert step(2)[0] == 200
    else:
        later = storage.now() + 30_000_000
        monkeypatch.setattr(api_keys, "now", lambda: later)
    made, refused = (3, 429) if change == "quota" else (2, 401)
    # one request only: a refusal makes the server forget the key
    assert step(made if asks == "the next step" else 1)[0] == refused
    assert admin.read(f"/v1/reservations/{run}")["steps_granted"] == made


def test_a_grant_is_answered_alike_with_and_without_fastapi(
    admin: Caller, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant of a plain content type is read directly; of any other, by FastAPI."""
    admin.dataset(name)
    path = f"/v1/reservations/{admin.reserve(name)['id']}/grants"
    step = {"steps": 1, "sequence": 0}

    def send(kind: str, where: str, body: str, **headers: str) -> tuple[int, Any]:
        sent = {"Authorization": f"Bearer {admin.key}", "Content-Type": kind, **headers}
        answer = admin.http.post(where, content=body, headers=sent)
        return answer.status_code, answer.json()

    plain, other = "application/json", "application/json; charset=utf-8"
    for where, body, headers in (
        (path, '{"steps": 0, "sequence": 0}', {}),
        (path, '{"steps": 1}', {}),
        (path, '{"steps": 1, "steps": 1, "sequence": 0}', {}),
        (path, "{", {}),
        (path, "", {}),
        (path, json.dumps(step) + " " * (1 << 20), {}),
        (path, json.dumps(step), {"Authorization": "Bearer pa_0_0"}),
        (path, json.dumps(step), {"Idempotency-Key": "x" * 201}),
        (path, json.dumps(step), {}),  # a write without the key
        (path.replace("/grants", "%20/grants"), json.dumps(step), {"Idempotency-Key": "a"}),
        ("/v1/reservations/none/grants", json.dumps(step), {"Idempotency-Key": "a"}),
    ):
        refused = send(plain, where, body, **headers)
        assert refused == send(other, where, body, **headers)
        assert refused[0] >= 400

    once = {"Idempotency-Key": "once"}
    granted = send(other, path, json.dumps(step), **once)
    monkeypatch.setattr("fastapi.routing.solve_dependencies", None)
    assert send(plain, path, json.dumps(step), **once) == granted
    assert granted[1]["steps_granted"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("by", ["renyi", "reference"])
def test_a_lease_that_ends_frees_what_was_never_granted(
    by: str, admin: Caller, name: str, clock: Clock
) -> None:
    unit = "micronats" if by == "renyi" else "reference_steps"
    admin.dataset(name, filter=by, planned_mechanism=RUN)
    run = admin.reserve(name, RUN, lease_seconds=2.0)
    admin.grant(run["id"], 10, 0)
    spent = admin.look(name)["spent"]
    renewed = admin.make(f"/v1/reservations/{run['id']}/renew", {"lease_seconds": 60})
    assert renewed["expires_at"] > run["expires_at"]
    clock.wait(30)
    assert admin.look(name)["held"][unit] > 0
    clock.wait(31)
    found = admin.look(name)
    assert (found["held"][unit], found["spent"]) == (0, spent)
    assert admin.read(f"/v1/reservations/{run['id']}")["state"] == "expired"
    status, problem = admin.grant(run["id"], 1, 10)
    assert (status, problem["code"]) == (409, "reservation-closed")


@pytest.mark.parametrize(
    "asked",
    ["dataset", *(pytest.param(each, marks=pytest.mark.slow)
                  for each in ("reservation", "reservations", "quote"))],
)  # fmt: skip
def test_an_exchanged_run_whose_lease_ends_gives_back_what_its_other_steps_dominate(
    asked: str, admin: Caller, name: str, clock: Clock
) -> None:
    """Whatever is asked first: the exchange back is computed outside of the transaction."""
    admin.dataset(name, planned_mechanism=EQUAL)
    run = admin.reserve(name, OTHER, lease_seconds=60.0)
    admin.grant(run["id"], 4, 0)
    before = admin.look(name)
    clock.wait(61)
    whole = EQUAL | {"steps": before["accounting"]["reference_steps"]}
    if asked == "reservation":
        assert admin.read(f"/v1/reservations/{run['id']}")["state"] == "expired"
    if asked == "reservations":  # refused, but not without an ended lease
        plan = {"mechanism": whole}
        assert admin.post(f"/v1/datasets/{name}/reservations", plan)[0] == 409
    if asked == "quote":
        admin.quote(name, EQUAL)
    after = admin.look(name)
    assert after["held"] == {"epsilon": 0.0, **NO_STEPS}
    taken = [
        each["spent"]["reference_steps"] + each["held"]["reference_steps"]
        for each in (before, after)
    ]
    assert 0 < after["spent"]["reference_steps"] == taken[1] < taken[0]
    assert before["spent"]["reference_steps"] <= taken[1]
    last = admin.read(f"/v1/datasets/{name}/entries")["items"][-1]
    assert (last["kind"], last["key"]) == ("expire", "system")


@pytest.mark.slow
def test_ended_leases_that_take_too_long_are_left_for_the_next_request(
    admin: Caller, name: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.dataset(name, planned_mechanism=EQUAL)
    runs = [admin.reserve(name, OTHER, lease_seconds=60.0) for _ in range(2)]
    for run in runs:
        admin.grant(run["id"], 1, 0)
    clock.wait(61)
    # private: no setting changes the seconds for the leases that ended
    monkeypatch.setattr("accountant_service.api.async_ledger._RETURNS_SECONDS_MAX", -1.0)
    held = [admin.look(name)["held"]["reference_steps"] for _ in range(2)]
    assert held[0] > held[1] == 0


@pytest.mark.slow
def test_an_exchange_that_is_not_decided_in_time_is_refused_and_costs_nothing(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = mechanisms.from_json(RUN | {"sample_rate": 0.02, "noise_multiplier": 1.4})
    admin = scenario.admin
    admin.create(by="reference", plan=mechanisms.from_json(RUN))
    before = scenario.dataset()
    with monkeypatch.context() as patch:
        # private: no setting changes the seconds in which an exchange is decided
        patch.setattr(proofs, "_SECONDS_MAX", 0.0)
        with refused("exchange-undecided", "nothing was charged") as told:
            admin.reserve(plan, once="once")
    assert told.value.status == 422
    assert scenario.dataset() == before
    admin.reserve(plan, once="once")  # the same request, once there is time
    assert scenario.dataset().balance.held[0] > 0


@pytest.mark.slow
def test_ending_early_and_exchanging_there_and_back_never_gains(admin: Caller, name: str) -> None:
    """Ten steps made one by one, each of a run that ends then, cost no less than ten at once."""
    for of, steps, times in (("once", 3, 1), ("often", 1, 3)):
        admin.dataset(f"{of}-{name}", planned_mechanism=EQUAL)
        for _ in range(times):
            run = admin.reserve(f"{of}-{name}", OTHER | ({"steps": 3} if times == 1 else {}))
            admin.grant(run["id"], steps, 0)
            status, found = admin.commit(run["id"])
            assert (status, found["state"], found["steps_granted"]) == (200, "committed", steps)
    at_once, often = (admin.read(f"/v1/datasets/{of}-{name}") for of in ("once", "often"))
    assert often["spent"]["reference_steps"] >= at_once["spent"]["reference_steps"]
    assert often["held"] == {"epsilon": 0.0, **NO_STEPS}


@pytest.mark.slow
def test_the_first_reservation_chooses_the_reference_and_the_next_keep_it(
    admin: Caller, name: str
) -> None:
    of = f"/v1/datasets/{name}"
    assert admin.dataset(name)["accounting"]["reference"] is None
    # more steps of it than there are of any later reference
    quiet = admin.reserve(name, EQUAL | {"noise_multiplier": 60.0, "steps": 1000})
    admin.make(f"/v1/reservations/{quiet['id']}/release")
    run = admin.reserve(name, EQUAL)
    found = admin.read(of)["accounting"]
    assert (found["reference"]["kind"], found["planned"]) == ("gaussian", False)
    first = found["reference"]["noise_multiplier"]
    admin.make(f"/v1/reservations/{run['id']}/release")  # nothing was released: open again
    run = admin.reserve(name, OTHER)
    found = admin.read(of)["accounting"]
    assert found["reference"]["noise_multiplier"] != first
    admin.grant(run["id"], 1, 0)
    admin.commit(run["id"])
    admin.reserve(name, EQUAL)
    assert admin.read(of)["accounting"] == found
    scenario = Scenario(admin.http.app.state.repository)  # type: ignore[attr-defined]
    history = scenario.ledger.compute_burn_down(scenario.admin.record, name, 100)
    assert all(0 <= point.spent <= point.taken <= BUDGET["epsilon"] for point in history)


# --- keys and refusals


def test_a_request_without_a_valid_key_is_told_what_is_wrong_with_it(web: Service) -> None:
    for key, said in (
        ("", "send an API key"),
        ("pa_x_y", "is unknown"),
        (web.admin.key[:-1] + "!", "is unknown"),
        ("nonsense", "begins with pa_"),
    ):
        status, problem = web.with_key(key).get("/v1/datasets")
        assert (status, problem["code"]) == (401, "unauthenticated")
        assert said in problem["detail"]


def test_keys_are_shown_once_and_can_be_revoked_and_events_name_who_did_it(web: Service) -> None:
    admin = web.admin
    made = admin.make("/v1/keys", {"scopes": ["run"], "name": "team"})
    assert made["warnings"] == []
    missing = admin.make("/v1/keys", {"scopes": ["run"], "datasets": ["adlut"]})
    assert missing["warnings"][0].startswith("there is no dataset 'adlut'")
    assert made["scopes"] == ["run"]
    team = web.with_key(made["key"])
    team.read("/v1/datasets")
    listed = admin.read("/v1/keys")["items"]
    assert made["key"] not in str(listed)
    assert any(key["id"] == made["id"] and key["last_used_at"] for key in listed)
    assert admin.ask("DELETE", f"/v1/keys/{made['id']}")[0] == 200
    assert team.get("/v1/datasets")[0] == 401
    assert admin.refusal("DELETE", "/v1/keys/none") == (404, "not-found")
    with web.repository.reading() as reading:
        events = [each for each in reading.list_audit_events() if each["subject"] == made["id"]]
    assert [(each["key"], each["action"]) for each in events] == [
        (admin.identifier, "key-created"), (admin.identifier, "key-revoked")
    ]  # fmt: skip


def test_audit_events_record_who_did_what(commands: Commands) -> None:
    identifier = commands.make("keys create --scope admin").split("_")[1]
    commands.make(f"keys revoke {identifier}")
    events = commands.json("ledger events")
    assert [(event["key"], event["action"], event["subject"]) for event in events] == [
        ("system", "secret-created", "api-keys"),
        ("command-line", "key-created", identifier),
        ("command-line", "key-revoked", identifier),
    ]
    assert "key-revoked" in commands.make("ledger events")


def test_what_this_ledger_cannot_charge_or_store_is_refused(admin: Caller) -> None:
    """`tests/support/refusals.py` has the refusals of all other input."""
    budgets = ("refusals", "renyi")
    for name in budgets:
        admin.dataset(name, filter="renyi" if name == "renyi" else "reference")
    codes = [admin.try_to_reserve(name, SHUFFLED)[1]["code"] for name in budgets]
    assert codes == ["unsuitable-reference", "method-not-applicable"]
    for path, body in (
        ("/v1/datasets/refusals/reservations", {"mechanism": RUN, "lease_seconds": 0}),
        # text that no database can store
        ("/v1/datasets/refusals/reservations", {"mechanism": RUN, "purpose": "\0"}),
        ("/v1/datasets", {"name": "a", "size": 1, "budget": BUDGET, "privacy_unit": "a\0b"}),
        ("/v1/keys", {"scopes": ["run"], "name": "\0"}),
    ):
        assert admin.refusal("POST", path, body) == (422, "invalid-request"), (path, body)
    for path in ("/v1/datasets/%00", "/v1/reservations/%00", "/v1/datasets/a%0A"):
        assert admin.get(path)[1]["code"] == "invalid-request", path


def test_entries_are_paged(admin: Caller, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.dataset(name, filter="renyi")
    run = admin.reserve(name, RUN)
    for k in range(5):
        admin.grant(run["id"], 1, k)
    monkeypatch.setattr("accountant_service.ledger.service.PAGE_SIZE", 3)
    seen: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        page = admin.read(f"/v1/datasets/{name}/entries?cursor={cursor}")
        seen += [item["number"] for item in page["items"]]
        cursor = page["next_cursor"]
    assert seen == list(range(1, 8))


# --- the stored record


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


@pytest.fixture(scope="module")
def one_run(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A ledger with one dataset and one run."""
    with database(kind, tmp_path_factory.mktemp("tampering")) as url, serving(url) as service:
        service.admin.dataset("d")
        run = service.admin.reserve("d", RUN)
        for sequence in (0, 20, 40):
            assert service.admin.grant(run["id"], 20, sequence)[0] == 200
        yield service.repository


@pytest.mark.slow
def test_tampering_is_detected(one_run: Repository) -> None:
    for statement in TAMPERING:
        faults = faults_after(one_run, statement)
        assert faults, statement
        if "number" in statement:
            number = statement.rsplit("= ", 1)[1]
            assert any(number in fault for fault in faults), faults


@pytest.mark.parametrize("chained", [True, False])
def test_it_is_the_chain_that_shows_an_altered_time(
    chained: bool, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the hashes protect fields that no balance depends on."""
    if not chained:
        monkeypatch.setattr(hash_chain, "hash_entry", lambda *_: hash_chain.GENESIS)
    scenario.admin.create()
    scenario.admin.reserve()
    altered = """body = replace(body, '"at":', '"at":9'), kind = NULL, at = NULL"""
    later = f"UPDATE entry SET {altered} WHERE number = 2"
    assert bool(scenario.faults_after(later)) == chained


# --- the database


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
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("UPDATE ledger_schema SET oldest_writer = '9998'")
    with pytest.raises(opening.NewerDatabaseError, match="newer"):
        opening.open_repository(url)


@SQL_MATTERS
@pytest.mark.parametrize("make", ["at once", "by the chain"])
def test_migrations_and_create_all_make_the_same_tables(make: str, url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from accountant_service.ledger.schema_revision import SCHEMA
    from accountant_service.ledger.tables import METADATA

    with (
        closing(Repository(storage.connect(url))) as repository,
        repository.transaction() as transaction,
    ):
        if make == "at once":
            assert opening.upgrade(transaction.connection)[0] is None
        else:
            # private: `upgrade` creates the tables of an empty database at once
            opening._run_migrations(transaction.connection)
        context = MigrationContext.configure(transaction.connection)
        assert compare_metadata(context, [METADATA, SCHEMA.metadata]) == []
        before, after = opening.upgrade(transaction.connection)
        assert before == after == context.get_current_revision()


def test_a_database_that_is_away_grants_nothing() -> None:
    away = Repository(storage.connect("postgresql+psycopg://postgres@127.0.0.1:1/none"))
    with closing(away), pytest.raises(Exception, match="does not answer"), away.transaction():
        pass


def test_a_connection_in_use_is_closed_after_the_repository(tmp_path: Path) -> None:
    """A thread that reads the metrics may outlive the service."""
    repository = opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")
    with repository.reading() as reading:
        used = reading.connection.connection.dbapi_connection
        repository.close()
        assert reading.connection.execute(text("SELECT 1")).scalar() == 1
    assert isinstance(used, sqlite3.Connection)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        used.execute("SELECT 1")


@pytest.mark.slow
@ON_SQLITE
@pytest.mark.parametrize("recognised", [True, False])
def test_a_write_without_a_database_is_told_to_come_again(
    recognised: bool, own_web: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the mutant that does not recognise the outage: it grants nothing either."""
    own_web.admin.dataset("d")

    def gone(*_: Any) -> None:
        raise OperationalError("BEGIN", {}, Exception("the connection is lost"))

    with monkeypatch.context() as patch:
        patch.setattr(own_web.repository.engine, "connect", gone)
        if not recognised:
            # private: the mutant
            patch.setattr(storage, "_CONNECTION_FAILURES", ())
        answer = own_web.admin.send("POST", "/v1/datasets/d/reservations", {"mechanism": RUN})
    assert own_web.admin.read("/v1/datasets/d")["version"] == 1
    assert answer.status_code == (503 if recognised else 500)
    if recognised:
        assert answer.json()["code"] == "database-away"
        assert answer.headers["Retry-After"] == "2"


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("plan", [None, mechanisms.ApproximateDp(3.0, 1e-5)])
def test_a_release_takes_a_budget_of_its_own_delta(
    scenario: Scenario, plan: mechanisms.Mechanism | None
) -> None:
    """By addition, or as a planned reference, which leaves no slack."""
    admin = scenario.admin
    admin.create(by="reference", plan=plan)
    first = admin.reserve(mechanisms.ApproximateDp(3.0, 1e-5))
    admin.release(first)
    if plan is None:
        admin.release(admin.reserve(12))
    run = admin.reserve(mechanisms.ApproximateDp(3.0, 1e-5))
    admin.grant(run)
    admin.commit(run)
    dataset = scenario.dataset()
    assert dataset.policy.share_of(dataset.balance.spent) == 1.0
    if isinstance(dataset.policy, reference.ReferenceFilter):
        assert (dataset.policy.steps, dataset.policy.slack_share) == (1, 0.0)
    with refused("budget-exhausted"):
        admin.reserve(1)


@pytest.mark.slow
def test_queries_are_added_up_and_a_run_counts_the_rest(scenario: Scenario) -> None:
    """Whatever ends early gives back what it took; the run is charged after what was added."""
    admin = scenario.admin
    admin.create(by="reference", plan=None)
    tenths = mechanisms.Repeated(4, mechanisms.Laplace(10.0))
    queries = admin.reserve(tenths)
    admin.grant(queries, 3)
    admin.commit(queries)
    abandoned = admin.reserve(mechanisms.ApproximateDp(1.0, 1e-6))
    admin.release(abandoned)
    run = admin.reserve(PLAN)
    admin.grant(run, 2)
    admin.commit(run)
    policy, spent = scenario.dataset().policy, scenario.dataset().balance.spent
    assert isinstance(policy, LateReferenceFilter)
    assert addition.write_units(spent[2]) == addition.write_units(policy.added[0]) == "0.3"
    assert policy.rest.epsilon == 2.7
    assert 0 < spent[0] < policy.rest.steps / 500  # two of the 1545 steps that fit
    assert 0.3 < policy.epsilon_of(spent) <= 3.0
    with refused("budget-exhausted"):
        admin.reserve(mechanisms.ApproximateDp(2.9, 0.0))


@pytest.mark.parametrize("delta", [1e-5, 0.0])
@pytest.mark.slow
def test_a_budget_of_sums_alone(scenario: Scenario, delta: float) -> None:
    admin = scenario.admin
    admin.create(by="addition", plan=None, epsilon=1.0, delta=delta)
    for _ in range(3):
        admin.grant(admin.reserve(mechanisms.Laplace(3.0)))
    with refused("budget-exhausted"):
        admin.reserve(mechanisms.ApproximateDp(1e-9, 0.0))
    view = admin.look_at_dataset()
    assert view.policy.share_of(view.balance.taken) == 1.0
    with refused("budget-exhausted" if delta else "no-finite-epsilon"):
        admin.reserve(1)


@pytest.mark.slow
def test_a_budget_with_a_delta_of_zero_counts_pure_epsilon(scenario: Scenario) -> None:
    """Three tenths are three tenths, of whatever kinds, and Gaussian noise never fits."""
    admin = scenario.admin
    admin.create(by="reference", plan=None, epsilon=0.7, delta=0.0)
    tenths = mechanisms.Repeated(3, mechanisms.Laplace(10.0))
    assert scenario.dataset().policy.fits(StepPlan.of(tenths), (0, 0))
    run = admin.reserve(tenths)
    admin.grant(run, 2)
    admin.commit(run)
    issued = scenario.ledger.issue_certificate(admin.record, run)
    claim = issued["guarantee"]  # of all that was reserved
    assert (claim["epsilon"], claim["delta"]) == (0.3, 0.0)
    assert certificate.check(issued)[0] == []
    assert admin.look_at_dataset().policy.epsilon_of(scenario.dataset().balance.spent) == 0.2
    for mechanism in (
        mechanisms.Exponential(0.2),
        mechanisms.Parallel((mechanisms.Laplace(10.0), mechanisms.Exponential(0.05))),
        mechanisms.Composed((mechanisms.ApproximateDp(0.1, 0.0), mechanisms.Laplace(10.0))),
    ):
        other = admin.reserve(mechanism)
        admin.grant(other)
        admin.commit(other)
    assert admin.look_at_dataset().policy.epsilon_of(scenario.dataset().balance.spent) == 0.7
    for refused_one in (mechanisms.Laplace(1e6), mechanisms.Gaussian(1e6), replace(PLAN, steps=1)):
        with refused("budget-exhausted"):
            admin.reserve(refused_one)
