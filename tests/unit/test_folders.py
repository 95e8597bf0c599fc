"""Where results go is known to be writable before anything is trained; then it is one run's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from training_client.cli.folders import held, require_writable
from training_client.errors import DataError


@pytest.mark.parametrize("name", [".", "a", "a/b/c"])
def test_a_folder_that_can_be_made_is_not_made_yet(name: str, tmp_path: Path) -> None:
    require_writable(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/a", "file/a/b"])
def test_a_file_is_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="choose another"):
        require_writable(tmp_path / name)


def test_one_run_at_a_time_trains_into_a_folder(tmp_path: Path) -> None:
    """Nor does one of another process; what died has let go of it."""
    folder = tmp_path / "runs"
    with held(folder), pytest.raises(DataError, match="another run trains into"), held(folder):
        pass
    program = (
        "import os, pathlib, training_client.cli.folders as folders\n"
        f"it = folders.held(pathlib.Path({str(folder)!r})); it.__enter__()\n"
        "print('held', flush=True); os.read(0, 1)"
    )
    started = [sys.executable, "-c", program]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(DataError, match="choose another --output"), held(folder):
            pass
        other.kill()
    with held(folder):
        pass
