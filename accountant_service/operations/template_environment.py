"""The Jinja environment of pages and reports: escaping, strict names, and safe rounding."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from accountant_service.writing import number_format


def create_environment(folder: Path) -> Environment:
    """Return an environment for the templates of a folder, with filters that round numbers.

    `up` is for upper bounds, `down` for lower bounds, `number` for all other numbers, and `count`
    groups the digits of whole numbers.
    """
    found = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "up": number_format.round_up,
        "down": number_format.round_down,
        "number": number_format.round_nearest,
        "count": number_format.group_digits,
    }
    return found
