"""Balls-in-bins sampling against the service: the trainer's commands, and other frameworks."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch.utils.data import DataLoader

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from tests.support.helpers import nightly
from tests.support.lazy_modules import LazyModule
from tests.support.ledger_client import LedgerClient
from tests.support.training_bench import Bench
from training_client.budget import Budget, LedgerBudget
from training_client.client import AccountingService
from training_client.errors import BudgetExhaustedError, NoGuaranteeError, ServiceUnreachableError
from training_client.plan import Plan
from training_client.private_step.sampling import BallsInBinsSampler

programs = LazyModule("tests.integration.frameworks")
integration = LazyModule("training_client.integrations.opacus.accountant")
RECORDS, BATCH = 400, 20
BINS = RECORDS // BATCH
PLAN = Plan.balls_in_bins(RECORDS, BINS, 1.0, 1.0)
DELTA = 1e-5

pytestmark = [
    pytest.mark.slow,  # importing the frameworks takes ten seconds
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),  # noise is drawn by torch in tests
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # inputs are data
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning
]


def epsilon_of(plan: Plan, steps: int) -> float:
    return calculator.epsilon(mechanisms.from_json(plan.mechanism(steps)), DELTA).epsilon


# --- commands


BALLS = ("--sampling", "balls_in_bins")


def test_a_run_claims_whole_epochs_and_needs_less_noise_than_by_poisson(bench: Bench) -> None:
    """30 steps of 20 batches an epoch are two epochs."""
    noise = {}
    for sampling in ("balls_in_bins", "poisson"):
        done = bench.run("--steps", "40", "--sampling", sampling, "--json")
        assert done.exit_code == 0, done.output
        claim = bench.read("privacy.json")
        noise[sampling] = claim["mechanism"]["noise_multiplier"]
        assert claim["mechanism"]["sampling"] == claim["sampling"] == sampling
        assert (claim["steps"], claim["mechanism"]["steps"]) == (40, 40)
        assert 1.99 < claim["epsilon"] <= 2.0
    done = bench.run(*BALLS)
    assert done.exit_code == 0, done.output
    assert "40 steps are 2 epochs of 20 batches, of 20 records on average" in done.output
    assert bench.read("privacy.json")["mechanism"]["noise_multiplier"] == noise["balls_in_bins"]
    assert noise["balls_in_bins"] != noise["poisson"]


def test_batches_need_not_divide_the_records(bench: Bench) -> None:
    bench.give(3.0)
    more = ("--batch-size", "150", *BALLS, "--noise-multiplier", "4", "--dataset", bench.name)
    assert bench.run(*more, "--steps", "7").exit_code == 0
    claim = bench.read("certificate.json")
    assert claim["mechanism"]["sample_rate"] == 1 / 3
    assert claim["mechanism"]["steps"] == 9
    assert claim["steps"] == 3  # epochs are what a ledger charges


def test_a_run_that_died_within_an_epoch_goes_on_with_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block grants 13 of 20 epochs of four batches; the rest of them is lost."""
    bench.give(3.0)
    genuine, drawn = BallsInBinsSampler.draw, []

    def draw(sampler: BallsInBinsSampler) -> torch.Tensor:
        drawn.append(genuine(sampler))
        if len(drawn) == 7:
            raise KeyboardInterrupt
        return drawn[-1]

    monkeypatch.setattr(BallsInBinsSampler, "draw", draw)
    more = ("--batch-size", "110", "--steps", "77", *BALLS, "--dataset", bench.name)
    died = bench.run(*more, "--noise-multiplier", "6", "--checkpoint-every", "3")
    assert died.exit_code == 130, died.output
    kept = torch.load(bench.folder / "checkpoint.pt", weights_only=True)
    assert kept["steps"] == 6
    assert "left" not in kept  # the bins are secret, and are not needed
    bench.asked.clear()
    other = bench.train("run", "--resume", "--sampling", "poisson")
    assert other.exit_code == 2
    assert "--sampling balls_in_bins" in other.output
    again = bench.run("--resume", *more)
    assert again.exit_code == 0, again.output
    assert "52 of 80 were granted and stay spent" in again.output
    grants = [body for path, body in bench.asked if path.endswith("/grants")]
    assert grants == [{"steps": 7, "sequence": 13}]
    assert len(drawn) == 7 + 7 * 4
    for at in range(7, len(drawn), 4):
        assert sorted(torch.cat(drawn[at : at + 4]).tolist()) == list(range(400))
    assert bench.read("certificate.json")["steps"] == 20
    assert bench.read("privacy.json")["steps"] == 80


def test_a_ledger_that_is_too_small_says_how_many_steps_fit(bench: Bench) -> None:
    bench.give(1.0)
    done = bench.run(*BALLS, "--dataset", bench.name, "--noise-multiplier", "1.5", "--steps", "400")
    assert done.exit_code == 3
    fit = int(done.output.replace("\n", " ").split("of '")[1].split(". ")[1].split()[0])
    assert fit % 20 == 0
    assert epsilon_of(Plan.balls_in_bins(400, 20, 1.0, 1.5), fit) <= 1.0


def test_optimizers_are_compared_with_it(bench: Bench, tmp_path: Path) -> None:
    shown = str(tmp_path / "a.png")
    more = ("--batch-size", "20", "--hidden", "4", "--steps", "30", *BALLS, "--json")
    done = bench.train("compare", "dp_sgd", "adadp", *more, "--output", shown)
    assert done.exit_code == 0, done.output
    for curve in json.loads(done.stdout):
        assert curve["plan"]["sampling"] == "balls_in_bins"
        assert curve["steps"][-1] == 40


# --- frameworks


def private(**options: Any) -> Any:
    """A model with a loader of balls in bins."""
    return programs.Private(balls_in_bins=True, **options)


def remote(transport: Any, **options: Any) -> Any:
    """A model of an engine whose accountant is the service."""
    integration.connect(transport=transport)
    return private(accountant="remote", **options)


def train(model: Any, batches: Any = None) -> None:
    """Make a step with each of some batches; by default with those of one pass."""
    for batch in model.loader if batches is None else batches:
        programs.step(model, batch)


def epochs(service: AccountingService, fit: int) -> Budget:
    return Budget(service, PLAN, epsilon_of(PLAN, fit * BINS), DELTA)


def test_the_epochs_that_fit_are_made_and_no_other(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    model = private()
    framework.fit(model, epochs(service, 3), tmp_path)
    assert model.sgd.made == 3 * BINS
    assert model.untouched_since
    claim = json.loads((tmp_path / "privacy.json").read_text())
    assert (claim["steps"], claim["mechanism"]["steps"]) == (60, 60)
    assert claim["sampling"] == "balls_in_bins"


def test_a_ledger_charges_epochs_and_a_pass_that_ended_early_as_one(
    ledger: LedgerClient, tmp_path: Path
) -> None:
    name = ledger.patients
    held = ledger.reserve(name, PLAN.mechanism(4 * BINS))
    budget = partial(LedgerBudget, ledger, PLAN, name, DELTA, block=BINS, block_max=BINS)
    model, first = private(), budget(held)
    gate = model.gated(first)
    for steps in (3, 1):  # a pass that is left after three steps, and another
        for batch in islice(model.loader, steps):
            gate.permit_step()
            programs.step(model, batch)
    assert (gate.steps, first.reservation.steps_granted) == (BINS + 1, 2)
    another = private()
    programs.InHuggingFace().fit(another, budget(first.reservation), tmp_path)
    assert another.sgd.made == 2 * BINS
    claim = json.loads((tmp_path / "certificate.json").read_text())
    assert claim["steps"] == 4


def test_one_batch_may_be_split(service: AccountingService) -> None:
    plan = Plan.balls_in_bins(RECORDS, 200, 1.0, 1.0)
    model = private(batch_size=2)
    parts = model.split(1)
    gate = model.gated(Budget(service, plan, 99.0, DELTA), parts)
    for part in parts:  # of empty batches, and of batches of several records
        gate.permit_step()
        programs.step(model, part)
    assert model.sgd.made == gate.steps == 200


def test_an_epoch_ends_when_another_pass_begins(service: AccountingService) -> None:
    model = private()
    gate = model.gated(epochs(service, 3))
    first, second = iter(model.loader), iter(model.loader)
    for batches in (first, second):
        batch = next(batches)
        gate.permit_step()
        programs.step(model, batch)
    with pytest.raises(NoGuaranteeError, match="another pass over the loader has begun"):
        next(first)


@pytest.mark.parametrize("workers", [2, nightly(0)])
def test_an_engine_charges_whole_epochs(transport: Any, workers: int) -> None:
    limit = epsilon_of(PLAN, 3 * BINS)
    integration.connect(epsilon=limit, delta=DELTA, transport=transport, block=1)
    model = private(accountant="remote", workers=workers)
    for steps in (BINS, 3):
        train(model, islice(model.loader, steps))
    assert model.engine.get_epsilon(DELTA) == epsilon_of(PLAN, 2 * BINS)  # the second as a whole
    assert model.engine.accountant.history == [(1.0, 1 / BINS, 2 * BINS, "balls_in_bins")]
    train(model)
    with pytest.raises(BudgetExhaustedError, match="60 steps are made"):
        train(model)
    assert model.sgd.made == BINS + 3 + BINS
    assert model.engine.get_epsilon(DELTA) == limit


@pytest.mark.parametrize("reserves", [False, True])
def test_an_epoch_whose_charge_was_refused_has_no_step(
    reserves: bool, ledger: LedgerClient, transport: Any
) -> None:
    """The loop goes on after each refusal."""
    if reserves:
        held = ledger.reserve(ledger.patients, PLAN.mechanism(2 * BINS))
        budget = LedgerBudget(ledger, PLAN, ledger.patients, DELTA, held, block=BINS)
        integration.connect_ledger(budget)
    else:
        limit = epsilon_of(PLAN, 2 * BINS)
        integration.connect(epsilon=limit, delta=DELTA, transport=transport, block=BINS)
    model, refused = private(accountant="remote"), 0
    for _ in range(4):
        for batch in model.loader:
            try:
                programs.step(model, batch)
            except BudgetExhaustedError:
                refused += 1
    assert (model.sgd.made, refused) == (2 * BINS, 2 * BINS)
    assert model.untouched_since
    assert model.engine.accountant.made == 2 * BINS


def test_an_epoch_is_charged_at_its_first_step_that_the_service_permits(
    transport: httpx.MockTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is away when the epoch begins, and comes back within it."""
    monkeypatch.setattr("training_client.client.time.sleep", lambda _: None)
    away = False

    def handle(request: httpx.Request) -> httpx.Response:
        if away:
            raise httpx.ConnectError("gone")
        return transport.handle_request(request)

    integration.connect(delta=DELTA, transport=httpx.MockTransport(handle), block=BINS)
    model = private(accountant="remote")
    for epoch in range(2):
        for number, batch in enumerate(model.loader):
            away = epoch == 1 and number < 3
            with suppress(ServiceUnreachableError):
                programs.step(model, batch)
    assert model.sgd.made == BINS + BINS - 3
    assert model.engine.accountant.made == 2 * BINS
    assert model.engine.get_epsilon(DELTA) == epsilon_of(PLAN, 2 * BINS)


def test_after_loading_a_checkpoint_the_rest_of_an_epoch_is_charged(transport: Any) -> None:
    """It was charged as a step of the model that the checkpoint's replaces."""
    model = remote(transport)
    batches = iter(model.loader)
    programs.step(model, next(batches))
    accountant = model.engine.accountant
    history = [(1.0, 1 / BINS, 10 * BINS, "balls_in_bins")]
    accountant.load_state_dict(accountant.state_dict() | {"history": history})
    programs.step(model, next(batches))
    assert accountant.made == 11 * BINS


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_epochs_that_ended_early_count_when_training_is_resumed(
    service: AccountingService, tmp_path: Path
) -> None:
    """Lightning's checkpoint counts 5 steps of each; charged are all 20."""
    early = {"limit_train_batches": 5}
    programs.InLightning().fit(private(), epochs(service, 6), tmp_path, epochs=4, **early)
    model = private()
    programs.InLightning().fit(model, epochs(service, 6), tmp_path, resume=True, **early)
    assert model.sgd.made == 2 * 5


def test_a_step_is_of_the_epoch_that_its_batch_was_drawn_in(service: AccountingService) -> None:
    """Also if the gate is asked before the batch is drawn."""
    model = private()
    gate = model.gated(epochs(service, 1))
    batch = next(iter(model.loader))
    gate.permit_step()
    programs.step(model, batch)
    gate.permit_step()
    batch = next(iter(model.loader))
    with pytest.raises(BudgetExhaustedError):
        programs.step(model, batch)
    assert model.sgd.made == 1


def test_noise_does_not_change_within_an_epoch(transport: Any) -> None:
    model = remote(transport)
    batches = iter(model.loader)
    programs.step(model, next(batches))
    model.optimizer.noise_multiplier = 1.5
    second = next(batches)
    with pytest.raises(NoGuaranteeError, match="change parameters between epochs"):
        programs.step(model, second)
    assert model.sgd.made == 1
    model.engine.accountant.load_state_dict(model.engine.accountant.state_dict())
    train(model)
    rows = [(row[0], row[2]) for row in model.engine.accountant.history]
    assert rows == [(1.0, BINS), (1.5, BINS)]


def test_shuffled_batches_are_refused_with_the_way_out(transport: Any) -> None:
    """The program that the error describes works."""
    integration.connect(transport=transport)
    net = programs.Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    loader: Any = DataLoader(programs.Records(), batch_size=BATCH, shuffle=True)
    usual = {"module": net, "optimizer": sgd, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    engine = programs.PrivacyEngine(accountant="remote")
    with pytest.raises(NoGuaranteeError, match="balls_in_bins_loader") as refused:
        engine.make_private(data_loader=loader, poisson_sampling=False, wrap_model=False, **usual)
    line = "loader = balls_in_bins_loader(loader)"
    assert line in str(refused.value)
    assert "poisson_sampling=False" in str(refused.value)
    names: dict[str, Any] = {
        "loader": loader,
        "balls_in_bins_loader": programs.balls_in_bins_loader,
    }
    exec(line, names)
    engine = programs.PrivacyEngine(accountant="remote")
    net = programs.Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    usual |= {"module": net, "optimizer": sgd, "data_loader": names["loader"]}
    engine.make_private(poisson_sampling=False, wrap_model=False, **usual)


def test_a_loader_gives_each_record_once_an_epoch_and_other_batches_in_the_next() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(60))
    loader = programs.balls_in_bins_loader(DataLoader(data, batch_size=7))
    passes = [[batch[0] for batch in loader] for _ in range(2)]
    for batches in passes:
        assert len(batches) == len(loader) == 9
        assert sorted(torch.cat(batches).tolist()) == list(range(60))
    assert not all(map(torch.equal, *passes))
    assert len(programs.balls_in_bins_loader(DataLoader(data, batch_size=7), bins=4)) == 4


def test_the_first_batch_may_be_empty() -> None:
    two = torch.utils.data.Subset(programs.Records(), [0, 1])
    loader = programs.balls_in_bins_loader(DataLoader(two), bins=50)
    for _ in range(3):
        batches = list(loader)
        assert {tuple(batch["examples"].shape[1:]) for batch in batches} == {(6,)}
        assert sum(len(batch["labels"]) for batch in batches) == 2


def test_a_plan_of_another_sampling_is_refused(service: AccountingService) -> None:
    poisson = Budget(service, Plan(RECORDS, 1 / BINS, 1.0, 1.0), 2.0, DELTA)
    model = private()
    with pytest.raises(NoGuaranteeError, match="draws batches by balls_in_bins, and poisson"):
        model.gated(poisson)


def test_steps_without_a_batch_of_their_own_are_refused(transport: Any) -> None:
    model = remote(transport)
    batches = iter(model.loader)
    programs.step(model, next(batches))
    with suppress(NoGuaranteeError):
        programs.step(
            model, {"examples": torch.randn(3, 6), "labels": torch.zeros(3, dtype=torch.long)}
        )
    assert model.sgd.made == 1
    next(batches)  # and no step
    with pytest.raises(NoGuaranteeError, match="had no step"):
        next(batches)
