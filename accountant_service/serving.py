"""The server: one process or several, what they share, and how they stop."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from accountant_service import logs
from accountant_service.app import create_app
from accountant_service.connections import PatientProtocol
from accountant_service.ledger.database import open_repository
from accountant_service.settings import Settings

# seconds after which a thread lets another one go on: a tenth of Python's own default, so that a
# grant's thread waits little for threads that are busy with large bodies
_SWITCH_SECONDS: Final = 0.0005


def worker() -> FastAPI:
    """The application of one of several workers, in a process of its own."""
    settings = Settings()
    logs.configure(settings.log_level)
    return _ready(create_app(settings))


def _ready(app: FastAPI) -> FastAPI:
    """The application in a process that serves nothing else."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    app.state.answerer.prepare()
    return app


def serve(host: str, port: int, workers: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT; calls in flight are finished first.

    Args:
        host: address to listen on.
        port: port to listen on.
        workers: processes that serve; by default as the settings say.

    Raises:
        DatabaseAwayError: the database does not answer.
        NewerDatabaseError: it was made by a newer version.
    """
    settings = Settings()
    workers = workers or settings.workers
    logs.configure(settings.log_level)
    _allow_many_connections()
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "http": PatientProtocol,
        "log_config": None,
        "log_level": settings.log_level,
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": settings.shutdown_seconds,
        "proxy_headers": bool(settings.trusted_proxies),  # else uvicorn has proxies of its own
        "forwarded_allow_ips": settings.trusted_proxies,
    }
    if workers == 1:
        uvicorn.run(_ready(create_app(settings)), **options)
        return
    open_repository(settings.database).close()  # fails here, once, rather than in each worker
    with _shared_metrics():
        uvicorn.run("accountant_service.serving:worker", factory=True, workers=workers, **options)


def _allow_many_connections() -> None:
    """Raise the limit of open files as far as it goes: idle clients must not use it up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _shared_metrics() -> Iterator[None]:
    """A directory for the numbers of all workers, which find it by the variable."""
    with TemporaryDirectory(prefix="accountant-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]
