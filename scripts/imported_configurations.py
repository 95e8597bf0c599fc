"""Import every configuration of `docs/imported-configurations.jsonl` and write the page's table.

python -m scripts.imported_configurations           # prints the table
python -m scripts.imported_configurations --write   # writes it into the page
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from accountant_service.importing import CODES
from accountant_service.questions.problems import of_error
from accountant_service.questions.registry import ENDPOINTS
from accountant_service.writing import number_format
from scripts.page_parts import DOCS, write_part

DATA: Final = DOCS / "imported-configurations.jsonl"
PAGE: Final = DOCS / "imported-configurations.md"
_QUIET: Final = {  # shown in other ways
    "noise-chosen", "relation-not-stated", "claim-loose", "sampling-by-default",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration from the list, with the answer to its import.

    Attributes:
        entry: the line of the data file.
        answer: the API's answer, or its problem if the document is refused.
    """

    entry: dict[str, Any]
    answer: dict[str, Any]

    @property
    def is_refused(self) -> bool:
        """Return whether the import refused the document."""
        return "findings" not in self.answer

    @property
    def errors(self) -> list[str]:
        """The codes of the errors that the import's lint found."""
        if self.is_refused:
            return []
        findings = self.answer["findings"]
        return [each["code"] for each in findings if each["severity"] == "error"]


def read_entries() -> list[dict[str, Any]]:
    """Return all configurations of the list, as JSON."""
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def import_entry(entry: dict[str, Any]) -> Row:
    """Import one configuration, and return it with the answer."""
    endpoint = ENDPOINTS["/v1/import"]
    body = {"document": entry["document"], "format": entry.get("format"), **entry.get("facts", {})}
    try:
        answer = endpoint.answer(endpoint.request.model_validate(body))
    except ValidationError as error:
        return Row(entry, of_error(error))
    return Row(entry, answer.model_dump(mode="json"))


def describe_source(source: dict[str, Any]) -> str:
    """Return a link to the file at its commit (and line), or to the publication's section."""
    if "publication" in source:
        return f"{source['publication']}, {source['section']}"
    name = source["path"].rsplit("/", 1)[-1]
    address = f"https://github.com/{source['repository']}/blob/{source['commit']}/{source['path']}"
    if "line" in source:
        is_rendered = name.endswith(".md")  # its lines are shown as they are with this option only
        address += f"{'?plain=1' if is_rendered else ''}#L{source['line']}"
    return f"[{source['repository']}: {name}]({address})"


def describe_cost(row: Row) -> str:
    """Return the proved ε as text, rounded outward, or why there is none."""
    if row.is_refused:
        fault = row.answer["errors"][0]
        field = fault["pointer"].removeprefix("/document").lstrip("/")
        return f"refused: `{field}` {fault['message']}"
    claim = row.answer["guarantee"]
    if claim is None:
        return "none"
    upper = number_format.round_up(claim["epsilon"], 5)
    if claim["status"] == "estimate":
        return f"not proved: {upper}"
    if claim["certified"] is None or claim["certified"]["epsilon_lower"] == 0:
        return f"≤ {upper}"
    return f"{number_format.round_down(claim['certified']['epsilon_lower'], 5)} – {upper}"


def describe_claims(row: Row) -> str:
    """Return the claimed ε with its status, as text; a target if the noise was chosen for it."""
    if row.is_refused:
        return ""
    chosen = any(each["code"] == "noise-chosen" for each in row.answer["findings"])
    kind = " (target)" if chosen else ""
    return "<br>".join(f"{c['epsilon']:.6g}{kind}: {c['status']}" for c in row.answer["claims"])


def render_table(rows: list[Row]) -> Iterator[str]:
    """Yield the summary of all imports, and the Markdown table."""
    wrong = [row for row in rows if row.errors]
    refuted = [row for row in rows if "claim-refuted" in row.errors]
    refused = [row for row in rows if row.is_refused]
    yield (
        f"{len(rows)} configurations: {len(wrong)} have errors, {len(refuted)} of them a claimed ε "
        f"that is refuted; {len(refused)} are refused.\n\n"
    )
    counts = Counter(code for row in rows for code in set(row.errors))
    yield "| error | configurations |\n|---|---|\n"
    for code, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"| {CODES[code][1]} (`{code}`) | {count} |\n"
    yield "\n| configuration | δ | proved ε | claimed ε | findings |\n|---|---|---|---|---|\n"
    for row in rows:
        guarantee = None if row.is_refused else row.answer["guarantee"]
        delta = "" if guarantee is None else number_format.round_nearest(guarantee["delta"], 3)
        found = [] if row.is_refused else [f["code"] for f in row.answer["findings"]]
        shown = "<br>".join(f"`{code}`" for code in found if code not in _QUIET)
        remark = row.entry.get("remark", "")
        cell = f"{row.entry['name']}<br>{describe_source(row.entry['source'])}"
        cell += f"<br>{remark}" if remark else ""
        yield f"| {cell} | {delta} | {describe_cost(row)} | {describe_claims(row)} | {shown} |\n"


def main() -> None:
    """Print the table, or write it into the page."""
    table = "".join(render_table([import_entry(entry) for entry in read_entries()]))
    if "--write" not in sys.argv:
        print(table)
        return
    write_part(PAGE, "table", table)


if __name__ == "__main__":
    main()
