"""Write the tables of keys, events and findings of the import into the documentation.

python -m scripts.import_keys           # prints them
python -m scripts.import_keys --write   # writes them into the pages
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from accountant_service.importing import CODES, FORMATS, Severity
from accountant_service.importing.dp_event import EVENTS
from accountant_service.importing.flower import WRAPPED
from accountant_service.importing.keys import Role, Table
from accountant_service.importing.nvflare import SVT
from scripts.page_parts import DOCS, write_part

_ROLES: Final = {Role.ACTS: "acts", Role.CHECKED: "checked", Role.HARMLESS: "harmless"}


def render_keys() -> Iterator[str]:
    """Yield a table of keys for each format, and for the objects in their documents."""
    for name, each in FORMATS.items():
        yield f"## `{name}`: {each.title}\n\n"
        if each.prefixes:
            prefixes = " or ".join(f"`{prefix}`" for prefix in each.prefixes)
            yield f"Names may begin with {prefixes}.\n\n"
        yield from _render_table(each.keys)
        if name == "flower":
            yield "### The strategy in `strategy`\n\n"
            yield from _render_table(WRAPPED)
        if name == "nvflare":
            yield "### `args` of SVTPrivacy\n\n"
            yield from _render_table(SVT)
        if name == "dp_event":
            yield "### Events\n\nAll attributes act, and others are refused.\n\n"
            yield "| event | attributes |\n|---|---|\n"
            for event, (attributes, _) in EVENTS.items():
                yield f"| `{event}` | {', '.join(f'`{each}`' for each in attributes) or '–'} |\n"
            yield "\n"


def _render_table(table: Table) -> Iterator[str]:
    """Yield the rows of a table of keys, in the order of their roles."""
    yield "| key | role | meaning |\n|---|---|---|\n"
    for role, word in _ROLES.items():
        for key in table:
            if key.role is role:
                names = ", ".join(f"`{name}`" for name in key.names)
                yield f"| {names} | {word} | {key.meaning.replace('|', '&#124;')} |\n"
    yield "\n"


def render_findings() -> Iterator[str]:
    """Yield the table of findings, errors first."""
    yield "| code | severity | finding |\n|---|---|---|\n"
    for severity in Severity:
        for code, (own, title) in CODES.items():
            if own is severity:
                yield f"| `{code}` | {severity} | {title[0].lower()}{title[1:]} |\n"


TABLES: Final = {
    "import-keys.md": ("keys", render_keys),
    "how-to/importing.md": ("findings", render_findings),
}


def main() -> None:
    """Print the tables, or write them into the pages."""
    for name, (mark, render) in TABLES.items():
        table = "".join(render())
        if "--write" in sys.argv:
            write_part(DOCS / name, mark, table)
        else:
            print(table)


if __name__ == "__main__":
    main()
