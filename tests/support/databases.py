"""Databases for tests: SQLite files, and separate PostgreSQL schemas or servers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from accountant_service.ledger.repository import Repository

SERVER = "postgres@127.0.0.1:5432/test"


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    """Create an empty database of a kind, yield its URL, and remove it afterwards."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/ledger.db"
        return
    schema = f"test_{uuid.uuid4().hex[:12]}"
    try:
        server = psycopg.connect(f"postgresql://{SERVER}", autocommit=True, connect_timeout=20)
    except psycopg.OperationalError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(
            f"no PostgreSQL on 127.0.0.1:5432 ({error}); start one with trust authentication, "
            "user postgres and database test, to run these"
        )
    with server:
        server.execute(f"CREATE SCHEMA {schema}")
        try:
            yield f"postgresql+psycopg://{SERVER}?options=-csearch_path%3D{schema}"
        finally:
            server.execute(f"DROP SCHEMA {schema} CASCADE")


class PrivateServer:
    """A separate PostgreSQL server that a test may stop and start; see `private_server`."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._data, self._programs = folder / "data", programs
        self._data.mkdir()
        self.port = free_port()
        # PostgreSQL refuses to run as root
        user = "postgres" if os.geteuid() == 0 else None
        if user:
            folder.chmod(0o755)
            shutil.chown(self._data, user)
        self._run = partial(subprocess.run, check=True, user=user, stdout=subprocess.DEVNULL)
        self._run([programs / "initdb", "-D", self._data, "-A", "trust", "-U", "postgres"])
        self.start()

    @property
    def url(self) -> str:
        """The URL of the server's only database."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def start(self, *options: str) -> None:
        """Start the server, and wait until it accepts connections."""
        where = f"-p {self.port} -c listen_addresses=127.0.0.1 -k {self._data}"
        self._control("start", "-w", "-o", " ".join([where, *options]), "-l", self._data / "log")

    def demote(self, *options: str) -> None:
        """Restart the server as a read-only standby."""
        self._control("stop", "-m", "fast")
        (self._data / "standby.signal").touch()
        self.start(*options)

    def promote(self) -> None:
        """Make a standby writable again."""
        self._control("promote", "-w")

    def execute(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        url = self.url.replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            for each in statements:
                connection.execute(each.encode())

    def crash(self) -> None:
        """Stop the server at once, as a power failure would, without flushing anything."""
        self._control("stop", "-m", "immediate")

    def _control(self, *arguments: str | Path) -> None:
        """Run `pg_ctl` on the server's data folder."""
        self._run([self._programs / "pg_ctl", "-D", self._data, *arguments])


@contextmanager
def private_server() -> Iterator[PrivateServer]:
    """Start a separate PostgreSQL server; skip the test if the programs are missing."""
    found = shutil.which("pg_ctl") or next(
        (str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))), None
    )
    if found is None:
        assert not os.environ.get("CI"), "pg_ctl is needed"
        pytest.skip("no pg_ctl: install PostgreSQL's server programs to run this")
    # not below pytest's folder, which only its owner may enter
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = PrivateServer(Path(folder), Path(found).resolve().parent)
        try:
            yield server
        finally:
            with suppress(subprocess.CalledProcessError):  # it may be down already
                server.crash()


def free_port() -> int:
    """Return a TCP port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def record_plans(repository: Repository, table: str) -> list[str]:
    """Return a list to which the query plan of every later statement about a table is added."""
    plans: list[str] = []

    def explain(connection: Any, _: Any, statement: str, parameters: Any, *__: Any) -> None:
        """Add the plan of a statement, before it is run."""
        if f"FROM {table}" in statement and "EXPLAIN" not in statement:
            is_sqlite = connection.dialect.name == "sqlite"
            prefix = "EXPLAIN QUERY PLAN " if is_sqlite else "EXPLAIN (ANALYZE) "
            found = connection.exec_driver_sql(prefix + statement, parameters)
            plans.append("\n".join(str(row) for row in found))

    event.listen(repository.engine, "before_cursor_execute", explain)
    return plans
