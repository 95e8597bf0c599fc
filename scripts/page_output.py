"""Run the commands of documentation pages, and write what they print into the pages.

python -m scripts.page_output docs/tutorial.md         # these pages; slow blocks are left alone
python -m scripts.page_output --slow docs/tutorial.md  # slow blocks too

Blocks whose output varies from run to run are run and left as they are.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.support.pages import Block, Page, Session, split_commands


def run_page(file: Path, folder: Path, slow: bool) -> dict[str, str]:
    """Run a page's commands; return the new text of each block whose output changed."""
    page = Page.read(file)
    outputs: list[str] = []

    def keep(_: list[str], output: str, __: str, ___: bool) -> None:
        """Store a command's output."""
        outputs.append(output)

    changed = {}
    with Session(folder, page, compare=keep) as session:
        for block in page.blocks:
            if block.here and (slow or not block.slow):
                outputs.clear()
                session.run(block)
                if outputs and not block.varies:
                    changed[block.text] = show(block, outputs)
    return changed


def show(block: Block, outputs: list[str]) -> str:
    """Return a code block's text with these outputs after its commands."""
    text = ""
    for (command, _), output in zip(split_commands(block.text), outputs, strict=True):
        lines = [line.rstrip() for line in output.rstrip().splitlines()]
        text += "".join(f"{line}\n" for line in [f"$ {command.rstrip()}", *lines])
    return text


def main() -> None:
    """Run the pages named on the command line, and write their commands' outputs into them."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.page_output",
        description="Run the commands of pages, and write what they print into the pages.",
    )
    parser.add_argument("pages", nargs="+", metavar="PAGE", type=Path)
    parser.add_argument("--slow", action="store_true", help="run slow blocks too")
    arguments = parser.parse_args()
    for file in arguments.pages:
        with tempfile.TemporaryDirectory() as folder:
            changed = run_page(file, Path(folder), arguments.slow)
        text = file.read_text()
        for old, new in changed.items():
            text = text.replace(old, new)
        file.write_text(text)


if __name__ == "__main__":
    main()
