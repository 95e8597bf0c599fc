"""Pages to sign in and out, and to manage API keys."""

from __future__ import annotations

import secrets
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import RedirectResponse, Response

from accountant_service.api.ledger_routes import (
    KeyCursor,
    Name,
    keys_of,
    parse_key_cursor,
    write_key_cursor,
)
from accountant_service.api.ledger_schemas import KeyRequest
from accountant_service.api.ledger_views import LIST_PAGE_SIZE
from accountant_service.api.routes import StrictRoute
from accountant_service.ledger.api_keys import Scope, require_unbound
from accountant_service.ledger.caps import Caps
from accountant_service.ledger.errors import UnauthenticatedError, UnknownSubjectError
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.repository import now
from accountant_service.ledger.rules import HolderKind
from accountant_service.ledger.service import Ledger
from accountant_service.questions import problems
from accountant_service.web.rendering import render_page
from accountant_service.web.session_checks import (
    Fields,
    FormKey,
    SentFields,
    TheSession,
    first_value,
    safe_redirect_path,
    sessions_of,
)
from accountant_service.web.sessions import COOKIE, VISITOR, set_cookie

_SEE_OTHER: Final = 303
_DAY: Final = 86400.0
_BLANK: Final[dict[str, Any]] = {
    "scopes": [Scope.RUN.value],
    "datasets": [],
    "reach": "listed",
    "days": "90",
}
_SCOPES: Final = {
    Scope.RUN.value: "see datasets, reserve budget and train: for a training job",
    Scope.COMPUTE.value: "compute only, and see no dataset",
    Scope.MONITOR.value: "read budgets in /metrics",
    Scope.AUDITOR.value: "export the record, and nothing else",
    Scope.OWNER.value: "create datasets, set caps, change and end runs of every key",
    Scope.ADMIN.value: "everything, and manage keys",
}

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/sign-in")
def sign_in_form(request: Request, next: str = "") -> Response:  # noqa: A002 - the name in the URL
    """Show the sign-in form."""
    return _render_sign_in_page(request, next)


def _render_sign_in_page(
    request: Request, after: str, problem: str = "", status: int = 200
) -> Response:
    """Render the sign-in form, which redirects to a path afterwards."""
    visitor = request.cookies.get(VISITOR) or secrets.token_urlsafe(16)
    answer = render_page(
        request,
        "sign_in.html",
        status,
        parameters=("next",),
        after=safe_redirect_path(after),
        problem=problem,
        csrf=sessions_of(request).csrf(visitor),
    )
    set_cookie(request, answer, VISITOR, visitor)
    return answer


@router.post("/sign-in")
def sign_in(request: Request, sent: SentFields) -> Response:
    """Open a session for the holder of an API key."""
    sessions_of(request).require_csrf(request.cookies.get(VISITOR), first_value(sent, "csrf"))
    after = safe_redirect_path(first_value(sent, "next"))
    try:
        cookie = sessions_of(request).open(first_value(sent, "key"))
    except UnauthenticatedError:
        return _render_sign_in_page(
            request, after, "This key is not valid: it is mistyped, expired or revoked.", 422
        )
    answer = RedirectResponse(after, _SEE_OTHER)
    set_cookie(request, answer, COOKIE, cookie)
    return answer


@router.post("/sign-out")
def sign_out(_: FormKey) -> Response:
    """End the session."""
    answer = RedirectResponse("/sign-in", _SEE_OTHER)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


@router.get("/keys")
def keys(request: Request, session: TheSession, after: KeyCursor = "") -> Response:
    """Show a page of the API keys, and the form for a new one."""
    require_unbound(session.key)
    return _render_keys_page(request, after=after)


def _render_keys_page(
    request: Request, status: int = 200, after: str = "", **context: Any
) -> Response:
    """Render the page of API keys, with the form for a new one."""
    ledger: Ledger = request.app.state.ledger
    datasets = ledger.list_datasets(request.state.session.key, "", LIST_PAGE_SIZE)
    blank: Any = {"texts": _BLANK, "problems": {}, "token": None, "warnings": ()}
    found = keys_of(request).list_keys(parse_key_cursor(after), LIST_PAGE_SIZE + 1)
    keys = found[:LIST_PAGE_SIZE]
    return render_page(
        request,
        "keys.html",
        status,
        parameters=("after",),
        keys=keys,
        after=after,
        following=write_key_cursor(keys[-1]) if len(found) > LIST_PAGE_SIZE else None,
        caps=_describe_caps(request.app.state.caps, keys),
        scopes=_SCOPES,
        known_datasets=[each.name for each in datasets],
        at=now(),
        **{**blank, **context},
    )


def _describe_caps(caps: Caps, keys: list[KeyRecord]) -> dict[str, list[str]]:
    """Return, by key identifier, sentences about the caps that limit the key or its team."""
    by_holder = caps.list_by_holder()
    return {
        key.identifier: [
            f"{whose} {share:.3g} of {dataset}"
            for holder, whose in (
                ((HolderKind.KEY, key.identifier), "key:"),
                ((HolderKind.TEAM, key.team or ""), "team:"),
            )
            for dataset, share in by_holder.get(holder, [])
        ]
        for key in keys
    }


@router.post("/keys")
def create_key(request: Request, holder: FormKey, sent: SentFields) -> Response:
    """Create an API key and show it once."""
    require_unbound(holder)
    faults = _check_reach(sent)
    try:
        asked = KeyRequest.model_validate(_build_key_body(sent))
    except ValidationError as error:
        faults = _get_problem_sentences(error) | faults
    if faults:
        return _render_keys_page(request, 422, texts=_get_typed_texts(sent), problems=faults)
    names = None if asked.datasets is None else tuple(asked.datasets)
    seconds = asked.expires_in_seconds
    expires = None if seconds is None else now() + int(1e6 * seconds)
    token, _ = keys_of(request).create(
        asked.scopes, asked.name, names, expires, asked.team, by=holder.identifier
    )
    warnings = keys_of(request).warn_of_missing_datasets(names or ())
    return _render_keys_page(request, 201, token=token, warnings=warnings)


def _check_reach(sent: Fields) -> dict[str, str]:
    """Return an error message if a key is to be limited to datasets, but none is named."""
    if first_value(sent, "reach") == "listed" and not _list_dataset_names(sent):
        return {"datasets": "Choose or name at least one dataset, or choose all datasets."}
    return {}


def _list_dataset_names(sent: Fields) -> list[str]:
    """Return the datasets that were chosen from the list, and those that were typed."""
    return list(dict.fromkeys(name for text in sent.get("datasets", ()) for name in text.split()))


def _build_key_body(sent: Fields) -> dict[str, Any]:
    """Return the submitted form for a new key as a request body of the API."""
    reach, days = first_value(sent, "reach"), first_value(sent, "days")
    names = [] if reach == "all" else _list_dataset_names(sent)
    body: dict[str, Any] = {"name": first_value(sent, "name"), "scopes": sent.get("scopes", [])}
    body |= {"datasets": names} if names else {}
    body |= {"team": team} if (team := first_value(sent, "team")) else {}
    try:
        return body | ({"expires_in_seconds": float(days) * _DAY} if days else {})
    except ValueError:
        return body | {"expires_in_seconds": days}


def _get_typed_texts(sent: Fields) -> dict[str, Any]:
    """Return the form's texts as typed, to show the form again."""
    typed: dict[str, Any] = {name: first_value(sent, name) for name in ("name", "team", "days")}
    lists = {"scopes": sent.get("scopes", []), "datasets": _list_dataset_names(sent)}
    return typed | lists | {"reach": first_value(sent, "reach")}


_FIELD_PROBLEMS: Final = {
    "scopes": "Choose at least one scope.",
    "name": "Use at most 200 characters.",
    "datasets": "Separate names by spaces; use letters, digits, dots, dashes and underscores.",
    "team": "Begin with a letter or digit; use letters, digits, dots, dashes and underscores.",
    "expires_in_seconds": "Enter a number of days above 0 and up to 3650.",
}


def _get_problem_sentences(error: ValidationError) -> dict[str, str]:
    """Return a sentence for each invalid field of the form."""
    faults = problems.of_error(error)["errors"]
    names = [fault["pointer"].split("/")[1] for fault in faults]
    return {name: _FIELD_PROBLEMS.get(name, "This value is not valid.") for name in names}


@router.get("/keys/{identifier}/revoke")
def ask_to_revoke(request: Request, identifier: Name, session: TheSession) -> Response:
    """Ask whether to revoke an API key, and show the consequences."""
    require_unbound(session.key)
    found = keys_of(request).find_valid(identifier)
    if found is None:
        raise UnknownSubjectError(f"there is no key {identifier!r} to revoke")
    key, is_last_admin = found
    is_own = identifier == session.key.identifier
    return render_page(
        request, "revoke_key.html", key=key, is_own=is_own, is_last_admin=is_last_admin
    )


@router.post("/keys/{identifier}/revoke")
def revoke_key(request: Request, identifier: Name, holder: FormKey) -> Response:
    """Revoke an API key."""
    require_unbound(holder)
    if keys_of(request).revoke(identifier, by=holder.identifier) is None:
        raise UnknownSubjectError(f"there is no key {identifier!r}")
    return RedirectResponse("/keys", _SEE_OTHER)
