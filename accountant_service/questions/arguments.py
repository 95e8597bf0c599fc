"""Keyword arguments of the package's functions, checked by the models of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from accountant_service.computing.time_limit import limit_cpu_seconds
from accountant_service.errors import InvalidArgumentError
from command_words.numbers import advise_on_rate, advise_on_text

if TYPE_CHECKING:
    from pydantic import BaseModel

_SHOWN_MAX: Final = 60  # characters of a value in a message


def answer(path: str, arguments: Mapping[str, Any]) -> Any:
    """Return the answer to the question of an endpoint, within the argument `time_limit`.

    Raises:
        InvalidArgumentError: an argument is missing or out of range.
        AccountingError: the question has no answer, or takes more time.
    """
    from accountant_service.questions.registry import ENDPOINTS

    given = dict(arguments)
    with limit_cpu_seconds(given.pop("time_limit")):
        endpoint = ENDPOINTS[path]
        return endpoint.compute(_read_arguments(endpoint.request, given))


def _read_arguments(model: type[BaseModel], arguments: Mapping[str, Any]) -> BaseModel:
    """Validate arguments by the model of a question; return the question.

    Arguments that the model lacks describe a run, which becomes its field `mechanism`; errors name
    the arguments.

    Raises:
        InvalidArgumentError: an argument is missing or out of range.
    """
    from pydantic import ValidationError

    from accountant_service.questions import problems

    given = _without_none(arguments)
    names = [name for name in arguments if name not in model.model_fields]
    run = {name: given.pop(name) for name in names if name in given}
    is_run = bool(names) and "mechanism" not in given
    if is_run:
        given["mechanism"] = {"kind": "dp_sgd"} | run
    elif run:
        raise InvalidArgumentError((next(iter(run)), "must be left out if mechanism is given"))
    try:
        return model.model_validate(given)
    except ValidationError as error:
        faults = problems.of_error(error)["errors"]
    prefix = "/mechanism" if is_run else ""
    raise InvalidArgumentError(
        *(
            _say_given(each["pointer"].removeprefix(prefix), each["message"], arguments)
            for each in faults
        )
    )


def _say_given(pointer: str, message: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return an argument's name, and what is wrong with its value and how to write it."""
    name = pointer.strip("/")
    value = arguments.get(name)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return name, message
    shown = repr(value)
    if ", not " not in message and not message.startswith("is ") and len(shown) <= _SHOWN_MAX:
        message += f", not {shown}"
    advice = advise_on_text(value) if isinstance(value, str) else None
    if name == "sample_rate" and not isinstance(value, str):
        advice = advise_on_rate(value, "batch_size and dataset_size")
    return name, f"{message}: {advice}" if advice else message


def _without_none(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drop arguments that are None; convert NumPy scalars to Python numbers, tuples to lists."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return {
        name: list(value)
        if isinstance(value, tuple)
        else (value.item() if hasattr(value, "item") else value)
        for name, value in given.items()
    }
