"""The interpolant is SciPy's PCHIP, with both derivatives, without importing SciPy's 25 MB."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy.interpolate import PchipInterpolator

from accountant_service.numerics.floats import monotone_cubic


@pytest.mark.parametrize("points", [3, 4, 10, 61])
def test_values_and_derivatives_are_scipy_s(points: int) -> None:
    random = np.random.default_rng(points)
    x = np.cumsum(random.random(points) + 0.01)
    rising, rough = np.cumsum(random.random(points)), random.normal(size=points)
    for y in (rising, rough, np.round(rough), np.zeros(points)):
        at = np.concatenate([x, np.linspace(x[0] - 0.1, x[-1] + 0.1, 99)])
        expected = PchipInterpolator(x, y)
        for order, found in enumerate(monotone_cubic.interpolate(x, y, at)):
            np.testing.assert_allclose(found, expected(at, order), rtol=1e-8, atol=1e-7)


def test_it_does_not_overshoot() -> None:
    x, y = np.arange(5.0), np.array([0.0, 0.0, 1.0, 1.0, 5.0])
    values, slopes, _ = monotone_cubic.interpolate(x, y, np.linspace(0, 4, 401))
    assert values.min() == 0.0
    assert values.max() == 5.0
    assert (slopes >= 0).all()


@pytest.mark.slow
def test_an_answer_needs_no_interpolation_of_scipy_s() -> None:
    code = """
import sys
from accountant_service import epsilon
epsilon(delta=1e-5, noise_multiplier=1.1, sample_rate=0.01, steps=1000)
print(sorted({"scipy.interpolate", "scipy.optimize", "scipy.sparse"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
