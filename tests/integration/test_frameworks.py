"""Lightning and Hugging Face: one suite for what both must do."""

from __future__ import annotations

import hashlib
import json
import shutil
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

from accountant_service.accounting import calculator
from accountant_service.mechanisms import Composed, DpSgd, Gaussian
from tests.support.helpers import nightly
from tests.support.lazy_modules import LazyModule
from tests.support.ledger_client import LedgerClient
from training_client.budget import Budget, LedgerBudget
from training_client.client import AccountingService
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    NoGuaranteeError,
    ServiceUnreachableError,
)
from training_client.integrations.model_files import check_model_file, model_saver
from training_client.plan import Plan

programs = LazyModule("tests.integration.frameworks")
samplers = LazyModule("opacus.utils.uniform_sampler")
RECORDS, BATCH = 400, 20
PLAN = Plan(RECORDS, BATCH / RECORDS, 1.0, 1.0)
FITS = 37
DELTA = 1e-5
PCA: Any = {"kind": "gaussian", "noise_multiplier": 50.0}

pytestmark = [
    pytest.mark.slow,  # importing both frameworks takes ten seconds
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),  # noise is drawn by torch in tests
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # inputs are data
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # its checkpoints go elsewhere
]


def budget(service: AccountingService) -> Budget:
    epsilon = calculator.epsilon(DpSgd(1.0, sample_rate=1 / 20, steps=FITS), DELTA).epsilon
    return Budget(service, PLAN, epsilon, DELTA)


def reserved(ledger: LedgerClient, steps: int) -> LedgerBudget:
    reservation = ledger.reserve(ledger.patients, PLAN.mechanism(steps))
    return LedgerBudget(ledger, PLAN, ledger.patients, DELTA, reservation, block=10, block_max=10)


@pytest.mark.parametrize(
    ("framework", "workers", "split"),
    [
        ("InLightning", 0, False),
        ("InHuggingFace", 0, False),
        ("InLightning", 2, True),
        ("InHuggingFace", 0, True),
        nightly("InLightning", 0, True),
        nightly("InHuggingFace", 2, True),
    ],
    indirect=["framework"],
)
def test_the_steps_that_fit_are_made_and_no_other(
    framework: Any,
    workers: int,
    split: bool,
    service: AccountingService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each batch that is drawn has its step, however many parts it has."""
    private, allowance = programs.Private(workers=workers), budget(service)
    watched = Watched(private, monkeypatch)
    if split:
        private.loader = private.split()
    framework.fit(private, allowance, tmp_path)
    assert private.sgd.made == FITS
    assert private.untouched_since
    assert watched.summed == watched.drawn[:FITS]
    assert private.engine.accountant.history == [(1.0, 0.05, FITS)]  # Opacus' own still counts
    claim = json.loads((tmp_path / "privacy.json").read_text())
    assert claim["epsilon"] == allowance.epsilon
    assert not (tmp_path / "certificate.json").exists()


class Watched:
    """The sizes of the batches that were drawn, and of the sums that steps were made of."""

    def __init__(self, private: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn, self.summed = list[int](), list[int]()
        optimizer, parts = private.optimizer, list[int]()
        sampler = samplers.UniformWithReplacementSampler
        genuine = sampler.__iter__
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

        monkeypatch.setattr(sampler, "__iter__", draw)
        optimizer.clip_and_accumulate, private.sgd.step = clipped, made


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.spent: list[tuple[int, float, float]] = []
        self.ended: list[tuple[Path, bool]] = []

    def log_spent(self, step: int, epsilon: float, delta: float) -> None:
        self.spent.append((step, epsilon, delta))

    def log_run(self, folder: Path) -> None:
        self.ended.append((folder, (folder / "certificate.json").exists()))


@pytest.mark.parametrize(
    ("framework", "name"),
    [("InLightning", "model.pt"), ("InHuggingFace", "weights.safetensors")],
    indirect=["framework"],
)
def test_the_ledger_grants_what_is_made_and_certifies_the_saved_model(
    name: str, framework: Any, ledger: LedgerClient, tmp_path: Path
) -> None:
    """And trackers are told of each step and of the end."""
    allowance, private, recorder = reserved(ledger, 25), programs.Private(), Recorder()
    framework.fit(private, allowance, tmp_path, told={"model_file": name, "trackers": [recorder]})
    held = ledger.reservation(allowance.reservation.identifier)
    assert private.sgd.made == held.steps_granted == 25
    assert held.state == "committed"
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert held.identifier in json.dumps(certificate)
    digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
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
    ledger: LedgerClient, tmp_path: Path
) -> None:
    allowance = reserved(ledger, 12)
    gate = programs.StepGate(allowance)
    with pytest.raises(DataError, match=r"wrote model-00001-of-00002\.safetensors and not"):
        gate.settle(tmp_path, model_saver(InParts(2, 2), "model.safetensors"))
    with pytest.raises(DataError, match="cannot read the model's file"):
        gate.settle(tmp_path, lambda folder: folder / "nothing.pt")
    assert ledger.reservation(allowance.reservation.identifier).state == "open"
    assert not (tmp_path / "privacy.json").exists()
    gate.settle(tmp_path, model_saver(InParts(2, 2), "model.pt"))
    assert ledger.reservation(allowance.reservation.identifier).state == "committed"
    for name in ("model", "model.bin", "sub/model.pt", "../model.pt"):
        with pytest.raises(DataError, match=r"ends in \.pt or \.safetensors"):
            check_model_file(name)


@pytest.mark.parametrize(("answers", "made"), [(1, 50), nightly(0, 0)])
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
    private = programs.Private()
    with pytest.raises(ServiceUnreachableError):
        framework.fit(private, Budget(service, PLAN, 1.0, DELTA), tmp_path)
    assert private.sgd.made == made
    assert private.untouched_since
    assert not (tmp_path / "privacy.json").exists()


def test_what_a_framework_must_not_begin_is_refused(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    """A budget for no step, accumulated gradients, another plan, and limits on physical batches."""
    private = programs.Private()
    with pytest.raises(BudgetExhaustedError):
        framework.fit(private, Budget(service, PLAN, 1e-3, DELTA), tmp_path)
    with pytest.raises(NoGuaranteeError, match="BatchMemoryManager"):
        framework.fit(private, budget(service), tmp_path, accumulate=2)
    louder = replace(budget(service), plan=replace(PLAN, noise_multiplier=2.0))
    with pytest.raises(NoGuaranteeError, match=r"noise_multiplier is 1 .* plan_of"):
        framework.fit(private, louder, tmp_path)
    private.loader = private.split()
    limits = {"max_steps": {"steps_max": 9}}
    if isinstance(framework, programs.InLightning):
        limits["limit"] = {"limit_train_batches": 9}
    for name, limit in limits.items():
        with pytest.raises(NoGuaranteeError, match=f"{name}.*counts physical batches"):
            framework.fit(private, budget(service), tmp_path, **limit)
    assert private.sgd.made == 0


def test_settings_that_differ_from_the_plan_are_refused(
    service: AccountingService, asked: list[Any]
) -> None:
    for options, message in (
        ({"poisson_sampling": False}, "poisson_sampling=True"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0 gives no guarantee"),
        ({"noise_multiplier": 0.9}, r"noise_multiplier is 0\.9 .* plan_of"),
        ({"max_grad_norm": 2.0}, "clip_norm is 2"),
    ):
        with pytest.raises(NoGuaranteeError, match=message):
            programs.Private(options).gated(budget(service))
    private = programs.Private()
    private.optimizer = private.sgd
    with pytest.raises(NoGuaranteeError, match="CountingSGD adds no noise"):
        private.gated(budget(service))
    assert asked == []


def test_batches_whose_steps_were_skipped_are_refused(service: AccountingService) -> None:
    private = programs.Private()
    gate = private.gated(budget(service))
    batch = next(iter(private.loader))
    gate.permit_step()
    private.optimizer.signal_skip_step()
    programs.step(private, batch)
    with pytest.raises(NoGuaranteeError, match=r"signal_skip_step.*BatchMemoryManager"):
        programs.step(private, batch)
    with pytest.raises(NoGuaranteeError, match="step 1 was left out"):
        gate.permit_step()
    assert (private.sgd.made, gate.steps) == (0, 0)


def test_one_batch_may_be_split(service: AccountingService) -> None:
    private = programs.Private()
    parts = private.split()
    gate = private.gated(budget(service), parts)
    for part in parts:
        gate.permit_step()
        programs.step(private, part)
    assert private.sgd.made == gate.steps == RECORDS / BATCH


def test_there_are_at_most_as_many_physical_batches_as_the_loaders_length() -> None:
    private = programs.Private()
    parts = private.split()
    for _ in range(3):
        found = sum(1 for part in parts if programs.step(private, part) is None)
        assert RECORDS / 5 < found <= len(parts) < 2 * found  # 107 ± 5 on average; not seeded


@pytest.mark.parametrize("workers", [2, nightly(0)])
def test_no_pass_follows_one_that_ended_within_a_batch(
    workers: int, service: AccountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unfinished batch depends on the sizes of those before: dropping it is detected."""
    private = programs.Private(workers=workers)
    watched, parts = Watched(private, monkeypatch), private.split()
    gate = private.gated(budget(service), parts)
    for part in parts:
        before = private.sgd.made
        gate.permit_step()
        programs.step(private, part)
        if before and private.sgd.made == before:  # of a batch whose step is still to come
            break
    with pytest.raises(NoGuaranteeError, match="ended within a batch"):
        next(iter(parts))
    with pytest.raises(NoGuaranteeError, match="ended within a batch"):
        gate.settle("nowhere")
    assert watched.summed == watched.drawn[: private.sgd.made]


def test_each_physical_batch_is_used_once_and_in_order(service: AccountingService) -> None:
    private = programs.Private()
    parts = private.split()
    gate = private.gated(budget(service), parts)
    first = next(iter(parts))
    gate.permit_step()
    programs.step(private, first)  # skipped, and kept: a second one would add its records again
    with pytest.raises(NoGuaranteeError, match="step 1 has no batch of its own"):
        programs.step(private, first)
    assert (private.sgd.made, gate.steps) == (0, 0)
    # a batch passed over: its flag would be taken for the next one's
    private = programs.Private()
    parts = private.split()
    gate, following = private.gated(budget(service), parts), iter(parts)
    gate.permit_step()
    programs.step(private, next(following))
    next(following)
    with pytest.raises(NoGuaranteeError, match="passed over"):
        next(following)
    # a second pass ends the first
    parts = programs.Private().split()
    first = iter(parts)
    next(first)
    assert len(next(iter(parts))["labels"]) > 0
    with pytest.raises(NoGuaranteeError, match="another pass"):
        next(first)


def test_ghost_clipping_is_refused(service: AccountingService) -> None:
    """Its optimizer sums what `backward` left, clipped or not."""
    net = programs.Net()
    _, optimizer, _, loader = programs.PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(programs.Records(), batch_size=BATCH),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    with pytest.raises(NoGuaranteeError, match='grad_sample_mode="hooks"'):
        programs.StepGate(budget(service)).guard(optimizer, loader)


def test_a_second_step_of_a_batch_is_refused(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    private = programs.Private()
    with pytest.raises(NoGuaranteeError, match=r"step 2 has no batch of its own.*draw another"):
        framework.fit(private, budget(service), tmp_path, by_hand=2)
    assert private.sgd.made == 1
    assert private.untouched_since
    assert not (tmp_path / "privacy.json").exists()


def test_a_second_step_after_on_step_end_is_refused(
    service: AccountingService, tmp_path: Path
) -> None:
    private = programs.Private()
    batch = {"examples": torch.randn(3, 6), "labels": torch.tensor([0, 1, 0])}

    class StepsAgain(programs.transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            programs.step(private, batch)

    with pytest.raises(NoGuaranteeError, match="step 2 has no batch of its own"):
        programs.InHuggingFace().fit(private, budget(service), tmp_path, more=[StepsAgain()])
    assert private.sgd.made == 1


def test_one_manual_step_per_batch_is_accepted(service: AccountingService, tmp_path: Path) -> None:
    private = programs.Private()
    programs.InLightning().fit(private, budget(service), tmp_path, by_hand=1)
    assert private.sgd.made == FITS


def test_permit_step_permits_one_step_and_check_next_step_none(service: AccountingService) -> None:
    private = programs.Private()
    gate = private.gated(budget(service))
    batch = next(iter(private.loader))
    gate.check_next_step()
    with pytest.raises(NoGuaranteeError, match="step 1 has no batch of its own"):
        programs.step(private, batch)
    gate.permit_step()
    with pytest.raises(NoGuaranteeError, match="step 1 was left out"):
        gate.permit_step()
    programs.step(private, batch)
    with pytest.raises(NoGuaranteeError, match="step 2 has no batch of its own"):
        programs.step(private, batch)
    assert private.sgd.made == gate.steps == 1
    assert private.untouched_since


def test_noise_changed_during_training_is_refused(service: AccountingService) -> None:
    private = programs.Private()
    gate = private.gated(budget(service))
    for batch in private.loader:
        gate.permit_step()
        if private.sgd.made == 2:
            private.optimizer.noise_multiplier = 0.5
            break
        programs.step(private, batch)
    with pytest.raises(NoGuaranteeError, match=r"noise_multiplier is 0\.5"):
        programs.step(private, batch)
    assert private.sgd.made == 2
    assert private.untouched_since


def test_a_framework_that_ignores_the_stop_signal_is_stopped(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    private = programs.Private()
    with pytest.raises(BudgetExhaustedError):
        framework.fit(private, budget(service), tmp_path, **framework.overruled)
    assert private.sgd.made == FITS
    assert private.untouched_since


def test_a_checkpoint_is_resumed_with_what_its_claim_rests_on(
    framework: Any, service: AccountingService, ledger: LedgerClient, tmp_path: Path
) -> None:
    """Its steps count; otherwise the claim would leave out what the parameters came from."""
    whole = Composed((Gaussian(50.0), DpSgd(1.0, sample_rate=1 / 20, steps=FITS)))
    same = Budget(service, PLAN, calculator.epsilon(whole, DELTA).epsilon, DELTA, before=(PCA,))
    first = tmp_path / "first"
    framework.fit(programs.Private(), replace(same), first, steps_max=20)

    def resume(allowance: Any, options: dict[str, Any] | None = None) -> int:
        """Resume a copy of the run; return the number of steps made."""
        folder = tmp_path / "resumed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder)
        (folder / "privacy.json").unlink()
        private = programs.Private(options or {})
        try:
            framework.fit(private, allowance, folder, resume=True)
        finally:
            assert (folder / "privacy.json").exists() == (private.sgd.made > 0)
        return int(private.sgd.made)

    quieter = replace(PLAN, noise_multiplier=3.0)

    def granted(plan: Plan) -> LedgerBudget:
        """Return the budget of another run, which was granted as many steps."""
        held = ledger.grant(ledger.reserve(ledger.patients, plan.mechanism(40)), 30)
        return LedgerBudget(ledger, plan, ledger.patients, DELTA, held, (PCA,))

    for allowance, message in (
        (budget(service), r"released \[.*50.* before=\[\]"),
        (granted(PLAN), "charged to no reservation"),
        # the noise was changed in the program before it was resumed
        (Budget(service, quieter, 1e3, DELTA, before=(PCA,)), r"20 steps.*\b1\.0.*\b3\.0.*before="),
        (granted(quieter), r"20 steps.*\b1\.0.*\b3\.0.*before="),
    ):
        noise = {"noise_multiplier": allowance.plan.noise_multiplier}
        with pytest.raises(NoGuaranteeError, match=message):
            resume(allowance, noise)
    assert resume(replace(same, before=(dict(PCA),))) == FITS - 20
    if isinstance(framework, programs.InLightning):  # as in a checkpoint of an earlier version
        file = first / "before/last.ckpt"
        kept = torch.load(file, weights_only=False)
        del kept["callbacks"]["PrivacyCallback"]
        torch.save(kept, file)
    else:
        file = first / "checkpoint-20/trainer_state.json"
        state = json.loads(file.read_text())
        del state["stateful_callbacks"]["privacy_accountant"]
        file.write_text(json.dumps(state))
    assert resume(budget(service)) == FITS - 20


def test_steps_of_a_checkpoint_that_the_ledger_did_not_grant_are_refused(
    framework: Any, ledger: LedgerClient, tmp_path: Path
) -> None:
    """The ledger counts the steps, and not the checkpoint; but it must know them all.

    No block is granted before its first step.
    """
    first, private = reserved(ledger, 50), programs.Private()
    framework.fit(private, first, tmp_path, steps_max=20)
    held = ledger.reservation(first.reservation.identifier)
    assert private.sgd.made == held.steps_granted == 20
    restored = replace(first, reservation=replace(first.reservation, steps_granted=0))
    private = programs.Private()
    with pytest.raises(NoGuaranteeError, match=r"after 20 steps, .* granted only 0 of them"):
        framework.fit(private, restored, tmp_path, resume=True)
    assert private.sgd.made == 0


def test_two_runs_do_not_share_one_allowance(ledger: LedgerClient) -> None:
    allowance, runs = reserved(ledger, 20), [programs.Private(), programs.Private()]
    gates = [run.gated(allowance) for run in runs]
    for gate in gates:
        gate.permit_step()
    programs.step(runs[0])
    with pytest.raises(NoGuaranteeError, match="another run uses the same budget"):
        programs.step(runs[1])
    gates[0].permit_step()
    programs.step(runs[0])
    assert [run.sgd.made for run in runs] == [2, 0]
    assert runs[1].untouched_since


def test_the_loader_of_a_later_epoch_is_checked(service: AccountingService, tmp_path: Path) -> None:
    given = ({}, {"poisson_sampling": False})
    loaders = [programs.Private(options).loader for options in given]
    private = programs.Private()
    private.loader = None

    class Changing(programs.pytorch_lightning.LightningDataModule):  # type: ignore[misc,name-defined]
        def train_dataloader(self) -> Any:
            return loaders.pop(0)

    with pytest.raises(NoGuaranteeError, match="samples neither by Poisson"):
        programs.InLightning().fit(
            private, budget(service), tmp_path, data=Changing(), reload_dataloaders_every_n_epochs=1
        )
    assert private.sgd.made == RECORDS / BATCH
