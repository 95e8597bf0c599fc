"""The notebook of the documentation runs, and prints what it shows.

`python -m tests.docs.test_notebook` writes the outputs anew.
"""

from __future__ import annotations

import os
from typing import Any, Final

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.pages import ROOT

NOTEBOOK: Final = ROOT / "docs/notebook.ipynb"


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def outputs(notebook: Any) -> list[str]:
    """Return what each code cell prints and shows."""
    return [
        "".join(each.get("text") or each["data"]["text/html"] for each in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def execute() -> Any:
    """Run the notebook with the packages of this checkout, and return it with its outputs."""
    notebook = read()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    return notebook


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # the kernel's connection has warnings of its own
def test_the_notebook_prints_what_it_shows() -> None:
    assert outputs(execute()) == outputs(read())


def test_the_notebook_has_no_numbers_of_runs_and_no_names_of_machines() -> None:
    notebook = read()
    nbformat.validate(notebook)  # type: ignore[no-untyped-call]
    assert all(cell.metadata == {} for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) >= 8
    assert all(cell.execution_count is None for cell in code)


def main() -> None:
    """Write the notebook with the outputs of today."""
    notebook = execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            for each in cell.outputs:
                if "execution_count" in each:
                    each.execution_count = None
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, NOTEBOOK)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
