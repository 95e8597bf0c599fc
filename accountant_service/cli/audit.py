"""The command `accountant audit`: the papers' claims, recomputed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from accountant_service.papers import claims

audit_app = typer.Typer(add_completion=False)
COMMANDS: Final = {"audit": audit_app}


@audit_app.command(epilog="Example: accountant audit --plots docs/images")
def audit(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the findings as a Markdown table.")
    ] = False,
    plots: Annotated[
        Path | None, typer.Option(help="Also draw the papers' figures into this folder.")
    ] = None,
) -> None:
    """Recompute the papers' claims and compare each with what is proved."""
    from accountant_service.papers import audit_report, claims

    console = Console(stderr=True, highlight=False)
    with console.status("recomputing the papers' claims"):
        found = list(claims.findings())
        if plots is not None:
            try:
                written = audit_report.draw(claims.figures(), plots)
            except ImportError:
                raise typer.BadParameter(
                    "needs matplotlib: pip install 'privacy-accountant[plots]'",
                    param_hint="--plots",
                ) from None
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2, ensure_ascii=False))
    elif as_markdown:
        typer.echo(audit_report.markdown(found), nl=False)
    else:
        _print_findings(found)
    for file in written if plots is not None else []:
        console.print(f"drew {file}")


def _print_findings(found: list[claims.Finding]) -> None:
    """Print the audit's findings as a table."""
    colours = {"confirmed": "green", "misprinted": "yellow", "not reproduced": "yellow"}
    table = Table(title="The papers' claims, recomputed", title_justify="left", show_lines=True)
    for column in ("claim", "computed", "proved", "verdict"):
        table.add_column(column, overflow="fold")
    for finding in found:
        table.add_row(
            f"[bold]{escape(finding.source)}[/]\n{escape(finding.claim)}",
            finding.computed,
            finding.proved,
            f"[{colours.get(finding.verdict, 'bold red')}]{finding.verdict}[/]\n"
            f"[dim]{finding.remark}[/]",
        )
    Console(highlight=False).print(table)
