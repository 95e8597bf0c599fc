"""Lightning and Hugging Face: one suite for what both must do."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accountant_service import calculator
from accountant_service.mechanisms import DpSgd
from training_client.budget import Budget, LedgerBudget
from training_client.client import AccountingService
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    NoGuaranteeError,
    ServiceUnreachableError,
)
from training_client.integrations.model_files import check_model_file, model_saver
from training_client.integrations.step_gate import StepGate
from training_client.plan import Plan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler
    from pytorch_lightning import LightningDataModule

    from tests.integration.frameworks import (
        BATCH,
        RECORDS,
        InHuggingFace,
        InLightning,
        Net,
        Private,
        Records,
        step,
    )

PLAN = Plan(RECORDS, BATCH / RECORDS, 1.0, 1.0)
FITS = 37
LIMITED = {"limit_train_batches": 9}
DELTA = 1e-5

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),  # noise is drawn by torch in tests
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # inputs are data
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning
]


def budget(service: AccountingService, plan: Plan = PLAN, fits: int = FITS) -> Budget:
    epsilon = calculator.epsilon(DpSgd(1.0, sample_rate=1 / 20, steps=fits), DELTA).epsilon
    return Budget(service, plan, epsilon, DELTA)


def reserved(ledger: AccountingService, steps: int) -> LedgerBudget:
    reservation = ledger.reserve("patients", PLAN.mechanism(steps))
    return LedgerBudget(ledger, PLAN, "patients", DELTA, reservation, block=10, block_max=10)


def parts_of(private: Private) -> Any:
    """Its batches, split by a loader."""
    with BatchMemoryManager(
        data_loader=private.loader, max_physical_batch_size=4, optimizer=private.optimizer
    ) as parts:
        return parts


def test_the_steps_that_fit_are_made_and_no_other(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    private, allowance = Private(), budget(service)
    framework.fit(private, allowance, tmp_path)
    assert private.sgd.made == FITS
    assert private.untouched_since
    assert private.engine.accountant.history == [(1.0, 0.05, FITS)]  # Opacus' own still counts
    claim = json.loads((tmp_path / "privacy.json").read_text())
    assert claim["epsilon"] == allowance.epsilon
    assert not (tmp_path / "certificate.json").exists()


def test_the_ledger_grants_what_is_made_and_certifies_it(
    framework: Any, ledger: AccountingService, tmp_path: Path
) -> None:
    allowance, private = reserved(ledger, 25), Private()
    framework.fit(private, allowance, tmp_path)
    held = ledger.reservation(allowance.reservation.identifier)
    assert private.sgd.made == held.steps_granted == 25
    assert held.state == "committed"
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert held.identifier in json.dumps(certificate)


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.spent: list[tuple[int, float, float]] = []
        self.ended: list[tuple[Path, bool]] = []

    def log_spent(self, step: int, epsilon: float, delta: float) -> None:
        self.spent.append((step, epsilon, delta))

    def log_run(self, folder: Path) -> None:
        self.ended.append((folder, (folder / "certificate.json").exists()))


@pytest.mark.parametrize("name", ["model.pt", "weights.safetensors"])
def test_the_certificate_names_the_saved_model_and_trackers_are_told(
    name: str, framework: Any, ledger: AccountingService, tmp_path: Path
) -> None:
    allowance, private, recorder = reserved(ledger, 25), Private(), Recorder()
    framework.fit(private, allowance, tmp_path, told={"model_file": name, "trackers": [recorder]})
    digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["declared"]["model_sha256"] == digest
    assert json.loads((tmp_path / "privacy.json").read_text())["model_sha256"] == digest
    read = load_file if name.endswith(".safetensors") else torch.load
    saved = next(each for key, each in read(tmp_path / name).items() if key.endswith("weight"))
    assert torch.equal(saved, private.net.linear.weight)
    steps, epsilons, deltas = zip(*recorder.spent, strict=True)
    assert steps == tuple(range(1, 26))
    assert list(epsilons) == sorted(epsilons)
    assert 0 < epsilons[0] < epsilons[-1]
    assert set(deltas) == {DELTA}
    assert recorder.ended == [(tmp_path, True)]


class InParts(nn.Linear):
    """A model that saves itself in parts."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "model-00001-of-00002.safetensors").touch()


def test_a_model_that_is_not_saved_as_one_file_is_not_committed(
    ledger: AccountingService, tmp_path: Path
) -> None:
    allowance = reserved(ledger, 12)
    gate = StepGate(allowance)
    with pytest.raises(DataError, match=r"wrote model-00001-of-00002\.safetensors and not"):
        gate.settle(tmp_path, model_saver(InParts(2, 2), "model.safetensors"))
    with pytest.raises(DataError, match="cannot read the model's file"):
        gate.settle(tmp_path, lambda folder: folder / "nothing.pt")
    assert ledger.reservation(allowance.reservation.identifier).state == "open"
    assert not (tmp_path / "privacy.json").exists()
    gate.settle(tmp_path, model_saver(InParts(2, 2), "model.pt"))
    assert ledger.reservation(allowance.reservation.identifier).state == "committed"


@pytest.mark.parametrize("name", ["model", "model.bin", "sub/model.pt", "../model.pt"])
def test_a_model_file_is_the_name_of_one_file(name: str) -> None:
    with pytest.raises(DataError, match=r"ends in \.pt or \.safetensors"):
        check_model_file(name)


def test_no_block_is_granted_before_its_first_step(
    framework: Any, ledger: AccountingService, tmp_path: Path
) -> None:
    allowance, private = reserved(ledger, 50), Private()
    framework.fit(private, allowance, tmp_path, steps_max=20)
    held = ledger.reservation(allowance.reservation.identifier)
    assert private.sgd.made == held.steps_granted == 20


@pytest.mark.parametrize(("answers", "made"), [(0, 0), (1, 50)])
def test_training_ends_if_the_service_is_gone(
    framework: Any, answers: int, made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training_client.client.time.sleep", lambda _: None)
    given: list[int] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if len(given) == answers:
            raise httpx.ConnectError("gone")
        given.append(1)
        claim = {"epsilon": 0.1, "delta": DELTA, "method": "pld", "status": "proven"}
        return httpx.Response(200, json=claim)

    service = AccountingService("http://test", transport=httpx.MockTransport(handle))
    private = Private()
    with pytest.raises(ServiceUnreachableError):
        framework.fit(private, Budget(service, PLAN, 1.0, DELTA), tmp_path)
    assert private.sgd.made == made
    assert private.untouched_since
    assert not (tmp_path / "privacy.json").exists()


def test_a_budget_for_no_step_is_an_error(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    private = Private()
    with pytest.raises(BudgetExhaustedError):
        framework.fit(private, Budget(service, PLAN, 1e-3, DELTA), tmp_path)
    assert private.sgd.made == 0


@pytest.mark.parametrize(
    ("options", "fit", "message"),
    [
        ({"poisson_sampling": False}, {}, "poisson_sampling=True"),
        ({"noise_multiplier": 0.0}, {}, "noise_multiplier = 0 gives no guarantee"),
        ({"noise_multiplier": 0.9}, {}, r"noise_multiplier is 0\.9 .* plan_of"),
        ({"max_grad_norm": 2.0}, {}, "clip_norm is 2"),
        ({}, {"accumulate": 2}, "BatchMemoryManager"),
    ],
)
def test_settings_that_differ_from_the_plan_are_refused(
    framework: Any,
    options: dict[str, Any],
    fit: dict[str, Any],
    message: str,
    service: AccountingService,
    tmp_path: Path,
    asked: list[Any],
) -> None:
    private = Private(options)
    with pytest.raises(NoGuaranteeError, match=message):
        framework.fit(private, budget(service), tmp_path, **fit)
    assert private.sgd.made == 0
    assert asked == []


def test_batches_whose_steps_were_skipped_are_refused(service: AccountingService) -> None:
    private, gate = Private(), StepGate(budget(service))
    gate.guard(private.optimizer, private.loader)
    batch = next(iter(private.loader))
    gate.permit_step()
    private.optimizer.signal_skip_step()
    step(private, batch)
    with pytest.raises(NoGuaranteeError, match=r"signal_skip_step.*BatchMemoryManager"):
        step(private, batch)
    with pytest.raises(NoGuaranteeError, match="step 1 was left out"):
        gate.permit_step()
    assert (private.sgd.made, gate.steps) == (0, 0)


def test_one_batch_may_be_split(service: AccountingService) -> None:
    private, gate = Private(), StepGate(budget(service))
    parts = parts_of(private)
    gate.guard(private.optimizer, parts)
    for part in parts:
        gate.permit_step()
        step(private, part)
    assert private.sgd.made == gate.steps == RECORDS / BATCH


def test_a_framework_may_be_given_physical_batches(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    private = Private()
    private.loader = parts_of(private)
    framework.fit(private, budget(service), tmp_path)
    assert private.sgd.made == FITS
    assert private.untouched_since


class Watched:
    """The sizes of the batches that were drawn, and of the sums that steps were made of."""

    def __init__(self, private: Private, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn, self.summed = list[int](), list[int]()
        optimizer, parts = private.optimizer, list[int]()
        genuine = UniformWithReplacementSampler.__iter__
        clip, make = optimizer.clip_and_accumulate, private.sgd.step

        def draw(sampler: Any) -> Iterator[Any]:
            for batch in genuine(sampler):
                self.drawn.append(len(batch))
                yield batch

        def clipped() -> None:
            if all(each.summed_grad is None for each in optimizer.params):
                parts.clear()
            parts.append(len(optimizer.grad_samples[0]))
            clip()

        def made(closure: Any = None) -> Any:
            self.summed.append(sum(parts))
            return make(closure)

        monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", draw)
        optimizer.clip_and_accumulate, private.sgd.step = clipped, made

    @property
    def of_one_batch_each(self) -> bool:
        """True if each sum is of one batch, in order; batches may have been given up."""
        following = iter(self.drawn)
        return all(size in following for size in self.summed)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_physical_batches_covers_whole_batches(
    workers: int, framework: Any, service: AccountingService, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each batch that is drawn has its step, however many parts it has."""
    private = Private(workers=workers)
    watched = Watched(private, monkeypatch)
    private.loader = parts_of(private)
    framework.fit(private, budget(service), tmp_path)
    assert private.sgd.made == FITS
    assert watched.summed == watched.drawn[:FITS]


def test_there_are_at_most_as_many_physical_batches_as_the_loaders_length() -> None:
    private = Private()
    parts = parts_of(private)
    for _ in range(5):
        found = sum(1 for part in parts if step(private, part) is None)
        assert RECORDS / 5 < found <= len(parts) < 2 * found  # 107 ± 5 on average; not seeded


@pytest.mark.parametrize("workers", [0, 2])
def test_no_pass_follows_one_that_ended_within_a_batch(
    workers: int, service: AccountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unfinished batch depends on the sizes of those before: dropping it is detected."""
    private, gate = Private(workers=workers), StepGate(budget(service))
    watched, parts = Watched(private, monkeypatch), parts_of(private)
    gate.guard(private.optimizer, parts)
    for part in parts:
        gate.permit_step()
        step(private, part)
        if private.sgd.made and private.optimizer._is_last_step_skipped:
            break
    with pytest.raises(NoGuaranteeError, match="ended within a batch"):
        next(iter(parts))
    with pytest.raises(NoGuaranteeError, match="ended within a batch"):
        gate.settle("nowhere")
    assert watched.summed == watched.drawn[: private.sgd.made]


@pytest.mark.parametrize(("limit", "name"), [({"steps_max": 9}, "max_steps"), (LIMITED, "limit")])
def test_physical_batches_are_not_counted_as_steps(
    limit: dict[str, Any], name: str, framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    if limit is LIMITED and isinstance(framework, InHuggingFace):
        pytest.skip("it is Lightning's")
    private = Private()
    private.loader = parts_of(private)
    with pytest.raises(NoGuaranteeError, match=f"{name}.*counts physical batches"):
        framework.fit(private, budget(service), tmp_path, **limit)
    assert private.sgd.made == 0


def test_skipping_a_physical_batch_is_refused(service: AccountingService) -> None:
    """Its flag would be taken for the next one's, and steps end within batches from then on."""
    private, gate = Private(), StepGate(budget(service))
    parts = parts_of(private)
    gate.guard(private.optimizer, parts)
    following = iter(parts)
    gate.permit_step()
    step(private, next(following))
    next(following)
    with pytest.raises(NoGuaranteeError, match="passed over"):
        next(following)


def test_a_second_pass_ends_the_first(service: AccountingService) -> None:
    private = Private()
    parts = parts_of(private)
    first = iter(parts)
    next(first)
    assert len(next(iter(parts))["labels"]) > 0
    with pytest.raises(NoGuaranteeError, match="another pass"):
        next(first)


def test_ghost_clipping_is_refused(service: AccountingService) -> None:
    """Its optimizer sums what `backward` left, clipped or not."""
    net = Net()
    _, optimizer, _, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(Records(), batch_size=BATCH),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    with pytest.raises(NoGuaranteeError, match='grad_sample_mode="hooks"'):
        StepGate(budget(service)).guard(optimizer, loader)


def test_a_second_step_of_a_batch_is_refused(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    private = Private()
    with pytest.raises(NoGuaranteeError, match=r"step 2 has no batch of its own.*draw another"):
        framework.fit(private, budget(service), tmp_path, by_hand=2)
    assert private.sgd.made == 1
    assert private.untouched_since
    assert not (tmp_path / "privacy.json").exists()


def test_a_second_step_after_on_step_end_is_refused(
    service: AccountingService, tmp_path: Path
) -> None:
    private = Private()
    batch = {"examples": torch.randn(3, 6), "labels": torch.tensor([0, 1, 0])}

    class StepsAgain(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step(private, batch)

    with pytest.raises(NoGuaranteeError, match="step 2 has no batch of its own"):
        InHuggingFace().fit(private, budget(service), tmp_path, more=[StepsAgain()])
    assert private.sgd.made == 1


def test_one_manual_step_per_batch_is_accepted(service: AccountingService, tmp_path: Path) -> None:
    private = Private()
    InLightning().fit(private, budget(service), tmp_path, by_hand=1)
    assert private.sgd.made == FITS


def test_a_second_step_of_a_physical_batch_is_refused(service: AccountingService) -> None:
    private, gate = Private(), StepGate(budget(service))
    parts = parts_of(private)
    gate.guard(private.optimizer, parts)
    first = next(iter(parts))
    gate.permit_step()
    step(private, first)  # skipped, and kept: a second one would add the same records again
    with pytest.raises(NoGuaranteeError, match="step 1 has no batch of its own"):
        step(private, first)
    assert (private.sgd.made, gate.steps) == (0, 0)


def test_permit_step_permits_one_step_and_check_next_step_none(service: AccountingService) -> None:
    private, gate = Private(), StepGate(budget(service))
    gate.guard(private.optimizer, private.loader)
    batch = next(iter(private.loader))
    gate.check_next_step()
    with pytest.raises(NoGuaranteeError, match="step 1 has no batch of its own"):
        step(private, batch)
    gate.permit_step()
    with pytest.raises(NoGuaranteeError, match="step 1 was left out"):
        gate.permit_step()
    step(private, batch)
    with pytest.raises(NoGuaranteeError, match="step 2 has no batch of its own"):
        step(private, batch)
    assert private.sgd.made == gate.steps == 1
    assert private.untouched_since


def test_an_optimizer_without_noise_is_refused(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    private = Private()
    private.optimizer = private.sgd
    with pytest.raises(NoGuaranteeError, match="CountingSGD adds no noise"):
        framework.fit(private, budget(service), tmp_path)
    assert private.sgd.made == 0


def test_noise_changed_during_training_is_refused(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    private = Private()

    def less_noise(*_: Any) -> None:
        private.optimizer.noise_multiplier = 0.5 if private.sgd.made == 2 else 1.0

    private.net.register_forward_pre_hook(less_noise)
    with pytest.raises(NoGuaranteeError, match=r"noise_multiplier is 0\.5"):
        framework.fit(private, budget(service), tmp_path)
    assert private.sgd.made == 2
    assert private.untouched_since


def test_a_framework_that_ignores_the_stop_signal_is_stopped(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    private = Private()
    with pytest.raises(BudgetExhaustedError):
        framework.fit(private, budget(service), tmp_path, **framework.overruled)
    assert private.sgd.made == FITS
    assert private.untouched_since


@pytest.mark.filterwarnings(
    "ignore:The dirpath has changed"
)  # Lightning's checkpoints go elsewhere
def test_the_steps_of_a_checkpoint_count(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    framework.fit(Private(), budget(service), tmp_path, steps_max=20)
    private = Private()
    framework.fit(private, budget(service), tmp_path, resume=True)
    assert private.sgd.made == FITS - 20


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_steps_of_a_checkpoint_that_the_ledger_did_not_grant_are_refused(
    framework: Any, service: AccountingService, ledger: AccountingService, tmp_path: Path
) -> None:
    """The ledger counts the steps, and not the checkpoint; but it must know them all."""
    first = reserved(ledger, 25)
    framework.fit(Private(), first, tmp_path, steps_max=20)
    restored = replace(first, reservation=replace(first.reservation, steps_granted=0))
    (tmp_path / "privacy.json").unlink()
    private = Private()
    with pytest.raises(NoGuaranteeError, match=r"after 20 steps, .* granted only 0 of them"):
        framework.fit(private, restored, tmp_path, resume=True)
    assert private.sgd.made == 0


PCA: Any = {"kind": "gaussian", "noise_multiplier": 50.0}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_is_resumed_with_what_its_claim_rests_on(
    framework: Any, service: AccountingService, ledger: AccountingService, tmp_path: Path
) -> None:
    """Otherwise the claim would leave out releases that the parameters came from."""
    plain, after = tmp_path / "plain", tmp_path / "after"
    framework.fit(Private(), budget(service), plain, steps_max=20)
    framework.fit(Private(), replace(budget(service), before=(PCA,)), after, steps_max=20)
    other = LedgerBudget(
        ledger, PLAN, "patients", DELTA,
        ledger.grant(ledger.reserve("patients", PLAN.mechanism(40)), 30),
    )  # fmt: skip
    for folder, resumed, message in (
        (after, budget(service), r"released \[.*50.* before=\[\]"),
        (plain, replace(budget(service), before=(PCA,)), r"released \[\], .* before=\[.*50"),
        (plain, other, f"charged to no reservation, .*{other.reservation.identifier}"),
    ):
        private = Private()
        with pytest.raises(NoGuaranteeError, match=message):
            framework.fit(private, resumed, folder, resume=True)
        assert private.sgd.made == 0
    same = replace(budget(service), before=(dict(PCA),))
    framework.fit(private := Private(), same, after, steps_max=23, resume=True)
    assert private.sgd.made == 3


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("is_charged", [False, True])
def test_steps_charged_by_another_plan_are_not_claimed_by_this_one(
    framework: Any,
    is_charged: bool,
    service: AccountingService,
    ledger: AccountingService,
    tmp_path: Path,
) -> None:
    """The noise was changed in the program before it was resumed."""
    noisier, less = {"noise_multiplier": 3.0}, {"noise_multiplier": 0.5}
    before, plan = (replace(PLAN, **each) for each in (less, noisier))
    first = Budget(service, before, 1e3, DELTA)
    framework.fit(Private(less), first, tmp_path, steps_max=20)
    allowance: Any = Budget(service, plan, 1e3, DELTA)
    if is_charged:  # another run's reservation, which has granted as many
        held = ledger.grant(ledger.reserve("patients", plan.mechanism(40)), 30)
        allowance = LedgerBudget(ledger, plan, "patients", DELTA, held)
    (tmp_path / "privacy.json").unlink()
    private = Private(noisier)
    with pytest.raises(NoGuaranteeError, match=r"20 steps.*\b0\.5.*\b3\.0.*before="):
        framework.fit(private, allowance, tmp_path, resume=True)
    assert private.sgd.made == 0
    assert not (tmp_path / "privacy.json").exists()
    framework.fit(private := Private(less), first, tmp_path, steps_max=23, resume=True)
    assert private.sgd.made == 3


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_of_an_earlier_version_counts_as_before(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    """It has the number of steps only."""
    framework.fit(Private(), budget(service), tmp_path, steps_max=20)
    if isinstance(framework, InLightning):
        file = tmp_path / "before/last.ckpt"
        kept = torch.load(file, weights_only=False)
        del kept["callbacks"]["PrivacyCallback"]
        torch.save(kept, file)
    else:
        file = tmp_path / "checkpoint-20/trainer_state.json"
        state = json.loads(file.read_text())
        del state["stateful_callbacks"]["privacy_accountant"]
        file.write_text(json.dumps(state))
    private = Private()
    framework.fit(private, budget(service), tmp_path, resume=True)
    assert private.sgd.made == FITS - 20


def test_two_runs_do_not_share_one_allowance(ledger: AccountingService) -> None:
    allowance, runs = reserved(ledger, 20), [Private(), Private()]
    gates = [StepGate(allowance) for _ in runs]
    for gate, run in zip(gates, runs, strict=True):
        gate.guard(run.optimizer, run.loader)
        gate.permit_step()
    step(runs[0])
    with pytest.raises(NoGuaranteeError, match="another run uses the same budget"):
        step(runs[1])
    gates[0].permit_step()
    step(runs[0])
    assert [run.sgd.made for run in runs] == [2, 0]
    assert runs[1].untouched_since


def test_the_loader_of_a_later_epoch_is_checked(service: AccountingService, tmp_path: Path) -> None:
    loaders = [Private().loader, Private({"poisson_sampling": False}).loader]
    private = Private()
    private.loader = None

    class Changing(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loaders.pop(0)

    with pytest.raises(NoGuaranteeError, match="samples neither by Poisson"):
        InLightning().fit(
            private, budget(service), tmp_path, data=Changing(), reload_dataloaders_every_n_epochs=1
        )
    assert private.sgd.made == RECORDS / BATCH
