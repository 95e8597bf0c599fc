"""The commands `accountant caps`: limit what teams and keys may take of a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from accountant_service.cli.access import command_line_key
from accountant_service.cli.mechanism_options import parse_number
from accountant_service.cli.names import check_name
from accountant_service.cli.number_ranges import Range, require_in_range
from accountant_service.cli.opening import open_repository
from accountant_service.cli.printing import AsJson, print_rows
from accountant_service.writing.number_format import round_nearest as shown

if TYPE_CHECKING:
    from accountant_service.ledger.rules import HolderKind

caps = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Limit what teams and keys may take of a dataset's budget.",
)
COMMANDS: Final = {"caps": caps}

Owner = Annotated[
    str, typer.Argument(help="The dataset's name; a series' for all its datasets, also later ones.")
]
TeamOption = Annotated[str | None, typer.Option("--team", help="The team that the cap limits.")]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="The id of the key that the cap limits.")
]


def _choose_holder(team: str | None, key: str | None) -> tuple[HolderKind, str]:
    """Return the holder that a cap is for: exactly one of a team and a key."""
    from accountant_service.ledger.rules import HolderKind

    if team is not None and key is None:
        return HolderKind.TEAM, check_name(team) or ""
    if key is not None and team is None:
        return HolderKind.KEY, key
    raise typer.BadParameter("give one of --team and --key")


@caps.command("set")
def set_cap(
    dataset: Owner,
    share: Annotated[
        Any,
        typer.Option(
            parser=parse_number, metavar="NUMBER", help="Share of the budget, from 0 to 1."
        ),
    ],
    team: TeamOption = None,
    key: KeyOption = None,
) -> None:
    """Limit what a team or a key may take of a dataset's budget."""
    from accountant_service.api.ledger_views import cap_view
    from accountant_service.ledger.caps import Caps
    from accountant_service.ledger.rules import Cap
    from accountant_service.ledger.series_catalog import SeriesCatalog

    require_in_range(("--share", share, Range(0, 1)))
    kind, holder = _choose_holder(team, key)
    with open_repository() as repository:
        cap, series = Cap(kind, holder, share), SeriesCatalog(repository)
        if series.exists(dataset):
            series.set_cap(command_line_key(), dataset, cap)
            part = f"{shown(share)} of the budget of each dataset of {dataset}"
            print(f"{kind} {holder} may take {part}")
            return
        found, use = Caps(repository).set(dataset, cap, by="command-line")
    taken = cap_view(found.policy, use)["share_taken"]
    print(f"{kind} {holder} may take {shown(share)} of the budget of {dataset}; taken: {taken:.4g}")


@caps.command("list")
def list_caps(
    dataset: Annotated[str, typer.Argument(help="The dataset's name.")], as_json: AsJson = False
) -> None:
    """List a dataset's caps, with what each holder has taken."""
    from accountant_service.api.ledger_views import cap_view
    from accountant_service.ledger.caps import Caps

    with open_repository() as repository:
        found, uses = Caps(repository).list_uses(dataset)
    rows = [cap_view(found.policy, use) for use in uses]
    print_rows(rows, ["team", "key", "share", "share_taken"], f"Caps of {dataset}", as_json)


@caps.command("remove")
def remove_cap(
    dataset: Owner,
    team: TeamOption = None,
    key: KeyOption = None,
) -> None:
    """Remove the cap of a team or a key."""
    from accountant_service.ledger.caps import Caps
    from accountant_service.ledger.series_catalog import SeriesCatalog

    kind, holder = _choose_holder(team, key)
    with open_repository() as repository:
        series = SeriesCatalog(repository)
        if series.exists(dataset):
            series.remove_cap(command_line_key(), dataset, kind, holder)
        else:
            Caps(repository).remove(dataset, kind, holder, by="command-line")
    print(f"removed the cap of {kind} {holder}")
