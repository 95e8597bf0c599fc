"""The whole OpenAPI document against the service: generated requests, valid and not."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.ledger.api_keys import Scope
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    url = f"sqlite:///{tmp_path_factory.mktemp('openapi')}/ledger.db"
    found = create_app(Settings(database_url=url))
    with TestClient(found):
        yield found


@pytest.fixture(scope="module")
def token(app: Any) -> str:
    made: str = app.state.keys.create([Scope.ADMIN])[0]
    return made


def undeclared(document: Any, schema: Any, value: Any, at: str = "") -> Iterator[str]:
    """Yield the pointers of the fields in an answer that its schema does not name."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    choices = schema.get("anyOf", ())
    if choices:
        found = [list(undeclared(document, each, value, at)) for each in choices]
        yield from min(found, key=len)
    elif isinstance(value, list):
        for each in value:
            yield from undeclared(document, schema.get("items", {}), each, f"{at}/-")
    elif isinstance(value, dict) and "properties" in schema:
        for name, inner in value.items():
            if name in schema["properties"]:
                inside = schema["properties"][name]
                yield from undeclared(document, inside, inner, f"{at}/{name}")
            else:
                yield f"{at}/{name}"


STEP = {"kind": "gaussian", "noise_multiplier": 40.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filtered", "sent"),
    [
        ({"filter": "renyi"}, {"orders", "weights", "general_weights", "summed_delta"}),
        ({"filter": "renyi", "planned_mechanism": STEP}, {"order", "budget_micronats"}),
        (
            {"filter": "reference"},
            {
                "reference",
                "reference_steps",
                "planned",
                "slack_share",
                "added_epsilon",
                "added_delta",
            },
        ),
        ({"filter": "addition"}, set()),
    ],
)
def test_every_field_of_a_ledger_answer_is_declared(
    filtered: dict[str, Any], sent: set[str], app: Any, token: str
) -> None:
    document, name = app.openapi(), f"declared-{uuid.uuid4().hex}"

    def ask(method: str, path: str, body: Any = None, **named: str) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": uuid.uuid4().hex}
        answer = client.request(method, path.format(**named), json=body, headers=headers)
        assert answer.is_success, answer.text
        declared = document["paths"][path][method.lower()]["responses"][str(answer.status_code)]
        schema = declared["content"]["application/json"]["schema"]
        assert list(undeclared(document, schema, answer.json())) == []
        return answer.json()

    client = TestClient(app)
    budget = {"epsilon": 3.0, "delta": 1e-5}
    ask("POST", "/v1/datasets", {"name": name, "size": 1000, "budget": budget, **filtered})
    plan = {"mechanism": {"kind": "repeated", "count": 3, "mechanism": STEP}}
    ask("POST", "/v1/datasets/{name}/quotes", plan, name=name)
    run = ask("POST", "/v1/datasets/{name}/reservations", plan, name=name)["id"]
    ask("GET", "/v1/reservations/{identifier}", identifier=run)
    ask("GET", "/v1/datasets/{name}/reservations", name=name)
    ask("GET", "/v1/datasets")
    shown = ask("GET", "/v1/datasets/{name}", name=name)["accounting"]
    assert shown.keys() == sent | {"filter", "description", "scope"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "examples",
    [pytest.param(15, marks=pytest.mark.slow), pytest.param(120, marks=pytest.mark.nightly)],
)
def test_no_request_breaks_it_and_every_answer_is_as_documented(
    examples: int, app: Any, token: str
) -> None:
    import schemathesis  # half a second of every test process otherwise

    document = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) >= len(app.openapi()["paths"])
    asked = sum(answered(operation, token, examples) for operation in operations)
    print(f"{len(operations)} operations, {asked} requests")


def answered(operation: Any, token: str, examples: int) -> int:
    """Ask one operation whatever its schema allows; how many times."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    required = [not_a_server_error, checks.status_code_conformance]
    required += [checks.content_type_conformance, checks.response_schema_conformance]
    asked = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy())
    def ask(case: Any) -> None:
        nonlocal asked
        asked += 1
        if case.path == "/v1/keys/{identifier}":
            case.path_parameters["identifier"] = "0" * 16  # or it might revoke the only key
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": uuid.uuid4().hex}
        # a computation ends after ten seconds of CPU time, which take longer on a busy machine
        case.call_and_validate(headers=headers, checks=required, timeout=60)

    ask()
    return asked


def test_the_example_of_a_guarantee_is_of_the_example_of_a_question(app: Any) -> None:
    """Rounded to the safe side."""
    examples = app.openapi()["components"]["schemas"]
    (asked,) = examples["EpsilonRequest"]["examples"]
    (shown,) = examples["GuaranteeView"]["examples"]
    (curve,) = examples["CurveAnswer"]["examples"]
    found = calculator.epsilon(mechanisms.from_json(asked["mechanism"]), asked["delta"])
    assert found.certified is not None
    assert 0 <= shown["epsilon"] - found.epsilon < 1e-5
    assert 0 <= shown["certified"]["epsilon_upper"] - found.certified.upper < 1e-5
    assert 0 <= found.certified.lower - shown["certified"]["epsilon_lower"] < 1e-5
    for steps, epsilon in zip(curve["steps"], curve["curves"][0]["epsilon"], strict=True):
        plan = mechanisms.from_json(asked["mechanism"] | {"steps": steps})
        assert 0 <= epsilon - calculator.epsilon(plan, asked["delta"]).epsilon < 1e-4
