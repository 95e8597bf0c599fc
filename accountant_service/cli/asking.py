"""Commands that ask a question of the API without HTTP: their options, and the answer.

The options are the arguments of the package's function that asks the same, with its texts as help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any, Final

import typer

from accountant_service.cli import help_of
from accountant_service.cli.mechanism_options import (
    REQUIRED,
    RUN_FLAGS,
    describe_arguments,
    parse_count,
    parse_number,
)
from accountant_service.cli.names import FORMATS, METHODS
from accountant_service.cli.problems import run_or_exit, validate

Json = dict[str, Any]
Option = tuple[Any, Any]  # its type, and its default, which holds flags and help text
_FLAGS: Final = RUN_FLAGS | {"epsilon": ("--epsilon", "-E"), "delta": ("--delta", "-d")}
_NAMES: Final = {"method": METHODS, "format": FORMATS}
AS_JSON: Final[Option] = (
    bool,
    typer.Option(False, "--json", help="Print the API's JSON answer, or its problem."),
)


def make_option(type_: Any, text: str, *flags: str, **settings: Any) -> Option:
    """Return an option that may be left out."""
    return type_, typer.Option(None, *flags, help=text, **settings)


def list_options(
    function: Callable[..., Any],
    instead: Mapping[str, Mapping[str, Option]],
    panels: Mapping[str, str],
) -> dict[str, Option]:
    """Return the options that are the arguments of a function of the package, by name.

    Args:
        function: the function.
        instead: the options for an argument that is neither number nor text, by its name.
        panels: the panel in the help for some options, by name.
    """
    texts = describe_arguments(function)
    found: dict[str, Option] = {}
    for name, parameter in signature(function).parameters.items():
        text = texts[name]
        if name in _NAMES:
            text += f" One of: {', '.join(_NAMES[name])}."
        if parameter.default is Parameter.empty:
            text += REQUIRED
        settings: Json = {"rich_help_panel": panels.get(name)}
        match str(parameter.annotation).removesuffix(" | None"):
            case "float":
                settings |= {"parser": parse_number, "metavar": "NUMBER"}
            case "int":
                settings |= {"parser": parse_count, "metavar": "INTEGER"}
            case "str":
                settings |= {"metavar": "NAME"}
            case _:
                found |= instead.get(name, {})
                continue
        type_ = Any if "parser" in settings else str | None
        found[name] = make_option(type_, text, *_FLAGS.get(name, ()), **settings)
    return found


def make_command(
    name: str, run: Callable[..., None], options: Mapping[str, Option], example: str, more: str = ""
) -> typer.Typer:
    """Return a command that calls a function with the values of its options.

    Args:
        name: the command's name.
        run: the function.
        options: the options by name, in the order of the help.
        example: arguments of the example in the help.
        more: what the help says after its first line.
    """
    run.__annotations__ = {each: type_ for each, (type_, _) in options.items()}
    run.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(each, Parameter.KEYWORD_ONLY, default=default, annotation=type_)
            for each, (type_, default) in options.items()
        ]
    )
    app = typer.Typer(add_completion=False)
    epilog = f"Example: accountant {name} {example}"
    app.command(name, help=help_of(name) + more, epilog=epilog)(run)
    return app


def answer_or_exit(
    path: str,
    options: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    as_json: bool,
    time_limit: float | None = None,
) -> Json:
    """Compute an endpoint's answer without HTTP; on an error, print it and exit with code 2.

    Args:
        path: the path of the endpoint.
        options: the fields of the request; None counts as missing.
        names: the name of a field on the command line, where it is not its own with dashes.
        as_json: whether to print the problem document as JSON.
        time_limit: most CPU seconds of the computation; None for any.
    """
    from accountant_service.questions.registry import ENDPOINTS

    endpoint = ENDPOINTS[path]
    given = {name: value for name, value in options.items() if value is not None}
    shown = {f"/{name}": "--" + name.replace("_", "-") for name in options} | dict(names)

    def answer() -> Json:
        """Validate the request, and compute its answer, as JSON."""
        return endpoint.answer(validate(endpoint.request, given)).model_dump(mode="json")

    shown["/time_limit"] = "--time-limit"
    return run_or_exit(answer, shown, as_json=as_json, time_limit=time_limit)
