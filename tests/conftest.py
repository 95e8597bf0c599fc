"""Settings of all tests."""

from __future__ import annotations

import os

# Tests run side by side, and their tensors are small: threads of one test would only wait for each
# other, which on shared cores takes most of the time. Read when PyTorch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.support.tiers"]
