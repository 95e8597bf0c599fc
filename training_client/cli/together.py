"""`accountant-train together`: A-DDP, people with data and a budget of their own (papers/003)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from torch import nn

from training_client.budget import Budget
from training_client.checkpoint import Checkpoint
from training_client.claims import MODEL, clear, of_model, unasked, write_json
from training_client.cli import options as take
from training_client.cli.app import EXITS, app, stopping
from training_client.cli.folders import held, require_free, require_writable
from training_client.cli.listing import show
from training_client.cli.progress import Report, shown
from training_client.data import Dataset, check, declared_public, load, train_size
from training_client.digits import up
from training_client.distributed import Participant, Round, train_together
from training_client.errors import BudgetExhaustedError, DataError
from training_client.models import MODELS, make_model
from training_client.plan import Plan
from training_client.service import AccountingService, Json
from training_client.train import score


def _of_each(meaning: str) -> Any:
    """An option that says something of every participant."""
    text = f"{meaning} One value for all, or one each between commas."
    return typer.Option(help=text, rich_help_panel=take.BUDGET)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of a participant.

    Attributes:
        name: theirs.
        records: they have.
        rounds: they took part in.
        dropped_out: in which round; None if they would have gone on.
        epsilon: spent, at `delta`.
        delta: of their budget.
        status: of that claim.
        privacy: the file that says so.
    """

    name: str
    records: int
    rounds: int
    dropped_out: int | None
    epsilon: float
    delta: float
    status: str
    privacy: str


@app.command(
    epilog=f"{EXITS}. Example: accountant-train together --participants 5 --data adult "
    "--epsilon 0.5,1,1,2,4"
)
def together(
    participants: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many; the data are shared out.")
    ] = 5,
    service: take.Service = take.SERVICE,
    api_key: take.ApiKey = None,
    epsilon: Annotated[str, _of_each("ε that each may spend.")] = "1",
    delta: Annotated[str, _of_each("δ of each.")] = "1e-5",
    sample_rate: Annotated[str, _of_each("q, of their records a round.")] = "0.01",
    noise_multiplier: Annotated[str, _of_each("σ of each.")] = "1",
    method: Annotated[
        str,
        typer.Option(
            help="Of accounting: pld, or gaussian_sampling_composition as in the paper.",
            rich_help_panel=take.BUDGET,
        ),
    ] = "pld",
    rounds: Annotated[
        int, typer.Option(min=1, help="No more than so many.", rich_help_panel=take.TRAINING)
    ] = 1000,
    clip_norm: take.Clip = 1.0,
    learning_rate: Annotated[
        float,
        typer.Option(
            callback=take.between(0, math.inf),
            help="η, of the average.",
            rich_help_panel=take.TRAINING,
        ),
    ] = 0.5,
    model: take.Model = "linear",
    hidden: take.Hidden = 100,
    device: take.Device = "cpu",
    data_name: take.DataName = "adult",
    data_dir: take.DataDir = Path("data"),
    size: take.Size = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where model and guarantees go; runs/together-DATA by default."),
    ] = None,
    as_json: take.AsJson = False,
) -> None:
    """Train one model from the noisy gradients of several people, until no budget is left.

    Each has an equal part of the training set, and drops out when the own budget allows no further
    round; how many rounds there are is open. The privacy unit is a record of one of them.
    """
    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    folder = output or Path("runs") / f"together-{data_name}"
    with stopping(), AccountingService(service, api_key=api_key) as accounting:
        require_writable(folder)
        require_free(folder)
        Checkpoint.require_none(folder)
        records = train_size(data_name, size) // participants
        columns = [
            _each(text, participants) for text in (sample_rate, noise_multiplier, epsilon, delta)
        ]
        budgets = [
            Budget(
                accounting, _plan(records, q, clip_norm, noise), e, d, method=method, steps=rounds
            )
            for q, noise, e, d in zip(*columns, strict=True)
        ]
        _require_a_round(budgets)
        data = check(load(data_name, data_dir), train_size(data_name, size))
        public = declared_public(data_name)
        found = _Together.of(data.to(torch.device(device)), model, hidden, budgets, public)
        take.say_declared_public(public, console.print)
        with held(folder):
            Checkpoint.require_none(folder)  # again: another run may have died here since
            clear(folder)
            with shown(console, rounds, "round") as bar:
                watching = _watching(console, [each.name for each in found.people], bar)
                done = found.train(learning_rate, rounds, folder, watching)
            outcomes = [_outcome(each, done, rounds, folder, public) for each in found.people]
        result = found.score()
    if as_json:
        people = [asdict(each) for each in outcomes]
        print(json.dumps({"rounds": done, **result, "participants": people}))
        return
    _tell(console, outcomes, done, result, folder)


def _each(text: str, people: int) -> list[float]:
    """A number for each of them.

    Raises:
        DataError: there are more or fewer, or one is not a finite number above 0.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise DataError(f"{text!r} is not a number, or numbers between commas") from None
    if len(found) not in (1, people) or not all(0 < value < math.inf for value in found):
        raise DataError(f"{text!r} is not one number above 0, or one for each of {people}")
    return found * (people // len(found))


def _plan(records: int, rate: float, clip_norm: float, noise: float) -> Plan:
    try:
        return Plan(records, rate, clip_norm, noise)
    except ValueError as error:
        raise DataError(str(error)) from None


def _require_a_round(budgets: Sequence[Budget]) -> None:
    """Ask before any data is touched: somebody must be able to take part."""
    refusals = [refused for budget in budgets if (refused := _refusal(budget)) is not None]
    if len(refusals) == len(budgets):
        raise BudgetExhaustedError(
            f"nobody's budget allows a round; of participant-1, {refusals[0]}. Raise "
            "--noise-multiplier or --epsilon, or lower --sample-rate"
        )


def _refusal(budget: Budget) -> BudgetExhaustedError | None:
    try:
        budget.begin()
    except BudgetExhaustedError as error:
        return error
    return None


@dataclass(frozen=True)
class _Together:
    """Those who train, and what."""

    people: list[Participant]
    model: nn.Module
    data: Dataset
    name: str
    public: str | None

    @classmethod
    def of(
        cls, data: Dataset, name: str, hidden: int, budgets: Sequence[Budget], public: str | None
    ) -> _Together:
        """Share the training set out, a part of equal size for each budget."""
        model = make_model(name, data, hidden)
        aimed = MODELS[name].objective.of(data)
        people = []
        for at, budget in enumerate(budgets):
            size = budget.plan.dataset_size
            own = aimed.rows(slice(at * size, (at + 1) * size))
            people.append(
                Participant(
                    f"participant-{at + 1}", model, own.train_examples, own.train_labels, budget
                )
            )
        return cls(people, model, aimed, name, public)

    def train(
        self, learning_rate: float, rounds: int, folder: Path, report: Callable[[Round], None]
    ) -> int:
        """Rounds until nobody is left; the model is kept even if the service goes away."""
        loss = MODELS[self.name].objective.loss
        try:
            return train_together(
                self.model,
                self.people,
                loss,
                learning_rate=learning_rate,
                rounds_max=rounds,
                report=report,
            )
        finally:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), folder / MODEL)
            for each in self.people:  # until the service has been asked
                _claimed(each, unasked(each.steps), folder, self.public)

    def score(self) -> dict[str, Any]:
        """On the test set."""
        objective = MODELS[self.name].objective
        return {
            "measure": objective.measure,
            "score": score(self.model, self.data, objective),
        }


def _watching(console: Console, names: Sequence[str], bar: Report) -> Callable[[Round], None]:
    """Says who takes part, and who has dropped out, as soon as they have."""
    last = list(names)

    def report(now: Round) -> None:
        for name in last:
            if name not in now.took_part:
                console.print(f"round {now.number}: {name} has dropped out")
        last[:] = now.took_part
        bar(now.number, f"{len(last)} of {len(names)} take part")

    return report


def _claimed(person: Participant, claim: Json, folder: Path, public: str | None) -> Path:
    """Write down what may be said of a participant's part in the model."""
    file = folder / f"privacy-{person.name}.json"
    write_json(file, of_model(claim, folder, public))
    return file


def _outcome(
    person: Participant, done: int, rounds: int, folder: Path, public: str | None
) -> _Outcome:
    """Ask for the claim, and write it down."""
    claim = person.guarantee()
    file = _claimed(person, claim.document, folder, public)
    left = person.steps < done or done < rounds
    return _Outcome(
        person.name,
        person.budget.plan.dataset_size,
        person.steps,
        person.steps + 1 if left else None,
        claim.epsilon,
        claim.delta,
        claim.status,
        str(file),
    )


def _tell(
    console: Console,
    outcomes: Sequence[_Outcome],
    done: int,
    result: dict[str, Any],
    folder: Path,
) -> None:
    columns = ("participant", "records", "rounds", "dropped out in", "ε spent", "δ", "status")
    rows = [
        (
            each.name,
            f"{each.records:,}",
            str(each.rounds),
            "–" if each.dropped_out is None else str(each.dropped_out),
            up(each.epsilon),
            f"{each.delta:g}",
            each.status,
        )
        for each in outcomes
    ]
    show(f"{done} rounds", columns, rows, console)
    measure = result["measure"]
    shown = f"{result['score']:.2%}" if measure == "accuracy" else f"{result['score']:.4g}"
    console.print(
        f"Test {measure} [bold]{shown}[/]; model and guarantees are in {escape(str(folder))}/"
    )
