"""Adds the pages to the application, and shows failures to browsers as pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from accountant_service.api import error_responses
from accountant_service.errors import CodedError
from accountant_service.ledger.errors import UnauthenticatedError
from accountant_service.web import (
    account_pages,
    calculator_page,
    documentation_pages,
    help_page,
    import_page,
    ledger_pages,
    new_dataset_page,
    plan_page,
    quote_page,
    reference_page,
)
from accountant_service.web.rendering import load_assets, render_page
from accountant_service.web.session_checks import optional_session, sign_in_path
from accountant_service.web.sessions import COOKIE, SessionEndedError, Sessions

_Handler = Callable[[Request, Any], Awaitable[Response]]
_FAILURES: Final = (CodedError, RequestValidationError, HTTPException, Exception)
PAGES: Final = (
    account_pages,
    calculator_page,
    documentation_pages,
    help_page,
    import_page,
    ledger_pages,
    new_dataset_page,
    plan_page,
    quote_page,
    reference_page,
)
_SEE_OTHER: Final = 303
_HTMX_HEADER: Final = "HX-Request"  # sent by htmx when it requests part of a page
_NO_PAGE_STATUSES: Final = (404, 405)
_NO_PAGE_DETAIL: Final = "there is no page at this address"


def install(app: FastAPI) -> None:
    """Add the web pages to an application, and show failures to browsers as pages."""
    app.state.sessions = Sessions(app.state.repository, app.state.keys)
    for each in PAGES:
        app.include_router(each.router)
    app.add_route("/static/{path:path}", _make_asset_handler(), include_in_schema=False)
    for kind in _FAILURES:
        app.add_exception_handler(kind, _make_page_handler(app.exception_handlers[kind]))


def _make_asset_handler() -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of the pages' static files, which are read and compressed now."""
    assets = load_assets()

    async def answer_with_asset(request: Request) -> Response:
        """Answer with a static file."""
        found = assets.get(request.path_params["path"])
        if found is None:
            raise HTTPException(404)
        return found.respond(request)

    return answer_with_asset


def _make_page_handler(problem_handler: Any) -> _Handler:
    """Wrap an exception handler so that browsers get a page and other clients JSON."""

    async def answer_failure(request: Request, error: Exception) -> Response:
        """Answer a failed request with a page or a JSON error answer."""
        as_problem: Response = await problem_handler(request, error)
        if not _wants_html(request):
            return as_problem
        if isinstance(error, UnauthenticatedError):
            return _ask_to_sign_in(request, error)
        await optional_session(request)  # for the links in the header
        return _render_failure_page(request, error, as_problem)

    return answer_failure


def _wants_html(request: Request) -> bool:
    """Return whether a request accepts HTML, as a browser's does."""
    asks = "text/html" in request.headers.get("Accept", "") or _HTMX_HEADER in request.headers
    return asks and not request.url.path.startswith("/v1/")


def _ask_to_sign_in(request: Request, error: UnauthenticatedError) -> Response:
    """Redirect to the sign-in form, or show that the session has ended."""
    if not isinstance(error, SessionEndedError):
        return RedirectResponse(sign_in_path(request), _SEE_OTHER)
    known = list(request.query_params)  # of the page that cannot be shown
    answer = render_page(
        request, "session_ended.html", 401, parameters=known, way_on=sign_in_path(request)
    )
    if _HTMX_HEADER in request.headers:  # htmx reloads the whole page
        answer.headers["HX-Refresh"] = "true"
    else:
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def _render_failure_page(request: Request, error: Exception, as_problem: Response) -> Response:
    """Render the page for an error, with the headers of the JSON error answer."""
    problem = error_responses.describe(error)
    nowhere = isinstance(error, HTTPException) and error.status_code in _NO_PAGE_STATUSES
    detail = _NO_PAGE_DETAIL if nowhere else problem["detail"]
    found = render_page(
        request,
        "failure.html",
        problem["status"],
        parameters=list(request.query_params),  # of the page that cannot be shown
        title=problem["title"],
        detail=detail,
    )
    for name in ("Retry-After", "Allow"):
        if name in as_problem.headers:
            found.headers[name] = as_problem.headers[name]
    return found
