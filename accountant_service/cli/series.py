"""The commands `accountant series`: datasets of data that grows, one for each period."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from accountant_service.cli.access import LedgerAccess, call_ledger
from accountant_service.cli.datasets import (
    NEW_OPTIONS,
    AcceptWeak,
    Delta,
    Epsilon,
    FilterName,
    Relation,
    Size,
    Unit,
    describe_budget,
    describe_new,
    describe_shares,
    describe_template,
)
from accountant_service.cli.encoding import spell
from accountant_service.cli.mechanism_options import (
    Mechanisms,
    PlanOptions,
    parse_count,
    takes_plan,
)
from accountant_service.cli.printing import AsJson, print_rows
from accountant_service.cli.problems import run_or_exit, validate
from accountant_service.writing import number_format

series_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Keep data that grows as a dataset for each period, and see the last ones together.",
    epilog="With ACCOUNTANT_API_KEY these commands ask the service at ACCOUNTANT_SERVICE; without "
    "it they open the ledger's database.",
)
COMMANDS: Final = {"series": series_app}
Json = dict[str, Any]
Name = Annotated[str, typer.Argument(help="The name of the series.")]


@series_app.command("create")
def create(
    name: Name,
    epsilon: Epsilon = None,
    delta: Delta = None,
    unit: Unit = None,
    relation: Relation = None,
    filter_: FilterName = None,
    mechanism: Mechanisms = None,
    accept_weak: AcceptWeak = False,
    as_json: AsJson = False,
) -> None:
    """Create a series: the budget that each of its datasets gets. It can never be changed."""
    from accountant_service.api.ledger_schemas import SeriesAddress, SeriesRequest

    options = NEW_OPTIONS | {"/mechanism": "--mechanism"}

    def build() -> Json:
        """Return the request body that the options describe."""
        validate(SeriesAddress, {"name": name})
        body = describe_template(epsilon, delta, unit, relation, filter_, mechanism, accept_weak)
        validate(SeriesRequest, body).to_template()
        return body

    body = run_or_exit(build, options, as_json=as_json)  # first: a mistake begins no ledger
    found = call_ledger(
        lambda ledger: ledger.create_series(name, body), options, as_json=as_json, create=True
    )
    print(json.dumps(found) if as_json else "\n".join(_describe(found)))


@series_app.command("add")
def add(
    name: Name,
    label: Annotated[str, typer.Argument(help="The rest of the dataset's name, such as 2026-10.")],
    size: Size = None,
    as_json: AsJson = False,
) -> None:
    """Create the next dataset of a series, NAME-LABEL; a repeat changes nothing."""
    from accountant_service.api.ledger_schemas import SeriesAddress, SeriesDatasetRequest

    body = {} if size is None else {"size": size}
    options = {
        "/name": "NAME", "/size": "--size", "/label": "LABEL", "/path/label": "LABEL"
    }  # fmt: skip

    def check() -> None:
        """Refuse names and sizes that no dataset may have."""
        validate(SeriesAddress, {"name": name, "label": label})
        validate(SeriesDatasetRequest, body)

    run_or_exit(check, options, as_json=as_json)
    found = call_ledger(
        lambda ledger: ledger.add_to_series(name, label, body), options, as_json=as_json
    )
    if as_json:
        print(json.dumps(found))
    elif "admits" in found:
        print("\n".join(describe_new(found)))
    else:
        print(f"{found['name']} was created before, with {found['size']} records")


@series_app.command("list")
def list_series(as_json: AsJson = False) -> None:
    """List the series with their budgets."""
    found = call_ledger(lambda ledger: ledger.list_series(), {}, as_json=as_json)
    if as_json:
        print(json.dumps(found))
        return
    rows = [
        {"series": each["name"], "budget of each": describe_budget(each["budget"])}
        | {"datasets": each["dataset_count"], "last": each["last_dataset"] or "–"}
        for each in found
    ]
    print_rows(rows, ["series", "budget of each", "datasets", "last"], "Series", False)


@series_app.command("show")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show a series: its template, the number of its datasets, and its caps."""
    found = call_ledger(lambda ledger: ledger.get_series(name), {}, as_json=as_json)
    print(json.dumps(found) if as_json else "\n".join(_describe(found)))


def _describe(series: Json) -> Iterator[str]:
    """Yield the lines of text that describe a series."""
    yield (
        f"{series['name']}: each dataset has {describe_budget(series['budget'])}; privacy unit "
        f"{series['privacy_unit']}, {series['neighbouring_relation']}"
    )
    last = f", the last is {series['last_dataset']}" if series["last_dataset"] else ""
    yield f"datasets: {series['dataset_count']}{last}"
    for cap in series["caps"]:
        holder = f"team {cap['team']}" if cap["team"] else f"key {cap['key']}"
        share = number_format.round_nearest(cap["share"])
        yield f"cap: {holder} may take {share} of each budget"


@series_app.command("window")
@takes_plan
def window(
    name: Name,
    last: Annotated[
        Any,
        typer.Option(
            "--last",
            parser=parse_count,
            metavar="INTEGER",
            help="How many datasets; 12 by default.",
        ),
    ] = None,
    names: Annotated[
        bool, typer.Option("--names", help="Print the names alone, for `run reserve`.")
    ] = False,
    *,
    plan: PlanOptions,
    as_json: AsJson = False,
) -> None:
    """Show the last datasets of a series; with a plan, what it would take of each of them."""
    from accountant_service.api.ledger_schemas import WindowBody

    def ask(ledger: LedgerAccess) -> Json:
        """Return the window and, if a plan is given, its quote."""
        count = 12 if last is None else last
        validate(WindowBody, {"last": count})
        found = ledger.find_window(name, count)
        if not (plan.has_run or plan.texts):
            return found
        mechanism = plan.build(lambda: int(found["size"]))
        listed = [each["name"] for each in found["items"]]
        return found | {"quote": ledger.quote_jointly(listed, {"mechanism": mechanism})}

    pointers = plan.map_pointers() | {"/last": "--last"}
    found = call_ledger(ask, pointers, as_json=as_json)
    if as_json:
        print(json.dumps(found))
    elif names:
        print(" ".join(each["name"] for each in found["items"]))
    else:
        _print_window(found)


def _print_window(window: Json) -> None:
    """Print the last datasets of a series, what a plan takes of each, and what they prove."""
    quotes = {each["dataset"]: each for each in window.get("quote", {}).get("items", [])}
    rows = []
    for each in window["items"]:
        row = {"dataset": each["name"], "records": each["size"], "state": each["state"]}
        row |= {"left": describe_shares(each)["left"]}
        if quotes:
            share = quotes[each["name"]]["share_of_budget"]
            taken = "–" if share is None else f"{number_format.round_up(100 * share, 3)} %"
            row |= {"this run": taken}
        rows.append(row)
    columns = ["dataset", "records", "state", "left", *(["this run"] if quotes else [])]
    print_rows(rows, columns, f"The last {len(rows)} datasets of {window['series']}", False)
    print("\n".join(map(spell, _describe_window(window))))


def _describe_window(window: Json) -> Iterator[str]:
    """Yield the lines of text about all datasets of a window together."""
    if quote := window.get("quote"):
        yield "the run fits all of them" if quote["fits"] else "the run does not fit all of them"
        steps, sigma = quote["affordable"]["steps"], quote["affordable"]["noise_multiplier"]
        if steps is not None:
            yield f"steps with this noise: {steps} fit all of them"
        if sigma is not None:
            yield f"noise for all steps: σ = {number_format.round_up(sigma)} is enough"
    one, together = window["protection"]["one"], window["protection"]["all"]
    yield f"proved for a person in one dataset: {_describe_protection(one)}"
    yield f"proved for a person in all of them: {_describe_protection(together)}"


def _describe_protection(claim: Json | None) -> str:
    """Return ε and δ in words, rounded up."""
    if claim is None:
        return "nothing"
    epsilon, delta = (number_format.round_up(claim[name]) for name in ("epsilon", "delta"))
    return f"ε = {epsilon}, δ = {delta}"
