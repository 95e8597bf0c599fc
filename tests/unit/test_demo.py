"""The demo begins anew in a folder where an earlier demo was interrupted, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.demo import create_ledger_url


def test_a_demo_begins_anew_where_an_earlier_one_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ledger.db", "ledger.db-wal", "checkpoint.pt", "certificate.json"):
        (tmp_path / name).touch()
    assert create_ledger_url(tmp_path) == f"sqlite:///{tmp_path}/ledger.db"
    assert [each.name for each in tmp_path.iterdir()] == ["certificate.json"]
    assert "begins anew" in capsys.readouterr().out


def test_a_checkpoint_of_a_run_that_is_no_demo_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").touch()
    create_ledger_url(tmp_path)
    assert (tmp_path / "checkpoint.pt").exists()


def test_a_demo_that_ended_leaves_nothing_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger.db").touch()
    create_ledger_url(tmp_path)
    assert capsys.readouterr().out == ""
