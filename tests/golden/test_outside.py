"""The texts that outsiders see stay as they are, unless a change to them is meant."""

from __future__ import annotations

import pytest

from tests.support import outside


@pytest.mark.parametrize("surface", outside.SURFACES)
def test_outsiders_see_what_they_saw(surface: str) -> None:
    """API, commands, functions, forms, and what is said about documents of mechanisms.

    If a change is meant: `python -m tests.support.outside --digests`, and name it in the changelog.
    """
    seen = {name: outside.digest(text) for name, text in outside.SURFACES[surface]()}
    known = outside.read_digests()[surface]
    changed = [name for name in seen | known if seen.get(name) != known.get(name)]
    assert changed == [], "to see how, read tests/support/outside.py"
