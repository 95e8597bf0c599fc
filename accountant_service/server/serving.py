"""The server: starts one or several worker processes."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, Final

from fastapi import FastAPI
from uvicorn.supervisors import Multiprocess

from accountant_service.computing.fork_server import FORK_SERVER
from accountant_service.ledger.database import open_repository
from accountant_service.operations import logs
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from accountant_service.server.connection_limits import (
    LimitedConfig,
    LimitedProtocol,
    LimitedServer,
)

# interval at which Python switches threads: a tenth of its default, so that a grant waits little
# for threads that are busy with large bodies
_SWITCH_SECONDS: Final = 0.0005
# a worker that does not answer for so long is replaced. It must be longer than a start, in which a
# worker answers nothing while it imports: on a busy machine that takes more than uvicorn's 5 s
_WORKER_ANSWER_SECONDS: Final = 60


def worker_app() -> FastAPI:
    """Create the application of one worker process, for uvicorn."""
    settings = Settings()
    logs.configure(settings.log_level)
    return _prepare_process(create_app(settings))


def _prepare_process(app: FastAPI) -> FastAPI:
    """Prepare this process to serve an application, and preload what computations need."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    app.state.computations.preload()
    return app


def serve(host: str, port: int, workers: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight are finished first.

    Args:
        host: address to listen on.
        port: port to listen on.
        workers: number of worker processes; from the settings by default.

    Raises:
        DatabaseAwayError: the database does not answer.
        DatabaseRefusedError: a newer version made the database, or the ledger was moved.
    """
    settings = Settings()
    workers = workers or settings.workers
    logs.configure(settings.log_level)
    _allow_many_connections()
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "http": LimitedProtocol,
        "ws": "none",
        "log_config": None,
        "log_level": settings.log_level,
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": settings.shutdown_seconds,
        "proxy_headers": bool(
            settings.trusted_proxies
        ),  # otherwise uvicorn trusts proxies by default
        "forwarded_allow_ips": settings.trusted_proxies,
    }
    if workers == 1:
        app = _prepare_process(create_app(settings))
        LimitedServer(LimitedConfig(app, **options)).run()
        return
    FORK_SERVER.close()  # each worker process has its own
    open_repository(settings.database).close()  # fails once here, not in each worker
    config = LimitedConfig(
        "accountant_service.server.serving:worker_app",
        factory=True,
        workers=workers,
        timeout_worker_healthcheck=_WORKER_ANSWER_SECONDS,
        **options,
    )
    with _shared_metrics_directory():
        Multiprocess(config, sockets=[config.bind_socket()]).run()


def _allow_many_connections() -> None:
    """Raise the limit of open files to its maximum, so that idle clients do not exhaust it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _shared_metrics_directory() -> Iterator[None]:
    """Context manager that sets PROMETHEUS_MULTIPROC_DIR to a temporary directory."""
    with TemporaryDirectory(prefix="accountant-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]
