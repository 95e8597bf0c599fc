"""The commands `accountant keys`: create, list and revoke API keys."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from accountant_service.cli.names import check_name
from accountant_service.cli.opening import open_repository
from accountant_service.cli.printing import AsJson, print_rows
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.repository import now

keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")
COMMANDS: Final = {"keys": keys}


@keys.command("create")
def create_key(
    scope: Annotated[
        list[Scope], typer.Option("--scope", help="A permission of the key. Repeatable.")
    ],
    name: Annotated[str, typer.Option(help="A name for the key, for example its owner.")] = "",
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", help="Bind the key to this dataset. Repeatable."),
    ] = None,
    expires_in_days: Annotated[
        float | None, typer.Option(help="Days until the key expires. Default: never.")
    ] = None,
    team: Annotated[
        str | None, typer.Option(help="The team whose runs and caps the key shares.")
    ] = None,
) -> None:
    """Create a key and print it on one line. It cannot be shown again."""
    expires = None if expires_in_days is None else now() + int(86400e6 * expires_in_days)
    with open_repository() as repository:
        token, _ = Keys(repository).create(
            scope, name, None if not dataset else tuple(dataset), expires, check_name(team)
        )
    print(token)


@keys.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List keys (secrets are never stored)."""
    with open_repository() as repository:
        found = Keys(repository).list_keys()
    rows = [
        {
            "id": key.identifier,
            "name": key.name,
            "scopes": sorted(key.scopes),
            "datasets": key.datasets,
            "team": key.team,
            "revoked": key.revoked_at is not None,
        }
        for key in found
    ]
    print_rows(rows, ["id", "name", "scopes", "datasets", "team", "revoked"], "API keys", as_json)


@keys.command("revoke")
def revoke_key(
    identifier: Annotated[str, typer.Argument(help="The key's id, from `keys list`.")],
) -> None:
    """Revoke a key from now on."""
    with open_repository() as repository:
        if Keys(repository).revoke(identifier, by="command-line") is None:
            print(f"error: there is no key {identifier!r}", file=sys.stderr)
            raise typer.Exit(1)
    print(f"revoked {identifier}")
