"""Write the audit of the papers' claims as a Markdown table and as figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from accountant_service.papers.claims import Figure, Finding

_COLUMNS: Final = ("source", "claim", "computed", "proved", "verdict", "remark")
_STYLES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def markdown(findings: Iterable[Finding]) -> str:
    """Format findings of the audit of papers' claims as a Markdown table."""
    rows = [_COLUMNS, ["---"] * len(_COLUMNS)]
    rows += [[getattr(finding, name) for name in _COLUMNS] for finding in findings]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def draw(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """Draw each figure of the audit of papers' claims as an SVG file; return the files.

    Args:
        figures: the data of each plot.
        folder: the folder for the files; created if it does not exist.

    Returns:
        The files written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "accountant"  # makes the files reproducible
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        plot, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
        for style, (name, values) in zip(_STYLES, figure.lines.items(), strict=False):
            axes.plot(figure.x, values, linestyle=style, linewidth=2, label=name)
        if figure.logarithmic:
            axes.set_yscale("log")
        if figure.logarithmic_x:
            axes.set_xscale("log")
        axes.set(title=figure.title, xlabel=figure.x_label, ylabel=figure.y_label)
        axes.set_ylim(bottom=figure.lowest)
        axes.grid(alpha=0.3)
        axes.legend()
        written.append(folder / f"{figure.name}.svg")
        plot.savefig(written[-1], metadata={"Date": None})
        plt.close(plot)
    return written
