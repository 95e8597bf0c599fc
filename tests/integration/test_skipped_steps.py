"""A step that is left out after its batch was drawn: refused, whatever leaves it out.

Parameters that stay as they were tell of the record for which they did, and no noise hides that.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.helpers import nightly
from tests.support.lazy_modules import LazyModule
from training_client.budget import Budget
from training_client.client import AccountingService
from training_client.errors import NoGuaranteeError
from training_client.plan import Plan

programs = LazyModule("tests.integration.frameworks")
acceleration = LazyModule("accelerate.optimizer")
integration = LazyModule("training_client.integrations.opacus.accountant")
RECORDS, BATCH = 400, 20
STEPS = RECORDS // BATCH
LEFT_OUT = "drawn and had no step|was left out"
LOST = "drawn and had no step"

pytestmark = [
    pytest.mark.slow,  # importing both frameworks takes ten seconds
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),  # noise is drawn by torch in tests
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # inputs are data
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning
]


@pytest.fixture(autouse=True)
def _accelerated() -> None:
    """Load what changes Opacus, and create the accelerator that wrapped optimizers need."""
    assert callable(integration.connect)
    LazyModule("accelerate").Accelerator(cpu=True)


@pytest.fixture
def allowance(service: AccountingService) -> Budget:
    return Budget(service, Plan(RECORDS, BATCH / RECORDS, 1.0, 1.0), 50.0, 1e-5)


# --- scaled losses, and half precision


def test_a_grad_scaler_refuses_a_private_optimizer() -> None:
    """At once, and not only where a gradient overflows; accelerate's too."""

    def wrapped(optimizer: Any, scaler: Any) -> Any:
        return acceleration.AcceleratedOptimizer(optimizer, scaler=scaler)

    for use in (
        lambda optimizer, scaler: scaler.step(optimizer),
        lambda optimizer, scaler: scaler.unscale_(optimizer),
        lambda optimizer, scaler: scaler.step(wrapped(optimizer, None)),
        lambda optimizer, scaler: scaler.unscale_(wrapped(optimizer, None)),
        lambda optimizer, scaler: wrapped(optimizer, scaler).step(),
    ):
        private, scaler = programs.Private(), torch.amp.GradScaler("cpu")
        scaler.scale(private.net(**next(iter(private.loader)))["loss"]).backward()
        with pytest.raises(NoGuaranteeError, match=r"GradScaler.*float32.*bfloat16"):
            use(private.optimizer, scaler)
        assert private.sgd.made == 0


def test_a_grad_scaler_still_works_for_other_optimizers() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    ordinary, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(ordinary)
    assert weight.item() == 0.0
    private = programs.Private()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(private.net(**next(iter(private.loader)))["loss"]).backward()
    off.step(private.optimizer)
    assert private.sgd.made == 1


def test_lightning_s_half_precision_is_refused(allowance: Budget, tmp_path: Path) -> None:
    private = programs.Private()
    for options in (
        {"plugins": [LazyModule("pytorch_lightning.plugins").MixedPrecision("16-mixed", "cpu")]},
        {"precision": "16-true"},
        {"precision": "bf16-true"},
    ):
        with pytest.raises(NoGuaranteeError, match="precision="):
            programs.InLightning().fit(private, allowance, tmp_path, **options)
        private.net.float()
    assert private.sgd.made == 0


def test_lightning_may_mix_in_bfloat16(allowance: Budget, tmp_path: Path) -> None:
    private = programs.Private()
    programs.InLightning().fit(private, allowance, tmp_path, precision="bf16-mixed", epochs=1)
    assert private.sgd.made == STEPS


def test_options_of_hugging_face_that_skip_steps_are_refused(
    allowance: Budget, tmp_path: Path
) -> None:
    private = programs.Private()
    usual = {
        "gradient_accumulation_steps": 1, "max_steps": -1, "fp16": False,
        "auto_find_batch_size": False,
    }  # fmt: skip
    for options, scaler, name in (
        ({"fp16": True}, None, "fp16=True"),
        ({"auto_find_batch_size": True}, None, "auto_find_batch_size=True"),
        ({}, torch.amp.GradScaler("cpu"), "accelerate trains with a GradScaler"),
    ):
        with pytest.raises(NoGuaranteeError, match=name):
            programs.huggingface.PrivacyCallback(allowance, tmp_path).on_train_begin(
                SimpleNamespace(**usual | options),
                SimpleNamespace(global_step=0),
                SimpleNamespace(),
                optimizer=SimpleNamespace(optimizer=private.optimizer, scaler=scaler),
                train_dataloader=private.loader,
            )


def test_parameters_in_half_precision_are_refused(allowance: Budget) -> None:
    for kind in (torch.float16, torch.bfloat16):
        private = programs.Private()
        private.net.to(kind)
        with pytest.raises(NoGuaranteeError, match=rf"{kind}.*keep them in float32"):
            private.gated(allowance)


def program(transport: Any, workers: int = 0) -> Any:
    """Return a model made private by an engine whose accountant is the service."""
    integration.connect(transport=transport)
    return programs.Private(workers=workers, accountant="remote")


@pytest.mark.parametrize(("value", "gated"), [(float("inf"), True), (float("nan"), False)])
def test_a_gradient_that_is_not_finite_ends_the_run(
    value: float, gated: bool, transport: Any, allowance: Budget
) -> None:
    """Opacus adds it up: of one record it makes all parameters non-finite, noise or not."""
    private = programs.Private() if gated else program(transport)
    gate = private.gated(allowance) if gated else None
    batch = next(iter(private.loader))
    if gate is not None:
        gate.permit_step()
    batch["examples"][0] = value
    with pytest.raises(NoGuaranteeError, match="not finite"):
        programs.step(private, batch)
    assert all(bool(each.isfinite().all()) for each in private.net.parameters())


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
    private = programs.Private()
    with pytest.raises(NoGuaranteeError, match=LEFT_OUT):
        programs.InLightning().fit(
            private, allowance, tmp_path, methods=methods, epochs=1 + (made == 3)
        )
    assert private.sgd.made == made
    assert private.untouched_since
    assert not (tmp_path / "privacy.json").exists()


def test_a_training_step_without_a_loss_ends_the_fit(allowance: Budget, tmp_path: Path) -> None:
    private = programs.Private()
    with (
        pytest.warns(UserWarning, match="returned `None`"),
        pytest.raises(ValueError, match="Per sample gradient is not initialized"),
    ):
        programs.InLightning().fit(
            private, allowance, tmp_path, methods={"training_step": lambda *_: None}
        )
    assert private.sgd.made == 0
    assert not (tmp_path / "privacy.json").exists()


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_batch_that_a_loader_leaves_out_ends_the_fit(allowance: Budget, tmp_path: Path) -> None:
    """Lightning passes over a batch that is None, without asking anybody."""
    private = programs.Private()
    collate, given = private.loader.collate_fn, list[int]()

    def dropping(records: list[Any]) -> Any:
        given.append(1)
        return None if len(given) == 4 else collate(records)

    private.loader.collate_fn = dropping
    with pytest.raises(NoGuaranteeError, match=r"1 batch.*drawn and had no step"):
        programs.InLightning().fit(private, allowance, tmp_path)
    assert private.sgd.made == 3


def test_an_epoch_limited_to_whole_batches_skips_no_step(allowance: Budget, tmp_path: Path) -> None:
    """After so many whole batches, whatever is in them; workers have drawn more ahead."""
    private = programs.Private(workers=2)
    programs.InLightning().fit(private, allowance, tmp_path, epochs=3, limit_train_batches=5)
    assert private.sgd.made == 15


@pytest.mark.parametrize("last", [False, True])
def test_a_step_that_hugging_face_leaves_out_ends_the_training(
    last: bool, allowance: Budget, tmp_path: Path
) -> None:
    private = programs.Private()
    genuine, calls, left_out = private.optimizer.step, list[int](), STEPS - 1 if last else 3

    def skipping(_: Any, closure: Any = None) -> Any:
        calls.append(1)
        return None if len(calls) == left_out + 1 else genuine(closure)

    private.optimizer.step = MethodType(skipping, private.optimizer)
    with pytest.raises(NoGuaranteeError, match=LEFT_OUT):
        programs.InHuggingFace().fit(private, allowance, tmp_path, steps_max=STEPS)
    assert private.sgd.made == left_out
    assert not (tmp_path / "privacy.json").exists()


# --- updates without noise


def update_without_noise(private: Any, batch: Any) -> None:
    """Make the update that the optimizer inside Opacus' makes of ordinary gradients."""
    private.optimizer.zero_grad()
    private.net(**batch)["loss"].backward()
    left = programs.copies(private.sgd)
    with pytest.raises(NoGuaranteeError, match="gradients that may have no noise"):
        private.optimizer.original_optimizer.step()
    assert all(map(torch.equal, left, programs.copies(private.sgd)))


@pytest.mark.parametrize("gated", [True, False])
def test_pytorchs_optimizer_makes_no_step_beside_those_that_are_allowed(
    gated: bool, allowance: Budget, transport: Any
) -> None:
    """By a gate, or by the engine's accountant."""
    private = programs.Private() if gated else program(transport)
    gate = private.gated(allowance) if gated else None
    batches = iter(private.loader)
    for made in (1, 2):
        batch = next(batches)
        if gate is not None:
            update_without_noise(private, batch)
            gate.permit_step()
        programs.step(private, batch)
        assert private.sgd.made == made
        assert (gate.steps if gate is not None else private.engine.accountant.made) == made
        update_without_noise(private, batch)


# --- steps that a user's own loop leaves out


def train(private: Any, batches: Any, skip: int | None = None) -> None:
    for at, batch in enumerate(batches):
        if at == skip:
            continue  # as for a loss that is not finite
        programs.step(private, batch)


@pytest.mark.parametrize(
    ("skip", "workers", "kept_ahead"),
    [
        (5, 0, 0), (0, 2, 1), (STEPS - 2, 0, 1), (STEPS - 1, 2, 0), (STEPS - 1, 0, 1),
        *(nightly(*each) for each in [
            (0, 0, 0), (0, 0, 1), (0, 2, 0), (5, 0, 1), (5, 2, 0), (5, 2, 1),
            (STEPS - 2, 0, 0), (STEPS - 2, 2, 0), (STEPS - 2, 2, 1), (STEPS - 1, 0, 0),
            (STEPS - 1, 2, 1),
        ]),
    ],
)  # fmt: skip
def test_no_batch_is_drawn_after_one_without_a_step(
    skip: int, workers: int, kept_ahead: int, transport: Any
) -> None:
    """It is detected when the next batch is drawn, or in the next pass, even when prefetching."""
    private = program(transport, workers)
    prepare = LazyModule("accelerate.data_loader").prepare_data_loader
    batches = prepare(private.loader, put_on_device=False) if kept_ahead else private.loader
    train(private, batches)
    with pytest.raises(NoGuaranteeError, match=LOST):
        train(private, itertools.chain(batches, batches), skip)
    with pytest.raises(NoGuaranteeError, match=LOST):
        next(iter(batches))
    assert private.sgd.made <= 2 * STEPS - 1


@pytest.mark.parametrize("workers", [2, nightly(0)])
def test_a_loop_that_is_left_between_two_batches_may_go_on(workers: int, transport: Any) -> None:
    private = program(transport, workers)
    for _ in range(3):
        train(private, itertools.islice(private.loader, 5))
    train(private, private.loader)
    assert private.engine.accountant.made == 15 + STEPS


def test_an_error_between_a_batch_and_its_step_ends_the_run(transport: Any) -> None:
    private = program(transport)
    batches = iter(private.loader)
    programs.step(private, next(batches))
    with pytest.raises(TypeError):
        private.net(**next(batches), more=1)
    with pytest.raises(NoGuaranteeError, match=LOST):
        next(batches)
    assert private.engine.accountant.made == 1


@pytest.mark.parametrize("workers", [2, nightly(0)])
def test_no_physical_batch_is_drawn_after_one_without_a_step(workers: int, transport: Any) -> None:
    private = program(transport, workers)
    with pytest.raises(NoGuaranteeError, match="passed over"):
        train(private, private.split(), skip=3)


# --- batches that are empty


def test_a_rank_gives_its_empty_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opacus leaves them out: with a record there is a step, and without it there is none."""
    samplers = LazyModule("opacus.utils.uniform_sampler")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    seen = list[torch.Tensor]()
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        sampler = samplers.DistributedUniformWithReplacementSampler(
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
    _, optimizer, loader = programs.PrivacyEngine(accountant="remote").make_private(
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
