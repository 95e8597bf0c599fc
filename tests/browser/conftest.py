"""A service of its own, people who use it, and a Chromium that looks at it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import pytest
from fastapi.routing import APIRoute

from accountant_service.ledger.api_keys import Scope
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from accountant_service.web import routing
from accountant_service.web.sessions import COOKIE
from tests.support.databases import free_port
from tests.support.programs import awake

ROOT = Path(__file__).parents[2]
HTML_NAME = "<b>bold</b><script>alert(1)</script>"
RUN = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1200}
AXE = (Path(__file__).parent / "vendor/axe-4.14.1.min.js").read_text()
SHOTS = ROOT / "build/screenshots"
WIDTHS = (390, 1280)
NARROW = 360  # no page scrolls sideways even at this width
SEVERAL_RUNS = {
    "noise_multiplier": "1.1",
    "noise_multiplier-2": "0.9",
    "steps-2": "400",
    "kind-3": "json",
    "mechanism-3": '{"kind": "laplace", "noise_multiplier": 20}',
}
PAGES = {
    "calculator": "/",
    "calculator-problems": "/?sample_rate=&steps=many&noise_multiplier=1e9&delta=2",
    "calculator-shuffled": "/?sampling=shuffled",
    "calculator-rate": "/?sample_rate=0.02&steps=500",
    "calculator-runs": "/?" + urlencode(SEVERAL_RUNS),
    "calculator-kind": "/?kind=fields&release_kind=composed&release_mechanisms_0_kind=rdp"
    "&release_mechanisms_0_orders=2, 1&release_mechanisms_1_kind=private_selection",
    "calculator-note": "/?sigma=2&noise_multiplyer=3&sampling=poison",
    "plan": "/plan?epochs=5&sampling=poisson",
    "plan-problems": "/plan?epochs=&delta=2&batch_size=many",
    "import": "/import",
    "sign-in": "/sign-in",
    "not-found": "/nothing/here",
    "datasets": "/datasets",
    "new-dataset": "/new-dataset",
    "new-dataset-weak": "/new-dataset?size=100&epsilon=200&delta=.5",
    "dataset": "/datasets/patients",
    "dataset-new": "/datasets/survey-2026",
    "series-list": "/series",
    "series": "/series/sales",
    "delete-dataset": "/datasets/survey-2026/delete",
    "choose-reference": "/datasets/survey-2026/reference",
    "close-dataset": "/datasets/survey-2026/close",
    "release-run": "/runs/{open_run}/release",
    "quote": "/datasets/patients/quote?noise_multiplier=1.1&sample_rate=0.01&steps=3000",
    "quote-fits": "/datasets/survey-2026/quote?kind=json",
    "run-open": "/runs/{open_run}",
    "run-ended": "/runs/{ended_run}",
    "report": "/datasets/patients/report",
    "report-run": "/runs/{ended_run}/report",
    "keys": "/keys",
    "revoke-key": "/keys/{key}/revoke",
    "help": "/help",
    "reference": "/docs",
}


@dataclass(frozen=True)
class Sent:
    """A page after a form of it was sent.

    Attributes:
        path: of the page with the form. Each time {spare} is a new dataset with one open run,
            {spare_run}, {unused} one without, and {spare_key} a new key.
        button: its name.
        fields: what is written into it, by label.
        checks: the labels of boxes that are checked.
        opens: the text of what hides the form, if anything does.
        status: of the answer.
    """

    path: str
    button: str
    fields: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    opens: str = ""
    status: int = 303


_DOCUMENT = """{"history": [[0.5, 0.01, 10]], "mechanism": "gdp"}"""
SENT = {
    "sent-sign-in-refused": Sent("/sign-in", "Sign in", {"API key": "pa_no_key"}, status=422),
    "sent-import": Sent(
        "/import", "Check", {"Document": _DOCUMENT, "Claimed ε": "0.1"}, status=200
    ),
    "sent-import-refused": Sent(
        "/import", "Check", {"Document": "{", "Claimed ε": "much"}, status=200
    ),
    "sent-key": Sent("/keys", "Create key", {"Name": "for the night"}, ("patients",), status=201),
    "sent-key-refused": Sent("/keys", "Create key", {"Days until it expires": "soon"}, status=422),
    "sent-dataset": Sent(
        "/new-dataset",
        "Create dataset",
        {"Name": "{spare}-2", "Records": "60000", "ε": "3", "δ": "1e-5"},
    ),
    "sent-dataset-refused": Sent(
        "/new-dataset",
        "Create dataset",
        {"Name": "two words", "Records": "many", "ε": "300", "δ": "1e-5"},
        status=422,
    ),
    "sent-cap": Sent(
        "/datasets/{spare}",
        "Set cap",
        {"Key or team": "vision", "Percent of the budget": "40"},
        ("a team",),
        "Set a cap",
    ),
    "sent-cap-refused": Sent(
        "/datasets/{spare}", "Set cap", {"Percent of the budget": "half"}, (), "Set a cap", 422
    ),
    "sent-reference": Sent("/datasets/{unused}/reference", "Choose this reference"),
    "sent-close": Sent("/datasets/{spare}/close", "Close the dataset"),
    "sent-release": Sent("/runs/{spare_run}/release", "Release the run"),
    "sent-revoke": Sent("/keys/{spare_key}/revoke", "Revoke the key"),
    "sent-delete-refused": Sent("/datasets/{spare}/delete", "Delete the dataset", status=409),
}
EXPECTED = {"not-found": 404, "session-ended": 401}
# one of each page; the others are its other states
ONE_OF_EACH = {
    name: path
    for name, path in PAGES.items()
    if not name.startswith(("calculator-", "plan-", "dataset-", "quote-"))
}
# htmx reports these when a newer question replaces the one under way, or another page is opened
REPLACED = ("htmx:afterRequest,", "htmx:sendAbort,")


def list_page_routes(method: str) -> set[str]:
    """Return the patterns of the addresses at which pages are asked for, or forms sent."""
    routes = [each for page in routing.PAGES for each in page.router.routes]
    return {
        re.sub("{[^}]*:path}", ".*", re.sub("{[^}:]*}", "[^/]+", each.path))
        for each in routes
        if isinstance(each, APIRoute) and method in each.methods
    }


@dataclass(frozen=True)
class Site:
    """The service with a dataset in use."""

    url: str
    keys: dict[str, str]
    open_run: str
    ended_run: str

    def post(self, path: str, body: Any) -> dict[str, Any]:
        return self.send("POST", path, body)

    def send(self, method: str, path: str, body: Any) -> dict[str, Any]:
        headers = {
            "Authorization": f"Bearer {self.keys['admin']}",
            "Idempotency-Key": uuid.uuid4().hex,
        }
        answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=30)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def places(self) -> dict[str, str]:
        """Return what stands for the names in the addresses of pages."""
        key = self.keys["run"].split("_")[1]
        return {"open_run": self.open_run, "ended_run": self.ended_run, "key": key}

    def add_spare(self) -> dict[str, str]:
        """Create a dataset with a run that is open; return the names of both."""
        name = f"spare-{uuid.uuid4().hex[:6]}"
        budget = {"epsilon": 3.0, "delta": 1e-5}
        self.post("/v1/datasets", {"name": name, "size": 60_000, "budget": budget})
        self.post("/v1/datasets", {"name": f"{name}-unused", "size": 60_000, "budget": budget})
        run = self.post(f"/v1/datasets/{name}/reservations", {"mechanism": RUN})["id"]
        self.post(f"/v1/reservations/{run}/grants", {"steps": 60, "sequence": 0})
        key = self.post("/v1/keys", {"scopes": ["run"], "name": name})["id"]
        return {"spare": name, "unused": f"{name}-unused", "spare_run": run, "spare_key": key}


def _keys(url: str) -> dict[str, str]:
    app = create_app(Settings(database_url=url))
    scopes = {"admin": Scope.ADMIN, "run": Scope.RUN}
    made = {who: app.state.keys.create([scope], who)[0] for who, scope in scopes.items()}
    app.state.keys.create([Scope.COMPUTE], HTML_NAME)
    app.state.repository.close()
    return made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    database = f"sqlite:///{tmp_path_factory.mktemp('site')}/ledger.db"
    port = free_port()
    keys = _keys(database)
    server = subprocess.Popen(
        [Path(sys.executable).parent / "accountant", "serve", "--port", str(port)],
        env=os.environ | {"ACCOUNTANT_DATABASE_URL": database},
        cwd=ROOT,
    )
    try:
        url = awake(f"http://127.0.0.1:{port}")
        yield _furnished(Site(url, keys, "", ""))
    finally:
        server.terminate()
        server.wait(10)


def _furnished(bare: Site) -> Site:
    """A dataset nearly used up, one untouched, a series; a run that has ended and one under way."""
    for name, epsilon in (("patients", 3.0), ("survey-2026", 8.0)):
        budget = {"epsilon": epsilon, "delta": 1e-5}
        bare.post("/v1/datasets", {"name": name, "size": 60_000, "budget": budget})
    runs = []
    for purpose in ("a first model, to see what is possible", HTML_NAME):
        path = "/v1/datasets/patients/reservations"
        run = bare.post(path, {"mechanism": RUN, "purpose": purpose})["id"]
        for block in range(10):
            body = {"steps": 60, "sequence": 60 * block}
            bare.post(f"/v1/reservations/{run}/grants", body)
        runs.append(run)
    bare.post(f"/v1/reservations/{runs[0]}/commit", {})
    bare.send("PUT", "/v1/series/sales", {"budget": {"epsilon": 1.0, "delta": 1e-9}})
    bare.send("PUT", "/v1/series/sales/caps/teams/reports", {"share": 0.2})
    for month in ("2026-09", "2026-10"):
        bare.send("PUT", f"/v1/series/sales/datasets/{month}", {"size": 1000})
    return Site(bare.url, bare.keys, runs[1], runs[0])


@pytest.fixture(scope="module")  # not longer: its event loop would be in the way of other tests
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium; Debian has it: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page whose every complaint is kept."""

    def __init__(self, page: Any, site: Site) -> None:
        self.page, self.site = page, site
        self.complaints: list[str] = []
        self.responses: list[Any] = []
        self.sent_to: list[str] = []  # the paths of forms
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("response", lambda answer: self.responses.append(answer))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(REPLACED):
            self.complaints.append(message.text)

    def go(self, path: str) -> Any:
        return self.page.goto(self.site.url + path)

    def sign_in(self, who: str) -> None:
        self.go("/sign-in")
        self.page.get_by_label("API key").fill(self.site.keys[who])
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url("**/datasets")

    def findings(self) -> list[str]:
        """Findings of axe-core, of any impact; only colours differ between the themes."""
        self.page.evaluate(AXE)
        found = []
        for theme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            self.page.emulate_media(color_scheme=theme)
            found += [
                f"{theme}: {each['id']}: {node['html']}"
                for each in self.page.evaluate("rules => axe.run(rules)", rules)["violations"]
                for node in each["nodes"]
            ]
        return found

    def find_faults(
        self, pages: Mapping[str, str], themes: Sequence[str] = ("light", "dark")
    ) -> dict[str, list[str]]:
        """Open pages as an administrator and photograph them; return what is wrong with each.

        Args:
            pages: their paths by name.
            themes: of the photographs.
        """
        self.sign_in("admin")
        SHOTS.mkdir(parents=True, exist_ok=True)
        places = self.site.places()
        found = {}
        for name, path in {**pages, "session-ended": "/datasets"}.items():
            if name == "session-ended":
                cookie = {"name": COOKIE, "value": "ended", "url": self.site.url}
                self.page.context.add_cookies([cookie])
            status = EXPECTED.get(name, 200)
            self.complaints.clear()
            assert self.go(path.format(**places)).status == status
            found[name] = self._look_at(name, status, themes)
        return {name: each for name, each in found.items() if each}

    def find_faults_after_sending(
        self, forms: Mapping[str, Sent], themes: Sequence[str] = ("light", "dark")
    ) -> dict[str, list[str]]:
        """Send forms as an administrator and photograph the answers; return what is wrong."""
        self.sign_in("admin")
        SHOTS.mkdir(parents=True, exist_ok=True)
        found = {}
        for name, form in forms.items():
            places = self.site.add_spare()
            self.go(form.path.format(**places))
            self.complaints.clear()
            if form.opens:
                self.page.get_by_text(form.opens, exact=True).click()
            for label, text in form.fields.items():
                self.page.get_by_label(label, exact=True).fill(
                    text.replace("{spare}", places["spare"])
                )
            for label in form.checks:
                self.page.get_by_label(label, exact=True).check()
            with self.page.expect_response(lambda answer: answer.request.method == "POST") as sent:
                self.page.get_by_role("button", name=form.button, exact=True).press("Enter")
            self.page.wait_for_load_state("networkidle")
            status = sent.value.status
            wrong = [] if status == form.status else [f"status {status}"]
            self.sent_to.append(urlsplit(sent.value.url).path)
            found[name] = wrong + self._look_at(name, form.status, themes)
        return {name: each for name, each in found.items() if each}

    def _look_at(self, name: str, status: int, themes: Sequence[str]) -> list[str]:
        """Photograph the open page, and return what is wrong with it."""
        width = self.page.viewport_size["width"]
        for theme in themes:
            self.page.emulate_media(color_scheme=theme)
            shot = SHOTS / f"{name}-{width}-{theme}.png"
            self.page.screenshot(path=shot, full_page=True)
        complaints = [each for each in self.complaints if f"status of {status}" not in each]
        wide = ["scrolls sideways"] if self.scrolls_sideways(width) else []
        return self.findings() + complaints + wide

    def scrolls_sideways(self, width: int) -> bool:
        """Return whether the page is wider than the screen; a phone is tried narrower as well."""
        if width < NARROW * 2:
            self.page.set_viewport_size({"width": NARROW, "height": 900})
        self.page.evaluate("() => new Promise(requestAnimationFrame)")  # plots are drawn anew
        wide: bool = self.page.evaluate(
            "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )
        self.page.set_viewport_size({"width": width, "height": 900})
        return wide


@pytest.fixture
def open_page(chromium: Any, site: Site) -> Iterator[Any]:
    contexts = []

    def opened(width: int = 1280, theme: str = "light", **options: Any) -> Watched:
        viewport = {"width": width, "height": 900}
        context = chromium.new_context(viewport=viewport, color_scheme=theme, **options)
        context.set_default_timeout(60_000)  # a busy machine is no fault
        contexts.append(context)
        return Watched(context.new_page(), site)

    yield opened
    for context in contexts:
        context.close()


DRAWN = """
window.drawn = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  window.drawn.push(String(text));
  return draw.call(this, text, ...rest);
};
"""


TIMES = """async lengths => {
  const figure = document.querySelector('figure.plot[data-x=time]');
  const first = document.getElementById(figure.dataset.from).tBodies[0].rows[0].cells[0];
  const counts = [];
  for (const seconds of lengths) {
    first.dataset.value = Date.now() / 1000 - seconds;
    window.drawn = [];
    draw(figure);
    await new Promise(drawn => setTimeout(drawn, 50));
    counts.push(window.drawn.filter(text => /^\\d\\d:|^\\d{4}-/.test(text)).length);
  }
  return counts;
}"""


def check_plots(watched: Watched, name: str) -> None:
    """Require that plots show their titles and ticks, and that a dataset without runs has none."""
    watched.page.add_init_script(DRAWN)
    watched.sign_in("admin")
    titles = {
        "/": {"step", "ε, upper bound", "false-positive rate", "true-positive rate"},
        "/plan?epochs=5&sampling=poisson": {"batch size", "% of full batches"},
        "/datasets/patients": {"time (UTC)", "ε, upper bound"},
    }
    for path, expected in titles.items():
        watched.go(path)
        drawn = watched.page.evaluate("() => window.drawn")
        assert expected <= set(drawn), path
        ticks = [each for each in drawn if each not in expected]
        assert not {"null", "NaN", "undefined", ""} & set(ticks), path
        times = [each for each in ticks if ":" in each]
        assert len(times) == len(set(times)), "no time stands at two ticks"
        assert (len(times) > 1) == (path == "/datasets/patients")
        if times:
            lengths = [61, 119, 230, 590, 1150, 7000, 30_000, 170_000, 3e6, 6e7]
            assert min(watched.page.evaluate(TIMES, lengths)) > 1, "times at two ticks or more"
        legend = watched.page.locator(".u-legend").first.inner_text()
        assert "–" not in legend
        assert "--" not in legend
    budget = {"epsilon": 1, "delta": 1e-5}
    watched.site.post("/v1/datasets", {"name": name, "size": 60_000, "budget": budget})
    watched.go(f"/datasets/{name}")
    assert watched.page.get_by_text("No run has reserved budget yet").is_visible()
    assert watched.page.locator("canvas").count() == 0
