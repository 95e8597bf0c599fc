"""The command `accountant plan`: batch size, steps and noise within a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accountant_service.cli.asking import (
    AS_JSON,
    answer_or_exit,
    list_options,
    make_command,
    make_option,
)
from accountant_service.questions import functions
from accountant_service.writing import number_format

Json = dict[str, Any]

_WIDE: Final = 60  # columns from which the table also has σ/B and epochs
_MARKS: Final = {"recommended": "▸", "current": "•"}
_COLOURS: Final = {"warning": "yellow", "note": "dim"}
_COMMANDS: Final = {
    "price": "compute the ε of this run:",
    "train": "train it, with your data in the folder data/mine and a service that is running:",
}


def _plan(plot: Path | None, time_limit: Any, as_json: bool, **body: Any) -> None:
    """Print a plan, and draw its frontier if that is wanted."""
    answer = answer_or_exit("/v1/plan", body, {}, as_json=as_json, time_limit=time_limit)
    if plot is not None:
        _draw(answer, plot)
    if as_json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        _print(answer)


def _print(answer: Json) -> None:
    """Print the recommended run with its reasons, the advice, and all planned runs."""
    console = Console(highlight=False)
    run, claim = answer["recommended"], answer["recommended"]["guarantee"]
    limit = answer["signal_to_noise_limit"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    rows = {
        "batch size": f"[bold]{run['batch_size']}[/]",
        "steps": f"[bold]{run['steps']}[/]",
        "noise multiplier": f"[bold]{run['noise_multiplier']}[/]",
        "sampling": f"{run['sampling']}, rate {number_format.round_nearest(run['sample_rate'])}",
        "epochs": number_format.round_nearest(run["epochs"]),
        "σ/B": f"{number_format.round_up(run['effective_noise'], 4)} × clip norm: noise of an "
        "averaged gradient",
        "signal-to-noise": f"{_share(run, limit)} % of that of full batches",
        "ε": f"{number_format.round_up(claim['epsilon'])} at δ = "
        f"{number_format.round_up(claim['delta'])}, {claim['status']} by {claim['method']}",
        "why": escape(answer["reason"]),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    for advice in answer["advice"]:
        colour = _COLOURS[advice["severity"]]
        source = f" [dim]({escape(advice['source'])})[/]" if advice["source"] else ""
        table.add_row(f"[{colour}]{advice['severity']}[/]", escape(advice["message"]) + source)
    console.print(table)
    for name, command in run["commands"].items():
        if command is not None:
            console.print(f"\n{_COMMANDS[name]}", style="dim")
            console.print(escape(command), soft_wrap=True)  # one line, to be copied
    for sampling in dict.fromkeys(each["sampling"] for each in answer["runs"]):
        console.print()
        console.print(_frontier(answer, sampling, wide=console.width >= _WIDE))
    console.print(
        f"{_MARKS['recommended']} recommended"
        + (f"  {_MARKS['current']} today's choice" if answer["current"] else "")
        + "  signal: B√T/σ, relative to full batches, rounded down",
        style="dim",
    )


def _frontier(answer: Json, sampling: str, *, wide: bool) -> Table:
    """Return the table of one sampling's runs, with the recommended and current one marked."""
    limit = answer["signal_to_noise_limit"]
    table = Table(title=f"{sampling} sampling", title_justify="left", box=None, padding=(0, 1))
    for column in ("", "batch", "steps", "σ", *(("σ/B", "epochs") if wide else ()), "signal"):
        table.add_column(column, justify="right", no_wrap=True)
    for run, mark in _marked_runs(answer, sampling):
        cells = [mark, str(run["batch_size"]), str(run["steps"]), str(run["noise_multiplier"])]
        if wide:
            cells.append(number_format.round_up(run["effective_noise"], 3))
            cells.append(number_format.round_nearest(run["epochs"], 4))
        style = "bold" if mark == _MARKS["recommended"] else None
        table.add_row(*cells, f"{_share(run, limit)} %", style=style)
    return table


def _marked_runs(answer: Json, sampling: str) -> list[tuple[Json, str]]:
    """Return runs by increasing batch size, each with a mark if recommended or current."""
    chosen, current = answer["recommended"], answer["current"]
    found = [
        (run, _MARKS["recommended"] if _is_same(run, chosen) else "")
        for run in answer["runs"]
        if run["sampling"] == sampling
    ]
    if current and current["sampling"] == sampling:
        found = [each for each in found if not _is_same(each[0], current) or each[1]]
        found.append((current, _MARKS["current"]))
    return sorted(found, key=lambda each: int(each[0]["batch_size"]))


def _is_same(run: Json, other: Json) -> bool:
    """Return whether two runs have the same sampling, batch size and steps."""
    return all(run[name] == other[name] for name in ("sampling", "batch_size", "steps"))


def _share(run: Json, limit: float) -> str:
    """Format a run's signal-to-noise ratio as a percentage of the limit, rounded down."""
    return number_format.round_down(100 * run["signal_to_noise"] / limit, 2)


def _draw(answer: Json, file: Path) -> None:
    """Plot the signal-to-noise ratio by batch size into an image file."""
    try:
        import matplotlib
    except ImportError:
        raise typer.BadParameter(
            "needs matplotlib: pip install 'privacy-accountant[plots]'", param_hint="--plot"
        ) from None
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "accountant"  # makes the files reproducible
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for sampling, style in (("poisson", "-"), ("balls_in_bins", "--")):
        runs = [each for each in answer["runs"] if each["sampling"] == sampling]
        if runs:
            label = sampling.replace("_", " ")
            axes.plot(*_curve(answer, runs), style, linewidth=2, label=label)
    for name, marker in (("recommended", "o"), ("current", "s")):
        if answer[name]:
            label = "today's choice" if name == "current" else name
            axes.plot(*_curve(answer, [answer[name]]), marker, markersize=8, label=label)
    axes.set_xscale("log")
    axes.set(xlabel="batch size", ylabel="signal-to-noise, % of full batches", ylim=(0, 105))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot be written: {error}", param_hint="--plot") from None
    finally:
        plt.close(figure)


def _curve(answer: Json, runs: list[Json]) -> tuple[list[float], list[float]]:
    """Return the batch sizes of runs, and their signal-to-noise ratios in per cent of the limit."""
    limit = answer["signal_to_noise_limit"]
    shares = [100 * run["signal_to_noise"] / limit for run in runs]
    return [run["batch_size"] for run in runs], shares


_OPTIONS: Final = list_options(functions.plan, {}, {}) | {
    "plot": make_option(Path | None, "Also draw the frontier into this SVG, PNG or PDF file."),
    "as_json": AS_JSON,
}
COMMANDS: Final = {
    "plan": make_command("plan", _plan, _OPTIONS, "-E 2 -d 1e-5 -n 60000 -e 20 -b 256")
}
