"""The commands `accountant keys`: create, limit, list and revoke API keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from accountant_service.cli.mechanism_options import parse_count, parse_number
from accountant_service.cli.names import check_label, check_name
from accountant_service.cli.number_ranges import Range, require_in_range
from accountant_service.cli.opening import open_repository
from accountant_service.cli.printing import AsJson, print_rows
from accountant_service.ledger.names import Scope
from accountant_service.ledger.quotas import REQUESTS_PER_MINUTE_MAX

keys = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Create, limit, list and revoke API keys."
)
COMMANDS: Final = {"keys": keys}
_QUOTAS: Final = Range(1, REQUESTS_PER_MINUTE_MAX, is_whole=True)
_LIFETIMES: Final = Range(0, 36500, open_=True)  # in days
Quota = Annotated[
    Any,
    typer.Option(
        "--requests-per-minute",
        parser=parse_count,
        metavar="INTEGER",
        help="The key's quota: as many requests at once, and again at an even rate in a minute.",
    ),
]


def _parse_identifier(text: str) -> str:
    """Return a key's id; refuse the key itself, which is in the shell's history then."""
    if text.startswith("pa_"):
        shown = text.split("_")[1]
        raise typer.BadParameter(f"is the part between the underscores of a key: write {shown}")
    return text


Identifier = Annotated[
    str,
    typer.Argument(
        parser=_parse_identifier, metavar="IDENTIFIER", help="The key's id, from `keys list`."
    ),
]


@keys.command("create")
def create_key(
    scope: Annotated[
        list[Scope],
        typer.Option(
            "--scope",
            metavar="SCOPE",
            help=f"A permission of the key: {', '.join(Scope)}. Repeatable.",
        ),
    ],
    name: Annotated[str, typer.Option(help="A name for the key, for example its owner.")] = "",
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", metavar="NAME", help="Bind the key to this dataset. Repeatable."),
    ] = None,
    expires_in_days: Annotated[
        Any,
        typer.Option(
            parser=parse_number,
            metavar="NUMBER",
            help="Days until the key expires. Default: never.",
        ),
    ] = None,
    team: Annotated[
        str | None, typer.Option(help="The team whose runs and caps the key shares.")
    ] = None,
    requests_per_minute: Quota = None,
) -> None:
    """Create a key and print it on one line. It cannot be shown again."""
    from accountant_service.ledger.api_keys import Keys
    from accountant_service.ledger.repository import now

    require_in_range(
        ("--expires-in-days", expires_in_days, _LIFETIMES),
        ("--requests-per-minute", requests_per_minute, _QUOTAS),
    )
    names = tuple(each for each in dataset or () if check_name(each, "--dataset"))
    expires = None if expires_in_days is None else now() + int(86400e6 * expires_in_days)
    with open_repository(create=True) as repository:
        store = Keys(repository)
        for warning in store.warn_of_missing_datasets(names):
            typer.echo(f"warning: {warning}", err=True)
        token, _ = store.create(
            scope,
            check_label(name),
            names or None,
            expires,
            check_name(team),
            requests_per_minute=requests_per_minute,
        )
    print(token)


@keys.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List keys, when each was last used and until when it is valid, in UTC.

    Secrets are never stored.
    """
    from accountant_service.ledger.api_keys import Keys
    from accountant_service.ledger.repository import now

    with open_repository() as repository:
        found = Keys(repository).list_keys()
    rows = [
        {
            "id": key.identifier,
            "name": key.name,
            "scopes": sorted(key.scopes),
            "datasets": key.datasets,
            "team": key.team,
            "requests_per_minute": key.requests_per_minute,
            "last_used_at": None if key.last_used_at is None else key.last_used_at / 1e6,
            "expires_at": None if key.expires_at is None else key.expires_at / 1e6,
            "revoked": key.revoked_at is not None,
        }
        for key in found
    ]
    if not as_json:
        rows = [
            row
            | {
                "quota": _describe_quota(row["requests_per_minute"]),
                "last used": _describe_use(row["last_used_at"]),
                "valid until": _describe_validity(row, now() / 1e6),
            }
            for row in rows
        ]
    columns = ["id", "name", "scopes", "datasets", "team", "quota", "last used", "valid until"]
    print_rows(rows, columns, "API keys", as_json)


def _describe_quota(requests_per_minute: Any) -> str | None:
    """Return a key's quota for a table; None if it has none."""
    return None if requests_per_minute is None else f"{requests_per_minute}/min"


def _describe_use(seconds: Any) -> str:
    """Return when a key was last used, to the minute, for a table."""
    return "never" if seconds is None else _format_minute(seconds)


def _describe_validity(key: Mapping[str, Any], at: float) -> str:
    """Return until when a key is valid, to the minute, or why it is not valid at a time."""
    if key["revoked"]:
        return "revoked"
    expires = key["expires_at"]
    if expires is None:
        return "no end"
    return "expired" if expires <= at else _format_minute(expires)


def _format_minute(seconds: float) -> str:
    """Format Unix time in seconds as a date and time in UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


@keys.command("limit")
def limit_key(
    identifier: Identifier,
    requests_per_minute: Quota = None,
    unlimited: Annotated[bool, typer.Option("--unlimited", help="Remove the quota.")] = False,
) -> None:
    """Set or remove the quota of a key. It counts from now on."""
    from accountant_service.ledger.api_keys import COMMAND_LINE, Keys

    require_in_range(("--requests-per-minute", requests_per_minute, _QUOTAS))
    if unlimited == (requests_per_minute is not None):
        raise typer.BadParameter("give one of --requests-per-minute and --unlimited")
    with open_repository() as repository:
        Keys(repository).set_quota(identifier, requests_per_minute, by=COMMAND_LINE)
    quota = "no quota" if unlimited else f"a quota of {requests_per_minute} requests a minute"
    print(f"{identifier} has {quota}")


@keys.command("revoke")
def revoke_key(
    identifier: Identifier,
) -> None:
    """Revoke a key from now on."""
    from accountant_service.ledger.api_keys import COMMAND_LINE, Keys

    with open_repository() as repository:
        if Keys(repository).revoke(identifier, by=COMMAND_LINE) is None:
            print(f"error: there is no key {identifier!r}", file=sys.stderr)
            raise typer.Exit(1)
    print(f"revoked {identifier}")


@keys.command("reset")
def reset_keys(
    yes: Annotated[bool, typer.Option("--yes", help="Do it: it cannot be undone.")] = False,
) -> None:
    """Make all keys and sessions invalid, and sign certificates with a new key from now on.

    For a database that has leaked. Stop every server first.
    """
    from accountant_service.ledger.api_keys import COMMAND_LINE

    if not yes:
        raise typer.BadParameter("stop every server, then repeat the command with --yes")
    with open_repository() as repository, repository.transaction() as transaction:
        transaction.delete_secrets()
        transaction.revoke_all_keys()
        transaction.record_audit_event(COMMAND_LINE, "keys-reset", "")
    print("all keys and sessions are invalid: create new keys, and start the servers")
