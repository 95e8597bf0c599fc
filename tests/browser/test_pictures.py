"""`make pictures` photographs the calculator and a budget page."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT

pytestmark = pytest.mark.nightly


def test_make_pictures_writes_both_pictures(tmp_path: Path) -> None:
    if not (shutil.which("chromium") or shutil.which("chromium-browser")):
        pytest.skip("there is no Chromium; Debian has it: apt-get install chromium")
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    command = ["make", "--old-file=.venv/.ready", "pictures", f"PICTURES={tmp_path}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["budget.png", "calculator.png"]
