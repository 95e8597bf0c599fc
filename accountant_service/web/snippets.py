"""Snippets that ask the page's question with curl, the command line or Python."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, Final

_OPTIONS: Final = {
    "noise_multiplier": "-s",
    "sample_rate": "-q",
    "steps": "-t",
    "dataset_size": "-n",
    "batch_size": "-b",
    "epochs": "-e",
    "sampling": "--sampling",
    "delta": "-d",
    "neighbouring_relation": "--neighbouring-relation",
}
_PYTHON: Final = """\
from accountant_service import calculator, guarantee, mechanisms

run = mechanisms.from_json({run})
relation = guarantee.NeighbouringRelation({relation!r})
answer = calculator.epsilon(run, delta={delta!r}, relation=relation)
print(answer.epsilon, answer.status, answer.certified)"""


def curl(address: str, path: str, body: Mapping[str, Any]) -> str:
    """Return a curl command that sends a request to the API."""
    url = shlex.quote(address.rstrip("/") + path)
    text = shlex.quote(json.dumps(body))
    return f"curl -s {url} \\\n  -H 'Content-Type: application/json' \\\n  -d {text}"


def command(body: Mapping[str, Any]) -> str:
    """Return an `accountant compare` command line for a request's mechanism."""
    mechanism = body["mechanism"]
    is_run = mechanism["kind"] == "dp_sgd"
    given = {**(mechanism if is_run else {}), **body}
    options = [] if is_run else [f"-m {shlex.quote(json.dumps(mechanism, ensure_ascii=False))}"]
    options += [
        f"{option} {shlex.quote(str(given[name]))}"
        for name, option in _OPTIONS.items()
        if name in given
    ]
    return " ".join(["accountant compare", *options])


def python(body: Mapping[str, Any], relation: str) -> str:
    """Return Python code that computes the answer to a request."""
    return _PYTHON.format(run=dict(body["mechanism"]), relation=relation, delta=body["delta"])
