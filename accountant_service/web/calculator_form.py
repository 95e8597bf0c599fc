"""The calculator's form: reads it from the URL, and turns it into request bodies of the API.

The form holds one run or several; the answers are about all of them together. If the API would
refuse a value, its message is shown beside the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from accountant_service.questions.models import CompareRequest, NoiseMultiplierRequest
from accountant_service.questions.registry import ENDPOINTS
from accountant_service.web import run_form
from accountant_service.web.choices import Choice, describe_choices
from accountant_service.web.number_fields import NumberField, describe_fields, read_values
from accountant_service.web.run_form import RunForm

Json = dict[str, Any]

SHARED_FIELDS: Final[Mapping[str, NumberField]] = {
    name: field
    for model in (CompareRequest, NoiseMultiplierRequest)
    for name, field in describe_fields(model, required=("epsilon",)).items()
    if name not in run_form.FIELDS
}
SHARED_CHOICES: Final[Mapping[str, Choice]] = describe_choices(CompareRequest)
FIELDS: Final[Mapping[str, NumberField]] = {**run_form.FIELDS, **SHARED_FIELDS}
CHOICES: Final[Mapping[str, Choice]] = {**run_form.CHOICES, **SHARED_CHOICES}
_POINTS: Final = 24
_RATES: Final = [float(f"{digit}e{power}") for power in range(-5, 0) for digit in (1, 2, 5)] + [1.0]
CURVES: Final = ("pld", "subsampled_rdp")
# The questions of the page by name, and the endpoints that answer them.
COMPARE, CURVE, FIRST_STEP, TRADE_OFF = "compare", "curve", "first_step", "trade_off"
NOISE, STEPS, ALONE = "noise_multiplier", "steps", "alone"
Question = tuple[str, Json]  # path and body


@dataclass(frozen=True, slots=True)
class CalculatorForm:
    """The calculator's form: its runs, and the fields that all runs share.

    Attributes:
        runs: the runs, at least one.
        texts: the text of every shared field and choice, by name.
        values: the values of the shared fields, by name.
        problems: a sentence for each field that is wrong, by its name in the form.
        faults: a sentence for each parameter of the address that cannot be used.
        filled: the names of fields in use that the address lacks, if it has others.
    """

    runs: tuple[RunForm, ...]
    texts: Mapping[str, str]
    values: Mapping[str, Any]
    problems: Mapping[str, str]
    faults: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()

    @property
    def mechanism(self) -> Any:
        """All runs of the form, as one mechanism of the API."""
        return _compose([run.mechanism for run in self.runs])

    @property
    def solved_run(self) -> RunForm | None:
        """The run whose noise and steps are solved for: the first DP-SGD run, if there is one."""
        return next((run for run in self.runs if run.is_dp_sgd), None)

    @property
    def relation(self) -> Json:
        """The form's neighbouring relation, as a field of the API; empty for the default."""
        name = "neighbouring_relation"
        chosen = self.texts[name]
        return {} if chosen == SHARED_CHOICES[name].initial else {name: chosen}

    @property
    def questions(self) -> Mapping[str, Question]:
        """The requests that the page sends to the API, by name."""
        delta = {"delta": self.values["delta"]} if "delta" in self.values else {}
        common = {"mechanism": self.mechanism, **self.relation}
        found: dict[str, Question] = {}
        if len(self.runs) > 1:  # first, because their problems are those of one run
            for run in self.runs:
                alone = {"mechanism": run.mechanism, **delta, **self.relation}
                found[f"{ALONE}-{run.number}"] = ("/v1/epsilon", alone)
        found |= {
            COMPARE: ("/v1/compare", common | delta),
            TRADE_OFF: ("/v1/trade-off", common | {"false_positive_rates": _RATES}),
        }
        if len(self.runs) == 1 and self.solved_run:
            curve = common | delta | {"methods": list(CURVES), "points": _POINTS}
            found[CURVE] = ("/v1/curve", curve)
            if self.runs[0].texts["sampling"] not in ("shuffled", "balls_in_bins"):
                one = {name: value for name, value in self.mechanism.items() if name != "epochs"}
                first = curve | {"mechanism": one | {"steps": 1}, "points": 1}
                found[FIRST_STEP] = ("/v1/curve", first)
        found |= self._solver_questions()
        return {
            name: (path, body | self._select_further(path)) for name, (path, body) in found.items()
        }

    def _select_further(self, path: str) -> Json:
        """Return the shared values, besides ε and δ, that a question takes."""
        known = ENDPOINTS[path].request.model_fields.keys() - {"epsilon", "delta"}
        return {name: value for name, value in self.values.items() if name in known}

    def _solver_questions(self) -> dict[str, Question]:
        """Return the API requests for a run's least noise and most steps, by name."""
        run = self.solved_run
        if run is None:
            return {}
        others = [each.mechanism for each in self.runs if each is not run]
        earlier = {"earlier": _compose(others)} if others else {}
        target = {name: self.values[name] for name in ("delta", "epsilon") if name in self.values}
        target |= run.batches | self.relation | earlier
        noise = run.select_values("noise_multiplier")
        return {
            NOISE: ("/v1/noise-multiplier", target | run.duration),
            STEPS: ("/v1/steps", target | noise),
        }

    def locate(self, question: str, pointer: str) -> tuple[RunForm | None, list[str]]:
        """Return the run that a JSON pointer of a request points into, and the remaining path."""
        first, *rest = pointer.strip("/").split("/")
        if first == "mechanism" and question.startswith(ALONE):
            return self.runs[int(question.rpartition("-")[2]) - 1], rest
        if first == "mechanism" and len(self.runs) > 1 and rest[:1] == ["mechanisms"] and rest[1:]:
            return self.runs[int(rest[1])], rest[2:]
        if first == "mechanism":
            return self.runs[0], rest
        if first in SHARED_FIELDS or first in SHARED_CHOICES:
            return None, [first]
        return self.solved_run or self.runs[0], [first]

    def has_value(self, name: str) -> bool:
        """Return whether the text of a form field could be read as a value."""
        found = dict(self.values)
        for run in self.runs:
            found |= {each + run.suffix: value for each, value in run.values.items()}
        return name in found


def _compose(several: list[Any]) -> Any:
    """Return one mechanism: a single one unchanged, several composed."""
    return several[0] if len(several) == 1 else {"kind": "composed", "mechanisms": several}


def read_form(query: Mapping[str, str]) -> CalculatorForm:
    """Return the form for a URL's query; missing fields have their initial text."""
    runs = run_form.read_runs(query)
    texts = {name: query.get(name, field.initial).strip() for name, field in SHARED_FIELDS.items()}
    texts |= {name: choice.read(query.get(name)) for name, choice in SHARED_CHOICES.items()}
    values, problems = read_values(SHARED_FIELDS, texts)
    problems |= {name + run.suffix: text for run in runs for name, text in run.problems.items()}
    faults = [fault for run in runs for fault in run.faults]
    for name, choice in SHARED_CHOICES.items():
        fault = choice.find_fault(name, query.get(name))
        faults += [] if fault is None else [fault]
    filled = [name + run.suffix for run in runs for name in run.filled]
    filled += ["delta"] if "delta" not in query and len(query) else []
    return CalculatorForm(runs, texts, values, problems, tuple(faults), tuple(filled))


def problem_sentences(form: CalculatorForm, problems: Iterable[tuple[str, Json]]) -> dict[str, str]:
    """Return a sentence for each field that the API's error answers point to.

    Problems of a run that belong to no field are shown at its sampling.

    Args:
        form: the form.
        problems: the name of each question that the API refuses, and the problem document.
    """
    found: dict[str, str] = {}
    for question, error in ((name, error) for name, each in problems for error in each["errors"]):
        if error["pointer"].startswith("/earlier"):
            continue  # the comparison, which has all runs, tells of it as well
        run, names = form.locate(question, error["pointer"])
        if run is None:
            field, sentence = names[0], _shared_sentence(names[0], error["message"])
        else:
            field, sentence = run.place_problem(names, error["message"])
            field += run.suffix
        found.setdefault(field, sentence)
    return found


def _shared_sentence(name: str, message: str) -> str:
    """Return a sentence about an error in a field or choice that all runs share."""
    if name in SHARED_FIELDS:
        return SHARED_FIELDS[name].sentence(message)
    return f"{SHARED_CHOICES[name].label}: {message}."


def change_runs(form: CalculatorForm, query: Mapping[str, str]) -> dict[str, str] | None:
    """Return the form's URL parameters after changing its runs; None if no change is requested.

    Args:
        form: the form as it was sent.
        query: its fields; `add` is "dp_sgd" or "fields", for a run of another kind; `remove` and
            `choose` are the number of a run.

    Returns:
        None if the query asks for neither.
    """
    texts = [dict(run.texts) for run in form.runs]
    if "add" in query:
        if len(texts) < run_form.RUNS_MAX:
            texts.append(_new_run(form, query["add"]))
    elif "remove" in query:
        kept = [each for at, each in enumerate(texts, 1) if str(at) != query["remove"]]
        texts = kept or texts
    elif "choose" in query:
        texts = [
            run_form.choose_kinds(run, query) if str(run.number) == query["choose"] else each
            for run, each in zip(form.runs, texts, strict=True)
        ]
    else:
        return None
    return run_form.write_runs(texts) | dict(form.texts)


def _new_run(form: CalculatorForm, kind: str) -> dict[str, str]:
    """Return a new run's texts: a copy of the last DP-SGD run, or one without a mechanism yet."""
    if kind == "fields":
        return dict(run_form.read_run({"kind": kind}).texts)
    runs = [run for run in form.runs if run.is_dp_sgd]
    return dict(runs[-1].texts if runs else run_form.read_run({}).texts)
