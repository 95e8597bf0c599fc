"""Signing in and out, and the keys for administrators."""

from __future__ import annotations

import secrets
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import RedirectResponse, Response

from accountant_service.api import problems
from accountant_service.api.ledger_routes import Name, keys_of
from accountant_service.api.ledger_schemas import KeyRequest
from accountant_service.api.routes import StrictRoute
from accountant_service.errors import UnauthenticatedError, UnknownSubjectError
from accountant_service.ledger.keys import Scope, require_unbound
from accountant_service.ledger.repository import now
from accountant_service.web.access import (
    Fields,
    FormHolder,
    SentFields,
    TheSession,
    destination,
    first,
    sessions_of,
)
from accountant_service.web.rendering import page
from accountant_service.web.sessions import COOKIE, VISITOR, set_cookie

_SEE_OTHER: Final = 303
_DAY: Final = 86400.0

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/sign-in")
def sign_in_form(request: Request, next: str = "") -> Response:  # noqa: A002 - the name in the URL
    """The form to sign in with."""
    return _sign_in(request, next)


def _sign_in(request: Request, after: str, problem: str = "", status: int = 200) -> Response:
    visitor = request.cookies.get(VISITOR) or secrets.token_urlsafe(16)
    answer = page(
        request,
        "sign_in.html",
        status,
        after=destination(after),
        problem=problem,
        csrf=sessions_of(request).csrf(visitor),
    )
    set_cookie(request, answer, VISITOR, visitor)
    return answer


@router.post("/sign-in")
def sign_in(request: Request, sent: SentFields) -> Response:
    """Open a session for the holder of a key."""
    sessions_of(request).require_csrf(request.cookies.get(VISITOR), first(sent, "csrf"))
    after = destination(first(sent, "next"))
    try:
        cookie = sessions_of(request).open(first(sent, "key"))
    except UnauthenticatedError:
        return _sign_in(
            request, after, "This is no valid key: it is mistyped, expired or revoked.", 422
        )
    answer = RedirectResponse(after, _SEE_OTHER)
    set_cookie(request, answer, COOKIE, cookie)
    return answer


@router.post("/sign-out")
def sign_out(_: FormHolder) -> Response:
    """Forget who is signed in."""
    answer = RedirectResponse("/sign-in", _SEE_OTHER)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


@router.get("/keys")
def keys(request: Request, session: TheSession) -> Response:
    """Every key, and the form for a new one."""
    require_unbound(session.key)
    return _keys_page(request)


def _keys_page(request: Request, status: int = 200, **context: Any) -> Response:
    blank: Any = {"texts": {"scopes": [Scope.RUN.value]}, "problems": {}, "token": None}
    return page(
        request,
        "keys.html",
        status,
        keys=keys_of(request).all(),
        scopes=[scope.value for scope in Scope],
        at=now(),
        **{**blank, **context},
    )


@router.post("/keys")
def create_key(request: Request, holder: FormHolder, sent: SentFields) -> Response:
    """A new key, shown this once."""
    require_unbound(holder)
    try:
        asked = KeyRequest.model_validate(_key_body(sent))
    except ValidationError as error:
        return _keys_page(request, 422, texts=_texts(sent), problems=_sentences(error))
    names = None if asked.datasets is None else tuple(asked.datasets)
    seconds = asked.expires_in_seconds
    expires = None if seconds is None else now() + int(1e6 * seconds)
    token, _ = keys_of(request).create(asked.scopes, asked.name, names, expires)
    return _keys_page(request, 201, token=token)


def _key_body(sent: Fields) -> dict[str, Any]:
    """What the form says, as the API's body."""
    names, days = first(sent, "datasets").split(), first(sent, "days")
    body: dict[str, Any] = {"name": first(sent, "name"), "scopes": sent.get("scopes", [])}
    body |= {"datasets": names} if names else {}
    try:
        return body | ({"expires_in_seconds": float(days) * _DAY} if days else {})
    except ValueError:
        return body | {"expires_in_seconds": days}


def _texts(sent: Fields) -> dict[str, Any]:
    """What was typed, as the template shows it again."""
    typed = {name: first(sent, name) for name in ("name", "datasets", "days")}
    return typed | {"scopes": sent.get("scopes", [])}


_FIELD_PROBLEMS: Final = {
    "scopes": "Choose at least one scope.",
    "name": "A name has at most 200 characters.",
    "datasets": "Names have letters, digits, dots, dashes and underscores; put spaces between.",
    "expires_in_seconds": "Days must be a number above 0 and up to 3650.",
}


def _sentences(error: ValidationError) -> dict[str, str]:
    faults = problems.of_error(error)["errors"]
    names = [fault["pointer"].split("/")[1] for fault in faults]
    return {name: _FIELD_PROBLEMS.get(name, "This cannot be understood.") for name in names}


@router.post("/keys/{identifier}/revoke")
def revoke_key(request: Request, identifier: Name, holder: FormHolder) -> Response:
    """Make a key useless from now on."""
    require_unbound(holder)
    if keys_of(request).revoke(identifier, by=holder.identifier) is None:
        raise UnknownSubjectError(f"there is no key {identifier!r}")
    return RedirectResponse("/keys", _SEE_OTHER)
