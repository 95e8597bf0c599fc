"""Check the engine on this machine's GPU: its sums, steps and noise, and the time of a step.

    python -m benchmarks.gpu_check [--device cuda] [--json FILE]

It needs a clone and PyTorch, NumPy and httpx; a model that needs more is left out, and said so.
Without a GPU it checks the CPU. The checks come first, then the steps of as many models as fit into
the time. The exit code is 1 if a check fails.

The file that --json names receives: device, torch, stand_ins, checks, steps, left_out and seconds.

Where cryptography, python-flint or numba is missing, a stand-in of the same speed takes its place,
which the table names. Such noise is for measurements: a program that trains needs the packages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

SECONDS: Final = 400.0  # after them no model is begun, so that eight minutes are enough
MODELS: Final = (
    "mlp", "cnn", "resnet18", "wrn", "unet", "encoder", "vit_class_token", "convnext", "embedding",
    "bert", "gpt2", "llama", "lstm",
)  # fmt: skip
STEPS: Final = ("sgd", "dp_sgd")
_WORST: Final = 1e-5  # relative error of a clipped sum in single precision, as in the goals
_SCALES: Final = (0.4, 2.0**24, 2.0**28 * 1.37)  # of noise, in steps of its grid


# --- what a bare machine lacks


class _Anything:
    """Stands for whatever is imported from a package that only prints or parses options."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return _Anything()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _Anything()


class _ModuleOfAnything(ModuleType):
    """A module that has every name."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def stand_in(is_present: Callable[[str], bool] = is_installed) -> list[str]:
    """Put stand-ins for missing packages into `sys.modules`; return the packages' names."""
    missing = []
    for package, modules in (
        ("typer", ("typer",)),
        ("rich", ("rich", "rich.console", "rich.table", "rich.progress")),
        ("cryptography", ("cryptography", "cryptography.hazmat", "cryptography.hazmat.primitives",
                          "cryptography.hazmat.primitives.ciphers")),
        ("flint", ("flint",)),
        ("numba", ("numba",)),
    ):  # fmt: skip
        if not is_present(package):
            missing.append(package)
            sys.modules.update({name: _ModuleOfAnything(name) for name in modules})
    return missing


@contextmanager
def replaced_parts(missing: Sequence[str]) -> Iterator[None]:
    """Context manager: let the engine compute without the missing packages, for measurements."""
    from training_client.private_step import rounded_gaussian, sampling

    with ExitStack() as stack:
        if "cryptography" in missing:
            for module in (rounded_gaussian, sampling):
                stack.enter_context(patch.object(module, "read_keystream", words_of_philox))
        if "flint" in missing:
            table = table_without_balls()
            stack.enter_context(patch.object(rounded_gaussian, "_make_table", lambda: table))
            stack.enter_context(patch.object(rounded_gaussian, "_rounded", rounded_without_balls))
        if "numba" in missing:
            stack.enter_context(patch.object(rounded_gaussian, "_fast_loop", lambda: overwrite))
            no = property(lambda _: False)  # the engine's loops are those of other devices
            stack.enter_context(patch.object(torch.Tensor, "is_cpu", no))
        yield


def words_of_philox(key: bytes, stream: int, size: int, out: Any = None) -> np.ndarray[Any, Any]:
    """Stand in for `read_keystream`: the words of a counter-based generator that is no cipher."""
    words = np.random.Philox(key=int.from_bytes(key[:16], "big"), counter=stream << 64)
    found = words.random_raw(size)
    if out is None:
        return found
    shared = np.frombuffer(out, np.uint64, size)
    shared[:] = found
    return shared


def table_without_balls() -> np.ndarray[Any, Any]:
    """Return the noise's table, from mpmath in place of ball arithmetic: see `_make_table`."""
    import mpmath  # PyTorch needs it

    from training_client.private_step import rounded_gaussian as noise

    rows, degree, bits = noise._ROWS, noise._DEGREE, noise._PARTS_BITS
    polynomials = noise._derivative_polynomials(degree + 1)
    table = np.zeros((rows + 1, degree + 2))
    table[rows, -1] = math.inf
    with mpmath.workprec(140):
        for row in range(rows):
            octave, part = divmod(row, 1 << bits)
            scale = mpmath.mpf(2) ** (octave - noise._OCTAVES)
            half = scale / (2 << bits)
            h = mpmath.sqrt(2) * mpmath.erfinv(
                1 - scale * (1 + mpmath.mpf(part) / (1 << bits)) - half
            )
            slope = mpmath.sqrt(mpmath.pi / 2) * mpmath.exp(h * h / 2)
            values = [h]
            for n, polynomial in enumerate(polynomials, start=1):
                values.append((-slope) ** n * mpmath.polyval(polynomial[::-1], h))
            scaled = [value * half**n / math.factorial(n) for n, value in enumerate(values)]
            table[row, :-1] = [math.ldexp(float(a), -45 * n) for n, a in enumerate(scaled[:-1])]
            rounding = sum(abs(a) for a in scaled[:-1]) * (4 * degree + 6) * mpmath.mpf(2) ** -53
            unread = abs(values[1]) * mpmath.mpf(2) ** (noise._UNREAD_BITS - 64)
            table[row, -1] = 2 * float(abs(scaled[-1]) + rounding + unread)
    return table.ravel()


def rounded_without_balls(numerator: int, count: int, deviation: float) -> int | None:
    """Stand in for `_rounded`: |N| from mpmath, whose error is not proved."""
    import mpmath

    if numerator == 1 << count:
        return 0
    with mpmath.workprec(count + 160):
        h = mpmath.sqrt(2) * mpmath.erfinv(1 - mpmath.mpf(numerator) / (1 << count))
        return int(mpmath.floor(h * mpmath.mpf(deviation) + mpmath.mpf(1) / 2))


def overwrite(
    words: np.ndarray[Any, Any],
    total: np.ndarray[Any, Any],
    inverse: float,
    unit: float,
    deviation: float,
    table: np.ndarray[Any, Any],
    chunk: Any,
    places: np.ndarray[Any, Any],
    device: str = "cpu",
) -> int:
    """Do what `rounded_gaussian._overwrite` does, by PyTorch's operations on a device."""
    from training_client.private_step import rounded_gaussian as noise

    del chunk
    given = torch.from_numpy(words.view(np.int64).copy()).to(device)
    rows = torch.from_numpy(table).to(device).view(-1, 8)
    read = (given & int(noise._READ_BITS_OF_WORD)) | int(noise._MIDDLE_OF_UNREAD)
    bits = read.double().view(torch.int64)
    row, last = (bits >> int(noise._VARIABLE_BITS)) - int(noise._FIRST_ROW), int(noise._LAST_ROW)
    row = row.where((row >= 0) & (row < last), last)
    t = ((bits & int(noise._VARIABLE)) - noise._VARIABLE_ZERO).double()
    h = rows[row, 6]
    for column in range(5, -1, -1):
        h = h * t
        h = h + rows[row, column]
    x = h * deviation
    k = (x + 0.5).floor()
    is_sure = (x - k).abs() < 0.5 - rows[row, 7] * deviation
    m = (torch.from_numpy(total).to(device).double() * inverse).round()
    m = m.nan_to_num(0.0).clamp(-noise.LARGEST, noise.LARGEST) + 0.0
    found = torch.where(given < 0, m - k, m + k) * unit
    sure = is_sure.cpu().numpy()
    total[sure] = found.cpu().numpy()[sure]
    open_ones = np.flatnonzero(~sure)
    places[: len(open_ones)] = open_ones
    return len(open_ones)


# --- the checks


@dataclass
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        passed: whether it holds.
        detail: the figure, or what was wrong.
        seconds: how long it took.
    """

    name: str
    passed: bool
    detail: str
    seconds: float


@dataclass
class Report:
    """All that a run of this program found; see the module."""

    device: str
    torch: str
    stand_ins: list[str]
    checks: list[Check] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0


def check_noise(device: str) -> str:
    """Draw the same integers by the CPU's loop and by PyTorch on the device."""
    from training_client.private_step import rounded_gaussian as noise

    size, wrong, left = 131_072, 0, 0
    for number, scale in enumerate(_SCALES):
        key = bytes([number]) * 32
        words = noise.read_keystream(key, 0, size)
        ours, places = np.zeros(size), np.empty(size, np.int64)
        count = overwrite(words, ours, 1.0, 1.0, scale, noise._make_table(), None, places, device)
        theirs = noise.NoiseGrid(1.0, scale).draw_like(torch.empty(size), key).numpy()
        sure = np.ones(size, bool)
        sure[places[:count]] = False
        wrong, left = wrong + int((ours != theirs)[sure].sum()), left + count
    if wrong or left > 100:
        raise ValueError(f"{wrong} of {3 * size} integers differ, {left} were left open")
    return f"{3 * size - left} integers are equal, {left} are left to ball arithmetic"


def check_clipped_sums(device: str) -> str:
    """Compare the sums of every kind of layer with a loop over examples in double precision."""
    from tests.support.clipped_sums import clip_rows, gradient_rows
    from tests.support.layer_models import LAYER_MODELS, build, to_single_precision
    from training_client.lab.models import cross_entropy
    from training_client.private_step import Clipper, Transform
    from training_client.testing import clipped_sum

    worst, clip = (0.0, ""), 0.05
    for name in LAYER_MODELS:
        if name == "packed sequences" and device != "cpu":
            continue  # PyTorch wants the lengths on the CPU
        net, examples, labels = build(name)
        blocks = Clipper(net).blocks
        exact = clip_rows(gradient_rows(net, examples, labels), Transform(clip), blocks).sum(0)
        net, examples = to_single_precision(net, examples)
        moved = {k: v.to(device) for k, v in examples.items()} if isinstance(examples, dict) \
            else examples.to(device)  # fmt: skip
        found = clipped_sum(net.to(device), moved, labels.to(device), cross_entropy, clip)
        flat = torch.cat([each.flatten() for each in found]).double().cpu()
        error = float((flat - exact).norm() / clip / len(labels))
        worst = max(worst, (error, name))
    if not worst[0] <= _WORST:
        raise ValueError(f"{worst[1]}: the error is {worst[0]:.1e} clip norms a record")
    return f"at most {worst[0]:.1e} clip norms a record off, of {worst[1]}"


def check_hostile_norms(device: str) -> str:
    """Clip single examples of any size: none may exceed the clip norm."""
    from training_client.lab.models import cross_entropy
    from training_client.testing import clipped_sum

    most = 0.0
    for power, seed in itertools.product((-12, -3, 0, 3, 12), range(3)):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 5)).to(device)
        example = 10.0**power * torch.randn(1, 300, device=device)
        label = torch.zeros(1, dtype=torch.int64, device=device)
        found = clipped_sum(net, example, label, cross_entropy, 0.5)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in found))
        most = max(most, norm)
    if not most <= 0.5 * (1 + 1e-12):
        raise ValueError(f"an example has {most / 0.5:.9f} clip norms")
    return f"at most {most / 0.5:.7f} clip norms"


def check_optimizers(device: str) -> str:
    """Make three steps with each optimizer on the CPU and on the device, with the same keys."""
    from tests.support.optimizer_cases import OPTIONS
    from training_client.budget import NoBudget
    from training_client.lab.models import cross_entropy
    from training_client.optimizers import OPTIMIZERS, make_optimizer
    from training_client.plan import Plan
    from training_client.private_step import private_sum

    worst = (0.0, "")
    plan = Plan(640, 0.1, 1.0, 0.5)
    for name, entry in OPTIMIZERS.items():
        ends = []
        for place in ("cpu", device):
            torch.manual_seed(1)
            net = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))
            batch = torch.randn(64, 20), torch.randint(0, 4, (64,))
            public = torch.randn(64, 20), torch.randint(0, 4, (64,))
            moved = [tuple(each.to(place) for each in pair) for pair in (batch, public)]
            keys = (number.to_bytes(32, "big") for number in itertools.count())
            options = {"public": moved[1], **OPTIONS.get(name, {})}
            order = torch.arange(64)
            with (
                patch.object(private_sum, "draw_key", lambda _, keys=keys: next(keys)),
                patch.object(torch, "randperm", lambda count, **_: order[:count].to(place)),  # noqa: B023
            ):
                optimizer = make_optimizer(
                    name, net.to(place), NoBudget(plan, 3, "it is a check"),
                    state=entry.states[0], **options,
                )  # fmt: skip
                for _ in range(3):
                    optimizer.step(*moved[0], cross_entropy)
            ends.append(nn.utils.parameters_to_vector(net.parameters()).detach().cpu())
        if not bool(ends[1].isfinite().all()):
            raise ValueError(f"{name}: the parameters are not finite")
        error = float((ends[0] - ends[1]).norm() / ends[0].norm())
        worst = max(worst, (error, name))
    if not worst[0] <= 1e-3:
        raise ValueError(f"{worst[1]}: parameters differ by {worst[0]:.1e} of their norm")
    return f"{len(OPTIMIZERS)} optimizers differ by at most {worst[0]:.1e} ({worst[1]})"


def check_mixing(device: str) -> str:
    """Train models and losses that mix examples: each must be refused, and others must not."""
    from training_client.errors import UnsupportedModelError
    from training_client.lab.models import cross_entropy
    from training_client.testing import clipped_sum

    class Centred(nn.Module):
        """Subtracts the batch's mean."""

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            """Return the rows without their mean."""
            return rows - rows.mean(0)

    def ranked(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Weight each loss by its rank in the batch."""
        losses = cross_entropy(outputs, labels)
        return losses * losses.argsort()

    def net(*more: nn.Module) -> nn.Module:
        """Return a small model on the device."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), *more, nn.Linear(5, 3)).to(device)

    rows = torch.randn(8, 6, device=device)
    labels = torch.randint(0, 3, (8,), device=device)
    refused = []
    for name, model, loss in (
        ("the mean of the batch", net(Centred()), cross_entropy),
        ("batch norm", net(nn.BatchNorm1d(5)), cross_entropy),
        ("ranks in the batch", net(), ranked),
    ):
        try:
            clipped_sum(model, rows, labels, loss, 1.0)
        except UnsupportedModelError:
            refused.append(name)
        else:
            raise ValueError(f"{name} was not refused")
    for model in (net(), net(nn.Dropout(0.5)), net(nn.LayerNorm(5), nn.GELU())):
        clipped_sum(model, rows, labels, cross_entropy, 1.0)
    return f"{len(refused)} programs are refused, 3 others are not"


def check_bfloat16(device: str) -> str:
    """Make a step under autocast in bfloat16: parameters stay in single precision."""
    from training_client.budget import NoBudget
    from training_client.lab.models import cross_entropy
    from training_client.optimizers import make_optimizer
    from training_client.plan import Plan

    net = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    plan = Plan(640, 0.1, 1.0, 0.5)
    optimizer = make_optimizer("dp_adam", net, NoBudget(plan, 2, "it is a check"))
    rows = torch.randn(64, 20, device=device)
    labels = torch.randint(0, 4, (64,), device=device)
    with torch.autocast(device.partition(":")[0], torch.bfloat16):
        loss = [optimizer.step(rows, labels, cross_entropy) for _ in range(2)][-1]
    kinds = {each.dtype for each in net.parameters()}
    if kinds != {torch.float32} or not math.isfinite(loss):
        raise ValueError(f"parameters are {kinds}, the loss is {loss}")
    return f"two steps, loss {loss:.3f}"


CHECKS: Final[dict[str, Callable[[str], str]]] = {
    "noise": check_noise,
    "clipped sums": check_clipped_sums,
    "hostile norms": check_hostile_norms,
    "optimizers": check_optimizers,
    "mixing": check_mixing,
    "bfloat16": check_bfloat16,
}


def run_check(name: str, check: Callable[[str], str], device: str) -> Check:
    """Run one check; an error of any kind fails it."""
    start = time.monotonic()
    try:
        passed, detail = True, check(device)
    except Exception as error:
        passed, detail = False, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return Check(name, passed, detail, round(time.monotonic() - start, 1))


# --- the table of steps


def measure_steps(
    report: Report, names: Sequence[str], device: str, rounds: int, deadline: float
) -> None:
    """Measure a step of SGD and one of DP-SGD on each model, until the time is over."""
    from benchmarks.training_step import CASES, measure_memory_mib, measure_time

    for case in (each for name in names for each in CASES if each.name == name):
        title = f"{case.name}, batch {case.batch}"
        if time.monotonic() > deadline:
            report.left_out.append(f"{title}: the time is over")
            continue
        try:
            base = 0.0
            for step in STEPS:
                ms, ratio = measure_time(step, case, min(rounds, case.rounds), device)
                mib = measure_memory_mib(step, case, device)
                base = base or mib
                row = {
                    "model": case.name, "batch": case.batch, "step": step, "ms": round(ms, 3),
                    "time_ratio": round(ratio, 3), "mib": round(mib, 1),
                    "memory_ratio": round(mib / max(base, 1), 3),
                }  # fmt: skip
                report.steps.append(row)
                print("{model:16} {batch:5} {step:8} {ms:9.2f} {time_ratio:6.2f} {mib:9.1f} "
                      "{memory_ratio:6.2f}".format(**row), flush=True)  # fmt: skip
        except Exception as error:
            report.left_out.append(f"{title}: {type(error).__name__}: {str(error).splitlines()[0]}")
        if device != "cpu":
            torch.cuda.empty_cache()


def describe_device(device: str) -> str:
    """Return the name of a device."""
    if device == "cpu":
        return f"the CPU of this machine ({platform.machine()}), one thread"
    return f"{device}: {torch.cuda.get_device_name(device)}"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=usual, help="cuda, cuda:1 or cpu")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no model is begun later")
    parser.add_argument("--rounds", type=int, default=7, help="steps to time, of each kind")
    parser.add_argument("--checks", default=",".join(CHECKS), help="names with commas between")
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas between")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--bare", action="store_true", help="use all stand-ins")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results of the checks and the table of steps; return the exit code."""
    start, options = time.monotonic(), parse_options(arguments)
    warnings.simplefilter("ignore")
    missing = stand_in((lambda _: False) if options.bare else is_installed)
    report = Report(describe_device(options.device), torch.__version__, missing)
    print(f"{report.device}, PyTorch {report.torch}")
    if options.device == "cpu":
        print("There is no GPU here, or the CPU was asked for: nothing below is about a GPU.")
        torch.set_num_threads(1)
    if missing:
        print(f"Stand-ins take the place of {', '.join(missing)}: no such noise may be released.")
    names = [each for each in options.models.split(",") if each]
    with replaced_parts(missing):
        for name in (each for each in options.checks.split(",") if each):
            report.checks.append(run_check(name, CHECKS[name], options.device))
            done = report.checks[-1]
            print(f"{'ok    ' if done.passed else 'FAILED'} {name}: {done.detail} "
                  f"({done.seconds} s)", flush=True)  # fmt: skip
        if names:
            print("model            batch step            ms  / SGD       MiB  / SGD")
        measure_steps(report, names, options.device, options.rounds, start + options.seconds)
    for each in report.left_out:
        print(f"not measured: {each}")
    report.seconds = round(time.monotonic() - start, 1)
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 0 if all(each.passed for each in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
