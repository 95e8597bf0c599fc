"""The configurations of public projects: all are imported, and the page shows what was found."""

from __future__ import annotations

import re
from functools import cache

import pytest

from scripts.imported_configurations import (
    PAGE,
    Row,
    describe_claims,
    describe_cost,
    import_entry,
    read_entries,
    render_table,
)
from scripts.page_parts import read_part

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
    assert read_part(PAGE, "table") == "".join(render_table(list(rows()))).strip()


@pytest.mark.slow
def test_only_these_are_refused_and_all_others_have_a_cost_or_a_reason() -> None:
    assert {row.entry["name"] for row in rows() if row.is_refused} == REFUSED
    for row in rows():
        if not row.is_refused and row.answer["guarantee"] is None:
            assert row.errors, row.entry["name"]


@pytest.mark.slow
def test_the_accountants_that_are_known_to_be_wrong_are_found() -> None:
    found = {row.entry["name"]: set(row.errors) for row in rows()}
    for name in ("Opacus test, GDP accountant", "Bu et al. 2020, MNIST, σ = 1.06, gdp"):
        assert found[name] == {"claim-refuted", "accountant-refuted"}
    assert "sensitivity-below-clip" in found["FLIP, defaults of its local mod"]
    assert found["Opacus test, PRV accountant"] == set()


@pytest.mark.slow
def test_the_table_names_refused_fields_targets_and_refuted_claims() -> None:
    found = {row.entry["name"]: row for row in rows()}
    assert describe_cost(found["TensorFlow Privacy, language model, defaults"]) == (
        "refused: `noise_multiplier` must be a number ≥ 0.01 and ≤ 1e6"
    )
    assert describe_claims(found["fastDP, README"]) == "2 (target): estimate"  # of what samples?
    assert describe_claims(found["Opacus test, PRV accountant"]) == "6.7774: proven"
    assert describe_claims(found["FLIP, defaults of its local mod"]) == "10: refuted"
    for row in rows():
        if "claim-refuted" in row.errors:
            assert ": refuted" in describe_claims(row), row.entry["name"]


@pytest.mark.slow
def test_the_neighbours_of_every_row_are_those_that_the_page_states() -> None:
    for row in rows():
        if not row.is_refused and row.answer["guarantee"] is not None:
            is_shuffled = "shuffled-as-poisson" in row.errors
            relation = "zero_out_one" if is_shuffled else "add_or_remove_one"
            assert row.answer["guarantee"]["neighbouring_relation"] == relation
