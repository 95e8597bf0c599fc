"""The pages without a browser: what they say, who may see them, what they refuse."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import shlex
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import sqlalchemy
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from accountant_service import cli, mechanisms
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.errors import DatabaseAwayError
from accountant_service.ledger.plans import StepsLeft
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from accountant_service.web import (
    calculator_form,
    calculator_page,
    documentation_pages,
    import_page,
    kind_form,
    ledger_pages,
    number_fields,
    plan_form,
    rendering,
    run_form,
    sessions,
)
from accountant_service.writing import number_format
from tests.support.earlier_ledgers import read_rows

HTML_NAME = '<b>"bold"</b><script>alert(1)</script>'
RUN = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 100}
STATIC = Path(rendering.__file__).parent / "static"


class Person:
    """A browser, and who sits at it."""

    def __init__(self, http: TestClient) -> None:
        self.http = http
        http.headers["Accept"] = "text/html"
        self.csrf = ""

    def get(self, path: str, status: int = 200) -> str:
        answer = self.http.get(path)
        assert answer.status_code == status, answer.text
        return answer.text

    def send(self, path: str, status: int = 200, **fields: Any) -> str:
        answer = self.http.post(path, data={"csrf": self.csrf} | fields)
        assert answer.status_code == status, answer.text
        return answer.text

    def sign_in(self, key: str, **fields: str) -> str:
        self.csrf = token_in(self.get("/sign-in"))
        text = self.send("/sign-in", key=key, **fields)
        self.csrf = token_in(text)
        return text


def token_in(text: str) -> str:
    found = re.search(r'name="csrf" value="([^"]+)"', text)
    assert found
    return found[1]


def problem(text: str, field: str) -> str:
    found = re.search(rf'id="{field}-problem">([^<]*)<', text)
    assert found, field
    return unescape(found[1])


def value(text: str, field: str) -> str:
    found = re.search(rf'name="{field}"[^>]* value="([^"]*)"', text)
    assert found, field
    return unescape(found[1])


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    url = f"sqlite:///{tmp_path_factory.mktemp('web')}/ledger.db"
    found = create_app(Settings(database_url=url))
    with TestClient(found):
        yield found


@pytest.fixture(scope="module")
def keys(app: Any) -> dict[str, str]:
    made = {scope.value: app.state.keys.create([scope], scope.value)[0] for scope in Scope}
    made["bound"] = app.state.keys.create([Scope.RUN], HTML_NAME, ("other",))[0]
    return made


@pytest.fixture
def visitor(app: Any) -> Person:
    return Person(TestClient(app, raise_server_exceptions=False))


@pytest.fixture
def admin(visitor: Person, keys: dict[str, str]) -> Person:
    visitor.sign_in(keys["admin"])
    return visitor


def writer(app: Any, key: str) -> Callable[[str, Any], Any]:
    """A function that posts a body with a key, and returns the answer's JSON."""
    http = TestClient(app)

    def post(path: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": uuid.uuid4().hex}
        answer = http.post(path, json=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json()

    return post


@pytest.fixture(scope="module")
def run(app: Any, keys: dict[str, str]) -> str:
    """An ended run of a dataset that is nearly used up."""
    post = writer(app, keys["admin"])
    budget = {"epsilon": 0.56, "delta": 1e-5}
    unit = {"privacy_unit": HTML_NAME}
    post("/v1/datasets", {"name": "patients", "size": 60_000, "budget": budget} | unit)
    path, body = "/v1/datasets/patients/reservations", {"mechanism": RUN, "purpose": HTML_NAME}
    identifier = post(path, body)["id"]
    for block in range(30):
        grant = {"steps": 3, "sequence": 3 * block}
        post(f"/v1/reservations/{identifier}/grants", grant)
    post(f"/v1/reservations/{identifier}/commit", {})
    found: str = identifier
    return found


# --- the calculator


def test_the_calculator_answers_at_once(visitor: Person) -> None:
    text = visitor.get("/")
    for part in ("≤ ε ≤", "proven", "estimate", "refuted", "σ = 0.959", "curve-table", "curl -s"):
        assert part in text
    for field, described in calculator_form.FIELDS.items():
        assert value(text, field) == described.initial


def test_the_whole_state_is_in_the_address(visitor: Person) -> None:
    state = {name: field.initial for name, field in calculator_form.FIELDS.items()}
    state |= {name: [*each.options][-1] for name, each in calculator_form.CHOICES.items()}
    state |= {"noise_multiplier": "3.5", "epochs": "2", "sampling": "shuffled", "batches": "sizes"}
    text = visitor.get("/?" + urlencode(state))
    for name in calculator_form.FIELDS:
        assert value(text, name) == state[name]
    for name in ("batches", "length"):
        assert f'name="{name}" value="{state[name]}" checked' in text
    for name in ("sampling", "neighbouring_relation"):
        assert f'value="{state[name]}" selected' in text


def test_problems_of_the_form_alone_stand_beside_what_was_typed(visitor: Person) -> None:
    """Other problems are those of the API: see the table of refusals."""
    for query, field, sentence in (
        ({"delta": "nan"}, "delta", "Failure probability must be a number"),
        ({"length": "epochs", "sample_rate": "0.1"}, "epochs", "To use epochs, choose batches by"),
        ({"sampling": "fixed_size", "sample_rate": "0.1"}, "sampling", "Fixed size sampling needs"),
        ({"noise_multiplier": "9" * 5000}, "noise_multiplier", "Noise multiplier must be"),
    ):
        text = visitor.get("/?" + urlencode(query))
        assert problem(text, field).startswith(sentence)
        for name in query.keys() & calculator_form.FIELDS.keys():
            assert value(text, name) == query[name]


def test_every_problem_is_told_at_once_and_leaves_the_other_answers(visitor: Person) -> None:
    text = visitor.get("/?steps=many&noise_multiplier=1e9&delta=2&epsilon=0&sample_rate=")
    for name in ("steps", "noise_multiplier", "delta", "epsilon", "sample_rate"):
        assert problem(text, name), name
    assert "No answer yet" in text
    text = visitor.get("/?epsilon=-1")
    assert "≤ ε ≤" in text
    assert "Correct the fields that are marked" in text


def _snippets(text: str) -> list[str]:
    return [unescape(found) for found in re.findall(r'id="snippet-\d">([^<]*)<', text)]


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    "query", ["", "?batches=sizes&length=epochs&neighbouring_relation=zero_out_one"]
)
def test_the_snippets_ask_the_same_question(visitor: Person, query: str) -> None:
    text = visitor.get("/" + query)
    found = re.search(r"([\d.]+) ≤ ε ≤ ([\d.]+)", text)
    assert found
    curl, command, python = _snippets(text)
    assert all("1e-5" in each and "1e-05" not in each for each in (curl, command, python))
    assert ".0," not in curl + python, "whole numbers are written as such"
    words = shlex.split(curl)
    assert words[:3] == ["curl", "-s", "http://testserver/v1/compare"]
    answer = visitor.http.post(words[2].removeprefix("http://testserver"), content=words[-1],
        headers={"Content-Type": "application/json"})  # fmt: skip
    upper = answer.json()["certified"]["epsilon"]
    assert number_format.round_up(upper) == found[2]
    printed = CliRunner().invoke(cli.app, shlex.split(command)[1:])
    assert f"≤ {number_format.round_up(upper)}" in printed.output
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(python, {})
    assert said.getvalue().startswith(str(upper)[:6])


TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["", "0", "1", "-1", "1e-5", "1e308", "inf", "nan", "0x1", "1_0", "٣", "½"]),
    st.sampled_from(["fields", *kind_form.SCHEMAS]),
    st.floats(width=32).map(str),
)
NAMES = [*calculator_form.FIELDS, *calculator_form.CHOICES, "add", "remove", "mechanism", "choose"]
NAMES += ["release_kind", "release_kind_new", "release_mechanism_kind", "release_noise_multiplier"]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), TEXTS, min_size=1))
def test_no_query_breaks_the_calculator(app: Any, query: dict[str, str]) -> None:
    visitor = Person(TestClient(app, raise_server_exceptions=False))
    second = {f"{name}-2": text for name, text in query.items()}
    text = visitor.get("/?" + urlencode(query | second, errors="replace"))
    assert "Traceback" not in text


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), TEXTS, min_size=1))
def test_no_query_breaks_a_quote(
    app: Any, keys: dict[str, str], run: str, query: dict[str, str]
) -> None:
    person = Person(TestClient(app, raise_server_exceptions=False))
    person.sign_in(keys["admin"])
    person.get("/datasets/patients/quote?" + urlencode(query, errors="replace"))


def test_raw_bytes_in_the_address_break_nothing(visitor: Person) -> None:
    for path in ("/?%ff=%00&steps=%ff%fe", "/datasets/%00%ff", "/runs/%0a", "/sign-in?next=%00"):
        assert visitor.http.get(path).status_code < 500


def test_a_closed_calculator_requires_signing_in(
    tmp_path: Path,
) -> None:
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/a.db", open_computation=False))
    with TestClient(app) as http:
        visitor = Person(http)
        assert "API key" in visitor.get("/")
        token, _ = app.state.keys.create([Scope.COMPUTE], "k")
        visitor.sign_in(token, next="/")
        assert "≤ ε ≤" in visitor.get("/")


# --- headers, weight


def test_every_answer_has_the_content_security_policy(visitor: Person) -> None:
    for path in ("/", "/sign-in", "/nothing", "/static/style.css"):
        headers = visitor.http.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy, path
        assert "unsafe" not in policy, path
        assert headers["X-Content-Type-Options"] == "nosniff", path
        assert headers["X-Frame-Options"] == "DENY", path


def test_no_template_has_inline_style_or_script() -> None:
    templates = sorted((STATIC.parent / "templates").glob("*.html"))
    assert templates
    for template in templates:
        text = template.read_text()
        inline = re.findall(r"<style|\bstyle=|\bon[a-z]+=|javascript:|hx-on|\|safe", text)
        assert inline == [], template
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text)), template


PAGES = ("/", "/plan", "/import", "/sign-in", "/datasets", "/keys", "/runs/{run}", "/help", "/docs")


@pytest.mark.slow
def test_every_page_links_to_the_documentation(
    admin: Person, app: Any, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the service, unless the operator has another address for it."""
    for address, link in (("", "/documentation/"), ("https://docs.example.org/",) * 2):
        monkeypatch.setattr(app.state.settings, "documentation_url", address)
        for path in PAGES:
            text = admin.get(path.format(run=run))
            assert f'<a href="{link}">Documentation</a>' in text, path
            assert 'href="/help"' in text, path
            assert 'href="/docs"' in text, path


def test_the_documentation_is_served_as_it_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "documentation"
    (site / "how-to").mkdir(parents=True)
    inline = 'let x = "</div>" && 1'
    page = f'<style>p {{}}</style><p style="color: red">&amp;<script>{inline}</script>'
    (site / "index.html").write_text(page)
    (site / "how-to/csv.html").write_text("text")
    (site / "secret").symlink_to("/etc/hostname")
    (tmp_path / "outside").write_text("x")
    http = TestClient(create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db")))
    for path in ("", "how-to/csv.html"):
        # private: the documentation that this checkout may have is listed at start
        monkeypatch.setattr(documentation_pages, "_FILES", {})
        answer = http.get(f"/documentation/{path}")
        assert answer.status_code == 200
        assert "make site" in answer.text
    # private: likewise
    monkeypatch.setattr(documentation_pages, "_FILES", documentation_pages.list_files(site))
    answer = http.get("/documentation")
    assert answer.url.path == "/documentation/"
    assert answer.text == page
    policy = answer.headers["Content-Security-Policy"]
    for text, place in ((inline, "script-src 'self'"), ("p {}", "style-src 'self'"),
                        ("color: red", "style-src-attr 'unsafe-hashes'")):  # fmt: skip
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert f"{place} 'sha256-{digest}'" in policy
    assert "unsafe-inline" not in policy
    assert http.get("/documentation/how-to/csv.html").text == "text"
    known = {"If-None-Match": answer.headers["ETag"]}
    assert http.get("/documentation/", headers=known).status_code == 304
    for path in ("secret", "../outside", "%2e%2e/outside", "how-to/../../outside", "how-to", "x"):
        assert http.get(f"/documentation/{path}").status_code == 404, path


def test_the_documentation_is_at_a_web_address() -> None:
    for address in ("javascript:alert(1)", "docs.example.org", "//example.org"):
        with pytest.raises(ValueError, match="https://"):
            Settings(documentation_url=address)


def test_the_first_load_is_below_150_kilobytes(visitor: Person) -> None:
    text = visitor.get("/")
    paths = re.findall(r'(?:href|src)="(/static/[^"]+)"', text)
    assert len(paths) == 6
    whole = len(text.encode()) + sum(len(visitor.http.get(path).content) for path in paths)
    assert whole < 150_000
    assert visitor.http.get(paths[-1]).headers["Content-Encoding"] == "gzip"


def test_vendored_files_have_their_licences() -> None:
    for name in ("htmx", "uplot"):
        assert (STATIC / f"vendor/{name}.LICENSE").exists()
    scripts = [*(STATIC / "vendor").glob("*.js"), *(STATIC / "vendor").glob("*.css")]
    assert all("sourceMappingURL" not in script.read_text() for script in scripts)
    assert all(len(gzip.compress(script.read_bytes())) < 30_000 for script in scripts)


# --- signing in


def test_the_cookie_is_http_only_and_same_site(app: Any, keys: dict[str, str]) -> None:
    for scheme in ("http", "https"):
        person = Person(TestClient(app, f"{scheme}://testserver"))
        form = {"csrf": token_in(person.get("/sign-in")), "key": keys["run"]}
        answer = person.http.post("/sign-in", data=form, follow_redirects=False)
        assert answer.status_code == 303
        cookie = answer.headers["Set-Cookie"].lower()
        assert {"httponly", "samesite=strict", "path=/"} <= set(cookie.split("; "))
        assert ("secure" in cookie.split("; ")) == (scheme == "https")
        assert keys["run"].lower() not in cookie


def test_a_key_that_is_wrong_or_may_not_look_shows_nothing(
    visitor: Person, keys: dict[str, str]
) -> None:
    visitor.csrf = token_in(visitor.get("/sign-in"))
    for key in ("", "nonsense", "pa_0_0", "é" * 3000):
        assert "key is not valid" in problem(visitor.send("/sign-in", 422, key=key), "key")
    assert "<h1>Sign in</h1>" in visitor.get("/datasets")
    assert "does not allow this" in visitor.send("/sign-in", 403, key=keys["compute"])


def test_signing_in_leads_to_the_requested_page_of_this_site(
    visitor: Person, keys: dict[str, str]
) -> None:
    assert 'name="next" value="/keys"' in visitor.get("/keys")
    assert "<h1>Keys</h1>" in visitor.sign_in(keys["admin"], next="/keys")
    for path in ("//evil.example", "https://evil.example", "/\\evil", "", "x\n"):
        assert "<h1>Datasets</h1>" in visitor.sign_in(keys["admin"], next=path)


def test_signing_out(admin: Person) -> None:
    admin.send("/sign-out")
    assert "<h1>Sign in</h1>" in admin.get("/datasets")


FORMS: dict[str, dict[str, Any]] = {  # of each path, as its page would send it
    "/datasets": {"name": "forged", "size": "5", "epsilon": "1", "delta": "1e-5", "once": "f"},
    "/datasets/{name}/caps": {"kind": "team", "holder": "vision", "percent": "40"},
    "/datasets/{name}/delete": {"once": "g"},
    "/runs/{identifier}/release": {"once": "h"},
    "/datasets/{name}/reference": {"mechanism": json.dumps(RUN), "once": "j"},
    "/datasets/{name}/close": {"once": "i"},
    "/keys": {"name": "forged", "scopes": "admin", "reach": "all", "days": ""},
    "/keys/{identifier}/revoke": {},
    "/import": {"document": import_page.EXAMPLE, "delta": "1e-5"},
    "/sign-in": {"key": "{key}"},
    "/sign-out": {},
}
OPEN_FORMS = {"/import"}  # it needs no token: it computes, and stores nothing


def list_forms(app: Any) -> set[str]:
    """Return the path of every form: every call outside the API by which something is sent."""
    routers = [getattr(route, "original_router", None) or route for route in app.routes]
    routes = [inner for router in routers for inner in getattr(router, "routes", [router])]
    sent = [route for route in routes if {*(getattr(route, "methods", 0) or ())} - {"GET", "HEAD"}]
    return {route.path for route in sent if not route.path.startswith("/v1/")}


def read_everything(app: Any) -> dict[str, Any]:
    """Return all that the database holds, but for the times when keys were used."""
    repository = app.state.repository
    tables = sqlalchemy.inspect(repository.engine).get_table_names()
    rows = {table: read_rows(repository, table) for table in tables}
    for row in rows["api_key"]:
        row.pop("last_used_at")
    return rows


@pytest.mark.slow
def test_a_form_without_its_token_does_nothing(
    admin: Person, app: Any, keys: dict[str, str]
) -> None:
    """And with its token it does something, so that each form here would."""
    assert list_forms(app) == FORMS.keys()
    other = Person(TestClient(app))
    other.sign_in(keys["admin"])
    _, victim = app.state.keys.create([Scope.RUN], "victim")
    post = writer(app, keys["admin"])
    budget = {"epsilon": 1.0, "delta": 1e-5}
    post("/v1/datasets", {"name": "kept", "size": 60_000, "budget": budget})
    post("/v1/datasets", {"name": "fresh", "size": 60_000, "budget": budget})
    reserved = post("/v1/datasets/kept/reservations", {"mechanism": RUN})["id"]

    def send(path: str, token: str | None) -> tuple[int, bool]:
        """Return the status of an answer, and whether anything has changed."""
        form = {name: text.replace("{key}", keys["run"]) for name, text in FORMS[path].items()}
        form |= {} if token is None else {"csrf": token}
        before = read_everything(app)
        identifier = reserved if path.startswith("/runs/") else victim.identifier
        name = {"/close": "kept", "/reference": "fresh"}.get(
            path[len("/datasets/{name}") :], "forged"
        )
        sent_to = path.format(identifier=identifier, name=name)
        answer = admin.http.post(sent_to, data=form, follow_redirects=False)
        is_same = read_everything(app) == before and "Set-Cookie" not in answer.headers
        return answer.status_code, not is_same

    for path in FORMS:
        for token in (None, "", "0" * 64, "é", other.csrf):
            assert send(path, token) == (200 if path in OPEN_FORMS else 403, False), (path, token)
        token = token_in(admin.get("/sign-in")) if path == "/sign-in" else admin.csrf
        status, has_changed = send(path, token)
        assert (status < 400, has_changed) == (True, path not in OPEN_FORMS), path
        admin.sign_in(keys["admin"])


def test_a_body_that_is_no_form_is_refused(admin: Person, app: Any) -> None:
    fields = {"name": "no form", "scopes": "run", "reach": "all", "csrf": admin.csrf}
    whole = urlencode(fields).encode()
    for more in (b"&a=\xff", b"&a=1" * 1000, b"&a=%00"):
        answer = admin.http.post("/keys", content=whole + more)
        assert answer.status_code == 403
        assert "this form cannot be read" in answer.text.lower()
    assert admin.http.post("/keys", content=b"a" * (2 << 20)).status_code == 413
    assert "no form" not in [key.name for key in app.state.keys.list_keys()]


@pytest.mark.parametrize("change", ["cut", "alter", "nonsense", "late", "revoked"])
def test_a_session_that_is_over_has_a_page(
    app: Any, visitor: Person, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    token, record = app.state.keys.create([Scope.ADMIN], "short-lived")
    visitor.sign_in(token)
    cookie = visitor.http.cookies[sessions.COOKIE]
    changed = {
        "cut": cookie[:-1],
        "alter": ("1" if cookie[0] == "0" else "0") + cookie[1:],
        "nonsense": "a.b",
    }.get(change, cookie)
    visitor.http.cookies.set(sessions.COOKIE, changed, domain="testserver.local")
    if change == "late":
        later = sessions.now() + sessions.SECONDS * 1_000_000
        monkeypatch.setattr(sessions, "now", lambda: later)
    if change == "revoked":
        app.state.keys.revoke(record.identifier, by="test")
    part = visitor.http.get("/datasets", headers={"HX-Request": "true", "Accept": "*/*"})
    assert (part.status_code, part.headers["HX-Refresh"]) == (401, "true")
    answer = visitor.http.get("/datasets")
    assert answer.status_code == 401
    assert "Your session has ended" in answer.text
    assert "<h1>Sign in</h1>" in visitor.get("/datasets")


# --- datasets and runs


def test_shares_are_rounded_as_bounds_are() -> None:
    """Shares taken are rounded up, shares left are rounded down."""
    shown = rendering._TEMPLATES.get_template("macros.html").module.budget  # type: ignore[attr-defined]
    dataset = {
        "budget": {"epsilon": 3.0, "delta": 1e-5},
        "spent": {"epsilon": 2.0, "share": 0.80201},
        "held": {"epsilon": 0.0, "share": 0.0},
        "remaining": {"epsilon": 1.0, "share": 0.19799},
        "accounting": {"filter": "renyi", "description": "Rényi filter of order 5.5"},
    }
    shares = ledger_pages._compute_budget_shares(dataset)
    text = shown(dataset, shares, None)
    assert "<dd>80.3 %" in text
    assert "<dd>19.7 %" in text
    assert "Only 19 % of the budget is left." in text
    assert "Rényi filter of order 5.5" in text


@pytest.mark.slow
def test_a_budget_is_counted_in_steps(admin: Person, run: str) -> None:
    text = admin.get("/datasets/patients")
    assert f'href="/runs/{run}"' in text
    steps = re.search(r"(\d+) more steps", text)
    assert steps
    assert "DP-SGD, q = 0.01, σ = 1.1, Poisson sampling" in text
    assert "Counted in reference steps" in text
    budget = re.search(r"budget</dt><dd>(\d+) reference steps", text)
    assert budget
    assert int(steps[1]) + 90 == int(budget[1])
    assert "spent</dt><dd>90 reference steps" in text
    spent = re.search(r'spent</dt><dd>[\d.]+ % <span class="hint">ε ≤ ([\d.]+)', text)
    rows = re.findall(r"<td data-value=[^>]*>[^<]*</td><td>([^<]*)</td><td>([^<]*)</td>", text)
    assert spent
    assert (rows[0], rows[-1]) == (("0", "0"), (spent[1], spent[1]))
    assert len(rows) == 33
    assert "Spent and held are in reference steps, or ε by addition." in text
    share = re.search(r"Reserved share of the budget</dt><dd>([\d.]+) %", admin.get(f"/runs/{run}"))
    assert share
    assert float(share[1]) == pytest.approx(10_000 / int(budget[1]), rel=0.01)


def test_what_is_added_up_is_shown_as_epsilon(
    admin: Person, app: Any, keys: dict[str, str]
) -> None:
    post = writer(app, keys["admin"])
    query = {"mechanism": {"kind": "laplace", "noise_multiplier": 10.0}}
    training = {
        "mechanism": {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 90}
    }
    for name in ("addition", "reference"):
        budget = {"epsilon": 3.0, "delta": 1e-5}
        dataset = {"name": f"sum-{name}", "size": 60000, "budget": budget, "filter": name}
        post("/v1/datasets", dataset)
        for run in (query, training):
            path = f"/v1/datasets/sum-{name}/reservations"
            identifier = post(path, run)["id"]
            post(f"/v1/reservations/{identifier}/grants", {"steps": 1, "sequence": 0})
        text = admin.get(f"/datasets/sum-{name}")
        assert '<td class="amount">ε 0.1</td>' in re.sub(r"\s+", " ", text).replace("> ", ">")
        assert ("Before, ε 0.1 was added up" in text) == (name == "reference")
        assert ("Spent and held are ε, by addition." in text) == (name == "addition")


def test_a_dataset_without_a_run_says_what_it_admits(
    admin: Person, app: Any, keys: dict[str, str]
) -> None:
    for name, epsilon, delta in (("fresh", 1.0, 1e-5), ("hopeless", 1e-4, 1e-40)):
        form = {"name": name, "size": "60000", "epsilon": str(epsilon), "delta": str(delta)}
        text = admin.send("/datasets", **form, once=uuid.uuid4().hex)
        assert "What this budget admits" in text
        assert "the first larger run decides in which steps the rest is counted." in text
        assert ("Create another dataset" in text or "create another" in text) == (
            name == "hopeless"
        )
        assert "ε over time" not in text
    assert "steps-left" not in text


def test_steps_that_need_an_exchange_are_counted_after_the_page(
    admin: Person, app: Any, keys: dict[str, str]
) -> None:
    post = writer(app, keys["admin"])
    post(
        "/v1/datasets",
        {
            "name": "exchanged",
            "size": 60_000,
            "budget": {"epsilon": 1.0, "delta": 1e-5},
            "planned_mechanism": RUN,
        },
    )
    other = RUN | {"noise_multiplier": 2.0}
    post("/v1/datasets/exchanged/reservations", {"mechanism": other})
    text = admin.get("/datasets/exchanged")
    assert 'hx-get="/datasets/exchanged/steps-left"' in text
    part = admin.get("/datasets/exchanged/steps-left")
    steps = re.search(r"(?i)at least ([\d\u202f]+) more steps", part)
    assert steps
    assert int(steps[1].replace("\u202f", "")) > 420, "more noise, more steps"
    assert steps[0] in admin.get("/datasets/exchanged"), "it is remembered"


def test_datasets_are_searched_sorted_and_counted(
    admin: Person, app: Any, keys: dict[str, str]
) -> None:
    post = writer(app, keys["admin"])
    for name, epsilon in (("find-a", 1.0), ("find-b", 2.0)):
        budget = {"epsilon": epsilon, "delta": 1e-5}
        post("/v1/datasets", {"name": name, "size": 60_000, "budget": budget})
    post("/v1/datasets/find-a/close", {})
    text = admin.get("/datasets?find=FIND-&sort=budget")
    assert re.findall(r">([\w-]+)</a>(?: <span|</th>)", text) == ["find-b", "find-a"]
    assert "2 datasets with 120\u202f000 records in all, 1 closed." in text
    assert "No dataset’s name contains “&lt;x&gt;”" in admin.get("/datasets?find=<x>")


def test_a_run_says_who_reserved_it_and_how_long_it_ran(
    admin: Person, app: Any, keys: dict[str, str], run: str
) -> None:
    """Only owners see the names of other keys."""
    holder = re.search(r"Reserved</dt><dd>by ([\w-]+),", admin.get(f"/runs/{run}"))
    assert holder
    assert holder[1] in [key.name for key in app.state.keys.list_keys()]
    text = admin.get("/datasets/patients")
    assert f'data-label="Reserved by" class="why">{holder[1]}<' in text
    assert re.search(r'data-label="Ran for" class="amount">\d+ (s|min)\b', text)
    other = Person(TestClient(app))
    other.sign_in(keys["run"])
    shown = other.get("/datasets/patients")
    assert "this key" in shown or "another key" in shown
    assert "Set a cap" not in shown
    assert [rendering.format_duration(each) for each in (None, 0.4, 59, 60, 3700, 90_000)] == [
        "–", "0 s", "59 s", "1 min", "1 h 1 min", "1 d 1 h",
    ]  # fmt: skip


def test_a_cap_is_set_and_removed_on_the_page(admin: Person, run: str) -> None:
    path = "/datasets/patients/caps"
    cap = {"kind": "team", "holder": "vision", "percent": "40"}
    for change, field, said in (
        ({"kind": "key", "holder": "nobody"}, "holder", "There is no key"),
        ({"holder": "a b"}, "holder", "Enter the identifier"),
        ({"percent": "nan"}, "percent", "Enter a number from 0 to 100."),
    ):
        text = admin.send(path, 422, **(cap | change))
        assert problem(text, field).startswith(said)
        assert value(text, "holder") == (cap | change)["holder"]
    text = admin.send(path, 422, **(cap | {"holder": "", "percent": "half"}))
    assert problem(text, "holder"), "both fields are named"
    assert problem(text, "percent"), "both fields are named"
    assert "team vision</th>" in admin.send(path, **cap)
    assert "team vision</th>" not in admin.send(path, **cap, remove="yes")


def test_a_curve_begins_at_zero_and_a_rate_in_words_is_never_too_small() -> None:
    curve = {"steps": [35, 70], "curves": [{"method": "pld", "epsilon": [0.4, 0.6]}]}
    first = {"steps": [1], "curves": [{"method": "pld", "epsilon": [0.1]}]}
    shown = calculator_page._begin_at_zero(curve, first)
    assert shown is not None
    assert (shown["steps"], shown["curves"][0]["epsilon"]) == ([0, 1, 35, 70], [0, 0.1, 0.4, 0.6])
    rates = {1 / 296.5: "1 in 296", 0.1: "1 in 10", 0.1001: "11 in 100", 1.0: "100 in 100"}
    for rate, words in rates.items():
        assert calculator_page.describe_rate_rounded_up(rate) == words


def test_the_record_is_paged(admin: Person, run: str) -> None:
    text = admin.get("/datasets/patients")
    numbers = [int(found) for found in re.findall(r'<th scope="row" class="amount">(\d+)', text)]
    assert numbers == list(range(33, 8, -1))
    older = re.search(r'\?before=(\d+)#entries">Older', text)
    assert older
    text = admin.get(f"/datasets/patients?before={older[1]}")
    numbers = [int(found) for found in re.findall(r'<th scope="row" class="amount">(\d+)', text)]
    assert numbers == list(range(8, 0, -1))
    assert "Older" not in text
    assert "Newer entries" in text


def test_a_run_and_its_certificate(admin: Person, run: str) -> None:
    text = admin.get(f"/runs/{run}")
    assert "90 of 100 steps granted" in text
    assert "every 2s" not in text
    answer = admin.http.get(f"/runs/{run}/certificate")
    assert answer.headers["Content-Disposition"].startswith("attachment")
    assert (answer.json()["steps_reserved"], answer.json()["steps"]) == (100, 90)
    assert "for all 100 reserved steps, even if it stops earlier" in text
    assert f"ε ≤ {number_format.round_up(answer.json()['guarantee']['epsilon'])} at" in text
    assert "Assumptions" in text
    assert "the number of records is public" in text


@pytest.mark.slow
def test_datasets_and_ended_runs_link_to_their_report(admin: Person, run: str) -> None:
    for page in ("/datasets/patients", f"/runs/{run}"):
        assert f'href="{page}/report"' in admin.get(page)
        answer = admin.http.get(f"{page}/report")
        assert answer.headers["Content-Type"].startswith("text/html")
        assert "What someone could learn about one " in answer.text
        assert "&lt;script&gt;" in answer.text
        assert "<script" not in answer.text


def test_markup_is_text(admin: Person, run: str) -> None:
    for path in ("/keys", "/datasets", "/datasets/patients", f"/runs/{run}"):
        text = admin.get(path)
        assert "&lt;script&gt;" in text
        assert "<script>" not in text


def test_a_key_is_offered_what_it_may_do(visitor: Person, keys: dict[str, str], run: str) -> None:
    assert "patients" not in visitor.sign_in(keys["bound"])
    assert "New dataset" not in visitor.sign_in(keys["run"])
    assert "does not allow this" in visitor.get("/new-dataset", 403)
    visitor.sign_in(keys["owner"])
    visitor.get(f"/keys/{keys['run'].split('_')[1]}/revoke", 403)


def test_an_owner_gives_a_budget(visitor: Person, keys: dict[str, str]) -> None:
    visitor.sign_in(keys["owner"])
    fields = {"name": "made-here", "size": "500", "epsilon": "2", "delta": "1e-6"}
    assert "<h1>made-here</h1>" in visitor.send("/datasets", once="a", **fields)
    assert "<h1>made-here</h1>" in visitor.send("/datasets", once="a", **fields)
    text = visitor.send("/datasets", 422, once="b", **fields)
    assert "choose another" in problem(text, "name")


def test_a_wrong_dataset_keeps_what_was_typed(admin: Person) -> None:
    typed = {"name": "<i>", "size": "few", "epsilon": "-1", "delta": "2", "privacy_unit": "person"}
    text = admin.send("/datasets", 422, once="c", **typed)
    for name, text_typed in typed.items():
        assert value(text, name) == text_typed
        assert problem(text, name) or name == "privacy_unit"


# --- keys


def test_a_key_is_shown_once_and_revoked(admin: Person) -> None:
    text = admin.send("/keys", 201, name="new one", scopes=["run", "owner"], days="3")
    token = re.search(r"pa_[\w-]+", text)
    assert token
    listed = admin.get("/keys")
    assert token[0] not in listed
    identifier = token[0].split("_")[1]
    assert f"/keys/{identifier}/revoke" in listed
    assert f"/keys/{identifier}/revoke" not in admin.send(f"/keys/{identifier}/revoke")
    admin.send("/keys/unknown/revoke", 404)


def test_a_wrong_key_form_keeps_what_was_typed(admin: Person) -> None:
    text = admin.send("/keys", 422, name="night", datasets="a/b c", days="soon")
    assert (value(text, "name"), value(text, "days")) == ("night", "soon")
    assert problem(text, "scopes") == "Choose at least one scope."
    assert problem(text, "datasets")
    assert problem(text, "expires_in_seconds".replace("expires_in_seconds", "days"))
    assert problem(admin.send("/keys", 422, scopes="king", days="inf"), "scopes")


SENT = ("name", "size", "epsilon", "delta", "accept_weak", "privacy_unit", "once", "days",
        "scopes", "reach", "planned", "kind", "mechanism", "filter", "document", "format",
        "sampling")  # fmt: skip
GARBAGE = st.dictionaries(st.sampled_from(SENT), st.one_of(TEXTS, st.just("x" * 300)))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*FORMS]), GARBAGE)
def test_no_form_breaks_a_page(
    app: Any, keys: dict[str, str], path: str, fields: dict[str, str]
) -> None:
    person = Person(TestClient(app, raise_server_exceptions=False))
    person.sign_in(keys["admin"])
    body = urlencode({"csrf": person.csrf} | fields, errors="replace")
    answer = person.http.post(path.format(identifier="x", name="x"), content=body)
    assert answer.status_code < 500
    assert "Traceback" not in answer.text


# --- failures


def test_unknown_paths_are_pages_for_browsers_and_problems_for_programs(visitor: Person) -> None:
    assert "There is nothing here" in visitor.get("/no/such/page", 404)
    for path, accept in (("/no/such/page", "*/*"), ("/v1/nothing", "text/html")):
        answer = visitor.http.get(path, headers={"Accept": accept})
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_fault_is_a_page_without_a_trace(
    visitor: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(calculator_form, "read_form", fail)
    text = visitor.get("/", 500)
    assert "<h1>The service failed</h1>" in text
    assert "secret detail" not in text


def test_a_database_that_is_away_is_a_page(
    app: Any, admin: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise DatabaseAwayError("the database does not answer")

    monkeypatch.setattr(app.state.repository, "reading", away)
    answer = admin.http.get("/datasets")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    assert "The database does not answer" in answer.text
    assert "≤ ε ≤" in admin.get("/")


def test_the_reference_names_every_call_and_loads_nothing_from_elsewhere(app: Any) -> None:
    http = TestClient(app)
    answer = http.get("/docs")
    assert answer.status_code == 200
    for path, operations in http.get("/openapi.json").json()["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code></h3>" in answer.text
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', answer.text)
    assert not re.findall(r"<dd>\W*</dd>", answer.text), "each parameter has a meaning"
    assert "-d '{\n  &#34;" in answer.text or "-d &#39;{\n  &#34;" in answer.text
    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
    assert http.get("/redoc").status_code == 404


def test_documents_are_the_same_bytes_with_an_etag(
    admin: Person, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made once: neither FastAPI nor a template is asked again, whatever the address adds."""
    http = TestClient(app)
    paths = ("/openapi.json", "/docs", "/help", "/v1/methods", "/static/style.css")
    first = {path: http.get(path, headers={"Accept-Encoding": "identity"}) for path in paths}

    def made(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is made again")

    with monkeypatch.context() as patch:
        patch.setattr(app, "openapi", made)
        patch.setattr(rendering, "render_page", made)
        for path, found in first.items():
            again = http.get(f"{path}?x=1", headers={"Accept-Encoding": "identity"})
            assert (again.status_code, again.content) == (200, found.content), path
            packed = http.get(path)
            assert packed.headers["Content-Encoding"] == "gzip", path
            assert packed.text == found.text, path
            assert packed.headers["ETag"] != found.headers["ETag"], path
            for known in (packed.headers["ETag"], f'"x", W/{packed.headers["ETag"]}'):
                same = http.get(path, headers={"If-None-Match": known})
                assert (same.status_code, same.content) == (304, b""), path
            other = http.get(path, headers={"If-None-Match": '"x"'})
            assert other.status_code == 200, path
            assert http.head(path).status_code == (405 if path in ("/docs", "/help", "/v1/methods")
                                                   else 200)  # fmt: skip
    assert http.get("/static/none.css").status_code == 404
    assert http.get("/static/../routing.py").status_code == 404
    assert "Sign out" in admin.get("/docs"), "a session has a page of its own"
    assert "no-store" in admin.http.get("/docs").headers["Cache-Control"]
    assert "Sign out" not in http.get("/docs").text


# --- the planner


def test_the_planner_recommends_a_run(visitor: Person) -> None:
    text = visitor.get("/plan?epochs=5&sampling=poisson&batch_size=64")
    found = re.search(r"Batch ([\d\u202f]+), ([\d\u202f]+) steps, σ = ([\d.]+)", text)
    assert found
    for part in ("recommended", "today", "frontier-table", "arXiv 2402.03990", "Planner</a>"):
        assert part in text
    headline, folded = re.findall(r"ε ≤ ([\d.]*\d)", text)[:2]
    assert headline == number_format.round_up(float(folded), 4)
    assert len(folded) > len(headline)
    batch, steps = (int(each.replace("\u202f", "")) for each in found.groups()[:2])
    assert batch * steps <= 5 * 60_000
    link = re.search(r'href="(/\?batches=sizes[^"]*)">Open in the calculator', text)
    assert link
    opened = visitor.get(unescape(link[1]))
    assert value(opened, "noise_multiplier") == found[3]
    assert value(opened, "steps") == str(steps)


# --- several runs


RUNS = {
    "steps": "500",
    "kind-2": "json",
    "mechanism-2": '{"kind": "laplace", "noise_multiplier": 20}',
    "noise_multiplier-4": "2",
    "batches-4": "sizes",
    "sampling-4": "fixed_size",
}


def upper(text: str) -> float:
    found = re.search(r"[\d.]+ ≤ ε ≤ ([\d.]*\d)", text)
    assert found
    return float(found[1])


@pytest.mark.slow
def test_several_runs_are_accounted_together(visitor: Person) -> None:
    text = visitor.get("/?" + urlencode(RUNS))
    assert "for all 3 runs" in text
    assert "Laplace noise, b/C = 20" in text
    assert value(text, "noise_multiplier-3") == "2", "runs are numbered without gaps"
    parts = json.loads(shlex.split(_snippets(text)[0])[-1])["mechanism"]["mechanisms"]
    assert [each["kind"] for each in parts] == ["dp_sgd", "laplace", "dp_sgd"]
    answer = visitor.http.post(
        "/v1/epsilon",
        json={"mechanism": {"kind": "composed", "mechanisms": parts}, "delta": 1e-5},
    ).json()
    assert number_format.round_up(answer["epsilon"]) == number_format.round_up(upper(text))
    body = {"mechanism": parts[1], "delta": 1e-5}
    alone = visitor.http.post("/v1/epsilon", json=body).json()["epsilon"]
    assert f'data-label="ε alone" class="amount">{number_format.round_up(alone, 4)}<' in text
    assert "To stay within ε = 2: run 1" in text
    noise = re.search(r"noise_multiplier=([\d.]+)[^\"]*\">Use this noise", text)
    assert noise
    solved = visitor.get("/?" + urlencode(RUNS | {"noise_multiplier": noise[1]}))
    assert upper(solved) == pytest.approx(2, abs=1e-4), "the others count as well"
    assert "curve-table" not in text


@pytest.mark.slow
def test_the_snippets_of_several_runs_ask_the_same_question(visitor: Person) -> None:
    text = visitor.get("/?" + urlencode(RUNS))
    _, command, python = _snippets(text)
    printed = CliRunner().invoke(cli.app, shlex.split(command)[1:])
    assert f"≤ {number_format.round_up(upper(text))}" in printed.output
    assert command.startswith(
        "accountant compare -s 1.1 -t 500 -n 60000 -b 600 --and '-s 2 -n 60000 -b 600 -e 10 "
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(python, {})
    assert said.getvalue().startswith(str(upper(text))[:6])


@pytest.mark.slow
def test_runs_are_added_and_removed_without_scripts(visitor: Person) -> None:
    one = {"noise_multiplier": "1.3", "steps": "70", "delta": "1e-6"}
    text = visitor.get("/?" + urlencode(one | {"add": "dp_sgd"}))
    assert (value(text, "noise_multiplier-2"), value(text, "steps-2")) == ("1.3", "70")
    assert value(text, "delta") == "1e-6"
    answer = visitor.http.get("/?" + urlencode(one | {"add": "fields"}))
    assert answer.url.fragment == "run-2"
    assert "add" not in answer.url.params
    assert problem(answer.text, "release_kind-2") == "Choose a kind, and show its fields."
    chosen = dict(answer.url.params) | {"release_kind_new-2": "rdp", "choose": "2"}
    answer = visitor.http.get("/?" + urlencode(chosen))
    assert value(answer.text, "release_orders-2") == "2, 4, 8"
    left = visitor.get("/?" + urlencode(dict(answer.url.params) | {"remove": "1"}))
    assert "noise_multiplier-2" not in left
    assert "To stay within" not in left, "a mechanism of another kind has no noise to solve for"
    assert 'name="kind" value="fields" checked' in left
    assert "Run 2" not in visitor.get("/?remove=1&steps=3"), "the last run stays"


def test_there_is_a_limit_to_the_number_of_runs(visitor: Person) -> None:
    many = {f"steps-{number}": str(number) for number in range(2, 10)}
    text = visitor.get("/?" + urlencode(many | {"add": "dp_sgd", "delta": ""}))
    assert "for 8 runs" not in text
    assert "Remove run 8" in text
    assert "Remove run 9" not in text
    assert "Add a DP-SGD run" not in text


def test_a_problem_of_a_mechanism_stands_beside_it(visitor: Person) -> None:
    for number in ("", "-2"):
        for written, sentence in (
            ("", "The JSON text is required."),
            ("{", "The JSON text cannot be read: EOF"),
            ('{"kind": "laplace", "noise_multiplier": NaN}', "The JSON text cannot be read"),
            ("9" * 1001, "The JSON text must be at most 1000 characters long"),
            ('{"kind": "laplace"}', "/noise_multiplier is required."),
        ):
            sent = {f"kind{number}": "json", f"mechanism{number}": written}
            text = visitor.get("/?" + urlencode(sent))
            assert problem(text, f"mechanism{number}").startswith(sentence)
            assert "Correct the fields that are marked." in text
            assert not problem(text, "sampling"), "told once, and where it is"


def test_a_problem_of_the_second_run_stands_beside_it(visitor: Person) -> None:
    text = visitor.get("/?steps-2=many&noise_multiplier-3=1e9&delta=1e-5")
    assert problem(text, "steps-2").startswith("Steps must be a whole number")
    assert problem(text, "noise_multiplier-3").startswith("Noise multiplier must be")
    assert not problem(text, "steps")


# --- fields of other kinds, generated from their schemas


@pytest.mark.parametrize("kind", kind_form.SCHEMAS)
def test_the_fields_of_a_kind_hold_its_example_at_first(kind: str) -> None:
    run = run_form.read_run({"kind": "fields", "release_kind": kind})
    assert run.problems == {}
    example = mechanisms.from_json(kind_form.EXAMPLES[kind])
    assert mechanisms.from_json(run.mechanism) == example
    again = run_form.read_run(run_form.write_runs([run.texts]))
    assert again == run, "the address holds all fields"


def _typed_fields(group: kind_form.KindGroup) -> Iterator[kind_form.KindField]:
    for entry in group.entries:
        if isinstance(entry, kind_form.KindGroup):
            yield from _typed_fields(entry)
        elif entry.shape != "choice":
            yield entry


@pytest.mark.parametrize("kind", kind_form.SCHEMAS)
def test_a_problem_of_a_generated_field_stands_beside_it(kind: str) -> None:
    start = run_form.read_run({"kind": "fields", "release_kind": kind})
    for field in _typed_fields(start.group):
        assert isinstance(field.label, number_fields.NumberField)
        unread = run_form.read_run({"kind": "fields", **start.texts, field.name: "many"})
        assert unread.problems[field.name].startswith(f"{field.label.label} must be ")
        refused = run_form.read_run({"kind": "fields", **start.texts, field.name: "-1"})
        assert refused.problems == {}
        with pytest.raises(mechanisms.MechanismError) as caught:
            mechanisms.from_json(refused.mechanism)
        places = [
            refused.place_problem(pointer.strip("/").split("/"), message)
            for pointer, message in caught.value.faults
        ]
        sentences = [sentence for name, sentence in places if name == field.name]
        assert sentences, (field.name, places)
        assert sentences[0].startswith(field.label.label)


def test_the_labels_of_generated_fields_are_words() -> None:
    for kind in kind_form.SCHEMAS:
        group = run_form.read_run({"kind": "fields", "release_kind": kind}).group
        labels = [field.label.label for field in _typed_fields(group)]
        assert all(re.fullmatch(r"[A-Z][A-Za-z ]+", label) for label in labels), labels


@pytest.mark.slow
def test_other_kinds_are_chosen_within_a_mechanism_without_scripts(visitor: Person) -> None:
    sent = {"kind": "fields", "release_kind": "composed", "release_kind_new": "composed"}
    sent |= {"release_mechanisms_0_noise_multiplier": "5", "release_mechanisms_0_kind": "gaussian"}
    sent |= {"release_mechanisms_1_kind": "laplace", "release_mechanisms_1_kind_new": ""}
    sent |= {"release_mechanisms_2_kind_new": "poisson_sampled", "choose": "1", "delta": "1e-6"}
    answer = visitor.http.get("/?" + urlencode(sent))
    assert answer.url.fragment == "run-1"
    assert not {"choose", "release_kind_new"} & set(answer.url.params)
    assert "does not know" not in answer.text
    asked = json.loads(shlex.split(_snippets(answer.text)[0])[-1])
    assert asked["delta"] == 1e-6
    assert asked["mechanism"]["mechanisms"] == [
        {"kind": "gaussian", "noise_multiplier": 5.0},
        kind_form.EXAMPLES["poisson_sampled"],
    ]


def test_a_problem_within_a_mechanism_stands_beside_it(visitor: Person) -> None:
    sent = {"kind": "fields", "release_kind": "balls_in_bins", "release_mechanism_kind": "laplace"}
    text = visitor.get("/?" + urlencode(sent))
    expected = "The mechanism must be Gaussian noise without sampling"
    assert problem(text, "release_mechanism_kind").startswith(expected)
    text = visitor.get("/?kind-2=fields&release_kind-2=rdp&release_divergences-2=.1, .2, .19")
    assert problem(text, "release_divergences-2").startswith(
        "Divergences, entry 3 of the list, must not"
    )


def test_mechanisms_are_nested_no_deeper_than_the_form_shows() -> None:
    deep = {f"release{'_mechanism' * depth}_kind": "user_level" for depth in range(50)}
    run = run_form.read_run({"kind": "fields", **deep})
    assert len(run.texts) < 50
    assert json.dumps(run.mechanism).count("user_level") == kind_form.DEPTH_MAX - 1


@pytest.mark.slow
def test_other_kinds_are_quoted(admin: Person, run: str) -> None:
    sent = {"kind": "fields", "release_kind_new": "laplace", "choose": "1"}
    answer = admin.http.get("/datasets/patients/quote?" + urlencode(sent))
    assert value(answer.text, "release_noise_multiplier") == "2.0"
    assert "choose" not in answer.url.params
    assert re.search(r'class="figure">It (does not fit|fits)<', answer.text)


# --- notes about the address


RUN_BY_SIZES = "dataset_size=60000&batch_size=256&epochs=15&noise_multiplier=1.3&delta=1e-5"


@pytest.mark.parametrize(
    ("query", "mechanism"),
    [
        (RUN_BY_SIZES, {"dataset_size": 60000, "batch_size": 256, "epochs": 15}),
        ("dataset_size=900&batch_size=30&steps=7&noise_multiplier=1.3&delta=1e-5",
         {"dataset_size": 900, "batch_size": 30, "steps": 7}),
        ("sample_rate=.02&steps=7&noise_multiplier=1.3", {"sample_rate": 0.02, "steps": 7}),
    ],
)  # fmt: skip
def test_the_fields_of_an_address_decide_what_is_computed(
    query: str, mechanism: dict[str, Any], visitor: Person
) -> None:
    run = {"kind": "dp_sgd", "noise_multiplier": 1.3} | mechanism
    proved = visitor.http.post("/v1/epsilon", json={"mechanism": run, "delta": 1e-5}).json()
    text = visitor.get("/?" + query)
    assert upper(text) == pytest.approx(proved["epsilon"], rel=1e-5)
    assert 'name="batches" value="sizes" checked' in text or "dataset_size" not in query
    assert ("The address does not say delta" in text) == ("delta" not in query)


def test_a_mechanism_and_further_runs_decide_by_their_fields() -> None:
    for query, mechanism in (
        ({"mechanism": '{"kind": "laplace", "noise_multiplier": 2}'},
         {"kind": "laplace", "noise_multiplier": 2}),
        ({"release_kind": "laplace", "release_noise_multiplier": "2"},
         {"kind": "laplace", "noise_multiplier": 2.0}),
    ):  # fmt: skip
        further = {f"{name}-2": text for name, text in query.items()}
        for runs in (run_form.read_runs(query), run_form.read_runs(further)[1:]):
            assert [run.mechanism for run in runs] == [mechanism]
            assert runs[0].faults == ()


UNUSABLE = {  # an address, and what the page says in place of an answer
    "/?sigma=2": "does not know the parameter “sigma”. Did you mean “noise_multiplier”?",
    "/?noise_multiplyer=2": "Did you mean “noise_multiplier”?",
    "/?sampling=poison": "“poison” is no value of sampling: it may be poisson,",
    "/?sampling=shuffle": "Did you mean shuffled?",
    "/?steps-2=3&sampling-2=x": "“x” is no value of sampling-2",
    "/?neighbouring_relation=add_remove": "Did you mean add_or_remove_one?",
    "/?steps=3&steps=4": "“steps” is in the address 2 times.",
    "/?steps-12=3": "does not know the parameter “steps-12”",
    "/?sample_rate=.1&batch_size=9&dataset_size=99": "“sample_rate” cannot be used for",
    "/?batches=rate&batch_size=9&dataset_size=99": "“dataset_size” cannot be used for",
    "/?batches=sizes&sample_rate=.1": "“sample_rate” cannot be used for",
    "/?steps=3&epochs=4&batch_size=9&dataset_size=99": "“steps” cannot be used for",
    "/?length=steps&epochs=4&batch_size=9&dataset_size=99": "“epochs” cannot be used for",
    "/?kind=json&noise_multiplier=2": "cannot be used for a mechanism as JSON",
    "/?mechanism={}&noise_multiplier=2": "“mechanism” cannot be used for a DP-SGD run",
    "/?release_kind=laplace&noise_multiplier=2": "cannot be used for another kind",
    "/?release_kind=laplace&release_scale=2": "“release_scale” cannot be used",
    "/?sigma=2&add=dp_sgd": "does not know the parameter “sigma”",
    "/?<script>=1": "“&lt;script&gt;”",
    "/plan?epoch=3": "Did you mean “epochs”?",
    "/plan?sampling=shuffled": "“shuffled” is no value of sampling: it may be both,",
    "/plan?epochs=3&points=9": "does not know the parameter “points”",
    "/plan?epochs=3&epochs=9": "“epochs” is in the address 2 times.",
    "/datasets/patients/quote?step=2": "Did you mean “steps”?",
    "/datasets/patients/quote?sample_rate=.1&batch_size=9": "“sample_rate” cannot be used for",
    "/datasets/patients/quote?sampling=shuffle": "Did you mean shuffled?",
}


def test_an_address_that_cannot_be_used_has_no_answer(admin: Person, run: str) -> None:
    for path, said in UNUSABLE.items():
        text = admin.get(path)
        place = text.split('<h2 id="result">')[1].split("</section>")[0]
        assert place.startswith("No "), path
        assert said in place, (path, place)
        assert "ε ≤" not in text, path
        assert 'class="figure"' not in text, path


def test_half_of_a_pair_of_sizes_is_an_error_at_the_other(visitor: Person) -> None:
    assert problem(visitor.get("/?dataset_size=900"), "batch_size") == "Batch size is required."
    assert problem(visitor.get("/?batch_size=9&steps=2"), "dataset_size") == "Records is required."
    said = re.search(r"The address does not say ([^:]*):", visitor.get("/?epochs=2"))
    assert said
    assert {"dataset_size", "batch_size"} < set(said[1].split(", "))


def test_no_number_is_offered_where_the_other_runs_alone_miss_the_target(visitor: Person) -> None:
    run = "noise_multiplier{0}=1.1&sample_rate{0}={1}&steps{0}=100"
    query = "&".join([run.format("", 0.01), run.format("-2", 0.05), "kind-2=dp_sgd"])
    text = unescape(visitor.get(f"/?{query}&delta=1e-5&epsilon=2"))
    assert text.count("the earlier releases alone cost more than ε = 2 at δ = 1e-5") == 2
    assert "the target cannot be met with any number of steps" in text
    assert not re.search("Use this (number|noise)", text)


def test_the_quote_of_a_batch_size_is_of_the_dataset_s_records(admin: Person) -> None:
    sizes = "batch_size=100&epochs=2&noise_multiplier=9"
    text = admin.get(f"/datasets/patients/quote?{sizes}")
    assert value(text, "dataset_size") == "60000"
    assert "No quote" not in text
    assert "ignores it" not in text


def test_a_form_that_is_sent_as_a_whole_is_read_by_its_choices() -> None:
    """A browser without scripts sends the fields that it hides, too."""
    texts = dict(run_form.read_run({}).texts)
    for batches, length in (("rate", "steps"), ("sizes", "epochs"), ("sizes", "steps")):
        found = run_form.read_run(texts | {"batches": batches, "length": length})
        assert found.faults == ()
        assert (length in found.mechanism, "sample_rate" in found.mechanism) == (
            True,
            batches == "rate",
        )


def test_today_s_choice_of_the_planner_s_example_is_nobody_s() -> None:
    assert plan_form.read_form({}).body["batch_size"] == 256
    assert "batch_size" not in plan_form.read_form({"dataset_size": "100"}).body


@pytest.mark.slow
def test_what_a_page_ignores_is_told(admin: Person, run: str) -> None:
    for path, note in (
        ("/datasets?page=2", "does not know the parameter “page” and ignores it."),
        ("/datasets/patients?befor=2", "Did you mean “before”?"),
        ("/import?x=1", "does not know the parameter “x”"),
        ("/keys?" + "&".join(f"a{n}=1" for n in range(9)), "It ignores 4 more parameters."),
    ):
        assert note in admin.get(path), path
    patients = "/datasets/patients?"
    for path in ("/", "/plan", patients + "before=5&runs=0", "/?add=json", "/sign-in?next=/keys"):
        assert "ignores it" not in admin.get(path), path
    assert "ignores it" not in admin.get("/datasets/missing?before=5", 404), "a failure"
    for query in ("before=x", "before=-1", "runs=99999999", "before=0", "runs=²"):
        admin.get(patients + query)


# --- details and documentation


def test_what_an_attacker_can_learn_is_marked_as_an_estimate(visitor: Person) -> None:
    """Shuffled batches are no Poisson samples, and have no neighbour with one record more."""
    marked = '<span class="verdict estimate">estimate</span> A hypothesis fails'
    attacker = '<h2 id="attacker">'
    assert (
        marked in visitor.get("/?batches=sizes&length=epochs&sampling=shuffled").split(attacker)[1]
    )
    assert marked not in visitor.get("/").split(attacker)[1]


def test_help_has_every_kind_of_mechanism(visitor: Person) -> None:
    text = visitor.get("/help")
    for kind, example in kind_form.EXAMPLES.items():
        assert f"<code>{kind}</code>" in text
        shown = number_format.shorten_exponents(json.dumps(example, ensure_ascii=False))
        assert unescape(text).count(shown) >= 1


def test_the_answer_has_four_digits_rounded_up_and_the_rest_is_folded(visitor: Person) -> None:
    text = visitor.get("/")
    headline = re.search(r'<h2 id="result">.*?ε ≤ ([\d.]+)<', text)
    assert headline
    assert headline[1] == number_format.round_up(upper(text), 4)
    assert float(headline[1]) >= upper(text)
    body = {"mechanism": RUN | {"steps": 1000}, "points": 37}
    attack = visitor.http.post("/v1/trade-off", json=body).json()["attack_success"]["upper"]
    assert f"<b>{number_format.round_up(attack, 4)}</b>" in text
    folded = re.search(r"<details>(.*?)</details>", text, re.DOTALL)
    assert folded
    assert "≤ ε ≤" in folded[1]
    loose = re.findall(r"<td class=\"amount\">([\d.]+)</td>", text.split("5 more: bounds")[1])
    assert loose
    assert all(float(each) > 2 * upper(text) for each in loose)


def test_a_reason_that_all_methods_share_is_told_once(visitor: Person) -> None:
    text = visitor.get("/?batches=sizes&length=epochs&sampling=shuffled")
    assert "No proved interval" in text
    assert len(re.findall("ighbouring datasets have the same number of records", text)) == 1
    assert text.count("the hypothesis above fails") > 3
    assert "(estimate)" in text


# --- quotes


@pytest.mark.slow
def test_a_quote_tells_what_fits(admin: Person, run: str) -> None:
    path = "/datasets/patients/quote?noise_multiplier=1.1&sample_rate=0.01&steps={}"
    text = admin.get(path.format(5000))
    assert "It does not fit" in text
    steps = re.search(r"T = ([\d\u202f]+)</span>", text)
    noise = re.search(r"noise_multiplier=([\d.]+)[^\"]*\">Use this noise", text)
    assert steps
    assert noise
    most = int(steps[1].replace("\u202f", ""))
    assert "It fits" in admin.get(path.format(most))
    assert "It does not fit" in admin.get(path.format(most + 1))
    enough = path.format(5000).replace("noise_multiplier=1.1", f"noise_multiplier={noise[1]}")
    assert "It fits" in admin.get(enough)
    entries = admin.get("/datasets/patients")
    assert admin.get("/datasets/patients") == entries, "a quote charges nothing"


def test_amounts_of_a_quote_are_rounded_up() -> None:
    template = rendering._TEMPLATES.get_template("quote.html")
    answer = {
        "fits": True,
        "affordable": {"steps": 7, "noise_multiplier": 1.3000001},
        "affordable_alone": None,
        "share_of_budget": 0.298001,
        "epsilon_after": 1.00001,
        "guarantee": None,
    }
    text = template.render(faults=(), filled=(),
        path="/", session=None, notes=[], run=run_form.read_run({}), answer=answer,
        dataset={"name": "d", "budget": {"epsilon": 3.0}}, may_choose=False, documentation=None,
        with_values=lambda **_: "",
    )  # fmt: skip
    assert "takes 29.9 % of the budget" in text
    assert "ε ≤ 1.001 of 3" in text
    assert "σ = 1.30001" in text


def test_a_quote_of_another_number_of_records_is_refused(admin: Person, run: str) -> None:
    text = admin.get("/datasets/patients/quote?batches=sizes&dataset_size=7&batch_size=2&steps=3")
    assert "No quote" in text
    assert "60000" in text, "the dataset has another number of records"


@pytest.mark.slow
def test_the_page_of_a_dataset_leads_to_a_quote_of_the_last_run(admin: Person, run: str) -> None:
    link = re.search(r'href="(/datasets/patients/quote\?[^"]*)"', admin.get("/datasets/patients"))
    assert link
    text = admin.get(unescape(link[1]))
    assert (value(text, "noise_multiplier"), value(text, "steps")) == ("1.1", "100")


# --- warnings


def test_what_is_left_is_told_in_runs_rounded_down() -> None:
    """The part of a dataset's page after a last run of 100 steps."""

    def render(steps: int, is_exact: bool = True) -> str:
        return unescape(
            # private: the real ledger would need a budget for each of these numbers of steps
            rendering._TEMPLATES.get_template("steps_left.html").render(
                left=StepsLeft("r", mechanisms.from_json(RUN), steps, is_exact, 1),
                left_step="DP-SGD",
                run_steps=100,
                runs_left=steps // 100,
                is_complete=True,
            )
        )

    for steps, sentence, is_warning in (
        (25_700, "<strong>257 more runs</strong> like the last one fit, of 100 steps each", False),
        (399, "<strong>3 more runs</strong> like the last one fit, of 100 steps each: 399", False),
        (299, "<strong>Only 2 more runs</strong> like the last one fit, of 100 steps each", True),
        (100, "<strong>Only 1 more run</strong> like the last one fits, of 100 steps: 100", True),
        (99, "Not one more run of 100 steps fits: the next one must be shorter", True),
        (0, "Not one more step like the last run’s fits.", True),
    ):
        text = render(steps)
        assert sentence in text
        assert ("warning" in text) == is_warning
        assert ("alarm" in text) == (steps < 100)
    text = render(99, is_exact=False)
    assert "At least 99 more steps" in text
    assert "warning" not in text, "the count may be too small"


def test_the_page_of_a_dataset_counts_runs(admin: Person, run: str) -> None:
    text = admin.get("/datasets/patients")
    steps = re.search(r"(\d+) more steps", text)
    assert steps
    runs = int(steps[1]) // 100
    assert (f"Only {runs} more" in text) == (0 < runs < 3)
    assert (f"<strong>{runs} more runs" in text) == (runs >= 3)


# --- new datasets


@pytest.mark.slow
def test_an_owner_creates_a_dataset_on_a_page_of_its_own(
    visitor: Person, keys: dict[str, str]
) -> None:
    visitor.sign_in(keys["owner"])
    text = visitor.get("/new-dataset")
    assert "None of what you enter here can be changed later." in text
    fields = {"name": "planned-here", "size": "60000", "epsilon": "2", "delta": "1e-6", "once": "p"}
    fields |= {"neighbouring_relation": "replace_one", "privacy_unit": "person"}
    fields |= {"planned": "planned", "noise_multiplier": "1.5", "sample_rate": "0.02", "steps": "9"}
    text = visitor.send("/datasets", **fields)
    assert "<h1>planned-here</h1>" in text
    assert "neighbouring relation: replace one" in text
    assert "Counted in reference steps: DP-SGD, q = 0.02, σ = 1.5" in text
    other = {"name": "not-planned", "planned": "first", "filter": "renyi", "once": "q"}
    text = visitor.send("/datasets", **(fields | other))
    assert "Counted in reference steps" not in text
    assert "Rényi" in text


def test_a_wrong_planned_run_keeps_what_was_typed(admin: Person) -> None:
    typed = {"name": "wrong-plan", "size": "60000", "epsilon": "2", "delta": "1e-6", "once": "w"}
    typed |= {"planned": "planned", "steps": "many"}
    text = admin.send("/datasets", 422, **typed)
    assert problem(text, "steps").startswith("Steps must be a whole number")
    assert value(text, "steps") == "many"
    written = {"kind": "json", "mechanism": '{"kind": "laplace"}'}
    text = admin.send("/datasets", 422, **(typed | written))
    assert problem(text, "mechanism") == "/noise_multiplier is required."
    sizes = {"batches": "sizes", "dataset_size": "70000", "batch_size": "70", "steps": "5"}
    text = admin.send("/datasets", 422, **(typed | sizes))
    assert "70000" in problem(text, "sampling")
    assert "wrong-plan" not in admin.get("/datasets")


def test_the_page_says_what_a_budget_allows_before_it_is_created(admin: Person) -> None:
    assert "What this allows" not in admin.get("/new-dataset")
    assert "What this allows" not in admin.get("/new-dataset?size=100&epsilon=many&delta=.5")
    text = admin.get("/new-dataset?size=10000&epsilon=1&delta=1e-5")
    assert value(text, "epsilon") == "1"
    assert "finds at most <strong>28 of 1000</strong>" in text
    assert "on average at most <strong>0.1</strong>" in text
    assert "accept_weak" not in text


def test_a_weak_budget_is_created_only_with_a_checked_box(admin: Person) -> None:
    typed = {"name": "weak-here", "size": "100", "epsilon": "200", "delta": ".5", "once": "k"}
    text = admin.send("/datasets", 422, **typed)
    assert problem(text, "epsilon").startswith("ε = 200 is above 20")
    assert problem(text, "delta").startswith("δ = 0.5 is not below 1/100")
    assert 'name="accept_weak"' in text
    assert "finds at most <strong>1000 of 1000</strong>" in text
    assert "weak-here" not in admin.get("/datasets")
    text = admin.send("/datasets", 422, **(typed | {"name": "a/b", "accept_weak": "yes"}))
    assert 'name="accept_weak" value="yes" checked' in text
    assert not problem(text, "epsilon"), "it was accepted"
    assert "<h1>weak-here</h1>" in admin.send("/datasets", **typed, accept_weak="yes")


# --- safe keys


def test_the_safe_choices_of_a_key_are_made_at_first(admin: Person, app: Any) -> None:
    text = admin.get("/keys")
    assert 'name="reach" value="listed" checked' in text
    assert value(text, "days") == "90"
    assert re.findall(r'name="scopes" value="(\w+)" checked', text) == ["run"]
    as_shown = {"name": "unchanged", "scopes": "run", "reach": "listed", "days": "90"}
    text = admin.send("/keys", 422, **as_shown)
    assert problem(text, "datasets") == (
        "Choose or name at least one dataset, or choose all datasets."
    )
    assert "unchanged" not in [key.name for key in app.state.keys.list_keys()]
    assert 'name="datasets" value="patients">' in text, "it is in the list"
    text = admin.send("/keys", 201, **(as_shown | {"datasets": ["patients", "other"]}))
    assert "There is no dataset &#39;other&#39;" in text
    assert "There is no dataset &#39;patients&#39;" not in text
    admin.send("/keys", 201, **(as_shown | {"name": "wide", "reach": "all", "datasets": "x"}))
    made = {key.name: key for key in app.state.keys.list_keys()}
    assert made["unchanged"].datasets == ("patients", "other")
    assert made["wide"].datasets is None
    assert made["unchanged"].expires_at is not None
    days = (made["unchanged"].expires_at - sessions.now()) / 86_400e6
    assert days == pytest.approx(90, abs=0.1)


def test_revoking_asks_first_and_tells_the_consequences(admin: Person, app: Any) -> None:
    _, record = app.state.keys.create([Scope.RUN], "asked-about", team="vision")
    path = f"/keys/{record.identifier}/revoke"
    assert f'href="{path}"' in admin.get("/keys")
    text = admin.get(path)
    assert "Revoke asked-about?" in text
    assert "It cannot be undone" in text
    assert "another key of the team vision" in text
    assert "You are signed in with this key" not in text
    found = {key.identifier: key for key in app.state.keys.list_keys()}
    assert found[record.identifier].revoked_at is None, "asking revokes nothing"
    app.state.keys.revoke(record.identifier, by="test")
    admin.get(path, 404)
    admin.get("/keys/unknown/revoke", 404)


def test_revoking_the_own_and_the_last_administrators_key_is_warned_about(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/a.db"))
    with TestClient(app) as http:
        person = Person(http)
        token, own = app.state.keys.create([Scope.ADMIN], "own")
        app.state.keys.create([Scope.ADMIN], "bound to datasets", ("other",))
        person.sign_in(token)
        text = person.get(f"/keys/{own.identifier}/revoke")
        assert "You are signed in with this key" in text
        assert "This is the last key of scope admin." in text
        _, second = app.state.keys.create([Scope.ADMIN], "second")
        for each in (own, second):
            assert "the last key" not in person.get(f"/keys/{each.identifier}/revoke")


# --- documents of other tools


def test_an_import_shows_cost_claims_and_findings(visitor: Person) -> None:
    text = visitor.get("/import")
    assert "An Opacus accountant&#39;s history" in text
    assert "The claimed ε is larger than needed" in text
    link = re.search(r'href="(/\?[^"]*)">Open in the calculator', text)
    assert link
    assert upper(visitor.get(unescape(link[1]))) == upper(text)
    assert f"ε ≤ {number_format.round_up(upper(text), 4)}</span>" in text
    run = "{'sample_rate': 0.01, 'noise_multiplier': 1.1, 'steps': 1000"
    document = f"{run}, 'sampling': 'poisson'}}"
    claim = {"document": document, "epsilon": "1", "delta": "1e-5", "dataset_size": ""}
    text = visitor.send("/import", **claim)
    assert "The claimed ε is below a proved lower bound" in text
    assert '<span class="verdict refuted">' in text
    assert "The claimed ε = 1 at δ = 1e-5 is too small: the true ε is at least 1.515." in text
    assert "CPU draws the noise, it ends at 5.768 σ, and δ ≥ 1.5" in text
    unread = visitor.send("/import", **claim | {"document": f"{document[:-1]}, 'nosie': 3}}"})
    assert re.search(r'class="figure">ε =', unread)
    assert "/nosie" in unread


def test_an_imported_event_of_several_kinds_opens_in_the_calculator(visitor: Person) -> None:
    event = (
        "ComposedDpEvent([SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1)),"
        " 500), LaplaceDpEvent(20.0)])"
    )
    text = visitor.send("/import", document=event, delta="1e-6", dataset_size="")
    link = re.search(r'href="(/\?kind=json[^"]*)">Open in the calculator', text)
    assert link
    opened = visitor.get(unescape(link[1]))
    assert upper(opened) == upper(text)
    assert value(opened, "delta") == "1e-06"


def test_a_wrong_import_keeps_what_was_typed(visitor: Person) -> None:
    for fields, name, sentence in (
        ({"document": ""}, "document", "Paste a document."),
        ({"batch_size": "x"}, "batch_size", "Batch size must be a whole number."),
    ):
        typed = {"document": import_page.EXAMPLE, "delta": "1e-5"} | fields
        text = visitor.send("/import", **typed)
        assert problem(text, name).startswith(sentence)
        assert value(text, "delta") == "1e-5"
        assert "No answer yet" in text


def test_a_large_document_is_answered(visitor: Person) -> None:
    steps = ", ".join(f"[1.1, 0.01, {n % 7 + 1}]" for n in range(2000))
    text = visitor.send("/import", document=f'{{"history": [{steps}], "mechanism": "rdp"}}')
    assert "Open in the calculator" not in text, "the mechanism is too long for an address"
    assert "≤ ε ≤" in text or "No answer" in text


def test_a_closed_dataset_says_so_and_offers_no_quote(
    admin: Person, app: Any, keys: dict[str, str]
) -> None:
    post = writer(app, keys["admin"])
    budget = {"epsilon": 1, "delta": 1e-5}
    post("/v1/datasets", {"name": "survey", "size": 60_000, "budget": budget})
    assert "Quote a run" in admin.get("/datasets/survey")
    post("/v1/datasets/survey/close", {})
    text = admin.get("/datasets/survey")
    assert "<strong>Closed</strong> since" in text
    assert "Quote a run" not in text
    assert " fit" not in text
    assert '<span class="state">closed</span>' in admin.get("/datasets")
    quote = admin.get("/datasets/survey/quote?noise_multiplier=9&sample_rate=0.01&steps=1")
    assert "No quote" in quote
    assert "closed" in quote


def test_an_owner_chooses_the_reference_and_is_told_what_fits_then(
    admin: Person, app: Any, keys: dict[str, str]
) -> None:
    post = writer(app, keys["admin"])
    budget = {"epsilon": 3.0, "delta": 1e-5}
    post("/v1/datasets", {"name": "chosen", "size": 60_000, "budget": budget})
    query = urlencode({"sample_rate": "0.01", "noise_multiplier": "1.1", "steps": "50"})
    here = "/datasets/chosen/reference"
    assert f'href="{here}"' in admin.get("/datasets/chosen")
    assert "Choose it as the reference …" in admin.get(f"/datasets/chosen/quote?{query}")
    page = admin.get(f"{here}?{query}")
    assert "counted in steps of DP-SGD, q = 0.01, σ = 1.1, Poisson sampling" in page
    rows = re.findall(
        r"<tr><th scope=\"row\">(.*?)</th>.*?>([^<]+)</td>.*?>([^<]+)</td></tr>", page
    )
    assert len(rows) == 4
    assert rows[0][1] == rows[0][2] == rendering._TEMPLATES.filters["count"](3712)  # type: ignore[operator]
    assert "Noise multiplier" in admin.get(f"{here}?sample_rate=2"), "the quote page tells mistakes"
    other = Person(TestClient(app))
    other.sign_in(keys["run"])
    assert "reference …" not in other.get("/datasets/chosen")
    assert "does not allow this" in other.get(f"{here}?{query}", 403)
    chosen = admin.send(here, mechanism=value(page, "mechanism"), once="choose")
    assert "<td>reference</td>" in chosen
    assert f'href="{here}' in chosen, "no step is taken"
    post("/v1/datasets/chosen/reservations", {"mechanism": RUN})
    assert f'href="{here}' not in admin.get("/datasets/chosen")
    refused = admin.send(here, mechanism=json.dumps(RUN | {"noise_multiplier": 2}), once="late")
    assert "It cannot be the reference" in refused
    assert "steps of another reference are spent or held" in refused.lower()
    assert "must be" in admin.send(here, mechanism="{}", once="wrong")
