"""Run what the documentation shows: every fenced block of a page, in order.

A page is a session. Its folder is a copy of the repository; what a shell block exports, where it
changes to and what a Python block defines is there in the next block of that kind. `accountant
serve` is started in the background, and by itself where a page needs a service and starts none.
The addresses of the pages are replaced by free ports.

A comment before a block says what is different about it, and why:

    <!-- run by .ci/run, tests/e2e/test_commands.py: why there and not here -->
    <!-- slow: what takes so long -->
    <!-- varies: why … in the shown output stands for text that no two runs print alike -->
    <!-- fails: why the last command of the block ends with an error, as it must -->

The output that is shown after a command must be its whole output (`tests/support/shown_output.py`).
`python -m scripts.page_output PAGE` writes it into the page.

A comment of a whole page says that all of it is slow, or which programs or packages it needs;
`postgresql` is a server of its own. Where a page clones the repository it goes on in the clone.

    <!-- slow page: why -->
    <!-- needs: sqlite3 curl -->
    <!-- packages: peft -->
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, Self

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.support.databases import free_port, private_server
from tests.support.overlay import create_overlay
from tests.support.shown_output import require_shown

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL: Final = frozenset({"console", "sh"})
LANGUAGES: Final = SHELL | {"python", "json", "text", "diff"}
SECONDS: Final = 400  # for a block of commands
Comparison = Callable[[list[str], str, str, bool], None]

_COMMENT: Final = re.compile(
    r"<!--\s*(run by|slow page|slow|varies|fails|needs|packages)\b:?\s*(.*?)\s*-->", re.DOTALL
)
_SERVE: Final = re.compile(r"^(?:\w+=\S+ )*(?:\.venv/bin/)?accountant serve\b.*$", re.MULTILINE)
_SERVICE: Final = re.compile(r"(127\.0\.0\.1|localhost):8000\b")
_ASKS: Final = re.compile(_SERVICE.pattern + r"|\baccountant-train (run|compare|together)\b")
_DATABASE: Final = re.compile(r"(127\.0\.0\.1|localhost):5432\b")
_ORIGIN: Final = "<where you have it from>"
_INSTALL: Final = "make install\n"
_LINK_ENVIRONMENT: Final = (
    f"mkdir .venv && ln -s {sys.prefix}/* .venv && touch -d tomorrow .venv/.ready"
)
_NOT_COPIED: Final = frozenset(
    {".git", ".venv", ".venv-flower", "data", "runs", "build", "dist", ".mypy_cache"}
)
# What is done before and after a script: the last one's variables and folder, and what is left.
_BEFORE: Final = """
set -aeuo pipefail
[[ ! -e "$STATE" ]] || { source "$STATE"; cd "$PWD"; }
trap 'code=$?; { export -p; declare -f; } > "$STATE"; exit $code' EXIT
"""
# A program that is given blocks of Python, a line of JSON each, and says that it is done.
_INTERPRETER: Final = """
import json, os, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    block = json.loads(line)
    os.environ.update(block["environment"])
    os.chdir(block["folder"])
    sys.path[:0] = [] if block["folder"] in sys.path else [block["folder"]]
    try:
        exec(compile(block["code"], block["where"], "exec"), names)
        print("\\n<done>", flush=True)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        print("\\n<failed>", flush=True)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        where: page and line.
        language: of the fence.
        text: between the fences.
        run_by: the files that run it in the place of its page, and why, if they do.
        slow: what takes so long, if it does.
        varies: why its output differs from run to run where it shows …, if it does.
        fails: why its last command ends with an error, if it does.
    """

    where: str
    language: str
    text: str
    run_by: str | None = None
    slow: str | None = None
    varies: str | None = None
    fails: str | None = None

    @property
    def here(self) -> bool:
        """True if the block runs in its page's session."""
        return not self.run_by

    @property
    def runners(self) -> list[str]:
        """The test files that run the block instead, if a comment names any."""
        return (self.run_by or "").partition(": ")[0].split(", ")

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, without comments and shown output."""
        prompted = re.search(r"^\$ ", self.text, re.MULTILINE)
        parts = [each for each, _ in split_commands(self.text)] if prompted else [self.text]
        lines = "".join(parts).replace("\\\n", " ").splitlines()
        plain = (re.sub(r"(^|\s)#.*", "", line) for line in lines)
        return [each for line in plain for each in line.strip().split(" && ") if each]


@cache
def parse_page(file: Path) -> tuple[Token, ...]:
    """Return the tokens of a page."""
    return tuple(MarkdownIt("commonmark").parse(file.read_text()))


@dataclass(frozen=True)
class Page:
    """A page's blocks, in order, and the programs that they need."""

    blocks: tuple[Block, ...]
    needs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a page; refuse code blocks that would neither run nor name a test."""
        blocks: list[Block] = []
        needs: list[str] = []
        packages: list[str] = []
        notes: dict[str, str] = {}
        slow_page: str | None = None
        for token in parse_page(file):
            where = f"{file.name}:{(token.map or [0])[0] + 1}"
            if token.type == "html_block":
                notes |= dict(_COMMENT.findall(token.content))
                given = all(notes.values()) and ": " in notes.get("run by", ": ")
                assert given, f"{where}: a comment without its reason"
                needs += notes.pop("needs", "").split()
                packages += notes.pop("packages", "").split()
                slow_page = notes.pop("slow page", slow_page)
            elif token.type == "fence":
                assert token.info in LANGUAGES, f"{where}: {token.info!r} not in {LANGUAGES}"
                reasons = [notes.pop(each, None) for each in ("run by", "slow", "varies", "fails")]
                reasons[1] = reasons[1] or slow_page
                blocks.append(Block(where, token.info, token.content, *reasons))
            else:
                assert token.type != "code_block", f"{where}: fence it, and say what it is"
            if token.type != "html_block":
                assert not notes, f"{where}: a comment that belongs to no block"
        return cls(tuple(blocks), tuple(needs), tuple(packages))


_EMPTY_PAGE: Final = Page(())


class Session:
    """Runs the blocks of a page; use as a context manager.

    Args:
        folder: of its own.
        page: whose programs and packages are needed.
        compare: called with the lines shown after a command, its output, the page and line, and
            whether the output varies.
    """

    def __init__(
        self, folder: Path, page: Page = _EMPTY_PAGE, compare: Comparison = require_shown
    ) -> None:
        self._compare = compare
        self._home = folder / "repository"
        self._state = folder / "state"
        self._page = page
        self._interpreter = Path(sys.executable)
        self._closing = ExitStack()
        self._port = free_port()
        self._service: subprocess.Popen[str] | None = None
        self._database: int | None = None
        self._python: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        copy_repository(self._home)
        (self._home / ".venv").symlink_to(sys.prefix)
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("ACCOUNTANT_")
        } | {
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self._home),
            "STATE": str(self._state),
            "ACCOUNTANT_SERVICE": f"http://127.0.0.1:{self._port}",
            "CURL_HOME": str(self._state.parent),
        }
        (self._state.parent / ".curlrc").write_text("fail-with-body\n")
        for program in self._page.needs:
            if program == "postgresql":
                self._database = self._closing.enter_context(private_server()).port
                self._environment |= {"PGHOST": "127.0.0.1", "PGPORT": str(self._database)}
                self._environment |= {"PGUSER": "postgres"}
            elif shutil.which(program) is None:
                assert not os.environ.get("CI"), f"{program} is needed"
                pytest.skip(f"no {program} on this machine")
        if self._page.packages:
            overlay = self._state.with_name("overlay")
            self._interpreter = create_overlay(overlay, self._page.packages)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def run(self, block: Block) -> None:
        """Run a block, and require the output that the page shows."""
        match block.language:
            case "json":
                json.loads(block.text)
            case "python":
                self._interpret(block)
            case "console" if re.search(r"^\$ ", block.text, re.MULTILINE):
                commands = list(split_commands(block.text))
                for at, (command, shown) in enumerate(commands, start=1):
                    fails = bool(block.fails) and at == len(commands)
                    output = self._shell(command, block.where, fails)
                    self._compare(shown, output, block.where, bool(block.varies))
            case "console" | "sh":
                self._shell(block.text, block.where, bool(block.fails))

    def _shell(self, script: str, where: str, fails: bool) -> str:
        """Run a shell script and return its output; services start in the background."""
        output, done = "", 0
        for serve in _SERVE.finditer(script):
            output += self._script(script[done : serve.start()], where)
            self._serve(serve[0])
            done = serve.end()
        return output + self._script(script[done:], where, fails)

    def _script(self, script: str, where: str, fails: bool = False) -> str:
        """Run a shell script with the session's variables and folder; return its output."""
        if not script.strip():
            return ""
        done = subprocess.run(
            ["bash", "-c", _BEFORE + self._here(script)],
            cwd=self._home,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        as_it_should = (done.returncode != 0) == fails
        assert as_it_should, f"{where}: exit code {done.returncode}\n{script}{done.stdout}"
        return done.stdout

    def _interpret(self, block: Block) -> None:
        """Run a Python block in the session's interpreter."""
        if self._python is None:
            self._python = self._background([str(self._interpreter), "-u", "-c", _INTERPRETER])
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        exported = self._exported()
        told = {"code": self._here(block.text), "where": block.where, "environment": exported}
        told["folder"] = exported["PWD"]
        self._python.stdin.write(json.dumps(told) + "\n")
        self._python.stdin.flush()
        said: list[str] = []
        for line in self._python.stdout:
            if line == "<done>\n":
                return
            said.append(line)
            if line == "<failed>\n":
                break
        pytest.fail(f"{block.where}:\n{''.join(said)}")

    def _exported(self) -> dict[str, str]:
        """Return the environment variables that the shell blocks so far have set."""
        listed = subprocess.run(
            ["bash", "-c", _BEFORE + "env -0"],
            cwd=self._home,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return dict(each.split("=", 1) for each in listed.stdout.split("\0") if each)

    def _here(self, text: str) -> str:
        """Return a text with the page's addresses replaced by the session's."""
        if _ORIGIN in text:
            text = text.replace(_ORIGIN, str(self._committed()))
            text = text.replace(_INSTALL, f"{_LINK_ENVIRONMENT}\n{_INSTALL}")
        if _ASKS.search(text) and self._service is None:
            self._serve("accountant serve")
        text = _SERVICE.sub(rf"\1:{self._port}", text)
        return _DATABASE.sub(rf"\1:{self._database}", text)

    def _committed(self) -> Path:
        """Commit this copy to git and return it; drop this environment from the PATH.

        A clone of it finds this environment in place of one that it would install. CI installs
        everything on a clean clone before any test.
        """
        ours = str(Path(sys.executable).parent)
        path = [each for each in os.environ["PATH"].split(":") if each != ours]
        self._environment |= {"PATH": ":".join(path), "PYTHONPATH": ""}
        git = ["git", "-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
        linked = [":!.venv", ":!data"]
        for command in (["init"], ["add", "--all", ".", *linked], ["commit", "--message=all"]):
            subprocess.run([*git, *command], cwd=self._home, check=True, stdout=subprocess.DEVNULL)
        return self._home

    def _serve(self, command: str) -> None:
        """Start the service and wait until it answers; stop one that the page started before."""
        if self._service is not None:
            end(self._service)
        command = re.sub(r" --port \d+| +#.*$", "", command)
        script = f"{_BEFORE}trap - EXIT\nexec env {command} --port {self._port}"
        log = self._home.with_name("service.log")
        with log.open("w") as said:
            self._service = self._background(["bash", "-c", script], said)
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=1):
                    return
            except OSError:
                ended = self._service.poll() is not None or time.monotonic() > deadline
                assert not ended, f"{command} does not answer:\n{log.read_text()}"
                time.sleep(0.1)

    def _background(
        self, command: list[str], output: IO[str] | int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start a process in the background, which is stopped at the end of the session."""
        process = subprocess.Popen(
            command,
            cwd=self._home,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._closing.callback(end, process)
        return process


def copy_repository(home: Path) -> None:
    """Copy the repository without results and caches; the copy shares only downloaded data."""
    shutil.copytree(ROOT, home, ignore=_left_out)
    (ROOT / "data").mkdir(exist_ok=True)
    (home / "data").symlink_to(ROOT / "data")


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return the names at the root that are not copied: results, caches and the like."""
    return {each for each in names if each in _NOT_COPIED} if Path(folder) == ROOT else set()


def end(process: subprocess.Popen[Any]) -> None:
    """Stop a process group, by force after 20 seconds."""
    if process.returncode is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def split_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command after a `$` prompt, with the lines shown as its output."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        last = next(at for at, line in enumerate(lines) if not line.endswith("\\"))
        yield "\n".join(lines[: last + 1]) + "\n", lines[last + 1 :]
