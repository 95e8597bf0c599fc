"""Usage errors that Typer finds, in plain words and with what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import typer

from command_words.names import COMMANDS, find_field, find_otherwise, find_value, is_named
from command_words.numbers import advise_on_text

Json = dict[str, Any]
UsageError: Any = typer.BadParameter.__base__  # the base of every fault in how a program is called
FAULTY_COMMAND: Final = "The command cannot be run as it is"
_NO_COMMAND: Final = re.compile(r"No such command '(.*?)'.*", re.DOTALL)
_NOT_A_CHOICE: Final = re.compile(r"('.*?') is not one of (.*?)\.?", re.DOTALL)
_WHOLE: Final = re.compile(r"\d+(?:\.0*)?(?:[eE]\d{1,2})?", re.ASCII)
_EXPECTED: Final = re.compile(r"Input should be (.*?)(?:, (?:unable|got a number).*)?", re.DOTALL)


def describe_usage_error(error: Any, given: Sequence[str] = ()) -> Json:
    """Return what is wrong with a call of a program, as `message` and perhaps the `option`.

    Args:
        error: a usage error of Typer's.
        given: the words of the call, among which the refused value is.
    """
    fault = _describe(error, given)
    if "option" not in fault and error.ctx is not None:
        called = f"{error.ctx.command_path} {error.ctx.help_option_names[0]}"
        ended = fault["message"].removesuffix(".")
        fault["message"] = f"{ended}{'' if ended.endswith('?') else '.'} Try: {called}"
    return fault


def _say_given(error: Any, given: Sequence[str]) -> str:
    """Return the end of a message that says which value was given, and how it is written."""
    options = () if error.param is None else error.param.opts
    for at, word in enumerate(given):
        name, sign, value = word.partition("=")
        if name in options and (sign or at + 1 < len(given)):
            text = value if sign else given[at + 1]
            advice = advise_on_text(text)
            if advice is None and _WHOLE.fullmatch(text) and not text.isdecimal():
                advice = f"write {float(text):.0f}"
            return f", not {text!r}" + (f": {advice}" if advice else "")
    return ""


def _describe(error: Any, given: Sequence[str]) -> Json:
    """Return what is wrong, and the option or argument if the error has one."""
    if type(error).__name__ == "NoSuchOption":
        return {"message": f"No such option: {error.option_name}{_suggest_option(error)}"}
    if not isinstance(error, typer.BadParameter):
        return {"message": _describe_command(error) or error.format_message()}
    named = _name_parameter(error)
    message = error.message.removeprefix("Value error, ")
    if found := _EXPECTED.fullmatch(message):
        expected = found[1].replace("a valid i", "an i").replace("valid ", "")
        return {"message": f"must be {expected}{_say_given(error, given)}"} | named
    if type(error).__name__ == "MissingParameter":
        choices = " ".join(error.format_message().partition("Choose from:")[2].split())
        message = f"is required: one of {choices}" if choices else "is required"
    elif found := _NOT_A_CHOICE.fullmatch(message):
        known = found[2].replace(chr(39), "")
        meant = find_value(found[1].strip("'"), known.split(", "))
        several = found[1].strip("'").split(",")
        if len(several) > 1 and {each.strip() for each in several} <= set(known.split(", ")):
            repeated = " ".join(f"{named['option']} {each.strip()}" for each in several)
            return {"message": f"is repeated for several: {repeated}"} | named
        advice = f": did you mean {meant}?" if meant else ""
        message = f"must be one of {known}, not {found[1]}{advice}"
    return {"message": message} | named


def _describe_command(error: Any) -> str | None:
    """Return what to do in place of a command that does not exist; None if that is not known."""
    found = _NO_COMMAND.fullmatch(error.format_message())
    if found is None or error.ctx is None:
        return None
    groups = error.ctx.command_path.split()[1:]
    advice = COMMANDS.get(" ".join([*groups, found[1]]))
    return advice and f"No such command '{found[1]}'. {advice}"


def _suggest_option(error: Any) -> str:
    """Return a sentence about the option that was probably meant; empty if none was."""
    parameters = [] if error.ctx is None else error.ctx.command.params
    if error.ctx is not None and is_named(error.option_name, error.ctx.info_name.replace("-", "_")):
        return ": this command computes it"
    if error.ctx is not None:
        advice = find_otherwise(error.ctx.command_path.split()[0], error.option_name)
        if advice is not None:
            return f": {advice}"
    known = [each for one in parameters for each in one.opts if each.startswith("--")]
    meant = find_field(error.option_name, known)
    is_letter = len(error.option_name) == 2
    letters = [one.opts[-1] for one in parameters if is_letter and meant in one.opts]
    return f". Did you mean {', '.join(dict.fromkeys([*letters, meant]))}?" if meant else ""


def _name_parameter(error: Any) -> Json:
    """Return the option or argument that an error is about, if there is one."""
    if error.param_hint is not None:
        return {"option": error.param_hint}
    if error.param is None:
        return {}
    if error.param.param_type_name == "argument":
        return {"option": (error.param.metavar or error.param.name).upper()}
    return {"option": max(error.param.opts, key=len)}
