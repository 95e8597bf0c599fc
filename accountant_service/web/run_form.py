"""The part of a form that describes a run: DP-SGD, any kind of mechanism by its fields, or JSON.

The typed texts are kept as they are. A form may hold several runs: the names of the first run's
fields are those of the API, and those of further runs end in "-2", "-3" and so on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import from_json

from accountant_service.questions.models import RUN_FIELDS, StepsRequest
from accountant_service.web import kind_form
from accountant_service.web.choices import Choice, describe_choices
from accountant_service.web.number_fields import describe_fields
from accountant_service.writing.canonical_json import require_unambiguous
from accountant_service.writing.number_format import shorten_exponents

Json = dict[str, Any]

_SHOWN: Final = describe_fields(StepsRequest, required=RUN_FIELDS)
FIELDS: Final = {name: _SHOWN[name] for name in RUN_FIELDS if name in _SHOWN}
CHOICES: Final[Mapping[str, Choice]] = {
    "kind": Choice("Kind", {"dp_sgd": "DP-SGD run", "fields": "another kind", "json": "JSON"}),
    "batches": Choice("Batches", {"sizes": "by sizes", "rate": "by sample rate"}),
    "length": Choice("Length", {"epochs": "by epochs", "steps": "by steps"}),
    "sampling": describe_choices(StepsRequest)["sampling"],
}
MECHANISM: Final = "mechanism"  # the text field with a mechanism as JSON
_RELEASE: Final = f"{kind_form.ROOT}_kind"  # the chosen kind, if one is
RUNS_MAX: Final = 8
JSON_MAX: Final = 1000  # characters: the text is part of the URL
_NAMES: Final = (*FIELDS, *CHOICES, MECHANISM)
_NUMBERED: Final = re.compile(rf"(?:{'|'.join(_NAMES)}|{kind_form.ROOT}_\w+)-([2-9])")
_SIZES: Final = ("dataset_size", "batch_size")


def format_example(kind: str) -> str:
    """Return the example of a kind of mechanism as JSON text."""
    return shorten_exponents(json.dumps(kind_form.EXAMPLES[kind], ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class RunForm:
    """One run in a form: typed texts, their values, and errors found.

    Attributes:
        number: its place in the form, from 1.
        texts: the text of every field and choice, by name.
        values: the numbers of the fields in use, by name, and the mechanism read from JSON.
        problems: a sentence for each field that is wrong, by name.
        faults: a sentence for each parameter of the address that cannot be used, or that a choice
            has no option for.
        filled: the names of fields in use that the address lacks, if it has others.
        sent: the names of the address's parameters that describe this run.
    """

    number: int
    texts: Mapping[str, str]
    values: Mapping[str, Any]
    problems: Mapping[str, str]
    faults: tuple[str, ...] = ()
    filled: tuple[str, ...] = field(default=(), compare=False)
    sent: tuple[str, ...] = field(default=(), compare=False)

    @property
    def suffix(self) -> str:
        """The suffix of this run's field names, which tells several runs apart."""
        return "" if self.number == 1 else f"-{self.number}"

    @property
    def is_dp_sgd(self) -> bool:
        """Return whether the run is DP-SGD, not a mechanism of another kind or JSON."""
        return self.texts["kind"] == "dp_sgd"

    @property
    def release(self) -> kind_form.Texts | None:
        """The texts of the fields generated for a kind, as a tree; None before one is chosen."""
        return kind_form.read_texts(self.texts) if _RELEASE in self.texts else None

    @property
    def group(self) -> kind_form.KindGroup:
        """The fields generated for the run's kind of mechanism, as the page shows them."""
        return kind_form.describe(self.release) if self.release else kind_form.NO_KIND

    @property
    def generated_names(self) -> list[str]:
        """The names of the form fields that are generated for the run's kind of mechanism."""
        names = [name for name in self.texts if is_generated(name)] or [_RELEASE]
        return [name + self.suffix for name in names]

    @property
    def new_names(self) -> list[str]:
        """The names of the run's selection lists that change a mechanism's kind."""
        return [name + self.suffix for name in kind_form.list_new_names(self.group)]

    @property
    def batches(self) -> Json:
        """The run's batch parameters and sampling, as fields of the API's mechanism."""
        by_rate = self.texts["batches"] == "rate"
        names = ("sample_rate",) if by_rate else ("dataset_size", "batch_size")
        sampling = self.texts["sampling"]
        chosen = {} if sampling == "poisson" else {"sampling": sampling}
        return self.select_values(*names) | chosen

    @property
    def duration(self) -> Json:
        """The run's number of steps or epochs, as a field of the API's mechanism."""
        return self.select_values(self.texts["length"])

    @property
    def mechanism(self) -> Any:
        """The run as a mechanism of the API; it lacks the fields that cannot be read."""
        if self.texts["kind"] == "fields":
            return kind_form.read_values(self.release)[0] if self.release else None
        if not self.is_dp_sgd:
            return self.values.get(MECHANISM)
        noise = self.select_values("noise_multiplier")
        return {"kind": "dp_sgd"} | noise | self.batches | self.duration

    def select_values(self, *names: str) -> Json:
        """Return the values of the named fields, without fields that have no value."""
        return {name: self.values[name] for name in names if name in self.values}

    def place_problem(self, names: list[str], message: str) -> tuple[str, str]:
        """Return the field at which the page shows an error, and a sentence about it.

        Args:
            names: the path to the faulty value within the mechanism.
            message: continues the name of the value.
        """
        if self.texts["kind"] == "fields":
            return kind_form.place_problem(self.release or {}, names, message)
        if not self.is_dp_sgd:
            subject = "/" + "/".join(names) if names else "The mechanism"
            return MECHANISM, f"{subject} {message}."
        name = names[-1] if names else ""
        if name in FIELDS:
            return name, FIELDS[name].sentence(message)
        text = message.replace("_", " ")
        is_about_run = text.startswith("must")
        return "sampling", f"The run {text}." if is_about_run else f"{text[:1].upper()}{text[1:]}."


def read_run(query: Mapping[str, str], number: int = 1, source: int | None = None) -> RunForm:
    """Return a run of a form; missing fields have their initial text.

    Without a choice in the query, the fields that are in it decide. A form that was sent as a whole
    has the fields of all choices; in any other query, a field that is not in use is a fault.

    Args:
        query: the form's fields by name.
        number: the run's place in the form.
        source: its number in the names of the fields, if it differs.
    """
    source = source or number
    suffix = "" if source == 1 else f"-{source}"
    sent = _take_own(query, suffix)
    texts = {name: sent.get(name, each.initial).strip() for name, each in FIELDS.items()}
    texts |= _decide(sent)
    texts[MECHANISM] = sent.get(MECHANISM, format_example("gaussian")).strip()
    texts |= _read_generated(sent)
    used = set(_list_fields_in_use(texts))
    given = {name for name in sent if _is_typed(name)}
    faults = [*_list_choice_faults(sent, suffix)]
    if not sent.keys() >= set(_NAMES):
        if texts["batches"] == "sizes" and given & set(_SIZES):
            texts |= dict.fromkeys(set(_SIZES) - given, "")  # the other size is required
        faults += [_describe_unused(name + suffix, texts) for name in sorted(given - used)]
    values, found = _read_values(texts)
    filled = tuple(name for name in FIELDS if name in used - given) if given else ()
    names = tuple(name + suffix for name in sent)
    problems = found | _check_epochs(texts)
    return RunForm(number, texts, values, problems, tuple(faults), filled, names)


def _take_own(query: Mapping[str, str], suffix: str) -> dict[str, str]:
    """Return the fields of the run whose names end in a suffix, without it."""
    own = {name.removesuffix(suffix): name for name in query if name.endswith(suffix)}
    return {
        name: query[full]
        for name, full in own.items()
        if name in _NAMES or (is_generated(name) and "-" not in name)
    }


def _decide(sent: Mapping[str, str]) -> dict[str, str]:
    """Return the option of each choice: the one that was sent, or that the sent fields need."""
    by_rate = sent.get("batches", "rate" if "sample_rate" in sent else "sizes") == "rate"
    by_rate = by_rate and not sent.keys() & set(_SIZES)
    by_steps = "epochs" not in sent and ("steps" in sent or by_rate)
    needed = {
        "kind": _decide_kind(sent),
        "batches": "rate" if by_rate else "sizes",
        "length": "steps" if by_steps else "epochs",
        "sampling": CHOICES["sampling"].initial,
    }
    return {
        name: sent[name] if sent.get(name) in choice.options else needed[name]
        for name, choice in CHOICES.items()
    }


def _is_typed(name: str) -> bool:
    """Return whether a field holds a value of a run, not a choice of its fields."""
    return (
        name in FIELDS
        or name == MECHANISM
        or (is_generated(name) and not name.endswith(kind_form.NEW))
    )


def _decide_kind(sent: Mapping[str, str]) -> str:
    """Return the kind of run that the sent fields describe."""
    if any(is_generated(name) for name in sent):
        return "fields"
    return "json" if MECHANISM in sent and not sent.keys() & set(FIELDS) else "dp_sgd"


def _describe_unused(name: str, texts: Mapping[str, str]) -> str:
    """Return a sentence about a field of the address that the page cannot use."""
    if texts["kind"] != "dp_sgd":
        by = "a mechanism as JSON" if texts["kind"] == "json" else "another kind of mechanism"
    else:
        ways = [CHOICES[choice].options[texts[choice]] for choice in ("batches", "length")]
        by = f"a DP-SGD run with batches {ways[0]} and its length {ways[1]}"
    return f"“{name}” cannot be used for {by}: leave it out of the address."


def _read_generated(sent: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the fields generated for a run's kind of mechanism, by name."""
    return kind_form.flatten(kind_form.read_texts(sent)) if _RELEASE in sent else {}


def _read_values(texts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of the fields in use, and a sentence for each that is wrong."""
    in_use = _list_fields_in_use(texts)
    if texts["kind"] == "fields":
        if _RELEASE not in texts:
            return {}, {_RELEASE: "Choose a kind, and show its fields."}
        _, found = kind_form.read_values(kind_form.read_texts(texts))
        return {name: texts[name] for name in in_use if name not in found}, found
    values: dict[str, Any] = {}
    found = {}
    for name in in_use:
        try:
            values[name] = _read_field(name, texts[name])
        except ValueError as error:
            label = FIELDS[name].label if name in FIELDS else "The JSON text"
            found[name] = f"{label} {error}."
    return values, found


def choose_kinds(run: RunForm, query: Mapping[str, str]) -> dict[str, str]:
    """Return a run's texts after the user changed kinds in the selection lists."""
    own = {name.removesuffix(run.suffix): query[name] for name in query}
    kept = {name: text for name, text in run.texts.items() if not is_generated(name)}
    return kept | kind_form.flatten(kind_form.choose_kinds(run.release or {}, own))


def is_generated(name: str) -> bool:
    """Return whether a field is generated from the schema of a kind."""
    return name.startswith(kind_form.ROOT + "_")


def read_runs(query: Mapping[str, str]) -> tuple[RunForm, ...]:
    """Return all runs of a form, numbered without gaps; there is at least one."""
    numbers = {1} | {int(match[1]) for name in query if (match := _NUMBERED.fullmatch(name))}
    sources = sorted(numbers)[:RUNS_MAX]
    return tuple(read_run(query, place, source) for place, source in enumerate(sources, 1))


def write_runs(runs: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return runs as URL parameters: visible fields, and choices that are not the first option."""
    found: dict[str, str] = {}
    for number, texts in enumerate(runs, 1):
        suffix = "" if number == 1 else f"-{number}"
        chosen = {name: texts[name] for name in CHOICES if texts[name] != CHOICES[name].initial}
        used = {name: texts[name] for name in _list_fields_in_use(texts)}
        first = {} if number == 1 else {"kind": texts["kind"]}  # at least one parameter a run
        found |= {name + suffix: text for name, text in (first | used | chosen).items()}
    return found


def write_mechanism(mechanism: Json) -> dict[str, str]:
    """Return a mechanism as URL parameters: fields if it is a DP-SGD run, JSON otherwise.

    A mechanism that is too long for the form gives no parameters.
    """
    if mechanism["kind"] == "dp_sgd":
        sizes = {"batches": "sizes"} if "batch_size" in mechanism else {}
        length = {"length": "epochs"} if "epochs" in mechanism else {}
        texts = {name: _write_value(value) for name, value in mechanism.items() if name != "kind"}
        return texts | sizes | length
    text = json.dumps(mechanism, ensure_ascii=False)
    return {"kind": "json", MECHANISM: text} if len(text) <= JSON_MAX else {}


def _write_value(value: Any) -> str:
    """Return an API value as the text of a form field."""
    return value if isinstance(value, str) else json.dumps(value)


def list_parameters(runs: Iterable[RunForm]) -> list[str]:
    """Return the names of the URL parameters that describe runs."""
    found: list[str] = []
    for run in runs:
        found += [name + run.suffix for name in _NAMES]
        found += [*run.generated_names, *run.new_names, *run.sent]
    return found


def _list_choice_faults(sent: Mapping[str, str], suffix: str) -> Iterator[str]:
    """Yield a sentence for each choice that has no option with the value that was sent."""
    for name, choice in CHOICES.items():
        fault = choice.find_fault(name + suffix, sent.get(name))
        if fault is not None:
            yield fault


def _list_fields_in_use(texts: Mapping[str, str]) -> list[str]:
    """Return the names of the fields that are visible with the current choices."""
    if texts["kind"] == "json":
        return [MECHANISM]
    if texts["kind"] == "fields":
        return [name for name in texts if is_generated(name)]
    unused = {"dataset_size", "batch_size"} if texts["batches"] == "rate" else {"sample_rate"}
    unused |= {"epochs"} if texts["length"] == "steps" else {"steps"}
    return [name for name in FIELDS if name not in unused]


def _read_field(name: str, text: str) -> Any:
    """Parse the text of the field `name`; return its value.

    Raises:
        ValueError: it has none; the message continues the field's name.
    """
    return FIELDS[name].read(text) if name in FIELDS else _parse_json(text)


def _parse_json(text: str) -> Any:
    """Parse a short JSON text; return its value.

    Raises:
        ValueError: the text is empty, too long or not JSON; the message continues its name.
    """
    if not text:
        raise ValueError("is required")
    if len(text) > JSON_MAX:
        raise ValueError(f"must be at most {JSON_MAX} characters long; send longer ones to the API")
    try:
        found = from_json(text.encode("utf-8", "replace"), allow_inf_nan=False)
        require_unambiguous(text)
        return found
    except ValueError as error:
        raise ValueError(f"cannot be read: {error}") from None


def _check_epochs(texts: Mapping[str, str]) -> dict[str, str]:
    """Return an error message if a run has epochs, but no batch and dataset size."""
    if texts["kind"] == "dp_sgd" and texts["length"] == "epochs" and texts["batches"] == "rate":
        return {"epochs": "To use epochs, choose batches by sizes above."}
    return {}
