"""The steps of .ci/run have shares of twenty minutes, and CI says so when one takes more."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts import ci_seconds
from tests.support.pages import ROOT

RUN = (ROOT / ".ci/run").read_text()


def test_the_shares_add_up_to_at_most_twenty_minutes() -> None:
    shares = [int(share) for share in re.findall(r"^step (\d+) ", RUN, re.MULTILINE)]
    assert len(shares) >= 6
    assert sum(shares) <= 1200


@pytest.mark.parametrize(
    ("wall", "status", "said"),
    [
        (9.9, 0, ""),
        (10.1, 0, "above its share"),
        (39.9, 0, "above its share"),
        (40.1, 1, "MORE THAN FOUR TIMES ITS SHARE"),
    ],
)
def test_a_step_above_its_share_is_named(
    wall: float, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "seconds"
    table.write_text(f"100\t1\t1\t1\tmake install\n10\t{wall}\t3\t1\tmake test\n")
    assert ci_seconds.main(str(table)) == status
    row = next(line for line in capsys.readouterr().out.splitlines() if "make test" in line)
    assert row.split(maxsplit=5) == [
        "make",
        "test",
        f"{wall:.0f}",
        "4",
        "10",
        *([said] * bool(said)),
    ]


@pytest.mark.parametrize(("wall", "said"), [(199, "above its share"), (201, "MORE THAN TWICE")])
def test_all_steps_together_have_a_limit(
    wall: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "seconds"
    table.write_text(f"60\t{wall - 99}\t1\t1\tmake install\n40\t99\t3\t1\tmake test\n")
    assert ci_seconds.main(str(table)) == (wall > 200)
    assert said in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("command", ["true", "false"])
def test_a_step_notes_its_seconds_and_keeps_its_status_and_output(
    command: str, tmp_path: Path
) -> None:
    step = re.search(r"^step\(\) \{.*?^\}$", RUN, re.MULTILINE | re.DOTALL)
    assert step
    table = tmp_path / "seconds"
    work = f"echo out; echo err >&2; sleep 0.2; {command}"
    script = f"SECONDS_TABLE={table}\n{step[0]}\nstep 7 bash -c '{work}'"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        int(command == "false"),
        "out\n",
        "err\n",
    )
    (found,) = ci_seconds.read_steps(table.read_text())
    assert found.share == 7
    assert 0.2 <= found.wall < 20
    assert 0 <= found.cpu < found.wall
