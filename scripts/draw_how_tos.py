"""Write the drawings of the how-tos in docs/how-to: what asks what, and what an attacker achieves.

python -m scripts.draw_how_tos
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Final

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from scripts import svg
from scripts.how_to_chains import CHAINS, Stage

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
WIDTH: Final = 440  # a phone shows it nearly as large
LINE: Final = 20.0  # from one line of text to the next


def draw_chain(title: str, stages: list[Stage]) -> str:
    """Draw boxes one below the other, with arrows between them."""
    left, y = 12.0, 12.0
    elements: list[str] = []
    for stage in stages:
        height = 18 + LINE * (1 + len(stage.lines) + len(stage.notes))
        elements.append(svg.box(left, y, WIDTH - 2 * left, height))
        written = [(stage.title, svg.INK), *((each, svg.FAINT) for each in stage.lines)]
        written += [(each, svg.ORANGE) for each in stage.notes]
        for row, (words, color) in enumerate(written):
            at = y + 24 + LINE * row
            elements.append(svg.text(26, at, words, anchor="start", color=color, bold=not row))
        y += height
        if stage is not stages[-1]:
            elements.append(svg.line([(44, y), (44, y + 34)], arrow=True))
            elements.append(svg.text(58, y + 22, stage.then, anchor="start", color=svg.BLUE))
            y += 36
    return svg.document(WIDTH, y + 12, title, elements)


def draw_attack_success() -> str:
    """Draw how often the best attacker guesses right, against ε of the run in the how-to."""
    delta, epsilon_max = 1e-6, 8.0
    base, top, left, right = 270.0, 30.0, 56.0, WIDTH - 20.0

    def place(epsilon: float, success: float) -> tuple[float, float]:
        """Return the point of an ε and a probability of success in the drawing."""
        x = left + (right - left) * epsilon / epsilon_max
        return round(x, 1), round(base - (base - top) * (success - 0.5) / 0.5, 1)

    def measure(noise_multiplier: float) -> tuple[float, float]:
        """Return upper bounds of ε and of an attacker's success, with members in half the cases."""
        run = mechanisms.from_json(
            {
                "kind": "dp_sgd",
                "noise_multiplier": noise_multiplier,
                "sample_rate": 0.01,
                "steps": 1000,
            }
        )
        advantage = calculator.delta(run, 0.0).delta
        return calculator.epsilon(run, delta).epsilon, (1 + advantage) / 2

    grid = [epsilon_max * i / 60 for i in range(61)]
    worst = [place(each, (math.exp(each) + delta) / (math.exp(each) + 1)) for each in grid]
    noises = (0.62, 0.65, 0.7, 0.75, 0.8, 0.86937, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 20.0)
    epsilon, success = measure(noises[5])
    chosen = place(epsilon, success)
    elements = [svg.line([(left, top), (left, base), (right, base)], color=svg.INK)]
    for percent in range(50, 101, 10):
        _, y = place(0, percent / 100)
        elements.append(svg.text(left - 8, y + 5, f"{percent} %", anchor="end", color=svg.FAINT))
    for mark in range(0, int(epsilon_max) + 1, 2):
        x, _ = place(mark, 0.5)
        elements.append(svg.text(x, base + 20, f"{mark}", color=svg.FAINT))
    elements += [
        svg.line(worst, color=svg.RED, width=2.5),
        svg.line([place(*measure(each)) for each in noises], color=svg.BLUE, width=2.5),
        svg.line([(left, chosen[1]), chosen, (chosen[0], base)], dashed=True),
        svg.text(left, 20, "how often the best attacker guesses right", anchor="start", bold=True),
        svg.text(right, top + 34, "at most, with this ε", anchor="end", color=svg.RED),
        svg.text(right, chosen[1] - 48, "this run", anchor="end", color=svg.BLUE),
        svg.text((left + right) / 2, base + 42, "ε at δ = 1e-6", color=svg.FAINT),
    ]
    return svg.document(WIDTH, base + 54, "The success of the best attacker against ε", elements)


def draw_all() -> dict[str, str]:
    """Return the drawings by the names of their files."""
    drawn = {f"how-to-{name}.svg": draw_chain(*chain) for name, chain in CHAINS.items()}
    return {"how-to-choosing-epsilon.svg": draw_attack_success(), **drawn}


def main() -> int:
    """Write every drawing into docs/images."""
    for name, text in draw_all().items():
        (IMAGES / name).write_text(text)
        print(IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
