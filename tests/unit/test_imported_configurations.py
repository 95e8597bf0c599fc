"""The configurations of public projects: all are imported, and the page shows what was found."""

from __future__ import annotations

import re
from functools import cache

import pytest

from accountant_service.importing import CODES
from scripts.imported_configurations import (
    DOCS,
    MARKS,
    PAGE,
    Row,
    import_entry,
    read_entries,
    render_table,
)

REFUSED = {"jax_privacy, plan with three bands", "TensorFlow Privacy, language model, defaults"}


@cache
def rows() -> tuple[Row, ...]:
    return tuple(import_entry(entry) for entry in read_entries())


def test_every_configuration_has_a_source() -> None:
    entries = read_entries()
    assert len(entries) == len({entry["name"] for entry in entries}) >= 100
    for entry in entries:
        source = entry["source"]
        commit = source.get("commit")
        assert {"publication", "section"} == source.keys() or re.fullmatch("[0-9a-f]{40}", commit)
        assert source.get("line", 1) >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_has_the_table_of_the_script() -> None:
    begin, end = MARKS
    shown = PAGE.read_text().split(begin)[1].split(end)[0].strip()
    assert shown == "".join(render_table(list(rows()))).strip()


def test_only_these_are_refused_and_all_others_have_a_cost_or_a_reason() -> None:
    assert {row.entry["name"] for row in rows() if row.is_refused} == REFUSED
    for row in rows():
        if not row.is_refused and row.answer["guarantee"] is None:
            assert row.errors, row.entry["name"]


def test_the_accountants_that_are_known_to_be_wrong_are_found() -> None:
    found = {row.entry["name"]: set(row.errors) for row in rows()}
    for name in ("Opacus test, GDP accountant", "Bu et al. 2020, MNIST, σ = 1.06, gdp"):
        assert found[name] == {"claim-refuted", "accountant-refuted"}
    assert "sensitivity-below-clip" in found["FLIP, defaults of its local mod"]
    assert found["Opacus test, PRV accountant"] == set()


def test_every_code_of_the_lint_is_on_the_page() -> None:
    text = (DOCS / "how-to/importing.md").read_text()
    for code, (severity, title) in CODES.items():
        assert f"| `{code}` | {severity} | {title[0].lower()}{title[1:]} |" in text
