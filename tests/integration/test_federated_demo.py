"""The federated demo's care for its processes, with a program in place of Flower's SuperNode."""

from __future__ import annotations

import time
from pathlib import Path

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
