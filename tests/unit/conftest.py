"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accountant_service.numerics import certified_interval


@pytest.fixture
def no_cpu_anywhere() -> Iterator[None]:
    """Let every tensor say that it is not on a CPU."""
    from tests.support.accelerator_counts import no_cpu  # torch comes with it

    with no_cpu(must_ask=False):
        yield


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute every interval anew: for tests that replace a part of an engine."""
    # private: a cache that would answer with what the whole engine found
    monkeypatch.setattr(
        certified_interval,
        "_search_both_directions",
        certified_interval._search_both_directions.__wrapped__,
    )
