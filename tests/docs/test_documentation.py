"""Code blocks of the README, CONTRIBUTING and docs/ run here, or name the test that runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from typer.main import get_command

from accountant_service import cli
from tests.support.pages import PAGES, ROOT, SHELL, Block, Page, Session
from tests.support.shown_output import require_shown

_CALL = re.compile(r"(?:^|[(] ?|[$&|] |=\S+ )(?:\.venv/bin/)?(accountant(?:-train)? [^)#>&$]*)")
_RUNNER = re.compile(r"\.ci/\w+|tests/\w+/test_\w+\.py")
_SHOWN_EPSILON = re.compile(
    r"^ε +([\d.]+)$(?:.*\n)+?proved +([\d.]+) ≤ ε ≤ ([\d.]+)$", re.MULTILINE
)
_NAMED = re.compile(  # targets, extras and benchmarks, in a block or in a line of text
    r"\bmake [a-z-]+|\bpip install 'privacy-accountant\[[a-z,]+\]'"
    r"|\bpython benchmarks/\w+\.py(?: [-\w]+)*"
)


def relative_name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def pages_with_code() -> list[Any]:
    """Return the pages with code to run as test parameters: those with a slow block are slow."""
    found = []
    for file in PAGES:
        blocks = [each for each in Page.read(file).blocks if each.here]
        slow = pytest.mark.slow if any(each.slow for each in blocks) else ()
        if blocks:
            found.append(pytest.param(file, id=relative_name(file), marks=slow))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", pages_with_code())
def test_the_code_of_a_page_works(file: Path, tmp_path: Path) -> None:
    page = Page.read(file)
    with Session(tmp_path, page) as session:
        for block in page.blocks:
            if block.here:
                session.run(block)


def shown_intervals() -> list[Any]:
    """Return the blocks that show a computed ε above its proved interval, as test parameters."""
    found = []
    for file in PAGES:
        for block in Page.read(file).blocks:
            shown = _SHOWN_EPSILON.search(block.text)
            if shown:
                found.append(pytest.param(*map(Decimal, shown.groups()), id=block.where))
    return found


@pytest.mark.parametrize(("epsilon", "lower", "upper"), shown_intervals())
def test_a_shown_interval_contains_the_value_above_it(
    epsilon: Decimal, lower: Decimal, upper: Decimal
) -> None:
    assert lower <= epsilon <= upper


def test_shown_intervals_are_found() -> None:
    assert len(shown_intervals()) >= 2


def blocks_run_elsewhere() -> list[Block]:
    """Return the blocks that name another test."""
    return [block for file in PAGES for block in Page.read(file).blocks if block.run_by]


@pytest.mark.parametrize("block", blocks_run_elsewhere(), ids=lambda block: block.where)
def test_a_named_test_contains_the_commands_of_the_block(block: Block) -> None:
    for runner in block.runners:
        assert _RUNNER.fullmatch(runner), f"{runner} is not a test"
    if block.language == "python":  # the named test runs the page, and says which
        page = block.where.partition(":")[0]
        assert any(page in (ROOT / each).read_text() for each in block.runners), block.runners
        return
    for command in block.commands:
        assert is_in(command, block.runners), f"{command!r} is in none of {block.runners}"


def test_every_target_extra_and_benchmark_on_a_page_is_run_by_a_named_test() -> None:
    runners = sorted({runner for block in blocks_run_elsewhere() for runner in block.runners})
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = {f"make {target}" for target in targets}  # and not: make more of it
    named = {each for file in PAGES for each in _NAMED.findall(file.read_text())}
    commands = {each for each in named if each in made or not each.startswith("make ")}
    assert [each for each in sorted(commands) if not is_in(each, runners)] == []


def is_in(command: str, runners: list[str]) -> bool:
    """Return whether a line of these files has the command's words; options may stand between.

    A … in the command matches any text.
    """
    words = [re.escape(word).replace("…", r"\S*") for word in bare_words(command).split()]
    pattern = r"(?<!\S)" + r"(?: -\S+)* ".join(words) + r"(?!\S)"
    return any(
        re.search(pattern, bare_words(line))
        for runner in runners
        for line in (ROOT / runner).read_text().splitlines()
        if not line.lstrip().startswith("#")
    )


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
    for token in MarkdownIt("commonmark").parse(file.read_text()):
        if token.type == "fence" and token.info in SHELL:
            yield from token.content.replace("\\\n", " ").splitlines()
        for part in token.children or []:
            if part.type == "code_inline":
                yield " ".join(part.content.split())


def calls_in(text: str) -> Iterator[list[str]]:
    """Yield the calls of this project's programs in a text; `a b | c` means b or c."""
    for found in _CALL.finditer(text):
        parts = [each.split() for each in found[1].split(" | ")]
        yield parts[0]
        for other in parts[1:]:
            if re.fullmatch(
                "[a-z-]+", " ".join(other)
            ):  # else another program reads what this one prints
                yield [*parts[0][:-1], *other]


def unknown_part(words: list[str]) -> str | None:
    """Return the first option or command of a call that its program does not have."""
    command = programs()[words[0]]
    for word in words[1:]:
        if word == "…":
            return None
        option = re.match(r"--?[a-zA-Z][\w-]*", word)
        if option:
            if option[0] not in (
                "--help",
                "-h",
                *(o for each in command.params for o in each.opts),
            ):
                return f"{option[0]} of {command.name}"
        elif hasattr(command, "commands"):
            if word not in command.commands and hasattr(command, "default_command"):
                command = command.commands[command.default_command]
                continue
            if word not in command.commands:
                return f"{word!r} of {command.name}"
            command = subcommand(command, word)
    return None


@pytest.mark.parametrize("file", PAGES, ids=relative_name)
def test_every_command_and_option_that_a_page_names_exists(file: Path) -> None:
    options = {"--help", *(o for each in programs().values() for o in all_options(each))}
    for text in quoted_code(file):
        for words in calls_in(text):
            assert unknown_part(words) is None, f"{text}: there is no {unknown_part(words)}"
        for target in re.findall(r"^make ([a-z-]+)", text):
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"make {target}"
        alone = re.match(r"(--[a-z-]+)(?: |$)", text)
        assert alone is None or alone[1] in options, text
        for path in re.findall(r"(?:tests|benchmarks|scripts|\.ci)/[\w/.-]+\w", text):
            assert (ROOT / path).exists(), path


def subcommand(command: Any, name: str) -> Any:
    """Return a command of a group; those of `accountant` are loaded by name."""
    is_lazy = command is programs()["accountant"]
    return cli.load_command(name) if is_lazy else command.commands[name]


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


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("console", "accountant epsilon --no-such-option\n"),
        ("console", "false | true\n"),
        ("console", "$ echo one 1\ntwo 2\n"),
        ("console", "$ echo one 1\none 2\n"),
        ("console", "$ echo one\n"),
        ("python", "names = 1 / 0\n"),
        ("json", "{'not': 'json'}\n"),
    ],
)
def test_a_wrong_block_fails(language: str, text: str, tmp_path: Path) -> None:
    with (
        Session(tmp_path) as session,
        pytest.raises((AssertionError, ValueError, pytest.fail.Exception)),
    ):
        session.run(Block("page.md:1", language, text))


SHOWN = "ε 1.25\nrun 04d2b86f39d8488bab60883d025be441 ends 2026-11-22T01:46:32Z\n"


@pytest.mark.parametrize(
    "printed",
    [
        SHOWN,
        "ε 1.25\nrun 6ce42d5f591a4049980c0fc4cae04e3c ends 2027-01-02T03:04:05Z\n\n",
    ],
)
def test_identifiers_and_times_may_differ(printed: str) -> None:
    require_shown(SHOWN.splitlines(), printed, "page.md:1", varies=False)


@pytest.mark.parametrize(
    "printed",
    [
        SHOWN.replace("1.25", "1.26"),
        SHOWN.replace("ends", "ended"),
        SHOWN.replace("04d2b86f39d8488bab60883d025be441", "04d2"),
        f"first\n{SHOWN}",
        f"{SHOWN}last\n",
        "".join(reversed(SHOWN.splitlines(keepends=True))),
        SHOWN.splitlines(keepends=True)[0],
        "",
    ],
)
@pytest.mark.parametrize("varies", [False, True])
def test_nothing_else_may_differ(printed: str, varies: bool) -> None:
    with pytest.raises(AssertionError, match="the page shows"):
        require_shown(SHOWN.splitlines(), printed, "page.md:1", varies)


def test_an_ellipsis_stands_for_other_text_only_where_the_block_says_so() -> None:
    shown, printed = ["loss …", "…", "done"], "loss 0.4\nmore\nlines\ndone\n"
    require_shown(shown, printed, "page.md:1", varies=True)
    for other in (printed.replace("done", "failed"), "loss 0.4\ndone\n", f"{printed}more\n"):
        with pytest.raises(AssertionError):
            require_shown(shown, other, "page.md:1", varies=True)
    with pytest.raises(AssertionError):
        require_shown(shown, printed, "page.md:1", varies=False)


def test_a_block_sees_the_results_of_the_blocks_before_it(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.run(Block("page.md:1", "console", "export WHO=me\nmkdir there && cd there\n"))
        session.run(Block("page.md:2", "console", "$ echo $WHO 12 > file && cat file\nme 12\n"))
        session.run(Block("page.md:3", "python", "import os\nwho = os.environ['WHO']\n"))
        session.run(Block("page.md:4", "python", "assert open('file').read() == f'{who} 12\\n'\n"))


@pytest.mark.slow
def test_the_http_reference_shows_the_answers_of_today() -> None:
    from scripts import api_reference

    page = api_reference.PAGE.read_text()
    expected = api_reference.render_reference()
    assert page == expected, "write it again: python scripts/api_reference.py"
