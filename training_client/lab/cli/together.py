"""`accountant-train together`: A-DDP, federated training with a budget each (papers/003)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.markup import escape
from torch import nn

from training_client.budget import Budget
from training_client.client import AccountingService, Json
from training_client.errors import BudgetExhaustedError, DataError, ServiceRefusedError
from training_client.lab.checkpoint import Checkpoint
from training_client.lab.cli.app import (
    EXITS,
    announce_public_data,
    command,
    exit_on_error,
    make_console,
)
from training_client.lab.cli.lists import print_table
from training_client.lab.cli.options import (
    BUDGET,
    TRAINING,
    RunOptions,
    expand_options,
    require_between,
)
from training_client.lab.cli.output_folders import lock_folder, require_unlocked, require_writable
from training_client.lab.cli.progress import Report, progress_bar
from training_client.lab.data import Dataset, declared_public, load, require_size, train_size
from training_client.lab.federated import Participant, Round, train_federated
from training_client.lab.models import MODELS, Objective, make_model
from training_client.lab.number_format import format_score, format_upper_bound
from training_client.lab.schedules import parse_schedule, schedules_of
from training_client.lab.train import evaluate
from training_client.plan import Plan
from training_client.run_report import (
    MODEL,
    bind_to_model,
    clear_earlier_run,
    describe_missing_guarantee,
    write_json,
)

_OPTIONS: Final = (
    "service", "api_key", "clip_norm", "noise_schedule", "clip_schedule",
    "learning_rate_schedule", "model", "hidden", "device", "data", "data_dir", "size", "as_json",
)  # fmt: skip


def _per_participant(meaning: str) -> Any:
    """Declare an option with one value for all participants, or one value each."""
    return typer.Option(
        help=f"{meaning} One value for all, or one for each, separated by commas.",
        rich_help_panel=BUDGET,
    )


@dataclass(frozen=True, slots=True)
class _Protocol:
    """A method's rule of papers/003 for its noise and its end.

    Attributes:
        method: the composition theorem that σ comes from.
        is_sampled: whether that theorem is applied to sampled steps.
        ends: whether the method ends with the planned rounds, rather than with the budget.
        in_passes: whether each record is in one round of every 1/q.
    """

    method: str
    is_sampled: bool = False
    ends: bool = True
    in_passes: bool = False


_PLANNED_ROUNDS_MAX: Final = 100_000
_PROTOCOLS: Final = {
    "a-ddp": _Protocol("advanced_composition", ends=False),
    "sgd-maj": _Protocol("basic_composition"),
    "sgd-adv": _Protocol("advanced_composition", is_sampled=True),
    "sgd-pass": _Protocol("advanced_composition", in_passes=True),
}


def _check_protocol(name: str | None) -> str | None:
    """Return a method of papers/003; raise if it is unknown."""
    if name is not None and name not in _PROTOCOLS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(_PROTOCOLS)}")
    return name


@dataclass(frozen=True, kw_only=True)
class FederatedOptions:
    """The command-line options that only the command `together` has."""

    participants: Annotated[
        int,
        typer.Option(
            min=1, max=10_000, help="Participants; each gets an equal part of the training data."
        ),
    ] = 5
    epsilon: Annotated[str, _per_participant("Privacy budget ε.")] = "1"
    delta: Annotated[str, _per_participant("Privacy budget δ.")] = "1e-5"
    sample_rate: Annotated[str, _per_participant("Sample rate q.")] = "0.01"
    noise_multiplier: Annotated[str, _per_participant("Noise multiplier σ.")] = "1"
    noise_for: Annotated[
        str | None,
        typer.Option(
            callback=_check_protocol,
            help="Take σ from ε, δ and --planned-rounds as papers/003 does: a-ddp (line 5 of its "
            "Algorithm 1), or its baselines sgd-maj, sgd-adv and sgd-pass.",
            rich_help_panel=BUDGET,
        ),
    ] = None
    planned_rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="T of papers/003, for --noise-for: rounds, for sgd-pass uses of each record.",
            rich_help_panel=BUDGET,
        ),
    ] = 10
    momentum: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.9999,
            help="β of the server's moving average of the noisy means.",
            rich_help_panel=TRAINING,
        ),
    ] = 0.0
    method: Annotated[
        str,
        typer.Option(
            help="Accounting method: pld, or gaussian_sampling_composition as in the paper.",
            rich_help_panel=BUDGET,
        ),
    ] = "pld"
    rounds: Annotated[
        int, typer.Option(min=1, help="The maximum number of rounds.", rich_help_panel=TRAINING)
    ] = 1000
    learning_rate: Annotated[
        float,
        typer.Option(
            "--learning-rate",
            "--lr",
            callback=require_between(0, math.inf),
            help="Learning rate η of the averaged gradient.",
            rich_help_panel=TRAINING,
        ),
    ] = 0.5
    output: Annotated[
        Path | None,
        typer.Option(
            help="The folder for the model and its guarantees; by default runs/together-DATA."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A participant's result; its field names are the keys of the JSON output.

    Attributes:
        name: the participant.
        records: the number of their records.
        rounds: the number of rounds that they took part in.
        dropped_out: the round in which they left; None if they would have continued.
        epsilon: the ε spent, at `delta`.
        delta: the δ of their budget.
        status: the status of the claim, such as proven.
        privacy: the file with the claim.
    """

    name: str
    records: int
    rounds: int
    dropped_out: int | None
    epsilon: float
    delta: float
    status: str
    privacy: str


def together(federated: FederatedOptions, options: RunOptions) -> None:
    """Train one model from the noisy gradients of several participants (federated learning).

    Each participant has an equal part of the training set, and leaves when its
    own budget is spent; training ends when nobody is left. The privacy unit is
    a record of one participant. Schedules go from round to round.
    """
    console = make_console(as_json=options.as_json)
    folder = federated.output or Path("runs") / f"together-{options.data}"
    with (
        exit_on_error(),
        AccountingService(options.service, api_key=options.api_key) as accounting,
    ):
        require_writable(folder)
        require_unlocked(folder)
        Checkpoint.require_none(folder)
        size = train_size(options.data, options.size)
        federated = replace(federated, rounds=_count_rounds(federated))
        budgets = _make_budgets(accounting, federated, options, size)
        _require_applicable_method(budgets[0], federated)
        _require_first_round(budgets)
        data = require_size(load(options.data, options.data_dir), size)
        run = _FederatedRun.divide_data(data.to(torch.device(options.device)), options, budgets)
        announce_public_data(run.declared_public, console)
        with lock_folder(folder):
            Checkpoint.require_none(folder)  # again: another run may have died here since
            clear_earlier_run(folder)
            with progress_bar(console, federated.rounds, "round") as bar:
                report = _report_departures(console, [each.name for each in run.participants], bar)
                rounds = run.train(federated, folder, report)
            ended_early = rounds < federated.rounds
            outcomes = [
                run.outcome(each, folder, left=ended_early or each.steps < rounds)
                for each in run.participants
            ]
        measure, score = run.objective.measure, evaluate(run.model, run.data, run.objective)
    if options.as_json:
        schedules = schedules_of(budgets[0].plan)
        result = {"rounds": rounds, "schedules": schedules, "measure": measure, "score": score}
        print(json.dumps(result | {"participants": [asdict(each) for each in outcomes]}))
        return
    _print_outcomes(console, outcomes, rounds)
    console.print(
        f"Test {measure} [bold]{format_score(measure, score)}[/]; model and guarantees are in "
        f"{escape(str(folder))}/"
    )


command(
    "together",
    epilog=f"{EXITS}. Example: accountant-train together --participants 5 --data adult "
    "--epsilon 0.5,1,1,2,4",
)(expand_options(together, only=_OPTIONS, model="linear", hidden=100, data="adult"))


def _make_budgets(
    accounting: AccountingService, federated: FederatedOptions, options: RunOptions, size: int
) -> list[Budget]:
    """Create each participant's budget, planned for an equal part of the records."""
    records = size // federated.participants
    rates, noises, epsilons, deltas = (
        _parse_each(option, getattr(federated, option), federated.participants)
        for option in ("sample_rate", "noise_multiplier", "epsilon", "delta")
    )
    protocol = _PROTOCOLS.get(federated.noise_for or "")
    if federated.planned_rounds > _PLANNED_ROUNDS_MAX:
        raise DataError(f"--planned-rounds must be at most {_PLANNED_ROUNDS_MAX}")
    if protocol is not None:
        _require_no_own_noise(federated, options)
        noises = _find_noises(accounting, protocol, federated.planned_rounds,
                              list(zip(rates, epsilons, deltas, strict=True)))  # fmt: skip
    schedules = _parse_schedules(options, federated.rounds)
    return [
        Budget(
            accounting,
            replace(
                _make_plan(records, rate, options.clip_norm, noise, protocol), **schedules
            ),
            epsilon, delta, method=federated.method, steps=federated.rounds,
        )
        for rate, noise, epsilon, delta in zip(rates, noises, epsilons, deltas, strict=True)
    ]  # fmt: skip


def _require_no_own_noise(federated: FederatedOptions, options: RunOptions) -> None:
    """Raise if noise is given beside --noise-for, which computes it."""
    given = federated.noise_multiplier != FederatedOptions.noise_multiplier
    if given or options.noise_schedule is not None:
        name = "--noise-multiplier" if given else "--noise-schedule"
        raise DataError(f"--noise-for computes the noise: leave out {name}")


def _find_noises(
    accounting: AccountingService,
    protocol: _Protocol,
    rounds: int,
    targets: Sequence[tuple[float, float, float]],
) -> list[float]:
    """Return σ for each (q, ε, δ): the least whose T rounds satisfy it by the protocol's theorem.

    The service solves for it. With T equal steps that is line 5 of Algorithm 1 and its Analytic
    Gaussian Mechanism: (ε, δ) is split over T steps, and σ is the least of one.
    """

    @cache
    def find(rate: float, epsilon: float, delta: float) -> float:
        """Return the noise of one target; participants with the same target ask once."""
        return accounting.noise_multiplier(
            epsilon=epsilon, delta=delta, method=protocol.method, steps=rounds,
            sample_rate=rate if protocol.is_sampled else 1.0,
        )  # fmt: skip

    return [find(*target) for target in targets]


def _count_rounds(federated: FederatedOptions) -> int:
    """Return the planned end of training: --rounds, or where the protocol ends before."""
    protocol, planned = _PROTOCOLS.get(federated.noise_for or ""), federated.planned_rounds
    if protocol is None or not protocol.ends:
        return federated.rounds
    if protocol.in_passes:
        rates = set(_parse_each("sample_rate", federated.sample_rate, federated.participants))
        if len(rates) > 1:
            raise DataError("sgd-pass passes over all records alike: give one --sample-rate")
        planned *= round(1 / rates.pop())
    return min(federated.rounds, planned)


def _parse_schedules(options: RunOptions, rounds: int) -> dict[str, Any]:
    """Parse the schedules, by the names of the plan's attributes; a curve ends with the rounds.

    Raises:
        DataError: a schedule has more steps than there are rounds.
    """
    found = {name: parse_schedule(name, text, rounds) for name, text in options.schedules.items()}
    for name, schedule in found.items():
        named = sum(steps for steps, _ in schedule.pieces)
        if named > rounds:
            raise DataError(
                f"--{name.replace('_', '-')} names {named} steps, one for each round, and there "
                f"are {rounds} rounds: shorten it, or raise --rounds"
            )
    return found


def _parse_each(option: str, text: str, participants: int) -> list[float]:
    """Parse an option with one number for all participants, or one for each.

    Raises:
        DataError: the number of values is wrong, or one is not a finite number above 0.
    """
    name = f"--{option.replace('_', '-')}"
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise DataError(
            f"{name} {text!r} is not a number, or numbers separated by commas"
        ) from None
    if len(values) not in (1, participants) or not all(0 < value < math.inf for value in values):
        raise DataError(
            f"{name} {text!r} must be one number above 0, or one for each of {participants} "
            "participants"
        )
    if option == "sample_rate" and max(values) > 1:
        raise DataError(f"{name} must be in (0, 1], got {max(values):g}")
    return values * (participants // len(values))


def _make_plan(
    records: int, rate: float, clip_norm: float, noise: float, protocol: _Protocol | None
) -> Plan:
    """Return the plan of one participant's rounds: records, sample rate, clip norm and noise."""
    try:
        if protocol is not None and protocol.in_passes:
            return Plan.balls_in_bins(records, round(1 / rate), clip_norm, noise)
        return Plan(records, rate, clip_norm, noise)
    except ValueError:
        raise DataError(
            "--participants must not be more than the records of the training set"
        ) from None


def _require_applicable_method(budget: Budget, federated: FederatedOptions) -> None:
    """Raise if the accounting method cannot account for scheduled noise, before a round is made.

    Otherwise training would end, without a claim, in the round in which the noise changes.
    """
    if budget.plan.noise_schedule is None:
        return
    try:
        budget.planned_guarantee(federated.rounds)
    except ServiceRefusedError as error:
        if error.code == "method-not-applicable":
            raise DataError(
                f"--method {federated.method} cannot account for --noise-schedule: use --method "
                f"pld, or leave out one of them ({error})"
            ) from None
        if error.code != "no-finite-epsilon":  # a participant may leave before
            raise


def _require_first_round(budgets: Sequence[Budget]) -> None:
    """Raise unless some participant's budget covers a round; called before data are read."""
    refusals: list[BudgetExhaustedError] = []
    for budget in budgets:
        try:
            budget.begin()
        except BudgetExhaustedError as error:
            refusals.append(error)
    if len(refusals) == len(budgets):
        raise BudgetExhaustedError(
            f"no participant's budget allows a round; for participant-1, {refusals[0]}. Raise "
            "--noise-multiplier or --epsilon, or lower --sample-rate"
        )


@dataclass(frozen=True)
class _FederatedRun:
    """The participants of a federated run, its model and its data."""

    participants: list[Participant]
    model: nn.Module
    objective: Objective
    data: Dataset
    declared_public: str | None

    @classmethod
    def divide_data(
        cls, data: Dataset, options: RunOptions, budgets: Sequence[Budget]
    ) -> _FederatedRun:
        """Create one participant per budget, each with an equal part of the training set."""
        model = make_model(options.model, data, options.hidden)
        objective = MODELS[options.model].objective
        data = objective.with_targets(data)
        participants = []
        for at, budget in enumerate(budgets):
            size = budget.plan.dataset_size
            part = data.select(slice(at * size, (at + 1) * size))
            participants.append(
                Participant(
                    f"participant-{at + 1}", model, part.train_examples, part.train_labels, budget
                )
            )
        return cls(participants, model, objective, data, declared_public(options.data))

    def train(
        self, federated: FederatedOptions, folder: Path, report: Callable[[Round], None]
    ) -> int:
        """Train until every budget is spent; save the model even if the service fails."""
        try:
            return train_federated(
                self.model,
                self.participants,
                self.objective.loss,
                learning_rate=federated.learning_rate,
                learning_rate_schedule=self.participants[0].budget.plan.learning_rate_schedule,
                momentum=federated.momentum,
                rounds_max=federated.rounds,
                report=report,
            )
        finally:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), folder / MODEL)
            for each in self.participants:  # until the service is asked for the claims
                self._write_claim(each, describe_missing_guarantee(each.steps), folder)

    def outcome(self, participant: Participant, folder: Path, *, left: bool) -> _Outcome:
        """Get a participant's privacy guarantee from the service, write it, return the result."""
        claim = participant.guarantee()
        file = self._write_claim(participant, claim.document, folder)
        return _Outcome(
            participant.name,
            participant.budget.plan.dataset_size,
            participant.steps,
            participant.steps + 1 if left else None,
            claim.epsilon,
            claim.delta,
            claim.status,
            str(file),
        )

    def _write_claim(self, participant: Participant, claim: Json, folder: Path) -> Path:
        """Write a participant's privacy claim as JSON to its folder; return the file."""
        file = folder / f"privacy-{participant.name}.json"
        write_json(file, bind_to_model(claim, folder, self.declared_public))
        return file


def _report_departures(
    console: Console, names: Sequence[str], bar: Report
) -> Callable[[Round], None]:
    """Return a callback that prints, after each round, which participants have left."""
    active = list(names)

    def report(completed: Round) -> None:
        """Print the participants that left before a round; update the progress bar."""
        for name in active:
            if name not in completed.took_part:
                console.print(f"round {completed.number}: {name} has dropped out")
        active[:] = completed.took_part
        bar(completed.number, f"{len(active)} of {len(names)} take part")

    return report


def _print_outcomes(console: Console, outcomes: Sequence[_Outcome], rounds: int) -> None:
    """Print a table of the participants' results."""
    columns = ("participant", "records", "rounds", "dropped out in", "ε spent", "δ", "status")
    rows = [
        (
            each.name,
            f"{each.records:,}",
            str(each.rounds),
            "–" if each.dropped_out is None else str(each.dropped_out),
            format_upper_bound(each.epsilon),
            f"{format_upper_bound(each.delta)}",
            each.status,
        )
        for each in outcomes
    ]
    print_table(f"{rounds} rounds", columns, rows, console)
