"""Words and phrases that documentation, docstrings, comments and messages avoid.

The rules ask for the field's terms and for plain sentences; docs/glossary.md has the terms. Each
rule names what to write instead.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.support.findings import require_none

ROOT = Path(__file__).parents[2]
SOURCES: Final = (
    "accountant_service",
    "command_words",
    "training_client",
    "scripts",
    "benchmarks",
    "tests",
)
# Their text is copied from elsewhere, or is this list of words.
LEFT_OUT: Final = ("CHANGELOG.md", "docs/api.md", "tests/docs/test_language.py")

# A phrase (a regular expression that ignores case) and what to write instead.
PHRASES: Final = {
    r"\bprocessors?\b": "CPU",
    r"\b(is|are|be|was) no numbers?\b": "is NaN, is not finite",
    r"\bdeviates?\b": "has the standard deviation",
    r"\bnoise deviations?\b|\bof deviation\b": "standard deviation of the noise",
    r"\bas printed\b|\bto the letter\b": "as in the paper",
    r"\btaken for (0|zero)\b": "underflows",
    r"\btrained numbers\b|\ball numbers of (a|the) model\b": "parameters",
    r"\bnumber by number\b": "coordinate by coordinate",
    r"\bhand(s|ed|ing)? out\b": "grant, return, distribute",
    r"\bwho(m)?ever\b": "anyone who",
    r"\bso many (a|an|of each|at once|steps|examples|records)\b": "a number of, n per",
    r"\bit is said\b|\bis said beforehand\b": "the program reports",
    r"\bis none of\b": "unknown NAME; choose one of",
    r"\bthose that are so\b": "name them",
    r"\bis kept of (this|it)\b": "is recorded",
    r"\bnobody has\b|\basked of nobody\b|\basks nobody\b": "say who or what in the active voice",
    r"\bby another way\b": "through a separate channel",
    r"\bfloor of the house\b|\bhouse of the\b": "package, layer",
    r"\bto be had\b": "available",
    r"\bof one's own\b|\bof ones own\b": "its own",
    r"\b(it|that) happens once\b": "takes effect once",
    r"\bwhat(ever)? (a|the) \w+ leaves\b": "name what it is: files, results, remainder",
    r"\bfor want of\b|\bhence\b|\bwherefore\b|\bthereof\b": "because, so, of it",
}
# A docstring's first line says what the thing does or is.
FIRST_WORDS: Final = re.compile(
    r"(What|Whether|How|So many|See|Those|Where|Who|Whose|Which|Why|When)\b"
)
_COMPILED: Final = {re.compile(each, re.IGNORECASE): why for each, why in PHRASES.items()}
_ANY: Final = re.compile("|".join(PHRASES), re.IGNORECASE)
_FIRST_LINE: Final = re.compile(r'"""\s*' + FIRST_WORDS.pattern)
_BETWEEN_STRINGS: Final = re.compile(r"""["']\s*[rRfFbB]{0,2}["']|\\\n""")  # one text in parts
# Words that are right in a single place: the file and a part of the sentence.
ALLOWED: Final = {
    "accountant_service/operations/logs.py": (
        "processors",
    ),  # structlog's own word for a part of its chain
}


@dataclass(frozen=True)
class Finding:
    """A passage that breaks a rule."""

    line: int
    passage: str
    instead: str

    def __str__(self) -> str:
        return f"{self.line}: {self.passage!r} → {self.instead}"


@cache
def files() -> tuple[Path, ...]:
    """Return all files with text for people."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    found += [each for source in SOURCES for each in (ROOT / source).rglob("*.py")]
    found += (ROOT / "accountant_service/web/templates").glob("*.html")
    found += (ROOT / "benchmarks").rglob("*.md")
    left_out = {ROOT / each for each in LEFT_OUT}
    return tuple(sorted(set(found) - left_out))


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs of Markdown, without blocks of code and quoted names."""
    without_blocks = re.sub(
        r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S
    )
    without_code = re.sub(r"`[^`\n]*`", "``", without_blocks)
    line = 1
    for paragraph in re.split(r"(?<=\n)(?=\n)", without_code):
        yield line, paragraph
        line += paragraph.count("\n")


def other_texts(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """Return the texts for people in a file that is not Python, with their first lines' numbers."""
    return prose_of(source) if path.suffix == ".md" else iter([(1, source)])


def may_break_a_rule(source: str) -> bool:
    """Return whether a module has a listed phrase or first word anywhere, in code or in text."""
    joined = _BETWEEN_STRINGS.sub("", source)
    return bool(_ANY.search(source) or _ANY.search(joined) or _FIRST_LINE.search(source))


def read_python(source: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Read a module: comments and strings with a space, and first lines of docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [(each.start[0], each.string) for each in tokens if each.type == tokenize.COMMENT]
    first_lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(value)) if " " in value:
                texts.append((node.lineno, value))
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if docstring := ast.get_docstring(node):
                    line = getattr(node, "lineno", 1)
                    first_lines.append((line, docstring.splitlines()[0]))
    return texts, first_lines


def findings_in(path: Path) -> list[Finding]:
    """Return the passages of a file that break a rule."""
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), ())
    source, is_module = path.read_text(), path.suffix == ".py"
    if is_module and not may_break_a_rule(source):  # parsing every module takes seconds
        return []
    texts, first_lines = read_python(source) if is_module else (other_texts(path, source), [])
    found = [
        Finding(line + text.count("\n", 0, match.start()), " ".join(match[0].split()), instead)
        for line, text in texts
        if _ANY.search(text)
        for pattern, instead in _COMPILED.items()
        for match in pattern.finditer(re.sub(r"[ ]*\n[ ]*(?=\S)", "\n", text))
        if not any(part in match[0] for part in allowed)
    ]
    found += [
        Finding(line, first, 'say what it does or is: "Return the …", "A run\'s …"')
        for line, first in first_lines
        if FIRST_WORDS.match(first)
    ]
    return sorted(found, key=lambda finding: finding.line)


def test_the_text_of_every_file_is_plain() -> None:
    require_none(
        f"{path.relative_to(ROOT)}:{each}" for path in files() for each in findings_in(path)
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""What a run does."""\n', 1),
        ('"""Return whether it fits."""\n', 0),
        ("# one thread per processor\n", 1),
        ('raise ValueError("the loss is no number")\n', 1),
        ('raise ValueError("the loss is no " "number")\n', 1),
        ('"""\nWhat a run does."""\n', 1),
        ("processor = 1\n", 0),
        ('"""Return the noise multiplier, as in the paper."""\n', 0),
    ],
)
def test_the_rules_find_what_they_name(
    text: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(text)
    assert len(findings_in(tmp_path / "module.py")) == count
