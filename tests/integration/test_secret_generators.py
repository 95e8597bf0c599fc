"""Noise and batches stay secret when a program seeds PyTorch, as frameworks do by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.lazy_modules import LazyModule
from training_client.budget import Budget
from training_client.client import AccountingService
from training_client.errors import NoGuaranteeError
from training_client.plan import Plan
from training_client.private_step.noise import FreshGenerator

programs = LazyModule("tests.integration.frameworks")
optimizers = LazyModule("opacus.optimizers")
samplers = LazyModule("opacus.utils.uniform_sampler")
integration = LazyModule("training_client.integrations.opacus.accountant")
checks = LazyModule("training_client.integrations.opacus.checks")
RECORDS, BATCH = 400, 20
PLAN = Plan(RECORDS, BATCH / RECORDS, 1.0, 1.0)
CPU = torch.device("cpu")
SEED = 42  # the default of Hugging Face's Trainer

pytestmark = [
    pytest.mark.slow,  # importing both frameworks takes ten seconds
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # inputs are data
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning
]


@pytest.fixture(autouse=True)
def _loaded() -> None:
    """Load the integration, which changes how Opacus draws noise and batches."""
    assert callable(integration.connect)


class Observed:
    """A run from a seeded program: its first weights, its batches, its noise, and its last weights.

    Args:
        train: trains a private model.
        accountant: of the engine that makes the model private.
    """

    def __init__(
        self,
        train: Callable[[Any], None],
        monkeypatch: pytest.MonkeyPatch,
        accountant: str = "prv",
    ) -> None:
        self.rows, self.noise = list[int](), list[torch.Tensor]()
        records, optimizer = programs.Records, optimizers.DPOptimizer
        with monkeypatch.context() as patch:
            patch.setattr(records, "__getitem__", self._observe_rows(records.__getitem__))
            patch.setattr(optimizer, "add_noise", self._observe_noise(optimizer.add_noise))
            torch.manual_seed(SEED)
            private = programs.Private(accountant=accountant)
            self.begun_with = private.begun_with
            train(private)
        self.released = private.sgd.left

    def _observe_rows(self, read: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        def observed(data: Any, row: int) -> Any:
            self.rows.append(row)
            return read(data, row)

        return observed

    def _observe_noise(self, add: Callable[[Any], None]) -> Callable[[Any], None]:
        def observed(private: Any) -> None:
            add(private)
            self.noise += [each.grad - each.summed_grad for each in private.params]

        return observed

    def require_secrets_of_its_own(self, other: Observed) -> None:
        assert all(map(torch.equal, self.begun_with, other.begun_with))  # seeds remain of use
        assert len(self.rows) > 100
        assert self.rows[:100] != other.rows[:100]
        assert len(self.noise) > 10
        assert not any(map(torch.equal, self.noise, other.noise))
        assert not any(map(torch.equal, self.released, other.released))


@pytest.mark.parametrize("split", [False, True])
def test_a_seeded_opacus_program_has_secret_noise_and_batches(
    split: bool, monkeypatch: pytest.MonkeyPatch, transport: httpx.MockTransport
) -> None:
    integration.connect(transport=transport)

    def train(private: Any) -> None:
        batches = private.split(8) if split else private.loader
        torch.manual_seed(SEED)
        for batch in batches:
            programs.step(private, batch)

    runs = [Observed(train, monkeypatch, "remote") for _ in "12"]
    runs[0].require_secrets_of_its_own(runs[1])


def test_a_seeded_framework_has_secret_noise_and_batches(
    framework: Any,
    monkeypatch: pytest.MonkeyPatch,
    service: AccountingService,
    tmp_path: Path,
) -> None:
    """Lightning is seeded as its users do it; the Trainer seeds by itself."""
    runs = list[Observed]()

    def train(private: Any) -> None:
        if isinstance(framework, programs.InLightning):
            programs.pytorch_lightning.seed_everything(SEED)
        framework.fit(private, Budget(service, PLAN, 2.0, 1e-5), tmp_path / str(len(runs)))

    for _ in range(2):
        runs.append(Observed(train, monkeypatch))
    runs[0].require_secrets_of_its_own(runs[1])


def test_ranks_with_the_same_seed_draw_independent_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    places = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        torch.manual_seed(SEED)
        sampler = samplers.DistributedUniformWithReplacementSampler(
            total_size=2000, sample_rate=0.5, shuffle=False
        )
        places.append((next(iter(sampler)) - rank) // 2)  # in the rank's own records
    assert places[0].tolist() != places[1].tolist()


def test_drawing_leaves_the_default_generator_as_it_was() -> None:
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    list(samplers.UniformWithReplacementSampler(num_samples=100, sample_rate=0.1))
    made, _ = private()
    for each in made.params:
        each.grad_sample = torch.zeros(3, *each.shape)
    torch.set_rng_state(before)
    made.pre_step()
    assert torch.equal(torch.get_rng_state(), before)


def private(
    noise: torch.Generator | None = None, batches: torch.Generator | None = None
) -> tuple[Any, Any]:
    net = programs.Net()
    _, made, loader = programs.PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(programs.Records(), batch_size=BATCH, generator=batches),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=noise,
        wrap_model=False,
    )
    return made, loader


@pytest.mark.parametrize("purpose", ["noise", "batches"])
def test_a_generator_that_may_be_known_is_refused(
    purpose: str, transport: httpx.MockTransport
) -> None:
    assert torch.Generator().initial_seed() == torch.Generator().initial_seed()  # not secret
    for generator in (torch.Generator(), torch.Generator().manual_seed(1), torch.default_generator):
        made, loader = private(**{purpose: generator})
        with pytest.raises(NoGuaranteeError, match=rf"{purpose}.*FreshGenerator"):
            checks.plan_of(made, loader)
        integration.connect(transport=transport)
        made.attach_step_hook(integration.RemoteAccountant().get_optimizer_hook_fn(0.05, loader))
        before = [each.detach().clone() for each in made.params]
        made.zero_grad()
        batch = next(iter(loader))
        for each in made.params:
            each.grad_sample = torch.zeros(len(batch["labels"]), *each.shape)
        with pytest.raises(NoGuaranteeError, match=purpose):
            made.step()
        assert all(map(torch.equal, before, made.params))


def test_a_generator_that_the_system_seeded_may_be_passed() -> None:
    assert checks.plan_of(*private(FreshGenerator(CPU), FreshGenerator(CPU))) == PLAN


def test_the_generator_of_secure_mode_is_kept() -> None:
    """A stand-in for torchcsprng's, which a `PrivacyEngine` gives to optimizer and sampler."""
    secure, (made, loader) = torch.Generator(), private()
    made.secure_mode, made.generator, loader.batch_sampler.generator = True, secure, secure
    assert checks.plan_of(made, loader) == PLAN
    assert made.generator is secure
    assert loader.batch_sampler.generator is secure
    loader.batch_sampler.generator = torch.Generator()
    with pytest.raises(NoGuaranteeError, match="batches"):
        checks.plan_of(made, loader)
