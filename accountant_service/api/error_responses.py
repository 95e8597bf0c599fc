"""Every failed request is answered with an RFC 9457 problem document."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from accountant_service.errors import CodedError
from accountant_service.ledger.errors import DatabaseAwayError, QuotaExceededError
from accountant_service.questions import problems

_LOG: Final = logging.getLogger(__name__)
MEDIA_TYPE: Final = "application/problem+json"
REQUEST_ID: Final = "X-Request-ID"
NOTES: Final = "accountant.notes"  # the key of a request's `RequestNotes` in its scope


@dataclass(slots=True)
class RequestNotes:
    """Notes about one request, such as its error code, for the middleware.

    Attributes:
        identifier: sent back as `X-Request-ID`.
        code: the code of the problem, if the request was answered with one.
        has_key: whether it came with a valid API key, or in a session of one.
    """

    identifier: str
    code: str | None = None
    has_key: bool = False


def describe(error: Exception) -> dict[str, Any]:
    """Return the error answer (an RFC 9457 problem document) to a failed request."""
    if isinstance(error, RequestValidationError):
        return problems.of_validation_errors(error.errors())
    return problems.of_error(error)


def response(problem: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP response for an error answer (a problem document)."""
    return Response(
        to_json(problem), int(problem["status"]), dict(headers or {}), media_type=MEDIA_TYPE
    )


def error_response(scope: Scope, error: Exception) -> Response:
    """Return the response to a failed request, and note the error code for the access log."""
    problem = describe(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, DatabaseAwayError):
        headers = {"Retry-After": "2"}
    if isinstance(error, QuotaExceededError):
        headers = {"Retry-After": str(error.retry_after)}
    notes = scope.get(NOTES)
    if notes is not None:
        notes.code = problem["code"]
        headers |= {REQUEST_ID: notes.identifier}
    return response(problem, headers)


def install(app: FastAPI) -> None:
    """Add exception handlers that turn every failure into an error answer."""

    @app.exception_handler(CodedError)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    async def answer_with_problem(request: Request, error: Exception) -> Response:
        """Return the error answer for an exception, and log it if it is unexpected."""
        answer = error_response(request.scope, error)
        if answer.status_code == 500:
            _LOG.error("unexpected failure", exc_info=error)
        return answer
