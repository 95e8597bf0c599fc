"""Write the drawings of docs/concepts.md: ε, the certified interval, the life of a budget.

python -m scripts.draw_concepts
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Final

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import Guarantee
from scripts import svg

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
WIDTH: Final = 720


def draw_epsilon() -> str:
    """Draw an output's density with and without a record, and the ratio that ε bounds."""
    base, scale, shift = 250.0, 420.0, 0.9  # of the axis, of the density, between the means

    def place(z: float) -> float:
        """Return the horizontal position of an output z in the drawing."""
        return WIDTH / 2 + 85 * (z - shift / 2)

    def density(z: float, mean: float) -> float:
        """Return the normal density at z with this mean."""
        return math.exp(-((z - mean) ** 2) / 2) / math.sqrt(2 * math.pi)

    grid = [-3.3 + 7.5 * i / 100 for i in range(101)]
    without, with_record = (
        [(place(z), base - scale * density(z, mean)) for z in grid] for mean in (0.0, shift)
    )
    at = 1.55
    low, high = (base - scale * density(at, mean) for mean in (0.0, shift))
    tail = [point for point in with_record if point[0] >= place(2.6)]
    return svg.document(
        WIDTH,
        310,
        "The distribution of a noisy result with and without one record",
        [
            svg.area([(tail[0][0], base), *tail, (tail[-1][0], base)], fill=svg.RED),
            svg.line(without, color=svg.BLUE, width=2.5),
            svg.line(with_record, color=svg.ORANGE, width=2.5),
            svg.line([(60, base), (WIDTH - 40, base)], color=svg.INK),
            svg.text(190, 105, "without the record", color=svg.BLUE, bold=True),
            svg.text(545, 85, "with the record", color=svg.ORANGE, bold=True),
            svg.line([(place(at), base), (place(at), high)], dashed=True),
            svg.line([(place(at) - 5, low), (place(at) + 5, low)], color=svg.BLUE, width=3),
            svg.line([(place(at) - 5, high), (place(at) + 5, high)], color=svg.ORANGE, width=3),
            svg.text(place(at) + 10, low + 4, "p", color=svg.BLUE, anchor="start"),
            svg.text(place(at) + 10, high + 4, "at most e^ε · p", color=svg.ORANGE, anchor="start"),
            svg.text(640, 185, "δ: the ratio may be", size=12, color=svg.RED),
            svg.text(640, 201, "larger out here", size=12, color=svg.RED),
            svg.text(WIDTH / 2, 283, "what the training step releases", color=svg.FAINT),
        ],
    )


def draw_certified_interval() -> str:
    """Draw a proved interval on an axis of ε, with each method's claim beside it."""
    run = mechanisms.from_json(
        {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 100}
    )
    names = ("mma", "pld", "subsampled_rdp", "moments_accountant")
    claims = [
        (each.method, each)
        for each in calculator.compare(run, 1e-5, names).answers
        if isinstance(each, Guarantee)
    ]
    proved = claims[1][1].certified
    assert proved is not None
    first, last = 6.0, math.ceil(max(each.epsilon for _, each in claims)) + 0.5

    def place(value: float) -> float:
        """Return the horizontal position of a value of ε in the drawing."""
        return 50 + (WIDTH - 100) * (value - first) / (last - first)

    axis = 150.0
    elements = [
        svg.box(place(first), 60, place(proved.lower) - place(first), axis - 60, fill="#f7e3e0"),
        svg.box(
            place(proved.upper), 60, place(last) - place(proved.upper), axis - 60, fill="#e3f0e8"
        ),
        svg.text((place(first) + place(proved.lower)) / 2, 50, "impossible", color=svg.RED),
        svg.text((place(proved.upper) + place(last)) / 2, 50, "true, but loose", color=svg.GREEN),
        svg.line([(40, axis), (WIDTH - 40, axis)], color=svg.INK),
    ]
    for mark in range(int(first), int(last) + 1):
        elements += [
            svg.line([(place(mark), axis - 4), (place(mark), axis + 4)], color=svg.INK),
            svg.text(place(mark), axis + 20, f"{mark}", size=12, color=svg.FAINT),
        ]
    for level, (name, claim) in enumerate(claims):
        color = svg.RED if claim.status == "refuted" else svg.GREEN
        y = axis + 42 + 24 * level
        x = place(claim.epsilon)
        anchor = "end" if x > 130 else "start"
        elements += [
            svg.line([(x, 60), (x, y)], color=color, width=2),
            svg.text(
                x - 6,
                y - 2,
                f"{name}: {claim.epsilon:.2f}, {claim.status}",
                color=color,
                anchor=anchor,
            ),
        ]
    x = place(proved.lower)
    elements.append(svg.text(x, 28, f"the interval: ε = {proved.lower:.4f}…", bold=True))
    elements.append(svg.line([(x, 34), (x, 58)], arrow=True))
    return svg.document(WIDTH, 280, "A certified interval and four claims beside it", elements)


STAGES: Final = (  # title, spent, held, remaining, explanation
    ("create", 0, 0, 10, "A dataset gets its budget, once."),
    ("reserve", 0, 5, 5, "A run holds the cost of its whole plan."),
    ("grant", 2, 3, 5, "A block of steps is charged before its noise is drawn."),
    ("grant", 4, 1, 5, "Charged steps stay charged, whatever crashes."),
    ("commit or release", 4, 0, 6, "The run ends; steps never granted are free again."),
)


def draw_budget() -> str:
    """Draw a budget as a bar at each stage of one run."""
    left, bar, unit = 190.0, 26.0, 24.0
    elements: list[str] = []
    for at, color in enumerate((svg.BLUE, svg.ORANGE, svg.GREY)):
        elements.append(svg.box(left + 110 * at, 14, 14, 14, fill=color))
        word = ("spent", "held", "remaining")[at]
        elements.append(svg.text(left + 110 * at + 20, 26, word, anchor="start", size=13))
    for row, (title, spent, held, remaining, why) in enumerate(STAGES):
        y = 48 + 62 * row
        elements.append(svg.text(left - 16, y + 18, title, anchor="end", bold=True))
        x = left
        for amount, color in ((spent, svg.BLUE), (held, svg.ORANGE), (remaining, svg.GREY)):
            if amount:
                elements.append(svg.box(x, y, unit * amount * 2, bar, fill=color, radius=0))
                x += unit * amount * 2
        elements.append(svg.text(left, y + 42, why, anchor="start", size=13, color=svg.FAINT))
    return svg.document(WIDTH, 48 + 62 * len(STAGES), "The life of a budget", elements)


DRAWINGS: Final = {
    "concept-epsilon.svg": draw_epsilon,
    "concept-interval.svg": draw_certified_interval,
    "concept-budget.svg": draw_budget,
}


def main() -> int:
    """Write every drawing into docs/images."""
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw())
        print(IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
