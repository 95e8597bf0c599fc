"""The few SVG elements that the drawings of the documentation are made of."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

INK: Final = "#1f2933"
FAINT: Final = "#66707a"
BLUE: Final = "#1c5d6b"
ORANGE: Final = "#a8540a"
RED: Final = "#b02a2a"
GREEN: Final = "#1b6b43"
GREY: Final = "#d9dcd8"
PAPER: Final = "#fbfaf7"


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: float = 14,
    color: str = INK,
    anchor: str = "middle",
    bold: bool = False,
) -> str:
    """Return a line of text at (x, y), as an SVG element."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" '
        f'text-anchor="{anchor}"{weight}>{escape(content)}</text>'
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str = "white",
    stroke: str = FAINT,
    radius: float = 3,
) -> str:
    """Return a rectangle with rounded corners, as an SVG element."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def line(
    points: Iterable[tuple[float, float]],
    *,
    color: str = FAINT,
    width: float = 1.5,
    dashed: bool = False,
    arrow: bool = False,
) -> str:
    """Return a line through points, as an SVG element, with an arrowhead at its end on request."""
    path = " ".join(f"{x:.6g},{y:.6g}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    head = ' marker-end="url(#arrow)"' if arrow else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" '
        f'stroke-width="{width:g}"{dash}{head}/>'
    )


def area(points: Iterable[tuple[float, float]], *, fill: str) -> str:
    """Return a filled, half transparent polygon, as an SVG element."""
    path = " ".join(f"{x:.6g},{y:.6g}" for x, y in points)
    return f'<polygon points="{path}" fill="{fill}" fill-opacity="0.35" stroke="none"/>'


def document(width: float, height: float, title: str, elements: Iterable[str]) -> str:
    """Return a whole SVG file with a title for screen readers, a background, and the elements."""
    body = "\n".join(elements)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" \
width="{width:g}" height="{height:g}" role="img" font-family="sans-serif">
<title>{escape(title)}</title>
<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" \
orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{FAINT}"/></marker></defs>
<rect width="100%" height="100%" fill="{PAPER}"/>
{body}
</svg>
"""
