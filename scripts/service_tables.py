"""Write the tables of the service's settings, metrics and methods into their pages.

python -m scripts.service_tables           # prints them
python -m scripts.service_tables --write   # writes them into the pages
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client.metrics import MetricWrapperBase
from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from accountant_service.operations.metrics import Metrics
from accountant_service.operations.settings import Settings
from accountant_service.questions import views
from accountant_service.server import metrics_endpoint
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


def render_metrics() -> Iterator[str]:
    """Yield a row for each metric: name, labels and meaning."""
    yield "| metric | labels | meaning |\n|---|---|---|\n"
    # private: the libraries show a metric's labels only with its samples
    own = [each for each in vars(Metrics()).values() if isinstance(each, MetricWrapperBase)]
    described = [(each._type, each._name, each._labelnames, each._documentation) for each in own]
    state = metrics_endpoint._LedgerState([], [], 0)
    ledger: Any = SimpleNamespace(read_state=lambda **_: state)
    sees_all: Any = SimpleNamespace(datasets=None)
    for each in metrics_endpoint._LedgerCollector(ledger, sees_all, ()).collect():
        labels = getattr(each, "_labelnames", ())
        described.append((each.type, each.name, labels, each.documentation))
    for kind, name, labels, meaning in described:
        suffix = "_total" if kind == "counter" else ""
        text = meaning[0].lower() + meaning[1:]
        yield f"| `{name}{suffix}` | {', '.join(labels)} | {text} |\n"


def render_methods() -> Iterator[str]:
    """Yield a row for each accounting method."""
    yield "| method | name | source | applies to | proves |\n|---|---|---|---|---|\n"
    for each in views.methods().methods:
        cells = (each.title, each.source, each.needs, each.proves)
        yield f"| [{each.method}]({each.method}.md) | {' | '.join(cells)} |\n"


TABLES: Final[dict[str, tuple[str, Callable[[], Iterator[str]]]]] = {
    "settings": ("operations.md", render_settings),
    "metrics": ("operations.md", render_metrics),
    "methods": ("accountants/index.md", render_methods),
}


def main() -> None:
    """Print the tables, or write them into the pages."""
    for part, (page, render) in TABLES.items():
        table = "".join(render())
        if "--write" in sys.argv:
            write_part(DOCS / page, part, table)
        else:
            print(table)


if __name__ == "__main__":
    main()
