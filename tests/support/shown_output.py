"""Compare the output that a page shows with what its command printed: the whole text.

Only what differs from machine to machine, or from run to run, is masked: identifiers, hashes, keys,
times and addresses with their port.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_MASKS: Final = tuple(
    (re.compile(pattern), mask)
    for pattern, mask in (
        (r"\bpa_\w+", "<key>"),
        (r"\bwhsec_[\w-]+", "<secret>"),
        (r"\b[0-9a-f]{16,}\b", "<identifier>"),
        (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|\+00:00)?", "<time>"),
        (r"\b(127\.0\.0\.1|localhost):\d+", "<address>"),
    )
)
_LEFT_OUT: Final = "…"


def require_shown(shown: Sequence[str], output: str, where: str, varies: bool) -> None:
    """Require that the shown lines are all of the output, in order.

    Args:
        shown: the lines that the page shows after a command.
        output: what the command printed.
        where: page and line.
        varies: whether … stands for text that differs from run to run; alone on a line, for lines.
    """
    expected, printed = _mask_lines(shown), _mask_lines(output.splitlines())
    if varies:
        matches = re.fullmatch(_build_pattern(expected), "".join(f"{each}\n" for each in printed))
    else:
        matches = expected == printed
    assert matches, f"{where}: the page shows\n{chr(10).join(shown)}\nand this came:\n{output}"


def _mask_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines with their varying fields masked, without empty ones at the end."""
    masked = []
    for line in lines:
        text = line.rstrip()
        for pattern, mask in _MASKS:
            text = pattern.sub(mask, text)
        masked.append(text)
    while masked and not masked[-1]:
        masked.pop()
    return masked


def _build_pattern(lines: Sequence[str]) -> str:
    """Return the regular expression of these lines, in which … stands for any text."""
    return "".join(
        r"(?:.*\n)+?"
        if line.strip() == _LEFT_OUT
        else ".*?".join(map(re.escape, line.split(_LEFT_OUT))) + r"\n"
        for line in lines
    )
