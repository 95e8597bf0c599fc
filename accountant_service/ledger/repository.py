"""All SQL of the ledger, for SQLite and PostgreSQL, one transaction at a time.

SQLite uses a write-ahead log and synchronous=FULL, and begins every transaction with BEGIN
IMMEDIATE, so there is one writer at a time. In PostgreSQL a transaction locks the dataset's row
before it reads anything that a charge depends on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    Engine,
    ExceptionContext,
    Select,
    String,
    and_,
    bindparam,
    create_engine,
    desc,
    event,
    func,
    literal,
    make_url,
    or_,
    select,
    text,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from accountant_service import mechanisms
from accountant_service.ledger import filters, hash_chain, rules, schema_revision, webhooks
from accountant_service.ledger.columns import (
    Row,
    list_columns,
    read_integers,
    read_model,
    write_row,
)
from accountant_service.ledger.errors import (
    DatabaseAwayError,
    DatabaseReadOnlyError,
    DatabaseSchemaError,
    StoredRowError,
    UnauthenticatedError,
)
from accountant_service.ledger.filters.base import Amounts, Charge, add
from accountant_service.ledger.fingerprints import fingerprint
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.quotas import Quota
from accountant_service.ledger.reading_rows import UNREADABLE, read_entry, read_row
from accountant_service.ledger.rules import (
    Balance,
    Cap,
    CapUse,
    Change,
    Dataset,
    EntryKind,
    HolderKind,
    Reservation,
    State,
)
from accountant_service.ledger.series import Series
from accountant_service.ledger.tables import (
    API_KEY,
    AUDIT_EVENT,
    CAP,
    DATASET,
    ENTRY,
    IDEMPOTENCY,
    RESERVATION,
    SECRET,
    SERIES,
    SERIES_CAP,
    WEBHOOK,
    WEBHOOK_EVENT,
)
from accountant_service.ledger.webhooks import Event, Webhook
from accountant_service.version import __version__
from accountant_service.writing.canonical_json import read_json

_BUSY_SECONDS: Final = 20.0  # the wait for SQLite's one writer
_LOCK_SECONDS: Final = 5.0  # the wait for a locked row of PostgreSQL
_READING: Final = "ledger_reading"  # the execution option of connections that only read
# no answer, or none in time; a refused statement is a defect of this service instead
_CONNECTION_FAILURES: Final = (OperationalError, InterfaceError, PoolTimeoutError)
_READ_ONLY_SQLSTATE: Final = "25006"  # PostgreSQL's, for instance on a standby
# why a database takes no writes, by SQLSTATE or SQLite's primary result code
_READ_ONLY_REASONS: Final[dict[Any, str]] = {
    _READ_ONLY_SQLSTATE: "it is read-only",
    "42501": "its user lacks the permission",
    "53100": "its disk is full",
    sqlite3.SQLITE_READONLY: "it is read-only",
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_IOERR: "its disk reports errors",
    sqlite3.SQLITE_CORRUPT: "its file is damaged",
    sqlite3.SQLITE_NOTADB: "its file is damaged",
}
_BACKENDS: Final = ("sqlite", "postgresql")
_RESERVATIONS_SEARCHED: Final = 200  # the latest entries in which the times of runs are found
_BODY_SEARCHED_MAX: Final = 20_000  # characters of such an entry, most of which is the plan
_NO_SUCH_SQLSTATES: Final = ("42P01", "42703")  # of a table, of a column
_NO_SUCH: Final = ("no such table", "no such column", "has no column named")  # SQLite's words
_UNDECODABLE: Final = "Could not decode to UTF-8"  # of SQLite's driver, with the column's name
_RETRY_WRITE: Final = (
    "nothing is granted; retry with the same Idempotency-Key: retries take effect once"
)
_REVOKED_MEANWHILE: Final = "this API key was revoked while the request waited; it had no effect"
_KEPT_CAPS_SINCE: Final = "0009"  # earlier servers do not keep what the holder has taken
_OWNER_REFERENCES_SINCE: Final = "0011"  # earlier servers would replace them, and know no entry
_JOINT_RUNS_SINCE: Final = "0009"  # earlier servers would grant steps on one dataset alone
PAGE_SIZE: Final = 200  # entries
_PAGE_CHARACTERS_MAX: Final = 1 << 18  # of a page's plans or entries
_DAY_MICROSECONDS: Final = 86_400_000_000
SECRET_BYTES: Final = 32
SYSTEM: Final = "system"  # who acts if no key does: expired leases, new secrets
RunPlace = tuple[bool, int, str]  # in the list of runs: whether it ended, its lease's end, its id


# the statements of every grant, built once: to build one costs more than to run it
_DATASET_BY_NAME: Final = select(DATASET).where(DATASET.c.name == bindparam("row_key"))
_DATASET_BY_ID: Final = select(DATASET).where(DATASET.c.id == bindparam("row_key"))
_UPDATE_DATASET: Final = (
    DATASET.update()
    .where(DATASET.c.id == bindparam("row_key"))
    .values({name: bindparam(f"new_{name}") for name in ("spent", "held", "version", "head")})
)
_REPLACE_POLICY: Final = (
    DATASET.update()
    .where(DATASET.c.id == bindparam("row_key"))
    .values(policy=bindparam("new_policy"))
)
_CLOSE_DATASET: Final = (
    DATASET.update()
    .where(DATASET.c.id == bindparam("row_key"))
    .values(closed_at=bindparam("new_closed_at"))
)
_RESERVATION_BY_ID: Final = select(RESERVATION).where(RESERVATION.c.id == bindparam("row_key"))
_UPDATE_RESERVATION: Final = (
    RESERVATION.update()
    .where(RESERVATION.c.id == bindparam("row_key"))
    .values(
        {
            each.name: bindparam(f"new_{each.name}")
            for each in list_columns(Reservation, changes=True)
        }
    )
)
_UPDATE_STEPS_GRANTED: Final = (  # changes no indexed column, so no index is written
    RESERVATION.update()
    .where(RESERVATION.c.id == bindparam("row_key"))
    .values(steps_granted=bindparam("new_steps_granted"))
)
# any number, other than that of migrations
_LOCK_NEW_NAMES: Final = text("SELECT pg_advisory_xact_lock(7071968)")
_NO_FLUSH: Final = text("SET LOCAL synchronous_commit = off")
_COUNT_REQUEST: Final = text(
    "UPDATE api_key SET quota_empty_at = :interval + "
    "CASE WHEN quota_empty_at > :at AND quota_empty_at <= :plausible THEN quota_empty_at "
    "ELSE :at END WHERE id = :row_key AND (quota_empty_at IS NULL OR quota_empty_at <= :latest "
    "OR quota_empty_at > :plausible)"
).bindparams(*(bindparam(each, type_=BigInteger) for each in ("at", "interval", "plausible")))
_INSERT_ENTRY: Final = ENTRY.insert()
_DERIVE_ENTRY: Final = (
    ENTRY.update()
    .where(ENTRY.c.dataset == bindparam("of_dataset"))
    .where(ENTRY.c.number == bindparam("of_number"))
    .where(ENTRY.c.at.is_(None))
    .values(kind=bindparam("new_kind"), at=bindparam("new_at"))
)
# every write stores its answer: one statement also finds out that its key was revoked meanwhile,
# or, if the key was only remembered, that it is not as it was
_THE_KEY: Final = select(API_KEY.c.id).where(API_KEY.c.id == bindparam("key_id", type_=String))
_REVOKED_KEY: Final = _THE_KEY.where(API_KEY.c.revoked_at.is_not(None))
_KEY_WITHOUT_QUOTA: Final = _THE_KEY.where(API_KEY.c.requests_per_minute.is_(None))
_INSERT_ANSWER: Final = (
    IDEMPOTENCY.insert()
    .from_select(
        [column.name for column in IDEMPOTENCY.columns],
        select(
            *(bindparam(column.name, type_=column.type) for column in IDEMPOTENCY.columns)
        ).where(
            ~_REVOKED_KEY.exists(),
            or_(bindparam("is_authenticated", type_=Boolean), _KEY_WITHOUT_QUOTA.exists()),
        ),
    )
    .execution_options(preserve_rowcount=True)
)
_ANSWER_BY_KEY: Final = (
    select(IDEMPOTENCY)
    .where(IDEMPOTENCY.c.key_id == bindparam("key"))
    .where(IDEMPOTENCY.c.value == bindparam("value"))
)
_INSERT_SECRET: Final = text(
    "INSERT INTO secret (name, value) VALUES (:name, :value) ON CONFLICT DO NOTHING"
)
_SERIES_BY_NAME: Final = select(SERIES).where(SERIES.c.name == bindparam("row_key"))
_WITH_LOCK: Final = {
    query: query.with_for_update() for query in (_DATASET_BY_NAME, _DATASET_BY_ID, _SERIES_BY_NAME)
}


def now() -> int:
    """Return the current time in microseconds since 1970."""
    return time.time_ns() // 1000


def connect(url: str) -> Engine:
    """Create the engine of a database URL, configured for durable and serialised writes.

    Raises:
        ArgumentError: the URL is not of SQLite or PostgreSQL, or its driver is not installed.
    """
    backend = make_url(url).get_backend_name()
    if backend not in _BACKENDS:
        raise ArgumentError(f"{backend!r} is neither sqlite nor postgresql+psycopg")
    try:
        return _create_engine(url)
    except ModuleNotFoundError as error:
        raise ArgumentError(f"its driver {error.name!r} is not installed") from None


def _create_engine(url: str) -> Engine:
    """Create the engine of a database URL of a known backend."""
    if url.startswith("sqlite"):
        engine = create_engine(
            url,
            pool_size=8,
            max_overflow=16,
            connect_args={"timeout": _BUSY_SECONDS},
            hide_parameters=True,  # in error texts
        )
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    url_options = make_url(url).query.get("options", "")
    timeouts = f"-c lock_timeout={int(1000 * _LOCK_SECONDS)} -c statement_timeout=30000"
    engine = create_engine(
        url,
        pool_size=8,
        max_overflow=16,
        pool_timeout=10,
        hide_parameters=True,
        connect_args={"connect_timeout": 5, "options": f"{url_options} {timeouts}"},
    )
    event.listen(engine, "handle_error", _disconnect_from_standby)
    return engine


def _disconnect_from_standby(context: ExceptionContext) -> None:
    """Drop all connections to a server that became read-only: another may have replaced it."""
    if _driver_code(context.original_exception) == _READ_ONLY_SQLSTATE:
        context.is_disconnect = True


def _driver_code(error: BaseException | None) -> str | int | None:
    """Return the database driver's error code: an SQLSTATE, or SQLite's primary result code."""
    code = getattr(error, "sqlite_errorcode", None)
    return getattr(error, "sqlstate", None) if code is None else code & 0xFF


@contextmanager
def _convert_failures(advice: str) -> Iterator[None]:
    """Context manager that turns driver errors of an unavailable database into ledger errors."""
    try:
        yield
    except (DBAPIError, PoolTimeoutError) as error:
        if _UNDECODABLE in str(getattr(error, "orig", "")):  # SQLite stores any bytes as text
            raise StoredRowError(f"a row has text that is not UTF-8: {error}") from error
        reason = _READ_ONLY_REASONS.get(_driver_code(getattr(error, "orig", None)))
        if reason is not None:
            raise DatabaseReadOnlyError(
                f"the database takes no writes: {reason}; {advice}"
            ) from error
        if _lacks_table_or_column(error):
            raise DatabaseSchemaError(
                f"the database's tables are not those of this server ({_describe(error)}): start "
                f"the newest server; {advice}"
            ) from error
        if _is_connection_failure(error):
            raise DatabaseAwayError(f"the database does not answer; {advice}") from error
        raise


def _lacks_table_or_column(error: Exception) -> bool:
    """Return whether the database refused a statement about a table or column that it lacks."""
    driver_error = getattr(error, "orig", None)
    if isinstance(driver_error, sqlite3.Error):
        return any(words in str(driver_error) for words in _NO_SUCH)
    return _driver_code(driver_error) in _NO_SUCH_SQLSTATES


def _describe(error: Exception) -> str:
    """Return the first line of a driver's message."""
    return str(getattr(error, "orig", error)).partition("\n")[0]


def _is_connection_failure(error: Exception) -> bool:
    """Return whether the database did not answer, or not in time; not if it refused a statement."""
    driver_error = getattr(error, "orig", None)
    if isinstance(driver_error, sqlite3.Error):
        refused = _driver_code(driver_error) == sqlite3.SQLITE_ERROR
        return isinstance(error, OperationalError) and not refused
    is_invalidated = getattr(error, "connection_invalidated", False)
    return isinstance(error, _CONNECTION_FAILURES) or is_invalidated


def _begin_sqlite(connection: Connection) -> None:
    """Begin an SQLite transaction: a writer locks the database, a reader does not."""
    reading = connection.get_execution_options().get(_READING, False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _prepare_sqlite(connection: Any, _: Any) -> None:
    """Configure a new SQLite connection: durable commits, write-ahead log and foreign keys."""
    connection.isolation_level = None  # SQLAlchemy sends BEGIN, not the driver
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


@contextmanager
def _shrink_cache(connection: Connection) -> Iterator[None]:
    """Context manager that shrinks SQLite's cache to a page, so that a full disk shows at once."""
    connection.exec_driver_sql("PRAGMA cache_size = 1")
    try:
        yield
    finally:
        connection.exec_driver_sql("PRAGMA cache_size = -2000")  # SQLite's default


# the statement that shows whether the database takes writes, and its context; rolled back always
_WRITE_PROBES: Final[dict[str, tuple[str, Callable[[Connection], AbstractContextManager[Any]]]]] = {
    "postgresql": ("UPDATE secret SET name = name WHERE false", contextlib.nullcontext),
    "sqlite": ("INSERT INTO secret VALUES ('trial', zeroblob(65536))", _shrink_cache),
}


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The stored answer to a write, which is sent again for a retry of the same request.

    Attributes:
        fingerprint: a hash of the request.
        status: the HTTP status.
        text: the body, as JSON.
    """

    fingerprint: str
    status: int
    text: str


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry of a hash chain as stored in the database, with its dataset's name."""

    dataset: str
    number: int
    body: str
    hash: str


@dataclass(frozen=True, slots=True)
class EntryFilter:
    """The entries to export: of which datasets, of which kinds, and from which time.

    Attributes:
        datasets: names; None for all datasets.
        kinds: none of them means entries of every kind.
        since: microseconds since 1970, included; None for no limit.
        until: excluded; None for no limit.
    """

    datasets: tuple[str, ...] | None = None
    kinds: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None

    @property
    def is_partial(self) -> bool:
        """Return whether it may leave out entries of its datasets."""
        return bool(self.kinds) or self.since is not None or self.until is not None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions on the kind and time of an entry."""
        found: list[ColumnElement[bool]] = []
        if self.kinds:
            found.append(ENTRY.c.kind.in_(self.kinds))
        if self.since is not None:
            found.append(ENTRY.c.at >= self.since)
        if self.until is not None:
            found.append(ENTRY.c.at < self.until)
        return found


class Repository:
    """Access to the ledger's database through transactions.

    Args:
        engine: of the database.
        is_checked: whether each connection checks first that the database's revision is this
            program's. Only who migrates or moves a database may leave this out.
    """

    def __init__(self, engine: Engine, *, is_checked: bool = False) -> None:
        self.engine, self._is_checked = engine, is_checked
        # SQLite has one writer: threads wait here instead of polling its lock
        one_writer = engine.dialect.name == "sqlite"
        self._writer_lock = threading.Lock() if one_writer else contextlib.nullcontext()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Context manager of a transaction that commits durably and as a whole, or not at all.

        Raises:
            DatabaseAwayError: the database does not answer or takes no writes. Nothing was
                written, unless it went away during the commit: then everything or nothing was,
                which a retry finds out.
            IntegrityError: another writer was first; the caller tries again.
        """
        with (
            _convert_failures(_RETRY_WRITE),
            self._writer_lock,
            self._connect() as connection,
            connection.get_transaction() or connection.begin(),
        ):
            yield Transaction(connection)

    @contextmanager
    def snapshot(self) -> Iterator[Transaction]:
        """Context manager of a connection that reads one state of the whole database.

        No writer waits for it, however long it lasts: SQLite's write-ahead log keeps the state that
        it began with.
        """
        options = {"postgresql": {"isolation_level": "REPEATABLE READ"}}
        with self._read(options.get(self.engine.dialect.name, {_READING: True})) as reading:
            yield reading

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Context manager of a connection that reads committed data; it locks nothing."""
        options = {"postgresql": {"isolation_level": "AUTOCOMMIT"}}  # each statement alone
        with self._read(options.get(self.engine.dialect.name, {_READING: True})) as reading:
            yield reading

    @contextmanager
    def _read(self, options: Mapping[str, Any]) -> Iterator[Transaction]:
        """Context manager of a connection with execution options, which changes nothing."""
        with _convert_failures("try again"), self._connect(options) as connection:
            yield Transaction(connection)

    def _connect(self, options: Mapping[str, Any] = MappingProxyType({})) -> Connection:
        """Return a connection that is alive, after a check of the database's revision.

        The check is the first statement. If it shows that the connection was lost while it waited
        in the pool, a new one takes its place: nothing was done on it.
        """
        try:
            return self._check(self.engine.connect().execution_options(**options))
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
        return self._check(self.engine.connect().execution_options(**options))

    def _check(self, connection: Connection) -> Connection:
        """Return a connection after a check of the database's revision; close it on an error."""
        try:
            if self._is_checked:
                schema_revision.require_current(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def get_or_create_secret(self, name: str) -> bytes:
        """Return the server secret of this name; create it if it does not exist."""
        with self.reading() as reading:
            found = reading.find_secret(name)
        if found is None:
            with self.transaction() as transaction:
                found = transaction.get_or_create_secret(name)
        return found

    def close(self) -> None:
        """Close all connections; one that a thread still uses is closed when it is returned."""
        event.listen(self.engine, "checkin", lambda _, record: record.invalidate())
        self.engine.dispose()

    def ping(self) -> None:
        """Raise `DatabaseAwayError` unless the database takes writes; change nothing."""
        statement, context = _WRITE_PROBES[self.engine.dialect.name]
        with (
            _convert_failures("try again"),
            self._writer_lock,
            self._connect() as connection,
            context(connection),
        ):
            connection.exec_driver_sql(statement)


class Transaction:
    """The reads and writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    # --- datasets

    def find_dataset(self, name: str, *, lock: bool = False) -> Dataset | None:
        """Return a dataset by its name; lock its row if requested."""
        return self._query_dataset(_DATASET_BY_NAME, name, lock)

    def find_dataset_by_id(self, identifier: str, *, lock: bool = False) -> Dataset | None:
        """Return a dataset by its identifier; lock its row if requested."""
        return self._query_dataset(_DATASET_BY_ID, identifier, lock)

    def _query_dataset(self, query: Select[Any], name_or_id: str, lock: bool) -> Dataset | None:
        """Return the dataset with this name or identifier; lock its row if requested."""
        row = self.connection.execute(
            _WITH_LOCK[query] if lock else query, {"row_key": name_or_id}
        ).first()
        return None if row is None else _read_stored_dataset(row._mapping)

    def list_datasets(
        self, after: str = "", limit: int | None = None, names: Collection[str] | None = None
    ) -> list[Dataset]:
        """Return the datasets sorted by name.

        Args:
            after: the last name of the page before.
            limit: at most so many; None for all.
            names: only these; None for all.
        """
        query = select(DATASET).order_by(DATASET.c.name).limit(limit).where(DATASET.c.name > after)
        if names is not None:
            query = query.where(DATASET.c.name.in_(names))
        return [_read_stored_dataset(row) for row in self.connection.execute(query).mappings()]

    def list_dataset_rows(self) -> list[Row]:
        """Return the rows of all datasets as they are stored, sorted by name."""
        rows = self.connection.execute(select(DATASET).order_by(DATASET.c.name))
        return [dict(row) for row in rows.mappings()]

    def add_dataset(self, dataset: Dataset, key: str) -> Dataset:
        """Store a new dataset and the first entry of its chain."""
        policy = dataset.policy
        unchanged = Balance(policy.nothing, policy.nothing)
        new = replace(dataset, balance=unchanged, version=0, head=hash_chain.GENESIS)
        schema_revision.require_writers_since(self.connection, policy.oldest_reader)
        self.connection.execute(DATASET.insert().values(write_row(new)))
        return self._append_entry(
            dataset, EntryKind.CREATE, unchanged, key, rules.describe_dataset(dataset)
        )

    def close_dataset(self, dataset: Dataset, closed_at: int, key: str) -> Dataset:
        """Store that a dataset was closed; return it with the entry that states this."""
        self.connection.execute(
            _CLOSE_DATASET, {"row_key": dataset.identifier, "new_closed_at": closed_at}
        )
        nothing = dataset.policy.nothing
        unchanged = Balance(nothing, nothing)
        closed = self._append_entry(
            replace(dataset, closed_at=closed_at), EntryKind.CLOSE, unchanged, key, {}, closed_at
        )
        self._announce_change(dataset, closed)
        return closed

    def set_reference(self, dataset: Dataset, key: str) -> Dataset:
        """Store the filter with the reference that a dataset's owner chose; return the dataset."""
        schema_revision.require_writers_since(self.connection, _OWNER_REFERENCES_SINCE)
        self._store_policy(dataset)
        unchanged = Balance(dataset.policy.nothing, dataset.policy.nothing)
        fields = rules.describe_reference(dataset.policy)
        return self._append_entry(dataset, EntryKind.REFERENCE, unchanged, key, fields)

    def _store_policy(self, dataset: Dataset) -> None:
        """Store a dataset's privacy filter in place of the one before."""
        stored = json.dumps(dataset.policy.to_json())
        self.connection.execute(
            _REPLACE_POLICY, {"row_key": dataset.identifier, "new_policy": stored}
        )

    def delete_dataset(self, dataset: Dataset, key: str) -> None:
        """Delete an unused dataset with its only entry, caps and webhooks, and record who did.

        Keys that are bound to it alone are revoked: a later dataset of its name is not theirs. The
        audit event states the hash of the entry, which an earlier export may have.
        """
        for use in self.list_cap_uses(dataset):
            cap = use.cap
            self.remove_cap(dataset, cap.kind, cap.holder)
            self.record_audit_event(key, "cap-removed", dataset.name, f"{cap.kind} {cap.holder}")
        for webhook in self.list_webhooks([dataset.name]):
            if webhook.dataset == dataset.name:
                self.remove_webhook(webhook.identifier, key)
        for bound in self.list_keys():
            if bound.datasets == (dataset.name,) and bound.revoked_at is None:
                self.revoke_key(bound.identifier, key)
        self.connection.execute(ENTRY.delete().where(ENTRY.c.dataset == dataset.identifier))
        self.connection.execute(DATASET.delete().where(DATASET.c.id == dataset.identifier))
        self.record_audit_event(key, "dataset-deleted", dataset.name, dataset.head)

    # --- series

    def find_series(self, name: str, *, lock: bool = False) -> Series | None:
        """Return a series; lock its row if requested.

        Who locks datasets too locks them afterwards.
        """
        query = _WITH_LOCK[_SERIES_BY_NAME] if lock else _SERIES_BY_NAME
        row = self.connection.execute(query, {"row_key": name}).first()
        return None if row is None else read_row(SERIES, row._mapping, partial(read_model, Series))

    def list_series(
        self, after: str = "", limit: int | None = None, names: Collection[str] | None = None
    ) -> list[Series]:
        """Return the series sorted by name.

        Args:
            after: the last name of the page before.
            limit: at most so many; None for all.
            names: only these; None for all.
        """
        query = select(SERIES).order_by(SERIES.c.name).limit(limit).where(SERIES.c.name > after)
        if names is not None:
            query = query.where(SERIES.c.name.in_(names))
        read = partial(read_model, Series)
        return [read_row(SERIES, row, read) for row in self.connection.execute(query).mappings()]

    def add_series(self, series: Series, by: str) -> None:
        """Store a new series, and record who created it."""
        self.connection.execute(SERIES.insert().values(write_row(series)))
        self.record_audit_event(by, "series-created", series.name, series_fingerprint(series))

    def list_datasets_of_series(self, names: Collection[str]) -> list[str]:
        """Return the names of all datasets of some series."""
        query = select(DATASET.c.name).where(DATASET.c.series.in_(names))
        return list(self.connection.execute(query).scalars())

    def add_series_names(self, key: KeyRecord) -> KeyRecord:
        """Return a key with the names of all datasets of the series that it is bound to."""
        if key.datasets is None:
            return key
        return replace(key, datasets=(*key.datasets, *self.list_datasets_of_series(key.datasets)))

    def set_series_cap(self, series: Series, cap: Cap) -> None:
        """Store a cap of a series in place of an earlier one of the same holder."""
        self.remove_series_cap(series, cap.kind, cap.holder)
        self.connection.execute(
            SERIES_CAP.insert().values(
                series=series.name, kind=cap.kind.value, holder=cap.holder, share=cap.share
            )
        )

    def remove_series_cap(self, series: Series, kind: HolderKind, holder: str) -> bool:
        """Remove a cap of a series; return whether it existed."""
        of_holder = tuple_(SERIES_CAP.c.series, SERIES_CAP.c.kind, SERIES_CAP.c.holder)
        place = of_holder == (series.name, kind.value, holder)
        return self.connection.execute(SERIES_CAP.delete().where(place)).rowcount > 0

    def list_series_caps(self, series: Series) -> list[Cap]:
        """Return the caps of a series."""
        query = select(SERIES_CAP).where(SERIES_CAP.c.series == series.name)
        rows = self.connection.execute(query.order_by(SERIES_CAP.c.kind, SERIES_CAP.c.holder))
        return [read_row(SERIES_CAP, row, read_cap) for row in rows.mappings()]

    # --- reservations

    def find_reservation(self, identifier: str) -> Reservation | None:
        """Return a reservation by its public identifier."""
        row = self.connection.execute(_RESERVATION_BY_ID, {"row_key": identifier}).first()
        return None if row is None else _read_stored_reservation(row._mapping)

    def find_run(self, identifier: str) -> tuple[tuple[Dataset, Reservation], ...]:
        """Return a run's reservations with their datasets, in the order of locks; () if none.

        A run on several datasets is found by the identifier of each of its reservations.
        """
        found = self.find_reservation(identifier)
        if found is None:
            return ()
        names = (identifier,) if found.joint is None else found.joint.reservations
        runs = [found if name == identifier else self.find_reservation(name) for name in names]
        parts = tuple(
            (dataset, run)
            for run in runs
            if run is not None and (dataset := self.find_dataset_by_id(run.dataset)) is not None
        )
        if len(parts) < len(names):
            raise StoredRowError(f"run {identifier} lacks a reservation or a dataset: {names}")
        return tuple(sorted(parts, key=lambda part: part[0].identifier))

    def allow_joint_runs(self) -> None:
        """Let only servers write from now on that change all reservations of a run together."""
        schema_revision.require_writers_since(self.connection, _JOINT_RUNS_SINCE)

    def list_joint_rows(self) -> list[Row]:
        """Return the rows of all reservations of runs on several datasets, as they are stored."""
        query = select(RESERVATION).where(RESERVATION.c.joint.is_not(None))
        rows = self.connection.execute(query.order_by(RESERVATION.c.id))
        return [dict(row) for row in rows.mappings()]

    def list_overdue_reservations(self, dataset: Dataset, at: int) -> list[Reservation]:
        """Return a dataset's open reservations whose lease has ended."""
        rows = self.connection.execute(
            select(RESERVATION)
            .where(RESERVATION.c.dataset == dataset.identifier)
            .where(RESERVATION.c.state == State.OPEN.value)
            .where(RESERVATION.c.expires_at <= at)
            .order_by(RESERVATION.c.expires_at)
        )
        return [_read_stored_reservation(row) for row in rows.mappings()]

    def apply_change(self, dataset: Dataset, change: Change, key: str) -> Dataset:
        """Store a reservation's change with its balance and entry; return the dataset."""
        change = rules.number_end(change, dataset.version + 1)
        after = change.reservation
        if change.kind is EntryKind.RESERVE:
            self.connection.execute(RESERVATION.insert().values(write_row(after)))
        elif change.kind is EntryKind.GRANT:
            granted = {"row_key": after.identifier, "new_steps_granted": after.steps_granted}
            self.connection.execute(_UPDATE_STEPS_GRANTED, granted)
        else:
            row = write_row(after, changes=True)
            renamed = {f"new_{name}": value for name, value in row.items()}
            self.connection.execute(_UPDATE_RESERVATION, {"row_key": after.identifier} | renamed)
        if change.policy is not None:
            dataset = replace(dataset, policy=change.policy)
            self._store_policy(dataset)
        taken = change.balance.taken
        if any(taken):
            self._add_to_caps(dataset, after, taken)
        fields, at = rules.describe_change(change), None
        if change.kind is EntryKind.EXPIRE:  # the clock may have been set back since it was read
            at = max(now(), after.expires_at)
        changed = self._append_entry(dataset, change.kind, change.balance, key, fields, at)
        if change.kind is EntryKind.RESERVE:  # no other change takes more of the budget
            self._announce_change(dataset, changed, after.charge)
        return changed

    def _append_entry(
        self, dataset: Dataset, kind: EntryKind, change: Balance, key: str, fields: dict[str, Any],
        at: int | None = None,
    ) -> Dataset:  # fmt: skip
        """Append an entry to a dataset's hash chain; return the changed dataset."""
        at = now() if at is None else at
        balance, number = dataset.balance.plus(change), dataset.version + 1
        amounts = dataset.policy.balance_fields(change.spent, change.held)
        body = hash_chain.encode_entry(
            rules.describe_entry(number, kind, at, key, amounts, __version__) | fields
        )
        head = hash_chain.hash_entry(dataset.head, body)
        self.connection.execute(
            _INSERT_ENTRY,
            {
                "dataset": dataset.identifier, "number": number, "body": body, "hash": head,
                "kind": kind.value, "at": at,
            },
        )  # fmt: skip
        self.connection.execute(
            _UPDATE_DATASET,
            {
                "row_key": dataset.identifier, "new_spent": json.dumps(balance.spent),
                "new_held": json.dumps(balance.held), "new_version": number, "new_head": head,
            },
        )  # fmt: skip
        return replace(dataset, balance=balance, version=number, head=head)

    # --- webhooks

    def _announce_change(
        self, before: Dataset, after: Dataset, charge: Charge | None = None
    ) -> None:
        """Store webhook events about a change, to be posted once the transaction commits."""
        at = now()
        for webhook in self.list_webhooks([after.name, after.series]):
            for webhook_event in webhooks.describe_changes(webhook, before, after, at, charge):
                self._add_event(webhook_event)

    def announce_key(self, kind: str, key: str) -> None:
        """Store webhook events about an API key that was created or revoked."""
        for webhook in self.list_webhooks():
            if webhook.dataset is None:
                self._add_event(webhooks.describe_key_change(webhook, kind, key, now()))

    def list_webhooks(self, names: Collection[str | None] | None = None) -> list[Webhook]:
        """Return all webhooks, or those of these names and of all datasets, the oldest first.

        Args:
            names: of a dataset, and of its series if it has one; None for all webhooks.
        """
        query = select(WEBHOOK).order_by(WEBHOOK.c.created_at, WEBHOOK.c.id)
        if names is not None:
            query = query.where(or_(WEBHOOK.c.dataset.is_(None), WEBHOOK.c.dataset.in_(names)))
        rows = self.connection.execute(query)
        return [read_row(WEBHOOK, row, partial(read_model, Webhook)) for row in rows.mappings()]

    def add_webhook(self, webhook: Webhook, by: str) -> None:
        """Store a new webhook, and record who added it."""
        self.connection.execute(WEBHOOK.insert().values(write_row(webhook)))
        detail = f"{webhook.url} {webhook_fingerprint(webhook)}"
        self.record_audit_event(by, "webhook-added", webhook.identifier, detail)

    def remove_webhook(self, identifier: str, by: str) -> bool:
        """Remove a webhook and its waiting events, and record who did; return whether it existed.

        Args:
            identifier: the webhook's.
            by: who removes it, for the audit events.
        """
        self.connection.execute(WEBHOOK_EVENT.delete().where(WEBHOOK_EVENT.c.webhook == identifier))
        removed = self.connection.execute(WEBHOOK.delete().where(WEBHOOK.c.id == identifier))
        if removed.rowcount:
            self.record_audit_event(by, "webhook-removed", identifier)
        return removed.rowcount > 0

    def _add_event(self, webhook_event: Event) -> None:
        """Store an event that is to be posted to a webhook."""
        self.connection.execute(WEBHOOK_EVENT.insert().values(write_row(webhook_event)))

    def list_waiting_events(self, webhook: str) -> list[Event]:
        """Return the events that are not delivered yet to a webhook."""
        rows = self.connection.execute(
            select(WEBHOOK_EVENT)
            .where(WEBHOOK_EVENT.c.webhook == webhook)
            .order_by(WEBHOOK_EVENT.c.dataset, WEBHOOK_EVENT.c.number, WEBHOOK_EVENT.c.id)
        )
        return [read_model(Event, row) for row in rows.mappings()]

    def count_waiting_events(self) -> int:
        """Return the number of webhook events that are not delivered yet."""
        counted = select(func.count()).select_from(WEBHOOK_EVENT)
        return int(self.connection.execute(counted).scalar_one())

    def list_due_events(self, webhook: str, at: int, limit: int) -> list[Event]:
        """Return a webhook's events that are due: of each dataset only the oldest."""
        earlier = WEBHOOK_EVENT.alias()
        first = (
            select(func.min(earlier.c.number))
            .where(earlier.c.webhook == WEBHOOK_EVENT.c.webhook)
            .where(earlier.c.dataset == WEBHOOK_EVENT.c.dataset)
            .scalar_subquery()
        )
        rows = self.connection.execute(
            select(WEBHOOK_EVENT)
            .where(WEBHOOK_EVENT.c.webhook == webhook)
            .where(WEBHOOK_EVENT.c.due_at <= at)
            .where(WEBHOOK_EVENT.c.number == first)
            .order_by(WEBHOOK_EVENT.c.due_at)
            .limit(limit)
        )
        return [read_model(Event, row) for row in rows.mappings()]

    def claim_event(self, webhook_event: Event, until: int) -> bool:
        """Claim an event for this server until a time, and count one more try to post it.

        Returns:
            False if another server has claimed it since it was read.
        """
        claimed = self.connection.execute(
            WEBHOOK_EVENT.update()
            .where(WEBHOOK_EVENT.c.id == webhook_event.identifier)
            .where(WEBHOOK_EVENT.c.due_at == webhook_event.due_at)
            .values(due_at=until, attempts=webhook_event.attempts + 1)
        )
        return claimed.rowcount == 1

    def postpone_event(self, webhook_event: Event, due_at: int, error: str) -> None:
        """Store when a failed event is due again, and why it failed."""
        self.connection.execute(
            WEBHOOK_EVENT.update()
            .where(WEBHOOK_EVENT.c.id == webhook_event.identifier)
            .values(due_at=due_at, last_error=error)
        )

    def delete_event(self, webhook_event: Event) -> None:
        """Delete an event that was delivered."""
        self.connection.execute(
            WEBHOOK_EVENT.delete().where(WEBHOOK_EVENT.c.id == webhook_event.identifier)
        )

    # --- entries

    def list_entries(self, dataset: Dataset, after: int, limit: int = PAGE_SIZE) -> Sequence[Any]:
        """Return a page of the rows of a dataset's entries after number `after`."""
        return self.connection.execute(
            select(ENTRY)
            .where(ENTRY.c.dataset == dataset.identifier)
            .where(ENTRY.c.number > after)
            .order_by(ENTRY.c.number)
            .limit(limit)
        ).all()

    def find_prefix(self, dataset: Dataset, number: int) -> tuple[int, str | None]:
        """Return how many entries a dataset has up to a number, and the hash of the last of them.

        The hash is None if there is no entry with this number.
        """
        own = ENTRY.c.dataset == dataset.identifier
        counted = select(func.count()).where(own, ENTRY.c.number.between(1, number))
        last = select(ENTRY.c.hash).where(own, ENTRY.c.number == number)
        return (
            int(self.connection.execute(counted).scalar_one()),
            self.connection.execute(last).scalar(),
        )

    def list_entries_page(self, dataset: Dataset, after: int) -> tuple[Sequence[Any], bool]:
        """Return the entries that follow number `after`, as many as a page may have.

        Returns:
            The entries as `list_entries` does, and whether more follow.
        """
        lengths = self.connection.execute(
            select(func.length(ENTRY.c.body))
            .where(ENTRY.c.dataset == dataset.identifier)
            .where(ENTRY.c.number > after)
            .order_by(ENTRY.c.number)
            .limit(PAGE_SIZE)
        ).scalars()
        limit = _count_within(lengths)
        found = self.list_entries(dataset, after, limit + 1)
        return found[:limit], len(found) > limit

    def list_all_entries(
        self, wanted: EntryFilter, after: tuple[str, int], limit: int
    ) -> tuple[list[StoredEntry], tuple[str, int] | None]:
        """Return a page of several datasets' entries, by dataset name and entry number.

        Each page is found by indexes, so it takes as long after a million entries as at the start.

        Args:
            wanted: a page may have others, too: entries whose kind and time are not derived yet.
            after: the name and number at which the page before ended.
            limit: the length of the page.

        Returns:
            The entries, and where the next page begins after; None if this is the last page.
        """
        heads = self._list_heads(wanted, after[0], limit + 1)
        if not heads:
            return [], None
        found: list[StoredEntry] = []
        done = 0  # of the heads: no entry of these is left
        if heads[0].name == after[0]:
            found, done = self._list_entries_of(heads[0], wanted, after[1], limit), 1
        small = _take_small(heads[done:], limit - len(found))
        together = self._list_entries_of_all(small, wanted, limit - len(found))
        if together:
            found += together
        if together is not None and small:
            done += len(small)
        elif len(found) < limit and done < len(heads):
            found += self._list_entries_of(heads[done], wanted, 0, limit - len(found))
            done += 1
        if done == len(heads) <= limit and len(found) < limit:
            return found, None
        last = heads[done - 1]
        number = after[1] if last.name == after[0] else 0
        if found and found[-1].dataset == last.name:
            number = found[-1].number
        return found, (last.name, number if len(found) == limit else max(number, last.version))

    def _list_heads(self, wanted: EntryFilter, name: str, limit: int) -> Sequence[Any]:
        """Return the id, name and number of entries of the wanted datasets from a name on."""
        query = (
            select(DATASET.c.id, DATASET.c.name, DATASET.c.version)
            .where(DATASET.c.name >= name)
            .order_by(DATASET.c.name)
            .limit(limit)
        )
        if wanted.datasets is not None:
            query = query.where(DATASET.c.name.in_(wanted.datasets))
        return self.connection.execute(query).all()

    def _list_entries_of(
        self, head: Any, wanted: EntryFilter, after: int, limit: int
    ) -> list[StoredEntry]:
        """Return the first of a dataset's wanted entries after a number."""
        page = select(ENTRY).where(ENTRY.c.dataset == head.id).order_by(ENTRY.c.number).limit(limit)
        if not wanted.is_partial:
            queries = [page]
        else:
            queries = [page.where(ENTRY.c.at.is_(None))]
            kinds = [ENTRY.c.kind == kind for kind in wanted.kinds] or [true()]
            if after == 0 and wanted.since is not None:  # by the index of times, in one step
                after = self._find_number_before(head, wanted.since)
            queries += [page.where(each, *wanted.conditions()) for each in kinds]
        rows = [
            StoredEntry(head.name, row.number, row.body, row.hash)
            for query in queries
            for row in self.connection.execute(query.where(ENTRY.c.number > after))
        ]
        if len(queries) > 1:
            rows.sort(key=lambda row: row.number)
        return rows[:limit]

    def _find_number_before(self, head: Any, since: int) -> int:
        """Return a number after which all of a dataset's entries are that may be at `since`.

        The least number is looked for among the entries from that time on. Without the sum,
        PostgreSQL would go through those before it in the order of their numbers.
        """
        own = ENTRY.c.dataset == head.id
        first = select(ENTRY.c.at).where(own).order_by(ENTRY.c.number).limit(1)
        began_at = self.connection.execute(first).scalar()
        if began_at is None or began_at >= since:
            return 0
        of_dataset = select(func.min(ENTRY.c.number + 0)).where(own)
        found: list[int | None] = [
            self.connection.execute(of_dataset.where(condition)).scalar()
            for condition in (ENTRY.c.at >= since, ENTRY.c.at.is_(None))
        ]
        return (
            min((number for number in found if number is not None), default=int(head.version) + 1)
            - 1
        )

    def _list_entries_of_all(
        self, heads: Sequence[Any], wanted: EntryFilter, limit: int
    ) -> list[StoredEntry] | None:
        """Return all wanted entries of several datasets, in the order of the datasets.

        Returns:
            None if there are more than `limit`: then a dataset's row states too few.
        """
        if not heads:
            return []
        query = select(ENTRY).where(ENTRY.c.dataset.in_([head.id for head in heads]))
        if wanted.is_partial:
            query = query.where(or_(ENTRY.c.at.is_(None), and_(*wanted.conditions())))
        rows = self.connection.execute(
            query.order_by(ENTRY.c.dataset, ENTRY.c.number).limit(limit + 1)
        ).all()
        if len(rows) > limit:
            return None
        found: dict[str, list[Any]] = {head.id: [] for head in heads}
        for row in rows:
            found[row.dataset].append(row)
        return [
            StoredEntry(head.name, row.number, row.body, row.hash)
            for head in heads
            for row in found[head.id]
        ]

    def derive_entry_columns(self, after: tuple[str, int], limit: int) -> tuple[str, int] | None:
        """Derive the kind and time of entries that lack them, from the entries themselves.

        A server of revision 0006 wrote them. One that cannot be read stays as it is.

        Args:
            after: the identifier of a dataset and a number: entries up to there are left out.
            limit: at most so many.

        Returns:
            Where to go on; None if there are no more.
        """
        order = (ENTRY.c.dataset, ENTRY.c.number)
        rows = self.connection.execute(
            select(ENTRY)
            .where(ENTRY.c.at.is_(None))
            .where(tuple_(*order) > after)
            .order_by(*order)
            .limit(limit)
        ).all()
        derived = []
        for row in rows:
            with contextlib.suppress(StoredRowError):
                entry = read_entry(row.dataset, row.number, row.body)
                place = {"of_dataset": row.dataset, "of_number": row.number}
                derived.append(place | {"new_kind": entry["kind"][:12], "new_at": entry["at"]})
        if derived:
            self.connection.execute(_DERIVE_ENTRY, derived)
        return (rows[-1].dataset, rows[-1].number) if len(rows) == limit else None

    def find_last_run(self, dataset: Dataset) -> Reservation | None:
        """Return the reservation that was changed last, if there is one."""
        rows = self.list_entries(dataset, dataset.version - 2, 2)
        # one entry at most, which closes the dataset, comes after the first run and is about none
        entries = [read_entry(dataset.name, row.number, row.body) for row in rows]
        runs = [entry.get("reservation") for entry in entries]
        identifier = next((run for run in reversed(runs) if run is not None), None)
        return None if identifier is None else self.find_reservation(identifier)

    def find_last_entry(self, dataset: Dataset, run: Reservation) -> dict[str, Any] | None:
        """Return the entry that ended a run; None if the run's row names none that exists."""
        row = self.connection.execute(
            select(ENTRY.c.number, ENTRY.c.body)
            .where(ENTRY.c.dataset == dataset.identifier)
            .where(ENTRY.c.number == run.ended_entry)
        ).first()
        return None if row is None else read_entry(dataset.name, row.number, row.body)

    def find_run_times(
        self, dataset: Dataset, runs: Sequence[Reservation]
    ) -> dict[str, tuple[int | None, int | None]]:
        """Return when runs were reserved and when they ended, by identifier.

        Times are in microseconds since 1970. None is a time that is not known, that has not come,
        or that of a reservation before the dataset's latest ones.
        """
        reserved: dict[str, int] = {}
        newest = (
            select(ENTRY.c.number, ENTRY.c.body)
            .where(ENTRY.c.dataset == dataset.identifier, ENTRY.c.kind == EntryKind.RESERVE.value)
            .order_by(ENTRY.c.number.desc())
            .limit(_RESERVATIONS_SEARCHED)
            .subquery()
        )
        small = func.length(newest.c.body) <= _BODY_SEARCHED_MAX
        for number, body in self.connection.execute(select(newest).where(small)):
            entry = read_entry(dataset.name, number, body)
            reserved[entry["reservation"]] = entry["at"]
        numbers = [run.ended_entry for run in runs if run.ended_entry is not None]
        query = select(ENTRY.c.number, ENTRY.c.at).where(
            ENTRY.c.dataset == dataset.identifier, ENTRY.c.number.in_(numbers)
        )
        ended = {row.number: row.at for row in self.connection.execute(query)}
        return {
            run.identifier: (reserved.get(run.identifier), ended.get(run.ended_entry))
            for run in runs
        }

    def list_reservations(self, dataset: Dataset) -> list[Reservation]:
        """Return all reservations of a dataset."""
        return [_read_stored_reservation(row) for row in self.list_reservation_rows(dataset)]

    def list_reservation_rows(self, dataset: Dataset) -> list[Row]:
        """Return the rows of all reservations of a dataset as they are stored."""
        rows = self.connection.execute(
            select(RESERVATION).where(RESERVATION.c.dataset == dataset.identifier)
        )
        return [dict(row) for row in rows.mappings()]

    def count_reservations(self, dataset: Dataset) -> int:
        """Return the number of a dataset's reservations."""
        counted = select(func.count()).where(RESERVATION.c.dataset == dataset.identifier)
        return int(self.connection.execute(counted).scalar_one())

    def list_reservations_page(
        self, dataset: Dataset, after: RunPlace | None, limit: int
    ) -> tuple[list[Reservation], RunPlace | None]:
        """Return a page of a dataset's reservations: open before ended, later leases first.

        Each page is found by indexes, so it takes as long after a million runs as at the start.

        Args:
            dataset: the dataset.
            after: where the page before ended; None for the first page.
            limit: at most so many; fewer if their plans are large, but at least one.

        Returns:
            The reservations, and where the next page begins after; None if this is the last page.
        """
        queries = [
            select(_order_runs(dataset, state, after, limit + 1).subquery())
            for state in self._list_run_states(dataset)
            if after is None or state != State.OPEN.value or not after[0]
        ]
        if not queries:
            return [], None
        places = self.connection.execute(
            union_all(*queries).order_by("has_ended", desc("expires_at"), "id").limit(limit + 1)
        ).all()
        count = _count_within(place.length for place in places[:limit])
        identifiers = [place.id for place in places[:count]]
        rows = self.connection.execute(
            select(RESERVATION).where(RESERVATION.c.id.in_(identifiers))
        ).mappings()
        found = sorted(rows, key=lambda row: identifiers.index(row["id"]))
        last = places[count - 1] if len(places) > count else None
        return (
            [_read_stored_reservation(row) for row in found],
            None if last is None else (bool(last.has_ended), last.expires_at, last.id),
        )

    def _list_run_states(self, dataset: Dataset) -> Iterator[str]:
        """Yield the states of a dataset's reservations, each found in one step of an index.

        A state that the ledger did not write is among them, so that its rows are refused.
        """
        query = select(func.min(RESERVATION.c.state)).where(
            RESERVATION.c.dataset == dataset.identifier
        )
        found = self.connection.execute(query).scalar()
        while found is not None:
            yield found
            found = self.connection.execute(query.where(RESERVATION.c.state > found)).scalar()

    def count_runs_of_key(self, dataset: Dataset, key: str, at: int) -> tuple[int, int]:
        """Return how many runs of a dataset a key has: open ones, and those that spent nothing.

        Args:
            dataset: whose reservations are counted.
            key: identifier of the key that reserved.
            at: leases that ended more than a day before this time do not count.
        """
        mine = (RESERVATION.c.dataset == dataset.identifier) & (RESERVATION.c.key_id == key)
        nothing = json.dumps(dataset.policy.nothing)
        counts = [
            mine & (RESERVATION.c.state == State.OPEN.value) & (RESERVATION.c.expires_at > at),
            mine
            & RESERVATION.c.state.in_([state.value for state in State])  # for the index
            & (RESERVATION.c.expires_at > at - _DAY_MICROSECONDS)
            & (RESERVATION.c.taken == nothing),
        ]
        open_runs, unspent = (
            int(self.connection.execute(select(func.count()).where(each)).scalar_one())
            for each in counts
        )
        return open_runs, unspent

    # --- caps

    def set_cap(self, dataset: Dataset, cap: Cap) -> CapUse:
        """Store a cap in place of an earlier one of the same holder; return it with its use.

        What the holder has taken is counted once, and kept beside the cap from then on. Earlier
        servers would not keep it up to date, so they may not write any more.
        """
        self.remove_cap(dataset, cap.kind, cap.holder)
        schema_revision.require_writers_since(self.connection, _KEPT_CAPS_SINCE)
        use = self._count_uses(dataset, [cap])[0]
        self.connection.execute(
            CAP.insert().values(
                dataset=dataset.identifier, kind=cap.kind.value, holder=cap.holder,
                share=cap.share, taken=json.dumps(use.taken),
            )
        )  # fmt: skip
        return use

    def _add_to_caps(self, dataset: Dataset, run: Reservation, taken: Amounts) -> None:
        """Add what a run takes, or gives back, to what the holders of its caps have taken."""
        for row in self.connection.execute(_query_caps_of(dataset, run.key, run.team)).mappings():
            if row["taken"] is None:
                continue
            total = add(read_integers(row["taken"]), taken)
            held = tuple_(CAP.c.dataset, CAP.c.kind, CAP.c.holder)
            place = held == (dataset.identifier, row["kind"], row["holder"])
            self.connection.execute(CAP.update().where(place).values(taken=json.dumps(total)))

    def remove_cap(self, dataset: Dataset, kind: HolderKind, holder: str) -> bool:
        """Remove the cap of a key or team; return whether it existed."""
        removed = self.connection.execute(
            CAP.delete()
            .where(CAP.c.dataset == dataset.identifier)
            .where(CAP.c.kind == kind.value)
            .where(CAP.c.holder == holder)
        )
        return removed.rowcount > 0

    def list_cap_uses(
        self, dataset: Dataset, after: tuple[str, str] = ("", ""), limit: int | None = None
    ) -> list[CapUse]:
        """Return a dataset's caps, each with the amounts that its holder has spent or held.

        Args:
            dataset: the dataset.
            after: the kind and the holder of the last cap of the page before.
            limit: at most so many; None for all.
        """
        order = (CAP.c.kind, CAP.c.holder)
        return self._find_uses(
            dataset,
            select(CAP)
            .where(CAP.c.dataset == dataset.identifier)
            .where(tuple_(*order) > after)
            .order_by(*order)
            .limit(limit),
        )

    def find_cap_uses(self, dataset: Dataset, key: str, team: str | None) -> list[CapUse]:
        """Return a dataset's caps for a key and its team, each with the budget used so far.

        In a transaction that has locked the dataset's row, nothing changes this until it ends.
        """
        return self._find_uses(dataset, _query_caps_of(dataset, key, team).order_by(CAP.c.kind))

    def list_cap_rows(self, dataset: Dataset) -> list[Row]:
        """Return the rows of a dataset's caps as they are stored."""
        query = select(CAP).where(CAP.c.dataset == dataset.identifier)
        rows = self.connection.execute(query.order_by(CAP.c.kind, CAP.c.holder))
        return [dict(row) for row in rows.mappings()]

    def _find_uses(self, dataset: Dataset, query: Select[Any]) -> list[CapUse]:
        """Return the caps that a query finds, each with the amounts that its holder has taken.

        That is kept beside the cap, unless an earlier server set it.
        """
        rows = self.connection.execute(query).mappings().all()
        found = [read_row(CAP, row, partial(_read_use, dataset)) for row in rows]
        missing = [cap for cap, taken in found if taken is None]
        counted = {use.cap: use.taken for use in self._count_uses(dataset, missing)}
        return [CapUse(cap, counted[cap] if taken is None else taken) for cap, taken in found]

    def _count_uses(self, dataset: Dataset, caps: Sequence[Cap]) -> list[CapUse]:
        """Return caps, each with what its holder's runs take, which are all read.

        One statement groups the runs of all these holders by what they take. The sums are made
        here: amounts may have more digits than a database's integers.
        """
        if not caps:
            return []
        columns = {HolderKind.KEY: RESERVATION.c.key_id, HolderKind.TEAM: RESERVATION.c.team}
        statements = [
            select(
                literal(kind.value).label("kind"), holder.label("holder"),
                RESERVATION.c.taken, func.count().label("times"),
            )
            .where(RESERVATION.c.dataset == dataset.identifier)
            .where(holder.in_([cap.holder for cap in caps if cap.kind is kind]))
            .group_by(holder, RESERVATION.c.taken)
            for kind, holder in columns.items()
        ]  # fmt: skip
        totals: dict[tuple[str, str], Amounts] = {}
        for row in self.connection.execute(union_all(*statements)):
            taken_before = totals.get((row.kind, row.holder), dataset.policy.nothing)
            try:
                taken = tuple(row.times * each for each in read_integers(row.taken))
                totals[row.kind, row.holder] = add(taken_before, taken)
            except UNREADABLE as error:
                where = f"a reservation of {row.kind} {row.holder!r} in {dataset.name!r}"
                raise StoredRowError(f"{where} cannot be read: taken: {error}") from None
        return [
            CapUse(cap, totals.get((cap.kind.value, cap.holder), dataset.policy.nothing))
            for cap in caps
        ]

    def list_caps_by_holder(self) -> dict[tuple[HolderKind, str], list[tuple[str, float]]]:
        """Return each key's and team's caps, as pairs (dataset name, share of its budget)."""
        rows = self.connection.execute(
            select(DATASET.c.name, CAP.c.kind, CAP.c.holder, CAP.c.share)
            .join(DATASET, DATASET.c.id == CAP.c.dataset)
            .order_by(DATASET.c.name)
        )
        found: dict[tuple[HolderKind, str], list[tuple[str, float]]] = {}
        for row in rows:
            found.setdefault((HolderKind(row.kind), row.holder), []).append((row.name, row.share))
        return found

    # --- idempotency

    def find_answer(self, key: str, value: str) -> StoredAnswer | None:
        """Return the answer stored under an API key and the value of an Idempotency-Key."""
        row = self.connection.execute(_ANSWER_BY_KEY, {"key": key, "value": value}).first()
        return None if row is None else StoredAnswer(row.fingerprint, row.status, row.answer)

    def store_answer(
        self, key: str, value: str, answer: StoredAnswer, *, is_authenticated: bool = True
    ) -> None:
        """Store an answer under an API key and the value of an Idempotency-Key, for retries.

        Args:
            key: identifier of the key.
            value: of the Idempotency-Key.
            answer: to be stored.
            is_authenticated: whether the key was read for this request.

        Raises:
            UnauthenticatedError: the key was revoked since it was read; or it was not read for this
                request, and does not exist or has a quota now.
        """
        stored = self.connection.execute(
            _INSERT_ANSWER,
            {
                "key_id": key, "value": value, "fingerprint": answer.fingerprint,
                "status": answer.status, "answer": answer.text, "created_at": now(),
                "is_authenticated": is_authenticated,
            },
        )  # fmt: skip
        if stored.rowcount != 1:
            raise UnauthenticatedError(_REVOKED_MEANWHILE)

    def delete_answers(self, before: int, limit: int) -> int:
        """Delete up to `limit` answers stored for retries before a time; return how many.

        The oldest are deleted first.
        """
        oldest = (
            select(IDEMPOTENCY.c.key_id, IDEMPOTENCY.c.value)
            .where(IDEMPOTENCY.c.created_at < before)
            .order_by(IDEMPOTENCY.c.created_at)
            .limit(limit)
            .with_for_update(skip_locked=True)  # another server may delete them now
        )
        key = tuple_(IDEMPOTENCY.c.key_id, IDEMPOTENCY.c.value)
        return self.connection.execute(IDEMPOTENCY.delete().where(key.in_(oldest))).rowcount

    # --- keys

    def find_secret(self, name: str) -> bytes | None:
        """Return a server secret, if it exists."""
        found = self.connection.execute(select(SECRET.c.value).where(SECRET.c.name == name))
        value = found.scalar()
        return None if value is None else bytes(value)

    def get_or_create_secret(self, name: str) -> bytes:
        """Return a server secret; create it if it does not exist."""
        found = self.find_secret(name)
        if found is None:  # of several servers at once, the first to write decides
            value = secrets.token_bytes(SECRET_BYTES)
            written = self.connection.execute(_INSERT_SECRET, {"name": name, "value": value})
            if written.rowcount:
                shown = secret_fingerprint(name, value)
                self.record_audit_event(SYSTEM, "secret-created", name, shown)
            return self.get_or_create_secret(name)
        return found

    def delete_secrets(self) -> None:
        """Delete the server secrets; new ones are created when they are needed."""
        self.connection.execute(SECRET.delete())

    def find_key(self, identifier: str) -> KeyRecord | None:
        """Return an API key by its identifier."""
        row = self.connection.execute(select(API_KEY).where(API_KEY.c.id == identifier)).first()
        return (
            None if row is None else read_row(API_KEY, row._mapping, partial(read_model, KeyRecord))
        )

    def list_keys(
        self, after: tuple[int, str] = (-1, ""), limit: int | None = None
    ) -> list[KeyRecord]:
        """Return the API keys, the oldest first.

        Args:
            after: the time of creation and the identifier of the last key of the page before.
            limit: at most so many; None for all.
        """
        order = (API_KEY.c.created_at, API_KEY.c.id)
        rows = self.connection.execute(
            select(API_KEY).where(tuple_(*order) > after).order_by(*order).limit(limit)
        )
        return [read_row(API_KEY, row, partial(read_model, KeyRecord)) for row in rows.mappings()]

    def has_other_administrator(self, identifier: str) -> bool:
        """Return whether a valid key besides this one may create keys."""
        at = now()
        other = (
            select(API_KEY.c.id)
            .where(API_KEY.c.id != identifier)
            .where(API_KEY.c.revoked_at.is_(None))
            .where(API_KEY.c.datasets.is_(None))
            .where(API_KEY.c.expires_at.is_(None) | (API_KEY.c.expires_at > at))
            .where(API_KEY.c.scopes.contains('"admin"'))
            .limit(1)
        )
        return self.connection.execute(other).first() is not None

    def list_limited_keys(self, limit: int) -> list[KeyRecord]:
        """Return the oldest API keys that have a quota and are not revoked."""
        rows = self.connection.execute(
            select(API_KEY)
            .where(API_KEY.c.revoked_at.is_(None))
            .where(API_KEY.c.requests_per_minute.is_not(None))
            .order_by(API_KEY.c.created_at)
            .limit(limit)
        )
        return [read_row(API_KEY, row, partial(read_model, KeyRecord)) for row in rows.mappings()]

    def add_key(self, key: KeyRecord, by: str) -> None:
        """Store a new API key, and record who created it."""
        self.connection.execute(API_KEY.insert().values(write_row(key)))
        self.record_audit_event(by, "key-created", key.identifier, key_fingerprint(key))

    def revoke_key(self, identifier: str, by: str) -> None:
        """Revoke an API key from now on, and record who did: a key may revoke itself."""
        self.record_audit_event(by, "key-revoked", identifier)
        self.connection.execute(
            API_KEY.update().where(API_KEY.c.id == identifier).values(revoked_at=now())
        )
        self.announce_key("key.revoked", identifier)

    def revoke_all_keys(self) -> None:
        """Revoke every API key that was not revoked before."""
        self.connection.execute(
            API_KEY.update().where(API_KEY.c.revoked_at.is_(None)).values(revoked_at=now())
        )

    def set_quota(self, identifier: str, requests_per_minute: int | None) -> None:
        """Set the quota of an API key in place of an earlier one; None for no quota."""
        self.connection.execute(
            API_KEY.update()
            .where(API_KEY.c.id == identifier)
            .values(requests_per_minute=requests_per_minute, quota_empty_at=None)
        )

    def lock_new_names(self) -> None:
        """Wait until no other transaction creates a dataset or a series.

        So a dataset and a series never get the same name. SQLite has one writer, and needs no lock.
        """
        if self.connection.dialect.name == "postgresql":
            self.connection.execute(_LOCK_NEW_NAMES)

    def count_request(self, identifier: str, quota: Quota, at: int) -> bool:
        """Count a request against a key's quota; return whether the quota admits it.

        One statement decides and counts, so requests that race are each counted. A crash may lose
        the last counts: nothing rests on them, and so the disk is not waited for where that can
        be chosen.
        """
        if self.connection.dialect.name == "postgresql":
            self.connection.execute(_NO_FLUSH)
        counted = self.connection.execute(
            _COUNT_REQUEST,
            {
                "row_key": identifier, "at": at, "interval": quota.interval,
                "latest": quota.latest_empty_at(at), "plausible": quota.latest_plausible(at),
            },
        )  # fmt: skip
        return counted.rowcount == 1

    def record_key_use(self, identifier: str) -> None:
        """Record that an API key was used now."""
        self.connection.execute(
            API_KEY.update().where(API_KEY.c.id == identifier).values(last_used_at=now())
        )

    def record_audit_event(self, key: str, action: str, subject: str, detail: str = "") -> None:
        """Record who did what: `key` (an API key or a program), the action and its subject.

        Raises:
            UnauthenticatedError: the key was revoked since the request was authenticated.
        """
        if self.connection.execute(_REVOKED_KEY, {"key_id": key}).first() is not None:
            raise UnauthenticatedError(_REVOKED_MEANWHILE)
        self.connection.execute(
            AUDIT_EVENT.insert().values(
                id=uuid.uuid4().hex, at=now(), key_id=key, action=action, subject=subject,
                detail=detail,
            )
        )  # fmt: skip

    def list_audit_events(
        self,
        after: tuple[int, str] = (-1, ""),
        limit: int | None = None,
        *,
        actions: Collection[str] = (),
        until: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return the audit events after a time and identifier, the oldest first.

        Args:
            after: the time and identifier of the last event of the page before.
            limit: at most so many; None for all.
            actions: none of them means every action.
            until: the time before which they are; None for no limit.
        """
        order = (AUDIT_EVENT.c.at, AUDIT_EVENT.c.id)
        query = select(AUDIT_EVENT).where(tuple_(*order) > after).order_by(*order).limit(limit)
        if actions:
            query = query.where(AUDIT_EVENT.c.action.in_(actions))
        if until is not None:
            query = query.where(AUDIT_EVENT.c.at < until)
        rows = self.connection.execute(query)
        return [read_row(AUDIT_EVENT, row, read_audit_event) for row in rows.mappings()]


def _order_runs(dataset: Dataset, state: str, after: RunPlace | None, limit: int) -> Select[Any]:
    """Return a query of the places and plan lengths of a dataset's reservations of one state."""
    has_ended = state != State.OPEN.value
    identifier, expires_at = RESERVATION.c.id, RESERVATION.c.expires_at
    query = (
        select(
            literal(int(has_ended)).label("has_ended"), expires_at, identifier,
            func.length(RESERVATION.c.mechanism).label("length"),
        )
        .where(RESERVATION.c.dataset == dataset.identifier, RESERVATION.c.state == state)
        .order_by(expires_at.desc(), identifier)
        .limit(limit)
    )  # fmt: skip
    if after is not None and has_ended == after[0]:
        later = or_(expires_at < after[1], identifier > after[2])
        query = query.where(expires_at <= after[1], later)
    return query


def _query_caps_of(dataset: Dataset, key: str, team: str | None) -> Select[Any]:
    """Return a query of a dataset's caps for a key and its team."""
    holders = [(HolderKind.KEY.value, key), (HolderKind.TEAM.value, team or "")]
    return (
        select(CAP)
        .where(CAP.c.dataset == dataset.identifier)
        .where(tuple_(CAP.c.kind, CAP.c.holder).in_(holders))
    )


def _read_use(dataset: Dataset, row: Mapping[Any, Any]) -> tuple[Cap, Amounts | None]:
    """Return the cap that a table row describes, and what its holder has taken if that is kept."""
    taken = None if row["taken"] is None else read_integers(row["taken"])
    if taken is not None and len(taken) != len(dataset.policy.nothing):
        raise ValueError(f"taken must have {len(dataset.policy.nothing)} amounts")
    return read_cap(row), taken


def _count_within(lengths: Iterable[int]) -> int:
    """Return how many of the first rows a page may have, by their lengths; at least 1."""
    totals = itertools.accumulate(lengths)
    return max(1, sum(total <= _PAGE_CHARACTERS_MAX for total in totals))


def _take_small(heads: Sequence[Any], limit: int) -> list[Any]:
    """Return the first datasets that have at most `limit` entries together."""
    taken: list[Any] = []
    for head in heads:
        limit -= max(head.version, 0)
        if limit < 0:
            break
        taken.append(head)
    return taken


def read_audit_event(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the audit event that a table row describes."""
    names = {"id": "id", "at": "at", "key": "key_id", "action": "action", "subject": "subject"}
    return {name: row[column] for name, column in names.items()} | {"detail": row["detail"]}


def key_fingerprint(key: KeyRecord) -> str:
    """Return the fingerprint of what never changes in an API key."""
    return fingerprint(
        id=key.identifier, name=key.name, digest=key.digest, scopes=sorted(key.scopes),
        datasets=None if key.datasets is None else list(key.datasets),
        created_at=key.created_at, expires_at=key.expires_at, team=key.team,
    )  # fmt: skip


def series_fingerprint(series: Series) -> str:
    """Return the fingerprint of a series."""
    return fingerprint(**write_row(series))


def webhook_fingerprint(webhook: Webhook) -> str:
    """Return the fingerprint of a webhook."""
    return fingerprint(
        id=webhook.identifier, url=webhook.url, secret=webhook.secret, dataset=webhook.dataset,
        shares=list(webhook.shares), created_at=webhook.created_at,
    )  # fmt: skip


def secret_fingerprint(name: str, value: bytes) -> str:
    """Return the fingerprint of a server secret."""
    return fingerprint(name=name, value=value)


def _read_stored_dataset(row: Mapping[Any, Any]) -> Dataset:
    """Return the dataset that a table row describes; raise StoredRowError if it is not one."""
    return read_row(DATASET, row, _read_checked_dataset)


def _read_checked_dataset(row: Mapping[Any, Any]) -> Dataset:
    """Return the dataset that a table row describes, after a check of its filter's parameters."""
    if row["size"] < 1:
        raise ValueError(f"size must be at least 1, not {row['size']}")
    _require_policy(row["policy"], row["epsilon"], row["delta"], row["relation"])
    return read_dataset(row)


@lru_cache(maxsize=1024)
def _require_policy(stored: str, epsilon: float, delta: float, relation: str) -> None:
    """Raise ValueError if a parameter of a stored privacy filter is out of its range."""
    if not (epsilon > 0 and 0 <= delta < 1):
        raise ValueError(f"ε = {epsilon} and δ = {delta} are no budget")
    filters.from_columns(stored, epsilon, delta, relation).entry_fields()


def _read_stored_reservation(row: Mapping[Any, Any]) -> Reservation:
    """Return the reservation that a table row describes; raise StoredRowError if it is not one."""
    return read_row(RESERVATION, row, read_reservation)


def read_dataset(row: Mapping[Any, Any]) -> Dataset:
    """Return the dataset that a table row describes."""
    dataset = read_model(Dataset, row)
    policy, balance = dataset.policy, dataset.balance
    if not len(policy.nothing) == len(balance.spent) == len(balance.held):
        raise ValueError(f"spent and held must have {len(policy.nothing)} amounts each")
    return dataset


def read_reservation(row: Mapping[Any, Any]) -> Reservation:
    """Return the reservation that a table row describes."""
    _require_mechanism(row["mechanism"])
    run = read_model(Reservation, row)
    if len(run.charge.reserved) != len(run.taken):
        raise ValueError(f"taken must have {len(run.charge.reserved)} amounts")
    return run


@lru_cache(maxsize=4096)  # every grant reads its reservation
def _require_mechanism(stored: str) -> None:
    """Raise an error if a column's text is not a mechanism as JSON."""
    mechanisms.from_json(read_json(stored))


def read_cap(row: Mapping[Any, Any]) -> Cap:
    """Return the cap that a table row describes."""
    return Cap(HolderKind(row["kind"]), row["holder"], row["share"])
