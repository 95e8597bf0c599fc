"""Code blocks of the README, CONTRIBUTING and docs/ run here, or name the test that runs them.

CI runs the code of the first pages that people follow. The code of the others runs at night; that
it is JSON, or Python, and that its commands and options exist is checked with every change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from accountant_service import cli
from tests.support.findings import require_none
from tests.support.pages import PAGES, ROOT, SHELL, Block, Page, Session, parse_page
from tests.support.shown_output import require_shown

IN_CI = ("README.md", "docs/index.md")
_CALL = re.compile(r"(?:^|[(] ?|[$&|] |=\S+ )(?:\.venv/bin/)?(accountant(?:-train)? [^)#>&$]*)")
_RUNNER = re.compile(r"\.ci/\w+|tests/\w+/test_\w+\.py")
_SHOWN_EPSILON = re.compile(
    r"^ε +([\d.]+)$(?:.*\n)+?proved +([\d.]+) ≤ ε ≤ ([\d.]+)$", re.MULTILINE
)
_NAMED = re.compile(  # targets, extras and benchmarks, in a block or in a line of text
    r"\bmake [a-z-]+|\bpip install 'privacy-accountant\[[a-z,]+\]'"
    r"|\bpython benchmarks/\w+\.py(?: -{0,2}\w[-\w]*)*"
)


def relative_name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def pages_with_code() -> Iterator[Any]:
    """Yield the pages with code to run as test parameters; all but a few run at night."""
    for file in PAGES:
        if re.search(r"^```(console|sh|python)$", file.read_text(), re.MULTILINE):
            name = relative_name(file)
            mark = pytest.mark.slow if name in IN_CI else pytest.mark.nightly
            yield pytest.param(file, id=name, marks=mark)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", list(pages_with_code()))
def test_the_code_of_a_page_works(file: Path, tmp_path: Path) -> None:
    page = Page.read(file)
    with Session(tmp_path, page) as session:
        for block in page.blocks:
            if block.here:
                session.run(block)


def all_blocks() -> Iterator[Block]:
    """Yield the blocks of all pages."""
    for file in PAGES:
        yield from Page.read(file).blocks


def test_blocks_of_json_and_python_can_be_read() -> None:
    for block in all_blocks():
        if block.language == "python":
            compile(block.text, block.where, "exec")
        elif block.language == "json":
            json.loads(block.text)


def test_a_shown_interval_contains_the_value_above_it() -> None:
    shown = {block.where: _SHOWN_EPSILON.search(block.text) for block in all_blocks()}
    found = {where: tuple(map(Decimal, each.groups())) for where, each in shown.items() if each}
    assert len(found) >= 2
    require_none(
        where for where, (epsilon, lower, upper) in found.items() if not lower <= epsilon <= upper
    )


def blocks_run_elsewhere() -> list[Block]:
    """Return the blocks that name another test."""
    return [block for block in all_blocks() if block.run_by]


def missing_from_runners(block: Block) -> Iterator[str]:
    """Yield the commands of a block that a test named by the block does not have."""
    if block.language == "python":  # the named test runs the page, and says which
        page = block.where.partition(":")[0]
        if not any(page in (ROOT / each).read_text() for each in block.runners):
            yield page
    else:
        yield from (each for each in block.commands if not is_in(each, block.runners))


def test_a_named_test_contains_the_commands_of_the_block() -> None:
    blocks = blocks_run_elsewhere()
    runners = {runner for block in blocks for runner in block.runners}
    require_none(each for each in runners if not _RUNNER.fullmatch(each))
    require_none(
        f"{block.where}: {each}" for block in blocks for each in missing_from_runners(block)
    )


def test_every_target_extra_and_benchmark_on_a_page_is_run_by_a_named_test() -> None:
    runners = sorted({runner for block in blocks_run_elsewhere() for runner in block.runners})
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = {f"make {target}" for target in targets}  # and not: make more of it
    named = {each for file in PAGES for each in _NAMED.findall(file.read_text())}
    commands = {each for each in named if each in made or not each.startswith("make ")}
    require_none(each for each in sorted(commands) if not is_in(each, runners))


def is_in(command: str, runners: list[str]) -> bool:
    """Return whether a line of these files has the command's words; options may stand between.

    A … in the command matches any text.
    """
    words = [re.escape(word).replace("…", r"\S*") for word in bare_words(command).split()]
    pattern = re.compile(r"(?<!\S)" + r"(?: -\S+)* ".join(words) + r"(?!\S)")
    return any(pattern.search(line) for runner in runners for line in bare_lines(runner))


@cache
def bare_lines(runner: str) -> list[str]:
    """Return the lines of a file without comments, quotes, commas and brackets."""
    lines = (ROOT / runner).read_text().splitlines()
    return [bare_words(line) for line in lines if not line.lstrip().startswith("#")]


def bare_words(text: str) -> str:
    """Return a line without quotes, commas and brackets."""
    return " ".join(re.split(r"[\s\"'(),$]+", text)).strip()


@cache
def programs() -> dict[str, Any]:
    """Return both command lines."""
    from training_client.lab.cli import app  # torch comes with it

    return {"accountant": get_command(cli.app), "accountant-train": get_command(app)}


def quoted_code(file: Path) -> Iterator[str]:
    """Yield the text in backticks, and each line of the shell blocks."""
    for token in parse_page(file):
        if token.type == "fence" and token.info in SHELL:
            yield from token.content.replace("\\\n", " ").splitlines()
        for part in token.children or []:
            if part.type == "code_inline":
                yield " ".join(part.content.split())


def calls_in(text: str) -> Iterator[list[str]]:
    """Yield the calls of this project's programs in a text; `a b | c` means b or c."""
    for found in _CALL.finditer(text):
        own_options = re.sub(r'--and "[^"]*"', "--and RUN", found[1])  # another run's are quoted
        parts = [each.split() for each in own_options.split(" | ")]
        yield parts[0]
        for other in parts[1:]:
            if re.fullmatch("[a-z-]+", " ".join(other)):  # else another program reads the output
                yield [*parts[0][:-1], *other]


def unknown_part(words: list[str]) -> str | None:
    """Return the first option or command of a call that its program does not have."""
    command = programs()[words[0]]
    for word in words[1:]:
        if word == "…":
            return None
        option = re.match(r"--?[a-zA-Z][\w-]*", word)
        if option:
            known = {"--help", "-h", *(name for each in command.params for name in each.opts)}
            if option[0] not in known:
                return f"{option[0]} of {command.name}"
        elif hasattr(command, "commands"):
            if word not in command.commands and hasattr(command, "default_command"):
                command = command.commands[command.default_command]
                continue
            if word not in command.commands:
                return f"{word!r} of {command.name}"
            command = subcommand(command, word)
    return None


def unknown_names(text: str, options: set[str], makefile: str) -> Iterator[str]:
    """Yield the commands, options, targets and files in a piece of code that do not exist."""
    for words in calls_in(text):
        if unknown := unknown_part(words):
            yield unknown
    for target in re.findall(r"^make ([a-z-]+)", text):
        if f"\n{target}:" not in makefile:
            yield f"make {target}"
    alone = re.match(r"(--[a-z-]+)(?: |$)", text)
    if alone and alone[1] not in options:
        yield alone[1]
    for path in re.findall(r"(?:tests|benchmarks|scripts|\.ci)/[\w/.-]+\w", text):
        if not (ROOT / path).exists():
            yield path


def test_every_command_and_option_that_a_page_names_exists() -> None:
    options = {"--help", *(option for each in programs().values() for option in all_options(each))}
    makefile = (ROOT / "Makefile").read_text()
    require_none(
        f"{relative_name(file)}: {text}: there is no {unknown}"
        for file in PAGES
        for text in quoted_code(file)
        for unknown in unknown_names(text, options, makefile)
    )


def subcommand(command: Any, name: str) -> Any:
    """Return a command of a group; those of the programs are loaded by name."""
    from training_client.lab.cli import load_command

    loaders = {id(programs()["accountant"]): cli.load_command}
    loaders[id(programs()["accountant-train"])] = load_command
    return loaders.get(id(command), command.commands.get)(name)


def all_options(command: Any) -> Iterator[str]:
    """Yield the options of a command and of its subcommands."""
    yield from (option for each in command.params for option in each.opts)
    for name in getattr(command, "commands", {}):
        yield from all_options(subcommand(command, name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- slow: -->\n```console\nfalse\n```\n", "without its reason"),
        ("<!-- run by .ci/run -->\n```console\nfalse\n```\n", "without its reason"),
        ("<!-- run by .ci/run: why -->\n\nNo block.\n", "belongs to no block"),
        ("Text:\n\n    accountant serve\n", "fence it"),
        ("```\naccountant serve\n```\n", "not in"),
    ],
)
def test_code_that_is_neither_run_nor_marked_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(AssertionError, match=message):
        Page.read(tmp_path / "page.md")


WRONG_BLOCKS = [
    ("console", "ls --no-such-option\n"),
    ("console", "false | true\n"),
    ("console", "$ echo one 1\ntwo 2\n"),
    ("console", "$ echo one 1\none 2\n"),
    ("console", "$ echo one\n"),
    ("python", "names = 1 / 0\n"),
    ("json", "{'not': 'json'}\n"),
]


def fails(session: Session, block: Block) -> bool:
    """Return whether a block fails."""
    try:
        session.run(block)
    except (AssertionError, ValueError, pytest.fail.Exception):
        return True
    return False


def test_a_wrong_block_fails_and_a_block_sees_the_results_of_those_before_it(
    tmp_path: Path,
) -> None:
    with Session(tmp_path) as session:
        session.run(Block("page.md:1", "console", "export WHO=me\nmkdir there && cd there\n"))
        blocks = [Block("page.md:9", *each) for each in WRONG_BLOCKS]
        assert [block for block in blocks if not fails(session, block)] == []
        session.run(Block("page.md:2", "console", "$ true\n$ echo no && false\nno\n", fails="why"))
        assert fails(session, Block("page.md:2", "console", "$ false\n$ true\n", fails="why"))
        session.run(Block("page.md:2", "console", "$ echo $WHO 12 > file && cat file\nme 12\n"))
        session.run(Block("page.md:3", "python", "import os\nwho = os.environ['WHO']\n"))
        session.run(Block("page.md:4", "python", "assert open('file').read() == f'{who} 12\\n'\n"))


SHOWN = "ε 1.25\nrun 04d2b86f39d8488bab60883d025be441 ends 2026-11-22T01:46:32Z\n"


def is_shown(shown: str, printed: str, *, varies: bool = False) -> bool:
    """Return whether a page may show this text for what was printed."""
    try:
        require_shown(shown.splitlines(), printed, "page.md:1", varies)
    except AssertionError:
        return False
    return True


def test_identifiers_and_times_may_differ_and_nothing_else() -> None:
    another_run = "ε 1.25\nrun 6ce42d5f591a4049980c0fc4cae04e3c ends 2027-01-02T03:04:05Z\n\n"
    assert is_shown(SHOWN, SHOWN)
    assert is_shown(SHOWN, another_run)
    lines = SHOWN.splitlines(keepends=True)
    for printed in (
        SHOWN.replace("1.25", "1.26"),
        SHOWN.replace("ends", "ended"),
        SHOWN.replace("04d2b86f39d8488bab60883d025be441", "04d2"),
        f"first\n{SHOWN}",
        f"{SHOWN}last\n",
        "".join(reversed(lines)),
        lines[0],
        "",
    ):
        assert not is_shown(SHOWN, printed), printed
        assert not is_shown(SHOWN, printed, varies=True), printed


def test_an_ellipsis_stands_for_other_text_only_where_the_block_says_so() -> None:
    shown, printed = "loss …\n…\ndone", "loss 0.4\nmore\nlines\ndone\n"
    assert is_shown(shown, printed, varies=True)
    for other in (printed.replace("done", "failed"), "loss 0.4\ndone\n", f"{printed}more\n"):
        assert not is_shown(shown, other, varies=True)
    assert not is_shown(shown, printed)


@pytest.mark.slow
def test_the_http_reference_shows_the_answers_of_today() -> None:
    from scripts import api_reference

    page = api_reference.PAGE.read_text()
    expected = api_reference.render_reference()
    assert page == expected, "write it again: python scripts/api_reference.py"
