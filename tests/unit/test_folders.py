"""Where results go is known to be writable before anything is trained, and is not made yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from training_client.cli.folders import require_writable
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
