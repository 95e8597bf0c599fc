"""Settings of all tests."""

from __future__ import annotations

import os

import pytest

# Tests run side by side, and their tensors are small: threads of one test would only wait for each
# other, which on shared cores takes most of the time. Read when PyTorch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def night_seed(request: pytest.FixtureRequest) -> int:
    """The seed of random cases of the night; the date, or `--night-seed`."""
    return int(request.config.getoption("--night-seed"))
