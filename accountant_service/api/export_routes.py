"""Routes that export the record: the entries of all datasets, and the audit events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import AwareDatetime
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from accountant_service.api import ledger_schemas as bodies
from accountant_service.api.ledger_routes import CURSOR, PROBLEMS, Key, Name
from accountant_service.api.routes import StrictRoute
from accountant_service.ledger import exporting
from accountant_service.ledger.api_keys import Scope, require_scope, require_unbound
from accountant_service.ledger.exporting import EntryQuery, ExportedEntry, Period, write_csv
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.rules import EntryKind

router = APIRouter(route_class=StrictRoute, tags=["ledger"], responses=PROBLEMS)
Item = TypeVar("Item")
Cursor = TypeVar("Cursor")


class ExportFormat(StrEnum):
    """The format of an export: a page of JSON, or everything as JSON lines or CSV."""

    JSON = "json"
    LINES = "jsonl"
    CSV = "csv"


_MEDIA_TYPES: Final = {
    ExportFormat.LINES: "application/jsonl",
    ExportFormat.CSV: "text/csv; charset=utf-8",
}
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "A page as JSON, or the whole export as JSON lines or CSV",
        "content": {"application/jsonl": {}, "text/csv": {}},
    }
}
Wanted = Annotated[
    ExportFormat,
    Query(
        alias="format",
        description="`json` answers page by page; `jsonl` and `csv` send everything after the "
        "cursor at once",
    ),
]
Since = Annotated[
    AwareDatetime | None, Query(description="earliest time, such as 2026-01-31T00:00:00Z")
]
Until = Annotated[AwareDatetime | None, Query(description="time before which all items are")]
Datasets = Annotated[
    list[Name] | None, Query(alias="dataset", description="name of a dataset; repeatable")
]
Kinds = Annotated[list[EntryKind] | None, Query(alias="kind", description="repeatable")]
Actions = Annotated[
    list[Name] | None,
    Query(alias="action", description="such as key-created, dataset-closed; repeatable"),
]
EntryCursorField = Annotated[
    str, Query(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*:\d{1,18})?$", description=CURSOR)
]
EventCursorField = Annotated[str, Query(pattern=r"^(\d{1,18}:[0-9a-f]{32})?$", description=CURSOR)]


@router.get("/v1/entries", response_model=bodies.EntriesView, responses=_ANSWERS)
async def export_entries(
    request: Request,
    key: Key,
    dataset: Datasets = None,
    kind: Kinds = None,
    since: Since = None,
    until: Until = None,
    cursor: EntryCursorField = "",
    wanted: Wanted = ExportFormat.JSON,
) -> Response:
    """Export the entries of all datasets, by dataset and number, each with its hash.

    It needs a key with scope `auditor` or `admin`; one that is bound to datasets gets these only.
    `accountant ledger verify --file FILE` verifies the JSON lines offline.
    """
    require_scope(key, Scope.AUDITOR)
    query = EntryQuery(
        _visible_datasets(key, dataset), frozenset(kind or ()), _period(since, until)
    )
    name, _, number = cursor.partition(":")
    start = (name, int(number)) if cursor else exporting.ENTRIES_START
    repository = request.app.state.repository

    async def read(after: tuple[str, int]) -> tuple[list[ExportedEntry], tuple[str, int] | None]:
        """Read a page of entries in a thread."""
        return await run_in_threadpool(exporting.read_entries, repository, query, after)

    columns = exporting.ENTRY_COLUMNS
    return await _answer(
        wanted,
        "entries",
        read,
        start,
        ExportedEntry.to_json,
        (list(columns), lambda entry: [column(entry) for column in columns.values()]),
    )


@router.get("/v1/events", response_model=bodies.EventsView, responses=_ANSWERS)
async def export_events(
    request: Request,
    key: Key,
    action: Actions = None,
    since: Since = None,
    until: Until = None,
    cursor: EventCursorField = "",
    wanted: Wanted = ExportFormat.JSON,
) -> Response:
    """Export the audit events, the oldest first: who managed keys, datasets and caps.

    It needs a key with scope `auditor` or `admin` that is not bound to datasets. Audit events are
    not part of a hash chain.
    """
    require_unbound(key, Scope.AUDITOR)
    actions, period = frozenset(action or ()), _period(since, until)
    at, _, identifier = cursor.partition(":")
    start = (int(at), identifier) if cursor else exporting.EVENTS_START
    repository = request.app.state.repository

    async def read(after: tuple[int, str]) -> tuple[list[dict[str, Any]], tuple[int, str] | None]:
        """Read a page of events in a thread."""
        return await run_in_threadpool(exporting.read_events, repository, actions, period, after)

    columns = exporting.EVENT_COLUMNS
    return await _answer(
        wanted,
        "events",
        read,
        start,
        dict,
        (list(columns), lambda event: [event[column] for column in columns]),
    )


def _visible_datasets(key: KeyRecord, asked: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the requested datasets that the key may see; None stands for all datasets."""
    if key.datasets is None:
        return None if asked is None else tuple(asked)
    return tuple(name for name in key.datasets if asked is None or name in asked)


def _period(since: AwareDatetime | None, until: AwareDatetime | None) -> Period:
    """Convert two times to a period in microseconds since 1970."""
    first, last = (
        None if moment is None else round(1e6 * moment.timestamp()) for moment in (since, until)
    )
    return Period(first, last)


async def _answer(
    wanted: ExportFormat,
    name: str,
    read: Callable[[Cursor], Awaitable[tuple[list[Item], Cursor | None]]],
    start: Cursor,
    to_object: Callable[[Item], dict[str, Any]],
    table: tuple[Sequence[str], Callable[[Item], Sequence[Any]]],
) -> Response:
    """Return one page as JSON, or stream all pages as JSON lines or CSV.

    Args:
        wanted: the format.
        name: of the file.
        read: returns the page at a cursor, and the cursor of the next page if any.
        start: the first cursor.
        to_object: the JSON of an item.
        table: the columns' names, and the cells of an item.
    """
    found, following = await read(start)  # a failure here is still answered as a problem
    if wanted is ExportFormat.JSON:
        cursor = None if following is None else ":".join(map(str, following))  # type: ignore[call-overload]
        page = {"items": [to_object(item) for item in found], "next_cursor": cursor}
        return Response(to_json(page), media_type="application/json")
    header, cells = table

    def write(items: list[Item]) -> str:
        """Return items as text in the wanted format."""
        if wanted is ExportFormat.LINES:
            return "".join(json.dumps(to_object(item)) + "\n" for item in items)
        return write_csv([cells(item) for item in items])

    async def stream() -> AsyncIterator[str]:
        """Yield the export, one page at a time."""
        if wanted is ExportFormat.CSV:
            yield write_csv([header])
        items, cursor = found, following
        yield write(items)
        while cursor is not None:
            items, cursor = await read(cursor)
            yield write(items)

    file = f'attachment; filename="{name}.{wanted}"'
    headers = {"Content-Disposition": file, "Cache-Control": "no-store"}
    return StreamingResponse(stream(), headers=headers, media_type=_MEDIA_TYPES[wanted])
