"""An Opacus program whose accountant is the service: nothing else is changed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accountant_service.accounting import calculator
from accountant_service.mechanisms import Composed, DpSgd
from tests.support.lazy_modules import LazyModule
from tests.support.ledger_client import LedgerClient
from training_client.budget import LedgerBudget
from training_client.client import Reservation
from training_client.errors import BudgetExhaustedError, NoGuaranteeError, ServiceUnreachableError
from training_client.plan import AdaptiveClipping, Plan, Schedule

opacus = LazyModule("opacus")
integration = LazyModule("training_client.integrations.opacus.accountant")
checks = LazyModule("training_client.integrations.opacus.checks")
samplers = LazyModule("opacus.utils.uniform_sampler")
PLAN = Plan(400, 0.05, 1.0, 1.0)
DELTA = 1e-5

ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 1.0,
}


def records(number: int = 400) -> TensorDataset:
    return TensorDataset(torch.randn(number, 6), torch.randint(0, 2, (number,)))


def program(**private: Any) -> tuple[nn.Module, Any, DataLoader[Any], Any]:
    """A training program as users of Opacus write it."""
    torch.manual_seed(1)
    net = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = opacus.PrivacyEngine(accountant="remote")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = (
            engine.make_private_with_epsilon if "target_epsilon" in private else engine.make_private
        )
        model, optimizer, loader = make(
            module=net,
            optimizer=optimizer,
            **{"data_loader": DataLoader(records(), batch_size=20), "max_grad_norm": 1.0}
            | ({} if "target_epsilon" in private else {"noise_multiplier": 1.0})
            | private,
        )
    return model, optimizer, loader, engine


def connected(transport: Any, **private: Any) -> tuple[nn.Module, Any, DataLoader[Any], Any]:
    """A program whose accountant is the service, without a limit."""
    integration.connect(transport=transport)
    return program(**private)


def step(model: nn.Module, optimizer: Any, batch: Any) -> None:
    examples, targets = batch
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(examples), targets).backward()
    optimizer.step()


def train(model: nn.Module, optimizer: Any, loader: Any, epochs: int) -> int:
    steps = 0
    for _ in range(epochs):
        for batch in loader:
            step(model, optimizer, batch)
            steps += 1
    return steps


def split(loader: Any, optimizer: Any, size: int = 4) -> Any:
    """Return the batches of a loader, split into physical batches."""
    manager = LazyModule("opacus.utils.batch_memory_manager").BatchMemoryManager
    with manager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as parts:
        return parts


@contextmanager
def refused(
    model: nn.Module, message: str, error: type[Exception] = NoGuaranteeError
) -> Iterator[None]:
    """Require an error, and that the model's parameters stay as they are."""
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(error, match=message):
        yield
    assert all(map(torch.equal, before, model.parameters()))


def epsilon_of(*runs: DpSgd) -> float:
    return calculator.epsilon(runs[0] if len(runs) == 1 else Composed(runs), DELTA).epsilon


pytestmark = [
    pytest.mark.slow,  # importing Opacus takes seconds
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),  # noise is drawn by torch in tests
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # inputs are data
]


def test_opacus_training_is_accounted_for(transport: Any, asked: list[Any]) -> None:
    model, optimizer, loader, engine = connected(transport, noise_multiplier=1.2)
    assert engine.get_epsilon(DELTA) == 0.0
    steps = train(model, optimizer, loader, 3)
    exact = calculator.epsilon(DpSgd(1.2, sample_rate=1 / 20, steps=steps), DELTA)
    assert engine.get_epsilon(DELTA) == exact.epsilon
    assert len(asked) <= steps / 50 + 2  # a block at a time
    optimizer.noise_multiplier = 2.0  # a schedule: two stretches
    next(iter(loader))
    optimizer.step_hook(optimizer)
    assert [row[2] for row in engine.accountant.history] == [steps, 1]
    assert engine.get_epsilon(DELTA) > exact.epsilon
    assert asked[-1]["mechanism"]["kind"] == "composed"


def test_a_step_beyond_the_budget_changes_nothing(transport: Any) -> None:
    fits = 37
    budget = epsilon_of(DpSgd(1.0, sample_rate=1 / 20, steps=fits))
    integration.connect(epsilon=budget, delta=DELTA, transport=transport)
    model, optimizer, loader, engine = program()
    batches = chain.from_iterable(repeat(loader))
    for _ in range(fits):
        step(model, optimizer, next(batches))
    with refused(model, "37 steps are made", BudgetExhaustedError):
        step(model, optimizer, next(batches))
    assert engine.get_epsilon(DELTA) == budget


def test_the_noise_for_a_target_is_found(transport: Any) -> None:
    model, optimizer, loader, engine = connected(
        transport, target_epsilon=3.0, target_delta=DELTA, epochs=2
    )
    train(model, optimizer, loader, 2)
    assert 2.8 < engine.get_epsilon(DELTA) <= 3.01


def test_without_a_service_no_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training_client.client.time.sleep", lambda _: None)

    def dead(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    integration.connect(transport=httpx.MockTransport(dead))
    model, optimizer, loader, _ = program()
    with refused(model, "accountant serve", ServiceUnreachableError):
        train(model, optimizer, loader, 1)


def test_an_unconnected_accountant_says_how_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    # private: a program connects and never disconnects
    monkeypatch.setattr("training_client.integrations.opacus.accountant._connection", None)
    with pytest.raises(ServiceUnreachableError, match=r"connect\(url\)"):
        opacus.PrivacyEngine(accountant="remote")


def test_a_rolled_back_checkpoint_does_not_rewind_what_was_spent(transport: Any) -> None:
    model, optimizer, loader, engine = connected(transport)
    train(model, optimizer, loader, 1)
    early = engine.accountant.state_dict()
    train(model, optimizer, loader, 1)
    spent = engine.get_epsilon(DELTA)
    engine.accountant.load_state_dict(early)
    assert engine.get_epsilon(DELTA) == spent
    fresh = integration.RemoteAccountant()
    fresh.load_state_dict(early)
    assert fresh.history == early["history"]
    late = engine.accountant.state_dict()
    fresh.load_state_dict(late)  # the same steps, and more
    assert fresh.history == late["history"]


def test_the_steps_of_another_runs_checkpoint_count_beside_those_made(
    transport: Any, tmp_path: Path
) -> None:
    """Its parameters cost what that run cost, however little this one had spent."""
    model, optimizer, loader, engine = connected(transport, noise_multiplier=0.5)
    train(model, optimizer, loader, 5)
    engine.save_checkpoint(path=tmp_path / "other.pt", module=model, optimizer=optimizer)
    cost = engine.get_epsilon(DELTA)
    model, optimizer, loader, engine = program(noise_multiplier=2.0)
    train(model, optimizer, loader, 1)
    assert engine.get_epsilon(DELTA) < cost / 2
    engine.load_checkpoint(path=tmp_path / "other.pt", module=model, optimizer=optimizer)
    assert engine.get_epsilon(DELTA) > cost
    both = calculator.epsilon(Composed((DpSgd(2.0, 0.05, 20), DpSgd(0.5, 0.05, 100))), DELTA)
    assert engine.get_epsilon(DELTA) == both.epsilon
    integration.connect(epsilon=cost, transport=transport)
    model, optimizer, loader, engine = program(noise_multiplier=2.0)
    train(model, optimizer, loader, 1)
    engine.load_checkpoint(path=tmp_path / "other.pt", module=model, optimizer=optimizer)
    with refused(model, "120 steps are made", BudgetExhaustedError):
        train(model, optimizer, loader, 1)


def test_after_a_refused_checkpoint_no_step_is_made_and_nothing_is_claimed(
    transport: Any, tmp_path: Path
) -> None:
    """Opacus loads the model before it asks the accountant, so its parameters are the other's."""
    model, optimizer, loader, engine = connected(transport)
    train(model, optimizer, loader, 1)
    own = engine.accountant.state_dict()
    foreign = {
        "module_state_dict": {name: each + 1 for name, each in model.state_dict().items()},
        "privacy_accountant_state_dict": own | {"mechanism": "rdp"},
    }
    torch.save(foreign, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match="rdp cannot be loaded"):
        engine.load_checkpoint(path=tmp_path / "foreign.pt", module=model)
    with refused(model, r"refused to load.*new PrivacyEngine"):
        engine.get_epsilon(DELTA)
    with refused(model, r"refused to load.*new PrivacyEngine"):
        train(model, optimizer, loader, 1)
    engine.accountant.load_state_dict(own)
    assert engine.accountant.made == 20


def test_a_loader_that_is_not_poisson_is_refused(transport: Any, asked: list[Any]) -> None:
    integration.connect(transport=transport)
    with pytest.raises(NoGuaranteeError, match=r"BatchSampler.*poisson_sampling=True"):
        program(poisson_sampling=False)
    with pytest.raises(NoGuaranteeError, match=r"are unknown.*data_loader="):
        integration.RemoteAccountant().get_optimizer_hook_fn(0.05)
    already = LazyModule("opacus.data_loader").DPDataLoader(records(), sample_rate=0.05)
    program(poisson_sampling=False, data_loader=already)
    assert asked == []


def test_a_refused_optimizer_changes_no_parameters(transport: Any, asked: list[Any]) -> None:
    for private, message in (
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0 "),
        ({"noise_multiplier": math.inf}, "noise_multiplier = inf"),
        ({"max_grad_norm": math.inf}, "max_grad_norm = inf"),
        ({"max_grad_norm": 0.0}, "max_grad_norm = 0 "),
        (ADAPTIVE, "adaptive.*no guarantee covers"),
        # with one record more the batch is that record: sums differ by up to twice the clip norm
        ({"rand_on_empty": True}, "rand_on_empty"),
    ):
        model, optimizer, loader, _ = connected(transport, **private)
        with refused(model, message):
            train(model, optimizer, loader, 1)
    assert asked == []


def test_the_sampler_s_own_rate_is_charged(transport: Any) -> None:
    integration.connect(transport=transport)
    loader = DataLoader(records(93), batch_size=1)  # floating point makes Opacus' a batch shorter
    model, optimizer, loader, engine = program(data_loader=loader)
    assert len(loader) == 92
    train(model, optimizer, loader, 1)
    assert engine.accountant.history == [(1.0, 1 / 93, 92)]
    # a sampler that is told its number of steps: 1/len is a tenth of its rate
    sampler = samplers.UniformWithReplacementSampler(num_samples=400, sample_rate=0.05, steps=200)
    loader = DataLoader(records(), batch_sampler=sampler)
    model, optimizer, loader, engine = program(data_loader=loader, poisson_sampling=False)
    train(model, optimizer, loader, 1)
    assert engine.accountant.history == [(1.0, 0.05, 200)]


def test_no_record_is_drawn_more_often_than_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opacus' own numbers have 24 bits, which would round q up; here 64 bits round it down."""
    rate, read = 1e-4, []

    def observed(records: int, sample_rate: float, key: bytes) -> torch.Tensor:
        read.append((records, sample_rate, key))
        return torch.tensor([3, 5])

    # private: the sampler's rows are replaced; tests/unit/test_noise_and_sampling.py has their law
    monkeypatch.setattr("training_client.integrations.opacus.batch_counting.draw_rows", observed)
    sampler = samplers.UniformWithReplacementSampler(num_samples=400, sample_rate=rate, steps=2)
    assert list(sampler) == [[3, 5], [3, 5]]
    assert [each[:2] for each in read] == 2 * [(400, rate)]
    assert len({each[2] for each in read}) == 2


def test_steps_that_a_program_skips_by_itself_are_not_charged_as_one(transport: Any) -> None:
    """Nor what a pass over split batches has left, when the loop goes on with whole ones."""
    model, optimizer, loader, engine = connected(transport)
    batches = iter(loader)
    optimizer.signal_skip_step()
    batch = next(batches)
    step(model, optimizer, batch)
    with pytest.raises(NoGuaranteeError, match="signal_skip_step"):
        step(model, optimizer, batch)
    with pytest.raises(NoGuaranteeError, match="drawn and had no step"):
        next(batches)
    model, optimizer, loader, engine = program()
    step(model, optimizer, next(iter(split(loader, optimizer, 2))))
    with pytest.raises(NoGuaranteeError, match="signal_skip_step"):
        step(model, optimizer, records()[:3])
    with pytest.raises(NoGuaranteeError, match="drawn and had no step"):
        next(iter(loader))
    assert engine.accountant.history == []


def test_no_epsilon_is_claimed_if_the_last_batch_had_no_step(transport: Any) -> None:
    model, optimizer, loader, engine = connected(transport)
    for number, batch in enumerate(loader, 1):
        if number < len(loader):
            step(model, optimizer, batch)
            assert engine.accountant.made == number
            assert engine.get_epsilon(delta=DELTA) > 0
    with pytest.raises(NoGuaranteeError, match="drawn and had no step"):
        engine.get_epsilon(delta=DELTA)
    with pytest.raises(NoGuaranteeError, match="drawn and had no step"):
        _ = engine.accountant.made  # which `settle` is given


def test_batches_that_are_split_are_one_step(transport: Any) -> None:
    model, optimizer, loader, engine = connected(transport)
    parts = split(loader, optimizer)
    assert train(model, optimizer, parts, 1) > 3 * len(loader)
    assert checks.plan_of(optimizer, parts) == checks.plan_of(optimizer, loader)
    with pytest.raises(NoGuaranteeError, match="has had its step"):
        step(model, optimizer, [torch.randn(2, 6), torch.tensor([0, 1])])
    assert engine.accountant.history == [(1.0, 0.05, 20)]


def test_a_second_step_of_a_batch_is_refused(transport: Any) -> None:
    model, optimizer, loader, engine = connected(transport)
    batches = iter(loader)
    for made in (1, 2):
        batch = next(batches)
        step(model, optimizer, batch)
        with refused(model, r"has had its step.*make one step of a batch"):
            step(model, optimizer, batch)
        assert engine.accountant.history == [(1.0, 0.05, made)]
        assert len(engine.accountant) == made


def test_a_batch_has_one_step_of_all_optimizers(transport: Any) -> None:
    integration.connect(transport=transport)
    already = LazyModule("opacus.data_loader").DPDataLoader(records(), sample_rate=0.05)
    first, second = (program(poisson_sampling=False, data_loader=already) for _ in range(2))
    batch = next(iter(already))
    step(*first[:2], batch)
    with pytest.raises(NoGuaranteeError, match="has had its step"):
        step(*second[:2], batch)


def test_there_are_as_many_steps_as_batches_whatever_loader_is_used(transport: Any) -> None:
    integration.connect(transport=transport)
    ahead = DataLoader(records(), batch_size=20, num_workers=1)
    model, optimizer, loader, engine = program(data_loader=ahead)
    assert train(model, optimizer, loader, 2) == 40
    for at, batch in enumerate(loader):
        step(model, optimizer, batch)
        if at == 7:  # with two more drawn by the worker
            break
    assert train(model, optimizer, loader, 1) == 20
    with pytest.raises(NoGuaranteeError, match="has had its step"):
        step(model, optimizer, batch)
    assert engine.accountant.made == 68


def test_accumulating_gradients_over_batches_is_refused(transport: Any) -> None:
    integration.connect(transport=transport)
    already = LazyModule("opacus.data_loader").DPDataLoader(records(), sample_rate=0.05)
    model, optimizer, loader, _ = program(poisson_sampling=False, data_loader=already)
    examples, targets = next(iter(loader))
    for _ in range(2):
        nn.functional.cross_entropy(model(examples), targets).backward()
    with pytest.raises(NoGuaranteeError, match="adds up 2 batches"):
        optimizer.step()


def test_the_divisor_must_be_the_plan_s(transport: Any) -> None:
    _, optimizer, loader, _ = connected(transport)
    plan = checks.plan_of(optimizer, loader)
    assert plan == PLAN
    checks.require_plan(optimizer, loader, plan)
    optimizer.expected_batch_size = 10
    with pytest.raises(NoGuaranteeError, match="divided by 10, the plan expects batches of 20"):
        checks.require_plan(optimizer, loader, plan)


def budget_of(
    ledger: LedgerClient, held: Reservation, plan: Plan = PLAN, **options: Any
) -> LedgerBudget:
    return LedgerBudget(ledger, plan, ledger.patients, DELTA, held, **options)


def test_a_ledger_knows_more_than_an_old_checkpoint(ledger: LedgerClient) -> None:
    reservation = ledger.reserve(ledger.patients, PLAN.mechanism(50))

    def resumed() -> tuple[nn.Module, Any, Any, Any]:
        held = ledger.reservation(reservation.identifier)
        integration.connect_ledger(budget_of(ledger, held, block=10, block_max=10))
        return program()

    model, optimizer, loader, engine = resumed()
    early = engine.accountant.state_dict() | {"history": [(1.0, 0.05, 5)]}
    assert train(model, optimizer, loader, 1) == 20
    model, optimizer, loader, engine = resumed()  # a process that died, and another
    engine.accountant.load_state_dict(early)
    assert engine.accountant.made == 20
    with pytest.raises(NoGuaranteeError, match=r"after 900 steps, .* granted only 20 of them"):
        engine.accountant.load_state_dict(early | {"history": [(1.0, 0.05, 900)]})
    with pytest.raises(NoGuaranteeError, match="refused to load"):  # nor the model loaded with it
        _ = engine.accountant.made
    engine.accountant.load_state_dict(early)
    assert engine.accountant.made == 20
    with pytest.raises(BudgetExhaustedError, match="all 50 steps"):
        train(model, optimizer, loader, 2)
    assert engine.accountant.made == 50
    assert program()[3].accountant.made == 50  # nor does a second engine
    exact = calculator.epsilon(DpSgd(1.0, sample_rate=0.05, steps=50), DELTA)
    assert engine.get_epsilon(DELTA) == exact.epsilon
    optimizer.noise_multiplier = 2.0
    next(iter(loader))
    with pytest.raises(NoGuaranteeError, match=r"noise_multiplier is 2 .* 1 in the plan"):
        optimizer.step_hook(optimizer)
    with pytest.raises(NoGuaranteeError, match="the ledger's plan is"):
        engine.accountant.step(noise_multiplier=2.0, sample_rate=0.05)


def test_two_engines_do_not_share_one_reservation(ledger: LedgerClient) -> None:
    held = ledger.reserve(ledger.patients, PLAN.mechanism(10))
    integration.connect_ledger(budget_of(ledger, held))
    first, second = program(), program()
    with pytest.raises(BudgetExhaustedError, match="all 10 steps"):
        train(*first[:3], 1)
    with pytest.raises(NoGuaranteeError, match="another run uses the same budget"):
        train(*second[:3], 1)
    assert [each[3].accountant.made for each in (first, second)] == [10, 0]


@pytest.mark.slow
def test_of_two_processes_one_asks_and_a_refusal_stops_both(tmp_path: Path) -> None:
    program = Path(__file__).with_name("two_ranks.py")
    ranks = subprocess.Popen([sys.executable, program, tmp_path], start_new_session=True)
    try:
        assert ranks.wait(timeout=240) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    first, second = ((tmp_path / f"rank{rank}.txt").read_text().splitlines() for rank in range(2))
    # ε = 1.25 holds a block of ten, then two steps more; at the gate it is asked for the last one
    questions = [10, 20, 15, 12, 22, 17, 14, 13, 10, 21, 15, 12, 13, 24, 18, 15, 13]
    assert [line for line in first if line.startswith("asked")] == [
        f"asked {steps}" for steps in questions
    ]
    assert second == [line for line in first if not line.startswith("asked")]
    assert second.count("made") == 12
    assert second[12].startswith("refused, untouched True")
    assert second[13:16] == ["at the gate", "step 1 allowed", "step 12 allowed"]
    assert second[16].startswith("step 13 refused: step 13 would exceed ε = 1.25")
    assert second[17].startswith("natively: 2 processes train")


def test_processes_that_each_draw_from_all_records_are_refused(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    integration.connect(transport=transport)
    monkeypatch.setattr("training_client.integrations.opacus.checks.world_size", lambda: 2)
    with pytest.raises(NoGuaranteeError, match="each of 2 processes would draw from all records"):
        program()


def test_a_ledger_did_not_charge_another_runs_checkpoint(ledger: LedgerClient) -> None:
    held = ledger.reserve(ledger.patients, PLAN.mechanism(50))
    integration.connect_ledger(budget_of(ledger, held))
    model, optimizer, loader, engine = program()
    assert train(model, optimizer, loader, 1) == 20
    for other in ((0.5, 0.05, 20), (1.0, 0.1, 20), (1.0, 0.05, 20, "balls_in_bins")):
        foreign = {"history": [other], "mechanism": "remote"}
        with pytest.raises(NoGuaranteeError, match=r"steps of .*, but the ledger's plan is .*befo"):
            engine.accountant.load_state_dict(foreign)
    with refused(model, "refused to load"):
        train(model, optimizer, loader, 1)


def test_a_checkpoint_of_another_reservation_or_without_its_releases_is_refused(
    ledger: LedgerClient, transport: Any
) -> None:
    """The claim of this reservation would leave out what the parameters came from."""
    pca = {"kind": "gaussian", "noise_multiplier": 50.0}
    held = [ledger.grant(ledger.reserve(ledger.patients, PLAN.mechanism(25)), 20) for _ in range(2)]

    def accountant(number: int, *before: Any) -> Any:
        resumed = budget_of(ledger, held[number], before=before)
        integration.connect_ledger(resumed)
        return integration.RemoteAccountant()

    after_pca, plain = accountant(0, pca).state_dict(), accountant(0).state_dict()
    assert sum(row[2] for row in plain["history"]) == 20
    accountant(0, dict(pca)).load_state_dict(after_pca)
    for refusing, state, message in (
        (accountant(1), plain, f"charged to reservation {held[0].identifier}"),
        (accountant(0), after_pca, r"before=\[\]"),
        (accountant(0, pca), plain, r"released \[\]"),
    ):
        with pytest.raises(NoGuaranteeError, match=message):
            refusing.load_state_dict(state)
        with pytest.raises(NoGuaranteeError, match="refused to load"):
            _ = refusing.made
    integration.connect(transport=transport)  # without a ledger
    unclaimed = integration.RemoteAccountant()
    unclaimed.load_state_dict(plain)
    with pytest.raises(NoGuaranteeError, match=r"before=\[\]"):
        integration.RemoteAccountant().load_state_dict(after_pca)
    own = unclaimed.state_dict()
    with pytest.raises(NoGuaranteeError, match="charged to no reservation"):
        accountant(1).load_state_dict(own)
    del own["reservations"]  # as in a checkpoint of an earlier version
    accountant(1).load_state_dict(own)


def test_a_ledger_s_plan_that_changes_from_step_to_step_is_refused(ledger: LedgerClient) -> None:
    """Opacus makes every step with σ and C, whatever the schedule says and the ledger charges."""
    for plan in (
        replace(PLAN, noise_schedule=Schedule.by_steps([(100, 4.0)])),
        replace(PLAN, clip_schedule=Schedule.by_steps([(100, 0.5)])),
        replace(PLAN, adaptive_clipping=AdaptiveClipping(3.0)),
    ):
        held = ledger.reserve(ledger.patients, plan.mechanism(50))
        with pytest.raises(NoGuaranteeError, match=r"changes from step to step.*without schedules"):
            integration.connect_ledger(budget_of(ledger, held, plan))


def test_a_ledger_s_plan_must_be_what_opacus_does(ledger: LedgerClient) -> None:
    """The certificate names the clip norm of the plan."""
    plan = replace(PLAN, clip_norm=0.5)
    held = ledger.reserve(ledger.patients, plan.mechanism(50))
    integration.connect_ledger(budget_of(ledger, held, plan))
    model, optimizer, loader, _ = program()
    with refused(model, r"clip_norm is 1 .* 0\.5 in the plan"):
        train(model, optimizer, loader, 1)
    assert ledger.reservation(held.identifier).steps_granted == 0
