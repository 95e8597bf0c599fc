"""The commands `accountant dataset`: create, show, quote, close and delete datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.cli.access import LedgerAccess, call_ledger
from accountant_service.cli.encoding import spell
from accountant_service.cli.mechanism_options import (
    REQUIRED,
    Mechanisms,
    PlanOptions,
    join_mechanisms,
    parse_count,
    parse_number,
    read_mechanisms,
    takes_plan,
)
from accountant_service.cli.printing import AsJson, print_rows
from accountant_service.cli.problems import run_or_exit, validate
from accountant_service.ledger.filter_names import DEFAULT_FILTER, FILTERS
from accountant_service.writing import number_format
from accountant_service.writing.number_format import round_nearest as shown

dataset_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Create, list, show, quote, close and delete datasets.",
    epilog="With ACCOUNTANT_API_KEY these commands ask the service at ACCOUNTANT_SERVICE; without "
    "it they open the ledger's database.",
)
COMMANDS: Final = {"dataset": dataset_app}
Json = dict[str, Any]
Name = Annotated[str, typer.Argument(help="The dataset's name.")]
_FALSE_POSITIVE_RATE: Final = 0.01  # of the attack in the explanation of a budget
_EPSILON_SHOWN_ABOVE, _EXPOSED_SHOWN_ABOVE = 10.0, 0.1  # smaller budgets need no explanation
NEW_OPTIONS: Final = {
    "/name": "NAME",
    "/size": "--size",
    "/budget/epsilon": "--epsilon",
    "/budget/delta": "--delta",
    "/privacy_unit": "--unit",
    "/neighbouring_relation": "--relation",
    "/filter": "--filter",
    "/planned_mechanism": "--mechanism",
    "/accept_weak": "--accept-weak",
}


Size = Annotated[
    Any,
    typer.Option(
        "--size", "-n", parser=parse_count, metavar="INTEGER", help=f"Records in it.{REQUIRED}"
    ),
]
Epsilon = Annotated[
    Any,
    typer.Option(
        "--epsilon", "-E", parser=parse_number, metavar="NUMBER", help=f"ε of the budget.{REQUIRED}"
    ),
]
Delta = Annotated[
    Any,
    typer.Option(
        "--delta",
        "-d",
        parser=parse_number,
        metavar="NUMBER",
        help="δ of the budget, such as 1e-6; far below one over the number of records." + REQUIRED,
    ),
]
Unit = Annotated[str | None, typer.Option(help="What one record stands for, such as person.")]
Relation = Annotated[
    str | None, typer.Option(help="One of " + ", ".join(NeighbouringRelation) + ".")
]
FilterName = Annotated[
    str | None,
    typer.Option("--filter", help=f"One of {', '.join(FILTERS)}; {DEFAULT_FILTER} unless given."),
]
AcceptWeak = Annotated[
    bool,
    typer.Option("--accept-weak", help="Allow ε above 20, or δ not below one over the records."),
]


def describe_template(
    epsilon: Any,
    delta: Any,
    unit: str | None,
    relation: str | None,
    filter_: str | None,
    mechanism: list[str] | None,
    accept_weak: bool,
) -> Json:
    """Return the part of a request that datasets of a series have in common, from options."""
    given = {
        "privacy_unit": unit,
        "neighbouring_relation": relation,
        "filter": filter_,
        "accept_weak": accept_weak or None,
    }
    budget = {"epsilon": epsilon, "delta": delta}
    body: Json = {name: value for name, value in given.items() if value is not None}
    body["budget"] = {name: value for name, value in budget.items() if value is not None}
    if mechanism:
        body["planned_mechanism"] = join_mechanisms(read_mechanisms(mechanism))
    return body


@dataset_app.command("create")
def create(
    name: Name,
    size: Size = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    unit: Unit = None,
    relation: Relation = None,
    filter_: FilterName = None,
    mechanism: Mechanisms = None,
    accept_weak: AcceptWeak = False,
    as_json: AsJson = False,
) -> None:
    """Create a dataset with a budget. The budget can never be changed."""
    from accountant_service.api.ledger_schemas import DatasetRequest

    def build() -> Json:
        """Return the request body that the options describe."""
        given = {"name": name} if size is None else {"name": name, "size": size}
        body = given | describe_template(
            epsilon, delta, unit, relation, filter_, mechanism, accept_weak
        )
        validate(DatasetRequest, body).to_new_dataset()
        return body

    options = NEW_OPTIONS | {"/mechanism": "--mechanism"}
    body = run_or_exit(build, options, as_json=as_json)  # first: a mistake begins no ledger
    answer = call_ledger(
        lambda ledger: ledger.create_dataset(body), options, as_json=as_json, create=True
    )
    if as_json:
        print(json.dumps(answer))
    else:
        print("\n".join(describe_new(answer)))


def describe_new(dataset: Json) -> Iterator[str]:
    """Yield the lines of text that describe a new dataset."""
    yield f"created {_describe_heading(dataset)}"
    for run in dataset["admits"]:
        yield f"enough for a single run of {_describe_run(run)}"
    yield from _describe_weak_promise(dataset["size"], dataset["budget"])
    for warning in dataset["warnings"]:
        yield f"warning: {warning}"


def _describe_weak_promise(size: int, budget: Json) -> Iterator[str]:
    """Yield what a large budget allows; nothing for one that protects well."""
    from accountant_service.accounting.guarantee import count_exposed_records
    from accountant_service.disclosure.attack_rates import (
        bound_attacks_by_epsilon,
        count_per_thousand,
    )

    exposed = count_exposed_records(size, budget["delta"])
    if budget["epsilon"] <= _EPSILON_SHOWN_ABOVE and exposed <= _EXPOSED_SHOWN_ABOVE:
        return
    attack = bound_attacks_by_epsilon(budget["epsilon"], budget["delta"])
    found = attack.detection(_FALSE_POSITIVE_RATE).true_positive_rate
    yield (
        f"this allows: an attacker with {count_per_thousand(_FALSE_POSITIVE_RATE)} false alarms in "
        f"1000 may find {count_per_thousand(found)} of 1000 records; by chance, "
        f"{number_format.round_up(exposed, 3)} of {size} whole records may be published"
    )
    yield "while it is unused, `accountant dataset delete` takes it back"


def _describe_heading(dataset: Json) -> str:
    """Return a dataset's name, size, unit and budget in one line."""
    return (
        f"{dataset['name']}: {dataset['size']} records, privacy unit {dataset['privacy_unit']}, "
        f"{describe_budget(dataset['budget'])}, {dataset['neighbouring_relation']}"
    )


def describe_budget(budget: Json) -> str:
    """Return a budget's ε and δ in words."""
    epsilon = number_format.round_nearest(budget["epsilon"])
    return f"ε = {epsilon}, δ = {shown(budget['delta'])}"


def describe_shares(dataset: Json) -> dict[str, str]:
    """Return the shares of a budget that are spent, held and left, as percentages."""
    return {
        "spent": f"{number_format.round_up(100 * dataset['spent']['share'], 3)} %",
        "held": f"{number_format.round_up(100 * dataset['held']['share'], 3)} %",
        "left": f"{number_format.round_down(100 * dataset['remaining']['share'], 3)} %",
    }


@dataset_app.command("list")
def list_datasets(as_json: AsJson = False) -> None:
    """List the datasets with their budgets."""
    found = call_ledger(lambda ledger: ledger.list_datasets(), {}, as_json=as_json)
    if as_json:
        print(json.dumps(found))
        return
    rows = [
        {"dataset": each["name"], "records": each["size"]}
        | {"budget": describe_budget(each["budget"]), "state": each["state"]}
        | describe_shares(each)
        for each in found
    ]
    columns = ["dataset", "records", "budget", "spent", "held", "left", "state"]
    print_rows(rows, columns, "Datasets", False)


@dataset_app.command("show")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show a dataset: its budget, and what is spent, held and left."""
    found = call_ledger(lambda ledger: ledger.get_dataset(name), {"": "NAME"}, as_json=as_json)
    if as_json:
        print(json.dumps(found))
        return
    print(_describe_heading(found))
    if found["state"] == "closed":
        print(describe_closing(found))
    for part, share in describe_shares(found).items():
        print(f"{part}: {share}{_describe_steps(found, part)}")
    print(f"filter: {found['accounting']['description']}")
    print(f"entries: {found['version']}")


def _describe_steps(dataset: Json, part: str) -> str:
    """Describe a part of a budget in reference steps; empty if it is not counted in them."""
    amount = dataset["remaining" if part == "left" else part]
    steps = amount.get("reference_steps")
    is_counted = dataset["accounting"].get("reference") is not None
    return f", {steps} reference steps" if steps is not None and is_counted else ""


@dataset_app.command("close")
def close(name: Name, as_json: AsJson = False) -> None:
    """Close a dataset for good: it takes no further run. Runs that hold budget may go on."""
    found = call_ledger(lambda ledger: ledger.close_dataset(name), {"": "NAME"}, as_json=as_json)
    if as_json:
        print(json.dumps(found))
        return
    print(f"{name}: {describe_closing(found)}")
    share = number_format.round_up(100 * found["held"]["share"], 3)
    if found["held"]["share"]:
        print(f"open runs hold {share} % of the budget: they may go on, or see `run release`")


@dataset_app.command("reference")
@takes_plan
def reference(
    name: Name,
    plan: PlanOptions,
    is_quote: Annotated[
        bool, typer.Option("--quote", help="Only tell what would fit; set nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Choose or confirm the reference: the run in whose steps the rest of the budget is counted."""

    def send(ledger: LedgerAccess) -> Json:
        """Return the ledger's answer about the reference that the options describe."""
        from accountant_service.api.ledger_schemas import ReferenceRequest

        body = {"mechanism": plan.build(lambda: int(ledger.get_dataset(name)["size"]))}
        validate(ReferenceRequest, body)
        ask = ledger.quote_reference if is_quote else ledger.set_reference
        return ask(name, body)

    answer = call_ledger(send, plan.map_pointers(), as_json=as_json)
    print(json.dumps(answer) if as_json else "\n".join(map(spell, describe_reference(answer))))


def describe_reference(answer: Json) -> Iterator[str]:
    """Yield the lines of text that describe a chosen reference, or a quote for one."""
    yield answer["accounting"]["description"]
    if "admits" in answer:
        for run in answer["admits"]:
            yield f"left for a single run of {_describe_run(run)}"
        return
    for before, after in zip(answer["before"], answer["after"], strict=True):
        now = "an unknown number" if before["steps"] is None else before["steps"]
        yield f"left for a single run of {_describe_run(after)}; now {now}"


def _describe_run(run: Json) -> str:
    """Return an example run, and how many of its steps fit, in words."""
    from accountant_service import mechanisms

    count = "an unknown number of" if run["steps"] is None else run["steps"]
    return f"{count} steps of {mechanisms.from_json(run['step']).describe_step()}"


@dataset_app.command("delete")
def delete(name: Name, as_json: AsJson = False) -> None:
    """Delete a dataset that was never used, such as one with a mistake; its name is free then."""
    found = call_ledger(lambda ledger: ledger.delete_dataset(name), {"": "NAME"}, as_json=as_json)
    print(json.dumps(found) if as_json else f"deleted {_describe_heading(found)}")


def describe_closing(dataset: Json) -> str:
    """Return in words when a dataset was closed to further runs."""
    from accountant_service.ledger.certificate import format_time

    return f"closed since {format_time(int(1e6 * dataset['closed_at']))}: takes no further run"


@dataset_app.command("quote")
@takes_plan
def quote(
    name: Name,
    plan: PlanOptions,
    as_json: AsJson = False,
) -> None:
    """Quote a plan: whether it fits what is left, and what would fit. Charges nothing."""

    def send(ledger: LedgerAccess) -> Json:
        """Return the ledger's quote for the plan that the options describe."""
        from accountant_service.api.ledger_schemas import QuoteRequest

        body = {"mechanism": plan.build(lambda: int(ledger.get_dataset(name)["size"]))}
        validate(QuoteRequest, body)
        return ledger.quote(name, body)

    answer = call_ledger(send, plan.map_pointers(), as_json=as_json)
    print(json.dumps(answer) if as_json else "\n".join(map(spell, describe_quote(answer))))


def describe_quote(quote: Json) -> Iterator[str]:
    """Yield the lines of text that describe a quote."""
    share = quote["share_of_budget"]
    taken = "" if share is None else f"{number_format.round_up(100 * share, 3)} %"
    yield f"fits; it takes {taken} of the budget" if quote["fits"] else "does not fit"
    left, alone = quote["affordable"]["steps"], quote["affordable_alone"]
    if left is not None:
        line = f"steps with this noise: {left} fit what is left"
        yield line if alone is None else f"{line}; as the only plan of the budget, {alone} would"
    sigma = quote["affordable"]["noise_multiplier"]
    if sigma is not None:
        yield f"noise for all steps: σ = {number_format.round_up(sigma)} is enough"
    claim = quote["guarantee"]
    if claim is not None:
        delta = number_format.round_nearest(claim["delta"])
        yield f"this run alone: ε = {number_format.round_up(claim['epsilon'])} at δ = {delta}"
