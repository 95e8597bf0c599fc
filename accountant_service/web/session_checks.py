"""Dependencies of pages: the session, the submitted form and safe redirects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import parse_qsl, quote

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from accountant_service.api.async_ledger import AsyncLedger
from accountant_service.api.error_responses import NOTES
from accountant_service.api.ledger_routes import ledger_of
from accountant_service.ledger.errors import DatabaseAwayError, ForbiddenError, UnauthenticatedError
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.service import WriteRequest
from accountant_service.web.sessions import COOKIE, Session, Sessions

_FIELDS_MAX: Final = 100
_NUL: Final = "\0"
_IDEMPOTENCY_KEY_MAX: Final = 200
Fields = dict[str, list[str]]


def sessions_of(request: Request) -> Sessions:
    """Return the application's sessions."""
    found: Sessions = request.app.state.sessions
    return found


def required_session(request: Request) -> Session:
    """Return the session of a request, or raise `UnauthenticatedError` without a valid one.

    Raises:
        UnauthenticatedError: nobody is signed in; `SessionEndedError` if the session has ended.
    """
    cookie = request.cookies.get(COOKIE)
    if cookie is None:
        raise UnauthenticatedError("sign in with an API key to see this page")
    session = sessions_of(request).read(cookie)
    request.state.session = session
    request.scope[NOTES].has_key = True
    return session


async def optional_session(request: Request) -> Session | None:
    """Return the session of a request, or None if there is none or it cannot be read."""
    if COOKIE not in request.cookies:
        return None
    try:
        return await run_in_threadpool(required_session, request)
    except (UnauthenticatedError, DatabaseAwayError):
        return None


async def read_form_fields(request: Request) -> Fields:
    """Return the fields of a submitted form, each with its list of values.

    Raises:
        ForbiddenError: the body is not a form that this service can read.
    """
    try:
        text = (await request.body()).decode()
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS_MAX)
    except ValueError:
        pairs = [("", _NUL)]
    if any(_NUL in value for _, value in pairs):  # PostgreSQL stores no NUL characters
        raise ForbiddenError("this form cannot be read; reload the page")
    found: Fields = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value.strip())
    return found


SentFields = Annotated[Fields, Depends(read_form_fields)]
TheSession = Annotated[Session, Depends(required_session)]
TheLedger = Annotated[AsyncLedger, Depends(ledger_of)]


def first_value(sent: Fields, name: str) -> str:
    """Return the first value of a field of a submitted form, or an empty string."""
    return sent.get(name, [""])[0]


def write_request(
    key: KeyRecord, sent: Fields, call: str, body: Mapping[str, Any] | None = None
) -> WriteRequest:
    """Return the write request of a submitted form, with its field `once` as idempotency key."""
    return WriteRequest(key, first_value(sent, "once")[:_IDEMPOTENCY_KEY_MAX], call, body)


def require_form_key(request: Request, session: TheSession, sent: SentFields) -> KeyRecord:
    """Check that a form was sent from a page of this session, and return its API key."""
    sessions_of(request).require_csrf(request.cookies.get(COOKIE), first_value(sent, "csrf"))
    return session.key


FormKey = Annotated[KeyRecord, Depends(require_form_key)]


def safe_redirect_path(path: str) -> str:
    """Return a path of this service unchanged; for any other address, the datasets page."""
    is_local = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if is_local and path.isprintable() else "/datasets"


def sign_in_path(request: Request) -> str:
    """Return the path of the sign-in form that leads back to this page."""
    here = request.url.path if request.method == "GET" else "/datasets"
    return f"/sign-in?next={quote(here)}"
