"""Noise on a grid: its exact law, the error of its table, and the ways to lose both."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from scipy import special, stats

from training_client.private_step import rounded_gaussian
from training_client.private_step.rounded_gaussian import NoiseGrid

KEY = bytes(range(32))
HALF_WORD = 1 << 63


def drawn(grid: NoiseGrid, size: int, key: bytes = KEY) -> np.ndarray:
    """Return noise as whole numbers."""
    return grid.draw_like(torch.empty(size), key).numpy()


DEVIATIONS = [0.3, 1.0, 2.7, 40.0]


def count_draws(deviation: float, size: int, key: bytes) -> np.ndarray:
    """Count draws by value, from −w to w with w = ⌈9s⌉; what is beyond counts as w."""
    width = math.ceil(9 * deviation)
    found = drawn(NoiseGrid(1.0, deviation), size, key).clip(-width, width).astype(np.int64)
    return np.bincount(found + width, minlength=2 * width + 1)


def require_law(counts: np.ndarray, deviation: float) -> None:
    """Raise unless counts fit the law of a rounded Gaussian, by χ² and for the rare values."""
    width = len(counts) // 2
    edges = np.arange(-width, width + 2) - 0.5
    expected = counts.sum() * np.diff(special.ndtr(edges / deviation))
    often = expected > 10
    statistic = float((((counts - expected) ** 2)[often] / expected[often]).sum())
    assert stats.chi2.sf(statistic, often.sum() - 1) > 1e-5
    assert stats.poisson.sf(counts[~often].sum() - 1, expected[~often].sum()) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_small_noise_has_the_law_of_a_rounded_gaussian(deviation: float) -> None:
    require_law(count_draws(deviation, 1_000_000, KEY), deviation)


def draw_in_pieces(cache: Any, run: object, deviation: float, pieces: int, size: int) -> Any:
    """Return the counts of pieces of a run, each drawn once: a run that is cut short goes on."""
    counts: Any = 0
    for piece in range(pieces):
        name = f"rounded-gaussian/{run}/{deviation}/{piece}"
        found = cache.get(name, None)
        if found is None:
            key = hashlib.sha256(name.encode()).digest()
            found = count_draws(deviation, size, key).tolist()
            cache.set(name, found)
        counts = counts + np.array(found)
    return counts


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_a_billion_draws_have_the_law(
    deviation: float, night_seed: int, request: pytest.FixtureRequest
) -> None:
    """In pieces of a second; they are counted again if the code of the noise has changed."""
    code = Path(rounded_gaussian.__file__).read_bytes()
    run = f"{night_seed}-{hashlib.sha256(code).hexdigest()[:16]}"
    counts = draw_in_pieces(request.config.cache, run, deviation, 100, 10_000_000)
    assert counts.sum() == 1e9
    require_law(counts, deviation)


def test_a_night_of_draws_goes_on_where_it_was_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It draws the pieces that are missing, and no other; the wrong law is found out."""
    kept: dict[str, list[int]] = {}
    cache = SimpleNamespace(get=kept.get, set=kept.__setitem__)
    made, genuine = list[bytes](), count_draws

    def count(deviation: float, size: int, key: bytes) -> np.ndarray:
        made.append(key)
        if len(made) == 3:
            raise KeyboardInterrupt
        return genuine(deviation, size, key)

    monkeypatch.setattr(sys.modules[__name__], "count_draws", count)
    with pytest.raises(KeyboardInterrupt):
        draw_in_pieces(cache, 1, 1.0, 5, 20_000)
    counts = draw_in_pieces(cache, 1, 1.0, 5, 20_000)
    assert len(made) == 6
    assert len(set(made)) == 5
    require_law(counts, 1.0)
    with pytest.raises(AssertionError):
        require_law(counts, 1.02)


def quantile(y: mpf) -> mpf:
    """Return h with P(|Z| > h) = y, by bisection."""
    low, high = mpf(0), mpf(60)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if mp.erfc(middle / mp.sqrt(2)) > y else (low, middle)
    return low


def words(rng: random.Random, count: int) -> list[int]:
    """Return words: ordinary, of the tails, and at the ends of the table's intervals."""
    made = [rng.getrandbits(64) for _ in range(count)]
    made += [rng.getrandbits(64) >> rng.randint(1, 62) for _ in range(count)]
    for _ in range(count):
        octave, part = rng.randint(31, 62), rng.randrange(64)
        made.append((1 << octave) + (part << (octave - 6)) + rng.choice([-1, 0, 1, 1 << 10]))
    return made


@pytest.mark.spread(second=1)
@pytest.mark.parametrize(
    "count", [pytest.param(25, id="few"), pytest.param(2_000, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("deviation", [0.4, 2.0**24, 2.0**28 * 1.37])
@pytest.mark.slow
def test_every_word_is_rounded_as_its_exact_quantile(
    monkeypatch: pytest.MonkeyPatch, deviation: float, count: int
) -> None:
    """The words of the tails lie below the table: ball arithmetic answers them, to 9 σ here."""
    given_words = words(random.Random(f"{count}"), count)
    # private: the keystream is replaced by chosen words
    monkeypatch.setattr(
        rounded_gaussian,
        "read_keystream",
        lambda *_: np.array(given_words[:131072], np.uint64),
    )
    found = drawn(NoiseGrid(1.0, deviation), len(given_words[:131072]))
    with mp.workdps(40):
        for word, number in zip(given_words, found.tolist(), strict=False):
            v = word & (HALF_WORD - 1)
            low, high = (
                mp.floor(mpf(deviation) * quantile(mpf(each) / HALF_WORD) + mpf(1) / 2)
                for each in (v + 1, max(v, mpf(2) ** -100))
            )
            assert low <= abs(number) <= high, (word, number)
            assert number == 0 or (number < 0) == bool(word >> 63)


@pytest.mark.slow
def test_the_table_is_within_its_bound() -> None:
    rng, table = random.Random(8), rounded_gaussian._make_table().reshape(-1, 8)
    assert math.isinf(table[-1, -1])
    with mp.workdps(40):
        for _ in range(100):
            row = rng.randrange(len(table) - 1)
            octave, part = divmod(row, 64)
            t = rng.choice([-(2**45), 2**45 - 1, rng.randint(-(2**45), 2**45 - 1)])
            y = mpf(2) ** (octave - 32) * (1 + (part + mpf(1) / 2 + mpf(t) / 2**46) / 64)
            h = 0.0
            for coefficient in table[row, 6::-1].tolist():
                h = h * t + coefficient
            exact = quantile(y)
            assert abs(h - exact) <= table[row, 7]
            assert table[row, 7] < 1e-7


@settings(max_examples=200, deadline=None)
@given(
    sigma=st.floats(0.01, 1e6),
    sensitivity=st.floats(1e-30, 1e30),
    coordinates=st.integers(1, 10**9),
    records=st.floats(1e-3, 1e6),
)
def test_the_noise_pays_for_the_rounding_of_the_sum(
    sigma: float, sensitivity: float, coordinates: int, records: float
) -> None:
    grid = NoiseGrid.for_sum(sigma, sensitivity, coordinates, records)
    assert math.frexp(grid.step)[0] == 0.5
    charged = Fraction(grid.deviation) * Fraction(grid.step)
    # (s·g/σ − Δ)² ≥ g²·d
    room = charged / Fraction(sigma) - Fraction(sensitivity)
    assert room > 0
    assert room**2 >= Fraction(grid.step) ** 2 * coordinates
    if records < 1e6 and sigma <= 64:
        assert grid.noise_deviation <= sigma * sensitivity * (1 + 2.0**-28 * (coordinates**0.5 + 2))
    assert 8 * records * sensitivity / grid.step <= 2.0**52


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_layout_gets_the_same_noise(dtype: torch.dtype) -> None:
    """A view that is not contiguous would be copied, and the copy get the noise."""
    grid = NoiseGrid.for_sum(0.8, 3.0, 600, 10)
    total = (5 * torch.randn(30, 20, dtype=torch.float64)).to(dtype)
    exact = (grid.round(total) + grid.draw_like(total, KEY)) * (grid.step * 0.25)
    wide = torch.zeros(30, 40, dtype=dtype)
    spread = wide[:, 10:30]  # which no flat view has
    spread.copy_(total)
    assert not spread.is_contiguous()
    for found in (total.clone(), spread):
        grid.add_noise(found, 0.25, KEY)
        assert torch.equal(found, exact.to(dtype))
    assert int((wide[:, :10] != 0).sum()) + int((wide[:, 30:] != 0).sum()) == 0


def test_shares_of_a_sum_are_added_up_exactly() -> None:
    grid = NoiseGrid.for_sum(1.0, 1.0, 1000, 1)
    shares = [torch.randn(1000, dtype=torch.float64) for _ in range(3)]
    steps = [grid.round(each, 3) for each in shares]
    assert torch.equal(sum(steps[1:], steps[0]), sum(steps[-2::-1], steps[-1]))
    assert all(torch.equal(each, each.round()) for each in steps)
    assert float(grid.round(torch.tensor([1e300], dtype=torch.float64), 3)) * 3 <= 2.0**51


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sign_of_a_sum_that_is_rounded_to_zero_cannot_be_seen(dtype: torch.dtype) -> None:
    """A negative zero would be an output that is impossible without the record."""
    grid = NoiseGrid(1.0, 0.5)
    outputs = []
    for value in (-0.4, -0.0, 0.0, 0.4):
        contiguous, other = torch.full((1000,), value, dtype=dtype), torch.full((2000,), value)[::2]
        for total in (contiguous, other):
            grid.add_noise(total, 1.0, KEY)
            outputs.append(total.to(dtype).contiguous().numpy().tobytes())
    assert 0.0 in contiguous.tolist()
    assert len(set(outputs)) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38, -1e38])
def test_a_sum_beyond_the_grid_still_gets_noise(value: float) -> None:
    grid = NoiseGrid.for_sum(1.0, 1.0, 2, 1)
    contiguous, other = torch.full((8,), value), torch.full((16,), value)[::2]
    for total in (contiguous, other):
        grid.add_noise(total, 1.0, KEY)
    assert torch.equal(contiguous, other)
    assert bool(contiguous.isfinite().all())
    assert value == value or len(set(contiguous.tolist())) > 1


def test_threads_share_no_keystream() -> None:
    """The cipher frees the interpreter's lock while it writes the words."""
    grid = NoiseGrid(1.0, 2.0**28)
    keys = [number.to_bytes(32, "big") for number in range(24)]
    alone = [drawn(grid, 200_000, key) for key in keys]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda key: drawn(grid, 200_000, key), keys))
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one, other)
    assert len({each[:4].tobytes() for each in alone}) == len(keys)


def test_no_coordinate_repeats_the_noise_of_another() -> None:
    """Also in the second block of the keystream, and with another key."""
    grid = NoiseGrid(1.0, 2.0**28)
    found = np.concatenate([drawn(grid, 300_000), drawn(grid, 300_000, bytes(32))])
    assert len(np.unique(found)) > 0.9995 * len(found)


def test_noise_beyond_what_generators_reach_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's normal_ ends at 5.77 σ on a CPU; here further bits follow the least word."""
    # private: the keystream is replaced by the least words
    monkeypatch.setattr(rounded_gaussian, "read_keystream", lambda *of: np.zeros(of[2], np.uint64))
    monkeypatch.setattr(rounded_gaussian._FurtherBits, "__call__", lambda *_: 1)
    assert drawn(NoiseGrid(1.0, 1000.0), 1)[0] > 12_000
