"""What stands before a page: the session, the form, and where to go on after signing in."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import parse_qsl, quote

from fastapi import Depends, Request

from accountant_service.api.async_ledger import AsyncLedger
from accountant_service.api.ledger_routes import ledger_of
from accountant_service.errors import DatabaseAwayError, ForbiddenError, UnauthenticatedError
from accountant_service.ledger.repository import KeyRecord
from accountant_service.web.sessions import COOKIE, Session, Sessions

_FIELDS_MAX: Final = 100
_NUL: Final = "\0"
Fields = dict[str, list[str]]


def sessions_of(request: Request) -> Sessions:
    """The application's sessions."""
    found: Sessions = request.app.state.sessions
    return found


def required_session(request: Request) -> Session:
    """Whose request this is.

    Raises:
        UnauthenticatedError: nobody is signed in; `SessionEndedError` if somebody was.
    """
    cookie = request.cookies.get(COOKIE)
    if cookie is None:
        raise UnauthenticatedError("sign in with an API key to see this page")
    session = sessions_of(request).read(cookie)
    request.state.session = session
    return session


def optional_session(request: Request) -> Session | None:
    """Whose request this is, on pages for everybody, which need no database."""
    try:
        return required_session(request)
    except (UnauthenticatedError, DatabaseAwayError):
        return None


async def fields(request: Request) -> Fields:
    """The fields of a form that was sent, each with its values.

    Raises:
        ForbiddenError: it is no form, or not from one of our pages.
    """
    try:
        text = (await request.body()).decode()
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS_MAX)
    except ValueError:
        pairs = [("", _NUL)]
    if any(_NUL in value for _, value in pairs):  # PostgreSQL keeps none
        raise ForbiddenError("this form cannot be read; load the page again")
    found: Fields = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value.strip())
    return found


SentFields = Annotated[Fields, Depends(fields)]
TheSession = Annotated[Session, Depends(required_session)]
TheLedger = Annotated[AsyncLedger, Depends(ledger_of)]


def first(sent: Fields, name: str) -> str:
    """The first value of a field, or nothing."""
    return sent.get(name, [""])[0]


def form_holder(request: Request, session: TheSession, sent: SentFields) -> KeyRecord:
    """The key behind a form that was sent from a page of this session."""
    sessions_of(request).require_csrf(request.cookies.get(COOKIE), first(sent, "csrf"))
    return session.key


FormHolder = Annotated[KeyRecord, Depends(form_holder)]


def destination(path: str) -> str:
    """A path of ours to go on to; the datasets instead of anything else."""
    ours = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if ours and path.isprintable() else "/datasets"


def sign_in_path(request: Request) -> str:
    """Where to sign in so as to come back here."""
    here = request.url.path if request.method == "GET" else "/datasets"
    return f"/sign-in?next={quote(here)}"
