"""Servers that kill themselves at a chosen point of their work with the database.

    python failing_server.py

Reads lines `PORT POINT MUTANT` and forks a server for each, which ends by SIGKILL when it comes to
the point: the first is before its first statement, the next before its second, and so on; there is
one before each commit and one after it. Mutants lack what a promise rests on: `autocommit` makes
every statement a transaction of its own, `forgetful` remembers no idempotency key, `hasty` answers
without a commit, `none` is sound.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import uvicorn
from sqlalchemy import event

from accountant_service.computing.processes import ProcessPool
from accountant_service.ledger.repository import Repository, Transaction
from accountant_service.ledger.webhook_delivery import WebhookDelivery
from accountant_service.server.app import create_app


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        port, point, mutant = line.split()
        if os.fork() == 0:
            serve(int(port), int(point), mutant)
            return


def serve(port: int, point: int, mutant: str) -> None:
    ProcessPool.run = compute_here  # type: ignore[method-assign]
    WebhookDelivery.start = lambda _: None  # type: ignore[method-assign]  # its reads are no points
    app = create_app()
    mutate(app.state.repository, mutant)
    arm(app.state.repository, point)
    uvicorn.run(app, port=port, log_level="error")


async def compute_here(_: ProcessPool, function: Any, *arguments: Any) -> Any:
    """Calculations are not what fails here; hundreds of servers need no processes for them."""
    return function(*arguments)


def mutate(repository: Repository, mutant: str) -> None:
    if mutant == "forgetful":
        Transaction.store_answer = lambda *_: None  # type: ignore[method-assign]
    if mutant == "hasty":
        repository.engine.dialect.do_commit = lambda _: None  # type: ignore[method-assign]
    if mutant == "autocommit":
        commit = repository.engine.dialect.do_commit
        event.listen(
            repository.engine,
            "before_cursor_execute",
            lambda connection, *_: commit(connection.connection),
        )


def arm(repository: Repository, point: int) -> None:
    left = point

    def pass_point(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    dialect: Any = repository.engine.dialect
    genuine = dialect.do_commit

    def commit(connection: object) -> None:
        pass_point()
        genuine(connection)
        pass_point()

    event.listen(repository.engine, "before_cursor_execute", pass_point)
    dialect.do_commit = commit


if __name__ == "__main__":
    main()
