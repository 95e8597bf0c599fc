"""Output folders are checked for write access before training, and belong to one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from training_client.errors import DataError
from training_client.lab.cli.output_folders import lock_folder, require_writable


@pytest.mark.parametrize("name", [".", "a", "a/b/c"])
def test_checking_an_output_folder_does_not_create_it(name: str, tmp_path: Path) -> None:
    require_writable(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/a", "file/a/b"])
def test_a_file_as_output_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="choose another"):
        require_writable(tmp_path / name)


@pytest.mark.slow
def test_one_run_at_a_time_trains_into_a_folder(tmp_path: Path) -> None:
    """Nor does one of another process; what died has let go of it."""
    folder = tmp_path / "runs"
    with (
        lock_folder(folder),
        pytest.raises(DataError, match="another run trains into"),
        lock_folder(folder),
    ):
        pass
    program = (
        "import os, pathlib, training_client.lab.cli.output_folders as folders\n"
        f"it = folders.lock_folder(pathlib.Path({str(folder)!r})); it.__enter__()\n"
        "print('held', flush=True); os.read(0, 1)"
    )
    started = [sys.executable, "-c", program]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(DataError, match="choose another --output"), lock_folder(folder):
            pass
        other.kill()
    with lock_folder(folder):
        pass
