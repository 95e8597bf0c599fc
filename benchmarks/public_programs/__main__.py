"""Run small versions of public programs, and print what private steps make of each.

    python -m benchmarks.public_programs                # all of them
    python -m benchmarks.public_programs vit lora       # these
    python -m benchmarks.public_programs --json FILE    # also write all rows to this file
    python -m benchmarks.public_programs --write        # write the tables into the page

It ends with an error if a program is refused wrongly, fails, or is wrong.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from benchmarks.public_programs import PROGRAMS, SECTIONS, Outcome, run_program
from benchmarks.public_programs.program import TOLERANCE
from scripts.page_parts import DOCS, write_part

PAGE: Final = DOCS / "public-programs.md"
_WAYS: Final = {
    "layers": "by layers, proved",
    "tested": "by layers, tested",
    "whole": "as a whole, vectorised",
    "single": "as a whole, one by one",
}
_HEAD: Final = "| program | source | private steps | difference |\n|---|---|---|---|\n"
_LINE: Final = re.compile(r",? (?:computed )?in [\w.]+:\d+ \(.*")  # where it is, and what follows


def render_row(outcome: Outcome) -> str:
    """Return the Markdown row of a program."""
    source = f"[{outcome.source}]({outcome.address})"
    return f"| {outcome.title} | {source} | {_describe(outcome)} |\n"


def _describe(outcome: Outcome) -> str:
    """Return how a program was clipped and how exactly, or why it was not, as two cells."""
    if outcome.way is not None:
        return f"{_WAYS[outcome.way]} | {_describe_size(outcome.difference or 0.0)}"
    reason = _LINE.sub("", outcome.reason).split(". Model and loss")[0]
    seen = f" ({outcome.dependence})" if outcome.dependence else ""
    return f"{'refused' if outcome.is_expected else 'WRONGLY REFUSED'}: {reason}{seen} | –"


def _describe_size(difference: float) -> str:
    """Return the power of ten above a difference, or the tolerance."""
    if difference <= TOLERANCE:  # below it, CPUs differ
        return f"< {TOLERANCE:.0e}".replace("e-0", "e-")
    return f"< 1e-{-math.ceil(math.log10(difference)):.0f}"


def render_tables(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a Markdown table for each area, and a line of counts at the end."""
    for section, title in SECTIONS.items():
        rows = [each for each in outcomes if PROGRAMS[each.name].build.__module__ == section]
        if rows:
            yield f"\n## {title}\n\n{_HEAD}"
            yield from map(render_row, rows)
    yield f"\n{count_outcomes(outcomes)}\n"


def count_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Return how many programs train, in which way, and how many are refused."""
    ways = Counter(each.way for each in outcomes if each.is_expected and each.way)
    trained = ", ".join(f"{ways[way]} {_WAYS[way]}" for way in _WAYS if ways[way])
    refused = sum(each.is_expected and each.way is None for each in outcomes)
    failed = [each.name for each in outcomes if not each.is_expected]
    return (
        f"{ways.total()} programs train ({trained}); {refused} are refused for the true reason; "
        f"{len(failed)} are refused wrongly, fail, or are wrong{': ' if failed else ''}"
        f"{', '.join(failed)}."
    )


def write_page(outcomes: Sequence[Outcome]) -> None:
    """Write the tables into the page."""
    write_part(PAGE, "programs", "".join(render_tables(outcomes)))


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="names of programs; all by default", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="also write all rows to this file")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help=f"write the tables into {PAGE.name}")
    ] = False,
) -> None:
    """Run small versions of public programs, and print what private steps make of each."""
    if unknown := set(names or ()) - PROGRAMS.keys():
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; use {', '.join(PROGRAMS)}")
    if write and names:
        raise typer.BadParameter("--write writes the rows of all programs: leave out the names")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes = [run_program(PROGRAMS[name]) for name in names or PROGRAMS]
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    if write:
        write_page(outcomes)
    else:
        print("".join(render_tables(outcomes)), end="")
    for each in outcomes:
        if not each.is_expected:
            print(f"{each.name}: {each.reason or f'difference {each.difference}'}")
    raise typer.Exit(any(not each.is_expected for each in outcomes))


if __name__ == "__main__":
    typer.run(main)
