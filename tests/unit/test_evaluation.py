"""Models are scored in evaluation mode, and in batches; then they are as they were before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training_client.lab.data import Dataset
from training_client.lab.train import evaluate
from training_client.private_step.model_state import evaluation_mode

EXAMPLES = 2500  # two and a half batches


class Net(nn.Module):
    """A net with dropout; a part of it stays in evaluation mode while the rest is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3))
        self.quiet = nn.Sequential(nn.Dropout(0.5), nn.Identity()).eval()
        self.sizes: list[int] = []  # of the batches

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(examples))
        found: torch.Tensor = self.quiet(self.layers(examples))
        return found

    @property
    def modes(self) -> list[bool]:
        """The training mode of each module."""
        return [each.training for each in self.modules()]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    return Net()


def scored(rows: int = EXAMPLES) -> Dataset:
    """Return a data set whose test set has classes that no net has learned."""
    generator = torch.Generator().manual_seed(2)
    examples = torch.randn(rows, 5, generator=generator)
    labels = torch.randint(0, 3, (rows,), generator=generator)
    return Dataset(examples[:1], labels[:1], examples, labels, classes=3)


@pytest.mark.parametrize("rows", [1, 999, EXAMPLES])
def test_a_score_is_that_of_evaluation_mode_in_batches_without_a_graph(net: Net, rows: int) -> None:
    data, before, kept = scored(rows), net.modes, list[bool]()
    assert True in before
    assert False in before
    hook = net.register_forward_hook(lambda _, __, output: kept.append(output.requires_grad))
    found = {evaluate(net, data) for _ in range(2)}
    assert net.modes == before
    # the documentation says a thousand
    assert net.sizes == [*[1000] * (rows // 1000), *[rows % 1000] * (rows % 1000 > 0)] * 2
    assert not any(kept)
    hook.remove()
    net.eval()
    right = net(data.test_examples).argmax(1) == data.test_labels
    (score,) = found
    assert score == pytest.approx(float(right.double().mean()), abs=1e-6)


def test_modes_are_restored_after_an_error(net: Net) -> None:
    before = net.modes

    def fail() -> None:
        with evaluation_mode(net):
            assert not any(net.modes)
            raise RuntimeError("while it is scored")

    with pytest.raises(RuntimeError, match="while it is scored"):
        fail()
    assert net.modes == before
    unfit = Dataset(*4 * [torch.zeros(2, 6)], classes=3)  # the net takes five inputs
    with pytest.raises(RuntimeError):
        evaluate(net, unfit)
    assert net.modes == before
