"""The processes that make a private step: one, or several that each clip a share of the batch.

With several, each clips its records to the same bound, rank 0 alone adds noise to its sum, and the
sums of all are added up. So the result is the clipped sum of the whole batch with noise once.
Before that the processes compare what they are about to do: a rank with another bound would give
its records more influence than the noise is made for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from training_client.errors import NoGuaranteeError, ProcessLostError
from training_client.private_step.clipped_sum import BlockwiseSum
from training_client.private_step.processes.process_group import ProcessGroup
from training_client.private_step.processes.single_process import (
    require_all_processes,
    require_one_process,
)
from training_client.private_step.rounding_bounds import Scalar

_CHECK_INTERVAL_FACTOR: Final = 16
_PARAMETER_TOLERANCE: Final = 1e-5  # of the sum of magnitudes: other hardware rounds otherwise


@dataclass(frozen=True, slots=True)
class StepTerms:
    """A step's number, clip norm and noise, on which all processes must agree.

    Attributes:
        step: the step's number.
        bound: what each example's gradient is clipped to.
        noise_deviation: the standard deviation of the noise on each coordinate of the mean.
    """

    step: int
    bound: float
    noise_deviation: float


class StepProcesses(Protocol):
    """Interface of the processes that make a private step together.

    Attributes:
        adds_noise: whether this process adds the noise.
        are_several: whether records are shared out.
        share_of_records: the number of this process, and how many processes there are.
    """

    adds_noise: bool
    are_several: bool
    share_of_records: tuple[int, int]

    def require_usable(self) -> None:
        """Raise if the launcher started processes that do not take part in this run."""

    def clip(
        self, terms: StepTerms, examples: int, compute: Callable[[], BlockwiseSum]
    ) -> tuple[BlockwiseSum, Scalar]:
        """Return the clipped sum of this process's examples, and the whole batch's mean loss."""
        ...

    def add_up(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with its sum over all processes."""

    def from_rank_zero(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's value of a tensor, such as the rows of a random public batch."""
        ...


class OneProcess:
    """The private steps of a run with a single process."""

    adds_noise = True
    are_several = False
    share_of_records = (0, 1)

    def require_usable(self) -> None:
        """Raise if several processes train."""
        require_one_process()

    def clip(
        self, _: StepTerms, __: int, compute: Callable[[], BlockwiseSum]
    ) -> tuple[BlockwiseSum, Scalar]:
        """Return the clipped sum of the batch, and its mean loss."""
        total = compute()
        return total, total.mean_loss

    def add_up(self, tensor: torch.Tensor) -> None:
        """Leave the tensor unchanged: there is no other process."""

    def from_rank_zero(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor unchanged: there is no other process."""
        return tensor


class SharedStep:
    """The private steps of several processes, each of which clips a share of the batch.

    Args:
        group: the processes.
        tensors: the model's parameters, also frozen ones, and buffers that every process holds as a
            whole; those of rank 0 replace the others'.
        device: the device that tensors are exchanged on.
    """

    are_several = True

    def __init__(
        self, group: ProcessGroup, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._group, self._device = group, device
        self._compared = [each for each in tensors if each.is_floating_point()]
        self.adds_noise, self.share_of_records = group.rank == 0, (group.rank, group.size)
        for tensor in tensors:
            group.broadcast(tensor.data)

    def require_usable(self) -> None:
        """Raise if the launcher started processes that do not take part in this run."""
        require_all_processes(self._group.size)

    def clip(
        self, terms: StepTerms, examples: int, compute: Callable[[], BlockwiseSum]
    ) -> tuple[BlockwiseSum, Scalar]:
        """Return the clipped sum of this process's share, and the mean loss of all shares.

        Raises:
            NoGuaranteeError: the processes are at different steps, or clip to different bounds.
            ProcessLostError: a process failed, so that no process makes the step.
        """
        total, problem = _compute_or_catch(compute)
        loss = 0.0 if total is None else float(total.mean_loss) * examples
        given = (total is None, loss, examples, terms.step, terms.bound, terms.noise_deviation)
        found = self._group.gather((*given, self._magnitude(terms.step)), self._device)
        if problem is not None:
            raise problem
        _require_no_failure(found[:, 0], terms.step)
        _require_same_terms(found[:, 3:6])
        _require_same_parameters(found[:, 6])
        assert total is not None
        return total, float(found[:, 1].sum() / found[:, 2].sum().clamp_min(1))

    def add_up(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with its sum over all processes."""
        self._group.add_up(tensor)

    def from_rank_zero(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's value of a tensor."""
        return self._group.broadcast(tensor)

    def _magnitude(self, step: int) -> float:
        """Return Σ|parameters| on checked steps, to compare processes; 0 on other steps."""
        if not self._compared or not _is_checked(step):
            return 0.0
        sums = [each.detach().abs().sum(dtype=torch.float64) for each in self._compared]
        return float(torch.stack(sums).sum())


def _is_checked(step: int) -> bool:
    """Return whether processes compare their parameters at this step: at 1, 16, 256, …."""
    while step % _CHECK_INTERVAL_FACTOR == 0:
        step //= _CHECK_INTERVAL_FACTOR
    return step == 1


def _compute_or_catch(
    compute: Callable[[], BlockwiseSum],
) -> tuple[BlockwiseSum | None, Exception | None]:
    """Compute a clipped sum; return it and None, or None and the exception."""
    try:
        return compute(), None
    except Exception as error:  # any exception: the other processes would wait forever
        return None, error


def _require_no_failure(failed: torch.Tensor, step: int) -> None:
    """Raise if any process failed to compute its clipped sum."""
    if bool(failed.any()):
        ranks = ", ".join(str(rank) for rank in failed.nonzero().flatten().tolist())
        raise ProcessLostError(
            f"step {step} is not made: process {ranks} failed on its share of the batch, and its "
            "own message says why. The step stays charged"
        )


def _require_same_terms(terms: torch.Tensor) -> None:
    """Raise unless all processes have the same step number, clip norm and noise."""
    if not bool((terms == terms[0]).all()):
        listed = "; ".join(
            f"process {rank}: step {step:g}, bound {bound:g}, noise {noise:g}"
            for rank, (step, bound, noise) in enumerate(terms.tolist())
        )
        raise NoGuaranteeError(
            f"the processes do not make the same step ({listed}): make the same optimizer in every "
            "process, and load the same checkpoint"
        )


def _require_same_parameters(magnitudes: torch.Tensor) -> None:
    """Raise unless the processes' Σ|parameters| are equal up to rounding."""
    largest, smallest = float(magnitudes.max()), float(magnitudes.min())
    if not largest - smallest <= _PARAMETER_TOLERANCE * largest:
        raise NoGuaranteeError(
            f"the processes' parameters differ (sums of magnitudes from {smallest:.9g} to "
            f"{largest:.9g}): change them in every process alike, and load the same checkpoint"
        )
