"""Every page in a real Chromium: no finding, no error, usable by keyboard and on a phone.

All states of the pages, widths and themes are looked at by `test_page_matrix.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from accountant_service.web import documentation_pages
from tests.browser.conftest import (
    HTML_NAME,
    ONE_OF_EACH,
    PAGES,
    RUN,
    WIDTHS,
    Site,
    check_plots,
    list_page_routes,
)

pytestmark = [
    pytest.mark.browser,
    # the driver leaves its pipes to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
# not pages of their own: files, a redirection and parts of pages
NO_PAGES = {
    "/datasets/[^/]+/steps-left",
    "/documentation",
    "/documentation/.*",
    "/runs/[^/]+/certificate",
}
# what can be operated and is not in a closed part; radio buttons of one name are one stop of Tab
LIST_CONTROLS = """() => {
  const all = document.querySelectorAll("a[href], button, input, select, textarea, summary");
  window.controls = [...all]
    .filter((each) => each.checkVisibility({ visibilityProperty: true }) && !each.disabled)
    .filter((each) => each.tabIndex >= 0 && each.type !== "hidden")
    .filter((each) => each.type !== "radio" || each.checked);
  return window.controls.length;
}"""
FOCUSED = "() => window.controls.indexOf(document.activeElement)"


def test_one_of_each_page_is_sound(open_page: Any) -> None:
    assert open_page(WIDTHS[0]).find_faults(ONE_OF_EACH, themes=("light",)) == {}


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
    field = page.get_by_label("Batch size B", exact=True)
    field.fill("many")
    page.get_by_text("Batch size must be a whole number").wait_for()
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
    summary = page.locator("figure summary").first
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
    page.wait_for_function("() => document.querySelector('#said').innerText.startsWith('Batch')")
    summary = page.locator("summary").last
    summary.focus()
    page.keyboard.press("Enter")
    page.get_by_text("recommended", exact=True).last.wait_for()
    page.get_by_role("link", name="Open in the calculator").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/?batches=sizes*")
    assert "≤ ε ≤" in str(page.locator("#proved").text_content())
    assert watched.complaints == []


def test_the_pages_that_are_tried_are_those_of_the_routes() -> None:
    """All tests of pages read `PAGES`: a new page is missing there, and named here."""
    asked = [path.partition("?")[0] for path in PAGES.values()]
    for pattern in list_page_routes("GET") - NO_PAGES:
        assert any(re.fullmatch(pattern, path) for path in asked), pattern


def test_every_control_is_reached_by_keyboard(open_page: Any) -> None:
    """Tab goes through all that can be clicked, in the order of the page, and shows where it is."""
    watched = open_page()
    watched.sign_in("admin")
    for name, path in ONE_OF_EACH.items():
        watched.go(path.format(**watched.site.places()))
        count = watched.page.evaluate(LIST_CONTROLS)
        reached: list[int] = []
        for _ in range(2 * count):  # regions that scroll are stops too
            watched.page.keyboard.press("Tab")
            at = watched.page.evaluate(FOCUSED)
            reached += [at] if at >= 0 else []
            if at == count - 1:
                break
        assert reached == list(range(count)), name


def test_without_javascript_every_page_can_be_read_and_its_forms_sent(open_page: Any) -> None:
    watched = open_page(java_script_enabled=False)
    watched.sign_in("admin")
    for name, path in ONE_OF_EACH.items():
        watched.go(path.format(**watched.site.places()))
        page = watched.page
        assert page.locator("h1").first.is_visible(), name
        for form in page.locator("form").all():
            if form.locator("xpath=ancestor::details").count() == 0:
                buttons = form.locator("button:not([type=button])").all()
                assert any(each.is_visible() for each in buttons), name
        assert not any(each.is_visible() for each in page.locator("[data-copy]").all()), name


def test_without_javascript_the_form_works(open_page: Any) -> None:
    watched = open_page(java_script_enabled=False)
    watched.go("/")
    watched.page.get_by_label("Epochs E", exact=True).fill("7")
    watched.page.get_by_role("button", name="Compute").click()
    watched.page.wait_for_url("**epochs=7**")
    assert "≤ ε ≤" in str(watched.page.locator("#proved").text_content())


def test_the_first_load_is_light(open_page: Any) -> None:
    watched = open_page()
    watched.go("/")
    watched.page.wait_for_load_state("networkidle")  # the icon comes last
    sizes = [len(each.body()) for each in watched.responses]  # as they are without compression
    assert len(sizes) == 7
    assert sum(sizes) < 150_000


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


def test_a_budget_is_explained_while_it_is_typed_and_a_weak_one_needs_a_checked_box(
    open_page: Any,
) -> None:
    watched = open_page()
    page = watched.page
    watched.sign_in("admin")
    watched.go("/new-dataset")
    page.get_by_label("Name", exact=True).fill("typed-weak")
    page.get_by_label("Records", exact=True).fill("100")
    page.get_by_label("ε", exact=True).fill("200")
    page.get_by_label("δ", exact=True).fill(".5")
    page.get_by_text("1000 of 1000").wait_for()
    box = page.get_by_label("I want this budget all the same")
    box.check()
    page.get_by_label("ε", exact=True).fill("300")
    page.get_by_text("ε = 300 is above 20").wait_for()
    assert not box.is_checked(), "the yes was for other numbers"
    with page.expect_navigation():  # the page that is left has the sentence too
        page.get_by_role("button", name="Create dataset").click()
    page.get_by_text("ε = 300 is above 20").wait_for()
    page.get_by_label("ε", exact=True).fill("3")
    page.get_by_text("ε = 300 is above 20").wait_for(state="detached")
    assert page.get_by_label("ε", exact=True).get_attribute("aria-invalid") is None
    page.get_by_label("ε", exact=True).fill("400")
    page.get_by_text("ε = 400 is above 20").wait_for()
    box.check()
    page.get_by_role("button", name="Create dataset").click()
    page.wait_for_url("**/datasets/typed-weak")
    page.get_by_role("link", name="Delete").click()
    page.get_by_role("button", name="Delete the dataset").click()
    page.wait_for_url("**/datasets")
    assert page.get_by_text("typed-weak").count() == 0
    assert [each for each in watched.complaints if "status of 422" not in each] == []


def test_keys_are_made_and_revoked(open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    watched.sign_in("admin")
    watched.go("/keys")
    page.get_by_label("Name", exact=True).fill("for the night")
    page.get_by_role("button", name="Create key").click()
    page.get_by_text("name at least one dataset").wait_for()
    watched.complaints.clear()  # Chromium complains of the status 422
    page.get_by_label("patients", exact=True).check()
    page.get_by_role("button", name="Create key").click()
    assert page.locator("#token").inner_text().startswith("pa_")
    page.get_by_role("link", name="Revoke for the night").click()
    page.get_by_text("It cannot be undone").wait_for()
    page.get_by_role("link", name="Keep the key").click()
    page.get_by_role("link", name="Revoke for the night").click()
    page.get_by_role("button", name="Revoke the key").click()
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


def test_runs_are_added_and_removed_by_keyboard(open_page: Any) -> None:
    watched = open_page(390)
    page = watched.page
    watched.go("/")
    page.get_by_label("Noise multiplier σ", exact=True).fill("3")
    page.get_by_role("button", name="Add a DP-SGD run").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/?*noise_multiplier-2=3*#run-2")
    assert page.locator("#result").inner_text().endswith("for all 2 runs at δ = 1e-5")
    page.get_by_role("button", name="Add a run of another kind").press("Enter")
    page.wait_for_url("**#run-3")
    third = page.locator("#run-3")
    third.get_by_label("JSON", exact=True).check()
    third.get_by_role("textbox", name="Mechanism").fill(
        '{"kind": "laplace", "noise_multiplier": 90}'
    )
    page.locator("#result").get_by_text("for all 3 runs").wait_for()
    assert "epochs-2" in page.url
    assert "mechanism-2" not in page.url, "what is not shown is not in the address"
    page.get_by_role("button", name="Remove run 2").press("Enter")
    page.wait_for_url("**#run-1")
    assert page.get_by_role("button", name="Remove run 3").count() == 0
    assert page.get_by_role("textbox", name="Mechanism").last.input_value().endswith("90}")
    assert watched.complaints == []


def test_another_kind_is_described_by_its_fields(open_page: Any) -> None:
    watched = open_page(390)
    page = watched.page
    watched.go("/")
    page.get_by_label("another kind", exact=True).check()
    page.get_by_text("Choose a kind, and show its fields.").wait_for()
    page.get_by_label("Kind of mechanism", exact=True).select_option("poisson_sampled")
    page.get_by_role("button", name="Show fields").press("Enter")
    page.wait_for_url("**#run-1")
    page.locator("#result").get_by_text("ε ≤ 0.1423").wait_for()
    inner = page.get_by_role("group", name="Mechanism", exact=True).last
    inner.get_by_label("Noise multiplier", exact=True).fill("0")
    inner.get_by_text("Noise multiplier must be a number ≥ 0.01").wait_for()
    inner.get_by_label("Noise multiplier", exact=True).fill("3")
    page.locator("#result").get_by_text("ε ≤ 0.0").wait_for()
    assert "release_mechanism_noise_multiplier=3" in page.url
    assert "_new" not in page.url
    page.reload()
    assert inner.get_by_label("Noise multiplier", exact=True).input_value() == "3"
    assert watched.findings() == []
    assert watched.complaints == []


def test_enter_in_a_field_computes_and_removes_no_run(open_page: Any) -> None:
    watched = open_page(java_script_enabled=False)
    watched.go("/?steps-2=5")
    field = watched.page.get_by_label("Epochs E", exact=True).first
    field.fill("6")
    field.press("Enter")
    watched.page.wait_for_url("**/?*epochs=6*")
    assert watched.page.get_by_role("button", name="Remove run 2").count() == 1


def test_waiting_is_shown_with_its_seconds(open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    watched.go("/")
    held: list[Any] = []
    page.route("**/?*", lambda route: held.append(route))
    working = page.locator(".working")
    assert not working.is_visible()
    page.get_by_label("Epochs E", exact=True).fill("5")
    working.get_by_text("Computing …").wait_for()
    working.get_by_text("1 s").wait_for()
    held[0].continue_()
    working.wait_for(state="hidden")


def test_a_quote_by_keyboard(open_page: Any) -> None:
    watched = open_page(390)
    page = watched.page
    watched.sign_in("run")
    watched.go("/datasets/patients")
    page.get_by_role("link", name="Quote a run").press("Enter")
    page.get_by_role("heading", name="It fits").wait_for()
    page.get_by_label("Steps T", exact=True).fill("90000")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="It does not fit").wait_for()
    page.get_by_role("link", name="Use this number").press("Enter")
    page.get_by_role("heading", name="It fits").wait_for()
    assert watched.complaints == []


def test_a_dataset_is_created_by_keyboard(open_page: Any) -> None:
    watched = open_page(390)
    page = watched.page
    watched.sign_in("admin")
    page.get_by_role("link", name="New dataset").press("Enter")
    page.get_by_label("Name", exact=True).focus()
    for text in ("typed-in", "1000", "person", "1", "1e-4"):
        page.keyboard.type(text)
        page.keyboard.press("Tab")
    page.get_by_role("button", name="Create dataset").press("Enter")
    page.get_by_role("heading", name="typed-in").wait_for()
    assert page.get_by_text("1\u202f000 records; privacy unit: person").is_visible()
    assert watched.complaints == []


def test_a_document_is_checked_by_keyboard(open_page: Any) -> None:
    watched = open_page(390)
    page = watched.page
    watched.go("/import")
    page.locator("#document").fill('{"history": [[0.5, 0.01, 10]], "mechanism": "gdp"}')
    page.get_by_label("Claimed ε").fill("0.1")
    page.get_by_role("button", name="Check").press("Enter")
    page.get_by_role("heading", name="The claimed ε is below a proved lower bound").wait_for()
    page.get_by_role("link", name="Open in the calculator").press("Enter")
    page.wait_for_url("**/?noise_multiplier=0.5*")
    assert watched.complaints == []


def test_a_newer_question_replaces_the_one_under_way(open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    held: list[Any] = []

    def hold_the_first(route: Any) -> None:
        held.append(route)
        if len(held) > 1:
            route.continue_()

    watched.go("/import")
    page.route("**/import", hold_the_first)
    page.locator("#document").fill('{"history": [[0.5, 0.01, 10]], "mechanism": "gdp"}')
    claimed = page.get_by_label("Claimed ε")
    with page.expect_event("requestfailed") as replaced:  # the abort
        with page.expect_request("**/import"):
            claimed.fill("0.1")
        page.get_by_role("button", name="Check").press("Enter")
    assert replaced.value == held[0].request
    page.get_by_role("heading", name="The claimed ε is below a proved lower bound").wait_for()
    assert watched.complaints == []


def test_plots_have_titles_and_ticks_of_their_data(open_page: Any) -> None:
    check_plots(open_page(WIDTHS[0]), "untouched-phone")


def test_tables_are_stacked_or_have_a_cue_on_a_phone(open_page: Any) -> None:
    watched = open_page(390)
    watched.sign_in("admin")
    cut = "table => table.scrollWidth > table.parentElement.clientWidth"
    for path in ("/keys", "/datasets/patients", "/datasets"):
        watched.go(path)
        stacked = watched.page.locator("table.stack").first
        assert not stacked.evaluate(cut)
        label = "cell => getComputedStyle(cell, '::before').content"
        assert stacked.locator("td").first.evaluate(label) in ('"Scopes"', '"Purpose"', '"Left"')
    watched.go("/datasets/patients")
    watched.page.get_by_text("Show the record").click()
    entries = watched.page.get_by_role("region", name="Table of entries")
    assert entries.locator("table").evaluate(cut)
    style = entries.evaluate("region => getComputedStyle(region).backgroundAttachment")
    assert style == "local, local, scroll, scroll", "shadows at the edges"


def test_the_answer_stays_in_sight(open_page: Any) -> None:
    for width in WIDTHS:
        watched = open_page(width)
        page = watched.page
        watched.go("/")
        result = page.locator("#result")
        for place in ("h1", "#sampling", "#snippet-3"):
            page.locator(place).scroll_into_view_if_needed()
            box = result.bounding_box()
            assert box is not None
            assert 0 <= box["y"] < 900 - box["height"], (width, place)


def test_a_budget_is_capped_and_closed_and_a_run_released_by_keyboard(
    open_page: Any, site: Site
) -> None:
    watched = open_page(WIDTHS[0])
    page = watched.page
    budget = {"epsilon": 2, "delta": 1e-5}
    site.post("/v1/datasets", {"name": "to-close", "size": 60_000, "budget": budget})
    run = site.post("/v1/datasets/to-close/reservations", {"mechanism": RUN})["id"]
    watched.sign_in("admin")
    watched.go("/datasets/to-close")
    page.get_by_text("Set a cap", exact=True).press("Enter")
    page.get_by_label("a team", exact=True).check()
    page.get_by_label("Key or team").fill("vision")
    page.get_by_label("Percent of the budget").fill("40")
    page.get_by_role("button", name="Set cap").press("Enter")
    page.get_by_role("row").filter(has_text="team vision").get_by_text("40 %").wait_for()
    page.get_by_role("link", name=run[:8]).press("Enter")
    page.get_by_role("link", name="release the run").press("Enter")
    page.get_by_role("button", name="Release the run").press("Enter")
    page.get_by_text("released", exact=True).wait_for()
    page.get_by_role("link", name="to-close").press("Enter")
    page.get_by_role("link", name="Close …").press("Enter")
    page.get_by_role("button", name="Close the dataset").press("Enter")
    page.get_by_text("it takes no further run").wait_for()
    assert watched.complaints == []


def test_the_documentation_is_sound(open_page: Any) -> None:
    """The first page, a reference and the notebook, whose scripts and styles are their own."""
    watched = open_page()
    if not documentation_pages.list_files(documentation_pages.SITE):
        pytest.skip("the documentation was not built: make site")
    for path in ("", "api.html", "notebook.html"):
        watched.go(f"/documentation/{path}")
        watched.page.wait_for_load_state("networkidle")
    watched.page.get_by_placeholder("Search").first.click()
    watched.page.keyboard.type("budget")
    watched.page.locator(".md-search-result__item").first.wait_for()
    assert watched.complaints == []
