"""The ends of libraries' generators, and the lower bounds of δ that follow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats

from accountant_service import mechanisms
from accountant_service.accounting import noise_tails
from accountant_service.accounting.noise_tails import (
    GENERATORS,
    BoxMuller,
    Inversion,
    NoiseTail,
    find_noise_tails,
)
from scripts import noise_tails as script
from scripts.page_parts import read_part

OF_NAME = {each.name: each for each in GENERATORS}
CPU, CUDA = OF_NAME["PyTorch, float32, CPU"], OF_NAME["PyTorch, float32, CUDA"]
RUN = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 64 / 60_000, "steps": 9380}


def radii(draws: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """Return the radii of PyTorch's pairs, of which one number is shifted."""
    pairs = draws.reshape(-1, 2, 8).double()
    return torch.hypot(pairs[:, 0] + shift, pairs[:, 1])


def test_pytorch_draws_no_pair_beyond_its_end_and_shifted_pairs_as_often_as_is_claimed() -> None:
    draws = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1))
    assert float(radii(draws).max()) < CPU.largest * (1 + 2**-18)
    for noise in (0.2, 0.3):
        seen, expected = radii(draws, 1 / noise), CPU.escape_probability(1 / noise)
        share = float((seen > CPU.largest * (1 + 2**-18)).double().mean())
        deviation = math.sqrt(expected / seen.numel())
        assert -5 * deviation < share - expected < 0.003 * expected + 5 * deviation


@pytest.mark.parametrize("name", ["PyTorch, float32, CPU", "PyTorch, float32, CUDA"])
@pytest.mark.parametrize("noise", [2.0, 1.0, 0.56, 0.2, 0.02])
def test_box_muller_is_close_to_marcums_q(name: str, noise: float) -> None:
    """P(|Z + μ| > r) for exact normal numbers counts radii that are never drawn."""
    generator = OF_NAME[name]
    marcum = stats.ncx2.sf(generator.largest**2, 2, noise**-2)
    never = math.exp(-(generator.largest**2) / 2)
    assert never == pytest.approx(2.0**-24 if generator is CPU else 2.0**-33)
    assert 0.995 * (marcum - never) < generator.escape_probability(1 / noise) <= marcum


@pytest.mark.parametrize("of_end", [0.12, 0.5, 0.9, 1.0, 1.01, 1.1, 1.3, 1.5, 1.9])
@pytest.mark.parametrize("bits", [12, 16])
@pytest.mark.parametrize("offset", [1.0, 0.5])
def test_box_muller_counts_no_more_than_all_its_pairs(
    of_end: float, bits: int, offset: float
) -> None:
    """With 16 bits most uniforms are in cells; a cell counts at its radius that is safe."""
    generator = BoxMuller("", "", "", bits, offset)
    end, shift, angles = generator.largest, of_end * generator.largest, 1 << bits
    radius = np.sqrt(-2 * np.log(np.ldexp(np.arange(1 << bits) + offset, -bits)))
    excess = end**2 - shift**2 - radius**2
    cosine = np.divide(
        excess, 2 * radius * shift, out=np.copysign(np.inf, excess), where=radius > 0
    )
    in_arc = 2 * np.ceil(np.arccos(np.clip(cosine, -1, 1)) / (2 * np.pi) * angles) - 1
    beyond = np.where(cosine < -1, angles, np.maximum(in_arc, 0))
    exact = float(beyond.sum()) / angles**2
    found = generator.escape_probability(shift)
    assert found <= exact
    assert found >= 0.97 * exact - 2.0**-12
    assert 1 - found <= 1.02 * (1 - exact) + 2.0**-10


def test_the_least_uniform_number_of_tensorflow_is_counted_as_it_is() -> None:
    generator = OF_NAME["TensorFlow, float32"]
    assert isinstance(generator, BoxMuller)
    uniform = np.arange(1 << 23, dtype=np.float32) * np.float32(2.0**-23)
    radius = np.sqrt(-2 * np.log(np.maximum(uniform, np.float32(1e-7)).astype(float)))
    assert generator.largest == pytest.approx(float(radius.max()))
    near = radius[radius > generator.largest - 1.0]
    cosine = (generator.largest**2 - near**2 - 1) / (2 * near)
    exact = float(np.arccos(np.clip(cosine, -1, 1)).sum()) / math.pi * 2.0**-23
    assert 0.99 * exact < generator.escape_probability(1.0) <= exact


@pytest.mark.spread(first=5)
@pytest.mark.parametrize("shift", [0.3, 1.0, 2.0, 5.0, 12.0])
@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_jax_draws_what_its_mantissa_allows(name: str, dtype: torch.dtype, shift: float) -> None:
    """Every uniform number that JAX makes, computed as it does, and what they become."""
    generator = OF_NAME[f"JAX, {name}"]
    assert isinstance(generator, Inversion)
    if dtype == torch.float32 and shift not in (1.0, 5.0):
        return
    bits = generator.bits
    one, least = torch.tensor(1, dtype=dtype), -1 + 2.0 ** (-bits - 1)
    low = torch.tensor(least, dtype=dtype)
    assert float(low) == least == float(torch.nextafter(-one, 0 * one))
    uniform = (torch.arange(1 << bits) * 2.0**-bits).to(dtype) * (one - low) + low
    draws = special.ndtri((1 + uniform.double().numpy()) / 2)
    assert generator.largest == pytest.approx(draws.max(), rel=1e-12)
    exact = float((draws + shift > draws.max()).mean())
    found = generator.escape_probability(shift)
    assert found <= exact
    assert found >= 0.6 * exact - 2.0**-bits if dtype == torch.bfloat16 else found >= 0.99 * exact


def test_the_printed_ends_are_those_of_the_documentation() -> None:
    ends = {each.name: round(each.largest, 3) for each in GENERATORS}
    assert ends == {
        "PyTorch, float32, CPU": 5.768,
        "PyTorch, float32, CUDA": 6.764,
        "PyTorch, float64, CPU": 8.572,
        "TensorFlow, float32": 5.678,
        "JAX, float32": 5.22,
        "JAX, bfloat16": 2.521,
        "NumPy, float64, Generator (ziggurat)": 12.226,
        "NumPy, float64, RandomState (polar)": 12.007,
    }


def tails(run: Any, *libraries: str) -> tuple[NoiseTail, ...]:
    return find_noise_tails(mechanisms.from_json(run), libraries)


def test_opacus_example_on_a_cpu_has_more_than_twice_its_delta() -> None:
    found = tails(RUN, "PyTorch")
    assert [each.generator for each in found] == [
        "PyTorch, float32, CPU", "PyTorch, float32, CUDA", "PyTorch, float64, CPU",
    ]  # fmt: skip
    escape = CPU.escape_probability(1.0)
    exact = 1 - (1 - 64 / 60_000 * escape) ** 9380
    assert 0.999999 * exact < found[0].delta_lower < exact
    assert 2.3e-5 < found[0].delta_lower < 2.32e-5
    assert found[1].delta_lower < 2e-7
    assert tails(RUN, "NumPy") == ()


def test_each_release_counts_and_those_that_are_not_one_draw_do_not() -> None:
    gaussian, escape = {"kind": "gaussian", "noise_multiplier": 0.5}, CPU.escape_probability(2.0)
    sampled = {"kind": "poisson_sampled", "sample_rate": 0.25, "mechanism": gaussian}
    correlated = {
        "kind": "matrix_factorization", "noise_multiplier": 0.5, "coefficients": [1.0, 0.5],
        "steps": 10, "min_separation": 5, "participations": 2,
    }  # fmt: skip
    fixed = {
        "kind": "fixed_size_sampled",
        "dataset_size": 8,
        "batch_size": 4,
        "mechanism": gaussian,
    }
    both = {"kind": "composed", "mechanisms": [gaussian, gaussian]}
    merged = {"kind": "poisson_sampled", "sample_rate": 0.25, "mechanism": both}
    run = {"kind": "dp_sgd", "noise_multiplier": 0.5, "sample_rate": 0.01, "steps": 250}
    expected = [
        (gaussian, 1.0),
        (sampled, 0.25),
        (fixed, 0.5),
        ({"kind": "repeated", "count": 3, "mechanism": both}, 6.0),
        (run, 2.5),
        (run | {"sampling": "none", "sample_rate": 1.0}, 250.0),
        (run | {"sampling": "shuffled"}, 2.0),
        (run | {"sampling": "balls_in_bins", "steps": 200}, 2.0),
        (merged, 0.0),
        (correlated, 0.0),
        ({"kind": "laplace", "noise_multiplier": 0.5}, 0.0),
    ]
    for mechanism, times in expected:
        found = {each.generator: each.delta_lower for each in tails(mechanism, "PyTorch")}
        assert found.get(CPU.name, 0.0) == pytest.approx(times * escape, rel=0.02)
        assert found.get(CPU.name, 0.0) <= times * escape


def test_a_bound_is_at_most_one_and_none_is_below_zero() -> None:
    loud = RUN | {"noise_multiplier": 0.01, "sample_rate": 1.0}
    assert 0.99 < tails(loud, "PyTorch")[0].delta_lower <= 1
    quiet = RUN | {"noise_multiplier": 1e6}
    assert all(0 < each.delta_lower < 1e-3 for each in tails(quiet, "PyTorch", "JAX"))
    assert noise_tails._delta_lower(CPU, []) == 0.0


@pytest.mark.parametrize("name", ["generators", pytest.param("runs", marks=pytest.mark.slow)])
def test_the_page_has_the_tables_of_the_script(name: str) -> None:
    assert read_part(script.PAGE, name) == "".join(script.TABLES[name]()).strip()
