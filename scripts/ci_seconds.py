"""Print what each step of .ci/run took beside its share: python3 -m scripts.ci_seconds TABLE.

Ends with 1 if a step took more than four times its share, or all took more than twice theirs. A
step above its share is named, and no more: machines differ by a factor of two, and the containers
are built beside.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FAILS_ABOVE: Final = 4.0  # shares of a step
ALL_FAIL_ABOVE: Final = 2.0  # of all


@dataclass(frozen=True)
class Step:
    """A step of CI: its share, wall time and CPU time in seconds, and its command."""

    share: float
    wall: float
    cpu: float
    command: str

    @property
    def verdict(self) -> str:
        """Return how the wall time compares with the share."""
        if self.wall > FAILS_ABOVE * self.share:
            return "MORE THAN FOUR TIMES ITS SHARE"
        return "above its share" if self.wall > self.share else ""


def read_steps(table: str) -> list[Step]:
    """Return the steps that .ci/run wrote: share, wall, user, system, command."""
    rows = [line.split("\t") for line in table.splitlines()]
    return [
        Step(float(share), float(wall), float(user) + float(system), command)
        for share, wall, user, system, command in rows
    ]


def render(steps: list[Step]) -> str:
    """Return the table, with a row for the sum."""
    parts = ([each.share for each in steps], [each.wall for each in steps], [s.cpu for s in steps])
    total = Step(*map(sum, parts), "all")
    late = "MORE THAN TWICE THEIR SHARE" if is_late(steps) else total.verdict
    lines = [f"{'step':20} {'wall s':>8} {'CPU s':>8} {'share s':>8}"]
    for each in (*steps, total):
        numbers = f"{each.wall:8.0f} {each.cpu:8.0f} {each.share:8.0f}"
        verdict = late if each is total else each.verdict
        lines.append(f"{each.command:20} {numbers}  {verdict}".rstrip())
    return "\n".join(lines)


def is_late(steps: list[Step]) -> bool:
    """Return whether all steps together took more than twice their share."""
    return sum(s.wall for s in steps) > ALL_FAIL_ABOVE * sum(s.share for s in steps)


def main(path: str) -> int:
    """Print the table; return 1 if a step or all of them took far more than their share."""
    steps = read_steps(Path(path).read_text())
    print(render(steps))
    return int(is_late(steps) or any(each.wall > FAILS_ABOVE * each.share for each in steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
