"""The commands `accountant webhook`: tell another program about budgets."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer

from accountant_service.cli.mechanism_options import parse_number
from accountant_service.cli.number_ranges import Range, require_in_range
from accountant_service.cli.opening import open_repository
from accountant_service.cli.printing import AsJson, print_rows

webhook = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Tell another program when a share of a budget is passed or a dataset is closed.",
)
COMMANDS: Final = {"webhook": webhook}
Identifier = Annotated[str, typer.Argument(metavar="ID", help="From `webhook list`.")]


@webhook.command("add")
def add(
    url: Annotated[str, typer.Argument(help="Address that the service posts events to.")],
    dataset: Annotated[
        str | None, typer.Option(help="Only this dataset, or series. Default: all, and API keys.")
    ] = None,
    share: Annotated[
        list[Any] | None,
        typer.Option(
            parser=parse_number,
            metavar="NUMBER",
            help="Share of a budget, such as 0.8. Repeatable. Default: 0.5, 0.8, 0.95.",
        ),
    ] = None,
) -> None:
    """Add a webhook, and print its secret on one line. It cannot be shown again."""
    from accountant_service.ledger.api_keys import COMMAND_LINE
    from accountant_service.ledger.errors import UnknownSubjectError
    from accountant_service.ledger.repository import now
    from accountant_service.ledger.webhooks import SHARES, create_webhook

    require_in_range(("--share", share, Range(0, 1, open_=True)))
    try:
        made = create_webhook(url, dataset, share or SHARES, now())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with open_repository() as repository, repository.transaction() as transaction:
        find = transaction.find_dataset, transaction.find_series
        if dataset is not None and not any(each(dataset) for each in find):
            raise UnknownSubjectError(f"there is no dataset and no series {dataset!r}")
        transaction.add_webhook(made, COMMAND_LINE)
    print(made.secret)


@webhook.command("list")
def list_webhooks(as_json: AsJson = False) -> None:
    """List webhooks, with the events that wait and why the last attempt failed."""
    with open_repository() as repository, repository.reading() as reading:
        found = reading.list_webhooks()
        waiting = [reading.list_waiting_events(each.identifier) for each in found]
    rows = [
        {
            "id": each.identifier,
            "url": each.url,
            "dataset": each.dataset,
            "shares": each.shares,
            "waiting": len(events),
            "last_error": next((event.last_error for event in events if event.last_error), None),
        }
        for each, events in zip(found, waiting, strict=True)
    ]
    columns = ["id", "url", "dataset", "shares", "waiting", "last_error"]
    print_rows(rows, columns, "Webhooks", as_json)


@webhook.command("remove")
def remove(identifier: Identifier) -> None:
    """Remove a webhook, and the events that wait for it."""
    from accountant_service.ledger.api_keys import COMMAND_LINE
    from accountant_service.ledger.errors import UnknownSubjectError

    with open_repository() as repository, repository.transaction() as transaction:
        if not transaction.remove_webhook(identifier, COMMAND_LINE):
            raise UnknownSubjectError(f"there is no webhook {identifier!r}")
    print(f"removed {identifier}")


@webhook.command("test")
def test(identifier: Identifier) -> None:
    """Post a test event now. Exit code 1 if the receiver does not answer 2xx."""
    from accountant_service.ledger.errors import UnknownSubjectError
    from accountant_service.ledger.repository import now
    from accountant_service.ledger.webhook_delivery import post_event
    from accountant_service.ledger.webhooks import describe_trial

    with open_repository() as repository, repository.reading() as reading:
        found = {each.identifier: each for each in reading.list_webhooks()}.get(identifier)
        if found is None:
            raise UnknownSubjectError(f"there is no webhook {identifier!r}")
    failure = post_event(found, describe_trial(found, now()))
    if failure:
        print(f"error: {found.url}: {failure}", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{found.url} accepted the event")
