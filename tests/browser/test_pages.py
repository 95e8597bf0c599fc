"""Every page in a real Chromium: no violation, no error, usable by keyboard and at 360 px."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accountant_service.web.sessions import COOKIE
from tests.browser.conftest import HTML_NAME, ROOT, Site

pytestmark = [
    pytest.mark.browser,
    # the driver leaves its pipes to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

AXE = (Path(__file__).parent / "vendor/axe-4.14.1.min.js").read_text()
SHOTS = ROOT / "build/screenshots"
WIDTHS = (360, 1280)
THEMES = ("light", "dark")
KILOBYTES = 150
PAGES = {
    "calculator": "/",
    "calculator-problems": "/?sample_rate=&steps=many&noise_multiplier=1e9&delta=2",
    "calculator-sizes": "/?batches=sizes&length=epochs&sampling=shuffled",
    "plan": "/plan?epochs=5&sampling=poisson",
    "plan-problems": "/plan?epochs=&delta=2&batch_size=many",
    "sign-in": "/sign-in",
    "not-found": "/nothing/here",
    "datasets": "/datasets",
    "dataset": "/datasets/patients",
    "run-open": "/runs/{open_run}",
    "run-ended": "/runs/{ended_run}",
    "keys": "/keys",
    "reference": "/docs",
}
EXPECTED = {"not-found": 404, "session-ended": 401}


class Watched:
    """A page whose every complaint is kept."""

    def __init__(self, page: Any, site: Site) -> None:
        self.page, self.site = page, site
        self.complaints: list[str] = []
        self.responses: list[Any] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("response", lambda answer: self.responses.append(answer))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def go(self, path: str) -> Any:
        return self.page.goto(self.site.url + path)

    def sign_in(self, who: str) -> None:
        self.go("/sign-in")
        self.page.get_by_label("API key").fill(self.site.keys[who])
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url("**/datasets")

    def serious(self) -> list[str]:
        self.page.evaluate(AXE)
        found = self.page.evaluate("axe.run()")["violations"]
        return [
            f"{each['id']}: {node['html']}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]


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


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_sound(open_page: Any, width: int, theme: str) -> None:
    watched = open_page(width, theme)
    watched.sign_in("admin")
    SHOTS.mkdir(parents=True, exist_ok=True)

    def faults(name: str, path: str) -> list[str]:
        watched.complaints.clear()
        status = EXPECTED.get(name, 200)
        assert watched.go(path).status == status
        watched.page.screenshot(path=SHOTS / f"{name}-{width}-{theme}.png", full_page=True)
        complaints = [each for each in watched.complaints if f"status of {status}" not in each]
        wide = watched.page.evaluate("document.documentElement.scrollWidth") > width
        return watched.serious() + complaints + (["scrolls sideways"] if wide else [])

    runs = {"open_run": watched.site.open_run, "ended_run": watched.site.ended_run}
    found = {name: faults(name, template.format(**runs)) for name, template in PAGES.items()}
    watched.page.context.add_cookies([{"name": COOKIE, "value": "ended", "url": watched.site.url}])
    found["session-ended"] = faults("session-ended", "/datasets")
    assert {name: each for name, each in found.items() if each} == {}


def test_typing_updates_the_answer_and_the_address(open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    watched.go("/")
    before = page.locator("#result").inner_text()
    page.get_by_label("Noise multiplier σ", exact=True).fill("2")
    page.wait_for_function(
        "text => document.querySelector('#result').innerText !== text", arg=before
    )
    assert "noise_multiplier=2" in page.url
    shared = page.locator("#result").inner_text()
    assert page.locator("#said").inner_text().strip() == shared.strip()
    watched.go(page.url.removeprefix(watched.site.url))
    assert page.locator("#result").inner_text() == shared
    assert page.locator("figure.plot canvas").count() == 2
    assert watched.complaints == []


def test_a_problem_stands_beside_its_field_and_goes_away(open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    watched.go("/")
    field = page.get_by_label("Steps T", exact=True)
    field.fill("many")
    page.get_by_text("Steps must be a whole number").wait_for()
    assert field.input_value() == "many"
    assert field.get_attribute("aria-invalid") == "true"
    field.fill("500")
    page.get_by_text("ε along the steps").wait_for()
    assert field.get_attribute("aria-invalid") is None
    assert watched.complaints == []


def test_the_calculator_by_keyboard(open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    watched.go("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    slider = page.get_by_label("Noise multiplier, slider")
    slider.focus()
    before = page.locator("#noise_multiplier").input_value()
    page.keyboard.press("ArrowRight")
    assert page.locator("#noise_multiplier").input_value() != before
    page.wait_for_url("**/?*noise_multiplier=*")
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#curve-table").is_visible()


def test_the_planner_by_keyboard(open_page: Any) -> None:
    watched = open_page(390)
    page = watched.page
    watched.go("/plan?epochs=5&sampling=poisson")
    before = page.locator("#result").inner_text()
    assert before.startswith("Batch")
    assert page.locator("figure.plot canvas").count() == 1
    field = page.get_by_label("Budget ε", exact=True)
    field.fill("1")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "text => document.querySelector('#result').innerText !== text", arg=before
    )
    assert "epsilon=1" in page.url
    page.wait_for_function("document.querySelector('#said').innerText.startsWith('Batch')")
    summary = page.locator("summary").last
    summary.focus()
    page.keyboard.press("Enter")
    page.get_by_text("recommended", exact=True).last.wait_for()
    page.get_by_role("link", name="Open in the calculator").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/?batches=rate*")
    assert "≤ ε ≤" in page.locator("#result").inner_text()
    assert watched.complaints == []


def test_without_javascript_the_form_works(open_page: Any) -> None:
    watched = open_page(java_script_enabled=False)
    watched.go("/")
    watched.page.get_by_label("Steps T", exact=True).fill("77")
    watched.page.get_by_role("button", name="Compute").click()
    assert "steps=77" in watched.page.url
    assert "≤ ε ≤" in watched.page.locator("#result").inner_text()


def test_the_first_load_is_light(open_page: Any) -> None:
    watched = open_page()
    watched.go("/")
    watched.page.wait_for_load_state("networkidle")  # the icon comes last
    sizes = [len(each.body()) for each in watched.responses]  # as they are without compression
    assert len(sizes) == 7
    assert sum(sizes) < KILOBYTES * 1000


def test_a_run_shows_its_progress_by_itself(open_page: Any, site: Site) -> None:
    watched = open_page()
    watched.sign_in("run")
    run = site.post(
        "/v1/datasets/survey-2026/reservations",
        {"mechanism": {"kind": "dp_sgd", "noise_multiplier": 2, "sample_rate": 0.01, "steps": 10}},
    )["id"]
    watched.go(f"/runs/{run}")
    site.post(f"/v1/reservations/{run}/grants", {"steps": 4, "sequence": 0})
    watched.page.get_by_text("4 of 10 steps granted").wait_for()
    site.post(f"/v1/reservations/{run}/commit", {})
    link = watched.page.get_by_role("link", name="Download the certificate")
    link.wait_for()
    with watched.page.expect_download() as download:
        link.click()
    assert '"signature"' in Path(download.value.path()).read_text()
    assert watched.complaints == []


def test_markup_in_names_is_text(open_page: Any) -> None:
    watched = open_page()
    watched.sign_in("admin")
    for path in ("/keys", "/datasets/patients", f"/runs/{watched.site.open_run}"):
        watched.go(path)
        assert watched.page.get_by_text(HTML_NAME, exact=True).first.is_visible()
    assert watched.complaints == []


def test_a_script_that_got_into_a_page_would_not_run(open_page: Any) -> None:
    watched = open_page()
    watched.go("/")
    added = (
        "document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))"
    )
    watched.page.evaluate(added)
    assert watched.page.evaluate("typeof ran") == "undefined"
    assert "Content Security Policy" in watched.complaints[0]


def test_a_run_says_so_when_its_watcher_is_signed_out(open_page: Any, site: Site) -> None:
    watched = open_page()
    watched.sign_in("run")
    watched.go(f"/runs/{site.open_run}")
    cookie = {"name": "accountant_session", "value": "over", "url": site.url}
    watched.page.context.add_cookies([cookie])
    watched.page.get_by_role("heading", name="Your session has ended").wait_for()


def test_keys_are_made_and_revoked(open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    watched.sign_in("admin")
    watched.go("/keys")
    page.get_by_label("Name").fill("for the night")
    page.get_by_role("button", name="Create key").click()
    assert page.locator("#token").inner_text().startswith("pa_")
    page.get_by_role("button", name="Revoke for the night").click()
    row = page.get_by_role("row").filter(has_text="for the night")
    row.get_by_text("revoked").wait_for()
    assert watched.complaints == []


def test_an_ended_session_has_a_page(open_page: Any) -> None:
    watched = open_page()
    watched.sign_in("run")
    context = watched.page.context
    cookie = next(c for c in context.cookies() if c["name"] == "accountant_session")
    context.add_cookies([cookie | {"value": cookie["value"][:-1] + "x"}])
    watched.go("/datasets")
    assert watched.page.get_by_role("heading", name="Your session has ended").is_visible()
    watched.page.get_by_role("link", name="Sign in again").click()
    watched.page.get_by_label("API key").wait_for()
