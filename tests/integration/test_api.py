"""The wire: every call, its shape, its refusals."""

from __future__ import annotations

import json
import math
import random
import re
import time
from statistics import NormalDist
from typing import Any

import pytest
from fastapi.testclient import TestClient

from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.questions import models as schemas
from accountant_service.questions.registry import ENDPOINTS
from tests.support.helpers import gaussian, run

RUN = run(0.01, 1.0, 1000)
EXAMPLES = {
    path: call.request.model_config["json_schema_extra"]["examples"][0]  # type: ignore[index, call-overload]
    for path, call in ENDPOINTS.items()
}


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_each_call_answers_its_own_example_in_the_documented_shape(
    api: TestClient, path: str
) -> None:
    answer = api.post(path, json=EXAMPLES[path])
    assert answer.status_code == 200, answer.text
    ENDPOINTS[path].answer_model.model_validate_json(answer.content)


def test_epsilon(api: TestClient) -> None:
    answer = api.post("/v1/epsilon", json={"mechanism": RUN, "delta": 1e-5}).json()
    assert answer["method"] == "pld"
    assert answer["status"] == "proven"
    assert answer["epsilon"] == answer["certified"]["epsilon_upper"]
    assert (
        answer["certified"]["epsilon_lower"] <= 1.8282366669 <= answer["certified"]["epsilon_upper"]
    )
    assert answer["neighbouring_relation"] == "add_or_remove_one"
    assert answer["sampling"] == "poisson"
    assert answer["optimal_order"] is None


def test_delta(api: TestClient) -> None:
    answer = api.post("/v1/delta", json={"mechanism": RUN, "epsilon": 1.82825}).json()
    assert answer["certified"]["delta_lower"] <= 1.001e-5
    assert answer["delta"] == answer["certified"]["delta_upper"] == pytest.approx(1e-5, rel=0.02)


def test_a_false_claim_is_refuted_wherever_it_is_asked(api: TestClient) -> None:
    body = {"mechanism": run(0.1, 1.0, 100), "delta": 1e-5, "method": "mma"}
    assert api.post("/v1/epsilon", json=body).json()["status"] == "refuted"
    body = {"mechanism": run(0.1, 1.0, 100), "epsilon": 6.6, "method": "mma"}
    assert api.post("/v1/delta", json=body).json()["status"] == "refuted"


@pytest.mark.parametrize("method", ["pld", "subsampled_rdp", "moments_accountant", "zcdp"])
def test_solvers_end_on_the_safe_side(api: TestClient, method: str) -> None:
    target = {"epsilon": 3.0, "delta": 1e-5, "method": method}
    rate = 1.0 if method == "zcdp" else 0.01
    solved = api.post(
        "/v1/noise-multiplier", json={**target, "sample_rate": rate, "steps": 500}
    ).json()
    sigma = solved["noise_multiplier"]
    assert solved["guarantee"]["epsilon"] <= 3.0

    def at(steps: int, noise: float) -> float:
        body = {"mechanism": run(rate, noise, steps), "delta": 1e-5, "method": method}
        return float(api.post("/v1/epsilon", json=body).json()["epsilon"])

    assert at(500, sigma) == solved["guarantee"]["epsilon"]
    assert at(500, sigma * 0.998) > 3.0
    steps = api.post(
        "/v1/steps", json={**target, "sample_rate": rate, "noise_multiplier": sigma}
    ).json()
    assert steps["steps"] >= 500
    assert at(steps["steps"], sigma) == steps["guarantee"]["epsilon"] <= 3.0
    assert at(steps["steps"] + 1, sigma) == steps["next"]["epsilon"] > 3.0
    found = api.post(
        "/v1/sample-rate", json={**target, "steps": 500, "noise_multiplier": sigma}
    ).json()
    assert found["guarantee"]["epsilon"] <= 3.0
    assert found["sample_rate"] == pytest.approx(rate, rel=1e-3)


def test_reference_solutions(api: TestClient) -> None:
    """ε=2, σ=1, q=.01, δ=1e-5: 1202 steps tight, 881 with RDP; ε=3, T=5000: σ = 1.2109 and 1.278.

    The certified upper bound is up to 1e-3 above the truth, so it may allow a few steps less.
    """
    ask = {"epsilon": 2.0, "delta": 1e-5, "sample_rate": 0.01}
    steps = {
        method: api.post(
            "/v1/steps", json={**ask, "noise_multiplier": 1.0, "method": method}
        ).json()["steps"]
        for method in ("pld", "subsampled_rdp")
    }
    assert 1199 <= steps["pld"] <= 1202
    assert steps["subsampled_rdp"] == 881
    ask = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.01, "steps": 5000}
    for method, sigma in (("pld", 1.2109), ("subsampled_rdp", 1.278)):
        found = api.post("/v1/noise-multiplier", json={**ask, "method": method}).json()
        assert found["noise_multiplier"] == pytest.approx(sigma, rel=5e-4)


def test_compare_goes_on_past_what_is_not_applicable(api: TestClient) -> None:
    mixed = {
        "kind": "composed",
        "mechanisms": [gaussian(4.0), {"kind": "laplace", "noise_multiplier": 3.0}],
    }
    answer = api.post("/v1/compare", json={"mechanism": mixed, "delta": 1e-5}).json()
    assert [each["method"] for each in answer["guarantees"]] == list(ACCOUNTANTS)
    refused = {e["method"]: e["reason"] for e in answer["guarantees"] if "reason" in e}
    assert "mma" in refused
    assert "laplace" in refused["mma"]
    assert answer["certified"]["status"] == "proven"
    release = {"kind": "repeated", "count": 999_999_999, "mechanism": gaussian(1.1)}
    countless = {"kind": "poisson_sampled", "sample_rate": 0.01, "mechanism": release}
    answer = api.post("/v1/compare", json={"mechanism": countless, "delta": 1e-5})
    assert answer.status_code == 200
    assert all("reason" in claim for claim in answer.json()["guarantees"]), "too expensive for each"


def test_curve_ends_at_the_whole_run(api: TestClient) -> None:
    body = {"mechanism": RUN, "delta": 1e-5, "methods": ["pld", "subsampled_rdp"], "points": 4}
    answer = api.post("/v1/curve", json=body).json()
    assert answer["steps"] == [250, 500, 750, 1000]
    whole = api.post("/v1/epsilon", json={"mechanism": RUN, "delta": 1e-5}).json()
    assert answer["curves"][0]["epsilon"][-1] == whole["epsilon"]
    for each in answer["curves"]:
        assert each["epsilon"] == sorted(each["epsilon"])


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_the_curve_of_no_step_at_all(api: TestClient, sampling: str) -> None:
    mechanism = RUN | {"steps": 0, "sampling": sampling}
    answer = api.post(
        "/v1/curve", json={"mechanism": mechanism, "delta": 1e-5, "methods": list(ACCOUNTANTS)}
    )
    assert answer.status_code == 200
    assert answer.json()["steps"] == [0]
    drawn = [each["epsilon"] for each in answer.json()["curves"] if "epsilon" in each]
    assert drawn
    assert all(epsilons == [0.0] for epsilons in drawn)


def test_trade_off_is_convex_decreasing_and_consistent(api: TestClient) -> None:
    answer = api.post("/v1/trade-off", json={"mechanism": RUN, "prior": 0.5}).json()
    rates, misses = answer["false_positive_rates"], answer["false_negative_rates_lower"]
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] == 0.0
    best = max(1 - m - r for r, m in zip(rates, misses, strict=True))
    advantage = answer["membership_advantage"]
    assert advantage["lower"] <= best * 1.01
    assert best <= advantage["upper"] * (1 + 1e-9)
    assert answer["attack_success"]["upper"] == pytest.approx(0.5 + advantage["upper"] / 2)
    assert answer["status"] == "proven"


def test_bounds_of_a_risk_are_marked_if_a_hypothesis_fails(api: TestClient) -> None:
    """Shuffled batches are a fixed partition: no dataset with one record more has one."""
    shuffled = RUN | {"sampling": "shuffled"}
    body = {"mechanism": shuffled, "neighbouring_relation": "add_or_remove_one"}
    answer = api.post("/v1/trade-off", json=body).json()
    assert answer["status"] == "estimate"
    assert not all(each["holds"] for each in answer["assumptions"])
    run = {"sample_rate": 0.1, "steps": 100, "sampling": "shuffled"}
    solved = api.post("/v1/noise-multiplier", json=run | {"advantage": 0.2}).json()
    assert (solved["risk"]["status"], solved["guarantee"]["status"]) == ("estimate", "estimate")
    zeroed = run | {"advantage": 0.2, "neighbouring_relation": "zero_out_one"}
    assert api.post("/v1/noise-multiplier", json=zeroed).json()["risk"]["status"] == "proven"


def test_batch_answers_in_order_each_on_its_own(api: TestClient) -> None:
    """Refusals in a batch are compared with the table of refusals."""
    good = {"path": "/v1/epsilon", "body": {"mechanism": RUN, "delta": 1e-5}}
    requests = [
        good,
        {"path": "/v1/nothing", "body": {}},
        {"path": "/v1/epsilon", "body": {}},
        good,
    ]
    answer = api.post("/v1/batch", json={"requests": requests})
    assert answer.status_code == 200
    results = schemas.BatchAnswer.model_validate_json(answer.content).results
    assert [each.status for each in results] == [200, 404, 422, 200]
    assert results[0] == results[3]


def test_methods_and_health(api: TestClient) -> None:
    answer = schemas.MethodsAnswer.model_validate_json(api.get("/v1/methods").content)
    assert [each.method for each in answer.methods] == list(ACCOUNTANTS)
    assert [each.method for each in answer.methods if each.default] == ["pld"]
    for path in ("/healthz", "/readyz"):
        assert api.get(path).json() == {"status": "ok"}
    other = api.post("/v1/epsilon", content=b"a=b")  # of another content type
    assert "application/json" in other.json()["detail"]


def test_an_identical_question_is_computed_once(api: TestClient) -> None:
    body = {"mechanism": run(0.0123, 1.7, 77), "delta": 1e-6}
    before = computed(api)
    first = api.post("/v1/epsilon", json=body)
    same = {
        "kind": "repeated",
        "count": 77,
        "mechanism": {
            "kind": "poisson_sampled",
            "sample_rate": 0.0123,
            "mechanism": gaussian(1.7),
        },
    }
    assert api.post("/v1/epsilon", json={"mechanism": same, "delta": 1e-6}).json() == first.json()
    assert computed(api) == before + 1


def computed(api: TestClient) -> float:
    """Return the number of answers of /v1/epsilon that were computed so far."""
    line = r'^accountant_computation_seconds_count\{question="/v1/epsilon"\} (\S+)'
    found = re.search(line, api.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def test_random_nonsense_never_fails_the_service(api: TestClient) -> None:
    rng = random.Random(41)
    values = [-1, 0, 1e-300, 0.5, 1, 1.5, 10**30, 1e300, "a", None, [], {}, True, [1] * 3]
    for _ in range(150):
        body = {
            "mechanism": run(rng.choice(values), rng.choice(values), rng.choice(values)),  # type: ignore[arg-type]
            "delta": rng.choice(values),
            "method": rng.choice([*ACCOUNTANTS, 3]),
        }
        answer = api.post(
            "/v1/epsilon",
            content=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code < 500, body
        assert "NaN" not in answer.text
        assert "Infinity" not in answer.text
        if answer.status_code == 200:
            assert math.isfinite(answer.json()["epsilon"])
        else:
            assert answer.json()["code"]


def test_openapi_has_an_example_in_every_request_and_the_mechanism_tree(api: TestClient) -> None:
    document = api.get("/openapi.json").json()
    components = document["components"]["schemas"]
    assert "Mechanism" in components
    assert "x-mechanism" not in json.dumps(document)
    for path in ENDPOINTS:
        content = document["paths"][path]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert components[name]["examples"]
        assert components[name]["description"]
    models = {call.answer_model for call in ENDPOINTS.values()} | {schemas.BatchAnswer}
    for model in models:
        for example in components[model.__name__]["examples"]:
            model.model_validate_json(json.dumps(example))
    for name, schema in components.items():
        assert schema.get("examples"), f"{name} has no example"
        described = schema.get("description") or schema.get("oneOf") or schema.get("enum")
        assert described, f"{name} says nothing"


@pytest.mark.slow
def test_a_tolerance_is_met_or_refused_with_the_width_reached(api: TestClient) -> None:
    body = {"mechanism": RUN, "delta": 1e-5, "tolerance": 1e-7}
    proved = api.post("/v1/epsilon", json=body).json()["certified"]
    assert proved["epsilon_upper"] - proved["epsilon_lower"] <= 1e-7 * proved["epsilon_upper"]
    compared = api.post("/v1/compare", json=body).json()
    assert compared["certified"]["certified"] == proved
    at = {"mechanism": RUN, "epsilon": 1.0, "tolerance": 1e-5}
    found = api.post("/v1/delta", json=at).json()["certified"]
    assert found["delta_upper"] - found["delta_lower"] <= 1e-5 * found["delta_upper"]
    rare = RUN | {"noise_multiplier": 0.657, "sample_rate": 1.4e-5, "steps": 270}
    refused = api.post("/v1/epsilon", json=body | {"mechanism": rare, "delta": 2.7e-10})
    assert refused.status_code == 422
    assert refused.json()["code"] == "tolerance-not-reached"
    assert re.search(
        r"relative width of \S+, more than the tolerance 1e-07", refused.json()["detail"]
    )


@pytest.mark.parametrize(
    "mechanism",
    [
        RUN,
        {"kind": "gaussian", "noise_multiplier": 1.0},
        {"kind": "repeated", "count": 5, "mechanism": {"kind": "laplace", "noise_multiplier": 2.0}},
        RUN | {"noise_multiplier": 0.6, "sample_rate": 1e-4, "steps": 200_000},
        RUN | {"noise_multiplier": 1e6, "steps": 1},
    ],
)
def test_the_trade_off_is_enclosed(api: TestClient, mechanism: dict[str, Any]) -> None:
    started = time.perf_counter()
    found = api.post("/v1/trade-off", json={"mechanism": mechanism, "prior": 0.3}).json()
    assert time.perf_counter() - started < 5
    low, high = found["false_negative_rates_lower"], found["false_negative_rates_upper"]
    assert all(0 <= a <= b <= 1 for a, b in zip(low, high, strict=True))
    assert max(b - a for a, b in zip(low, high, strict=True)) < 2e-3
    assert sorted(low, reverse=True) == low
    advantage, success = found["membership_advantage"], found["attack_success"]
    best = max(
        1 - miss - rate for miss, rate in zip(low, found["false_positive_rates"], strict=True)
    )
    assert best <= advantage["upper"] + 1e-9
    assert 0.7 <= success["lower"] <= success["upper"] <= 1
    pairs = zip(found["posterior_lower"], found["posterior_upper"], strict=True)
    assert all(b >= 0.3 - 1e-9 and a <= b for a, b in pairs)
    assert 0 <= found["gaussian_dp"]["error"] < 0.05
    if mechanism["kind"] == "gaussian":
        assert found["gaussian_dp"]["mu"] == pytest.approx(1.0, abs=1e-3)
        exact = [NormalDist().cdf(NormalDist().inv_cdf(1 - a) - 1)
                 for a in found["false_positive_rates"][1:-1]]  # fmt: skip
        assert all(a <= x <= b for a, x, b in zip(low[1:-1], exact, high[1:-1], strict=True))
