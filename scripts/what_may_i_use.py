"""Write the tables of docs/what-may-i-use.md: what is proved for which sampling and noise.

python -m scripts.what_may_i_use           # prints the tables
python -m scripts.what_may_i_use --write   # writes them into the page

Each cell is an answer of the calculator about one example: whether a method has a formula, and
whether all hypotheses of its theorem hold, depends on the kinds and not on the numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import NeighbouringRelation, Status
from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.errors import AccountingError
from accountant_service.mechanisms import MechanismError
from scripts.page_parts import DOCS, write_part
from training_client.plan import SAMPLINGS as TRAINED

PAGE: Final = DOCS / "what-may-i-use.md"
DELTA: Final = 1e-5
RECORDS: Final = 6000
RUN: Final = {"kind": "dp_sgd", "noise_multiplier": 4.0, "dataset_size": RECORDS, "epochs": 1}
SAMPLINGS: Final = ("poisson", "balls_in_bins", "fixed_size", "shuffled", "none")
NOISES: Final[Mapping[str, Mapping[str, Any]]] = {
    "Gaussian": {"kind": "gaussian", "noise_multiplier": 4.0},
    "Laplace": {"kind": "laplace", "noise_multiplier": 4.0},
    "discrete Gaussian": {"kind": "discrete_gaussian", "noise_std": 4.0, "sensitivity": 1},
    "discrete Laplace": {"kind": "discrete_laplace", "scale": 5.0, "sensitivity": 1},
    "truncated Laplace": {
        "kind": "truncated_laplace", "scale": 2.0, "bound": 60.0, "sensitivity": 1.0,
    },
    "randomized response": {
        "kind": "randomized_response", "categories": 4, "flip_probability": 0.6,
    },
    "exponential mechanism": {"kind": "exponential", "epsilon": 0.5},
    "permute and flip": {"kind": "permute_and_flip", "epsilon": 0.5},
}  # fmt: skip
SAMPLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "all records": {},
    "Poisson sample": {"kind": "poisson_sampled", "sample_rate": 0.01},
    "fixed-size sample": {"kind": "fixed_size_sampled", "dataset_size": RECORDS, "batch_size": 60},
    "balls in bins": {"kind": "balls_in_bins", "bins": 100},
}


def render_runs() -> Iterator[str]:
    """Yield the table of training runs: method × sampling, with the relations that are proved."""
    heads = [f"`{each}`" for each in SAMPLINGS]
    yield f"| | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|\n"
    trained = ["yes" if each in TRAINED else "" for each in SAMPLINGS]
    yield f"| trained here | {' | '.join(trained)} |\n"
    for method in ACCOUNTANTS:
        cells = [_describe_method(method, sampling) for sampling in SAMPLINGS]
        yield f"| [{method}](accountants/{method}.md) | {' | '.join(cells)} |\n"


def _describe_method(method: str, sampling: str) -> str:
    """Return the relations under which a method proves ε of a run, or that it is an estimate."""
    batch_size = RECORDS if sampling == "none" else 60
    run = mechanisms.from_json(RUN | {"batch_size": batch_size, "sampling": sampling})
    statuses = {each: _find_status(run, method, each) for each in NeighbouringRelation}
    if set(statuses.values()) == {None}:
        return ""
    return _list_relations(statuses) or "estimate"


def _find_status(
    mechanism: mechanisms.Mechanism, method: str, relation: NeighbouringRelation
) -> Status | None:
    """Return the status of a method's ε; None if it has no formula."""
    try:
        return calculator.epsilon(mechanism, DELTA, method, relation).status
    except AccountingError:
        return None


def render_noises() -> Iterator[str]:
    """Yield the table of releases: noise × sampling, with the relations that `pld` proves."""
    yield f"| noise | {' | '.join(SAMPLES)} |\n|---{'|---' * len(SAMPLES)}|\n"
    for name, noise in NOISES.items():
        cells = [_describe_release({**sample, "mechanism": noise} if sample else noise)
                 for sample in SAMPLES.values()]  # fmt: skip
        yield f"| {' | '.join([name, *cells])} |\n"


def _describe_release(document: Mapping[str, Any]) -> str:
    """Return the relations under which `pld` proves ε of a mechanism."""
    try:
        mechanism = mechanisms.from_json(document)
    except MechanismError:
        return ""
    return _list_relations(
        {each: _find_status(mechanism, "pld", each) for each in NeighbouringRelation}
    )


def _list_relations(statuses: Mapping[NeighbouringRelation, Status | None]) -> str:
    """Return the relations whose status is proven, by their first words."""
    proved = [each for each, status in statuses.items() if status is Status.PROVEN]
    if len(proved) == len(NeighbouringRelation):
        return "all"
    return ", ".join(each.removesuffix("_one").replace("_", " ") for each in proved)


def render() -> str:
    """Return both tables as Markdown."""
    runs = "".join(render_runs())
    noises = "".join(render_noises())
    return f"## A training run\n\n{runs}\n## A release\n\n{noises}".strip()


def main() -> None:
    """Print the tables, or write them into the page."""
    tables = render()
    if "--write" not in sys.argv:
        print(tables)
        return
    write_part(PAGE, "tables", tables)


if __name__ == "__main__":
    main()
