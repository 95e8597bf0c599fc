"""Documentation that cannot fall behind: every code, method and file it must name is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from accountant_service import errors, mechanisms
from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.ledger import errors as ledger_errors
from accountant_service.papers import audit_report
from accountant_service.papers import claims as paper_audit
from accountant_service.questions import problems
from accountant_service.questions.registry import ENDPOINTS
from accountant_service.server import connection_limits
from accountant_service.writing import number_format
from scripts.page_parts import DOCS, read_part
from scripts.service_tables import TABLES
from tests.support.findings import require_none
from training_client.lab.data import DATASETS
from training_client.lab.models import MODELS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_every_error_code_has_its_heading() -> None:
    headings = set(re.findall(r"^## (\S+)$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))
    names = vars(errors) | vars(ledger_errors)
    kinds = [kind for kind in names.values() if isinstance(kind, type)]
    raised = {kind.code for kind in kinds if hasattr(kind, "code")}
    raised -= {errors.AccountingError.code}
    mapped = {code for code, _ in problems._STATUS_CODES.values()}
    early = set(connection_limits.REFUSALS)
    assert headings == raised | mapped | early | {"invalid-request", "internal-error", "http-error"}


def test_every_method_has_a_page() -> None:
    pages = {each: (ROOT / f"docs/accountants/{each}.md").read_text() for each in ACCOUNTANTS}
    require_none(each for each in pages if not pages[each].startswith(f"# {each}: "))


@pytest.mark.parametrize("part", TABLES)
def test_the_tables_of_the_service_are_those_of_its_code(part: str) -> None:
    page, render = TABLES[part]
    assert read_part(DOCS / page, part) == "".join(render()).strip()


def test_every_call_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    require_none(
        each for each in ENDPOINTS if f"`{each}`" not in text and f"POST {each}`" not in text
    )


def test_links_between_pages_lead_somewhere() -> None:
    require_none(
        f"{page.name} links to {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    )


def test_the_readme_question_is_answered() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"-d '\n(.*?)'\n```", text, re.DOTALL)
    assert found
    body = json.loads(found[1])
    assert mechanisms.from_json(body["mechanism"])


def test_figures_of_the_mma_page_are_what_the_service_says() -> None:
    from tests.support.helpers import epsilon, run

    rows = re.findall(
        r"\| ([\d.]+) \| 1 \| 100 \| 1e-5 \| ([\d.]+) \| ([\d.]+) \|",
        (ROOT / "docs/accountants/mma.md").read_text(),
    )
    assert len(rows) == 4
    for q, printed, proved in rows:
        described = run(float(q), 1.0, 100)
        assert epsilon("mma", described, 1e-5).epsilon == pytest.approx(float(printed), abs=5e-5)
        certified = epsilon("pld", described, 1e-5).certified
        assert certified is not None
        assert certified.lower >= float(proved)


def test_the_moments_of_the_mma_page_are_computed() -> None:
    page = (ROOT / "docs/accountants/mma.md").read_text()
    for q in (0.1, 0.05, 0.02, 0.01):
        gap = paper_audit.mma_gap(q, 1.0, 100)
        moments = " | ".join(f"{each:.4f}" for each in (gap.bound, gap.adding, gap.removing))
        most = number_format.round_up(gap.delta_adding, 2)
        least = number_format.round_down(gap.delta_removing, 2)
        assert f"| {q:g} | {gap.order:.2f} | {moments} | {most} | {least} |" in page


def test_the_audit_page_holds_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "audit.md").read_text()
    assert audit_report.markdown(paper_audit.findings()) in page
    for figure in re.findall(r"\(images/([\w-]+\.svg)\)", page):
        assert (ROOT / "docs" / "images" / figure).stat().st_size > 10_000


def test_every_data_set_and_model_is_in_the_docs_with_its_size() -> None:
    text = (ROOT / "docs/training.md").read_text()
    for name, known in DATASETS.items():
        sizes = f"{known.train_size:,} + {known.test_size:,} | {known.inputs:,} | {known.classes}"
        assert f"| `{name}` | {sizes} | ".replace(",", " ") in text
    for name in MODELS:
        assert f"`{name}`" in text
