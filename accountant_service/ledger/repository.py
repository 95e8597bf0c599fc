"""All SQL of the ledger: one class, one transaction at a time, SQLite and PostgreSQL alike.

SQLite: write-ahead log, synchronous=FULL, every transaction BEGIN IMMEDIATE, so one writer at a
time. PostgreSQL: the dataset's row is locked before anything is read that a charge depends on.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    Connection,
    Engine,
    ExceptionContext,
    Select,
    bindparam,
    create_engine,
    event,
    make_url,
    select,
    text,
    tuple_,
)
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from accountant_service import __version__
from accountant_service.errors import DatabaseAwayError, DatabaseReadOnlyError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import chain, model
from accountant_service.ledger.filter import RenyiFilter
from accountant_service.ledger.model import Balance, Change, Dataset, Kind, Reservation, State
from accountant_service.ledger.tables import (
    API_KEY,
    AUDIT_EVENT,
    DATASET,
    ENTRY,
    IDEMPOTENCY,
    RESERVATION,
    SECRET,
)

_BUSY_SECONDS: Final = 20.0  # for SQLite's one writer
_LOCK_SECONDS: Final = 5.0  # for a row of PostgreSQL
_READING: Final = "ledger_reading"  # an execution option of connections that only read
# no answer, or not in time; a statement the database refuses is a fault of this service instead
_AWAY: Final = (OperationalError, InterfaceError, PoolTimeoutError)
_READ_ONLY: Final = "25006"  # PostgreSQL's SQLSTATE, as of a standby
# SQLSTATEs and SQLite's primary result codes: why a database takes no writes
_NO_WRITES: Final[dict[Any, str]] = {
    _READ_ONLY: "it is read-only",
    "42501": "its user lacks the permission",
    "53100": "its disk is full",
    sqlite3.SQLITE_READONLY: "it is read-only",
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_IOERR: "its disk reports errors",
    sqlite3.SQLITE_CORRUPT: "its file is damaged",
    sqlite3.SQLITE_NOTADB: "its file is damaged",
}
_NOTHING_GRANTED: Final = (
    "nothing is granted; try again with the same Idempotency-Key: it happens once"
)
PAGE: Final = 200


# what every grant runs, built once: building a statement costs more than running it
_DATASET_BY_NAME: Final = select(DATASET).where(DATASET.c.name == bindparam("of"))
_DATASET_BY_ID: Final = select(DATASET).where(DATASET.c.id == bindparam("of"))
_DATASET_MOVES: Final = (
    DATASET.update()
    .where(DATASET.c.id == bindparam("of"))
    .values({name: bindparam(f"new_{name}") for name in ("spent", "held", "version", "head")})
)
_RESERVATION_BY_ID: Final = select(RESERVATION).where(RESERVATION.c.id == bindparam("of"))
_RESERVATION_MOVES: Final = (
    RESERVATION.update()
    .where(RESERVATION.c.id == bindparam("of"))
    .values({name: bindparam(f"new_{name}") for name in ("state", "steps_granted", "expires_at")})
)
_RESERVATION_GRANTED: Final = (  # without a column of an index, which would be written anew
    RESERVATION.update()
    .where(RESERVATION.c.id == bindparam("of"))
    .values(steps_granted=bindparam("new_steps_granted"))
)
_NEW_ENTRY: Final = ENTRY.insert()
_NEW_IDEMPOTENCY: Final = IDEMPOTENCY.insert()
_REMEMBERED: Final = (
    select(IDEMPOTENCY)
    .where(IDEMPOTENCY.c.key_id == bindparam("key"))
    .where(IDEMPOTENCY.c.value == bindparam("given"))
)
_NEW_SECRET: Final = text(
    "INSERT INTO secret (name, value) VALUES (:name, :value) ON CONFLICT DO NOTHING"
)
_LOCKED: Final = {query: query.with_for_update() for query in (_DATASET_BY_NAME, _DATASET_BY_ID)}


def now() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def connect(url: str) -> Engine:
    """An engine for an SQLite or a PostgreSQL URL, with what durability and races ask for."""
    if url.startswith("sqlite"):
        engine = create_engine(
            url,
            pool_size=8,
            max_overflow=16,
            connect_args={"timeout": _BUSY_SECONDS},
            hide_parameters=True,
        )  # the text of an error quotes no parameter
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    asked = make_url(url).query.get("options", "")
    timeouts = f"-c lock_timeout={int(1000 * _LOCK_SECONDS)} -c statement_timeout=30000"
    engine = create_engine(
        url,
        pool_size=8,
        max_overflow=16,
        pool_timeout=10,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args={"connect_timeout": 5, "options": f"{asked} {timeouts}"},
    )
    event.listen(engine, "handle_error", _leave_standby)
    return engine


def _leave_standby(context: ExceptionContext) -> None:
    """Drop all connections to a server that became read-only: another may be in its place."""
    if _code_of(context.original_exception) == _READ_ONLY:
        context.is_disconnect = True


def _code_of(error: BaseException | None) -> str | int | None:
    """Return a driver's code of a failure: an SQLSTATE, or a primary result code of SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    return getattr(error, "sqlstate", None) if code is None else code & 0xFF


@contextmanager
def _failing_closed(way_on: str) -> Iterator[None]:
    """Raise `DatabaseAwayError` in place of whatever a database raises that cannot be used."""
    try:
        yield
    except (DBAPIError, PoolTimeoutError) as error:
        reason = _NO_WRITES.get(_code_of(getattr(error, "orig", None)))
        if reason is not None:
            raise DatabaseReadOnlyError(
                f"the database takes no writes: {reason}; {way_on}"
            ) from error
        if isinstance(error, _AWAY) or getattr(error, "connection_invalidated", False):
            raise DatabaseAwayError(f"the database does not answer; {way_on}") from error
        raise


def _begin_sqlite(connection: Connection) -> None:
    """A writer locks first; a reader never does, and sees what was committed when it began."""
    reading = connection.get_execution_options().get(_READING, False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy says BEGIN, not the driver
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


@contextmanager
def _small_cache(connection: Connection) -> Iterator[None]:
    """Have SQLite write to the disk within a transaction, where a full disk shows, unsynced."""
    connection.exec_driver_sql("PRAGMA cache_size = 1")
    try:
        yield
    finally:
        connection.exec_driver_sql("PRAGMA cache_size = -2000")  # SQLite's default


# what finds out whether the database takes writes, and what surrounds it; always rolled back
_TRIALS: Final[dict[str, tuple[str, Callable[[Connection], AbstractContextManager[Any]]]]] = {
    "postgresql": ("UPDATE secret SET name = name WHERE false", contextlib.nullcontext),
    "sqlite": ("INSERT INTO secret VALUES ('trial', zeroblob(65536))", _small_cache),
}


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key as it is stored: never the key itself."""

    identifier: str
    name: str
    digest: bytes
    scopes: frozenset[str]
    datasets: tuple[str, ...] | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None


@dataclass(frozen=True, slots=True)
class Remembered:
    """The answer of a write that was made before."""

    fingerprint: str
    status: int
    answer: str


class Repository:
    """The database, one transaction at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # SQLite has one writer: threads wait here rather than poll its lock
        alone = engine.dialect.name == "sqlite"
        self._turn = threading.Lock() if alone else contextlib.nullcontext()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Everything inside happens together, durably, or not at all.

        Raises:
            DatabaseAwayError: the database does not answer or takes no writes; nothing happened,
                unless it went away while it was told to commit: then all of it did or nothing,
                which a repeat finds.
            IntegrityError: another writer was first; the caller tries again.
        """
        with _failing_closed(_NOTHING_GRANTED), self._turn, self.engine.begin() as connection:
            yield Transaction(connection)

    @contextmanager
    def snapshot(self) -> Iterator[Transaction]:
        """A transaction that sees one state of the whole database, whoever writes meanwhile."""
        with self.transaction() as transaction:
            if self.engine.dialect.name == "postgresql":  # SQLite has no other writer
                transaction.connection.exec_driver_sql(
                    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
                )
            yield transaction

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Statements that see what is committed; nothing may be written, nothing is locked."""
        options: Any = {_READING: True}
        if self.engine.dialect.name == "postgresql":  # each statement by itself
            options = {"isolation_level": "AUTOCOMMIT"}
        with _failing_closed("try again"), self.engine.connect() as connection:
            yield Transaction(connection.execution_options(**options))

    def secret(self, name: str) -> bytes:
        """Return a server secret; only one that is not there yet needs a write."""
        with self.reading() as reading:
            found = reading.known_secret(name)
        if found is None:
            with self.transaction() as transaction:
                found = transaction.secret(name)
        return found

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def ping(self) -> None:
        """Raise `DatabaseAwayError` unless the database takes writes; nothing is changed."""
        statement, surroundings = _TRIALS[self.engine.dialect.name]
        with (
            _failing_closed("try again"),
            self._turn,
            self.engine.connect() as connection,
            surroundings(connection),
        ):
            connection.exec_driver_sql(statement)


class Transaction:
    """What may be read and written within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    # --- datasets

    def dataset(self, name: str, *, lock: bool = False) -> Dataset | None:
        """A dataset by its name, its row locked if asked for."""
        return self._dataset(_DATASET_BY_NAME, name, lock)

    def dataset_by_id(self, identifier: str, *, lock: bool = False) -> Dataset | None:
        """A dataset by its identifier."""
        return self._dataset(_DATASET_BY_ID, identifier, lock)

    def _dataset(self, query: Select[Any], of: str, lock: bool) -> Dataset | None:
        row = self.connection.execute(_LOCKED[query] if lock else query, {"of": of}).first()
        return None if row is None else _dataset_of(row)

    def datasets(self, at_most: int | None = None) -> list[Dataset]:
        """All of them, or the first so many, by name."""
        query = select(DATASET).order_by(DATASET.c.name).limit(at_most)
        rows = self.connection.execute(query)
        return [_dataset_of(row) for row in rows]

    def add_dataset(self, dataset: Dataset, key: str) -> Dataset:
        """A new dataset with the first entry of its chain."""
        policy = dataset.policy
        self.connection.execute(
            DATASET.insert().values(
                id=dataset.identifier, name=dataset.name, size=dataset.size,
                privacy_unit=dataset.privacy_unit, relation=policy.relation.value,
                epsilon=policy.epsilon, delta=policy.delta, rdp_order=policy.order,
                spent=0, held=0, version=0, head=chain.GENESIS, created_at=dataset.created_at,
            )
        )  # fmt: skip
        return self._append(dataset, Kind.CREATE, Balance(), key, model.created(dataset))

    # --- reservations

    def reservation(self, identifier: str) -> Reservation | None:
        """A reservation by its public identifier."""
        row = self.connection.execute(_RESERVATION_BY_ID, {"of": identifier}).first()
        return None if row is None else _reservation_of(row)

    def due(self, dataset: Dataset, at: int) -> list[Reservation]:
        """Open reservations of a dataset whose lease has ended."""
        rows = self.connection.execute(
            select(RESERVATION)
            .where(RESERVATION.c.dataset == dataset.identifier)
            .where(RESERVATION.c.state == State.OPEN.value)
            .where(RESERVATION.c.expires_at <= at)
            .order_by(RESERVATION.c.expires_at)
        )
        return [_reservation_of(row) for row in rows]

    def apply(self, dataset: Dataset, change: Change, key: str) -> Dataset:
        """Write a change down: the reservation, the balance, the entry."""
        after = change.reservation
        values = {
            "state": after.state.value,
            "steps_granted": after.steps_granted,
            "expires_at": after.expires_at,
        }
        if change.kind is Kind.RESERVE:
            self.connection.execute(
                RESERVATION.insert().values(
                    id=after.identifier, dataset=after.dataset,
                    mechanism=json.dumps(after.mechanism),
                    mechanism_hash=after.mechanism_hash, unit=str(after.unit),
                    steps_reserved=after.steps_reserved, purpose=after.purpose, key_id=after.key,
                    **values,
                )
            )  # fmt: skip
        elif change.kind is Kind.GRANT:
            granted = {"of": after.identifier, "new_steps_granted": after.steps_granted}
            self.connection.execute(_RESERVATION_GRANTED, granted)
        else:
            moves = {f"new_{name}": value for name, value in values.items()}
            self.connection.execute(_RESERVATION_MOVES, {"of": after.identifier} | moves)
        about = model.described(change)
        return self._append(dataset, change.kind, change.balance, key, about)

    def _append(
        self, dataset: Dataset, kind: Kind, change: Balance, key: str, about: dict[str, Any]
    ) -> Dataset:
        balance, number = dataset.balance.plus(change), dataset.version + 1
        body = chain.body_of(model.entry(number, kind, now(), key, change, __version__) | about)
        head = chain.hash_of(dataset.head, body)
        self.connection.execute(
            _NEW_ENTRY,
            {"dataset": dataset.identifier, "number": number, "body": body, "hash": head},
        )
        self.connection.execute(
            _DATASET_MOVES,
            {
                "of": dataset.identifier, "new_spent": balance.spent, "new_held": balance.held,
                "new_version": number, "new_head": head,
            },
        )  # fmt: skip
        return Dataset(
            dataset.identifier, dataset.name, dataset.size, dataset.privacy_unit, dataset.policy,
            balance, number, head, dataset.created_at,
        )  # fmt: skip

    def entries(self, dataset: Dataset, after: int, limit: int = PAGE) -> Sequence[Any]:
        """Entries with a number above `after`: number, body, hash."""
        return self.connection.execute(
            select(ENTRY.c.number, ENTRY.c.body, ENTRY.c.hash)
            .where(ENTRY.c.dataset == dataset.identifier)
            .where(ENTRY.c.number > after)
            .order_by(ENTRY.c.number)
            .limit(limit)
        ).all()

    def reservations(self, dataset: Dataset) -> list[Reservation]:
        """Every reservation of a dataset, for `verify`."""
        rows = self.connection.execute(
            select(RESERVATION).where(RESERVATION.c.dataset == dataset.identifier)
        )
        return [_reservation_of(row) for row in rows]

    def runs(self, dataset: Dataset, skip: int, limit: int) -> list[Reservation]:
        """A page of a dataset's reservations: open ones first, then by the end of their lease."""
        closed = RESERVATION.c.state != State.OPEN.value
        rows = self.connection.execute(
            select(RESERVATION)
            .where(RESERVATION.c.dataset == dataset.identifier)
            .order_by(closed, RESERVATION.c.expires_at.desc(), RESERVATION.c.id)
            .offset(skip)
            .limit(limit)
        )
        return [_reservation_of(row) for row in rows]

    # --- idempotency

    def remembered(self, key: str, value: str) -> Remembered | None:
        """The answer given before under this idempotency key."""
        row = self.connection.execute(_REMEMBERED, {"key": key, "given": value}).first()
        return None if row is None else Remembered(row.fingerprint, row.status, row.answer)

    def remember(self, key: str, value: str, answer: Remembered) -> None:
        """Keep an answer for repeats."""
        self.connection.execute(
            _NEW_IDEMPOTENCY,
            {
                "key_id": key, "value": value, "fingerprint": answer.fingerprint,
                "status": answer.status, "answer": answer.answer, "created_at": now(),
            },
        )  # fmt: skip

    def forget(self, before: int, at_most: int) -> int:
        """Forget idempotency keys from before a time, the oldest first; return how many."""
        oldest = (
            select(IDEMPOTENCY.c.key_id, IDEMPOTENCY.c.value)
            .where(IDEMPOTENCY.c.created_at < before)
            .order_by(IDEMPOTENCY.c.created_at)
            .limit(at_most)
            .with_for_update(skip_locked=True)  # another server may be at it
        )
        key = tuple_(IDEMPOTENCY.c.key_id, IDEMPOTENCY.c.value)
        return self.connection.execute(IDEMPOTENCY.delete().where(key.in_(oldest))).rowcount

    # --- keys

    def known_secret(self, name: str) -> bytes | None:
        """A server secret, if it was made already."""
        found = self.connection.execute(select(SECRET.c.value).where(SECRET.c.name == name))
        value = found.scalar()
        return None if value is None else bytes(value)

    def secret(self, name: str) -> bytes:
        """A server secret, made when first asked for."""
        found = self.known_secret(name)
        if found is None:  # of several that ask at once the first to write decides
            self.connection.execute(_NEW_SECRET, {"name": name, "value": secrets.token_bytes(32)})
            return self.secret(name)
        return found

    def key(self, identifier: str) -> KeyRecord | None:
        """A key by its identifier."""
        row = self.connection.execute(select(API_KEY).where(API_KEY.c.id == identifier)).first()
        return None if row is None else _key_of(row)

    def keys(self) -> list[KeyRecord]:
        """All keys, oldest first."""
        rows = self.connection.execute(select(API_KEY).order_by(API_KEY.c.created_at))
        return [_key_of(row) for row in rows]

    def add_key(self, key: KeyRecord) -> None:
        """Store a new key."""
        self.connection.execute(
            API_KEY.insert().values(
                id=key.identifier, name=key.name, digest=key.digest,
                scopes=json.dumps(sorted(key.scopes)),
                datasets=None if key.datasets is None else json.dumps(list(key.datasets)),
                created_at=key.created_at, expires_at=key.expires_at,
                revoked_at=None, last_used_at=None,
            )
        )  # fmt: skip

    def revoke(self, identifier: str) -> None:
        """Make a key useless from now on."""
        self.connection.execute(
            API_KEY.update().where(API_KEY.c.id == identifier).values(revoked_at=now())
        )

    def used(self, identifier: str) -> None:
        """Note that a key was used."""
        self.connection.execute(
            API_KEY.update().where(API_KEY.c.id == identifier).values(last_used_at=now())
        )

    def audit(self, key: str, action: str, subject: str) -> None:
        """Note who did what."""
        self.connection.execute(
            AUDIT_EVENT.insert().values(
                id=uuid.uuid4().hex, at=now(), key_id=key, action=action, subject=subject
            )
        )

    def audits(self) -> list[dict[str, Any]]:
        """Who did what, oldest first."""
        rows = self.connection.execute(select(AUDIT_EVENT).order_by(AUDIT_EVENT.c.at))
        return [
            {"at": row.at, "key": row.key_id, "action": row.action, "subject": row.subject}
            for row in rows
        ]


def _dataset_of(row: Any) -> Dataset:
    policy = RenyiFilter(row.rdp_order, row.epsilon, row.delta, NeighbouringRelation(row.relation))
    balance = Balance(row.spent, row.held)
    return Dataset(
        row.id, row.name, row.size, row.privacy_unit, policy, balance, row.version, row.head,
        row.created_at,
    )  # fmt: skip


def _reservation_of(row: Any) -> Reservation:
    return Reservation(
        row.id, row.dataset, State(row.state), json.loads(row.mechanism), row.mechanism_hash,
        int(row.unit), row.steps_reserved, row.steps_granted, row.expires_at, row.purpose,
        row.key_id,
    )  # fmt: skip


def _key_of(row: Any) -> KeyRecord:
    datasets = None if row.datasets is None else tuple(json.loads(row.datasets))
    return KeyRecord(
        row.id, row.name, bytes(row.digest), frozenset(json.loads(row.scopes)), datasets,
        row.created_at, row.expires_at, row.revoked_at, row.last_used_at,
    )  # fmt: skip
