"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from accountant_service.numerics import certified_interval


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute every interval anew: for tests that replace a part of an engine."""
    # private: a cache that would answer with what the whole engine found
    monkeypatch.setattr(
        certified_interval,
        "_search_both_directions",
        certified_interval._search_both_directions.__wrapped__,
    )
