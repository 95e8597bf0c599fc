"""Draw the rooms of both packages and their imports: docs/images/architecture.svg.

A room is a module or package directly below a root package. Rooms stand on floors: each above all
that it imports. Arrows that follow from others are left out (transitive reduction).

python -m scripts.draw_architecture
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

import grimp

from scripts import svg

IMAGE: Final = Path(__file__).parents[1] / "docs" / "images" / "architecture.svg"
PACKAGES: Final = ("training_client", "accountant_service")
# Leaves that nearly every room imports: named below the drawing instead of drawn with arrows.
COMMON: Final = {
    "training_client": ("errors", "retry"),
    "accountant_service": ("errors", "logs", "metrics", "number_format", "settings"),
}
# It imports the calculations in the forked process only, so that they need not be imported again.
PRELOADING: Final = "fork_server"
COLUMN: Final = {"training_client": (20.0, 470.0), "accountant_service": (530.0, 850.0)}
FLOOR: Final = 104.0
TOP: Final = 70.0
BOX: Final = 64.0
GAP: Final = 14.0
WIDE: Final = 330.0
NARROW: Final = 150.0

Imports = Mapping[str, frozenset[str]]


@cache
def _graph(package: str) -> grimp.ImportGraph:
    return grimp.build_graph(package, cache_dir=None)


def modules_of(package: str, room: str) -> list[str]:
    """Return the names of the modules in a room; folders end in a slash."""
    graph = _graph(package)
    prefix = f"{package}.{room}"
    return [
        child.rpartition(".")[2] + ("/" if graph.find_children(child) else "")
        for child in sorted(graph.find_children(prefix))
    ]


def imports_between_rooms(package: str) -> dict[str, frozenset[str]]:
    """Return which rooms each room imports, without the common leaves."""
    graph = _graph(package)
    rooms = {child.rpartition(".")[2] for child in graph.find_children(package)}
    rooms -= set(COMMON[package])
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for importer in graph.modules:
        if "." not in importer:
            continue
        source = importer.split(".")[1]
        for imported in graph.find_modules_directly_imported_by(importer):
            target = [*imported.split("."), ""][1]
            if source in rooms - {PRELOADING} and target in rooms - {source}:
                found[source].add(target)
    return {room: frozenset(targets) for room, targets in found.items()}


def reachable_rooms(imports: Imports, start: str) -> frozenset[str]:
    """Return all rooms that a room imports, directly or through others."""
    direct = imports[start]
    return direct.union(*(reachable_rooms(imports, room) for room in direct))


def reduce_imports(imports: Imports) -> dict[str, frozenset[str]]:
    """Return the imports that do not follow from others."""
    return {
        room: direct - frozenset().union(*(reachable_rooms(imports, other) for other in direct))
        for room, direct in imports.items()
    }


def floors_of(imports: Imports) -> list[list[str]]:
    """Return the rooms from the highest floor to the lowest, each just below its importers."""
    importers = {room: [each for each in imports if room in imports[each]] for room in imports}

    @cache
    def floor(room: str) -> int:
        return 1 + max((floor(each) for each in importers[room]), default=-1)

    floors: list[list[str]] = [[] for _ in range(1 + max(floor(room) for room in imports))]
    for room in sorted(imports):
        floors[floor(room)].append(room)
    return floors


def _draw_room(package: str, room: str, x: float, y: float, width: float) -> list[str]:
    modules = modules_of(package, room)
    title = f"{room}/" if modules else room
    shown = textwrap.wrap(" · ".join(modules), max(12, int(width / 5.0)))
    if len(shown) > 3:
        shown = [*shown[:2], f"{shown[2]} …"]
    elements = [svg.box(x, y, width, BOX, stroke=svg.BLUE if modules else svg.FAINT)]
    elements.append(svg.text(x + width / 2, y + 16, title, size=12, bold=True))
    for row, each in enumerate(shown):
        at = y + 31 + 12 * row
        elements.append(svg.text(x + width / 2, at, each, size=9, color=svg.FAINT))
    return elements


def _mean_center(
    room: str, reduced: Imports, place: Mapping[str, tuple[float, float, float]]
) -> float:
    """Return the mean horizontal position of a room's importers, which all stand higher."""
    centers = [place[each][0] + place[each][2] / 2 for each in place if room in reduced[each]]
    return sum(centers) / max(1, len(centers))


def _widths(package: str, rooms: list[str], breadth: float) -> list[float]:
    """Return the widths of a floor's boxes: packages wide, modules narrow, none too wide."""
    wished = [WIDE if modules_of(package, room) else NARROW for room in rooms]
    scale = min(1.0, (breadth - GAP * (len(rooms) - 1)) / sum(wished))
    return [scale * width for width in wished]


def _draw_package(package: str) -> tuple[list[str], float]:
    """Draw a package's title, rooms and arrows; return them with the height they take."""
    imports = imports_between_rooms(package)
    left, breadth = COLUMN[package]
    reduced = reduce_imports(imports)
    place: dict[str, tuple[float, float, float]] = {}
    boxes: list[str] = []
    floors = floors_of(imports)
    for level, rooms in enumerate(floors):
        ordered = sorted(rooms, key=lambda room: _mean_center(room, reduced, place))
        widths = _widths(package, ordered, breadth)
        x = left + (breadth - sum(widths) - GAP * (len(ordered) - 1)) / 2
        for room, width in zip(ordered, widths, strict=True):
            place[room] = (x, TOP + FLOOR * level, width)
            boxes += _draw_room(package, room, *place[room])
            x += width + GAP
    arrows = []
    for room, targets in sorted(reduced.items()):
        x, y, width = place[room]
        for target in sorted(targets):
            to_x, to_y, to_width = place[target]
            points = [(x + width / 2, y + BOX), (to_x + to_width / 2, to_y)]
            arrows.append(svg.line(points, arrow=True))
    bottom = TOP + FLOOR * len(floors)
    common = " · ".join(COMMON[package])
    title = svg.text(left + breadth / 2, 36, f"{package}/", size=18, bold=True)
    below = svg.text(
        left + breadth / 2, bottom, f"imported by most rooms: {common}", size=11, color=svg.FAINT
    )
    return [title, *arrows, *boxes, below], bottom


def draw() -> str:
    """Return the drawing of both packages."""
    drawn = [_draw_package(package) for package in PACKAGES]
    height = max(bottom for _, bottom in drawn) + 30
    right_of_client = sum(COLUMN["training_client"])
    bridge = [
        svg.line(
            [(right_of_client - 4, 31), (COLUMN["accountant_service"][0] + 4, 31)], arrow=True
        ),
        svg.text(510, 24, "HTTP", size=11),
    ]
    elements = [*bridge, *(each for elements, _ in drawn for each in elements)]
    return svg.document(1400, height, "The rooms of both packages and their imports", elements)


def main() -> int:
    """Write the drawing."""
    IMAGE.write_text(draw())
    print(IMAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
