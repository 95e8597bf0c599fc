"""Every row of the table of refusals is refused alike by every surface that can ask it."""

from __future__ import annotations

import json
import pickle
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html import unescape
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.errors import CodedError, InvalidArgumentError
from accountant_service.ledger.api_keys import Scope
from accountant_service.operations.settings import Settings
from accountant_service.questions.models import ProblemView
from accountant_service.server.app import create_app
from tests.support import refusals
from tests.support.helpers import run
from tests.support.refusals import REFUSALS, Refusal
from training_client.client import AccountingService
from training_client.errors import BudgetExhaustedError, ServiceRefusedError

FIELDS_OF_THE_API = re.compile(
    r"\b(?:dataset_size|batch_size|noise_multiplier|sample_rate|attack_success)\b(?=[ ,.]|$)"
)


@dataclass(frozen=True)
class House:
    """The application with a ledger: datasets, one of them closed, an open run and an ended one.

    Attributes:
        app: the application.
        http: a client of it, without a key.
        url: of its database.
        runs: the identifiers of its runs.
    """

    app: Any
    http: TestClient
    url: str
    runs: dict[str, str]

    def place(self, row: Refusal) -> Refusal:
        """Return a row whose path has the identifiers of this ledger's runs."""
        return replace(row, path=row.path.format(**self.runs))

    def make_headers(self, row: Refusal) -> dict[str, str]:
        """Return the headers of a row's request; a key is made for it."""
        headers = {"Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json"}
        if row.scope is None:
            return headers
        return headers | {"Authorization": f"Bearer {self.make_key(row)}"}

    def make_key(self, row: Refusal) -> str:
        """Return a key as the row's caller has it."""
        token: str = self.app.state.keys.create([row.scope], datasets=row.datasets)[0]
        return token

    def write(self, path: str, body: Any) -> Any:
        """Write to the ledger as an administrator."""
        row = Refusal(path, body)
        answer = self.http.post(path, json=body, headers=self.make_headers(row))
        assert answer.is_success, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    url = f"sqlite:///{tmp_path_factory.mktemp('refusals')}/ledger.db"
    app = create_app(Settings(database_url=url))
    with TestClient(app, raise_server_exceptions=False) as http:
        made = House(app, http, url, {})
        budget, plan = {"epsilon": 1, "delta": 1e-5}, {"mechanism": run(0.01, 20.0, 100)}
        for name in ("patients", "closed"):
            made.write("/v1/datasets", {"name": name, "size": 1000, "budget": budget})
        made.write("/v1/datasets/closed/close", {})
        planned = {"name": "planned", "size": 1000, "budget": budget}
        made.write("/v1/datasets", planned | {"planned_mechanism": plan["mechanism"]})
        for name in ("open", "ended"):
            made.runs[name] = made.write("/v1/datasets/patients/reservations", plan)["id"]
        made.write(f"/v1/reservations/{made.runs['ended']}/release", {})
        yield made


def list_complaints(
    house: House,
    convert: Callable[[Refusal], Any],
    check: Callable[[Refusal, Any], None],
    least: int,
) -> list[str]:
    """Ask all rows that a surface can ask, of which there are at least so many.

    Args:
        house: the ledger that is asked.
        convert: returns the surface's form of a row; None if it cannot ask it.
        check: asks, and asserts that it is refused as the row says.
        least: the number of rows that can be asked; else the derivation has lost some.
    """
    rows = [house.place(row) for row in REFUSALS]
    asked = [(row, form) for row in rows if (form := convert(row)) is not None]
    print(len(asked), "rows")
    complaints = [] if len(asked) >= least else [f"only {len(asked)} rows can be asked"]
    for row, form in asked:
        try:
            check(row, form)
        except (AssertionError, LookupError, pytest.fail.Exception) as error:
            complaints.append(f"{row}: {str(error).splitlines()[0][:300]}")
    return complaints


def ask_api(house: House, row: Refusal) -> httpx.Response:
    content = row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()
    sent = None if row.body is None else content
    headers = house.make_headers(row)
    return house.http.request(row.method, row.path, content=sent, headers=headers)  # type: ignore[return-value]


def require_problem(row: Refusal, problem: dict[str, Any]) -> None:
    """Require that a problem document is the row's."""
    assert (problem["status"], problem["code"]) == (row.status, row.code), problem
    places = {fault["pointer"]: fault["message"] for fault in problem.get("errors", [])}
    assert row.pointer is None or any(
        place == row.pointer or (row.code == "too-expensive" and place.startswith(row.pointer))
        for place in places
    ), problem
    assert row.says in places.get(row.pointer or "", problem["detail"]), problem
    assert problem["detail"]


@pytest.mark.slow
def test_the_api_refuses_every_row_with_its_problem(house: House) -> None:
    def check(row: Refusal, _: Any) -> None:
        answer = ask_api(house, row)
        assert answer.status_code == row.status, answer.text[:300]
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.elapsed.total_seconds() < 5
        ProblemView.model_validate_json(answer.content)
        require_problem(row, answer.json())

    assert list_complaints(house, lambda row: row, check, 180) == []


def test_a_batch_refuses_each_question_as_alone(house: House) -> None:
    rows = [row for row in REFUSALS if row.question and isinstance(row.body, dict)]
    requests = [{"path": row.path, "body": row.body} for row in rows]
    complaints = []
    for start in range(0, len(requests), 50):
        answer = house.http.post("/v1/batch", json={"requests": requests[start : start + 50]})
        assert answer.status_code == 200, answer.text
        for row, result in zip(rows[start : start + 50], answer.json()["results"], strict=True):
            assert result["status"] == row.status
            try:
                require_problem(row, result["body"])
            except AssertionError as error:
                complaints.append(f"{row}: {str(error).splitlines()[0][:300]}")
    assert complaints == []


@pytest.mark.slow
def test_the_command_line_refuses_in_the_words_of_its_options(house: House) -> None:
    environment = {"COLUMNS": "300", "ACCOUNTANT_API_KEY": "", "ACCOUNTANT_DATABASE_URL": house.url}

    def check(row: Refusal, command: refusals.Command) -> None:
        words = [*command.words, *(["--json"] if command.has_json else [])]
        found = CliRunner().invoke(cli.app, words, input=command.stdin, env=environment)
        assert isinstance(found.exception, SystemExit), repr(found.exception)
        assert found.exit_code in ((2,) if command.has_json else (1, 2)), found.output
        said = found.output
        if command.has_json:
            problem = json.loads(found.stdout)
            assert problem["code"] == row.code, said
            faults = problem.get("errors", [])
            told = [each for each in faults if each["pointer"].startswith(row.pointer or "")]
            assert told or row.pointer is None, said
            said = " ".join(f"{each.get('option')} {each['message']}" for each in told)
            said += problem["detail"]
            is_json = "--mechanism" in command.words or command.stdin  # its fields are named
            named = FIELDS_OF_THE_API.findall(said)
            assert is_json or named == [], f"fields in place of options: {named}"
        assert command.option is None or command.option in said, said
        assert row.says in said, said

    assert list_complaints(house, refusals.to_command, check, 135) == []


@pytest.mark.slow
def test_pages_show_the_problem_beside_the_field(house: House) -> None:
    people: dict[Any, tuple[TestClient, str]] = {}

    def visit(row: Refusal) -> tuple[TestClient, str]:
        """Return a browser that the row's caller uses, and the token of its forms."""
        who = (row.scope, row.datasets)
        if who not in people:
            http = TestClient(house.app, raise_server_exceptions=False)
            http.headers["Accept"] = "text/html"
            text = http.get("/sign-in").text
            if row.scope is not None and row.scope is not Scope.MONITOR:
                form = {"csrf": read_token(text), "key": house.make_key(row)}
                text = http.post("/sign-in", data=form).text
            people[who] = (http, read_token(text))
        return people[who]

    def check(row: Refusal, page: refusals.Page) -> None:
        http, csrf = visit(row)
        if page.form is None:
            answer = http.get(page.path, follow_redirects=False)
        else:
            form = {"csrf": csrf} | page.form
            answer = http.post(page.path, data=form, follow_redirects=False)
        if row.status == 401:
            assert answer.headers["Location"].startswith("/sign-in"), answer.text
            return
        assert answer.status_code == page.status, f"{answer.status_code} {answer.text[:80]}"
        assert "<script>" not in answer.text
        if page.field is None:
            assert "<h1>" in answer.text, answer.text[:200]
            return
        sentence = re.search(rf'id="{page.field}-problem">([^<]*)<', answer.text)
        assert sentence, f"nothing beside {page.field}"
        assert sentence[1].strip(), f"nothing beside {page.field}"
        if not page.has_own_words:
            assert row.says.replace("_", " ") in unescape(sentence[1]), sentence[1]

    assert list_complaints(house, refusals.to_page, check, 90) == []


def read_token(text: str) -> str:
    found = re.search(r'name="csrf" value="([^"]+)"', text)
    assert found, text
    return found[1]


@pytest.mark.slow
def test_the_typed_client_raises_the_code_and_the_pointers(house: House) -> None:
    def send(request: httpx.Request) -> httpx.Response:
        answer = house.http.request(
            request.method, request.url.path, content=request.content, headers=dict(request.headers)
        )
        return httpx.Response(answer.status_code, content=answer.content)

    def check(row: Refusal, call: Callable[[AccountingService], Any]) -> None:
        key = None if row.scope is None else house.make_key(row)
        with AccountingService(
            "http://test", api_key=key, transport=httpx.MockTransport(send)
        ) as it:
            raised = BudgetExhaustedError if row.code == "budget-exhausted" else ServiceRefusedError
            with pytest.raises(raised) as caught:
                call(it)
        refused = caught.value
        assert row.says in str(refused) or row.pointer, str(refused)
        if isinstance(refused, ServiceRefusedError):
            assert refused.code == row.code, refused
            pointers = refused.pointers
            assert any(each.startswith(row.pointer or "") for each in (pointers or [""])), pointers

    assert list_complaints(house, refusals.to_client_call, check, 110) == []


@pytest.mark.slow
def test_the_functions_of_the_package_name_the_argument(house: House) -> None:
    def check(row: Refusal, call: Callable[[], Any]) -> None:
        with pytest.raises((InvalidArgumentError, CodedError)) as caught:
            call()
        if isinstance(caught.value, CodedError):
            assert caught.value.code == row.code
            return
        assert row.code == "invalid-request"
        names = [name for name, _ in caught.value.faults]
        of_run = row.pointer == "/mechanism" and names == [""]  # the run is the arguments
        assert of_run or any(name.endswith(row.field) for name in names), names
        assert row.says in str(caught.value), caught.value
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    assert list_complaints(house, refusals.to_function_call, check, 85) == []
