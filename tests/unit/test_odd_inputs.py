"""Unusual input is accepted; wrong input ends with an error message, never with a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from training_client.client import AccountingService, Reservation
from training_client.errors import (
    DataError,
    NoGuaranteeError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from training_client.lab.checkpoint import CHECKPOINT, Checkpoint, report_unreadable
from training_client.lab.data import load
from training_client.lab.models import cross_entropy, logistic
from training_client.lab.recipe import Recipe, RecipeOptions, make_recipe
from training_client.plan import Plan
from training_client.private_step import Clipper, Transform


def clip(
    net: nn.Module, examples: torch.Tensor, labels: torch.Tensor, loss: Any = logistic
) -> None:
    Clipper(net).clip(examples, labels, loss, Transform(1.0))


# --- gradients that cancel


def sure(weights: torch.Tensor) -> nn.Module:
    """A logistic model whose gradients are 0, 1 and -1 but for rounding."""
    net = nn.Linear(len(weights), 1, dtype=weights.dtype)
    with torch.no_grad():
        net.weight.copy_(weights)
        net.bias.zero_()
    return net


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    pairs=st.integers(1, 16),
    inputs=st.integers(1, 5),
    size=st.floats(0.5, 500),
    kind=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1 << 30),
)
def test_cancelling_gradients_pass_the_check_of_their_sum(
    pairs: int, inputs: int, size: float, kind: torch.dtype, seed: int
) -> None:
    """Half of the examples are wrong by nearly 1, and the other half by nearly -1."""
    generator = torch.Generator().manual_seed(seed)
    weights = size * torch.randn(inputs, generator=generator, dtype=kind)
    some = torch.randn(pairs, inputs, generator=generator, dtype=kind)
    spread = torch.linspace(0.9, 1.1, 2 * pairs, dtype=kind)[:, None]
    examples = torch.cat([some, -some]) * spread
    labels = (examples @ weights < 0).long()
    clip(sure(weights), examples, labels)


def test_small_batches_whose_gradients_cancel_are_accepted() -> None:
    for pairs in range(1, 9):
        examples = torch.tensor([1.0, -1.0] * pairs) * torch.linspace(0.4, 0.6, 2 * pairs)
        clip(sure(torch.tensor([30.0])), examples[:, None], torch.tensor([0, 1] * pairs))


class Attending(nn.Module):
    """A key's bias moves nothing: what its positions bring cancels in every example."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 2)

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.query(examples) @ self.key(examples).transpose(1, 2), -1)
        found: torch.Tensor = self.last((weights @ self.value(examples)).mean(1))
        return found


def normalised() -> nn.Module:
    """Nor does the bias of a convolution whose channels are centred."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Tanh(), nn.Flatten(),
        nn.Linear(144, 2),
    )  # fmt: skip


def averaged() -> nn.Module:
    """Positions of which each brings the same: single precision adds up what it rounds one way."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
    )


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    ("make", "shape"),
    [(Attending, (20, 5, 8)), (normalised, (20, 1, 8, 8)), (averaged, (32, 1, 96, 96))],
)
def test_gradients_that_cancel_within_an_example_pass_the_check(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        clip(make(), torch.randn(shape), torch.arange(shape[0]) % 2, cross_entropy)


class Leaking(nn.Module):
    """Uses its weight once more, out of sight, and by so much."""

    def __init__(self, by: float, first: bool) -> None:
        super().__init__()
        self.layer, self.by, self.first, self.marked = nn.Linear(5, 1), by, first, 0.0

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        part = (examples[:, :1] == self.marked) if self.first else 1.0
        again = nn.functional.linear(examples, self.layer.weight, self.layer.bias)
        found: torch.Tensor = self.layer(examples) + part * self.by * (again - again.detach())
        return found


@pytest.mark.spread(first=3)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("by", [1e-3, -1e-3, 1.0])
def test_a_gradient_of_which_a_thousandth_bypasses_the_layer_is_found(
    by: float, first: bool
) -> None:
    """Of all examples, and of one of 32, also where the others cancel."""
    for seed in range(10):
        torch.manual_seed(seed)
        some = torch.randn(16, 5)
        net, examples = Leaking(by, first), torch.cat([some, -some])
        with torch.no_grad():
            net.layer.weight.mul_(30)
        net.marked = float(examples[0, 0])
        labels = (net.layer(examples).squeeze(1) < 0).long()
        with pytest.warns(UserWarning, match="do not add up .*on each example alone"):
            clip(net, examples, labels if first else 0 * labels)


# --- checkpoints


def kept(**more: Any) -> Checkpoint:
    recipe = make_recipe(RecipeOptions(data="mnist", optimizer="adadp", model="logistic", hidden=3))
    fields: dict[str, Any] = {
        "recipe": recipe.document, "dataset": "d", "reservations": ["r"],
        "plan": Plan(60_000, 0.01, 1.0, 1.0), "directions": None, "steps": 3,
        "model": nn.Linear(784, 1).state_dict(), "optimizer": {},
    }  # fmt: skip
    return Checkpoint(**(fields | more))


def test_a_file_that_is_no_checkpoint_is_named_with_the_way_out(tmp_path: Path) -> None:
    for content in (b"", b"}", b"x", b"\x80", b"PK\x03\x04", b"(", b"]q\x00."):
        (tmp_path / CHECKPOINT).write_bytes(content)
        with pytest.raises(DataError, match=r"no checkpoint to resume.*without --resume") as found:
            Checkpoint.read(tmp_path)
        assert "weights_only" not in str(found.value)


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    kept().write(tmp_path)
    whole = (tmp_path / CHECKPOINT).read_bytes()
    for size in range(0, len(whole), len(whole) // 40):
        (tmp_path / CHECKPOINT).write_bytes(whole[:size])
        with pytest.raises(DataError, match="cut short"):
            Checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"recipe": kept().recipe | {"colour": 1}}, "colour"),
        ({"recipe": kept().recipe | {"optimizer": "best"}}, "'best'"),
        ({"recipe": kept().recipe | {"state": "odd"}}, "'odd'"),
        ({"recipe": kept().recipe | {"model": "large"}}, "'large'"),
        ({"recipe": kept().recipe | {"pca": 3}}, "TypeError"),
        ({"recipe": "a recipe"}, "as this version writes"),
        ({"model": {}}, "no model weights"),
        ({"model": {"weight": "heavy"}}, "no model weights"),
        ({"model": None}, "no model weights"),
        ({"reservations": []}, "identifiers of reservations"),
        ({"reservations": [3]}, "identifiers of reservations"),
    ],
)
def test_a_checkpoint_with_invalid_content_is_named(
    more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    kept(**more).write(tmp_path)
    with pytest.raises(DataError, match=words) as found:
        Checkpoint.read(tmp_path)
    assert "without --resume" in str(found.value)


@pytest.mark.parametrize(
    "other", [{"state_source": "raw"}, {"reservations": ["s"]}, {"charged_mechanism": "{}"}]
)
def test_optimizer_state_of_another_run_is_named(other: dict[str, Any], tmp_path: Path) -> None:
    kept(optimizer={"reservations": ["r"], "claim": "ε"}).write(tmp_path)
    assert Checkpoint.read(tmp_path).optimizer["claim"] == "ε"
    kept(optimizer=other).write(tmp_path)
    with pytest.raises(NoGuaranteeError, match="of two runs"):
        Checkpoint.read(tmp_path)


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"size mismatch.*without --resume"),
        report_unreadable(tmp_path),
    ):
        nn.Linear(3, 1).load_state_dict(kept().model)


def test_a_checkpoint_of_an_accelerator_is_read_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = kept()
    with monkeypatch.context() as there:
        there.setattr("torch.serialization.location_tag", lambda _: "cuda:0")
        written.write(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = Checkpoint.read(tmp_path)
    assert all(torch.equal(found.model[name], each) for name, each in written.model.items())
    assert Recipe.from_document(found.recipe) == Recipe.from_document(written.recipe)


# --- names and addresses


def asking() -> tuple[AccountingService, list[bytes]]:
    asked: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path)
        return httpx.Response(404, json={"code": "not-found", "detail": "no such thing"})

    return AccountingService("http://test", transport=httpx.MockTransport(answer)), asked


NAMED: list[Callable[[AccountingService, str], Any]] = [
    lambda service, name: service.dataset(name),
    lambda service, name: service.quote(name, {}),
    lambda service, name: service.reserve(name, {}),
    lambda service, name: service.reservation(name),
    lambda service, name: service.grant(Reservation(name, "open", 2, 0), 1),
    lambda service, name: service.renew(Reservation(name, "open", 2, 0)),
    lambda service, name: service.commit(Reservation(name, "open", 2, 0)),
    lambda service, name: service.release(Reservation(name, "open", 2, 0)),
    lambda service, name: service.certificate(Reservation(name, "open", 2, 0)),
]


def test_a_name_is_one_part_of_a_path() -> None:
    parts = (("a\nb", b"a%0Ab"), ("../x?y#z", b"..%2Fx%3Fy%23z"), ("é%", b"%C3%A9%25"))
    service, asked = asking()
    for ask in NAMED:
        for name, part in parts:
            with pytest.raises(ServiceRefusedError, match="no such thing"):
                ask(service, name)
            assert asked.pop().split(b"/")[3] == part


def test_a_name_or_an_address_that_no_url_can_contain_is_wrong_input() -> None:
    service, asked = asking()
    for ask in NAMED:
        for name in ("", ".", "..", "\udcff", 70_000 * "a"):
            with pytest.raises(DataError) as found:
                ask(service, name)
            assert (found.value.exit_code, asked) == (2, [])
    for url in ("http://a\nb", "http://a:b", "http://\u2028"):
        with pytest.raises(ServiceUnreachableError, match="is not the address of a service"):
            AccountingService(url)


# --- tables


@pytest.mark.parametrize("number", ["1e300", "-1e39", "inf", "3.5e38"])
def test_features_are_finite_in_the_precision_that_is_trained_in(
    number: str, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, row in (("train.csv", f"0,{number},2\n1,0,1\n"), ("test.csv", "0,3.4e38,2\n1,0,1\n")):
        (folder / name).write_text(row)
    with pytest.raises(DataError, match="finite features"):
        load("mine", tmp_path)
    (folder / "train.csv").write_text("0,3.4e38,2\n1,0,1\n")
    assert load("mine", tmp_path).train_examples.isfinite().all()


@pytest.mark.parametrize("label", ["1e300", "nan", "inf", "0.5"])
def test_a_class_is_a_whole_number(label: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("train.csv", "test.csv"):
        (folder / name).write_text(f"{label},1,2\n")
    with pytest.raises(DataError, match="an integer label"):
        load("mine", tmp_path)
