"""Keyword arguments of the package's functions, checked by the models of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from accountant_service.errors import InvalidArgumentError
from accountant_service.time_limit import limit_cpu_seconds

if TYPE_CHECKING:
    from pydantic import BaseModel

RUN: Final = (  # the arguments that describe a run
    "noise_multiplier",
    "sample_rate",
    "steps",
    "dataset_size",
    "batch_size",
    "epochs",
    "sampling",
)
Model = TypeVar("Model", bound="BaseModel")


def answer(path: str, arguments: Mapping[str, Any]) -> Any:
    """Return the answer to the question of an endpoint, within the argument `time_limit`.

    Raises:
        InvalidArgumentError: an argument is missing or out of range.
        AccountingError: the question has no answer, or takes more time.
    """
    from accountant_service.api.questions import ENDPOINTS

    given = dict(arguments)
    with limit_cpu_seconds(given.pop("time_limit")):
        endpoint = ENDPOINTS[path]
        return endpoint.compute(_read_mechanism_request(endpoint.request, given))


def _read_mechanism_request(model: type[Model], arguments: Mapping[str, Any]) -> Model:
    """Validate keyword arguments that describe a run or a mechanism; return the request.

    Raises:
        InvalidArgumentError: an argument is missing or out of range.
    """
    given = _without_none(arguments)
    run = {name: given.pop(name) for name in RUN if name in given}
    if "mechanism" not in given:
        given["mechanism"] = {"kind": "dp_sgd"} | run
        return read_arguments(model, given, inside_mechanism=True)
    if run:
        raise InvalidArgumentError((next(iter(run)), "must be left out if mechanism is given"))
    return read_arguments(model, given)


def read_arguments(
    model: type[Model], arguments: Mapping[str, Any], *, inside_mechanism: bool = False
) -> Model:
    """Validate keyword arguments by a request model; return the request.

    Args:
        model: the request's model.
        arguments: by name; None counts as missing.
        inside_mechanism: True if arguments that describe a run became the field `mechanism`; errors
            then name the arguments.

    Raises:
        InvalidArgumentError: an argument is missing or out of range.
    """
    from pydantic import ValidationError

    from accountant_service.api import problems

    try:
        return model.model_validate(_without_none(arguments))
    except ValidationError as error:
        faults = problems.of_error(error)["errors"]
    prefix = "/mechanism" if inside_mechanism else ""
    raise InvalidArgumentError(
        *((fault["pointer"].removeprefix(prefix).strip("/"), fault["message"]) for fault in faults)
    )


def _without_none(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drop arguments that are None; convert NumPy scalars to Python numbers, tuples to lists."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return {
        name: list(value)
        if isinstance(value, tuple)
        else (value.item() if hasattr(value, "item") else value)
        for name, value in given.items()
    }
