"""The calculator's form: reads it from the URL, and turns it into request bodies of the API.

The typed texts are kept as they are. If the API would refuse a value, its message is shown beside
the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NumberField:
    """A number field of the form, with its label and limits.

    Attributes:
        label: its name on the page.
        symbol: its symbol in formulas.
        initial: the text it has at first.
        hint: a short explanation.
        exponents: the smallest and largest power of ten of its slider, if it has one.
    """

    label: str
    symbol: str
    initial: str
    hint: str
    exponents: tuple[float, float] | None = None


FIELDS: Final[Mapping[str, NumberField]] = {
    "sample_rate": NumberField(
        "Sample rate", "q", "0.01", "share of the records in each batch", (-4, 0)
    ),
    "dataset_size": NumberField("Records", "N", "60000", "number of records in the dataset"),
    "batch_size": NumberField("Batch size", "B", "600", "expected number of records in a batch"),
    "noise_multiplier": NumberField(
        "Noise multiplier",
        "σ",
        "1.1",
        "standard deviation of the noise ÷ clipping norm",
        (-0.5, 1.5),
    ),
    "steps": NumberField("Steps", "T", "1000", "number of noisy updates", (0, 6)),
    "epochs": NumberField("Epochs", "E", "10", "passes over the dataset"),
    "delta": NumberField(
        "Failure probability", "δ", "1e-5", "well below 1 ÷ number of records", (-10, -2)
    ),
    "epsilon": NumberField("Target", "ε", "2", "the run must not exceed it", (-1, 1.3)),
}
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "batches": ("rate", "sizes"),
    "length": ("steps", "epochs"),
    "sampling": ("poisson", "fixed_size", "balls_in_bins", "shuffled", "none"),
    "neighbouring_relation": ("add_or_remove_one", "replace_one", "zero_out_one"),
}
_WHOLE: Final = {"dataset_size", "batch_size", "steps"}
_TEXT_MAX: Final = 40
_POINTS: Final = 40
_RATES: Final = 61
CURVES: Final = ("pld", "subsampled_rdp")
COMPARE, CURVE, TRADE_OFF = "/v1/compare", "/v1/curve", "/v1/trade-off"
NOISE, STEPS = "/v1/noise-multiplier", "/v1/steps"


@dataclass(frozen=True, slots=True)
class CalculatorForm:
    """The calculator's form: typed texts, their values, and the problems found.

    Attributes:
        texts: the text of every field and choice, by name.
        values: the numbers of the fields in use, by name.
        problems: a sentence for each field that is wrong, by name.
    """

    texts: Mapping[str, str]
    values: Mapping[str, float]
    problems: Mapping[str, str]

    @property
    def batches(self) -> Json:
        """The form's batch parameters and sampling, as fields of the API."""
        names = (
            ("sample_rate",)
            if self._is_chosen("batches", "rate")
            else ("dataset_size", "batch_size")
        )
        sampling = self.texts["sampling"]
        chosen = {} if sampling == "poisson" else {"sampling": sampling}
        return self._select_values(*names) | chosen

    @property
    def duration(self) -> Json:
        """The form's number of steps or epochs, as a field of the API."""
        return self._select_values(self.texts["length"])

    @property
    def mechanism(self) -> Json:
        """The form's run, as the JSON of a `dp_sgd` mechanism."""
        noise = self._select_values("noise_multiplier")
        return {"kind": "dp_sgd"} | noise | self.batches | self.duration

    @property
    def relation(self) -> Json:
        """The form's neighbouring relation, as a field of the API; empty for the default."""
        chosen = self.texts["neighbouring_relation"]
        default = CHOICES["neighbouring_relation"][0]
        return {} if chosen == default else {"neighbouring_relation": chosen}

    @property
    def bodies(self) -> Mapping[str, Json]:
        """The request body for each API endpoint that the page calls, by path."""
        common = {"mechanism": self.mechanism, **self.relation}
        target = self._select_values("epsilon", "delta") | self.batches | self.relation
        curve = {"methods": list(CURVES), "points": _POINTS}
        return {
            COMPARE: common | self._select_values("delta"),
            CURVE: common | self._select_values("delta") | curve,
            TRADE_OFF: common | {"points": _RATES},
            NOISE: target | self.duration,
            STEPS: target | self._select_values("noise_multiplier"),
        }

    def _is_chosen(self, choice: str, option: str) -> bool:
        """Return whether an option of a choice is selected."""
        return self.texts[choice] == option

    def _select_values(self, *names: str) -> Json:
        """Return the values of the named fields that have one."""
        return {name: self.values[name] for name in names if name in self.values}


def read_form(query: Mapping[str, str]) -> CalculatorForm:
    """Return the form for a URL's query; missing fields have their initial text."""
    texts = {name: query.get(name, field.initial).strip() for name, field in FIELDS.items()}
    texts |= {
        name: query[name] if query.get(name) in options else options[0]
        for name, options in CHOICES.items()
    }
    values: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name in _fields_in_use(texts):
        try:
            values[name] = parse_number(texts[name], name in _WHOLE)
        except ValueError as error:
            problems[name] = problem_sentence(name, str(error))
    if texts["length"] == "epochs" and texts["batches"] == "rate":
        problems["epochs"] = "To use epochs, choose batches by sizes above."
    return CalculatorForm(texts, values, problems)


def _fields_in_use(texts: Mapping[str, str]) -> list[str]:
    """Return the names of the fields that are visible with the current choices."""
    unused = {"dataset_size", "batch_size"} if texts["batches"] == "rate" else {"sample_rate"}
    unused |= {"epochs"} if texts["length"] == "steps" else {"steps"}
    return [name for name in FIELDS if name not in unused]


def parse_number(text: str, whole: bool) -> float:
    """Parse a typed number for the API.

    Raises:
        ValueError: the text is no such number; the message continues the field's name.
    """
    if not text:
        raise ValueError("is required")
    try:
        value = float(text) if len(text) <= _TEXT_MAX else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        expected = "a whole number" if whole else "a number, such as 0.01 or 1e-5"
        raise ValueError(f"must be {expected}")
    return int(value) if whole and value.is_integer() else value


def problem_sentence(name: str, message: str) -> str:
    """Return a sentence for the user about a problem with a field or with the whole run."""
    if name in FIELDS:
        return f"{FIELDS[name].label} {message}."
    text = message.replace("_", " ")
    return f"The run {text}." if text.startswith("must") else f"{text[:1].upper()}{text[1:]}."


def problem_sentences(problems: Iterable[Json]) -> dict[str, str]:
    """Return a sentence for each field that the API's problem documents point to.

    Problems of other fields are shown at the sampling.
    """
    found: dict[str, str] = {}
    for error in (error for problem in problems for error in problem["errors"]):
        name = error["pointer"].rpartition("/")[2]
        field = name if name in FIELDS else "sampling"
        found.setdefault(field, problem_sentence(name, error["message"]))
    return found
