"""RFC 9457 problems: the one place that turns failures into answers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response
from starlette.types import Scope

from accountant_service.errors import (
    AccountingError,
    BoundsContradictError,
    BudgetExhaustedError,
    DatabaseAwayError,
)
from accountant_service.mechanisms import MechanismError
from accountant_service.processes import AnswerError

_LOG: Final = logging.getLogger(__name__)
MEDIA_TYPE: Final = "application/problem+json"
INTERNAL_ERROR: Final = "internal-error"
REQUEST_ID: Final = "X-Request-ID"
NOTES: Final = "accountant.notes"  # where a request's scope holds its `Notes`

_STATUS_CODES: Final[Mapping[int, tuple[str, str]]] = {
    400: ("unreadable-body", "The body cannot be read"),
    404: ("not-found", "There is nothing here"),
    405: ("method-not-allowed", "This method is not allowed here"),
    408: ("body-too-slow", "The body did not come in time"),
    413: ("body-too-large", "The body is too large"),
    429: ("too-many-requests", "Too many requests came from here"),
    503: ("busy", "The service is busy"),
}


@dataclass(slots=True)
class Notes:
    """What is to be remembered of a request until it is logged.

    Attributes:
        identifier: sent back as `X-Request-ID`.
        code: of the problem it was answered with, if it was.
    """

    identifier: str
    code: str | None = None


class Problem(HTTPException):
    """A problem raised at the edge itself, before or around a computation."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)


class RefusedError(HTTPException, AnswerError):
    """A body refused by a computation process, which wrote the problem.

    Attributes:
        problem: the body of the answer.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(int(problem["status"]), problem["detail"])
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return RefusedError, (self.problem,)


Body = TypeVar("Body", bound=BaseModel)


def parse(body: bytes) -> Any:
    """A body as JSON.

    Raises:
        Problem: 400, it is none.
    """
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(400, f"the body is not JSON this service reads: {error}") from None


def read(model: type[Body], body: bytes) -> Body:
    """A body as what it means, in a computation process.

    Raises:
        RefusedError: it cannot be read.
    """
    try:
        return model.model_validate(parse(body))
    except (Problem, ValidationError) as error:
        raise RefusedError(of_error(error)) from None


def document(
    status: int,
    code: str,
    title: str,
    detail: str,
    errors: Iterable[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """The body of a problem answer."""
    body: dict[str, Any] = {
        "type": f"urn:privacy-accountant:problem:{code}",
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
    }
    listed = list(errors)
    return body | {"errors": listed} if listed else body


def of_accounting_error(error: AccountingError, mechanism_at: str | None = None) -> dict[str, Any]:
    """The problem of a question without an answer."""
    if isinstance(error, BoundsContradictError):
        _LOG.critical("%s", error.detail)  # with the question: a defect to be found
    errors = []
    if error.pointer is not None:
        pointer = (mechanism_at or error.mechanism_at) + error.pointer
        errors.append({"pointer": pointer, "message": error.detail})
    problem = document(error.status, error.code, error.title, error.detail, errors)
    if isinstance(error, BudgetExhaustedError):
        problem["affordable"] = error.affordable
    return problem


def of_validation_errors(errors: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The problem of a body that is JSON but not a question."""
    faults: list[dict[str, str]] = []
    for error in errors:
        location = [str(part) for part in error["loc"] if part != "body"]
        pointer = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in location)
        cause = (error.get("ctx") or {}).get("error")
        if isinstance(cause, MechanismError):
            faults += [
                {"pointer": pointer + inner, "message": message} for inner, message in cause.faults
            ]
        else:
            faults.append({"pointer": pointer, "message": _expectation(error)})
    shown = faults[:50]
    first = shown[0] if shown else {"pointer": "", "message": "cannot be understood"}
    detail = f"{first['pointer'] or 'the body'} {first['message']}"
    return document(422, "invalid-request", "The request is malformed", detail, shown)


def of_error(error: Exception) -> dict[str, Any]:
    """The problem of any failure."""
    match error:
        case RefusedError():
            return error.problem
        case AccountingError():
            return of_accounting_error(error)
        case RequestValidationError():
            return of_validation_errors(error.errors())
        case ValidationError():
            return of_validation_errors([dict(each) for each in error.errors()])
        case StarletteHTTPException():
            code, title = _STATUS_CODES.get(error.status_code, ("http-error", "The request failed"))
            return document(error.status_code, code, title, str(error.detail))
        case _:
            detail = "an unexpected failure; nothing was computed or charged. Please report it"
            return document(500, INTERNAL_ERROR, "The service failed", detail)


def _expectation(error: Mapping[str, Any]) -> str:
    """What was expected, in this service's words where pydantic's would puzzle."""
    match error["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is not a field of this request"
        case "model_attributes_type" | "dict_type" | "model_type":
            return "must be a JSON object, sent with Content-Type: application/json"
        case _:
            message = str(error["msg"])
            return message.replace("Input should be", "must be").replace("Value error, ", "")


def response(problem: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """The answer that carries a problem."""
    return Response(
        to_json(problem), int(problem["status"]), dict(headers or {}), media_type=MEDIA_TYPE
    )


def refusal(scope: Scope, error: Exception) -> Response:
    """The answer to a request that failed, noted for its log line."""
    problem = of_error(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, DatabaseAwayError):
        headers = {"Retry-After": "2"}
    notes = scope.get(NOTES)
    if notes is not None:
        notes.code = problem["code"]
        headers |= {REQUEST_ID: notes.identifier}
    return response(problem, headers)


def install(app: FastAPI) -> None:
    """Make every failure of `app` a problem."""

    @app.exception_handler(AccountingError)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(StarletteHTTPException)
    @app.exception_handler(Exception)
    async def answer(request: Request, error: Exception) -> Response:
        answer = refusal(request.scope, error)
        if answer.status_code == 500:
            _LOG.error("unexpected failure", exc_info=error)
        return answer
