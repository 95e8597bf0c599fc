"""Write the table of features of libraries, from `docs/accountants/features.jsonl`.

python -m scripts.feature_table           # prints the table
python -m scripts.feature_table --write   # writes it into the page
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from scripts.page_parts import DOCS, write_part

FOLDER: Final = DOCS / "accountants"
DATA: Final = FOLDER / "features.jsonl"
PAGE: Final = FOLDER / "features.md"
TICK: Final = "✔"
SHOWN: Final = {  # mark in the data file: text of the cell
    "profile": TICK,
    "part": "some",
    "rdp": "RDP",
    "epsilon": "ε, δ",
    "call": "call",
    "noise": "noise",
    "simulated": "simulated",
    "estimate": "estimate",
}


@dataclass(frozen=True, slots=True)
class Library:
    """Another library, with the version that was compared.

    Attributes:
        library: its name.
        version: its version on PyPI.
        package: the name under which it is imported.
    """

    library: str
    version: str
    package: str


@dataclass(frozen=True, slots=True)
class Support:
    """Another library's support for a feature.

    Attributes:
        mark: a key of `SHOWN`.
        names: the classes and functions that offer it, with their modules.
    """

    mark: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature in the comparison table, and the libraries that have it.

    Attributes:
        group: the heading of its part of the table.
        feature: its name.
        ours: the tests that show it here, as file::test; empty if it is not there.
        peers: support by other libraries, by their names.
    """

    group: str
    feature: str
    ours: tuple[str, ...]
    peers: dict[str, Support]


def read_data() -> tuple[list[Library], list[Feature]]:
    """Return the libraries and the features of the data file."""
    libraries, features = [], []
    for line in DATA.read_text().splitlines():
        entry = json.loads(line)
        if "library" in entry:
            libraries.append(Library(**entry))
            continue
        peers = {
            library: Support(each["mark"], tuple(each["names"]))
            for library, each in entry["peers"].items()
        }
        features.append(Feature(entry["group"], entry["feature"], tuple(entry["ours"]), peers))
    return libraries, features


def describe_names(names: tuple[str, ...]) -> str:
    """Return dotted names as text; a module that several share is written once."""
    modules = {name.rpartition(".")[0] for name in names}
    if len(modules) > 1:
        return ", ".join(f"`{name}`" for name in names)
    last = [name.rpartition(".")[2] for name in names]
    return ", ".join([f"`{names[0]}`", *(f"`{each}`" for each in last[1:])])


def render_group(libraries: list[Library], group: str, features: list[Feature]) -> Iterator[str]:
    """Yield the feature table of one group."""
    heads = " | ".join(f"{each.library} {each.version}" for each in libraries)
    yield f"\n## {group}\n\n| feature | here | {heads} |\n"
    yield "|---" * (len(libraries) + 2) + "|\n"
    for feature in features:
        cells = [TICK if feature.ours else ""]
        for library in libraries:
            support = feature.peers.get(library.library)
            cells.append(SHOWN[support.mark] if support else "")
        yield f"| {' | '.join([feature.feature, *cells])} |\n"


def render_tables(libraries: list[Library], features: list[Feature]) -> Iterator[str]:
    """Yield the tables of all groups, and each library's list of names."""
    for group in dict.fromkeys(each.group for each in features):
        members = [each for each in features if each.group == group]
        yield from render_group(libraries, group, members)
    yield "\n## Names in other libraries\n\n| library | feature | names |\n|---|---|---|\n"
    for library in libraries:
        for feature in features:
            if support := feature.peers.get(library.library):
                names = describe_names(support.names)
                yield f"| {library.library} | {feature.feature} | {names} |\n"


def render() -> str:
    """Return all feature tables as Markdown."""
    return "".join(render_tables(*read_data())).strip()


def main() -> None:
    """Print the tables, or write them into the page."""
    tables = render()
    if "--write" not in sys.argv:
        print(tables)
        return
    write_part(PAGE, "table", tables)


if __name__ == "__main__":
    main()
