"""A step that is left out after its batch was drawn: refused, whatever leaves it out.

Parameters that stay as they were tell of the record for which they did, and no noise hides that.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from training_client.budget import Budget
from training_client.client import AccountingService
from training_client.errors import NoGuaranteeError
from training_client.integrations import opacus as integration
from training_client.integrations.step_gate import StepGate
from training_client.plan import Plan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from accelerate.optimizer import AcceleratedOptimizer
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
    from pytorch_lightning.plugins import MixedPrecision

    from tests.integration.frameworks import (
        BATCH,
        RECORDS,
        InHuggingFace,
        InLightning,
        Net,
        Private,
        Records,
        copies,
        step,
    )
    from training_client.integrations.huggingface import PrivacyCallback

STEPS = RECORDS // BATCH
LEFT_OUT = "drawn and had no step|was left out"

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),  # noise is drawn by torch in tests
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # inputs are data
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning
]


@pytest.fixture(autouse=True)
def _accelerated() -> None:
    """Create the accelerator that wrapped loaders and optimizers need."""
    Accelerator(cpu=True)


@pytest.fixture
def allowance(transport: httpx.MockTransport) -> Budget:
    service = AccountingService("http://test", transport=transport)
    return Budget(service, Plan(RECORDS, BATCH / RECORDS, 1.0, 1.0), 50.0, 1e-5)


# --- scaled losses, and half precision


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("method", ["step", "unscale_"])
def test_a_grad_scaler_refuses_a_private_optimizer(method: str, wrapped: bool) -> None:
    """At once, and not only where a gradient overflows."""
    private, scaler = Private(), torch.amp.GradScaler("cpu")
    scaler.scale(private.net(**next(iter(private.loader)))["loss"]).backward()
    optimizer = AcceleratedOptimizer(private.optimizer) if wrapped else private.optimizer
    with pytest.raises(NoGuaranteeError, match=r"GradScaler.*float32.*bfloat16"):
        getattr(scaler, method)(optimizer)
    assert private.sgd.made == 0


def test_a_grad_scaler_still_works_for_other_optimizers() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    ordinary, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(ordinary)
    assert weight.item() == 0.0
    private = Private()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(private.net(**next(iter(private.loader)))["loss"]).backward()
    off.step(private.optimizer)
    assert private.sgd.made == 1


def test_accelerate_s_scaler_is_refused() -> None:
    private, scaler = Private(), torch.amp.GradScaler("cpu")
    scaler.scale(private.net(**next(iter(private.loader)))["loss"]).backward()
    with pytest.raises(NoGuaranteeError, match="GradScaler"):
        AcceleratedOptimizer(private.optimizer, scaler=scaler).step()


@pytest.mark.parametrize(
    "options",
    [
        {"plugins": [MixedPrecision("16-mixed", "cpu")]},
        {"precision": "16-true"},
        {"precision": "bf16-true"},
    ],
)
def test_lightning_s_half_precision_is_refused(
    options: dict[str, Any], allowance: Budget, tmp_path: Path
) -> None:
    private = Private()
    with pytest.raises(NoGuaranteeError, match="precision="):
        InLightning().fit(private, allowance, tmp_path, **copy.copy(options))
    assert private.sgd.made == 0


def test_lightning_may_mix_in_bfloat16(allowance: Budget, tmp_path: Path) -> None:
    private = Private()
    InLightning().fit(private, allowance, tmp_path, precision="bf16-mixed", epochs=1)
    assert private.sgd.made == STEPS


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"fp16": True}, "fp16=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "accelerate trains with a GradScaler"),
    ],
)
def test_options_of_hugging_face_that_skip_steps_are_refused(
    options: dict[str, Any], name: str, allowance: Budget, tmp_path: Path
) -> None:
    private, given = Private(), dict(options)
    usual = {
        "gradient_accumulation_steps": 1, "max_steps": -1, "fp16": False,
        "auto_find_batch_size": False,
    }  # fmt: skip
    optimizer = SimpleNamespace(optimizer=private.optimizer, scaler=given.pop("scaler", None))
    with pytest.raises(NoGuaranteeError, match=name):
        PrivacyCallback(allowance, tmp_path).on_train_begin(
            SimpleNamespace(**usual | given),  # type: ignore[arg-type]
            SimpleNamespace(global_step=0),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            optimizer=optimizer,
            train_dataloader=private.loader,
        )


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision_are_refused(kind: torch.dtype, allowance: Budget) -> None:
    private = Private()
    private.net.to(kind)
    with pytest.raises(NoGuaranteeError, match=rf"{kind}.*keep them in float32"):
        StepGate(allowance).guard(private.optimizer, private.loader)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_ends_the_run(
    value: float, transport: Any, allowance: Budget
) -> None:
    """Opacus adds it up: of one record it makes all parameters no numbers, noise or not."""
    integration.connect(transport=transport)
    for accountant in ("remote", "rdp"):
        net = Net()
        _, optimizer, loader = PrivacyEngine(accountant=accountant).make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=DataLoader(Records(), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            wrap_model=False,
        )
        if accountant == "rdp":
            gate = StepGate(allowance)
            gate.guard(optimizer, loader)
        batch = next(iter(loader))
        if accountant == "rdp":
            gate.permit_step()
        batch["examples"][0] = value
        net(**batch)["loss"].backward()
        with pytest.raises(NoGuaranteeError, match="not finite"):
            optimizer.step()
        assert all(bool(each.isfinite().all()) for each in net.parameters())


# --- steps that a framework leaves out


def no_step(self: Any, epoch: int, at: int, optimizer: Any, closure: Any = None) -> None:
    closure()
    if self.trainer.global_step != 3:
        optimizer.step()


def nothing(self: Any, epoch: int, at: int, optimizer: Any, closure: Any = None) -> None:
    closure()
    if at != STEPS - 1:
        optimizer.step()


@pytest.mark.parametrize(
    ("methods", "made"),
    [
        ({"optimizer_step": no_step}, 3),
        ({"on_train_batch_start": lambda _, __, at: -1 if at == 3 else None}, 3),
        ({"optimizer_step": nothing}, STEPS - 1),
    ],
)
def test_a_step_that_lightning_leaves_out_ends_the_fit(
    methods: dict[str, Any], made: int, allowance: Budget, tmp_path: Path
) -> None:
    """The last one of the fit too: nothing is claimed then."""
    private = Private()
    with pytest.raises(NoGuaranteeError, match=LEFT_OUT):
        InLightning().fit(private, allowance, tmp_path, methods=methods, epochs=1 + (made == 3))
    assert private.sgd.made == made
    assert private.untouched_since
    assert not (tmp_path / "privacy.json").exists()


def test_a_training_step_without_a_loss_ends_the_fit(allowance: Budget, tmp_path: Path) -> None:
    private = Private()
    with (
        pytest.warns(UserWarning, match="returned `None`"),
        pytest.raises(ValueError, match="Per sample gradient is not initialized"),
    ):
        InLightning().fit(private, allowance, tmp_path, methods={"training_step": lambda *_: None})
    assert private.sgd.made == 0
    assert not (tmp_path / "privacy.json").exists()


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_batch_that_a_loader_leaves_out_ends_the_fit(allowance: Budget, tmp_path: Path) -> None:
    """Lightning passes over a batch that is None, without asking anybody."""
    private = Private()
    collate, given = private.loader.collate_fn, list[int]()

    def dropping(records: list[Any]) -> Any:
        given.append(1)
        return None if len(given) == 4 else collate(records)

    private.loader.collate_fn = dropping
    with pytest.raises(NoGuaranteeError, match=r"1 batch.*drawn and had no step"):
        InLightning().fit(private, allowance, tmp_path)
    assert private.sgd.made == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_limited_to_whole_batches_skips_no_step(
    workers: int, allowance: Budget, tmp_path: Path
) -> None:
    """After so many whole batches, whatever is in them."""
    private = Private(workers=workers)
    InLightning().fit(private, allowance, tmp_path, epochs=3, limit_train_batches=5)
    assert private.sgd.made == 15


@pytest.mark.parametrize("last", [False, True])
def test_a_step_that_hugging_face_leaves_out_ends_the_training(
    last: bool, allowance: Budget, tmp_path: Path
) -> None:
    private = Private()
    genuine, calls, left_out = private.optimizer.step, list[int](), STEPS - 1 if last else 3

    def skipping(_: Any, closure: Any = None) -> Any:
        calls.append(1)
        return None if len(calls) == left_out + 1 else genuine(closure)

    private.optimizer.step = MethodType(skipping, private.optimizer)
    with pytest.raises(NoGuaranteeError, match=LEFT_OUT):
        InHuggingFace().fit(private, allowance, tmp_path, steps_max=STEPS)
    assert private.sgd.made == left_out
    assert not (tmp_path / "privacy.json").exists()


# --- updates without noise


def update_without_noise(net: Net, optimizer: Any, batch: Any) -> None:
    """Make the update that the optimizer inside Opacus' makes of ordinary gradients."""
    optimizer.zero_grad()
    net(**batch)["loss"].backward()
    left = copies(optimizer.original_optimizer)
    with pytest.raises(NoGuaranteeError, match="gradients that may have no noise"):
        optimizer.original_optimizer.step()
    assert all(map(torch.equal, left, copies(optimizer.original_optimizer)))


def test_pytorchs_optimizer_makes_no_step_beside_those_that_a_gate_allows(
    allowance: Budget,
) -> None:
    private, gate = Private(), StepGate(allowance)
    gate.guard(private.optimizer, private.loader)
    batches = iter(private.loader)
    for made in (1, 2):
        batch = next(batches)
        update_without_noise(private.net, private.optimizer, batch)
        gate.permit_step()
        step(private, batch)
        assert private.sgd.made == gate.steps == made
        update_without_noise(private.net, private.optimizer, batch)


def test_pytorchs_optimizer_makes_no_step_beside_those_that_the_accountant_allows(
    transport: Any,
) -> None:
    net, optimizer, loader, accountant = programme(transport)
    batches = iter(loader)
    for made in (1, 2):
        batch = next(batches)
        step_of(net, optimizer, batch)
        assert accountant._counted == made
        update_without_noise(net, optimizer, batch)


# --- steps that a user's own loop leaves out


def programme(transport: Any, workers: int = 0) -> tuple[Net, Any, Any, Any]:
    integration.connect(transport=transport)
    net, engine = Net(), PrivacyEngine(accountant="remote")
    _, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(Records(), batch_size=BATCH, num_workers=workers),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        wrap_model=False,
    )
    return net, optimizer, loader, engine.accountant


def train(net: Net, optimizer: Any, batches: Any, skip: int | None = None) -> None:
    for at, batch in enumerate(batches):
        optimizer.zero_grad()
        if at == skip:
            continue  # as for a loss that is not finite
        net(**batch)["loss"].backward()
        optimizer.step()


@pytest.mark.parametrize("kept_ahead", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("skip", [0, 5, STEPS - 2, STEPS - 1])
def test_no_batch_is_drawn_after_one_without_a_step(
    skip: int, workers: int, kept_ahead: int, transport: Any
) -> None:
    """It is detected when the next batch is drawn, or in the next pass, even when prefetching."""
    net, optimizer, loader, accountant = programme(transport, workers)
    batches = prepare_data_loader(loader, put_on_device=False) if kept_ahead else loader
    train(net, optimizer, batches)
    with pytest.raises(NoGuaranteeError, match="drawn and had no step"):
        train(net, optimizer, itertools.chain(batches, batches), skip)
    assert accountant.made <= 2 * STEPS - 1
    with pytest.raises(NoGuaranteeError, match="drawn and had no step"):
        next(iter(batches))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_is_left_between_two_batches_may_go_on(workers: int, transport: Any) -> None:
    net, optimizer, loader, accountant = programme(transport, workers)
    for _ in range(3):
        for at, batch in enumerate(loader):
            step_of(net, optimizer, batch)
            if at == 4:
                break
    train(net, optimizer, loader)
    assert accountant.made == 15 + STEPS


def step_of(net: Net, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    net(**batch)["loss"].backward()
    optimizer.step()


def test_an_error_between_a_batch_and_its_step_ends_the_run(transport: Any) -> None:
    net, optimizer, loader, accountant = programme(transport)
    batches = iter(loader)
    step_of(net, optimizer, next(batches))
    with pytest.raises(TypeError):
        net(**next(batches), more=1)
    with pytest.raises(NoGuaranteeError, match="drawn and had no step"):
        next(batches)
    assert accountant.made == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_no_physical_batch_is_drawn_after_one_without_a_step(workers: int, transport: Any) -> None:
    net, optimizer, loader, _ = programme(transport, workers)
    with (
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
        ) as parts,
        pytest.raises(NoGuaranteeError, match="passed over"),
    ):
        train(net, optimizer, parts, skip=3)


# --- batches that are empty


def test_a_rank_gives_its_empty_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opacus leaves them out: with a record there is a step, and without it there is none."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    seen = list[torch.Tensor]()
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        sampler = DistributedUniformWithReplacementSampler(
            total_size=7, sample_rate=1 / 50, generator=torch.Generator().manual_seed(rank)
        )
        drawn = list(sampler)
        assert len(drawn) == len(sampler) == 50
        assert any(len(each) == 0 for each in drawn)
        sampler.sample_rate = 1.0
        seen.append(next(iter(sampler)))
    assert sorted(torch.cat(seen).tolist()) == list(range(7))


def test_an_empty_batch_has_a_step(transport: Any) -> None:
    """Its step is one of noise alone."""
    integration.connect(transport=transport)
    net, data = torch.nn.Linear(6, 2), TensorDataset(torch.randn(50, 6), torch.zeros(50).long())
    _, optimizer, loader = PrivacyEngine(accountant="remote").make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        wrap_model=False,
    )

    def over(*, empty: bool) -> None:
        for examples, labels in loader:
            optimizer.zero_grad()
            if len(examples) or empty:
                torch.nn.functional.cross_entropy(net(examples), labels).backward()
                optimizer.step()

    over(empty=True)
    with pytest.raises(NoGuaranteeError, match="even if it is empty"):
        over(empty=False)
