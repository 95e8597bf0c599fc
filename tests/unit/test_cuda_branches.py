"""The branches for CUDA devices run with stubs, where there is no device.

CUDA's own kernels and generators are not tried by this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from training_client.private_step import noise
from training_client.private_step.kernels.matmul import full_precision
from training_client.private_step.layers import model_checks
from training_client.private_step.model_state import random_state, restored_random_state
from training_client.private_step.noise import FreshGenerator

CUDA = torch.device("cuda", 1)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, torch.Tensor]:
    """Replace the states of CUDA's generators by a dictionary; return it."""
    found = {CUDA: torch.tensor([1, 2, 3], dtype=torch.uint8)}

    def get_state(device: torch.device) -> torch.Tensor:
        return found[device].clone()

    def set_state(state: torch.Tensor, device: torch.device) -> None:
        found[device] = state

    monkeypatch.setattr(torch.cuda, "get_rng_state", get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    return found


def draw(states: dict[torch.device, torch.Tensor]) -> None:
    """Change the state of CUDA's generator, as a draw does."""
    states[CUDA] = states[CUDA] + 1


def test_draws_on_a_device_change_the_random_state(
    states: dict[torch.device, torch.Tensor],
) -> None:
    before = random_state(CUDA)
    assert torch.equal(before, random_state(CUDA))
    torch.rand(1)
    on_cpu = random_state(CUDA)
    draw(states)
    assert not torch.equal(before, on_cpu)
    assert not torch.equal(on_cpu, random_state(CUDA))


def test_the_random_state_of_a_device_is_restored(
    states: dict[torch.device, torch.Tensor],
) -> None:
    before = random_state(CUDA)
    with restored_random_state(CUDA):
        torch.rand(1)
        draw(states)
        assert not torch.equal(before, random_state(CUDA))
    assert torch.equal(before, random_state(CUDA))


def test_a_model_on_a_device_is_checked_with_its_random_numbers_wherever_the_targets_are(
    states: dict[torch.device, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, batch = random_state(CUDA), (torch.ones(4, 2), torch.zeros(4))

    def run(examples: torch.Tensor, targets: torch.Tensor, **_: Any) -> torch.Tensor:
        draw(states)
        return examples.sum(1) + targets

    model_checks.losses_beside_others(run, batch, CUDA)
    assert torch.equal(before, random_state(CUDA))
    # private: the stub has no layers to compare
    monkeypatch.setattr(model_checks, "_require_equal_passes", lambda *_: None)
    _, is_random = model_checks._run_beside_others(run, batch, CUDA)  # type: ignore[arg-type]
    assert is_random


@dataclass(eq=False)
class StubGenerator:
    """A generator on a CUDA device, which keeps its seeds."""

    device: torch.device = CUDA
    seeds: list[int] = field(default_factory=list)

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def reseed(self) -> None:
        FreshGenerator.reseed(self)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the state of a CUDA generator has another form: {name}")


def test_a_generator_on_a_device_gets_a_seed_of_63_bits() -> None:
    generator = StubGenerator()
    for _ in range(20):
        generator.reseed()
    assert len(set(generator.seeds)) == 20
    assert 2**58 < max(generator.seeds) < 2**63


def test_after_a_fork_only_generators_of_the_cpu_are_reseeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA cannot be used in a forked process."""
    on_cpu, on_cuda = FreshGenerator(torch.device("cpu")), StubGenerator()
    # private: no generator on a device can be made here
    monkeypatch.setattr(noise, "_GENERATORS", [on_cuda, on_cpu])
    before = on_cpu.get_state()
    noise._reseed_all()
    assert on_cuda.seeds == []
    assert not torch.equal(before, on_cpu.get_state())


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_products_on_a_device_have_full_precision_and_no_autocast(precision: str) -> None:
    def settings() -> tuple[str, str, bool]:
        products: Any = torch.backends.cuda.matmul
        return (
            torch.get_float32_matmul_precision(),
            products.fp32_precision,
            torch.is_autocast_enabled("cuda"),
        )

    torch.set_float32_matmul_precision(precision)
    torch.set_autocast_enabled("cuda", True)
    try:
        before = settings()
        with full_precision(CUDA):
            assert settings() == ("highest", "ieee", False)
        assert settings() == before
        assert before[2]
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_float32_matmul_precision("highest")
