"""An environment that has further packages, and all of the development environment's."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def create_overlay(folder: Path, packages: Sequence[str]) -> Path:
    """Install packages into a new environment on top of this one, and return its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    names = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", names))
    (own / "development.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--constraint", _CONSTRAINTS, *packages], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return python
