"""The command `accountant serve`."""

from __future__ import annotations

import socket
from typing import Annotated, Final

import typer

from accountant_service.fork_server import FORK_SERVER

serve_app = typer.Typer()
COMMANDS: Final = {"serve": serve_app}


@serve_app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Server processes; ACCOUNTANT_WORKERS by default."),
    ] = None,
) -> None:
    """Run the service: the API, its documentation at /docs, health at /healthz."""
    _require_free(host, port)
    # both processes import for a second: at the same time, so that the first questions after a
    # start do not wait for it
    FORK_SERVER.start()
    from accountant_service import serving
    from accountant_service.ledger.database import DatabaseRefusedError
    from accountant_service.ledger.errors import DatabaseAwayError

    typer.echo(f"Listening on http://{host}:{port} (API documentation at /docs)", err=True)
    try:
        serving.serve(host, port, workers)
    except (DatabaseAwayError, DatabaseRefusedError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _require_free(host: str, port: int) -> None:
    """Exit with code 2 if the address cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        typer.echo(
            f"error: cannot listen on {host}:{port}: {error.strerror}. "
            "Stop the program that uses it, or choose another with --port",
            err=True,
        )
        raise typer.Exit(2) from None
