"""Draw the components of both packages and their imports: docs/images/architecture.svg.

A component is a module or package directly below a root package. Each component is drawn in a layer
above all that it imports. Arrows that follow from others are left out (transitive reduction).

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
# Leaves that nearly every component imports: named below the drawing instead of drawn with arrows.
COMMON: Final = {
    "training_client": ("errors",),
    "accountant_service": ("errors", "version", "writing"),
}
COLUMN: Final = {"training_client": (20.0, 470.0), "accountant_service": (530.0, 850.0)}
LAYER_HEIGHT: Final = 104.0
TOP_MARGIN: Final = 70.0
BOX_HEIGHT: Final = 64.0
BOX_GAP: Final = 14.0
PACKAGE_WIDTH: Final = 330.0
MODULE_WIDTH: Final = 150.0

Imports = Mapping[str, frozenset[str]]


@cache
def _graph(package: str) -> grimp.ImportGraph:
    """Return the import graph of a package."""
    return grimp.build_graph(package, cache_dir=None)


def list_modules(package: str, component: str) -> list[str]:
    """Return the names of the modules in a component; folders end in a slash."""
    graph = _graph(package)
    prefix = f"{package}.{component}"
    return [
        child.rpartition(".")[2] + ("/" if graph.find_children(child) else "")
        for child in sorted(graph.find_children(prefix))
    ]


def find_imports(package: str) -> dict[str, frozenset[str]]:
    """Return, per component, the components that it imports, except common leaves."""
    graph = _graph(package)
    components = {child.rpartition(".")[2] for child in graph.find_children(package)}
    components -= set(COMMON[package])
    found: dict[str, set[str]] = {component: set() for component in components}
    for importer in graph.modules:
        if "." not in importer:
            continue
        source = importer.split(".")[1]
        for imported in graph.find_modules_directly_imported_by(importer):
            target = [*imported.split("."), ""][1]
            if source in components and target in components - {source}:
                found[source].add(target)
    return {component: frozenset(targets) for component, targets in found.items()}


def reachable_components(imports: Imports, start: str) -> frozenset[str]:
    """Return all components that `start` imports, directly or through others."""
    direct = imports[start]
    return direct.union(*(reachable_components(imports, component) for component in direct))


def reduce_imports(imports: Imports) -> dict[str, frozenset[str]]:
    """Return the imports without those that others imply (transitive reduction)."""
    return {
        component: direct
        - frozenset().union(*(reachable_components(imports, other) for other in direct))
        for component, direct in imports.items()
    }


def assign_layers(imports: Imports) -> list[list[str]]:
    """Return the components by layer, top first: each just below those that import it."""
    importers = {
        component: [each for each in imports if component in imports[each]] for component in imports
    }

    @cache
    def layer(component: str) -> int:
        """Return a component's layer: one below the lowest component that imports it."""
        return 1 + max((layer(each) for each in importers[component]), default=-1)

    layers: list[list[str]] = [
        [] for _ in range(1 + max(layer(component) for component in imports))
    ]
    for component in sorted(imports):
        layers[layer(component)].append(component)
    return layers


def _draw_component(package: str, component: str, x: float, y: float, width: float) -> list[str]:
    """Return the SVG elements of a component's box, with the names of its modules."""
    modules = list_modules(package, component)
    title = f"{component}/" if modules else component
    shown = textwrap.wrap(" · ".join(modules), max(12, int(width / 5.0)))
    if len(shown) > 3:
        shown = [*shown[:2], f"{shown[2]} …"]
    elements = [svg.box(x, y, width, BOX_HEIGHT, stroke=svg.BLUE if modules else svg.FAINT)]
    elements.append(svg.text(x + width / 2, y + 16, title, size=12, bold=True))
    for row, each in enumerate(shown):
        at = y + 31 + 12 * row
        elements.append(svg.text(x + width / 2, at, each, size=9, color=svg.FAINT))
    return elements


def _compute_mean_center(
    component: str, reduced: Imports, place: Mapping[str, tuple[float, float, float]]
) -> float:
    """Return the mean horizontal position of the boxes that import a component."""
    centers = [place[each][0] + place[each][2] / 2 for each in place if component in reduced[each]]
    return sum(centers) / max(1, len(centers))


def _choose_widths(package: str, components: list[str], breadth: float) -> list[float]:
    """Return the box widths of a layer's components: wide for packages, narrow for modules."""
    wished = [
        PACKAGE_WIDTH if list_modules(package, component) else MODULE_WIDTH
        for component in components
    ]
    scale = min(1.0, (breadth - BOX_GAP * (len(components) - 1)) / sum(wished))
    return [scale * width for width in wished]


def _draw_package(package: str) -> tuple[list[str], float]:
    """Draw a package's title, components and arrows as SVG; return it with its height."""
    imports = find_imports(package)
    left, breadth = COLUMN[package]
    reduced = reduce_imports(imports)
    place: dict[str, tuple[float, float, float]] = {}
    boxes: list[str] = []
    layers = assign_layers(imports)
    for level, components in enumerate(layers):
        ordered = sorted(
            components, key=lambda component: _compute_mean_center(component, reduced, place)
        )
        widths = _choose_widths(package, ordered, breadth)
        x = left + (breadth - sum(widths) - BOX_GAP * (len(ordered) - 1)) / 2
        for component, width in zip(ordered, widths, strict=True):
            place[component] = (x, TOP_MARGIN + LAYER_HEIGHT * level, width)
            boxes += _draw_component(package, component, *place[component])
            x += width + BOX_GAP
    arrows = []
    for component, targets in sorted(reduced.items()):
        x, y, width = place[component]
        for target in sorted(targets):
            to_x, to_y, to_width = place[target]
            points = [(x + width / 2, y + BOX_HEIGHT), (to_x + to_width / 2, to_y)]
            arrows.append(svg.line(points, arrow=True))
    bottom = TOP_MARGIN + LAYER_HEIGHT * len(layers)
    common = " · ".join(COMMON[package])
    title = svg.text(left + breadth / 2, 36, f"{package}/", size=18, bold=True)
    below = svg.text(
        left + breadth / 2,
        bottom,
        f"imported by most components: {common}",
        size=11,
        color=svg.FAINT,
    )
    return [title, *arrows, *boxes, below], bottom


def draw() -> str:
    """Return the drawing of both packages, as SVG."""
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
    return svg.document(1400, height, "The components of both packages and their imports", elements)


def main() -> int:
    """Write the drawing to docs/images."""
    IMAGE.write_text(draw())
    print(IMAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
