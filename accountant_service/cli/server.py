"""The command `accountant serve`."""

from __future__ import annotations

import errno
import socket
from typing import Annotated, Any, Final

import typer

from accountant_service.cli.mechanism_options import parse_count
from accountant_service.cli.number_ranges import Range, require_in_range
from accountant_service.computing.fork_server import FORK_SERVER
from accountant_service.questions import PRELOADING

serve_app = typer.Typer(add_completion=False)
COMMANDS: Final = {"serve": serve_app}
_PORTS: Final = Range(1, 65535, is_whole=True)
_WORKERS: Final = Range(1, 64, is_whole=True)


@serve_app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        Any, typer.Option(parser=parse_count, metavar="INTEGER", help="Port to listen on.")
    ] = 8000,
    workers: Annotated[
        Any,
        typer.Option(
            parser=parse_count,
            metavar="INTEGER",
            help="Server processes; ACCOUNTANT_WORKERS by default.",
        ),
    ] = None,
) -> None:
    """Run the service: the API, its documentation at /docs, health at /healthz."""
    require_in_range(("--port", port, _PORTS), ("--workers", workers, _WORKERS))
    _require_free(host, port)
    # both processes import for a second: at the same time, so that the first questions after a
    # start do not wait for it
    FORK_SERVER.preload = PRELOADING
    FORK_SERVER.start()
    from accountant_service.ledger.database import DatabaseRefusedError
    from accountant_service.ledger.errors import DatabaseAwayError
    from accountant_service.operations.settings import Settings
    from accountant_service.server import serving

    Settings()  # a wrong setting is told before anything listens
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
            f"error: cannot listen on {host}:{port}: {error.strerror}. {_advise(error)}", err=True
        )
        raise typer.Exit(2) from None


def _advise(error: OSError) -> str:
    """Return what to do if an address cannot be listened on."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "Give an address of this machine with --host, such as 127.0.0.1, or 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return "Ports below 1024 need privileges: choose another with --port"
    return "Stop the program that uses it, or choose another with --port"
