"""Models sharded by `fully_shard`: the model of one process, one noise draw, less memory."""

from __future__ import annotations

import copy
import warnings
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from tests.support.layer_models import LAYER_MODELS, build
from tests.support.lazy_modules import LazyModule
from tests.support.process_groups import group_of_one, run_in_processes
from tests.support.shared_runs import (
    CASES,
    RECORDS,
    Case,
    Model,
    Records,
    make_seeded,
    message_of,
    no_claim,
    require_model_of_one,
    seeded,
    step_with,
    trained,
    whole_parameters,
)
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer, private_batches, share_budget
from training_client.private_step.sampling import PoissonSampler
from training_client.testing import clipped_sum

fsdp = LazyModule("torch.distributed.fsdp")
saving = LazyModule("torch.distributed.checkpoint.state_dict")
ADAM = Case("dp_adam")


def shard(net: nn.Module, **options: Any) -> nn.Module:
    """Shard a model as one, with options of `fully_shard`."""
    fsdp.fully_shard(net, **options)
    return net


def shard_each(net: Any) -> nn.Module:
    """Shard each layer, and the model; all processes begin with the same parameters."""
    net.load_state_dict(Model(seed=5).state_dict())
    for layer in net.layers:
        if list(layer.parameters()):
            fsdp.fully_shard(layer)
    return shard(net)


def shard_whole(net: Any) -> nn.Module:
    """Shard the model as one; all processes begin with the same parameters."""
    net.load_state_dict(Model(seed=5).state_dict())
    return shard(net)


def shard_first(net: Any) -> nn.Module:
    """Shard the first layer; rank 0's parameters of the other replace the others'."""
    net.layers[0].load_state_dict(Model(seed=5).layers[0].state_dict())
    fsdp.fully_shard(net.layers[0])
    return net  # type: ignore[no-any-return]


SHARDED = [
    (ADAM, shard_first, None),  # PyTorch's fused Adam takes no mix of whole and sharded tensors
    *zip(CASES, cycle([shard_each, shard_whole, shard_first]), cycle([None, 3])),
]


def trained_in_turn(rank: int, count: int = len(SHARDED)) -> Any:
    """Train with the first of the cases."""
    cases = SHARDED[:count]
    return [trained(rank, case, wrap, physical_batch_size=size) for case, wrap, size in cases]


def require_models_of_one(found: list[Any]) -> None:
    assert all(isinstance(each, list) for each in found), found
    for number, (case, _, _) in enumerate(SHARDED[: len(found[0])]):
        require_model_of_one([rank[number] for rank in found], case)


def resumed(_: int) -> Any:
    """Train two steps, and two more from a checkpoint, in a model that is sharded otherwise."""
    whole = saving.StateDictOptions(full_state_dict=True, cpu_offload=True)
    sampler, noise = PoissonSampler(RECORDS, 0.5, seeded(4)), seeded(3)
    state: dict[str, Any] = {}
    for wrap, steps in ((shard_each, 2), (shard_whole, 4)):
        net = wrap(Model(seed=7))
        budget = share_budget(lambda end=steps: no_claim(steps=end))
        optimizer = make_optimizer("dp_adam", net, budget, generator=noise)
        if state:
            shared = [state]  # as a file that all processes read
            distributed.broadcast_object_list(shared, src=0)
            saving.set_model_state_dict(net, shared[0]["model"], options=whole)
            optimizer.load_state_dict(shared[0]["optimizer"])
        for batch in private_batches(optimizer, Records(), sampler=sampler):
            step_with(optimizer, batch)
        model = saving.get_model_state_dict(net, options=whole)
        state = {"model": model, "optimizer": optimizer.state_dict()}
    return whole_parameters(net), state


def held(_: int) -> tuple[int, int]:
    """Return the coordinates of the model, and those of which this process holds Adam's state."""
    net = shard(Model(seed=5))
    size = sum(each.numel() for each in net.parameters())
    optimizer = make_seeded(net, ADAM)
    for batch in private_batches(optimizer, Records()):
        step_with(optimizer, batch)
        whole = sum(each.untyped_storage().nbytes() for each in optimizer.trained.whole)
        assert whole == 0
    state = optimizer.torch_optimizer.state.values()  # type: ignore[attr-defined]
    moments = sum(entries["exp_avg"].to_local().numel() for entries in state)
    return size, moments


def empty_share(rank: int) -> Any:
    """Make a step where rank 0 has all records of the batch."""
    net = shard_each(Model(seed=5))
    optimizer = make_seeded(net, ADAM, physical_batch_size=2)
    rows = [Records()[index] for index in range(5)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    own = batch if rank == 0 else {name: each[:0] for name, each in batch.items()}
    optimizer.take()
    optimizer.expect_examples(len(own["label"]))
    step_with(optimizer, own)
    return whole_parameters(net)


def layers(_: int) -> dict[str, float | str]:
    """Return how far clipped sums of sharded models are from those of the same whole models."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # here nothing is resharded early
    found: dict[str, float | str] = {}
    for name in LAYER_MODELS:
        net, examples, labels = build(name)
        sharded = copy.deepcopy(net)
        for layer in () if name == "tied embedding" else sharded.children():
            if list(layer.parameters()):
                fsdp.fully_shard(layer)
        fsdp.fully_shard(sharded)
        try:
            for path in (None, "replay"):
                given = (examples, labels, cross_entropy, 0.1)
                pairs = zip(
                    clipped_sum(net, *given, path=path),
                    clipped_sum(sharded, *given, path=path),
                    strict=True,
                )
                distance = max(float((one - other).abs().max()) for one, other in pairs)
                found[f"{name}, {path}"] = distance
        except Exception as error:  # the test shows it
            found[name] = repr(error)
    return found


# --- what is refused


def failed_share(rank: int) -> None:
    """Leave out an example in the second process."""
    optimizer = make_seeded(shard_each(Model(1)), ADAM)
    for batch in private_batches(optimizer, Records()):
        step_with(optimizer, {name: each[rank:] for name, each in batch.items()})


def by_columns(_: int) -> None:
    from torch.distributed.tensor import Shard

    net = shard(nn.Linear(6, 4), shard_placement_fn=lambda each: Shard(each.dim() - 1))
    make_seeded(net, ADAM)


def replicated_and_sharded(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, distributed.get_world_size()), mesh_dim_names=("a", "b"))
    make_seeded(shard(Model(1), mesh=mesh), ADAM)


def half_precision(_: int) -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    make_seeded(shard(Model(1), mp_policy=policy), ADAM)


def unshared(_: int) -> None:
    make_optimizer("dp_sgd", shard(Model(1)), no_claim())


def refused(rank: int) -> list[str]:
    ways = (failed_share, by_columns, replicated_and_sharded, half_precision, unshared)
    return [message_of(way, rank) for way in ways]


def of_two(rank: int) -> Any:
    functions = (trained_in_turn, resumed, held, empty_share, layers, refused)
    return [function(rank) for function in functions]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what two processes trained, hold, and were refused."""
    found = run_in_processes(2, tmp_path_factory.mktemp("two"), of_two)
    assert all(isinstance(each, list) for each in found), found
    return list(zip(*found, strict=True))


@pytest.mark.slow
def test_two_processes_train_the_model_of_one(two: Any) -> None:
    require_models_of_one(two[0])


@pytest.mark.nightly
@pytest.mark.parametrize("count", [4, len(SHARDED)])
def test_four_processes_train_the_model_of_one(count: int, tmp_path: Path) -> None:
    """One of the four has no row of some parameters."""
    found = run_in_processes(4, tmp_path, trained_in_turn, count)
    require_models_of_one(found)
    assert len(found[0]) == count


@pytest.mark.slow
def test_a_checkpoint_has_whole_tensors_and_can_be_resumed(two: Any) -> None:
    (parameters, state), (same, empty) = two[1]
    alone, _, _ = trained(0, ADAM)
    for one, other, third in zip(alone, parameters, same, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
        assert torch.equal(other, third)
    assert empty == {"model": {}, "optimizer": {}}
    net = Model(seed=7)
    net.load_state_dict(state["model"])
    optimizer = make_seeded(net, ADAM)
    optimizer.load_state_dict(state["optimizer"])
    (moments, *_) = optimizer.state_dict()["state"].values()
    assert torch.equal(moments["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


@pytest.mark.slow
def test_a_process_holds_its_share_between_steps(two: Any) -> None:
    size, shares = two[2][0][0], [moments for _, moments in two[2]]
    assert sum(shares) == size
    assert max(shares) < 0.6 * size


@pytest.mark.slow
def test_an_empty_share_and_another_number_of_passes(two: Any) -> None:
    optimizer = make_seeded(net := Model(seed=5), ADAM)
    rows = [Records()[index] for index in range(5)]
    step_with(optimizer, {name: torch.stack([row[name] for row in rows]) for name in rows[0]})
    for found in two[3]:
        for one, other in zip(net.parameters(), found, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_every_kind_of_layer_is_clipped_as_in_a_whole_model(two: Any) -> None:
    for found in two[4]:
        assert len(found) == 2 * len(LAYER_MODELS), found
        for name, distance in found.items():
            assert distance < 1e-12, name


@pytest.mark.slow
def test_what_cannot_be_trained_is_refused(two: Any) -> None:
    first, second = two[5]
    assert first[0].startswith("ProcessLostError: step 1 is not made: process 1 failed")
    assert second[0].startswith("DataError: ")
    for seen in (first, second):
        assert "only rows sharded among all 2 processes are supported" in seen[1]
        assert "only rows sharded among all 2 processes are supported" in seen[2]
        assert "inside of layers torch.bfloat16" in seen[3]
        assert seen[4].startswith("NoGuaranteeError: 2 processes train")


# --- one process


@pytest.mark.slow
def test_one_process_may_have_a_sharded_model() -> None:
    """So that a program for several processes runs alone, too."""
    with group_of_one():
        found = trained(0, ADAM, shard_each)
    alone = trained(0, ADAM)
    assert all(map(torch.equal, alone[0], found[0]))
