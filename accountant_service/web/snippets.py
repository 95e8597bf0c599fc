"""Snippets that ask the page's question with curl, the command line or Python."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, Final

from accountant_service.writing.command_lines import write_options
from accountant_service.writing.number_format import shorten_exponents

Json = Mapping[str, Any]

_SHORT_MAX: Final = 1e6  # larger whole numbers may be shorter with an exponent
_PYTHON: Final = """\
from accountant_service import epsilon

answer = epsilon({arguments})
print(answer.epsilon, answer.status, answer.certified)"""


def curl(address: str, path: str, body: Json) -> str:
    """Return a curl command that sends a request to the API."""
    url = shlex.quote(address.rstrip("/") + path)
    text = shlex.quote(_dump(body))
    return f"curl -s {url} \\\n  -H 'Content-Type: application/json' \\\n  -d {text}"


def command(body: Json) -> str:
    """Return an `accountant compare` command line for a request's mechanism."""
    mechanism = body["mechanism"]
    composed = mechanism["kind"] == "composed"
    parts: list[Json] = mechanism["mechanisms"] if composed else [mechanism]
    runs = [each for each in parts if each["kind"] == "dp_sgd"]
    words = ["accountant compare"]
    words += [write_options(run) for run in runs[:1]]
    words += [f"--and {shlex.quote(write_options(run))}" for run in runs[1:]]
    words += [f"-m {shlex.quote(_dump(each))}" for each in parts if each not in runs]
    return " ".join([*words, write_options(body)])


def python(body: Json) -> str:
    """Return Python code that computes the answer to a request."""
    mechanism = body["mechanism"]
    given = {name: value for name, value in body.items() if name != "mechanism"}
    if mechanism["kind"] == "dp_sgd":
        given |= {name: value for name, value in mechanism.items() if name != "kind"}
    else:
        given["mechanism"] = mechanism
    arguments = ", ".join(
        f"{name}={shorten_exponents(repr(_shorten(value)))}" for name, value in given.items()
    )
    return _PYTHON.format(arguments=arguments)


def _dump(document: Json) -> str:
    """Return a document as JSON, with numbers as the pages write them."""
    return shorten_exponents(json.dumps(_shorten(document), ensure_ascii=False))


def _shorten(value: Any) -> Any:
    """Return a JSON value that is equal, with 10 in the place of 10.0."""
    match value:
        case float() if value.is_integer() and abs(value) < _SHORT_MAX:
            return int(value)
        case Mapping():
            return {name: _shorten(each) for name, each in value.items()}
        case list():
            return [_shorten(each) for each in value]
    return value
