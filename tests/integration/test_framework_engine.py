"""This project's engine under Lightning and Hugging Face: one suite for what both must do."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.lazy_modules import LazyModule
from tests.support.ledger_client import LedgerClient
from training_client.budget import Allowance, Budget, LedgerBudget, NoBudget
from training_client.client import AccountingService
from training_client.errors import DataError, NoGuaranteeError
from training_client.lab.models import cross_entropy
from training_client.optimizers import PrivateOptimizer, make_optimizer, private_batches
from training_client.plan import Plan, Schedule

programs = LazyModule("tests.integration.frameworks")
transformers = LazyModule("transformers")
RECORDS, BATCH, FITS, DELTA = 400, 20, 37, 1e-5
PLAN = Plan(RECORDS, BATCH / RECORDS, 1.0, 1.0)

pytestmark = [
    pytest.mark.slow,  # importing both frameworks takes ten seconds
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # its checkpoints go elsewhere
]


@pytest.fixture(params=["EngineInLightning", "EngineInHuggingFace"])
def framework(request: pytest.FixtureRequest) -> Any:
    return getattr(programs, request.param)()


@pytest.fixture
def same_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function after which the same batches and the same noise are drawn again."""
    numbers = itertools.count()

    def restart() -> None:
        nonlocal numbers
        numbers = itertools.count()
        torch.manual_seed(7)  # of the records

    for module in ("sampling", "private_sum"):
        monkeypatch.setattr(
            f"training_client.private_step.{module}.draw_key",
            lambda *_: next(numbers).to_bytes(32, "big"),
        )
    return restart


def budget(service: AccountingService) -> Budget:
    return Budget(service, PLAN, 8.0, DELTA, steps=FITS)


def begun(allowance: Allowance, name: str = "dp_sgd") -> tuple[nn.Module, PrivateOptimizer]:
    torch.manual_seed(3)
    net = programs.Classifier(nn.Linear(6, 2))
    return net, make_optimizer(name, net, allowance, learning_rate=0.5)


def parameters(net: nn.Module) -> list[float]:
    return torch.cat([each.detach().flatten() for each in net.parameters()]).tolist()


@pytest.mark.parametrize("name", ["dp_adam", "adadp"])
def test_a_fit_is_the_loop_of_ones_own(
    framework: Any, name: str, same_keys: Any, tmp_path: Path
) -> None:
    """The same batches, noise and updates, in two epochs and a part of a third."""
    allowance = NoBudget(PLAN, 45, "it is a test")
    net, optimizer = begun(allowance, name)
    same_keys()
    framework.fit(net, optimizer, tmp_path)
    assert optimizer.steps_made == 45
    other, by_hand = begun(allowance, name)
    same_keys()
    for batch in private_batches(by_hand, programs.Records()):
        by_hand.step(batch["examples"], batch["labels"], cross_entropy)
    assert parameters(net) == parameters(other)


def test_the_steps_that_fit_are_made_and_no_other(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    allowance = budget(service)
    net, optimizer = begun(allowance)
    framework.fit(net, optimizer, tmp_path)
    assert optimizer.steps_made == FITS
    claim = json.loads((tmp_path / "privacy.json").read_text())
    assert (claim["epsilon"], claim["steps"]) == (allowance.spent, FITS)


def test_each_step_is_charged_before_its_batch_is_drawn(
    framework: Any, ledger: LedgerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the certificate names the saved model."""
    held = ledger.reserve(ledger.patients, PLAN.mechanism(25))
    allowance = LedgerBudget(ledger, PLAN, ledger.patients, DELTA, held, block=1, block_max=1)
    net, optimizer = begun(allowance)
    drawn, genuine = list[int](), programs.Records.__getitem__

    def read(records: Any, row: int) -> Any:
        drawn.append(ledger.reservation(held.identifier).steps_granted)
        return genuine(records, row)

    monkeypatch.setattr(programs.Records, "__getitem__", read)
    framework.fit(net, optimizer, tmp_path, told={"model_file": "model.pt"})
    assert min(drawn) == 1
    assert max(drawn) == 25
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    digest = hashlib.sha256((tmp_path / "model.pt").read_bytes()).hexdigest()
    assert certificate["declared"]["model_sha256"] == digest
    assert ledger.reservation(held.identifier).state == "committed"


def test_a_checkpoint_is_resumed_with_its_steps(
    framework: Any, service: AccountingService, tmp_path: Path
) -> None:
    """And with the state of the private optimizer; not with a budget that does not cover it."""
    net, optimizer = begun(budget(service), "dp_adam")
    framework.fit(net, optimizer, tmp_path, epochs=1)
    assert optimizer.steps_made == 20
    (tmp_path / "privacy.json").unlink()
    quieter = Plan(RECORDS, BATCH / RECORDS, 1.0, 3.0)
    with pytest.raises(NoGuaranteeError, match="20 steps was charged as"):
        framework.fit(*begun(Budget(service, quieter, 9.0, DELTA), "dp_adam"), tmp_path,
                      resume=True)  # fmt: skip
    net, optimizer = begun(budget(service), "dp_adam")
    framework.fit(net, optimizer, tmp_path, resume=True)
    assert optimizer.steps_made == FITS
    state = optimizer.state_dict()["state"]
    assert {int(each["step"]) for each in state.values()} == {FITS}


@pytest.mark.parametrize("name", ["dp_sgd", "adadp"])
def test_the_frameworks_schedule_sets_the_rates(name: str, same_keys: Any, tmp_path: Path) -> None:
    """The Trainer's linear one: the rate of step t of T is 1 − (t − 1)/T times the first."""
    found = []
    for schedule, options in (
        (None, {"lr_scheduler_type": "linear"}),
        (Schedule.by_steps([(1, 1 - step / 20) for step in range(20)]), {}),
    ):
        plan = Plan(RECORDS, BATCH / RECORDS, 1.0, 1.0, learning_rate_schedule=schedule)
        net, optimizer = begun(NoBudget(plan, 20, "it is a test"), name)
        same_keys()
        programs.EngineInHuggingFace().fit(net, optimizer, tmp_path, epochs=1, **options)
        found.append(parameters(net))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"skip": True}, "own, without a private one|not finished"),
        ({"loader": True}, "no batch was drawn for step 1"),
        ("half", 'fp16=True|"bf16-true" may skip'),
    ],
)
def test_what_no_claim_covers_ends_the_run(
    framework: Any, case: Any, message: str, service: AccountingService, tmp_path: Path
) -> None:
    """A batch without a step, batches that are not drawn as is charged, and skipped steps."""
    net, optimizer = begun(budget(service))
    options = framework.half if case == "half" else dict(case)
    if "loader" in options:
        options["loader"] = DataLoader(programs.Records(), BATCH)
    before = parameters(net)
    with pytest.raises((DataError, NoGuaranteeError), match=message):
        framework.fit(net, optimizer, tmp_path, **options)
    assert parameters(net) == pytest.approx(before, rel=1e-2)  # Lightning may have rounded them
    assert not (tmp_path / "privacy.json").exists()


def test_a_model_of_hugging_face_trains_on_its_tokens_and_saves_itself(tmp_path: Path) -> None:
    """The model gets a record's fields without the labels, and its dropout is drawn anew."""
    torch.manual_seed(1)
    net = programs.tiny_bert()
    records = [
        {"input_ids": torch.randint(0, 50, (8,)), "attention_mask": torch.ones(8).long(),
         "labels": number % 2}
        for number in range(60)
    ]  # fmt: skip
    plan = Plan(60, 0.2, 1.0, 1.0)
    private = make_optimizer("dp_adam", net, NoBudget(plan, 7, "it is a test"))
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=2
    )
    trainer = programs.PrivateTrainer(
        net, arguments, train_dataset=records, private=private, output=tmp_path,
        losses=lambda found, labels: cross_entropy(found.logits, labels),
        model_file="model.safetensors",
    )  # fmt: skip
    trainer.train()
    assert private.steps_made == 7
    saved = type(net).from_pretrained(tmp_path)
    for own, other in zip(net.parameters(), saved.parameters(), strict=True):
        assert torch.equal(own, other)
    claim = json.loads((tmp_path / "privacy.json").read_text())
    assert claim["model_sha256"]
