"""Programs in which one example changes what is computed for others: they are refused."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.public_programs.program import Task, program
from benchmarks.public_programs.tables import numbers, small_mlp
from benchmarks.public_programs.vision import (
    SIZE,
    UNet,
    classes_loss,
    images,
    labels,
    resnet,
)
from training_client.optimizers import fix

DEPEND: Final = "examples depend on other examples"


@program(
    "Cox regression",
    "havakv/pycox",
    "https://github.com/havakv/pycox/blob/master/pycox/models/loss.py",
    DEPEND,
)
def cox() -> Task:
    targets = {"durations": torch.rand(SIZE), "events": torch.ones(SIZE)}

    def loss(log_h: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        order = target["durations"].sort(descending=True)[1]
        events, log_h = target["events"][order], log_h[order].view(-1)
        gamma = log_h.max()
        log_cumsum_h = log_h.sub(gamma).exp().cumsum(0).add(1e-7).log().add(gamma)
        return -log_h.sub(log_cumsum_h).mul(events)

    return Task(small_mlp(4, 1), numbers(), targets, loss)


class TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(one), self.net(other)


def two_views() -> dict[str, torch.Tensor]:
    return {"one": images(3, 8), "other": images(3, 8)}


@program(
    "SimCLR, other examples as negatives",
    "sthalles/SimCLR",
    "https://github.com/sthalles/SimCLR/blob/master/simclr.py",
    DEPEND,
)
def simclr() -> Task:
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        features = F.normalize(torch.cat(outputs), dim=1)
        count = len(outputs[0])
        similarity = torch.matmul(features, features.T) / 0.07
        similarity = similarity.masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
        positives = torch.arange(2 * count).roll(count)
        return F.cross_entropy(similarity, positives, reduction="none").view(2, count).sum(0)

    return Task(TwoViews(), two_views(), labels(), loss)


@program(
    "CLIP, other examples as negatives",
    "openai/CLIP",
    "https://github.com/openai/CLIP/blob/main/clip/model.py",
    DEPEND,
)
def clip() -> Task:
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        image, text = (each / each.norm(dim=1, keepdim=True) for each in outputs)
        logits = 10 * image @ text.t()
        truth = torch.arange(len(logits))
        rows = F.cross_entropy(logits, truth, reduction="none")
        return (rows + F.cross_entropy(logits.t(), truth, reduction="none")) / 2

    return Task(TwoViews(), two_views(), labels(), loss)


@program(
    "Barlow Twins, correlations over the batch",
    "facebookresearch/barlowtwins",
    "https://github.com/facebookresearch/barlowtwins/blob/main/main.py",
    DEPEND,
)
def barlow_twins() -> Task:
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        one, other = ((z - z.mean(0)) / z.std(0) for z in outputs)
        c = one.T @ other / len(one)
        on_diag = torch.diagonal(c).add(-1).pow(2).sum()
        return on_diag.expand(len(one)) / len(one)

    return Task(TwoViews(), two_views(), labels(), loss)


@program(
    "CIFAR ResNet, BatchNorm",
    "akamaster/pytorch_resnet_cifar10",
    "https://github.com/akamaster/pytorch_resnet_cifar10/blob/master/resnet.py",
    "BatchNorm2d … normalises over the batch",
)
def resnet_batch_norm() -> Task:
    return Task(resnet(nn.BatchNorm2d), images(), labels(), classes_loss)


@program(
    "the same after `fix`: GroupNorm",
    "akamaster/pytorch_resnet_cifar10",
    "https://github.com/akamaster/pytorch_resnet_cifar10/blob/master/resnet.py",
)
def resnet_fixed() -> Task:
    return Task(fix(resnet(nn.BatchNorm2d))[0], images(), labels(), classes_loss)


@program(
    "batch norm in plain code",
    "d2l-ai/d2l-en",
    "https://github.com/d2l-ai/d2l-en/blob/master/chapter_convolutional-modern/batch-norm.md",
    DEPEND,
)
def batch_norm_by_hand() -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            mean = x.mean(dim=0)
            var = ((x - mean) ** 2).mean(dim=0)
            return self.last(torch.relu((x - mean) / torch.sqrt(var + 1e-5)))

    return Task(Net(), numbers(), labels(), classes_loss)


@program(
    "loss of outputs centred over the batch (DINO)",
    "facebookresearch/dino",
    "https://github.com/facebookresearch/dino/blob/main/main_dino.py",
    DEPEND,
)
def batch_centred() -> Task:
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        student, teacher = outputs
        centre = teacher.mean(dim=0, keepdim=True)
        taught = F.softmax((teacher - centre) / 0.04, dim=-1).detach()
        return torch.sum(-taught * F.log_softmax(student / 0.1, dim=-1), dim=-1)

    return Task(TwoViews(), two_views(), labels(), loss)


@program(
    "the hardest examples of a batch",
    "CoinCheung/pytorch-loss",
    "https://github.com/CoinCheung/pytorch-loss/blob/master/pytorch_loss/ohem_loss.py",
    DEPEND,
)
def hardest_examples() -> Task:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = classes_loss(outputs, target)
        least = found.detach().topk(max(1, len(found) // 2)).values[-1]
        return torch.where(found >= least, found, torch.zeros_like(found))

    return Task(small_mlp(4, 5), numbers(), labels(), loss)


@program(
    "classes weighted by their counts in the batch",
    "vandit15/Class-balanced-loss-pytorch",
    "https://github.com/vandit15/Class-balanced-loss-pytorch/blob/master/class_balanced_loss.py",
    DEPEND,
)
def class_balanced() -> Task:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        counts = F.one_hot(target, 5).sum(0)
        weights = 0.01 / (1.0 - 0.99 ** counts.clamp(min=1).float())
        return classes_loss(outputs, target) * weights[target]

    return Task(small_mlp(4, 5), numbers(), labels(), loss)


class MixUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_mlp(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        index = torch.randperm(x.size(0))
        lam = 0.7
        return self.net(lam * x + (1 - lam) * x[index, :]), y, y[index]


@program(
    "MixUp within the batch",
    "facebookresearch/mixup-cifar10",
    "https://github.com/facebookresearch/mixup-cifar10/blob/main/train.py",
    DEPEND,
)
def mix_up() -> Task:
    def loss(outputs: Any, _: torch.Tensor) -> torch.Tensor:
        pred, y_a, y_b = outputs
        return 0.7 * classes_loss(pred, y_a) + 0.3 * classes_loss(pred, y_b)

    y = labels()
    return Task(MixUp(), {"x": numbers(), "y": y}, y, loss)


@program(
    "dice of the whole batch",
    "qubvel-org/segmentation_models.pytorch",
    "https://github.com/qubvel-org/segmentation_models.pytorch/blob/main/segmentation_models_pytorch/losses/dice.py",
    DEPEND,
)
def batch_dice() -> Task:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        probabilities = outputs.log_softmax(dim=1).exp().flatten(2)
        truth = F.one_hot(target.flatten(1), 3).permute(0, 2, 1)
        both = (probabilities * truth).sum((0, 2))
        score = 2 * both / (probabilities + truth).sum((0, 2)).clamp_min(1e-7)
        return (1 - score).mean().expand(len(outputs))

    return Task(UNet(3), images(pixels=8), torch.randint(3, (SIZE, 8, 8)), loss)


@program(
    "triplets of the hardest in the batch",
    "omoindrot/tensorflow-triplet-loss",
    "https://github.com/omoindrot/tensorflow-triplet-loss/blob/master/model/triplet_loss.py",
    DEPEND,
)
def batch_hard_triplets() -> Task:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        apart = torch.cdist(outputs, outputs)
        same = target[:, None] == target[None]
        farthest = (apart * same).amax(1)
        nearest = (apart + 1e6 * same).amin(1)
        return F.relu(farthest - nearest + 0.5)

    return Task(small_mlp(4, 5), numbers(), labels(2), loss)


@program(
    "PPO, advantages normalised over the batch",
    "vwxyzjn/cleanrl",
    "https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo.py",
    DEPEND,
)
def ppo_normalised() -> Task:
    targets = {"actions": labels(), "advantages": torch.randn(SIZE), "old": torch.randn(SIZE) - 2}

    def loss(logits: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        advantages = target["advantages"]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        logs = torch.distributions.Categorical(logits=logits).log_prob(target["actions"])
        ratio = (logs - target["old"]).exp()
        return torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2))

    return Task(small_mlp(4, 5), numbers(), targets, loss)


class Capacity(nn.Module):
    """Experts with room for some examples; those that come later are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts, self.head = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        mask = F.one_hot(gates.argmax(-1), 2)
        places = torch.cumsum(mask, dim=0) * mask
        mask = mask * (places <= 2)
        found = sum(e(x) * (gates * mask)[:, i : i + 1] for i, e in enumerate(self.experts))
        return self.head(found)


@program(
    "experts of limited capacity (Switch)",
    "lucidrains/mixture-of-experts",
    "https://github.com/lucidrains/mixture-of-experts/blob/master/mixture_of_experts/mixture_of_experts.py",
    DEPEND,
)
def expert_capacity() -> Task:
    return Task(Capacity(), numbers(), labels(), classes_loss)


class Queue(nn.Module):
    """Negatives from a queue of earlier examples."""

    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.register_buffer("queue", F.normalize(torch.randn(4, 8), dim=0))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        q, k = (
            F.normalize(self.encoder(one), dim=1),
            F.normalize(self.encoder(other), dim=1).detach(),
        )
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        self.queue[:, : len(k)] = k.T
        return torch.cat([l_pos, l_neg], dim=1) / 0.07


@program(
    "MoCo, a queue of earlier examples",
    "facebookresearch/moco",
    "https://github.com/facebookresearch/moco/blob/main/moco/builder.py",
    "changes buffer queue",
)
def moco() -> Task:
    examples = {"one": numbers(), "other": numbers()}
    return Task(Queue(), examples, torch.zeros(SIZE, dtype=torch.long), classes_loss)


@program(
    "spectral norm, whose vectors each pass updates",
    "christiancosgrove/pytorch-spectral-normalization-gan",
    "https://github.com/christiancosgrove/pytorch-spectral-normalization-gan",
    "updates a buffer in each forward pass",
)
def spectral_norm() -> Task:
    first = parametrizations.spectral_norm(nn.Linear(4, 8))
    return Task(
        nn.Sequential(first, nn.LeakyReLU(0.1), nn.Linear(8, 5)), numbers(), labels(), classes_loss
    )


@program(
    "mean loss of the batch",
    "pytorch/examples",
    "https://github.com/pytorch/examples/tree/main/regression",
    "a mean or sum over examples: use reduction='none'",
)
def mean_loss() -> Task:
    return Task(small_mlp(4, 1), numbers(), torch.randn(SIZE, 1), F.smooth_l1_loss)
