"""One table of requests that are refused, and how each is asked through every surface.

A row is a request to the API with its refusal. Whether the command line, the pages, the typed
client and the functions of the package can ask the same is derived from the row: a surface can ask
it if it can express every field. `{open}` and `{ended}` in a path stand for the identifiers of two
runs of the dataset `patients`, whose budget is ε = 1; `closed` is closed and `planned` planned.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, get_args, get_type_hints
from urllib.parse import urlencode

from typer.main import get_command

import accountant_service
from accountant_service import cli
from accountant_service.ledger.api_keys import Scope
from accountant_service.questions.registry import ENDPOINTS
from accountant_service.web import calculator_form, import_page, plan_form
from tests.support.helpers import gaussian, run
from training_client.client import AccountingService, Reservation

Json = dict[str, Any]
RUN: Final = run(0.01, 1.1, 1000)
SIZES: Final = {"dataset_size": 9, "batch_size": 2}
RUN_FIELDS: Final = ("noise_multiplier", "sample_rate", "steps", "dataset_size", "batch_size",
                     "epochs", "sampling")  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """A request and its refusal.

    Attributes:
        path: the path of the API.
        body: the JSON body; bytes are sent as they are.
        pointer: a place that the refusal must name; None if it names none.
        says: words about that place, or of the detail, on every surface.
        code: the problem's code.
        status: the HTTP status.
        method: the HTTP method.
        scope: of the key that asks; None for a call without a key.
        datasets: to which the key is bound.
    """

    path: str
    body: Any = None
    pointer: str | None = None
    says: str = ""
    code: str = "invalid-request"
    status: int = 422
    method: str = "POST"
    scope: Scope | None = Scope.ADMIN
    datasets: tuple[str, ...] | None = None

    def __str__(self) -> str:
        body = "" if self.body is None else f" {self.body}"
        return f"{self.method} {self.path}{body}"[:120].encode("ascii", "replace").decode()

    @property
    def question(self) -> str | None:
        """The name of the question that is asked, such as epsilon; None for the ledger."""
        is_asked = self.path in ENDPOINTS and self.method == "POST"
        return self.path.removeprefix("/v1/") if is_asked else None

    @property
    def field(self) -> str:
        """The name of the refused field."""
        return (self.pointer or "").rpartition("/")[2]


# --- the table


def _changed(base: Json, changes: Json) -> Json:
    """Return an object with some fields changed; None removes a field."""
    return {name: value for name, value in (base | changes).items() if value is not None}


def _about(path: str, base: Json, *cases: tuple[Json, str, str]) -> list[Refusal]:
    """Return refusals of one question: what is changed, the pointer, and words about it."""
    return [
        Refusal(path, _changed(base, changes), pointer, says) for changes, pointer, says in cases
    ]


def _about_run(*cases: tuple[Json, str, str]) -> list[Refusal]:
    """Return refusals of the question for ε of a DP-SGD run of which some fields are changed."""
    return [
        Refusal("/v1/epsilon", {"mechanism": _changed(RUN, changes), "delta": 1e-5},
                f"/mechanism{pointer}", says)
        for changes, pointer, says in cases
    ]  # fmt: skip


def _about_mechanism(*cases: tuple[Any, str, str]) -> list[Refusal]:
    """Return refusals of the question for ε of a mechanism."""
    return [
        Refusal(
            "/v1/epsilon", {"mechanism": mechanism, "delta": 1e-5}, f"/mechanism{pointer}", says
        )
        for mechanism, pointer, says in cases
    ]


_EITHER_RATE: Final = "must give either"
_COUNTLESS: Final = {
    "kind": "poisson_sampled", "sample_rate": 0.01,
    "mechanism": {"kind": "repeated", "count": 999_999_999, "mechanism": gaussian(1.1)},
}  # fmt: skip
_MANY_PARTS: Final = [run(0.01, 1 + i / 1000, 10) for i in range(2000)]

_BODIES = [
    *(
        Refusal("/v1/epsilon", raw, code="unreadable-body", status=400)
        for raw in (b"{", b"\xff\xfe", b'{"delta": NaN}', b'{"delta": Infinity}', b"[" * 100_000,
                    b"nul")
    ),
    *(
        Refusal("/v1/epsilon", raw, pointer)
        for raw, pointer in ((b"", ""), (b"null", ""), (b"[]", ""), (b"3", ""), (b'"x"', ""),
                             (b'{"mechanism":1e999}', "/mechanism"))
    ),
    *(
        Refusal("/v1/epsilon", raw, pointer, "more than once")
        for raw, pointer in (
            (b'{"delta": 1e-9, "delta": 1e-5, "mechanism": {}}', "/delta"),
            (b'{"mechanism": {"kind": "gaussian", "k\\u0069nd": "laplace"}, "delta": 1e-5}',
             "/mechanism/kind"),
            (b'{"delta": 1e-5, "mechanism": {"mechanisms": [{}, {"a~/b": 1, "a~/b": 1}]}}',
             "/mechanism/mechanisms/1/a~0~1b"),
            (b'{"delta": 1e-5, "x": "' + b"y" * 5000 + b'", "x": 0}', "/x"),  # parsed elsewhere
        )
    ),
    Refusal("/v1/epsilon", b'{"mechanism": "' + b"x" * 3_000_000 + b'"}', code="body-too-large",
            status=413),
    Refusal("/v2/epsilon", method="GET", code="not-found", status=404),
    Refusal("/v1/epsilon", method="GET", code="method-not-allowed", status=405),
    Refusal("/v1/batch", {"requests": []}, "/requests"),
]  # fmt: skip

_FIELDS = [
    *_about(
        "/v1/epsilon",
        {"mechanism": RUN, "delta": 1e-5},
        ({"delta": 1e-51}, "/delta", "must be 0, or ≥ 1e-50"),
        ({"delta": 1e-320}, "/delta", "must be 0, or ≥ 1e-50"),
        ({"delta": 1}, "/delta", "must be < 1"),
        ({"delta": 5}, "/delta", "must be < 1"),
        ({"delta": -1}, "/delta", "must be ≥ 0"),
        ({"delta": "1e-5"}, "/delta", "must be a valid number"),
        ({"delta": "x"}, "/delta", "number"),
        ({"delta": None}, "/delta", "is required"),
        ({"method": "magic"}, "/method", "must be one of pld, subsampled_rdp"),
        ({"method": 3}, "/method", "must be"),
        ({"neighbouring_relation": "friends"}, "/neighbouring_relation", "must be 'add"),
        ({"tolerance": 1e-12}, "/tolerance", "must be ≥ 1e-7"),
        ({"tolerance": 0}, "/tolerance", "must be ≥ 1e-7"),
        ({"tolerance": 2.0}, "/tolerance", "must be"),
        ({"tolerance": "1e-3"}, "/tolerance", "must be"),
        ({"surprise": 1}, "/surprise", "is not a field of this request"),
    ),
    Refusal("/v1/epsilon", {"mechanism": RUN, "delta": None}, "/delta"),
    *(
        Refusal(
            "/v1/epsilon",
            {"mechanism": gaussian(1), "delta": 0, "method": method},
            code="no-finite-epsilon",
            says=words,
        )
        for method, words in (
            ("pld", "no finite ε holds at δ = 0"),
            ("subsampled_rdp", "subsampled_rdp proves no finite ε at δ = 0"),
            ("gdp_clt", "gdp_clt proves no finite ε at δ = 0"),
        )
    ),
    Refusal(
        "/v1/noise-multiplier",
        {"epsilon": 1, "delta": 0, "sample_rate": 0.1, "steps": 9},
        code="no-finite-epsilon",
        says="no finite ε holds at δ = 0",
    ),
    *_about(
        "/v1/delta",
        {"mechanism": RUN, "epsilon": 1.0},
        ({"epsilon": -1}, "/epsilon", "must be ≥ 0"),
    ),
    *_about(
        "/v1/curve",
        {"mechanism": RUN, "delta": 1e-5, "points": 4},
        ({"mechanism": gaussian(1)}, "/mechanism/kind", ""),
        ({"points": 10**9}, "/points", "must be"),
    ),
    Refusal("/v1/trade-off", {"mechanism": RUN, "prior": 1}, "/prior", "must be ≤ 0.999999999"),
    *_about(
        "/v1/trade-off",
        {"mechanism": RUN},
        ({"false_positive_rates": []}, "/false_positive_rates", "at least 1 item"),
        ({"false_positive_rates": [0.1, 1.5]}, "/false_positive_rates/1", "must be ≤ 1"),
        ({"false_positive_rates": [0.1], "points": 5}, "/points", "must be left out"),
    ),
    *_about(
        "/v1/solve",
        {
            "mechanism": {"kind": "laplace", "noise_multiplier": None},
            "epsilon": 1.0,
            "delta": 0,
            "parameter": "/noise_multiplier",
        },
        ({"parameter": "/nothing"}, "/parameter", "must point to one of"),
        ({"parameter": "noise"}, "/parameter", "must be a JSON pointer"),
        ({"parameter": None}, "/parameter", "is required"),
        ({"mechanism": []}, "/mechanism", "must be a"),
        (
            {"mechanism": {"kind": "laplace", "surprise": 1}},
            "/mechanism/surprise",
            "is not a field of laplace",
        ),
        ({"epsilon": None, "delta": None}, "", "exactly one target"),
    ),
]

_RUNS = _about_run(
    ({"sample_rate": 2}, "/sample_rate", "must be 0, or"),
    ({"sample_rate": 1.0001}, "/sample_rate", "must be 0, or"),
    ({"sample_rate": None}, "", _EITHER_RATE),
    ({"noise_multiplier": 0}, "/noise_multiplier", "must be a number ≥ 0.01"),
    ({"noise_multiplier": 1e9}, "/noise_multiplier", "must be"),
    ({"noise_multiplier": 1e300}, "/noise_multiplier", "must be"),
    ({"noise_multiplier": None}, "/noise_multiplier", "is required"),
    ({"steps": -5}, "/steps", "must be a whole number"),
    ({"steps": 1.5}, "/steps", "must be a whole number"),
    ({"steps": "many"}, "/steps", "must be a whole number"),
    ({"steps": 10**30}, "/steps", "must be a whole number"),
    ({"steps": '"><script>'}, "/steps", "must be a whole number"),
    ({"epochs": 2}, "", "must give either"),
    (SIZES, "", _EITHER_RATE),
    ({"sample_rate": None, "dataset_size": 9, "batch_size": 20}, "/batch_size", "must be at most"),
    ({"sample_rate": None, "dataset_size": 9}, "", _EITHER_RATE),
    ({"sampling": "random"}, "/sampling", "must be one of poisson"),
    ({"sampling": "none"}, "", "sample"),
    ({"sampling": "fixed_size"}, "", "needs"),
    ({"noise_multiplier": -1, "sample_rate": -1, "steps": -1, "surprise": 1},
     "/noise_multiplier", "must be"),
    ({"surprise": 1}, "/surprise", "is not a field of"),
)  # fmt: skip

_MECHANISMS = [
    *_about_mechanism(
        (None, "", "must be an object"),
        ([], "", "must be an object"),
        ({"kind": "os.system"}, "/kind", "must be one of gaussian"),
        ({"kind": ["gaussian"]}, "/kind", "must be one of"),
        ({"kind": "gaussian"}, "/noise_multiplier", "is required"),
        ({"kind": "gaussian", "noise_multiplier": True}, "/noise_multiplier", "must be"),
        ({"kind": "gaussian", "noise_multiplier": "1"}, "/noise_multiplier", "must be"),
        ({"kind": "gaussian", "noise_multiplier": 0}, "/noise_multiplier", "must be"),
        ({"kind": "gaussian", "noise_multiplier": 10**400}, "/noise_multiplier", "must be"),
        ({"kind": "gaussian", "noise_multiplier": 1, "a/b": 1}, "/a~1b", "is not a field of"),
        ({"kind": "repeated", "count": 1.5, "mechanism": gaussian(1)}, "/count", "whole number"),
        ({"kind": "repeated", "count": -1, "mechanism": gaussian(1)}, "/count", "must be"),
        ({"kind": "repeated", "count": 1, "mechanism": {"kind": "x"}}, "/mechanism/kind", "must"),
        ({"kind": "composed", "mechanisms": {}}, "/mechanisms", "must be"),
        ({"kind": "composed", "mechanisms": [gaussian(1), 3]}, "/mechanisms/1", "must be"),
        ({"kind": "diagonal_gaussian", "sensitivities": [1], "noise_stds": []}, "/noise_stds", ""),
        ({"kind": "diagonal_gaussian", "sensitivities": [1, 2], "noise_stds": [1]}, "/noise_stds",
         ""),
        ({"kind": "diagonal_gaussian", "sensitivities": [1e150], "noise_stds": [1e-150]},
         "/noise_stds", ""),
        ({"kind": "fixed_size_sampled", "dataset_size": 5, "batch_size": 6,
          "mechanism": gaussian(1)}, "/batch_size", "must be at most"),
    ),
    Refusal("/v1/epsilon", {"mechanism": {"kind": "laplace", "noise_multiplier": 1},
                            "delta": 1e-5, "method": "mma"}, code="method-not-applicable"),
    Refusal("/v1/epsilon", {"mechanism": {"kind": "composed", "mechanisms": _MANY_PARTS},
                            "delta": 1e-5}, code="too-expensive"),
    # they count as one release of hardly any noise, whose quadrature would fill the memory
    Refusal("/v1/epsilon", {"mechanism": _COUNTLESS, "delta": 1e-5}, "/mechanism",
            code="too-expensive"),
    Refusal("/v1/delta", {"mechanism": _COUNTLESS, "epsilon": 2.0}, "/mechanism",
            code="too-expensive"),
    Refusal("/v1/trade-off", {"mechanism": _COUNTLESS}, "/mechanism", code="too-expensive"),
]  # fmt: skip

_SHAPE: Final = {"sample_rate": 0.01, "steps": 9}
# alone ε = 2.9 at δ = 1e-5, and an advantage of .21
_COSTLY: Final = {"earlier": {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.05,
                              "steps": 100}}  # fmt: skip
_ALONE: Final = "the earlier releases alone cost more than"
_OTHERS_ALONE: Final = "the other releases alone cost more than"
_APPROXIMATE: Final = {"kind": "approximate_dp", "epsilon": 1, "delta": 1e-5}
_UNKNOWN_TO_PLD: Final = {"kind": "user_level", "records": 3, "mechanism": _APPROXIMATE}


def _sum_with_costly(part: Json) -> Json:
    """Return a sum of a costly run and another mechanism, of which a number is solved for."""
    return {"mechanism": {"kind": "composed", "mechanisms": [_COSTLY["earlier"], part]}}


_TARGETS = [
    *_about(
        "/v1/noise-multiplier",
        {"epsilon": 1, "delta": 1e-5, **_SHAPE},
        ({"epsilon": 0}, "/epsilon", "must be > 0"),
        ({"epsilon": -1}, "/epsilon", "must be > 0"),
        ({"sample_rate": 2}, "/sample_rate", "must be 0, or"),
        ({"sample_rate": None, "steps": None}, "", "must give either"),
        ({"delta": None}, "/delta", "is required with"),
        ({"epsilon": None, "delta": None}, "", "exactly one target"),
        ({"epsilon": None, "delta": None, "advantage": 2}, "/advantage", "must be < 1"),
    ),
    *_about(
        "/v1/steps",
        {"epsilon": 1, "delta": 1e-5, "sample_rate": 0.1, "noise_multiplier": 1},
        ({"steps": 5}, "/steps", "is the parameter to solve for"),
        ({"noise_multiplier": None}, "/noise_multiplier", "is required"),
        ({"sample_rate": None}, "", _EITHER_RATE),
    ),
    *(
        Refusal(path, body, code="unreachable-target")
        for path, body in (
            ("/v1/noise-multiplier",
             {"epsilon": 1e-9, "delta": 1e-40, "sample_rate": 1, "steps": 10**9}),
            ("/v1/noise-multiplier", _SHAPE | {"mu": 1e-9}),
            ("/v1/steps",
             {"epsilon": 1.0, "delta": 0.5, "sample_rate": 1e-12, "noise_multiplier": 1e6}),
        )
    ),
    *(
        Refusal(path, body | target | _COSTLY, code="unreachable-target", says=_ALONE)
        for path, body in (
            ("/v1/steps", {"noise_multiplier": 1.1, "sample_rate": 0.01}),
            ("/v1/noise-multiplier", _SHAPE),
            ("/v1/sample-rate", {"noise_multiplier": 1.1, "steps": 9}),
        )
        for target in (
            {"epsilon": 2, "delta": 1e-5},
            {"epsilon": 2, "delta": 1e-5, "method": "subsampled_rdp"},
            {"epsilon": 2, "delta": 1e-5, "method": "gdp_clt"},
            {"advantage": 0.05},
            {"true_positive_rate": 0.005, "false_positive_rate": 0.001},
        )
    ),
    *(
        Refusal("/v1/solve", body | target, code="unreachable-target", says=says)
        for body, says in (
            (_sum_with_costly({"kind": "repeated", "mechanism": gaussian(9)})
             | {"parameter": "/mechanisms/1/count"}, _OTHERS_ALONE),
            (_sum_with_costly(gaussian(9))
             | {"parameter": "/mechanisms/1/noise_multiplier"}, _OTHERS_ALONE),
            ({"mechanism": {"kind": "repeated", "mechanism": gaussian(9)},
              "parameter": "/count"} | _COSTLY, _ALONE),
        )
        for target in ({"epsilon": 2, "delta": 1e-5}, {"advantage": 0.05}, {"mu": 0.1})
    ),
    # the earlier releases have no finite cost, or none that can be computed
    Refusal("/v1/steps", {"noise_multiplier": 1.1, "sample_rate": 0.01, "epsilon": 5,
                          "delta": 1e-6, "earlier": _APPROXIMATE},
            code="unreachable-target", says="To get a finite ε, choose a larger δ, or leave"),
    Refusal("/v1/noise-multiplier", {"epsilon": 5, "delta": 1e-6, "earlier": _UNKNOWN_TO_PLD}
            | _SHAPE, "/earlier/mechanism", code="method-not-applicable"),
    Refusal("/v1/steps", {"noise_multiplier": 1.1, "sample_rate": 0.01, "epsilon": 5, "delta": 0},
            code="no-finite-epsilon"),
]  # fmt: skip

PLAN: Final = {"epsilon": 2.0, "delta": 1e-5, "dataset_size": 60_000, "epochs": 10,
               "sampling": "poisson"}  # fmt: skip
_PLANS = [
    *_about(
        "/v1/plan",
        PLAN,
        ({"epsilon": 0}, "/epsilon", "must be > 0"),
        ({"epsilon": None}, "/epsilon", "is required"),
        ({"epsilon": "x"}, "/epsilon", "number"),
        ({"delta": 1}, "/delta", "must be < 1"),
        ({"delta": 0}, "/delta", "must be ≥ 1e-50"),
        ({"dataset_size": 0}, "/dataset_size", "must be ≥ 1"),
        ({"dataset_size": 1.5}, "/dataset_size", "must be a"),
        ({"epochs": None}, "/epochs", "is required"),
        ({"epochs": 1e7}, "/epochs", "must be"),
        ({"examples": 5}, "/examples", "must be left out if"),
        ({"steps": 5}, "/batch_size", "is required"),
        ({"batch_size": 60_001}, "/batch_size", "must be at most 60000"),
        ({"batch_size": 0}, "/batch_size", "must be"),
        ({"smallest_batch_size": 70_000}, "/smallest_batch_size", "must be"),
        ({"smallest_batch_size": 5, "largest_batch_size": 4}, "/smallest_batch_size",
         "must be at most"),
        ({"sampling": "shuffled"}, "/sampling", "must be"),
        ({"sampling": "balls_in_bins", "epochs": 0.5}, "/epochs", "at least 1"),
        ({"points": 41}, "/points", "must be"),
        ({"points": 1}, "/points", "must be ≥ 2"),
        ({"batch_size": 256, "steps": 1.5}, "/steps", "must be a"),
        ({"steps_min": 0}, "/steps_min", "must be"),
        ({"neighbouring_relation": "near"}, "/neighbouring_relation", "must be"),
        ({"extra": 1}, "/extra", "is not a field of this request"),
    ),
    Refusal("/v1/plan", PLAN | {"epsilon": 1e-9, "delta": 1e-12}, code="unreachable-target"),
]  # fmt: skip

_IMPORTS = _about(
    "/v1/import",
    {"document": import_page.EXAMPLE, "delta": 1e-5},
    ({"document": "{"}, "/document", "must be"),
    (
        {"document": '{"history": [[1.1, 7, 10]], "mechanism": "rdp"}'},
        "/document/history/0/1",
        "must be a number",
    ),
    ({"delta": 2}, "/delta", "must be < 1"),
    ({"delta": None}, "/delta", "is required: the document names no δ"),
    (
        {"document": "noise_multiplier: 1\nsample_rate: 0.1\nepochs: 15\nsteps: 10"},
        "/document/steps",
        "contradicts the rest",
    ),
    ({"dataset_size": 0}, "/dataset_size", "must be ≥ 1"),
)

_DATASET: Final = {"name": "new", "size": 9, "budget": {"epsilon": 1, "delta": 1e-5}}
_FITTING: Final = run(0.01, 20.0, 3)


def _missing(path: str, body: Any = None, method: str = "GET", **more: Any) -> Refusal:
    """Return the refusal of something that is not in the ledger."""
    return Refusal(path, body, None, "", "not-found", 404, method, **more)


_LEDGER = [
    *_about(
        "/v1/datasets",
        _DATASET,
        ({"name": "a/b"}, "/name", "must begin with a letter"),
        ({"size": 0}, "/size", "must be ≥ 1"),
        ({"size": "few"}, "/size", "must be a valid integer"),
        ({"budget": {"epsilon": -1, "delta": 1e-5}}, "/budget/epsilon", "must be > 0"),
        ({"budget": {"epsilon": "x", "delta": 1e-5}}, "/budget/epsilon", "must be a valid number"),
        ({"budget": {"epsilon": 1, "delta": 2}}, "/budget/delta", "must be < 1"),
        ({"budget": {"epsilon": 1}}, "/budget/delta", "is required"),
        ({"filter": "best"}, "/filter", "must be 'reference', 'renyi', 'either' or 'addition'"),
        *(
            ({"filter": name, "budget": {"epsilon": 1, "delta": 0}}, "/filter", "must be reference")
            for name in ("renyi", "either")
        ),
        ({"planned_mechanism": {"kind": "laplace"}}, "/planned_mechanism/noise_multiplier",
         "is required"),
    ),
    *(
        Refusal("/v1/datasets", _DATASET | weak, f"/budget/{number}", says, "weak-guarantee")
        for weak, number, says in (
            ({"budget": {"epsilon": 20.001, "delta": 1e-5}}, "epsilon", "ε = 20.001 is above 20"),
            ({"budget": {"epsilon": 1, "delta": 0.2}}, "delta", "δ = 0.2 is not below 1/9"),
        )
    ),
    Refusal("/v1/datasets", _DATASET | {"name": "patients"}, None, "choose another name",
            "name-taken", 409),
    _missing("/v1/datasets/none"),
    _missing("/v1/datasets/none/report"),
    _missing("/v1/datasets/none", None, "DELETE"),
    Refusal("/v1/datasets/closed", None, None, "close it instead", "dataset-used", 409, "DELETE"),
    _missing("/v1/datasets/none/close", {}, "POST"),
    _missing("/v1/datasets/none/quotes", {"mechanism": _FITTING}, "POST"),
    _missing("/v1/datasets/none/reservations", {"mechanism": _FITTING}, "POST"),
    _missing("/v1/datasets/none/reference", {"mechanism": _FITTING}, "POST"),
    _missing("/v1/datasets/none/reference/quotes", {"mechanism": _FITTING}, "POST"),
    *(
        Refusal(f"/v1/datasets/{name}/reference", {"mechanism": _FITTING}, None, says, code, 409)
        for name, says, code in (
            ("planned", "no reference that the owner may choose", "reference-fixed"),
            ("closed", "takes no further reservation", "dataset-closed"),
        )
    ),
    Refusal("/v1/datasets/patients/report?format=docx", None, "/query/format", method="GET"),
    *(
        Refusal(f"/v1/datasets/patients/{asked}", {"mechanism": mechanism}, pointer, says)
        for asked in ("quotes", "reservations", "reference", "reference/quotes")
        for mechanism, pointer, says in (
            (_changed(_FITTING, {"noise_multiplier": None}), "/mechanism/noise_multiplier",
             "is required"),
            (_FITTING | {"noise_multiplier": 0}, "/mechanism/noise_multiplier", "must be"),
            ({}, "/mechanism/kind", "must be one of"),
        )
    ),
    Refusal("/v1/datasets/patients/reservations", {"mechanism": _FITTING | {"steps": 10**8}}, None,
            "steps of this mechanism fit", "budget-exhausted", 409),
    Refusal("/v1/datasets/closed/reservations", {"mechanism": _FITTING}, None, "",
            "dataset-closed", 409),
    _missing("/v1/reservations/none"),
    _missing("/v1/reservations/none/certificate"),
    *(
        _missing(f"/v1/reservations/none/{action}", body, "POST")
        for action, body in (("grants", {"steps": 1, "sequence": 0}), ("renew", {}),
                             ("commit", {}), ("release", {}))
    ),
    Refusal("/v1/reservations/{open}/grants", {"steps": 0, "sequence": 0}, "/steps", "must be ≥ 1"),
    Refusal("/v1/reservations/{open}/grants", {"steps": 1, "sequence": 1}, None, "",
            "stale-sequence", 409),
    Refusal("/v1/reservations/{open}/certificate", None, None,
            "commit or release the reservation first", "reservation-open", 409, "GET"),
    *(
        Refusal(f"/v1/reservations/{{ended}}/{action}", body, None, "", "reservation-closed", 409)
        for action, body in (("grants", {"steps": 1, "sequence": 0}), ("commit", {}))
    ),
    *(
        Refusal("/v1/reservations/{open}/commit", body, pointer)
        for body, pointer in (({"clip_norm": 0}, "/clip_norm"),
                              ({"model_sha256": "AB"}, "/model_sha256"), ({"other": 1}, "/other"))
    ),
    *_about(
        "/v1/keys",
        {"scopes": ["run"], "name": "k"},
        ({"scopes": ["boss"]}, "/scopes/0", "must be"),
        ({"scopes": []}, "/scopes", ""),
        ({"name": "x" * 201}, "/name", ""),
        ({"datasets": ["a/b"]}, "/datasets/0", ""),
        ({"team": "a b"}, "/team", ""),
        ({"expires_in_seconds": -86400}, "/expires_in_seconds", "must be"),
        ({"expires_in_seconds": "soon"}, "/expires_in_seconds", "must be"),
        ({"requests_per_minute": 0.5}, "/requests_per_minute", "must be"),
    ),
    _missing("/v1/keys/none", None, "DELETE"),
    Refusal("/v1/datasets/patients/caps/teams/a", {"share": 2}, "/share", "must be",
            method="PUT"),
    # who asks
    *(
        Refusal(path, body, None, "", "unauthenticated", 401, method, None)
        for path, body, method in (
            ("/v1/datasets/patients", None, "GET"),
            ("/v1/datasets/patients/report", None, "GET"),
            ("/v1/datasets/patients/quotes", {"mechanism": _FITTING}, "POST"),
            ("/v1/keys", None, "GET"),
        )
    ),
    Refusal("/v1/keys", None, None, "", "forbidden", 403, "GET", Scope.RUN),
    Refusal("/v1/keys", {"scopes": ["admin"]}, None, "", "forbidden", 403, "POST", Scope.RUN),
    Refusal("/v1/datasets", _DATASET, None, "", "forbidden", 403, "POST", Scope.RUN),
    Refusal("/v1/datasets/patients", None, None, "", "forbidden", 403, "GET", Scope.MONITOR),
    Refusal("/metrics", None, None, "", "forbidden", 403, "GET", Scope.RUN),
    _missing("/v1/datasets/patients", scope=Scope.RUN, datasets=("other",)),
    _missing("/v1/reservations/{open}", scope=Scope.RUN, datasets=("other",)),
    _missing("/v1/datasets/patients/quotes", {"mechanism": _FITTING}, "POST", scope=Scope.RUN,
             datasets=("other",)),
]  # fmt: skip

REFUSALS: Final = [
    *_BODIES, *_FIELDS, *_RUNS, *_MECHANISMS, *_TARGETS, *_PLANS, *_IMPORTS, *_LEDGER,
]  # fmt: skip


# --- how other surfaces ask the same


def _find_call(row: Refusal) -> tuple[str, str]:
    """Return the call of the ledger with * for the name in its path, and the name."""
    *start, last = row.path.split("/")[1:]
    parts = [*start, last]
    name = parts[2] if len(parts) > 2 else ""
    parts[2:3] = ["*"] if name else []
    return f"{row.method} /{'/'.join(parts)}", name


def _is_run(mechanism: Any, names: Container[str]) -> bool:
    """Return whether a mechanism is a DP-SGD run all of whose fields have these names."""
    is_run = isinstance(mechanism, dict) and mechanism.get("kind") == "dp_sgd"
    return is_run and all(name in names for name in mechanism if name != "kind")


def _type(value: Any) -> str | None:
    """Return the text that a person types for a value; None if no text is read as this value."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return value
        return None  # it would be read as a number
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(value) if is_number else None


# --- the command line


@dataclass(frozen=True)
class Command:
    """A command that asks the same as a row.

    Attributes:
        words: the command with its options.
        option: the option or argument that the refusal must name; None if it need not name any.
        has_json: True if it can print the problem as JSON.
        stdin: what it reads.
    """

    words: list[str]
    option: str | None
    has_json: bool
    stdin: str | None = None


_COMMANDS: Final = {  # the calls of the ledger that have a command
    "POST /v1/datasets": "dataset create",
    "GET /v1/datasets/*": "dataset show",
    "POST /v1/datasets/*/close": "dataset close",
    "DELETE /v1/datasets/*": "dataset delete",
    "POST /v1/datasets/*/quotes": "dataset quote",
    "POST /v1/datasets/*/reference": "dataset reference",
    "POST /v1/datasets/*/reservations": "run reserve",
    "GET /v1/datasets/*/report": "report dataset",
    "GET /v1/reservations/*": "run show",
    "GET /v1/reservations/*/certificate": "run certificate",
    "POST /v1/reservations/*/grants": "run grant",
    "POST /v1/reservations/*/commit": "run commit",
    "POST /v1/reservations/*/renew": "run renew",
    "POST /v1/reservations/*/release": "run release",
    "POST /v1/keys": "keys create",
    "DELETE /v1/keys/*": "keys revoke",
}
_OTHER_NAMES: Final = {"privacy_unit": "unit", "neighbouring_relation": "relation",
                       "filter": "filter_", "planned_mechanism": "mechanism", "scopes": "scope",
                       "datasets": "dataset", "expires_in_seconds": "expires_in_days"}  # fmt: skip
_DAY: Final = 86_400


def _load_command(name: str) -> Any:
    """Return a command of the command line by its words; None if there is none."""
    first, *rest = name.split()
    if first not in get_command(cli.app).commands:  # type: ignore[attr-defined]
        return None
    found: Any = cli.load_command(first)
    for word in rest:
        found = found.commands[word]
    return found


def to_command(row: Refusal) -> Command | None:
    """Return the command that asks the same as a row; None if no command can."""
    call, name = _find_call(row)
    command = _load_command(row.question or _COMMANDS.get(call, "none"))
    if command is None or row.scope is not Scope.ADMIN or isinstance(row.body, bytes):
        return None
    parameters = {each.name: each for each in command.params}
    fields = dict(row.body or {})
    fields |= fields.pop("budget", {})
    is_run = _is_run(fields.get("mechanism"), parameters)
    if is_run:
        fields |= fields.pop("mechanism")
        del fields["kind"]
    words = [*(row.question or _COMMANDS[call]).split(), *([] if row.question else [name])]
    stdin = fields.pop("document", None)
    words += [] if stdin is None else ["-"]
    for field, value in fields.items():
        parameter = parameters.get(field) or parameters.get(_OTHER_NAMES.get(field, ""))
        is_days = field == "expires_in_seconds" and not isinstance(value, str)
        is_repeated = field in ("scopes", "datasets")
        given = value if is_repeated else [value / _DAY if is_days else value]
        texts = [_type(each) for each in given]
        if parameter is None or None in texts:
            return None
        for text in texts:
            words += [str(text)] if is_argument(parameter) else [parameter.opts[0], str(text)]
    option = _find_option(row, parameters, is_run) if row.pointer else None
    return Command([each for each in words if each], option, "as_json" in parameters, stdin)


def is_argument(parameter: Any) -> bool:
    """Return whether a parameter of a command is an argument, and no option."""
    return bool(parameter.param_type_name == "argument")


def _find_option(row: Refusal, parameters: Mapping[str, Any], is_run: bool) -> str | None:
    """Return the option or argument of a command that sets the refused field."""
    first = str(row.pointer).split("/")[1]
    if row.pointer == "/mechanism" and is_run:
        return None  # it is about the run of all options
    names = [first] if first == "mechanism" and not is_run else [row.field, first]
    for name in names:
        found = parameters.get(name) or parameters.get(_OTHER_NAMES.get(name, ""))
        if found is not None:
            return str(found.name).upper() if is_argument(found) else str(found.opts[0])
    return "the document" if first == "document" else None


# --- the pages


@dataclass(frozen=True)
class Page:
    """A request for a page that asks the same as a row.

    Attributes:
        path: the path, with its query.
        form: the fields of the form that is sent; None if the page is only opened.
        field: the field beside which the problem stands; None if the whole page is refused.
        status: the HTTP status of the page.
        has_own_words: True if the page's sentences are its own.
    """

    path: str
    form: Json | None
    field: str | None
    status: int
    has_own_words: bool = False


_PAGES: Final = {  # the calls of the ledger that have a page
    "GET /v1/datasets/*": "/datasets/*",
    "GET /v1/datasets/*/report": "/datasets/*/report",
    "POST /v1/datasets/*/quotes": "/datasets/*/quote",
    "POST /v1/datasets/*/reference/quotes": "/datasets/*/reference",
    "GET /v1/reservations/*": "/runs/*",
    "GET /v1/reservations/*/certificate": "/runs/*/certificate",
    "GET /v1/keys": "/keys",
    "POST /v1/keys": "/keys",
    "DELETE /v1/keys/*": "/keys/*/revoke",
    "POST /v1/datasets": "/datasets",
    "DELETE /v1/datasets/*": "/datasets/*/delete",
}
_CHOICES: Final = {**calculator_form.CHOICES, **plan_form.CHOICES}


def to_page(row: Refusal) -> Page | None:
    """Return the page that asks the same as a row; None if no page can."""
    is_message = row.question and (row.code != "invalid-request" or row.field == row.question)
    if isinstance(row.body, bytes) or is_message or row.scope is Scope.MONITOR:
        return None  # no problem beside a field; a key that may not sign in
    body = dict(row.body or {})
    match row.question:
        case "epsilon" | "compare":
            query, field = _query_run(body.pop("mechanism", None), row)
            return _open("/", query | _fill(body, ("delta",), calculator_form.FIELDS), field)
        case "noise-multiplier" | "steps":
            return _open("/", _fill(body, (), calculator_form.FIELDS), row.field)
        case "plan":
            needed = ("epsilon", "delta", "dataset_size", "epochs")
            return _open("/plan", _fill(body, needed, plan_form.FIELDS), row.field)
        case "import":
            fields = _fill(body, ("delta",), {**import_page.FIELDS, import_page.DOCUMENT: None})
            return Page("/import", fields, str(row.pointer).split("/")[1], 200)
    return _to_ledger_page(row, body)


def _to_ledger_page(row: Refusal, body: Json) -> Page | None:
    """Return the page that asks the same of the ledger; None if no page can."""
    call, name = _find_call(row)
    if call not in _PAGES:
        return None
    path = _PAGES[call].replace("*", name)
    if call.startswith("GET"):
        return Page(path, None, None, row.status)
    if call.endswith("quotes"):
        if "reference" in call and row.pointer:
            return None  # the quote page shows it
        query, field = _query_run(body["mechanism"], row)
        return _open(path, query, field) if row.pointer else Page(path, None, None, row.status)
    if call.endswith("keys"):
        return None if "requests_per_minute" in body else _send_key(row, body)
    if call.startswith("DELETE"):
        return Page(path, {"once": str(row)}, None, row.status)
    body |= body.pop("budget")
    planned = body.pop("planned_mechanism", None)
    form = {field: _type(value) for field, value in body.items()} | {"once": str(row)}
    if planned is not None:
        form |= {"planned": "planned", "kind": "json", "mechanism": json.dumps(planned)}
        return Page(path, form, "mechanism", 422)
    if row.status == 403:
        return Page(path, form, None, 403)
    return Page(path, form, row.field or "name", 422, has_own_words=True)


def _send_key(row: Refusal, body: Json) -> Page:
    """Return the form for a new key."""
    lifetime = body.pop("expires_in_seconds", "")
    days = lifetime if isinstance(lifetime, str) else str(lifetime / _DAY)
    names = " ".join(body.pop("datasets", []))
    form = body | {"days": days, "datasets": names, "reach": "listed" if names else "all"}
    if row.pointer is None:
        return Page("/keys", form, None, row.status)
    field = row.pointer.split("/")[1].replace("expires_in_seconds", "days")
    return Page("/keys", form, field, 422, has_own_words=True)


def _open(path: str, query: Json, field: str | None) -> Page | None:
    """Return a page that is opened with a query; None if a field of it is not on the page."""
    known = all(
        text is not None and (name not in _CHOICES or text in _CHOICES[name].options)
        for name, text in query.items()
    )
    return (
        Page(f"{path}?{urlencode(query)}", None, field, 200) if known and field in query else None
    )


def _fill(body: Json, needed: Iterable[str], known: Container[str]) -> Json:
    """Return a form's fields: what is needed and left out is blank, what is unknown is None."""
    typed = {
        name: _type(value) if name in known or name in _CHOICES else None
        for name, value in body.items()
    }
    return dict.fromkeys(needed, "") | typed


def _query_run(mechanism: Any, row: Refusal) -> tuple[Json, str | None]:
    """Return the fields of a form that describe a mechanism, and the field of the problem."""
    if not _is_run(mechanism, RUN_FIELDS):
        return {"kind": "json", "mechanism": json.dumps(mechanism)}, "mechanism"
    by_sizes, by_epochs = "dataset_size" in mechanism, "epochs" in mechanism
    rate = ("dataset_size", "batch_size") if by_sizes else ("sample_rate",)
    needed = ("noise_multiplier", *rate, "epochs" if by_epochs else "steps")
    given = {name: value for name, value in mechanism.items() if name != "kind"}
    if set(given) - {*needed, "sampling"}:
        return {row.field: None}, None  # a form shows one of two ways to say it
    chosen = {"batches": "sizes" if by_sizes else "rate", "length": needed[-1]}
    return chosen | _fill(given, needed, RUN_FIELDS), row.field


# --- functions: of the typed client and of the package

_CLIENT: Final[Mapping[str, Callable[[AccountingService, str, Json], Any]]] = {
    "GET /v1/datasets/*": lambda service, name, _: service.dataset(name),
    "POST /v1/datasets/*/close": lambda service, name, _: service.close_dataset(name),
    "POST /v1/datasets/*/reference": lambda service, name, body: service.set_reference(
        name, **body
    ),
    "POST /v1/datasets/*/reference/quotes": lambda service, name, body: service.quote_reference(
        name, **body
    ),
    "DELETE /v1/datasets/*": lambda service, name, _: service.delete_dataset(name),
    "POST /v1/datasets/*/quotes": lambda service, name, body: service.quote(name, **body),
    "POST /v1/datasets/*/reservations": lambda service, name, body: service.reserve(name, **body),
    "GET /v1/reservations/*": lambda service, name, _: service.reservation(name),
    "GET /v1/reservations/*/certificate": lambda service, name, _: service.certificate(_run(name)),
    "POST /v1/reservations/*/grants": lambda service, name, body: service.grant(
        _run(name, body["sequence"]), body["steps"]
    ),
    "POST /v1/reservations/*/renew": lambda service, name, _: service.renew(_run(name)),
    "POST /v1/reservations/*/release": lambda service, name, _: service.release(_run(name)),
    # without facts: a client that is refused with some asks again without them
    "POST /v1/reservations/*/commit": lambda service, name, _: service.commit(_run(name)),
}


def _run(identifier: str, granted: int = 0) -> Reservation:
    """Return a reservation as a client holds it."""
    return Reservation(identifier, "open", 100, granted)


def to_client_call(row: Refusal) -> Callable[[AccountingService], Any] | None:
    """Return a call of the typed client that asks the same as a row; None if no call can."""
    call, name = _find_call(row)
    if isinstance(row.body, bytes) or (row.body is None and row.question):
        return None
    if row.question is None:
        asked = None if call.endswith("commit") and row.body else _CLIENT.get(call)
        return None if asked is None else lambda service: asked(service, name, row.body or {})
    method = getattr(AccountingService, row.question.replace("-", "_"), None)
    arguments = dict(row.body)
    if row.question == "curve":
        arguments["run"] = arguments.pop("mechanism")
    if method is None or not _can_take(partial(method, None), arguments, _list_further(method)):
        return None
    needed = {"mechanism", "delta", "epsilon"} & inspect.signature(method).parameters.keys()
    return (lambda service: method(service, **arguments)) if needed <= set(arguments) else None


def _list_further(method: Callable[..., Any]) -> Container[str]:
    """Return the names of the arguments that a method of the client takes by a typed dictionary."""
    hints = get_type_hints(method)
    return get_args(hints["arguments"])[0].__annotations__ if "arguments" in hints else ()


def to_function_call(row: Refusal) -> Callable[[], Any] | None:
    """Return a call of a function of the package that asks the same as a row; None if none can."""
    function = getattr(accountant_service, (row.question or "").replace("-", "_"), None)
    if function is None or not isinstance(row.body, dict):
        return None
    arguments = dict(row.body)
    if _is_run(arguments.get("mechanism"), inspect.signature(function).parameters):
        arguments |= arguments.pop("mechanism")
        del arguments["kind"]
    return partial(function, **arguments) if _can_take(function, arguments, ()) else None


def _can_take(function: Callable[..., Any], arguments: Json, others: Container[str]) -> bool:
    """Return whether a function takes these arguments; `others` are those of its **parameter."""
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError:
        return False
    return None not in arguments.values() and all(
        name in signature.parameters or name in others for name in arguments
    )
