"""Write the pages of training results from the results file.

    python benchmarks/training_results.py report

`accountant-train paper` trains and fills the results file. `report` asks the accounting service for
the ε of every run, adds the answers to the file, and writes the pages and their plots.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # replaces this folder: its http.py shadows the standard library's

from typing import Annotated

import typer

from benchmarks.results.certification import certify
from benchmarks.results.papers import write_paper_pages
from benchmarks.results.report import write_page
from training_client.lab.papers.published import ALL_EXPERIMENTS
from training_client.lab.papers.store import Store

RESULTS = ROOT / "docs/training-results.jsonl"
PAGE = ROOT / "docs/training-results.md"
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
File = Annotated[Path, typer.Option(help="the results file")]
Page = Annotated[Path, typer.Option(help="the page to write; images/ and papers/ are beside it")]


@app.callback()
def main() -> None:
    """Write the pages of training results."""


@app.command()
def report(file: File = RESULTS, page: Page = PAGE) -> None:
    """Write the pages and their plots from the stored results, after asking for missing ε."""
    store = Store(file)
    certify(ALL_EXPERIMENTS, store)
    write_page(store, page)
    write_paper_pages(store, page.parent / "papers")


if __name__ == "__main__":
    app()
