"""The trained parameters of a model, whole or sharded among processes by `fully_shard`.

PyTorch's FSDP2 (`torch.distributed.fsdp.fully_shard`) leaves each process some rows of every
parameter, as a `DTensor`. A private step gathers the rows once, before its first pass through the
model, and frees the whole parameters after its last. So processes may make different numbers of
passes: their shares of a random batch differ, and one may be empty. Updates change a process's own
rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from training_client.errors import UnsupportedModelError
from training_client.private_step.blocks import Block, rows_of
from training_client.private_step.module_names import describe_tensor
from training_client.private_step.processes.process_group import is_rank_zero, world_size


class TrainedParameters:
    """A model's trained parameters, which `fully_shard` may have sharded among processes.

    Attributes:
        replicated: all tensors of the model that every process holds as a whole: trained and
            frozen parameters, and buffers.
        held: the parameters as the model has them between steps: a `DTensor` of this process's rows
            where they are sharded. Optimizers update these.
        whole: the same parameters as the model has them inside `gathered`. Outside of it those of a
            sharded model have a shape, but no values.
        is_sharded: whether any parameter of the model is sharded.

    Args:
        model: the model; if it is sharded, every process must make this object at the same time.
        guard: a context manager for calls between processes, which reports why one failed.

    Raises:
        UnsupportedModelError: parameters are sharded in another way than by rows among all
            processes, or have another precision or device inside of layers.
    """

    def __init__(
        self,
        model: nn.Module,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._modules: list[Any] = [each for each in model.modules() if is_sharded_module(each)]
        self._guard, self._is_gathered = guard, False
        self.is_sharded = bool(self._modules)
        for module in self._modules:
            _require_known_interface(module)
            module.reshard()  # it may be whole since the model was last used
        tensors = [*model.parameters(), *model.buffers()]
        self.replicated = [each for each in tensors if not _is_sharded(each)]
        self.held = _trained(model)
        for parameter in model.parameters():
            _require_sharded_rows(model, parameter)
        self._rows = [_own_rows(each) for each in self.held] if self.is_sharded else []
        with self.gathered():
            self.whole = _trained(model)
            for one, other in zip(self.held, self.whole, strict=True):
                _require_same_kind(model, one, other)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager: give the model its whole parameters; all processes enter it together.

        Inside of it the model can be used without calls between processes. Entered again inside of
        itself, it does nothing.

        Raises:
            ProcessLostError: a process ended or did not answer in time; see `guard`.
        """
        if not self._modules or self._is_gathered:
            yield
            return
        try:
            with self._guard():
                for module in self._modules:
                    module.reshard()
                    _set_automatic_calls(module, are_on=False)
                    module.unshard()
            self._is_gathered = True
            yield
        finally:
            self._is_gathered = False
            for module in self._modules:
                _set_automatic_calls(module, are_on=True)
                module.reshard()

    def own_tensors(self) -> list[torch.Tensor]:
        """Return this process's rows of each parameter; in-place changes change the model."""
        return [_local(each) for each in self.held]

    def own_rows(
        self, block: Block, values: torch.Tensor, tensors: Sequence[torch.Tensor] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of the rows of a block that this process holds, each with their values.

        Args:
            block: the block.
            values: one for each coordinate of the block.
            tensors: views of these; by default the parameters. They have this process's rows.
        """
        for piece in block.pieces:
            given = piece.view_in(values)
            if not self.is_sharded:
                yield piece.select_rows(tensors or self.held), given
                continue
            own, rows = self._rows[piece.index], piece.rows
            start, stop = max(own.start, rows.start), min(own.stop, rows.stop)
            if start < stop:
                found = tensors[piece.index] if tensors else _local(self.held[piece.index])
                kept = slice(start - rows.start, stop - rows.start)
                yield found[start - own.start : stop - own.start], given[kept]

    def as_held(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of this process's rows of each parameter in the form of `held`."""
        return [_as_held(rows, each) for rows, each in zip(own, self.held, strict=True)]

    def shard(self, index: int, value: Any) -> Any:
        """Return a whole tensor of a parameter's shape in the form of `held`, and others as given.

        Args:
            index: the parameter's index.
            value: a part of an optimizer's state, such as a running mean.
        """
        parameter = self.held[index]
        is_part = _is_sharded(parameter) and isinstance(value, torch.Tensor)
        if not is_part or value.shape != parameter.shape:
            return value
        return _as_held(value[self._rows[index]].clone().to(parameter.device), parameter)

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with whole tensors: on rank 0, and an empty one elsewhere.

        All processes must call it at the same time. The tensors are on the CPU. The state of an
        unsharded model is returned as it is, in every process.
        """
        if not self.is_sharded:
            return state
        is_first = is_rank_zero()

        def gather(tensor: torch.Tensor) -> torch.Tensor | None:
            """Return the whole tensor on rank 0."""
            found: torch.Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]
            return found.cpu() if is_first else None

        with self._guard(), torch.no_grad():
            found: dict[str, Any] = tree_map_only(torch.Tensor, gather, state)
        return found if is_first else {}


def is_sharded_module(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called with this module."""
    return "FSDPModule" in {kind.__name__ for kind in type(module).__mro__}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that are trained."""
    return [each for each in model.parameters() if each.requires_grad]


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`; without importing that class, which is slow."""
    return hasattr(tensor, "placements")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor, sharing its memory."""
    found: Any = tensor.detach()
    return found.to_local() if _is_sharded(found) else found  # type: ignore[no-any-return]


def _as_held(rows: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a process's own rows in the form that a parameter is held in."""
    if not _is_sharded(parameter):
        return rows
    from torch.distributed.tensor import DTensor

    held: Any = parameter
    return DTensor.from_local(
        rows, held.device_mesh, held.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _own_rows(parameter: torch.Tensor) -> slice:
    """Return which rows of a parameter this process holds: the same number in each but the last."""
    if not _is_sharded(parameter):
        return slice(0, len(rows_of(parameter)))
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    step = -(-len(parameter) // mesh.size())
    start = min(mesh.get_local_rank() * step, len(parameter))
    return slice(start, start + len(_local(parameter)))


def _require_sharded_rows(model: nn.Module, parameter: torch.Tensor) -> None:
    """Raise unless a parameter is whole, or sharded by rows among all processes."""
    if not _is_sharded(parameter):
        return
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    is_by_rows = len(placements) == 1 and placements[0].is_shard(0)
    if not is_by_rows or mesh.size() != world_size():
        raise UnsupportedModelError(
            f"{describe_tensor(model, parameter)} is sharded as {tuple(placements)} on {mesh}: "
            f"only rows sharded among all {world_size()} processes are supported. Call fully_shard "
            "without mesh and shard_placement_fn"
        )


def _require_same_kind(model: nn.Module, held: torch.Tensor, whole: torch.Tensor) -> None:
    """Raise unless a parameter has the same precision and device between steps and inside."""
    if _is_sharded(whole):
        raise UnsupportedModelError(
            f"{describe_tensor(model, whole)} is sharded inside of its layer too: tensor "
            "parallelism, and parameters of layers outside of fully_shard, are not supported. Call "
            "fully_shard on the whole model"
        )
    if (held.dtype, held.device) != (whole.dtype, whole.device):
        raise UnsupportedModelError(
            f"{describe_tensor(model, whole)} is {held.dtype} on {held.device}, and inside of "
            f"layers {whole.dtype} on {whole.device}: call fully_shard without mp_policy and "
            "offload_policy, and run the model under torch.autocast for bfloat16"
        )


def _require_known_interface(module: Any) -> None:
    """Raise if this version of PyTorch cannot keep a sharded model whole for several passes."""
    if not hasattr(module, "set_reshard_after_forward"):
        raise UnsupportedModelError(
            f"the fully_shard of PyTorch {torch.__version__} has no set_reshard_after_forward: use "
            "a later version of PyTorch, or DistributedDataParallel"
        )


def _set_automatic_calls(module: Any, *, are_on: bool) -> None:
    """Turn on or off what `fully_shard` does by itself after a module's forward and backward."""
    module.set_reshard_after_forward(are_on, recurse=False)
    module.set_reshard_after_backward(are_on, recurse=False)
    module.set_requires_gradient_sync(are_on, recurse=False)
