"""The texts that outsiders see of the service, by name: a guard of changes that must not show.

`tests/golden/outside.txt` has a digest of each text. To see a difference, write the texts of two
versions into folders, and compare them with `diff -r`:
`python -m tests.support.outside build/outside --documents 700`. `--digests` writes the digests.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import typer
from fastapi import FastAPI
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import accountant_service
from accountant_service import cli, mechanisms
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from accountant_service.web import kind_form
from training_client.client import AccountingService

Json = Any
DIGESTS: Final = Path(__file__).parents[1] / "golden" / "outside.txt"
DOCUMENTS: Final = 40  # of each kind
# of a wrong δ, so that nothing is computed
_PAGES: Final = (
    "/?delta=x",
    "/?kind=fields&delta=x",
    "/?kind=json&delta=x",
    "/plan?delta=x",
    "/import",
    "/sign-in",
)
_NUMBERS: Final = (
    *(0, 1, 2, 3, 10, 100, 600, 60000, -1, 0.01, 0.05, 0.5, 0.9, 1.0, 1.1, 2.5, 30.0, 50.0, 1e-13),
    *(1e-9, 1e6, 1e9, 1e10, 1e300, True, None, "x", "1", [1], {}, [], 10**400),
)
_NAMES: Final = ("noise", "a/b", "kind ", "~")  # of no field


@contextmanager
def _application() -> Iterator[FastAPI]:
    """Yield the application, on a ledger of its own."""
    with TemporaryDirectory() as folder:
        yield create_app(Settings(database_url=f"sqlite:///{folder}/ledger.db"))


def _openapi() -> Iterator[tuple[str, str]]:
    """Yield each part of the OpenAPI document."""
    with _application() as app:
        document = app.openapi()
    yield "openapi", json.dumps({name: list(part) for name, part in document.items()})
    for path, operations in document.pop("paths").items():
        yield f"openapi {path}", json.dumps(operations, indent=1, ensure_ascii=False)
    for name, schema in document.pop("components")["schemas"].items():
        yield f"openapi {name}", json.dumps(schema, indent=1, ensure_ascii=False)


def _help() -> Iterator[tuple[str, str]]:
    """Yield the help of each command."""
    words = [[name] for name in typer.main.get_command(cli.app).commands]  # type: ignore[attr-defined]
    groups = {name: cli.load_command(name) for (name,) in words}
    words += [[a, b] for a, each in groups.items() for b in getattr(each, "commands", ())]
    for each in ([], *words):
        done = CliRunner().invoke(cli.app, [*each, "--help"], env={"COLUMNS": "100"})
        yield " ".join(["accountant", *each, "--help"]), done.output


def _functions() -> Iterator[tuple[str, str]]:
    """Yield the signature and docstring of each function, and of the typed client's methods."""
    found: dict[str, Any] = {
        name: getattr(accountant_service, name)
        for name in accountant_service.__all__
        if name != "__version__"
    }
    found |= {
        f"AccountingService.{name}": each
        for name, each in inspect.getmembers(AccountingService, inspect.isfunction)
        if not name.startswith("_")
    }
    for name, function in found.items():
        yield name, f"{inspect.signature(function)}\n{inspect.getdoc(function)}"


class _Fields(HTMLParser):
    """The fields of a page's forms, each on a line: its attributes, or the text of its label."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._is_label = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Write down a form's element."""
        self._is_label = tag in ("label", "legend", "option", "button")
        if self._is_label or tag in ("form", "input", "select", "textarea"):
            self.lines.append(f"{tag} {sorted(attrs)}")

    def handle_data(self, data: str) -> None:
        """Write down the text of a label, an option or a button."""
        if self._is_label and data.strip():
            self.lines.append(" ".join(data.split()))


def _pages() -> Iterator[tuple[str, str]]:
    """Yield the form fields of the pages, and those of every kind of mechanism."""
    with _application() as app, TestClient(app) as client:
        for path in _PAGES:
            fields = _Fields()
            fields.feed(client.get(path).text)
            yield f"page {path}", re.sub(r"[0-9a-f]{16,}", "…", "\n".join(fields.lines))
    for kind in kind_form.SCHEMAS:
        group = kind_form.describe(kind_form.read_texts({"release_kind": kind}))
        yield f"form {kind}", repr(group)


def _documents(count: int) -> Iterator[tuple[str, str]]:
    """Yield for each kind what is said about random documents: the mechanism, or its faults."""
    schemas = kind_form.SCHEMAS
    for kind in schemas:
        numbers, lines = random.Random(kind), []
        for _ in range(count):
            document = _random_document(numbers, schemas, kind, 0)
            lines.append(json.dumps(document, ensure_ascii=False)[:2000])
            lines.append(json.dumps(_describe(document), ensure_ascii=False))
        yield f"documents {kind}", "\n".join(lines)


def _random_document(
    numbers: random.Random, schemas: Mapping[str, Json], kind: str, depth: int
) -> Json:
    """Return a kind's example with some of its fields changed, left out or added."""
    schema = schemas[kind]
    document = json.loads(json.dumps(schema["examples"][0]))
    for name, field in schema["properties"].items():
        drawn = numbers.random()
        if name == "kind" or drawn > (0.6 if name in document else 0.1):
            continue
        if drawn < 0.05:
            document.pop(name, None)
        elif "$ref" in field and drawn < 0.5 and depth < 3:
            inner = numbers.choice([*schemas])
            document[name] = _random_document(numbers, schemas, inner, depth + 1)
        elif "$ref" in field.get("items", {}) and drawn < 0.5 and depth < 3:
            inners = numbers.choices([*schemas], k=numbers.randint(0, 3))
            document[name] = [
                _random_document(numbers, schemas, inner, depth + 1) for inner in inners
            ]
        else:
            document[name] = _random_value(numbers, field, document.get(name))
    if numbers.random() < 0.03:
        document[numbers.choice(_NAMES)] = 1
    if numbers.random() < 0.02:
        document["kind"] = numbers.choice(["", None, 1, "Gaussian", "dpsgd"])
    return document


def _random_value(numbers: random.Random, field: Json, example: Json) -> Json:
    """Return a value of a field: mostly one that may be valid."""
    drawn = numbers.random()
    if drawn < 0.25:
        return numbers.choice(_NUMBERS)
    if "enum" in field:
        return numbers.choice(field["enum"])
    if isinstance(example, list) and "$ref" not in field.get("items", {}):
        return [each * numbers.choice([1, 1, 1.001, 0.5, 2]) for each in example]
    if isinstance(example, dict):
        return example | {
            numbers.choice([*example, "shape", "distribution"]): numbers.choice(
                [*_NUMBERS, "geometric", "negative_binomial"]
            )
        }
    if isinstance(example, int | float):
        return type(example)(example * numbers.choice([0.5, 1, 2, 10]))
    return numbers.choice(_NUMBERS)


def _describe(document: Json) -> Json:
    """Return what is said about a document."""
    try:
        read = mechanisms.from_json(document)
    except mechanisms.MechanismError as error:
        return error.faults
    form = mechanisms.canonical_form(read)
    sizes = list(mechanisms.find_dataset_size_mismatches(1000, read))
    return [
        mechanisms.to_json(read),
        read.describe_step(),
        form.hash,
        form.steps,
        repr(form.premises),
        repr(sizes),
    ]


SURFACES: Final[Mapping[str, Callable[[], Iterator[tuple[str, str]]]]] = {
    "openapi": _openapi,
    "help": _help,
    "functions": _functions,
    "pages": _pages,
    "documents": lambda: _documents(DOCUMENTS),
}


def digest(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_digests() -> dict[str, dict[str, str]]:
    """Return the digests by surface and name, as they are written down."""
    found: dict[str, dict[str, str]] = {}
    for line in DIGESTS.read_text().splitlines():
        surface, hashed, name = line.split(" ", 2)
        found.setdefault(surface, {})[name] = hashed
    return found


def main() -> None:
    """Write the texts into a folder, or their digests into the repository."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="folder for the texts")
    parser.add_argument(
        "--documents", type=int, default=DOCUMENTS, help="of each kind of mechanism"
    )
    parser.add_argument("--digests", action="store_true", help=f"write {DIGESTS.name}")
    options = parser.parse_args()
    surfaces = {**SURFACES, "documents": lambda: _documents(options.documents)}
    lines = []
    for surface, texts in surfaces.items():
        for name, text in texts():
            lines.append(f"{surface} {digest(text)} {name}\n")
            if options.folder:
                file = options.folder / surface / name.replace("/", ":")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n")
    if options.digests:
        DIGESTS.write_text("".join(lines))


if __name__ == "__main__":
    main()
