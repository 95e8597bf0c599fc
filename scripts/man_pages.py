"""Write man pages of both programs, one for each command: `make man`.

python -m scripts.man_pages FOLDER

`man -l FOLDER/accountant-epsilon.1` shows one; in a folder `man1` below one of the MANPATH they are
found by their names.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import typer

from accountant_service import cli
from accountant_service.version import __version__
from training_client.lab import cli as training

PROGRAMS: Final[dict[str, tuple[typer.Typer, Callable[[str], Any]]]] = {
    "accountant": (cli.app, cli.load_command),
    "accountant-train": (training.app, training.load_command),
}


def escape(text: str) -> str:
    """Return a text for roff: backslashes, dashes and dots at the beginning are not commands."""
    plain = " ".join(text.replace("\\[", "[").split())
    plain = plain.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain


def describe_options(command: Any) -> Iterator[str]:
    """Yield the roff lines of a command's options, in the order of its help."""
    for each in command.params:
        if each.param_type_name != "option" or getattr(each, "hidden", False):
            continue
        takes = "" if each.is_flag else f" \\fI{escape(each.metavar or 'VALUE')}\\fR"
        flags = ", ".join(f"\\fB{escape(flag)}\\fR" for flag in each.opts)
        yield f".TP\n{flags}{takes}\n{escape(each.help or '')}\n"


def render(words: list[str], command: Any) -> str:
    """Return the man page of a command in roff.

    Args:
        words: the program's name, and the command's.
        command: the command, or a group of commands.
    """
    name, text = "-".join(words), command.help or ""
    first, _, rest = text.partition("\n")
    inner = getattr(command, "commands", {})
    arguments = [
        (each.metavar or each.name).upper() for each in command.params
        if each.param_type_name == "argument"
    ]  # fmt: skip
    called = " ".join([*words, "[OPTIONS]", *(["COMMAND"] if inner else arguments)])
    parts = [
        f'.TH "{escape(name.upper())}" 1 "" "privacy\\-accountant {__version__}"\n',
        f".SH NAME\n{escape(name)} \\- {escape(first)}\n",
        f".SH SYNOPSIS\n{escape(called)}\n",
    ]
    if rest.strip():
        paragraphs = re.split(r"\n\s*\n", rest.strip())
        parts.append(".SH DESCRIPTION\n" + ".PP\n".join(f"{escape(each)}\n" for each in paragraphs))
    options = "".join(describe_options(command))
    if options:
        parts.append(f".SH OPTIONS\n{options}")
    if inner:
        listed = (
            f".TP\n\\fB{escape(word)}\\fR\n{escape((each.help or '').partition(chr(10))[0])}\n"
            for word, each in inner.items()
        )
        parts.append(".SH COMMANDS\n" + "".join(listed))
    if getattr(command, "epilog", None):
        parts.append(f".SH NOTES\n{escape(command.epilog)}\n")
    return "".join(parts)


def list_pages() -> Iterator[tuple[list[str], Any]]:
    """Yield the words and the object of both programs and of all their commands."""
    for program, (app, load) in PROGRAMS.items():
        group: Any = typer.main.get_command(app)
        yield [program], group
        for name in group.commands:
            command = load(name)
            yield [program, name], command
            for word, each in getattr(command, "commands", {}).items():
                yield [program, name, word], each


def write_all(folder: Path) -> None:
    """Write the man page of every command into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for words, command in list_pages():
        page = folder / f"{'-'.join(words)}.1"
        page.write_text(render(words, command), encoding="utf-8")


def main() -> None:
    """Read the folder's name, and write the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.man_pages", description="Write man pages of both programs."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    write_all(parser.parse_args().folder)


if __name__ == "__main__":
    sys.exit(main())
