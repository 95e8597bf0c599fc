"""Fixtures of the conformance tests."""

from __future__ import annotations

import pytest

from tests.support.optimizer_cases import without_noise
from training_client.private_step.rounded_gaussian import NoiseGrid


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without noise, and without its grid, which a huge clip norm makes wide."""
    monkeypatch.setattr(NoiseGrid, "add_noise", without_noise)
