"""Refused requests in the words of the command line: options in place of JSON pointers."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import typer

from accountant_service.cli.printing import print_problem
from accountant_service.computing.time_limit import limit_cpu_seconds
from accountant_service.errors import CodedError, InvalidArgumentError
from accountant_service.writing import number_format
from command_words.names import find_value
from command_words.numbers import advise_on_rate, advise_on_text
from command_words.usage_errors import FAULTY_COMMAND, describe_usage_error

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

Json = dict[str, Any]
Result = TypeVar("Result")
Body = TypeVar("Body", bound="BaseModel")
_EXIT_CODE: Final = 2
_MALFORMED: Final = "The request is malformed"  # in the API's JSON
_SHARES: Final = frozenset(  # of 1; people write them in percent
    {"advantage", "attack_success", "prior", "true_positive_rate", "false_positive_rate", "share"}
)
_ELSEWHERE: Final = {  # what lists the names, by the beginning of a message that one is unknown
    "there is no dataset": "`accountant dataset list` names all",
    "there is no series": "`accountant series list` names all",
    "there is no reservation": "`accountant run list DATASET` names all",
}
# values with which a request is checked again, to find faults behind those of other fields
_SUBSTITUTES: Final = {"noise_multiplier": 1.0, "delta": 1e-5, "epsilon": 1.0}


class CommandProblemError(Exception):
    """A command's request was refused; the exception holds the API's error answer.

    Attributes:
        document: the problem.
    """

    def __init__(self, document: Json) -> None:
        self.document = document
        super().__init__(document["detail"])


def build_problem(detail: str, pointer: str = "", code: str = "invalid-request") -> Json:
    """Build the error answer for a fault that the command line found in the field `pointer`."""
    from accountant_service.questions import problems

    errors = [{"pointer": pointer, "message": detail}] if pointer else []
    return problems.document(422, code, _MALFORMED, detail, errors)


def validate(model: type[Body], given: Json) -> Body:
    """Validate a request body; raise an error that lists every fault found.

    Raises:
        CommandProblemError: with every fault that can be found at once.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise CommandProblemError(_collect_faults(model, given, error)) from None


def _collect_faults(model: type[BaseModel], given: Json, error: ValidationError) -> Json:
    """Return all faults of a request, including those that show only when others are corrected."""
    from pydantic import ValidationError

    from accountant_service.questions import problems

    found = problems.of_error(error)
    faults = [_say_given(fault, given) for fault in found.get("errors", [])]
    substituted = _substitute(given, [fault["pointer"] for fault in faults])
    if substituted != given:
        try:
            model.model_validate(substituted)
        except ValidationError as second:
            others = problems.of_error(second).get("errors", [])
            known = {fault["pointer"] for fault in faults}
            faults += [_say_given(each, given) for each in others if each["pointer"] not in known]
    return found | {"errors": faults}


def _substitute(given: Json, pointers: Sequence[str]) -> Json:
    """Replace the values at JSON pointers by valid ones, where a valid one is known."""
    found = copy.deepcopy(given)
    for pointer in pointers:
        *parents, name = pointer.split("/")[1:] or [""]
        holder: Any = found
        for parent in parents:
            holder = holder.get(parent) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and name in _SUBSTITUTES:
            holder[name] = _SUBSTITUTES[name]
    return found


def _say_given(fault: Mapping[str, str], given: Json) -> dict[str, str]:
    """Add the given value to a fault's message, if the value is short."""
    fault = _add_advice(fault, given)
    value = _find_value(fault["pointer"], given)
    said = fault["message"]
    is_shown = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not is_shown or said.startswith("is ") or ", not " in said:
        return dict(fault)
    return {**fault, "message": f"{said}{_format_given(value)}"}


def _format_given(value: Any) -> str:
    """Return the end of a message that says which value was given; empty for a long one."""
    is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    text = number_format.round_nearest(value, 12) if is_number else repr(value)
    return f", not {text}" if len(text) <= 60 else ""


def _add_advice(fault: Mapping[str, str], given: Json) -> Mapping[str, str]:
    """Add to a fault's message what was probably meant."""
    if (fault["pointer"], fault["message"]) == ("/epsilon", "is required") and "epochs" in given:
        return {**fault, "message": "is required: -e is --epochs; for ε, write -E"}
    value = _find_value(fault["pointer"], given)
    meant = _guess_meaning(fault["pointer"].rpartition("/")[2], value, fault["message"])
    if meant is None:
        return fault
    said = (
        fault["message"]
        if ", not " in fault["message"]
        else (fault["message"] + _format_given(value))
    )
    return {**fault, "message": f"{said}: {meant}"}


def _guess_meaning(name: str, value: Any, message: str) -> str | None:
    """Return what a refused value was probably meant to be; None if that cannot be guessed."""
    if name == "sample_rate" and isinstance(value, int | float) and value > 1:
        return advise_on_rate(value, "--batch-size and --dataset-size")
    if not isinstance(value, str):
        return advise_on_number(name, value)
    if advice := advise_on_text(value):
        return advice
    if message.startswith(("must be one of", "must be '")):
        known = re.findall(r"[a-z]\w*", message.partition(", not ")[0].partition("must be")[2])
        meant = find_value(value, set(known) - {"one", "of", "or"})
        return f"did you mean {meant}?" if meant else None
    return None


def advise_on_number(name: str, value: Any) -> str | None:
    """Return what a refused number was probably meant to be; None if that cannot be guessed."""
    if not isinstance(value, int | float) or not 1 < value < math.inf:
        return None
    if name in _SHARES and value <= 100:
        return f"write {number_format.round_nearest(value / 100)} for {value:g} %"
    power = math.log10(value)
    return f"did you mean 1e-{power:.0f}?" if name == "delta" and power in range(3, 16) else None


def _find_value(pointer: str, given: Json) -> Any:
    """Return the value at a JSON pointer; None if there is none."""
    value: Any = given
    for part in pointer.split("/")[1:]:
        if isinstance(value, list):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def run_or_exit(
    action: Callable[[], Result],
    options: Mapping[str, str],
    *,
    as_json: bool,
    time_limit: float | None = None,
) -> Result:
    """Return a call's result; if it is refused, print why and exit with code 2.

    Args:
        action: it may raise `CommandProblemError` or any error with a code.
        options: the option or argument that sets the value at each JSON pointer.
        as_json: whether to print the problem document as JSON.
        time_limit: most CPU seconds of the call, the value of --time-limit; None for any.
    """
    from accountant_service.questions import problems

    try:
        with limit_cpu_seconds(time_limit):
            return action()
    except InvalidArgumentError as error:
        name, message = error.faults[0]
        exit_with(build_problem(message, f"/{name}"), options, as_json=as_json)
    except CommandProblemError as error:
        exit_with(error.document, options, as_json=as_json)
    except CodedError as error:
        exit_with(problems.of_error(error), options, as_json=as_json)


def exit_with(problem: Json, options: Mapping[str, str], *, as_json: bool) -> NoReturn:
    """Print an error answer with option names in place of field names; exit with code 2."""
    shown = translate(problem, options)
    for beginning, way in _ELSEWHERE.items():
        if not as_json and shown["detail"].startswith(beginning):
            shown |= {"detail": f"{shown['detail']}: {way}"}
    if not as_json and shown["title"] == _MALFORMED:
        shown |= {"title": FAULTY_COMMAND}
    print_problem(shown, as_json)
    raise typer.Exit(_EXIT_CODE)


def exit_with_faults(faults: Sequence[Json], *, as_json: bool = False) -> NoReturn:
    """Print what is wrong with a call of a command; exit with code 2.

    Without `as_json` nothing of the API is imported, which takes a second.

    Args:
        faults: what is wrong, each with `message` and perhaps the `option`.
        as_json: whether to print the API's problem document as JSON.
    """
    if as_json:
        first = faults[0]
        detail = f"{first.get('option', '')} {first['message']}".lstrip()
        problem = build_problem(detail) | {"errors": [{"pointer": ""} | each for each in faults]}
    else:
        problem = {"title": FAULTY_COMMAND, "code": "invalid-request", "errors": faults}
    print_problem(problem, as_json)
    raise typer.Exit(_EXIT_CODE)


def exit_with_usage_error(error: Any, *, as_json: bool) -> NoReturn:
    """Print a usage error that Typer found, such as an unknown option; exit with code 2.

    Args:
        error: a usage error of Typer's.
        as_json: whether to print the API's problem document as JSON.
    """
    exit_with_faults([describe_usage_error(error)], as_json=as_json)


def translate(problem: Json, options: Mapping[str, str]) -> Json:
    """Replace field names by option names in an error answer.

    Args:
        problem: the API's problem document.
        options: the option or argument that sets the value at each JSON pointer.
    """
    from accountant_service.questions import problems

    if problem["code"] != problems.INVALID_REQUEST:
        rename = _make_long_field_replacer(options)
    else:
        rename = _make_field_replacer(options)
    faults: list[Json] = []
    for fault in problem.get("errors", []):
        option = _find_option(fault["pointer"], options)
        named = {} if option is None else {"option": option}
        is_of_argument = bool(option) and not str(option).startswith("--")
        # the message about an argument's content, such as a document, names the content's fields;
        # "" stands for the run of the command's own options
        message = fault["message"] if is_of_argument else rename(fault["message"])
        faults.append({**fault, "message": message, **named})
    detail = rename(problem["detail"])
    if faults:
        first = faults[0]
        detail = f"{first.get('option', first['pointer'])} {first['message']}".strip()
    return problem | {"detail": detail} | ({"errors": faults} if faults else {})


def _find_option(pointer: str, options: Mapping[str, str]) -> str | None:
    """Return the option that sets the value at a JSON pointer, or at the nearest parent."""
    if pointer in options:
        return options[pointer]
    parent = pointer
    while parent:
        parent = parent.rpartition("/")[0]
        if options.get(parent):
            return f"{options[parent]} at {pointer.removeprefix(parent)}"
    return None


_DATASET_WORDS: Final = {  # of commands that take the number of records from the ledger
    "dataset_size and batch_size": "batch_size",
    "epochs beside dataset_size": "epochs beside batch_size",
    "at most dataset_size": "at most the number of records",
}


def _names(options: Mapping[str, str]) -> dict[str, str]:
    """Map each API field's name to the command-line option that sets it."""
    return {
        pointer.rpartition("/")[2]: option.split()[0]  # "--steps of --and" without its end
        for pointer, option in options.items()
        if option.startswith("--") and pointer.rpartition("/")[2].isidentifier()
    }


def _make_field_replacer(options: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces every API field name in a message by its option's name."""
    names = _names(options)
    replace = _make_replacer(names)
    if "dataset_size" in names:
        return replace

    def replace_without_size(message: str) -> str:
        """Replace field names for a command that has no option for the dataset's size."""
        for words, others in _DATASET_WORDS.items():
            message = message.replace(words, others)
        return replace(message)

    return replace_without_size


def _make_long_field_replacer(options: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces only the API field names that contain an underscore."""
    return _make_replacer({name: option for name, option in _names(options).items() if "_" in name})


def _make_replacer(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces the keys of `names` in a message by their values."""
    if not names:
        return lambda message: message
    words = "|".join(sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"(?<![-'\"\w])(?<!\d )(?<!whole )({words})(?![-\w])")
    return lambda message: pattern.sub(lambda found: names[found[1]], message)
