"""The check of a GPU, on a CPU: what it prints, writes and needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu_check
from training_client.private_step import rounded_gaussian
from training_client.private_step.rounded_gaussian import NoiseGrid

ROOT = Path(__file__).parents[2]
COMMAND = "python -m benchmarks.gpu_check --json gpu.json"
BARE = """
import sys
GONE = {"typer", "rich", "cryptography", "flint", "numba", "scipy", "pydantic", "fastapi",
        "pytest", "opacus", "transformers", "sqlalchemy"}
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
sys.argv[0] = "gpu_check"
from benchmarks import gpu_check
sys.exit(gpu_check.main(sys.argv[1:]))
"""


def test_the_noise_of_pytorchs_operations_is_that_of_the_loop() -> None:
    assert gpu_check.check_noise("cpu").startswith("393")
    grid, key, sums = NoiseGrid.for_sum(0.8, 3.0, 600, 10), bytes(32), np.linspace(-5, 5, 1000)
    sums[:3] = np.nan, np.inf, -1e300
    ours, places = sums.copy(), np.empty(1000, np.int64)
    words = rounded_gaussian.read_keystream(key, 0, 1000)
    table = rounded_gaussian._make_table()
    left = gpu_check.overwrite(
        words, ours, 1 / grid.step, grid.step * 0.25, grid.deviation, table, None, places
    )
    theirs = torch.from_numpy(sums.copy())
    grid.add_noise(theirs, 0.25, key)
    assert left == 0
    assert ours.tolist() == theirs.tolist()


def test_a_check_that_fails_is_named_and_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = gpu_check.overwrite

    def wrong(words: np.ndarray, total: np.ndarray, *of: object) -> int:
        left = right(words, total, *of)  # type: ignore[arg-type]
        total[7] += 1
        return left

    monkeypatch.setattr(gpu_check, "overwrite", wrong)
    options = ["--device", "cpu", "--models", "", "--checks", "noise,bfloat16"]
    assert gpu_check.main(options) == 1
    printed = capsys.readouterr().out
    assert "FAILED noise: ValueError: 3 of 393216 integers differ" in printed
    assert "ok     bfloat16" in printed
    assert "nothing below is about a GPU" in printed


@pytest.mark.slow
def test_a_machine_with_pytorch_numpy_and_httpx_is_enough(tmp_path: Path) -> None:
    """The stand-ins are named, and so is each model that was not measured."""
    briefly = "--device cpu --models cnn,bert --rounds 1"
    done = subprocess.run(
        [sys.executable, "-c", BARE, *COMMAND.split()[3:], *briefly.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["stand_ins"] == ["typer", "rich", "cryptography", "flint", "numba"]
    assert "no such noise may be released" in done.stdout
    assert [each["name"] for each in found["checks"] if each["passed"]] == list(gpu_check.CHECKS)
    assert [(each["model"], each["step"]) for each in found["steps"]] == [
        ("cnn", "sgd"), ("cnn", "dp_sgd")
    ]  # fmt: skip
    assert "No module named 'transformers'" in found["left_out"][0]
    assert found["seconds"] < 480
    late = gpu_check.main(["--device", "cpu", "--checks", "", "--seconds", "0"])
    assert late == 0


@pytest.mark.slow
def test_the_table_of_the_stand_in_is_that_of_ball_arithmetic() -> None:
    ours = gpu_check.table_without_balls().reshape(-1, 8)
    theirs = rounded_gaussian._make_table().reshape(-1, 8)
    assert np.array_equal(ours[:, :7], theirs[:, :7])
    assert (ours[:, 7] >= theirs[:, 7]).all()
