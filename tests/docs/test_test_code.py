"""The tests patch public names or say why not, and share their helpers in tests/support/."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.support.pages import ROOT

PATCHES = ("setattr", "delattr", "setitem", "delitem")
REASON = "# private: "


@functools.cache
def modules() -> dict[str, tuple[ast.Module, list[str]]]:
    """Return every file of the tests: its tree and its lines."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    return {name: (ast.parse(text), text.splitlines()) for name, text in texts.items()}


def is_private(name: str) -> bool:
    """Return whether a part of a dotted name is private."""
    return any(each.startswith("_") and not each.startswith("__") for each in name.split("."))


def private_patches(tree: ast.AST) -> Iterator[ast.Call | ast.Assign]:
    """Yield the patches of a private name, or of something inside one, and assignments to one.

    An object's own attributes, and those of a test's own classes, are assigned to by `self`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = [each for each in node.targets if isinstance(each, ast.Attribute)]
            if any(is_private(each.attr) and not is_self(each.value) for each in targets):
                yield node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in PATCHES
        ):
            names = [
                each.value if isinstance(each, ast.Constant) else ast.unparse(each)
                for each in node.args[:2]
            ]
            if any(isinstance(name, str) and is_private(name) for name in names):
                yield node


def is_self(node: ast.expr) -> bool:
    """Return whether an expression is `self`."""
    return isinstance(node, ast.Name) and node.id == "self"


def unexplained(tree: ast.AST, lines: list[str]) -> list[int]:
    """Return the lines of private patches without a reason, in them or above without a gap."""
    found = []
    for call in private_patches(tree):
        first = call.lineno - 1
        while first > 0 and lines[first - 1].strip():  # a reason covers the lines below it
            first -= 1
        if not any(REASON in line for line in lines[first : call.end_lineno]):
            found.append(call.lineno)
    return found


@pytest.mark.slow
def test_a_patch_of_a_private_name_says_why() -> None:
    findings = [
        f"{name}:{line}"
        for name, (tree, lines) in modules().items()
        for line in unexplained(tree, lines)
    ]
    assert findings == [], f"test through what is public, or say why not: {REASON}…"


def test_unexplained_patches_are_found() -> None:
    text = (
        "monkeypatch.setattr(module, '_name', 1)\n\n"
        "# private: it has no other door\n"
        "monkeypatch.setattr(module, '_name', 1)\n"
        "\npatch.setattr(module._inner, 'name', 1)\n"
        "patch.setattr(module, '__code__', 1)  # a public name\n"
        "patch.setattr('module.Class._name', 1)  # private: the same\n"
        "\nself.patch.setattr(module, '_name', 1)\n"
        "\nmodule._name = 1\n"
        "self._name = 1  # its own\n"
    )
    assert sorted(unexplained(ast.parse(text), text.splitlines())) == [1, 6, 10, 12]


@pytest.mark.slow
def test_no_two_modules_define_the_same_helper() -> None:
    places = defaultdict(set)
    for name, (tree, _) in modules().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_"):
                body = [each for each in node.body if not is_docstring(each)]
                places["\n".join(map(ast.unparse, body))].add(f"{name}:{node.name}")
    shared = [
        sorted(where)
        for where in places.values()
        if len({each.partition(":")[0] for each in where}) > 1
    ]
    assert shared == [], "what two modules need stands in tests/support/"


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is a string by itself."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
