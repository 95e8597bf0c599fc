"""`POST /v1/plan`: valid answers, one computation for equal questions, problems with pointers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from accountant_service.operations.settings import Settings
from accountant_service.questions.plan_models import PlanAnswer
from accountant_service.server.app import create_app

BODY = {
    "epsilon": 2.0,
    "delta": 1e-5,
    "dataset_size": 60_000,
    "epochs": 10,
    "sampling": "poisson",
    "points": 3,
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    url = f"sqlite:///{tmp_path_factory.mktemp('plan')}/ledger.db"
    with TestClient(create_app(Settings(database_url=url))) as found:
        yield found


def ask(http: TestClient, **changes: Any) -> Any:
    body = {name: value for name, value in (BODY | changes).items() if value is not None}
    return http.post("/v1/plan", json=body)


def test_the_answer_is_as_documented(http: TestClient) -> None:
    answer = ask(http, batch_size=256, sampling="both")
    assert answer.status_code == 200
    found = PlanAnswer.model_validate_json(answer.content, strict=False)
    assert {run.sampling for run in found.runs} == {"poisson", "balls_in_bins"}
    assert found.examples == 600_000
    assert found.current is not None
    for run in (found.recommended, found.current):
        claim = {"mechanism": run.mechanism, "delta": 1e-5}
        proved = http.post("/v1/epsilon", json=claim).json()
        assert proved["epsilon"] == run.guarantee.epsilon <= 2.0
        assert proved["status"] == "proven"
    assert all(source.source.startswith(("Sander", "Räisä", "McK", "De ", "Pono"))
               for source in found.sources)  # fmt: skip


def test_equal_questions_share_a_computation(http: TestClient) -> None:
    def count_hits() -> float:
        found = re.search(
            r'cache_hits_total\{question="/v1/plan"\} (\S+)', http.get("/metrics").text
        )
        return float(found[1]) if found else 0.0

    before, first = count_hits(), ask(http)
    hits = count_hits()
    assert hits - before <= 1, "another test may have asked it"
    assert ask(http).content == first.content
    assert count_hits() == hits + 1


def test_a_compute_limit_may_be_given_in_three_ways(http: TestClient) -> None:
    by_examples = ask(http, epochs=None, examples=600_000).json()
    by_choice = ask(http, epochs=None, batch_size=600, steps=1000).json()
    assert by_examples["runs"] == by_choice["runs"] == ask(http).json()["runs"]


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset_size": 1, "epochs": 1},
        {"dataset_size": 2, "epochs": 3, "sampling": "both"},
        pytest.param({"epsilon": 1e6}, marks=pytest.mark.slow),
        pytest.param({"delta": 1e-50}, marks=pytest.mark.slow),
        pytest.param({"delta": 0.999}, marks=pytest.mark.slow),
        {"epochs": 1e-3},
        {"epochs": None, "examples": 1},
        {"dataset_size": 10**9, "epochs": 1e6},
        {"epsilon": 1e-3},
        pytest.param({"epsilon": 500.0, "sampling": "both"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_odd_questions_get_an_answer_or_a_problem(
    http: TestClient, changes: dict[str, Any]
) -> None:
    answer = ask(http, **changes)
    assert answer.status_code in (200, 422), answer.text
    if answer.status_code == 200:
        found = PlanAnswer.model_validate_json(answer.content, strict=False)
        assert found.runs
        assert all(run.epsilon <= (BODY | changes)["epsilon"] for run in found.runs)
    else:
        assert answer.json()["code"] in ("unreachable-target", "no-finite-epsilon", "too-expensive")
