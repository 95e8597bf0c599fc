"""The federated demo's care for its processes, with a program in place of Flower's SuperNode."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from scripts.demo_federated import Federation, parse_arguments

SUPERNODE = """#!/bin/sh
echo started >> "$SITES_FOLDER/starts"
[ "$(wc -l < "$SITES_FOLDER/starts")" -gt 1 ] || exit 1  # at the first start the port is taken
exec sleep 600
"""


def test_a_site_that_ends_at_its_start_is_started_again(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "flower-supernode").write_text(SUPERNODE)
    (programs / "flower-supernode").chmod(0o755)
    given = ["--output", tmp_path / "run", "--programs", programs, "--sites", "1"]
    federation = Federation(parse_arguments([*map(str, given), "--seconds", "60"]))
    federation.processes.start("link", "sleep", "600")
    federation.start_site("site-1")
    try:
        federation.processes.running["site-1"].wait(30)
        deadline = time.monotonic() + 30

        def is_site_running() -> bool:
            return federation.processes.running["site-1"].poll() is None

        federation._wait(lambda: is_site_running() or time.monotonic() > deadline, "a site")
        assert is_site_running()
    finally:
        federation.processes.stop_all()


def test_the_demo_waits_as_long_as_rounds_end_and_shows_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six rounds of 25 seconds each, with a limit of 30; then none for longer than that."""
    now = [0.0]
    rounds = tmp_path / "run/server/rounds.jsonl"

    def pass_time(_: float) -> None:
        """Let five seconds pass, and finish a round after each 25 of the first 150."""
        now[0] += 5
        if not now[0] % 25 and now[0] <= 150:
            with rounds.open("a") as file:
                file.write(json.dumps({"round": int(now[0] / 25), "contributions": 8}) + "\n")

    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now[0])
        patch.setattr("time.sleep", pass_time)
        # private: no process of Flower runs here
        patch.setattr(Federation, "_is_server_running", lambda _: False)
        given = ["--output", str(tmp_path / "run"), "--seconds", "30", "--rounds", "6"]
        federation = Federation(parse_arguments(given))
        rounds.parent.mkdir(parents=True)
        with pytest.raises(TimeoutError, match="no end, and no round within 30 s"):
            federation._wait(lambda: False, "end")
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"round {n} of 6: 8 of 8 sites contributed, 25 s" for n in range(1, 7)]
    assert 180 <= now[0] <= 190
