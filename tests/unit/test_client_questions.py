"""The HTTP client answers the questions of `from accountant_service import …`, flat as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

import accountant_service
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.stub_service import claim
from tests.support.stub_service import service as stub
from training_client.client import AccountingService
from training_client.client.answers import Guarantee
from training_client.errors import DataError, ServiceConfusedError

RUN: dict[str, Any] = {
    "noise_multiplier": 1.1,
    "dataset_size": 60_000,
    "batch_size": 600,
    "epochs": 10,
}
SHAPE = {name: value for name, value in RUN.items() if name != "noise_multiplier"}
TARGET: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountingService]:
    url = f"sqlite:///{tmp_path_factory.mktemp('client')}/ledger.db"
    with TestClient(create_app(Settings(database_url=url))) as http:

        def handle(request: httpx.Request) -> httpx.Response:
            """Answer a request by the application."""
            answer = http.request(
                request.method,
                request.url.path,
                content=request.content,
                headers={"Content-Type": "application/json"},
            )
            return httpx.Response(answer.status_code, content=answer.content)

        with AccountingService("http://test", transport=httpx.MockTransport(handle)) as found:
            yield found


def test_the_client_has_every_function_of_the_package(service: AccountingService) -> None:
    names = set(accountant_service.__all__) - {"__version__"}
    assert {name for name in names if not callable(getattr(service, name, None))} == set()


def test_a_run_may_be_given_flat_or_as_a_mechanism(service: AccountingService) -> None:
    flat = service.epsilon(delta=1e-5, **RUN)
    assert isinstance(flat, Guarantee)
    whole = service.epsilon({"kind": "dp_sgd", **RUN}, 1e-5)
    local = accountant_service.epsilon(delta=1e-5, **RUN)
    assert flat.epsilon == whole.epsilon == local.epsilon
    assert service.delta(epsilon=1.5, **RUN).delta < 1e-4


def test_solvers_answer_as_the_package_does(service: AccountingService) -> None:
    noise = service.noise_multiplier(**TARGET, **SHAPE)
    assert noise == accountant_service.noise_multiplier(**TARGET, **SHAPE).noise_multiplier
    assert service.steps(**TARGET, noise_multiplier=1.1, sample_rate=0.01) == 1725
    rate = service.sample_rate(**TARGET, noise_multiplier=1.1, steps=1000)
    assert 0.01 < rate < 0.02
    replaced = service.noise_multiplier(**TARGET, **SHAPE, neighbouring_relation="replace_one")
    assert replaced > noise


def test_one_parameter_of_any_mechanism_is_solved_for(service: AccountingService) -> None:
    laplace = {"kind": "laplace", "noise_multiplier": None}
    thrice = {"kind": "repeated", "count": 3, "mechanism": laplace}
    found = service.solve(thrice, "/mechanism/noise_multiplier", epsilon=1.0, delta=0.0)
    assert 3.0 <= found <= 3.0 * (1 + 2e-6)


def test_a_document_of_another_tool_is_priced(service: AccountingService) -> None:
    document = {**RUN, "sampling": "poisson", "epsilon": 9.0}
    found = service.import_document(document, 1e-5)
    assert found["verdict"] == "holds_but_loose"


def test_methods_are_compared(service: AccountingService) -> None:
    found = service.compare(delta=1e-5, **RUN)
    assert found.epsilon_lower is not None
    assert found.epsilon_upper is not None
    assert found.epsilon_lower <= found.guarantees["pld"].epsilon == found.epsilon_upper
    refuted = service.compare(delta=1e-5, noise_multiplier=1.0, sample_rate=0.1, steps=100)
    assert refuted.guarantees["mma"].status == "refuted"
    laplace = service.compare({"kind": "laplace", "noise_multiplier": 2.0}, 1e-5)
    assert laplace.reasons["mma"] == "mma has no formula for laplace noise"


def test_a_plan_has_a_recommended_run(service: AccountingService) -> None:
    found = service.plan(
        **TARGET, dataset_size=60_000, epochs=5, batch_size=64, sampling="poisson", points=3
    )
    assert found.recommended.epsilon <= 2.0
    assert found.recommended.mechanism["kind"] == "dp_sgd"
    assert found.current is not None
    assert len(found.runs) == 4, "three, and the recommended one"
    assert "smallest" in found.reason
    assert service.epsilon(found.recommended.mechanism, 1e-5).epsilon <= 2.0
    assert any("Today" in text for text in found.warnings)


def test_what_is_missing_or_given_twice_is_refused_before_it_is_sent() -> None:
    def fail(path: str, _: Any) -> httpx.Response:
        raise AssertionError(f"{path} was asked")

    service = stub(fail)
    with pytest.raises(DataError, match="delta is required"):
        service.epsilon(**RUN)
    with pytest.raises(DataError, match="epsilon is required"):
        service.delta(**RUN)
    with pytest.raises(DataError, match="noise_multiplier must be left out"):
        service.epsilon({"kind": "gaussian", "noise_multiplier": 1}, 1e-5, noise_multiplier=2.0)


RUN_OUTSIDE = {
    "sampling": "poisson",
    "batch_size": 600,
    "sample_rate": 0.01,
    "steps": 10,
    "epochs": 0.1,
    "noise_multiplier": 1.0,
    "effective_noise": 0.1,
    "signal_to_noise": 1.0,
    "epsilon": 2.5,
}
RISK = {"noise_multiplier": 1.0, "guarantee": claim(9.0)}
CONFUSED = [
    ("plan", {"recommended": RUN_OUTSIDE, "reason": "", "current": None, "runs": [], "advice": []}),
    ("plan", {"recommended": {"steps": 1}, "current": None, "runs": [], "advice": []}),
    ("plan", {}),
    ("compare", {"guarantees": [{"epsilon": 1}]}),
    ("compare", {"certified": None, "guarantees": [claim(-1.0)]}),
    ("delta", claim(9.0)),
    ("delta", claim(1.0) | {"status": "estimate"}),
    ("sample_rate", {"sample_rate": 0.1, "guarantee": claim(9.0)}),
    ("solve", {"value": 0.1, "guarantee": claim(9.0)}),
    ("noise_multiplier", RISK | {"risk": {"lower": 0.1, "upper": 0.2, "status": "proven"}}),
    ("noise_multiplier", RISK | {"risk": None}),
    ("import_document", {"verdict": None}),
]


def test_an_answer_that_breaks_the_contract_is_not_trusted() -> None:
    asked: dict[str, dict[str, Any]] = {
        "plan": {**TARGET, "dataset_size": 9, "epochs": 1},
        "compare": {"delta": 1e-5, **RUN},
        "delta": {"epsilon": 2.0, **RUN},
        "sample_rate": {**TARGET, "noise_multiplier": 1.0, "steps": 5},
        "solve": {**TARGET, "mechanism": {}, "parameter": "/scale"},
        "noise_multiplier": {"advantage": 0.1, "sample_rate": 0.01, "steps": 9},
        "import_document": {"document": {}},
    }
    for name, answer in CONFUSED:
        service = stub(lambda *_, answer=answer: httpx.Response(200, json=answer))
        with pytest.raises(ServiceConfusedError):
            getattr(service, name)(**asked[name])
    answer = RISK | {"risk": {"lower": 0.09, "upper": 0.1, "status": "proven"}}
    service = stub(lambda *_: httpx.Response(200, json=answer))
    assert service.noise_multiplier(advantage=0.1, sample_rate=0.01, steps=9) == 1.0
