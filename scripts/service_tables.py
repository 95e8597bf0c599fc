"""Write the tables of the service's settings and of its methods into their pages.

python -m scripts.service_tables           # prints them
python -m scripts.service_tables --write   # writes them into the pages
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Final

from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from accountant_service.api import views
from accountant_service.settings import Settings
from scripts.page_parts import DOCS, write_part


def render_settings() -> Iterator[str]:
    """Yield a row for each environment variable: name, default and meaning."""
    yield "| variable | default | meaning |\n|---|---|---|\n"
    for name, field in Settings.model_fields.items():
        default = "cores" if field.default_factory else _format_default(field.default)
        yield f"| `{_name_variable(name, field)}` | {default} | {field.description} |\n"


def _name_variable(name: str, field: FieldInfo) -> str:
    """Return the environment variable of a setting."""
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return str(alias.choices[-1])
    return alias if isinstance(alias, str) else f"ACCOUNTANT_{name.upper()}"


def _format_default(value: object) -> str:
    """Return a default value as text."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def render_methods() -> Iterator[str]:
    """Yield a row for each accounting method."""
    yield "| method | name | source | applies to | proves |\n|---|---|---|---|---|\n"
    for each in views.methods().methods:
        cells = (each.title, each.source, each.needs, each.proves)
        yield f"| [{each.method}]({each.method}.md) | {' | '.join(cells)} |\n"


TABLES: Final[dict[str, tuple[str, Callable[[], Iterator[str]]]]] = {
    "operations.md": ("settings", render_settings),
    "accountants/index.md": ("methods", render_methods),
}


def main() -> None:
    """Print the tables, or write them into the pages."""
    for name, (part, render) in TABLES.items():
        table = "".join(render())
        if "--write" in sys.argv:
            write_part(DOCS / name, part, table)
        else:
            print(table)


if __name__ == "__main__":
    main()
