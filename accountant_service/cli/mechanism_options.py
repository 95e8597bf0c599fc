"""Options that describe runs or any mechanism: numbers, `--and` with a run, `-m` with JSON."""

from __future__ import annotations

import getopt
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from accountant_service.cli.problems import CommandProblemError, build_problem
from accountant_service.questions import functions
from accountant_service.writing.canonical_json import read_json, require_unambiguous
from accountant_service.writing.number_format import is_exact, round_fraction

Json = dict[str, Any]
_PERCENTAGE: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) ?%", re.ASCII)
_FRACTION: Final = re.compile(r"(\d{1,20}) ?/ ?(\d{1,20})", re.ASCII)
_DESCRIBED: Final = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)
MECHANISM_HELP: Final = (
    "A mechanism as JSON, @FILE, or @- for standard input; a certificate counts as its mechanism. "
    'Repeatable. Example: \'{"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, '
    '"steps": 1000}\'; all kinds are at /docs of the service.'
)


def parse_number(text: str) -> Any:
    """Parse a number, also a percentage or a fraction such as 1% or 256/60000.

    A minus sign as papers print it counts as the hyphen.

    Other text is returned unchanged, for the request model to refuse: so all faults of a command
    are reported together, and as the API reports them.
    """
    plain = str(text).replace("\N{MINUS SIGN}", "-")  # an option's default is a number
    try:
        return int(plain)
    except ValueError:
        pass
    try:
        return float(plain) if is_exact(plain) else text
    except (ValueError, ArithmeticError):
        share = _read_share(text)
    if share is None:
        return text
    return int(share) if share.denominator == 1 and "%" not in text else float(share)


def parse_cost(text: str) -> Any:
    """Parse a number that is charged: what `parse_number` returns, fractions rounded up."""
    share = _read_share(str(text))
    return parse_number(text) if share is None else round_fraction(share, up=True)


def parse_noise(text: str) -> Any:
    """Parse an amount of noise: what `parse_number` returns, fractions rounded down."""
    share = _read_share(str(text))
    return parse_number(text) if share is None else round_fraction(share, up=False)


def _read_share(text: str) -> Fraction | None:
    """Return the number that a percentage or a fraction stands for; None for other text."""
    percentage, fraction = _PERCENTAGE.fullmatch(text), _FRACTION.fullmatch(text)
    if percentage:
        return Fraction(percentage[1]) / 100
    if fraction and int(fraction[2]):
        return Fraction(int(fraction[1]), int(fraction[2]))
    return None


def parse_count(text: str) -> Any:
    """Parse a whole number, also in the form 1e6; else return what `parse_number` returns."""
    value = parse_number(text)
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


RUN_FLAGS: Final[dict[str, tuple[str, ...]]] = {  # the options that give the fields of a run
    "noise_multiplier": ("--noise-multiplier", "-s"),
    "sample_rate": ("--sample-rate", "-q"),
    "steps": ("--steps", "-t"),
    "dataset_size": ("--dataset-size", "-n"),
    "batch_size": ("--batch-size", "-b"),
    "epochs": ("--epochs", "-e"),
    "sampling": ("--sampling",),
}
_FIELDS: Final = {flag: name for name, flags in RUN_FLAGS.items() for flag in flags}
_PARSERS_BY_TYPE: Final[dict[str, Callable[[str], Any]]] = {
    "float": parse_number,
    "int": parse_count,
    "str": str,
}
_PARSERS: Final = {
    name: _PARSERS_BY_TYPE[parameter.annotation.removesuffix(" | None")]
    for name, parameter in signature(functions.epsilon).parameters.items()
    if name in RUN_FLAGS
}


def describe_arguments(function: Callable[..., Any]) -> dict[str, str]:
    """Return what the docstring of a function says of its arguments, in words of the command line.

    A sentence each, which names options.
    """
    found = {}
    for name, words in _DESCRIBED.findall(getdoc(function) or ""):
        text = " ".join(words.replace('"', "").split())
        text = re.sub("`([^`]*)`", lambda each: "--" + each[1].replace("_", "-"), text)
        is_symbol = not text[:1].isascii() or text[1:2] == ":"
        found[name] = text if is_symbol else text[:1].upper() + text[1:]
    return found


_TEXTS: Final = describe_arguments(functions.epsilon)
PANEL: Final = "The plan"


def _run_option(name: str, text: str | None = None) -> Any:
    """Return the option of a number that describes a run of a plan."""
    is_count = _PARSERS[name] is parse_count
    return typer.Option(
        *RUN_FLAGS[name],
        parser=_PARSERS[name],
        metavar="INTEGER" if is_count else "NUMBER",
        help=text or _TEXTS[name],
        rich_help_panel=PANEL,
    )


Steps = Annotated[Any, _run_option("steps")]
_RUN_OPTIONS: Final[dict[str, Any]] = {
    "noise_multiplier": Annotated[Any, _run_option("noise_multiplier")],
    "sample_rate": Annotated[Any, _run_option("sample_rate")],
    "batch_size": Annotated[
        Any, _run_option("batch_size", "Expected batch size, instead of --sample-rate.")
    ],
    "steps": Steps,
    "epochs": Annotated[Any, _run_option("epochs", "Instead of --steps, with --batch-size.")],
}
# in the help of an option without which the command is refused: it is checked with all other
# faults, not by Typer, which would name one at a time. The backslash is for Rich
REQUIRED: Final = r" \[required]"
Mechanisms = Annotated[
    list[str] | None,
    typer.Option("--mechanism", "-m", metavar="JSON", help=MECHANISM_HELP, rich_help_panel=PANEL),
]
_EXAMPLE: Final = 'Give an object such as {"kind": "gaussian", "noise_multiplier": 2}'
OTHER_RUNS_POINTER: Final = "/other_runs"  # of a fault in `--and` itself
OTHER_RUNS_HELP: Final = (
    'Another run on the same data, by its options: --and "-b 256 -e 5 -s 1.5". Repeatable. '
    "Without --dataset-size it has that of the first run."
)


def read_run(text: str, dataset_size: Any = None) -> Json:
    """Read a run that is given by its options, as in "-b 256 -e 5 -s 1.5".

    Args:
        text: the options.
        dataset_size: the number of records, if the run has a batch size and names no other.

    Raises:
        CommandProblemError: the text is not options of a run.
    """
    short = "".join(f"{flag[1:]}:" for flag in _FIELDS if len(flag) == 2)
    long = [f"{flag[2:]}=" for flag in _FIELDS if len(flag) > 2]
    try:
        words = shlex.split(text)
        for word in words:  # getopt would take the beginning of a name for the name
            if word.startswith("--") and word.partition("=")[0] not in _FIELDS:
                raise ValueError(f"there is no option {word}")
        found, rest = getopt.gnu_getopt(words, short, long)
    except (getopt.GetoptError, ValueError) as error:
        raise _refuse_run(text, str(error)) from None
    if rest or not found:
        raise _refuse_run(text, f"{rest[0]!r} belongs to no option" if rest else "it has no option")
    run: Json = {}
    for flag, value in found:
        name = _FIELDS[flag]
        if name in run:
            raise _refuse_run(text, f"{RUN_FLAGS[name][0]} is given twice")
        run[name] = _PARSERS[name](value)
    if dataset_size is not None and "batch_size" in run:
        run.setdefault("dataset_size", dataset_size)
    return {"kind": "dp_sgd", **run}


def _refuse_run(text: str, reason: str) -> CommandProblemError:
    """Return the error of a run that is not given by options."""
    flags = ", ".join("/".join(reversed(each)) for each in RUN_FLAGS.values())
    message = f"must be the options of a run ({flags}), not {text!r}: {reason}"
    return CommandProblemError(build_problem(message, OTHER_RUNS_POINTER))


def read_mechanisms(texts: Sequence[str]) -> list[Json]:
    """Read the mechanisms given by repeated `-m` options: JSON, @FILE or standard input.

    Raises:
        CommandProblemError: a text is not JSON, or a file cannot be read.
    """
    return [found for text in texts for found in _read_mechanisms(text)]


def _read_mechanisms(text: str) -> Iterator[Json]:
    """Yield the mechanisms in one `-m` option: an object, a list, or one object per line."""
    content = _read_content(text)
    try:
        documents = _parse(content)
    except (ValueError, RecursionError) as error:
        shown = content if len(content) <= 60 else f"{content[:57]}…"
        raise _refuse(f"is not JSON: {error}: {shown!r}. {_advise_on_text(content)}") from None
    if not documents:
        raise _refuse("is empty: give at least one mechanism")
    for document in documents:
        if not isinstance(document, dict):
            raise _refuse(f"must be an object, not {json.dumps(document)[:60]}. {_EXAMPLE}")
        is_certificate = "kind" not in document and "mechanism" in document
        yield document["mechanism"] if is_certificate else document


def _advise_on_text(text: str) -> str:
    """Return what a text that is not JSON was probably meant to be: a file, a kind, an object."""
    if len(text) < 256 and "\0" not in text and Path(text).is_file():
        return f"For the file write @{text}"
    if re.fullmatch(r"[a-z_]{3,40}", text):
        return f'For a kind write \'{{"kind": "{text}", …}}\' with its fields'
    return f"{_EXAMPLE}, or @FILE"


def _parse(content: str) -> list[Any]:
    """Parse a text as a JSON value, a list of values, or one value per line."""
    try:
        found = _read_strictly(content)
    except ValueError:
        lines = [line for line in content.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [_read_strictly(line) for line in lines]
    return found if isinstance(found, list) else [found]


def _read_strictly(text: str) -> Any:
    found = read_json(text)
    require_unambiguous(text)
    return found


def _read_content(text: str) -> str:
    """Return the text of an `-m` option: itself, the content of @FILE, or of standard input."""
    if not text.startswith("@"):
        return text
    name = text[1:]
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise _refuse(f"cannot read the file {name!r}: {reason}") from None


def _refuse(message: str) -> CommandProblemError:
    """Return the error of an `-m` option that cannot be read."""
    return CommandProblemError(build_problem(message, "/mechanism"))


def join_mechanisms(mechanisms: Sequence[Json]) -> Json:
    """Return the composition of several mechanisms; a single one unchanged."""
    if len(mechanisms) == 1:
        return mechanisms[0]
    return {"kind": "composed", "mechanisms": list(mechanisms)}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """A plan as the options of a command describe it: a run, the mechanisms of `-m`, or both.

    Attributes:
        run: the run's fields; None without their options.
        texts: of the options `-m`.
    """

    run: Json
    texts: Sequence[str]

    @property
    def has_run(self) -> bool:
        """True if an option describes a run."""
        return any(value is not None for value in self.run.values())

    def build(self, size: Callable[[], int]) -> Json:
        """Return the plan's mechanism.

        Args:
            size: returns the dataset's number of records, which a batch size needs.

        Raises:
            CommandProblemError: a mechanism cannot be read.
        """
        found = read_mechanisms(self.texts)
        fields = {name: value for name, value in self.run.items() if value is not None}
        if fields or not found:
            if "batch_size" in fields and "sample_rate" not in fields:
                fields["dataset_size"] = size()
            found.append({"kind": "dp_sgd", **fields})
        return join_mechanisms(found)

    def map_pointers(self) -> dict[str, str]:
        """Map each JSON pointer of the plan's request to the option that sets its value."""
        count = len(self.texts)
        if count and not self.has_run:
            return {"/mechanism": "--mechanism"}
        at = f"/mechanism/mechanisms/{count}" if count else "/mechanism"
        options = {f"{at}/{name}": "--" + name.replace("_", "-") for name in self.run}
        others = {f"/mechanism/mechanisms/{i}": "--mechanism" for i in range(count)}
        return options | others | {at: "", "/mechanism": "--mechanism" if count else ""}


def takes_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that describe a plan, in place of its argument `plan`."""

    @wraps(command)
    def run(**given: Any) -> None:
        """Call the command with the plan that its options describe."""
        fields = {name: given.pop(name) for name in _RUN_OPTIONS}
        command(plan=PlanOptions(fields, given.pop("mechanism") or ()), **given)

    kinds = get_type_hints(command, include_extras=True)
    parameters: list[Parameter] = []
    for each in signature(command).parameters.values():
        if each.name != "plan":
            kind = kinds[each.name]
            parameters.append(each.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in {**_RUN_OPTIONS, "mechanism": Mechanisms}.items()
        ]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def find_dataset_size(document: Any) -> int | None:
    """Return the first `dataset_size` inside a mechanism's JSON, or None."""
    if isinstance(document, dict):
        size = document.get("dataset_size")
        if isinstance(size, int):
            return size
        document = list(document.values())
    if isinstance(document, list):
        return next((size for part in document if (size := find_dataset_size(part))), None)
    return None
