"""All changes that this project makes to libraries that are not its own, one function each.

Opacus, PyTorch and glibc offer no other way to keep these promises of a privacy guarantee, or to
train fast. Each function says what it changes and why; `PATCHES` lists what is changed, and
`TESTED_VERSIONS` the versions that the tests passed with. The modules that need a change make it
when they are imported, or when training begins.

Two PyTorch settings are changed elsewhere, since `private_step` imports nothing from here: while
one kernel runs, `private_step/kernels/per_coordinate_sums.py` sets the number of threads and
`private_step/kernels/matmul.py` the precision of matrix products. Both restore them.
"""

from __future__ import annotations

import ctypes
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Final, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_Wrap = Callable[[Callable[[Any], None]], Callable[[Any], None]]
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_KEPT_BYTES_MAX: Final = 1 << 28
_HEAP_ALLOCATION_BYTES_MAX: Final = 1 << 25  # the most that glibc accepts


@dataclass(frozen=True, slots=True)
class VersionRange:
    """A range of versions from `first` up to, but not including, `end`."""

    first: str
    end: str

    def __contains__(self, version: str) -> bool:
        """Return whether a version is in the range."""
        return _parse_version(self.first) <= _parse_version(version) < _parse_version(self.end)

    def __str__(self) -> str:
        """Return the range as text."""
        return f">={self.first},<{self.end}"


TESTED_VERSIONS: Final = {
    "opacus": VersionRange("1.5.4", "1.7"),  # accountant="remote" needs 1.6
    "torch": VersionRange("2.13", "2.14"),
    "pytorch-lightning": VersionRange("2.6", "2.7"),
    "transformers": VersionRange("5.0", "5.24"),
    "accelerate": VersionRange("1.12", "1.16"),
    "glibc": VersionRange("2.31", "2.43"),  # mallopt's parameters are a stable interface
}


def warn_if_untested(*libraries: str) -> None:
    """Warn, once per library, if the installed version was not tested with this package."""
    for library in libraries:
        _warn_once_if_untested(library)


@cache
def _warn_once_if_untested(library: str) -> None:
    """Warn if a library's installed version is untested; cached, so at most once."""
    problem = describe_untested(library)
    if problem is not None:
        warnings.warn(problem, stacklevel=4)


def describe_untested(library: str) -> str | None:
    """Return a warning if a library's installed version is untested, else None."""
    version, tested = installed_version(library), TESTED_VERSIONS[library]
    if version is None or version in tested:
        return None
    return (
        f"{library} {version} is installed, but the changes that training_client makes to it were "
        f"tested with {library}{tested} only, and their privacy checks may fail with another: "
        f"install a tested version, or run this project's tests/integration with yours and extend "
        "TESTED_VERSIONS in training_client/integrations/patches.py"
    )


def installed_version(library: str) -> str | None:
    """Return the installed version of a library of `TESTED_VERSIONS`; None if there is none."""
    if library == "glibc":
        name, version = platform.libc_ver()
        return version if name == "glibc" else None
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


@dataclass(frozen=True, slots=True)
class Patch:
    """A record of a function that changes another library, and of the objects that it changes.

    Attributes:
        function: the name of the function in this module that makes it.
        library: the library, as in `TESTED_VERSIONS`.
        targets: the attributes that are replaced, or the functions called, as "module:name".
    """

    function: str
    library: str
    targets: tuple[str, ...]


PATCHES: Final = list[Patch]()


def _register_patch(library: str, *targets: str) -> Callable[[_F], _F]:
    """Return a decorator that adds a function, and what it changes, to the list `PATCHES`."""

    def register(function: _F) -> _F:
        """Record the function as a patch, and return it unchanged."""
        PATCHES.append(Patch(function.__name__, library, targets))
        return function

    return register


@_register_patch(
    "opacus",
    "opacus.utils.uniform_sampler:UniformWithReplacementSampler.__iter__",
    "opacus.utils.uniform_sampler:DistributedUniformWithReplacementSampler.__iter__",
)
def replace_sampler_iteration(
    sampler_class: Any, iterate: Callable[[Any], Iterator[Any]], **counters: int | bool
) -> None:
    """Replace a Poisson sampler class's `__iter__`, and add counters as class attributes.

    A step is charged as one of a batch drawn for it alone, and a batch without a step can reveal a
    record: the sampler is the only object that knows how many batches were drawn. Opacus also drops
    the empty batches of a rank, and with them a step that depends on a single record. It draws from
    PyTorch's default generator, which programs and frameworks seed, and rounds the rate up to a
    multiple of 2⁻²⁴, which is more than is charged.

    Args:
        sampler_class: one of Opacus' two samplers.
        iterate: the new `__iter__`.
        counters: the new attributes with their initial values.
    """
    sampler_class.__iter__ = iterate
    for name, value in counters.items():
        setattr(sampler_class, name, value)


@_register_patch(
    "opacus",
    "opacus.optimizers:DPOptimizer.add_noise",
    "opacus.optimizers:DistributedDPOptimizer.add_noise",
    "opacus.optimizers:DistributedDPOptimizer.reduce_gradients",
)
def replace_noise(wrap: _Wrap, wrap_on_ranks: _Wrap, wrap_reduction: _Wrap) -> None:
    """Replace how Opacus' optimizers add noise, and how their ranks add up noisy gradients.

    Opacus adds PyTorch's floating-point noise, which ends at a few standard deviations and whose
    low bits betray the sum. It draws from PyTorch's default generator, which programs seed.

    Args:
        wrap: makes the new `DPOptimizer.add_noise` of the old one.
        wrap_on_ranks: makes the new `DistributedDPOptimizer.add_noise`.
        wrap_reduction: makes the new `DistributedDPOptimizer.reduce_gradients`.
    """
    from opacus.optimizers import DistributedDPOptimizer, DPOptimizer

    DPOptimizer.add_noise = wrap(DPOptimizer.add_noise)
    DistributedDPOptimizer.add_noise = wrap_on_ranks(DistributedDPOptimizer.add_noise)
    DistributedDPOptimizer.reduce_gradients = wrap_reduction(
        DistributedDPOptimizer.reduce_gradients
    )


@_register_patch(
    "opacus",
    "opacus.utils.batch_memory_manager:BatchSplittingSampler.__iter__",
    "opacus.utils.batch_memory_manager:BatchSplittingSampler.__len__",
)
def replace_split_passes(
    iterate: Callable[[Any], Iterator[Any]], length: Callable[[Any], int]
) -> None:
    """Replace `__iter__` and `__len__` of Opacus' sampler that splits batches to save memory.

    Its own `__len__` is an estimate after which frameworks end an epoch, perhaps in the middle of a
    batch, and its own iteration lets the next pass add to the sum that was left there.

    Args:
        iterate: the new `__iter__`.
        length: the new `__len__`.
    """
    from opacus.utils.batch_memory_manager import BatchSplittingSampler

    BatchSplittingSampler.__iter__, BatchSplittingSampler.__len__ = iterate, length


@_register_patch(
    "opacus",
    "opacus.optimizers:DPOptimizer._step_skip_queue",
    "opacus.optimizers:DPOptimizer._is_last_step_skipped",
    "opacus.optimizers:DPOptimizer.summed_grad",
)
def reset_accumulation(optimizer: Any, skip_queue: list[bool]) -> None:
    """Discard an unfinished batch's gradient sum, and replace the queue of skip signals.

    What an earlier pass over split batches left would be added to the next batch. The new queue
    counts the signals that the optimizer takes from it, so that a missing step is noticed.

    Args:
        optimizer: an optimizer of Opacus.
        skip_queue: the new queue.
    """
    optimizer._step_skip_queue, optimizer._is_last_step_skipped = skip_queue, False
    for parameter in optimizer.params:
        parameter.grad_sample = parameter.summed_grad = None


@_register_patch("opacus", "opacus.optimizers:DPOptimizer.attach_step_hook")
def replace_step_hook(optimizer: Any, hook: Callable[[Any], None]) -> Any:
    """Replace an optimizer's step hook; return the old hook, which the new one must call.

    Only this hook is called once for every step really made, after the noise is drawn and before
    gradients are reduced over ranks or parameters change. There is one slot for it, and Opacus'
    own accountant may be there.
    """
    before = optimizer.step_hook
    optimizer.attach_step_hook(hook)
    return before


@_register_patch("torch", "torch.amp:GradScaler.unscale_", "torch.amp:GradScaler.step")
def check_before_grad_scaler(check: Callable[[Any, Any], None]) -> None:
    """Call `check(scaler, optimizer)` before every `step` and `unscale_` of a `GradScaler`.

    A `GradScaler` skips a step if one record's gradient overflows, and no noise hides that. No
    hook of the optimizer is called for a skipped step.

    Args:
        check: raises to refuse the optimizer.
    """

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `GradScaler` method `original` with a call of `check` before it."""

        def method(scaler: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
            """Call `check`, then the original method."""
            check(scaler, optimizer)
            return original(scaler, optimizer, *arguments, **options)

        return method

    for name in ("unscale_", "step"):
        setattr(torch.amp.GradScaler, name, checked(getattr(torch.amp.GradScaler, name)))


@contextmanager
def tune_process() -> Iterator[None]:
    """Context manager: flush denormal numbers to zero; keep freed memory for reuse."""
    keep_freed_memory()
    with flush_denormals():
        yield


@_register_patch("torch", "torch:set_flush_denormal")
@contextmanager
def flush_denormals() -> Iterator[None]:
    """Context manager: flush denormal numbers to zero, then restore the setting.

    Running mean squares of gradients that have vanished decay below 1e-38, the smallest normal
    float32 number; a CPU takes many times as long for those.
    """
    before = float(torch.full((1,), 1e-39) * 1.0) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@_register_patch("glibc", "mallopt(M_TRIM_THRESHOLD)", "mallopt(M_MMAP_THRESHOLD)")
def keep_freed_memory() -> None:
    """Keep up to 256 MiB of freed memory in the process, for its lifetime.

    A step allocates and frees tensors of the size of a layer's outputs. By default glibc returns
    them to the system, which clears every page again: up to a third of a small model's step. With
    another C library nothing happens.
    """
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES_MAX)
        library.mallopt(_M_MMAP_THRESHOLD, _HEAP_ALLOCATION_BYTES_MAX)
