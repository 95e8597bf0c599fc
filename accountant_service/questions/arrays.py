"""Arrays of numbers as arguments: a function answers for each element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from accountant_service.errors import AccountingError, InvalidArgumentError
from accountant_service.writing.presentation import Answers
from command_words.names import find_field, is_named

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def for_each_element(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let numbers of a function be arrays; it then returns `Answers`, one for each element.

    Type checkers know the function of single numbers.
    """
    parameters = signature(function).parameters.values()
    numbers = {
        each.name
        for each in parameters
        if each.annotation.startswith(("float", "int")) and each.name != "time_limit"
    }

    @wraps(function)
    def answer(*args: Parameters.args, **arguments: Parameters.kwargs) -> Any:
        """Call the function once, or once for each element of the arrays."""
        given = _bind(function, args, arguments)
        arrays = {name: _read_array(given[name]) for name in given if name in numbers}
        found = {name: values for name, values in arrays.items() if values is not None}
        if not found:
            return function(*args, **arguments)
        return Answers(_answer_each(function, given, found), found)

    return answer


def _bind(
    function: Callable[..., Any], args: tuple[Any, ...], arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments of a call by their names.

    Raises:
        TypeError: the function takes no such arguments; the message says what was probably meant.
    """
    name = getattr(function, "__name__", "")
    known = signature(function)
    try:
        return known.bind(*args, **arguments).arguments
    except TypeError as error:
        unknown = next((each for each in arguments if each not in known.parameters), None)
        if unknown is None:
            first, *others = known.parameters
            advice = f"only {first} may come without its name; the others are {', '.join(others)}"
        elif is_named(unknown, name):
            advice = f"it computes {name}"
        else:
            meant = find_field(unknown, list(known.parameters))
            advice = f"did you mean {meant}?" if meant else f"it has {', '.join(known.parameters)}"
        raise TypeError(f"{name}() {error}: {advice}") from None


def _read_array(value: Any) -> list[Any] | None:
    """Return the elements of an array of numbers; None for a single number."""
    if hasattr(value, "tolist"):  # of NumPy or pandas; a single number of NumPy becomes a number
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple | range) else None


def _answer_each(
    function: Callable[..., Result], given: Mapping[str, Any], arrays: Mapping[str, list[Any]]
) -> list[Result]:
    """Return a function's answers for the elements of equally long arrays.

    Raises:
        InvalidArgumentError: the arrays differ in length; or an element is out of range.
        AccountingError: for an element that a note names.
    """
    (first, count), *others = ((name, len(values)) for name, values in arrays.items())
    for name, other in others:
        if other != count:
            message = f"has {other} values, and {first} has {count}: give equally many"
            raise InvalidArgumentError((name, message))
    answers = []
    for at in range(count):
        element = {name: values[at] for name, values in arrays.items()}
        try:
            answers.append(function(**{**given, **element}))
        except (AccountingError, InvalidArgumentError) as error:
            error.add_note("for " + ", ".join(f"{name} = {element[name]}" for name in element))
            raise
    return answers
