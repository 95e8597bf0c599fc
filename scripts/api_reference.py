"""Write docs/api.md: every call of the HTTP API, with the service's answer to an example."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from fastapi.testclient import TestClient

from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.ledger.api_keys import Scope
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from accountant_service.writing import number_format
from scripts.page_parts import DOCS, enclose_part

PAGE: Final = DOCS / "api.md"
LISTED: Final = 2  # shown items of a long list
ROW_MIN: Final = 50  # characters of a row of a table that is shown once only
OBJECT_MIN: Final = 100  # characters of an object that is shown once only
FIELDS_MIN: Final = 8  # fields of an object that another one contains, for which … stands
DIGITS: Final = 6  # shown digits of a number: with four, ε of one step more is the same
WRITTEN_AT: Final = 1795278815  # the time that the page's examples show
TITLES: Final = {"computation": "Computations", "ledger": "The ledger", "keys": "Keys"}
RUN: Final = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000}
SHORT: Final = RUN | {"steps": 100}

# In the order of the page. The name in a path comes from the answer to an earlier call.
DATASET: Final = {"name": "patients", "size": 60000, "budget": {"epsilon": 3.0, "delta": 1e-5}}
CALLS: Final[list[tuple[str, str, Any]]] = [
    ("POST", "/v1/epsilon", {"mechanism": RUN, "delta": 1e-5}),
    ("POST", "/v1/delta", {"mechanism": RUN, "epsilon": 2.0}),
    (
        "POST",
        "/v1/noise-multiplier",
        {"sample_rate": 0.01, "steps": 1000, "epsilon": 2.0, "delta": 1e-5},
    ),
    (
        "POST",
        "/v1/steps",
        {"noise_multiplier": 1.1, "sample_rate": 0.01, "epsilon": 2.0, "delta": 1e-5},
    ),
    (
        "POST",
        "/v1/sample-rate",
        {"noise_multiplier": 1.1, "steps": 1000, "epsilon": 2.0, "delta": 1e-5},
    ),
    (
        "POST",
        "/v1/solve",
        {
            "mechanism": {
                "kind": "repeated",
                "count": 3,
                "mechanism": {"kind": "laplace", "noise_multiplier": None},
            },
            "parameter": "/mechanism/noise_multiplier",
            "epsilon": 1.0,
            "delta": 0,
        },
    ),
    ("POST", "/v1/compare", {"mechanism": RUN, "delta": 1e-5, "methods": ["pld", "gdp_clt"]}),
    (
        "POST",
        "/v1/curve",
        {"mechanism": RUN, "delta": 1e-5, "methods": ["pld", "zcdp"], "points": 3},
    ),
    ("POST", "/v1/trade-off", {"mechanism": RUN, "prior": 0.5, "points": 3}),
    (
        "POST",
        "/v1/plan",
        {
            "epsilon": 2.0,
            "delta": 1e-5,
            "dataset_size": 60000,
            "epochs": 20,
            "batch_size": 256,
            "sampling": "poisson",
            "points": 2,
        },
    ),
    (
        "POST",
        "/v1/import",
        {
            "document": {"history": [[1.1, 0.01, 1000]], "mechanism": "rdp"},
            "delta": 1e-5,
            "epsilon": 1.2,
        },
    ),
    (
        "POST",
        "/v1/batch",
        {"requests": [{"path": "/v1/epsilon", "body": {"mechanism": RUN, "delta": 1e-5}}]},
    ),
    ("GET", "/v1/methods", None),
    ("POST", "/v1/datasets", DATASET),
    ("GET", "/v1/datasets", None),
    ("GET", "/v1/datasets/{name}", None),
    ("POST", "/v1/datasets/{name}/quotes", {"mechanism": RUN}),
    ("POST", "/v1/datasets/{name}/quotes/batch", {"mechanisms": [RUN, SHORT]}),
    (
        "POST",
        "/v1/datasets/{name}/reservations",
        {"mechanism": SHORT, "lease_seconds": 3600.0, "purpose": "a first model"},
    ),
    ("GET", "/v1/datasets/{name}/reservations", None),
    ("GET", "/v1/reservations/{identifier}", None),
    ("POST", "/v1/reservations/{identifier}/grants", {"steps": 50, "sequence": 0}),
    ("POST", "/v1/reservations/{identifier}/renew", {"lease_seconds": 7200.0}),
    ("POST", "/v1/reservations/{identifier}/commit", {"clip_norm": 1.0}),
    ("POST", "/v1/reservations/{identifier}/release", {}),
    ("GET", "/v1/reservations/{identifier}/certificate", None),
    ("GET", "/v1/reservations/{identifier}/report", None),
    ("GET", "/v1/datasets/{name}/report", None),
    ("GET", "/v1/datasets/{name}/running-total", None),
    ("GET", "/v1/datasets/{name}/entries", None),
    ("GET", "/v1/entries", None),
    ("GET", "/v1/events", None),
    ("PUT", "/v1/datasets/{name}/caps/teams/{team}", {"share": 0.3}),
    ("PUT", "/v1/datasets/{name}/caps/keys/{key_id}", {"share": 0.2}),
    ("GET", "/v1/datasets/{name}/caps", None),
    ("DELETE", "/v1/datasets/{name}/caps/teams/{team}", None),
    ("DELETE", "/v1/datasets/{name}/caps/keys/{key_id}", None),
    (
        "POST",
        "/v1/reservations",
        {"datasets": ["patients", "patients-2027"], "mechanism": SHORT},
    ),
    ("POST", "/v1/quotes", {"datasets": ["patients", "patients-2027"], "mechanism": SHORT}),
    ("PUT", "/v1/series/{series}", {"budget": {"epsilon": 1.0, "delta": 1e-9}}),
    ("PUT", "/v1/series/{series}/datasets/{label}", {"size": 1400}),
    ("PUT", "/v1/series/{series}/caps/teams/{team}", {"share": 0.3}),
    ("PUT", "/v1/series/{series}/caps/keys/{key_id}", {"share": 0.2}),
    ("GET", "/v1/series", None),
    ("GET", "/v1/series/{series}", None),
    ("GET", "/v1/series/{series}/window", None),
    (
        "POST",
        "/v1/series/{series}/quotes",
        {"last": 1, "mechanism": {"kind": "laplace", "noise_multiplier": 10.0}},
    ),
    ("DELETE", "/v1/series/{series}/caps/teams/{team}", None),
    ("DELETE", "/v1/series/{series}/caps/keys/{key_id}", None),
    ("POST", "/v1/datasets/{name}/reference/quotes", {"mechanism": SHORT}),
    ("POST", "/v1/datasets/{name}/reference", {"mechanism": SHORT}),
    ("POST", "/v1/datasets/{name}/close", {}),
    ("DELETE", "/v1/datasets/{name}", None),
    (
        "POST",
        "/v1/keys",
        {"scopes": ["run"], "name": "trainer", "datasets": ["patients"], "team": "vision"},
    ),
    ("GET", "/v1/keys", None),
    ("PATCH", "/v1/keys/{identifier}", {"requests_per_minute": 600}),
    ("DELETE", "/v1/keys/{identifier}", None),
    ("GET", "/healthz", None),
    ("GET", "/readyz", None),
]

INTRODUCTION: Final = """# The HTTP API

Every call, what it takes and what it answers. `scripts/api_reference.py` makes the calls and
writes this page. The service shows the same as OpenAPI at `/openapi.json`, and as a page at
`/docs`.

* **Bodies** are JSON with finite numbers. Unknown and repeated names are refused.
* **Keys.** Calls of the ledger and of keys need `Authorization: Bearer <key>`, with [the right
  scope](how-to/rotating-keys.md). Computations need one only with
  `ACCOUNTANT_OPEN_COMPUTATION=false`.
* **Writes** to the ledger need an `Idempotency-Key`: a new random value for each, the same one for
  a repeat.
* **Failures** are problems with a stable code: [errors](errors.md).
* **Amounts.** `share` is the used part of a budget. The `epsilon` beside it is the guarantee of
  what was used: it does not grow in proportion. A reservation's `charge` is what it held at first.
* **Times** are seconds since 1970, in entries and audit events microseconds.
* **Sample rates** are 0, or at least 1e-12.
* **Versions.** `v1` is the contract's version. What a released description of a mechanism means
  never changes. Papers are in the [glossary](glossary.md#the-papers).

Figures and times below are rounded; … stands for the rest of a list, for what differs each time,
and for objects with the fields of an earlier answer.
"""
MECHANISMS: Final = """## Mechanisms

What is released is described by a tree.
"""


class ReferencePage:
    """Builds the API reference page by calling a service in this process."""

    def __init__(self, client: TestClient, token: str) -> None:
        self._client = client
        self._token = token
        self._document: dict[str, Any] = client.get("/openapi.json").json()
        self._schemas = self._document["components"]["schemas"]
        self._known = {
            "name": "patients",
            "team": "vision",
            "key_id": token.split("_")[1],
            "series": "sales",
            "label": "2026-10",
        }
        self._writes = 0
        self._fields: dict[str, str] = {}  # rows of tables that were shown, and their calls
        # Fields of answers and of objects in them, and the calls that showed them first.
        self._answers: dict[tuple[str, ...], str] = {}
        self._shown: dict[tuple[str, ...], str] = {}

    def render_page(self) -> Iterator[str]:
        """Yield the API reference page, section by section."""
        documented = {(method.lower(), path) for method, path, _ in CALLS}
        offered = {
            (method, path)
            for path, methods in self._document["paths"].items()
            for method in methods
            if path != "/metrics"
        }
        assert documented == offered, documented ^ offered
        yield INTRODUCTION
        yield enclose_part("calls", "python scripts/api_reference.py", "\n".join(self._render()))

    def _render(self) -> Iterator[str]:
        """Yield the sections on mechanisms and calls."""
        yield from self._describe_mechanisms()
        last = ""
        for method, path, body in CALLS:
            operation = self._document["paths"][path][method.lower()]
            title = TITLES.get(operation["tags"][-1], "Health and metrics")
            if title != last:
                yield f"## {title}\n"
                last = title
            yield from self._describe_call(method, path, body, operation)
        yield "`GET /metrics`: [operations](operations.md#metrics), in Prometheus' text format.\n"

    def _describe_mechanisms(self) -> Iterator[str]:
        """Yield the fields and an example of every kind of mechanism."""
        yield MECHANISMS
        for option in self._schemas["Mechanism"]["oneOf"]:
            name = option["$ref"].rsplit("/", 1)[1]
            schema = self._schemas[name]
            kind = schema["properties"]["kind"]
            yield f"### `{kind.get('const') or kind['enum'][0]}`\n"
            if "description" in schema:
                yield f"{schema['description']}\n"
            yield from self._build_field_table(schema, leave_out="kind")
            if schema.get("examples"):
                yield _format_block(schema["examples"][0])

    def _describe_call(self, method: str, path: str, body: Any, operation: Any) -> Iterator[str]:
        """Yield a call's title, description, fields, example body and answer."""
        yield f"### `{method} {path}`\n"
        yield f"{operation.get('description') or operation['summary']}\n"
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "query":
                about = parameter.get("description", "")
                yield f"Query: `{parameter['name']}`{': ' if about else ''}{about}.\n"
            if parameter["in"] == "header":
                yield f"Header: `{parameter['name']}`.\n"
        if body is not None:
            content = operation["requestBody"]["content"]["application/json"]["schema"]
            yield from self._build_field_table(self._resolve(content), call=f"{method} {path}")
            yield _format_block(body)
        answer = self._send_example(method, path, body)
        yield from self._describe_answer(answer, f"{method} {path}")

    def _describe_answer(self, answer: Any, call: str) -> Iterator[str]:
        """Yield the status and the body of an answer, or the call that answers with the same."""
        status = f"Answers {answer.status_code}"
        if not answer.content:
            yield f"{status}, without a body.\n"
            return
        body = _shorten_answer(answer.json())
        first = call if "items" in body else self._answers.setdefault(tuple(body), call)
        if first != call:
            yield f"{status}, as [`{first}`](#{_anchor(first)}).\n"
            return
        yield f"{status}:\n"
        yield _format_block({key: self._cut_repeated(each, call) for key, each in body.items()})

    def _send_example(self, method: str, path: str, body: Any) -> Any:
        """Send a call's example request; make the reservations that it needs first."""
        if path.endswith("/release"):
            self._send("POST", "/v1/datasets/{name}/reservations", {"mechanism": SHORT})
        if path == "/v1/reservations":
            self._send("POST", "/v1/datasets", DATASET | {"name": "patients-2027"})
        if (method, path) == ("DELETE", "/v1/datasets/{name}"):
            path = "/v1/datasets/mistake"
            self._send("POST", "/v1/datasets", DATASET | {"name": "mistake"})
        if "/reference" in path:
            path = path.format(name="sales-2026-10")
        if path.endswith("/window"):
            path += "?last=1"
        answer = self._send(method, path, body)
        if path.endswith("/release"):
            self._send("POST", "/v1/datasets/{name}/reservations", {"mechanism": SHORT})
            self._send("POST", "/v1/reservations/{identifier}/grants", {"steps": 50, "sequence": 0})
            self._send("POST", "/v1/reservations/{identifier}/commit", {"clip_norm": 1.0})
        return answer

    def _send(self, method: str, path: str, body: Any) -> Any:
        """Send a request; store the identifier in its answer for the paths of later calls."""
        self._writes += 1
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Idempotency-Key": f"write-{self._writes}",
        }
        answer = self._client.request(
            method, path.format(**self._known), json=body, headers=headers
        )
        assert answer.is_success, answer.text
        if method == "POST" and "id" in answer.json():
            self._known["identifier"] = answer.json()["id"]
        return answer

    def _build_field_table(self, schema: Any, leave_out: str = "", call: str = "") -> Iterator[str]:
        """Yield a Markdown table of a JSON object's fields; name those that another call shows."""
        required = schema.get("required", ())
        rows: list[str] = []
        shown_before: dict[str, list[str]] = {}
        for name, field in schema.get("properties", {}).items():
            if name == leave_out:
                continue
            row = (
                f"| `{name}` | {self._describe_type(field)} "
                f"| {_format_default(field, name in required)} | {self._describe_range(field)} |\n"
            )
            first = self._fields.setdefault(row, call) if call else ""
            if first == call or len(row) < ROW_MIN:
                rows.append(row)
            else:
                shown_before.setdefault(first, []).append(f"`{name}`")
        if rows:
            yield "| field | type | default | |\n|---|---|---|---|\n" + "".join(rows)
        if shown_before:
            yield f"{'; '.join(map(_refer_to, *zip(*shown_before.items(), strict=True)))}.\n"

    def _cut_repeated(self, value: Any, call: str) -> Any:
        """Return a JSON value; … stands for large objects with the fields of an earlier one."""
        if isinstance(value, list):
            items = [self._cut_repeated(each, call) for each in value]
            cut = [index for index, each in enumerate(items) if str(each).startswith("…")]
            return items[: cut[0] + 1] if cut else items
        if not isinstance(value, dict):
            return value
        fields = tuple(value)
        first = self._answers.get(fields) or self._shown.setdefault(fields, call)
        if first != call and len(json.dumps(value)) >= OBJECT_MIN:
            return f"… as in {first}"
        part = self._find_part(fields, call)
        added = {key: each for key, each in value.items() if key not in part}
        shown = {key: self._cut_repeated(each, call) for key, each in added.items()}
        return shown | ({"…": f"as in {self._shown[part]}"} if part else {})

    def _find_part(self, fields: tuple[str, ...], call: str) -> tuple[str, ...]:
        """Return the fields of the largest object of an earlier call that an object contains."""
        earlier = [each for each, first in self._shown.items() if first != call]
        parts = [each for each in earlier if len(each) >= FIELDS_MIN and set(each) < set(fields)]
        return max(parts, key=len, default=())

    def _resolve(self, schema: Any) -> Any:
        """Return the JSON schema that a reference points to."""
        return self._schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema

    def _describe_type(self, field: Any) -> str:
        """Return the type of a JSON field as text."""
        if "$ref" in field:
            name = field["$ref"].rsplit("/", 1)[1]
            if name == "Mechanism":
                return "[mechanism](#mechanisms)"
            found = self._schemas[name]
            if "enum" not in found:
                return ", ".join(f"`{each}`" for each in found["properties"])
            field = found
        if "anyOf" in field:
            return " or ".join(self._describe_type(each) for each in field["anyOf"])
        if "const" in field:
            return f"`{field['const']}`"
        if field.get("enum") == list(ACCOUNTANTS):
            return "[method](accountants/index.md)"
        if "enum" in field:
            return ", ".join(f"`{each}`" for each in field["enum"])
        if field.get("type") == "array":
            return f"list of {self._describe_type(field.get('items', {}))}"
        return str(field.get("type", "object"))

    def _describe_range(self, field: Any) -> str:
        """Return a JSON field's description, followed by its bounds if it does not name them."""
        given = next((e for e in field.get("anyOf", ()) if e.get("type") != "null"), field)
        about = str(field.get("description") or given.get("description", ""))
        signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
        bounds = [f"{sign} {given[name]:g}" for name, sign in signs.items() if name in given]
        shown = [about, "" if re.search(r"from \d\S* to ", about) else ", ".join(bounds)]
        return "; ".join(filter(None, shown))


def _refer_to(call: str, names: list[str]) -> str:
    """Return a sentence that says in which call's table some fields are."""
    return f"{', '.join(names)}: as in [`{call}`](#{_anchor(call)})"


def _anchor(call: str) -> str:
    """Return the anchor of a call's heading."""
    return re.sub(r"[^\w -]", "", call).strip().lower().replace(" ", "-")


def _format_default(field: Any, required: bool) -> str:
    """Return the default value of a JSON field as text."""
    if required:
        return "required"
    found = field.get("default")
    return "" if found is None else f"`{json.dumps(found)}`"


def _choose_rounding(name: str) -> Callable[[float, int], str]:
    """Return the function that rounds a field's number outward if it is a bound."""
    if "lower" in name:
        return number_format.round_down
    is_upper = "upper" in name or name in ("epsilon", "delta", "noise_multiplier")
    return number_format.round_up if is_upper else number_format.round_nearest


def _shorten_answer(answer: Any, name: str = "") -> Any:
    """Return a JSON answer with long lists cut, numbers rounded and varying values replaced."""
    if isinstance(answer, dict):
        return {key: _shorten_answer(value, key) for key, value in answer.items()}
    if isinstance(answer, list):
        cut = [_shorten_answer(each, name) for each in answer[:LISTED]]
        return [*cut, "…"] if len(answer) > LISTED else cut
    if (name.endswith("_at") or name == "at") and answer is not None:
        return _round_time(answer)
    if isinstance(answer, float):
        return float(_choose_rounding(name)(answer, DIGITS))
    if isinstance(answer, str):
        short = re.sub(r"\b(sha256:)?([0-9a-f]{4})[0-9a-f]{12,}\b", r"\1…", answer)
        short = re.sub(r"\b(\d{4})\d{8,}\b", r"\1…", short)
        short = re.sub(r"\b\d{4}-\d\d-\d\dT[\d:]+Z", "2026-11-21T16:33:35Z", short)
        return re.sub(r"\bpa_.*", "pa_…", short)
    return answer


def _round_time(at: float) -> float:
    """Return a time as if the page had been written at `WRITTEN_AT`, to whole hours from then.

    Times in seconds stay in seconds, times in microseconds in microseconds.
    """
    unit = 1 if at < 1e12 else 1_000_000
    hours = round((at / unit - time.time()) / 3600)
    return unit * (WRITTEN_AT + 3600 * hours)


def _format_block(value: Any) -> str:
    """Return a Markdown block of JSON."""
    return f"```json\n{_format_json(value)}\n```\n"


def _format_json(value: Any, indent: str = "") -> str:
    """Return JSON text in which every value that fits is on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(flat) <= 96 or not isinstance(value, dict | list) or not value:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(k)}: {_format_json(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _format_json(v, inner) for v in value) + f"\n{indent}]"


def render_reference() -> str:
    """Return the API reference of the current service, as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(database_url=f"sqlite:///{folder}/ledger.db"))
        with TestClient(app) as client:
            token = app.state.keys.create([Scope.ADMIN], name="me")[0]
            return "\n".join(ReferencePage(client, token).render_page()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_reference())
    sys.exit(0)
