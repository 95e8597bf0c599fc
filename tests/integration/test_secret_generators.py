"""Noise and batches stay secret when a program seeds PyTorch, as frameworks do by default."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch.utils.data import DataLoader

from training_client.budget import Budget
from training_client.client import AccountingService
from training_client.errors import NoGuaranteeError
from training_client.integrations import opacus as integration
from training_client.integrations.opacus_checks import plan_of
from training_client.integrations.secret_generators import find_generator
from training_client.plan import Plan
from training_client.private_step.noise import FreshGenerator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning
    from opacus import PrivacyEngine
    from opacus.data_loader import DPDataLoader
    from opacus.optimizers import DPOptimizer, ddp_perlayeroptimizer, optimizer
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from opacus.utils.uniform_sampler import (
        DistributedUniformWithReplacementSampler,
        UniformWithReplacementSampler,
    )

    from tests.integration.frameworks import (
        BATCH,
        RECORDS,
        InHuggingFace,
        InLightning,
        Net,
        Private,
        Records,
    )

PLAN = Plan(RECORDS, BATCH / RECORDS, 1.0, 1.0)
CPU = torch.device("cpu")
SEED = 42  # the default of Hugging Face's Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # inputs are data
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning
]


class Observed:
    """A run from a seeded program: its first weights, its batches, its noise, and its last weights.

    Args:
        train: trains a private model.
        engine: makes the model private; an accountant of Opacus' own by default.
    """

    def __init__(
        self,
        train: Callable[[Private], None],
        monkeypatch: pytest.MonkeyPatch,
        engine: Callable[[], PrivacyEngine] = PrivacyEngine,
    ) -> None:
        self.rows, self.noise = list[int](), list[torch.Tensor]()
        with monkeypatch.context() as patch:
            patch.setattr("tests.integration.frameworks.PrivacyEngine", engine)
            patch.setattr(Records, "__getitem__", self._observe_rows(Records.__getitem__))
            patch.setattr(DPOptimizer, "add_noise", self._observe_noise(DPOptimizer.add_noise))
            torch.manual_seed(SEED)
            private = Private()
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


def test_a_seeded_opacus_program_has_secret_noise_and_batches(
    monkeypatch: pytest.MonkeyPatch, transport: httpx.MockTransport
) -> None:
    integration.connect(transport=transport)

    def train(private: Private) -> None:
        torch.manual_seed(SEED)
        for batch in private.loader:
            private.optimizer.zero_grad()
            private.net(**batch)["loss"].backward()
            private.optimizer.step()

    runs = [Observed(train, monkeypatch, lambda: PrivacyEngine(accountant="remote")) for _ in "12"]
    runs[0].require_secrets_of_its_own(runs[1])


def test_split_batches_are_secret_too(
    monkeypatch: pytest.MonkeyPatch, transport: httpx.MockTransport
) -> None:
    integration.connect(transport=transport)

    def train(private: Private) -> None:
        with BatchMemoryManager(
            data_loader=private.loader, max_physical_batch_size=8, optimizer=private.optimizer
        ) as parts:
            torch.manual_seed(SEED)
            for batch in parts:
                private.optimizer.zero_grad()
                private.net(**batch)["loss"].backward()
                private.optimizer.step()

    runs = [Observed(train, monkeypatch, lambda: PrivacyEngine(accountant="remote")) for _ in "12"]
    runs[0].require_secrets_of_its_own(runs[1])


@pytest.mark.parametrize("framework", [InLightning(), InHuggingFace()])
def test_a_seeded_framework_has_secret_noise_and_batches(
    framework: Any,
    monkeypatch: pytest.MonkeyPatch,
    transport: httpx.MockTransport,
    tmp_path: Path,
) -> None:
    """Lightning is seeded as its users do it; the Trainer seeds by itself."""
    service, runs = AccountingService("http://test", transport=transport), list[Observed]()

    def train(private: Private) -> None:
        if isinstance(framework, InLightning):
            pytorch_lightning.seed_everything(SEED)
        folder = tmp_path / str(len(runs))
        framework.fit(private, Budget(service, PLAN, 2.0, 1e-5), folder)

    for _ in range(2):
        runs.append(Observed(train, monkeypatch))
    runs[0].require_secrets_of_its_own(runs[1])


@pytest.mark.parametrize("module", [optimizer, ddp_perlayeroptimizer])
def test_every_optimizer_without_a_generator_draws_secret_noise(module: Any) -> None:
    """The per-layer optimizer of several ranks passes no generator, even if it was given one."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(SEED)
        drawn.append(module._generate_noise(std=2.0, reference=torch.zeros(10_000)))
    assert not torch.equal(*drawn)
    assert all(abs(float(each.std()) - 2.0) < 0.1 for each in drawn)


def test_ranks_with_the_same_seed_draw_independent_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    places = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        torch.manual_seed(SEED)
        sampler = DistributedUniformWithReplacementSampler(
            total_size=2000, sample_rate=0.5, shuffle=False
        )
        places.append((next(iter(sampler)) - rank) // 2)  # in the rank's own records
    assert places[0].tolist() != places[1].tolist()


def test_drawing_leaves_the_default_generator_as_it_was() -> None:
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    list(UniformWithReplacementSampler(num_samples=100, sample_rate=0.1))
    optimizer._generate_noise(1.0, torch.zeros(9))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_has_one_fresh_generator() -> None:
    generator = find_generator(None, CPU)
    assert isinstance(generator, FreshGenerator)
    assert generator is find_generator(None, CPU)
    own = torch.Generator()
    assert find_generator(own, CPU) is own


def private(
    noise: torch.Generator | None = None, batches: torch.Generator | None = None
) -> tuple[DPOptimizer, DPDataLoader]:
    net = Net()
    _, made, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(Records(), batch_size=BATCH, generator=batches),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=noise,
        wrap_model=False,
    )
    return made, loader


@pytest.mark.parametrize("purpose", ["noise", "batches"])
@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), torch.Generator().manual_seed(1), torch.default_generator],
    ids=["with PyTorch's own seed", "seeded", "the default"],
)
def test_a_generator_that_may_be_known_is_refused(
    purpose: str, generator: torch.Generator, transport: httpx.MockTransport
) -> None:
    assert torch.Generator().initial_seed() == torch.Generator().initial_seed()  # not secret
    made, loader = private(**{purpose: generator})
    with pytest.raises(NoGuaranteeError, match=rf"{purpose}.*FreshGenerator"):
        plan_of(made, loader)
    integration.connect(transport=transport)
    made.attach_step_hook(integration.RemoteAccountant().get_optimizer_hook_fn(0.05, loader))
    before = [each.detach().clone() for each in made.params]
    made.zero_grad()
    net = made.params[0], made.params[1]
    batch = next(iter(loader))
    for each in net:
        each.grad_sample = torch.zeros(len(batch["labels"]), *each.shape)
    with pytest.raises(NoGuaranteeError, match=purpose):
        made.step()
    assert all(map(torch.equal, before, made.params))


def test_a_generator_that_the_system_seeded_may_be_passed() -> None:
    assert plan_of(*private(FreshGenerator(CPU), FreshGenerator(CPU))) == PLAN


def test_the_generator_of_secure_mode_is_kept() -> None:
    """A stand-in for torchcsprng's, which a `PrivacyEngine` gives to optimizer and sampler."""
    secure, (made, loader) = torch.Generator(), private()
    made.secure_mode, made.generator, loader.batch_sampler.generator = True, secure, secure
    assert plan_of(made, loader) == PLAN
    assert made.generator is secure
    assert loader.batch_sampler.generator is secure
    loader.batch_sampler.generator = torch.Generator()
    with pytest.raises(NoGuaranteeError, match="batches"):
        plan_of(made, loader)
