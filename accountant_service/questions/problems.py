"""RFC 9457 problems: the document that describes a failure.

`error_responses` sends them over HTTP; the command line prints them. FastAPI is not imported here,
so that a command starts quickly.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from accountant_service.computing.processes import ReportedError
from accountant_service.errors import BoundsContradictError, CodedError
from accountant_service.ledger.errors import BudgetExhaustedError
from accountant_service.mechanisms import MechanismError
from accountant_service.operations.problem import Problem
from accountant_service.writing import number_format
from accountant_service.writing.canonical_json import (
    AmbiguousJsonError,
    escape_pointer,
    require_unambiguous,
)

_LOG: Final = logging.getLogger(__name__)
INTERNAL_ERROR: Final = "internal-error"
_SIGNS: Final = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
_NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # as in `ledger_schemas`, which imports this
INVALID_REQUEST: Final = "invalid-request"

_STATUS_CODES: Final[Mapping[int, tuple[str, str]]] = {
    400: ("unreadable-body", "The body cannot be read"),
    404: ("not-found", "There is nothing here"),
    405: ("method-not-allowed", "This method is not allowed here"),
    408: ("body-too-slow", "The body did not arrive in time"),
    413: ("body-too-large", "The body is too large"),
    429: ("too-many-requests", "Too many requests"),
    503: ("busy", "The service is busy"),
}


class RefusedError(HTTPException, ReportedError):
    """A computation process has refused a request body.

    Attributes:
        problem: the problem document.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(int(problem["status"]), problem["detail"])
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error answer, from which the exception is created again."""
        return RefusedError, (self.problem,)


Body = TypeVar("Body", bound=BaseModel)


def parse_json(body: bytes) -> Any:
    """Parse a request body as JSON; NaN and infinities are refused.

    Raises:
        Problem: 400, the body is not such JSON.
        RefusedError: 422, an object has a name twice, or a number too many digits.
    """
    try:
        found = from_json(body, allow_inf_nan=False)
        require_unambiguous(body.decode())
    except AmbiguousJsonError as error:
        faults = [{"pointer": error.pointer, "message": error.message}]
        title = "The request is malformed"
        raise RefusedError(document(422, INVALID_REQUEST, title, str(error), faults)) from None
    except ValueError as error:
        raise Problem(400, f"the body is not valid JSON: {error}") from None
    return found


def read_body(model: type[Body], body: bytes) -> Body:
    """Parse and validate a request body. Runs in a computation process.

    Raises:
        RefusedError: the body is malformed.
    """
    try:
        return model.model_validate(parse_json(body))
    except (Problem, ValidationError) as error:
        raise RefusedError(of_error(error)) from None


def document(
    status: int,
    code: str,
    title: str,
    detail: str,
    errors: Iterable[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Build an error answer (an RFC 9457 problem document) from its fields."""
    fields = {
        "type": f"urn:privacy-accountant:problem:{code}",
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
    }
    listed = list(errors)
    return fields | ({"errors": listed} if listed else {})


def of_accounting_error(error: CodedError, mechanism_at: str | None = None) -> dict[str, Any]:
    """Return the error answer (problem document) for an accounting or ledger error.

    Args:
        error: the error.
        mechanism_at: JSON pointer of the mechanism in the request, if not the error's own.
    """
    if isinstance(error, BoundsContradictError):
        _LOG.critical("%s", error.detail)  # includes the question: this is a defect
    errors = []
    if error.pointer is not None:
        pointer = (mechanism_at or error.mechanism_at) + error.pointer
        errors.append({"pointer": pointer, "message": error.detail})
    problem = document(error.status, error.code, error.title, error.detail, errors)
    if isinstance(error, BudgetExhaustedError):
        problem["affordable"] = {"steps": error.steps, "noise_multiplier": error.noise_multiplier}
    return problem


def of_validation_errors(errors: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the error answer (problem document) to a request that does not match its model."""
    faults: list[dict[str, str]] = []
    for error in errors:
        location = [str(part) for part in error["loc"] if part != "body"]
        pointer = "".join(f"/{escape_pointer(part)}" for part in location)
        cause = (error.get("ctx") or {}).get("error")
        if isinstance(cause, MechanismError):
            faults += [
                {"pointer": pointer + inner, "message": message} for inner, message in cause.faults
            ]
        else:
            faults.append({"pointer": pointer, "message": _describe_validation_error(error)})
    shown = faults[:50]
    first = shown[0] if shown else {"pointer": "", "message": "cannot be read"}
    detail = f"{first['pointer'] or 'the body'} {first['message']}"
    return document(422, INVALID_REQUEST, "The request is malformed", detail, shown)


def of_error(error: Exception) -> dict[str, Any]:
    """Return the error answer (problem document) for any exception."""
    match error:
        case RefusedError():
            return error.problem
        case CodedError():
            return of_accounting_error(error)
        case ValidationError():
            return of_validation_errors([dict(each) for each in error.errors()])
        case HTTPException():
            code, title = _STATUS_CODES.get(error.status_code, ("http-error", "The request failed"))
            detail = _describe_http_error(error) or str(error.detail)
            return document(error.status_code, code, title, detail)
        case _:
            detail = "unexpected failure; nothing was computed or charged. Please report it"
            return document(500, INTERNAL_ERROR, "The service failed", detail)


def _describe_http_error(error: HTTPException) -> str | None:
    """Return what to do about an address or a method that does not exist; None for other errors."""
    allowed = (error.headers or {}).get("Allow")
    if error.status_code == 405 and allowed:
        return f"this address does not take this method; it takes {allowed}"
    if error.status_code == 404 and error.detail == HTTPStatus(404).phrase:
        return "there is nothing at this address; /docs lists the API's, which begin with /v1/"
    return None


def _describe_validation_error(error: Mapping[str, Any]) -> str:
    """Describe what a valid value would be, in plainer words than pydantic's message."""
    match error["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is not a field of this request"
        case "model_attributes_type" | "dict_type" | "model_type":
            return "must be a JSON object, sent with Content-Type: application/json"
        case "string_pattern_mismatch" if error["ctx"]["pattern"] == _NAME_PATTERN:
            return (
                "must begin with a letter or digit, and have only letters, digits, dots, dashes "
                "and underscores"
            )
        case "string_pattern_mismatch" if tuple(error["loc"]) == ("query", "cursor"):
            return "must be the next_cursor of the page before; leave it out for the first page"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            ((limit, value),) = error["ctx"].items()
            return f"must be {_SIGNS[limit]} {number_format.round_nearest(value, 12)}"
        case _:
            message = re.sub("^(Input|String|List) should ", "must ", str(error["msg"]))
            return message.replace("Value error, ", "")
