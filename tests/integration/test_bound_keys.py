"""A key that is bound to datasets: whatever its scope, others do not exist for it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from accountant_service.api import ledger_schemas
from accountant_service.ledger.api_keys import Scope
from accountant_service.operations.settings import Settings
from tests.support.databases import database
from tests.support.ledger_scenarios import BUDGET, PLAN_JSON, Caller, Service, serving

NOTHING = "never-made"
BODIES: dict[str, Any] = {
    "/quotes": {"mechanism": PLAN_JSON},
    "/quotes/batch": {"mechanisms": [PLAN_JSON]},
    "/reservations": {"mechanism": PLAN_JSON},
    "/reference": {"mechanism": PLAN_JSON},
    "/reference/quotes": {"mechanism": PLAN_JSON},
    "/grants": {"steps": 1, "sequence": 0},
    "/v1/series/{series}": {"budget": BUDGET},
    "/v1/series/{series}/datasets/{label}": {"size": 9},
    "/v1/series/{series}/quotes": {"mechanism": PLAN_JSON, "last": 1},
    "PUT": {"share": 0.5},  # every other PUT sets a cap
    "PATCH": {"requests_per_minute": 60},  # every PATCH changes a key
}
Call = tuple[str, str]


class Owners(Service):
    """A service with a dataset `ours`; the bound keys know neither the other nor the series.

    Two runs are on the other, `theirs`. The series is `months`.
    """

    def fill(self) -> None:
        """Create the datasets and the runs."""
        for name in ("ours", "theirs"):
            self.admin.dataset(name, filter="renyi")
        self.admin.send("PUT", "/v1/series/months", {"budget": BUDGET})
        self.open, self.ended = (self.admin.reserve("theirs")["id"] for _ in range(2))
        self.admin.commit(self.ended)

    def bound(self, scope: Scope, *datasets: str) -> Caller:
        """Return a caller with a key that is bound to `ours`, or to datasets."""
        return self.caller(scope, datasets=datasets or ("ours",))

    def calls(self) -> list[Call]:
        """Return every call about a dataset, a reservation or a key: method and template."""
        paths = self.app.openapi()["paths"]  # type: ignore[attr-defined]
        return [
            (method.upper(), path) for path, of in paths.items() for method in of if "{" in path
        ]


@pytest.fixture(scope="module")
def owners(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owners]:
    with database(kind, tmp_path_factory.mktemp("bound")) as url, serving(url) as service:
        found = Owners(service.http)
        found.fill()
        yield found


def answer(caller: Caller, call: Call, of: str) -> tuple[int, str]:
    """Return a call's status and answer, without the name of the object asked for."""
    method, template = call
    name = re.sub(r"^.*}", "", template) if method == "POST" else method
    body = (
        BODIES.get(template, BODIES.get(name, {})) if method in ("POST", "PUT", "PATCH") else None
    )
    found = caller.send(method, re.sub(r"{\w+}", of, template), body)
    return found.status_code, found.text.replace(of, "NAME")


# the scope that may do most shows it first; each call asks for four objects
SCOPES = [
    Scope.ADMIN, *(pytest.param(scope, marks=pytest.mark.slow) for scope in Scope
                   if scope is not Scope.ADMIN),
]  # fmt: skip


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.slow
def test_other_owners_objects_are_answered_like_missing_ones(owners: Owners, scope: Scope) -> None:
    caller, asked = owners.bound(scope), owners.calls()
    assert len(asked) > 12
    for call in asked:
        nothing = answer(caller, call, NOTHING)
        assert nothing[0] in (403, 404), (call, nothing)
        for known in ("theirs", "months", owners.open, owners.ended):
            assert answer(caller, call, known) == nothing, call
    seen = owners.admin.read("/v1/datasets/theirs")
    assert seen["version"] == 4, "and nothing was written"


@pytest.mark.slow
def test_a_bound_key_makes_no_datasets_and_no_keys_and_tells_no_names(owners: Owners) -> None:
    kept = owners.keys.list_keys()[0].identifier
    for scope in Scope:
        for datasets in (("ours",), ("ours", "unborn")):
            caller = owners.bound(scope, *datasets)
            answers = [
                caller.post("/v1/datasets", {"name": name, "size": 9, "budget": BUDGET})
                for name in ("theirs", "ours", "unborn", "free")
            ]
            assert all(found == answers[0] for found in answers)
            assert answers[0][0] == 403
        for method, path, body in (
            ("GET", "/v1/keys", None),
            ("POST", "/v1/keys", {"scopes": ["admin"]}),
            ("POST", "/v1/keys", {"scopes": ["run"], "datasets": ["ours"]}),
            ("DELETE", f"/v1/keys/{kept}", None),
            ("DELETE", f"/v1/keys/{NOTHING}", None),
        ):
            assert caller.ask(method, path, body)[0] == 403, (scope, method, path)
    names = [each["name"] for each in owners.admin.read("/v1/datasets")["items"]]
    assert names == ["ours", "theirs"]


def test_a_bound_key_works_with_its_own_dataset_and_sees_its_metrics_only(owners: Owners) -> None:
    for scope, reserves in ((Scope.OWNER, 403), (Scope.RUN, 201), (Scope.ADMIN, 201)):
        caller = owners.bound(scope)
        assert [each["name"] for each in caller.read("/v1/datasets")["items"]] == ["ours"]
        caller.read("/v1/datasets/ours/entries")
        status, _ = caller.post("/v1/datasets/ours/reservations", {"mechanism": PLAN_JSON})
        assert status == reserves, scope
    for scope in (Scope.OWNER, Scope.MONITOR, Scope.ADMIN):
        shown = owners.bound(scope).read("/metrics")
        assert set(re.findall(r'dataset="(\w+)"', shown)) == {"ours"}


def test_a_key_that_is_bound_to_no_dataset_sees_and_makes_none(owners: Owners) -> None:
    caller = owners.caller(Scope.ADMIN, datasets=())
    assert caller.read("/v1/datasets")["items"] == []
    new = {"name": "free", "size": 9, "budget": BUDGET}
    assert caller.refusal("POST", "/v1/datasets", new) == (403, "forbidden")


@pytest.mark.parametrize("scope", [Scope.OWNER, Scope.ADMIN])
def test_the_pages_allow_a_bound_key_no_more_than_the_api(owners: Owners, scope: Scope) -> None:
    http, asks = owners.http, {"Accept": "text/html"}
    csrf = owners.sign_in(owners.bound(scope))
    shown = http.get("/datasets").text
    assert "ours" in shown
    for hidden in ("theirs", 'href="/new-dataset"', 'href="/keys"'):
        assert hidden not in shown
    for page in ("/datasets/{}", "/runs/{}", "/runs/{}/certificate"):
        answers = {
            (found.status_code, found.text.replace(of, "NAME"))
            for of in ("theirs", owners.open, owners.ended, NOTHING)
            if (found := http.get(page.format(of), headers=asks))
        }
        assert {status for status, _ in answers} == {404}
        assert len(answers) == 1
    assert http.get("/keys", headers=asks).status_code == 403
    new = {"csrf": csrf, "size": "9", "epsilon": "1", "delta": "1e-5"}
    answers = {
        (found.status_code, found.text)
        for name in ("theirs", "ours", "free")
        if (
            found := http.post(
                "/datasets", data=new | {"once": uuid.uuid4().hex, "name": name}, headers=asks
            )
        )
    }
    assert {status for status, _ in answers} == {403}
    assert len(answers) == 1
    made = http.post("/keys", data={"csrf": csrf, "scopes": "admin"}, headers=asks)
    assert made.status_code == 403
    http.cookies.clear()


def test_keys_are_kept_as_long_as_the_longest_lease() -> None:
    days = Settings.model_fields["idempotency_days"]
    least = next(each.ge for each in days.metadata if hasattr(each, "ge"))
    fields = ledger_schemas.RenewRequest.model_fields["lease_seconds"].metadata
    longest = next(each.le for each in fields if hasattr(each, "le"))
    assert days.default >= least >= longest / 86400
