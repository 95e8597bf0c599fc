"""The pages of an application, and failures as pages for whoever reads with a browser."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import RedirectResponse, Response

from accountant_service.api import problems
from accountant_service.errors import AccountingError, UnauthenticatedError
from accountant_service.web import (
    account_pages,
    calculator_page,
    ledger_pages,
    reference_page,
)
from accountant_service.web.access import optional_session, sign_in_path
from accountant_service.web.rendering import Assets, page
from accountant_service.web.sessions import COOKIE, SessionEndedError, Sessions

_Handler = Callable[[Request, Any], Awaitable[Response]]
_FAILURES: Final = (AccountingError, RequestValidationError, HTTPException, Exception)
_SEE_OTHER: Final = 303
_PART: Final = "HX-Request"  # the header by which htmx asks for a part of a page
_NOWHERE: Final = (404, 405)
_NOTHING: Final = "no page is at this address; it may be mistyped, or the page has moved"


def install(app: FastAPI) -> None:
    """Add the pages to an application that already answers failures with problems."""
    app.state.sessions = Sessions(app.state.repository, app.state.keys)
    for each in (calculator_page, account_pages, ledger_pages, reference_page):
        app.include_router(each.router)
    app.mount("/static", GZipMiddleware(Assets()), "static")
    for kind in _FAILURES:
        app.add_exception_handler(kind, _pages_before(app.exception_handlers[kind]))


def _pages_before(otherwise: Any) -> _Handler:
    """A handler that answers browsers with pages, and programs as before."""

    async def answer(request: Request, error: Exception) -> Response:
        as_problem: Response = await otherwise(request, error)
        if not _reads_pages(request):
            return as_problem
        if isinstance(error, UnauthenticatedError):
            return _signed_out(request, error)
        await run_in_threadpool(optional_session, request)  # for the links at the top
        return _failure(request, error, as_problem)

    return answer


def _reads_pages(request: Request) -> bool:
    asks = "text/html" in request.headers.get("Accept", "") or _PART in request.headers
    return asks and not request.url.path.startswith("/v1/")


def _signed_out(request: Request, error: UnauthenticatedError) -> Response:
    """The way to the sign-in form; a page of its own for a session that has ended."""
    if not isinstance(error, SessionEndedError):
        return RedirectResponse(sign_in_path(request), _SEE_OTHER)
    answer = page(request, "session_ended.html", 401, way_on=sign_in_path(request))
    if _PART in request.headers:  # a part of a page: the whole one is to be loaded anew
        answer.headers["HX-Refresh"] = "true"
    else:
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def _failure(request: Request, error: Exception, as_problem: Response) -> Response:
    problem = problems.of_error(error)
    nowhere = isinstance(error, HTTPException) and error.status_code in _NOWHERE
    detail = _NOTHING if nowhere else problem["detail"]
    found = page(request, "failure.html", problem["status"], title=problem["title"], detail=detail)
    for name in ("Retry-After", "Allow"):
        if name in as_problem.headers:
            found.headers[name] = as_problem.headers[name]
    return found
