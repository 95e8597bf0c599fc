"""A key that is bound to datasets: whatever its scope, others do not exist for it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from accountant_service.api import ledger_schemas
from accountant_service.app import create_app
from accountant_service.ledger.api_keys import Scope
from accountant_service.settings import Settings

RUN = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 60}
BUDGET = {"epsilon": 3.0, "delta": 1e-5}
NOTHING = "never-made"
BODIES: dict[str, Any] = {
    "/quotes": {"mechanism": RUN},
    "/quotes/batch": {"mechanisms": [RUN]},
    "/reservations": {"mechanism": RUN},
    "/grants": {"steps": 1, "sequence": 0},
    "PUT": {"share": 0.5},  # every PUT sets a cap
    "PATCH": {"requests_per_minute": 60},  # every PATCH changes a key
}
Call = tuple[str, str]


class Service:
    """One with a dataset `ours` and, unknown to the bound keys, `theirs` with two runs."""

    def __init__(self, http: TestClient) -> None:
        self.http, self.app = http, http.app
        self.admin = self.key(Scope.ADMIN, None)
        for name in ("ours", "theirs"):
            self.post(self.admin, "/v1/datasets", dataset(name))
        path = "/v1/datasets/theirs/reservations"
        self.open, self.ended = (
            self.post(self.admin, path, {"mechanism": RUN}).json()["id"] for _ in range(2)
        )
        self.post(self.admin, f"/v1/reservations/{self.ended}/commit", {})

    def key(self, scope: Scope, datasets: tuple[str, ...] | None = ("ours",)) -> str:
        token: str = self.app.state.keys.create([scope], datasets=datasets)[0]  # type: ignore[attr-defined]
        return token

    def ask(self, key: str, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": uuid.uuid4().hex}
        return self.http.request(method, path, json=body, headers=headers)

    def post(self, key: str, path: str, body: Any) -> Any:
        return self.ask(key, "POST", path, body)


def dataset(name: str) -> Any:
    return {"name": name, "size": 9, "budget": BUDGET}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    url = f"sqlite:///{tmp_path_factory.mktemp('bound')}/ledger.db"
    with TestClient(create_app(Settings(database_url=url))) as http:
        yield Service(http)


def calls(service: Service) -> list[Call]:
    """Every call about a dataset, a reservation or a key: its method and its template."""
    paths = service.app.openapi()["paths"]  # type: ignore[attr-defined]
    return [(method.upper(), path) for path, of in paths.items() for method in of if "{" in path]


def answer(service: Service, key: str, call: Call, of: str) -> tuple[int, str]:
    """Return a call's status and answer, without the name of the object asked for."""
    method, template = call
    name = re.sub(r"^.*}", "", template) if method == "POST" else method
    body = BODIES.get(name, {}) if method in ("POST", "PUT", "PATCH") else None
    found = service.ask(key, method, re.sub(r"{\w+}", of, template), body)
    return found.status_code, found.text.replace(of, "NAME")


@pytest.mark.parametrize("scope", list(Scope))
def test_other_owners_objects_are_answered_like_missing_ones(
    service: Service, scope: Scope
) -> None:
    key, asked = service.key(scope), calls(service)
    assert len(asked) > 12
    for call in asked:
        nothing = answer(service, key, call, NOTHING)
        assert nothing[0] in (403, 404), (call, nothing)
        for known in ("theirs", service.open, service.ended):
            assert answer(service, key, call, known) == nothing, call
    seen = service.ask(service.admin, "GET", "/v1/datasets/theirs").json()
    assert seen["version"] == 4, "and nothing was written"


@pytest.mark.parametrize("scope", list(Scope))
def test_a_bound_key_makes_no_dataset_and_cannot_tell_which_names_are_taken(
    service: Service, scope: Scope
) -> None:
    for datasets in (("ours",), ("ours", "unborn"), ()):
        key = service.key(scope, datasets)
        answers = [
            service.post(key, "/v1/datasets", dataset(name))
            for name in ("theirs", "ours", "unborn", "free")
        ]
        assert {found.status_code for found in answers} == {403}
        assert len({found.text for found in answers}) == 1
    names = [
        each["name"] for each in service.ask(service.admin, "GET", "/v1/datasets").json()["items"]
    ]
    assert names == ["ours", "theirs"]


@pytest.mark.parametrize("scope", list(Scope))
def test_a_bound_key_makes_shows_and_revokes_no_keys(service: Service, scope: Scope) -> None:
    key = service.key(scope)
    kept = service.app.state.keys.list_keys()[0].identifier  # type: ignore[attr-defined]
    for method, path, body in (
        ("GET", "/v1/keys", None),
        ("POST", "/v1/keys", {"scopes": ["admin"]}),
        ("POST", "/v1/keys", {"scopes": ["run"], "datasets": ["ours"]}),
        ("DELETE", f"/v1/keys/{kept}", None),
        ("DELETE", f"/v1/keys/{NOTHING}", None),
    ):
        assert service.ask(key, method, path, body).status_code == 403, (method, path)


@pytest.mark.parametrize("scope", [Scope.OWNER, Scope.RUN, Scope.ADMIN])
def test_a_bound_key_works_with_its_own_dataset(service: Service, scope: Scope) -> None:
    key = service.key(scope)
    listed = service.ask(key, "GET", "/v1/datasets").json()["items"]
    assert [each["name"] for each in listed] == ["ours"]
    assert service.ask(key, "GET", "/v1/datasets/ours/entries").status_code == 200
    reserved = service.post(key, "/v1/datasets/ours/reservations", {"mechanism": RUN})
    assert reserved.status_code == (403 if scope is Scope.OWNER else 201)


@pytest.mark.parametrize("scope", [Scope.OWNER, Scope.MONITOR, Scope.ADMIN])
def test_metrics_name_its_own_budgets_only(service: Service, scope: Scope) -> None:
    text = service.ask(service.key(scope), "GET", "/metrics").text
    assert set(re.findall(r'dataset="(\w+)"', text)) == {"ours"}


@pytest.mark.parametrize("scope", [Scope.OWNER, Scope.ADMIN])
def test_the_pages_allow_a_bound_key_no_more_than_the_api(service: Service, scope: Scope) -> None:
    http, key = service.http, service.key(scope)
    http.cookies.clear()
    token = form_token(http.get("/sign-in").text)
    signed = http.post("/sign-in", data={"csrf": token, "key": key}, follow_redirects=False)
    assert signed.status_code == 303
    shown = http.get("/datasets").text
    assert "ours" in shown
    assert "theirs" not in shown
    assert 'action="/datasets"' not in shown
    assert 'href="/keys"' not in shown
    asks = {"Accept": "text/html"}
    for page in ("/datasets/{}", "/runs/{}", "/runs/{}/certificate"):
        answers = [
            (found.status_code, found.text.replace(of, "NAME"))
            for of in ("theirs", service.open, service.ended, NOTHING)
            if (found := http.get(page.format(of), headers=asks))
        ]
        assert answers[0][0] == 404
        assert len(set(answers)) == 1
    assert http.get("/keys", headers=asks).status_code == 403
    csrf = form_token(shown)
    answers = [
        http.post(
            "/datasets",
            data={"csrf": csrf, "once": uuid.uuid4().hex, "name": name, "size": "9",
                  "epsilon": "1", "delta": "1e-5"},
            headers=asks,
        )
        for name in ("theirs", "ours", "free")
    ]  # fmt: skip
    assert {found.status_code for found in answers} == {403}
    assert len({found.text for found in answers}) == 1
    made = http.post("/keys", data={"csrf": csrf, "scopes": "admin"}, headers=asks)
    assert made.status_code == 403
    http.cookies.clear()


def form_token(page: str) -> str:
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    assert found, page
    return found[1]


def test_keys_are_kept_as_long_as_the_longest_lease() -> None:
    days = Settings.model_fields["idempotency_days"]
    least = next(each.ge for each in days.metadata if hasattr(each, "ge"))
    assert days.default >= least >= ledger_schemas._LEASE_SECONDS_MAX / 86400
