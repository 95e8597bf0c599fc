"""The calculator's question: from the text of a form to the API's bodies, and back to sentences.

Everything typed stays as it was typed. What the API would refuse becomes a sentence beside the
field to blame, in the API's own words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One number of the form.

    Attributes:
        label: what it is called.
        symbol: in formulas.
        initial: before anything is typed.
        hint: what it means.
        exponents: the least and largest power of ten of its slider, if it has one.
    """

    label: str
    symbol: str
    initial: str
    hint: str
    exponents: tuple[float, float] | None = None


FIELDS: Final[Mapping[str, Field]] = {
    "sample_rate": Field("Sample rate", "q", "0.01", "share of the data in a batch", (-4, 0)),
    "dataset_size": Field("Records", "N", "60000", "in the dataset"),
    "batch_size": Field("Batch size", "B", "600", "expected records in a batch"),
    "noise_multiplier": Field(
        "Noise multiplier", "σ", "1.1", "noise over the clipping norm", (-0.5, 1.5)
    ),
    "steps": Field("Steps", "T", "1000", "noisy updates", (0, 6)),
    "epochs": Field("Epochs", "E", "10", "passes over the data"),
    "delta": Field("Failure probability", "δ", "1e-5", "below 1 over the records", (-10, -2)),
    "epsilon": Field("Target", "ε", "2", "what the run must stay within", (-1, 1.3)),
}
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "batches": ("rate", "sizes"),
    "length": ("steps", "epochs"),
    "sampling": ("poisson", "fixed_size", "shuffled", "none"),
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
class Form:
    """What was typed, what it means where it can be read, and a sentence where it cannot.

    Attributes:
        texts: every field and choice as text.
        values: the numbers that this question uses.
        problems: sentences by field.
    """

    texts: Mapping[str, str]
    values: Mapping[str, float]
    problems: Mapping[str, str]

    @property
    def shape(self) -> Json:
        """The batches and their sampling, as the API names them."""
        names = ("sample_rate",) if self._by("batches", "rate") else ("dataset_size", "batch_size")
        sampling = self.texts["sampling"]
        chosen = {} if sampling == "poisson" else {"sampling": sampling}
        return self._pick(*names) | chosen

    @property
    def duration(self) -> Json:
        """The steps or the epochs."""
        return self._pick(self.texts["length"])

    @property
    def mechanism(self) -> Json:
        """The run."""
        noise = self._pick("noise_multiplier")
        return {"kind": "dp_sgd"} | noise | self.shape | self.duration

    @property
    def relation(self) -> Json:
        """The neighbouring relation, where it is not the usual one."""
        chosen = self.texts["neighbouring_relation"]
        usual = CHOICES["neighbouring_relation"][0]
        return {} if chosen == usual else {"neighbouring_relation": chosen}

    @property
    def bodies(self) -> Mapping[str, Json]:
        """Every question that the page asks, by the API's path."""
        about = {"mechanism": self.mechanism, **self.relation}
        target = self._pick("epsilon", "delta") | self.shape | self.relation
        curve = {"methods": list(CURVES), "points": _POINTS}
        return {
            COMPARE: about | self._pick("delta"),
            CURVE: about | self._pick("delta") | curve,
            TRADE_OFF: about | {"points": _RATES},
            NOISE: target | self.duration,
            STEPS: target | self._pick("noise_multiplier"),
        }

    def _by(self, choice: str, option: str) -> bool:
        return self.texts[choice] == option

    def _pick(self, *names: str) -> Json:
        return {name: self.values[name] for name in names if name in self.values}


def read(query: Mapping[str, str]) -> Form:
    """The form that a URL describes; what it does not name is as at the beginning."""
    texts = {name: query.get(name, field.initial).strip() for name, field in FIELDS.items()}
    texts |= {
        name: query[name] if query.get(name) in options else options[0]
        for name, options in CHOICES.items()
    }
    values: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name in _used(texts):
        try:
            values[name] = _number(texts[name], name in _WHOLE)
        except ValueError as error:
            problems[name] = sentence(name, str(error))
    if texts["length"] == "epochs" and texts["batches"] == "rate":
        problems["epochs"] = "Epochs need the records and the batch size; choose them above."
    return Form(texts, values, problems)


def _used(texts: Mapping[str, str]) -> list[str]:
    """The fields that the choices made ask for."""
    unused = {"dataset_size", "batch_size"} if texts["batches"] == "rate" else {"sample_rate"}
    unused |= {"epochs"} if texts["length"] == "steps" else {"steps"}
    return [name for name in FIELDS if name not in unused]


def _number(text: str, whole: bool) -> float:
    """A number as the API takes it.

    Raises:
        ValueError: what it must be instead, to follow the field's name.
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


def sentence(name: str, message: str) -> str:
    """A problem with a field, or with the whole run, in words."""
    if name in FIELDS:
        return f"{FIELDS[name].label} {message}."
    text = message.replace("_", " ")
    return f"The run {text}." if text.startswith("must") else f"{text[:1].upper()}{text[1:]}."


def problems_of(problems: Iterable[Json]) -> dict[str, str]:
    """The sentences of malformed questions by field; what fits none is under the sampling."""
    found: dict[str, str] = {}
    for error in (error for problem in problems for error in problem["errors"]):
        name = error["pointer"].rpartition("/")[2]
        field = name if name in FIELDS else "sampling"
        found.setdefault(field, sentence(name, error["message"]))
    return found
