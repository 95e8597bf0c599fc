"""Databases of their own for tests: SQLite files, and PostgreSQL schemas where there is one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

SERVER = "postgres@127.0.0.1:5432/test"


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/ledger.db"
        return
    schema = f"test_{uuid.uuid4().hex[:12]}"
    try:
        server = psycopg.connect(f"postgresql://{SERVER}", autocommit=True, connect_timeout=3)
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
