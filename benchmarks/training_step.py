"""Compare a training step of every optimizer with an ordinary one: time and memory.

    python benchmarks/training_step.py [--models encoder,bert] [--only dp_sgd] [--json FILE]
        [--batch 256] [--rounds 21] [--device cuda]

Every model and step runs in its own process. Time: an ordinary step and the private one run
alternately, and the median of their ratios is shown; on a CPU it is the ratio of CPU times, because
other programs may run. Memory: the peak of all tensors, including model, batch and optimizer.
Opacus is measured with per-example hooks and with ghost clipping; a step that it refuses has no
numbers.

The file that --json names receives a list of rows: model, batch, step, time_ratio and memory_ratio,
and ms and mib, the step's own time and memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path = [str(Path(__file__).parents[1]), *(p for p in sys.path if not p.endswith("benchmarks"))]

import json
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.vision_models import (
    DiffusionUNet,
    ImageTransformer,
    ScaledBlock,
    build_convnext,
    build_resnet18,
    build_wrn,
)
from training_client.budget import NoBudget
from training_client.integrations.patches import tune_process
from training_client.lab.federated import Participant, train_federated
from training_client.lab.models import cross_entropy
from training_client.optimizers import OPTIMIZERS, PUBLIC_BATCH_SIZE, AdaDp, make_optimizer
from training_client.plan import Plan

CONSOLE = Console(width=100)
Step = Callable[[], object]
VOCABULARY: Final = 4000  # tokens of the language models
POSITIONS: Final = 128  # tokens of an example


@dataclass(frozen=True)
class Case:
    """A model and its batches, on which training steps are measured.

    Attributes:
        name: the model's name for `--models`.
        title: what it is.
        layers: builds the model.
        batch: examples per batch.
        shape: shape of an example.
        classes: number of classes.
        filled: share of nonzero values in an example.
        tokens: size of the vocabulary, if examples are tokens.
        is_generative: whether each token of an example has a class.
        rounds: the largest number of steps to time.
        all_steps: whether all steps are measured by default, or only the main ones.
    """

    name: str
    title: str
    layers: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    filled: float = 1.0
    tokens: int = 0
    is_generative: bool = False
    rounds: int = 5
    all_steps: bool = False

    @property
    def is_sparse(self) -> bool:
        """Return whether most inputs are 0, as in MNIST's images and bags of words."""
        return self.filled < 0.25

    def build_model(self, device: str) -> nn.Module:
        """Return the model with seeded parameters."""
        torch.manual_seed(0)
        return self.layers().to(device)

    def draw_batch(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of random examples and labels."""
        shape = (self.batch, *self.shape)
        labels = torch.randint(
            0, self.classes, shape if self.is_generative else (self.batch,), device=device
        )
        if self.tokens:
            return torch.randint(1, self.tokens, shape, device=device), labels
        examples = torch.rand(*shape, device=device)
        examples *= torch.rand_like(examples) < self.filled
        return examples, labels

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one loss per example; for a language model, the mean over its tokens."""
        if not self.is_generative:
            return cross_entropy(outputs, targets)
        found = cross_entropy(outputs.flatten(0, 1), targets.flatten())
        return found.view(targets.shape).mean(1)


def build_mlp(inputs: int) -> nn.Module:
    """Return a multilayer perceptron with this many inputs."""
    return nn.Sequential(nn.Linear(inputs, 1000), nn.ReLU(), nn.Linear(1000, 10))


def build_cnn() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


class Block(nn.Module):
    """A transformer encoder's block: attention and two linear layers, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block's output for one sequence per example."""
        parts = self.inner(self.first(rows)).chunk(3, -1)
        heads = [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts]
        mixed = scaled_dot_product_attention(heads[0], heads[1], heads[2])
        rows = rows + self.outer(mixed.transpose(1, 2).flatten(2))
        found: torch.Tensor = rows + self.narrow(self.wide(self.second(rows)).relu())
        return found


class MeanOverPositions(nn.Module):
    """A layer that takes the mean over a sequence's positions, also of recurrent outputs."""

    def forward(self, rows: Any) -> torch.Tensor:
        """Return the mean over positions, one row per example."""
        found: torch.Tensor = (rows[0] if isinstance(rows, tuple) else rows).mean(1)
        return found


class Logits(nn.Module):
    """A Hugging Face model as a function from one tensor to its logits."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        """Return the model's logits."""
        found: torch.Tensor = self.model(examples, **self.options).logits
        return found


class LowRank(nn.Module):
    """A frozen linear layer plus a trained low-rank map (LoRA, arXiv 2106.09685)."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the frozen and the low-rank map's outputs."""
        found: torch.Tensor = self.frozen(rows) + self.up(self.down(rows))
        return found


def build_encoder() -> nn.Module:
    """Return a transformer encoder with four blocks of width 256, and a classifier."""
    blocks = [Block(256, 8) for _ in range(4)]
    return nn.Sequential(*blocks, MeanOverPositions(), nn.Linear(256, 10))


def build_embedding() -> nn.Module:
    """Return an embedding of 20 000 tokens with 64 dimensions, and a classifier."""
    return nn.Sequential(nn.Embedding(20_000, 64), MeanOverPositions(), nn.Linear(64, 10))


def build_lstm() -> nn.Module:
    """Return an LSTM with a classifier."""
    return nn.Sequential(
        nn.LSTM(64, 128, batch_first=True), MeanOverPositions(), nn.Linear(128, 10)
    )


def build_bert() -> nn.Module:
    """Return a BERT classifier with four layers of width 256."""
    from transformers import BertConfig, BertForSequenceClassification

    return Logits(BertForSequenceClassification(BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
        intermediate_size=1024, max_position_embeddings=POSITIONS, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )))  # fmt: skip


def build_gpt2() -> nn.Module:
    """Return GPT-2 with four layers of width 256, its last layer tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_embd=256, n_layer=4, n_head=8, n_positions=POSITIONS,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )), use_cache=False)  # fmt: skip


def build_llama() -> nn.Module:
    """Return Llama with four layers of width 256."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return Logits(LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=POSITIONS,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )), use_cache=False)  # fmt: skip


def build_vit() -> nn.Module:
    """Return a vision transformer with four layers of width 256, on images of 224×224 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    return Logits(ViTForImageClassification(ViTConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024,
        image_size=224, patch_size=16, num_labels=10, hidden_dropout_prob=0.0,
    )))  # fmt: skip


def build_vit_class_token() -> nn.Module:
    """Return a vision transformer whose class token and positions are parameters of its own."""
    return ImageTransformer(256, 8, 64, *(Block(256, 8) for _ in range(4)))


def build_lora() -> nn.Module:
    """Return a frozen BERT whose classifier and rank-8 (LoRA) query and value maps are trained."""
    model = build_bert().requires_grad_(False)
    frozen = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in ("query", "value") and isinstance(child, nn.Linear)
    ]
    for parent, name, child in frozen:
        setattr(parent, name, LowRank(child))
    model.model.classifier.requires_grad_(True)  # type: ignore[union-attr]
    return model


def _mlp(name: str, inputs: int, batch: int, filled: float) -> Case:
    """Return the benchmark case of a multilayer perceptron; `filled` is the share of nonzeros."""
    layers = partial(build_mlp, inputs)
    return Case(name, f"{inputs}-1000-10", layers, batch, (inputs,), filled=filled, rounds=99,
                all_steps=True)  # fmt: skip


CASES = [
    *(_mlp("mlp", 784, batch, 0.2) for batch in (600, 256)),
    *(_mlp("narrow_mlp", 60, batch, 1.0) for batch in (600, 256)),
    Case("logistic", "10000-20", partial(nn.Linear, 10_000, 20), 600, (10_000,), 20, 0.01,
         rounds=99, all_steps=True),
    Case("cnn", "small CNN, 28×28", build_cnn, 256, (1, 28, 28), 10, 0.2, rounds=99,
         all_steps=True),
    Case("embedding", "embedding 20000×64", build_embedding, 64, (64,), tokens=20_000, rounds=21),
    Case("lstm", "LSTM 64-128, 64 positions", build_lstm, 64, (64, 64), rounds=9),
    Case("lora", "BERT 4×256, LoRA", build_lora, 16, (POSITIONS,), tokens=VOCABULARY),
    Case("encoder", "encoder 4×256, 128 positions", build_encoder, 32, (POSITIONS, 256)),
    Case("bert", "BERT 4×256, 128 tokens", build_bert, 16, (POSITIONS,), tokens=VOCABULARY),
    Case("gpt2", "GPT-2 4×256, 128 tokens", build_gpt2, 8, (POSITIONS,), VOCABULARY,
         tokens=VOCABULARY, is_generative=True),
    Case("llama", "Llama 4×256, 128 tokens", build_llama, 8, (POSITIONS,), VOCABULARY,
         tokens=VOCABULARY, is_generative=True),
    Case("vit", "ViT 4×256, 197 patches", build_vit, 8, (3, 224, 224)),
    *(Case("resnet18", "ResNet-18, group norm, 32×32", build_resnet18, batch, (3, 32, 32))
      for batch in (16, 64)),
    Case("wrn", "WRN-16-4, group norm, 32×32", build_wrn, 16, (3, 32, 32)),
    Case("convnext", "ConvNeXt-T, 32×32", build_convnext, 16, (3, 32, 32)),
    Case("scaled_convnext", "ConvNeXt-T, scales in layers, 32×32",
         partial(build_convnext, ScaledBlock), 16, (3, 32, 32)),
    Case("vit_class_token", "ViT 4×256, own class token, 65 rows", build_vit_class_token, 16,
         (3, 64, 64)),
    Case("unet", "diffusion U-Net, 32×32", DiffusionUNet, 8, (3, 32, 32)),
]  # fmt: skip
OPACUS_STEPS = ("opacus hooks", "opacus ghost")
PAPER_VARIANTS = ("adadp box", "pi_adam own squares")  # they need every per-example gradient
STATES = ("adadp public", "adadp raw", "pi_adam public", "pi_adam raw")
A_DDP = "a_ddp"  # a round of one participant with all its records
BF16, COMPILED = "dp_sgd bf16", "dp_sgd compiled"
MAIN_STEPS = ["sgd", *OPACUS_STEPS, "dp_sgd"]
STEPS = ["sgd", *OPACUS_STEPS, *OPTIMIZERS, A_DDP, *STATES, *PAPER_VARIANTS, BF16, COMPILED]


def make_ordinary_step(case: Case, device: str) -> Step:
    """Return a function that takes one step of SGD with momentum, without privacy."""
    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    optimizer = torch.optim.SGD(_trained(net), lr=0.1, momentum=0.9)

    def step() -> None:
        """Take one step on the benchmark's batch."""
        optimizer.zero_grad()
        case.losses(net(examples), targets).mean().backward()
        optimizer.step()

    return step


def _trained(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that are trained."""
    return [each for each in net.parameters() if each.requires_grad]


def _make_budget(plan: Plan) -> NoBudget:
    """Return a budget without a privacy claim."""
    return NoBudget(plan, 10**9, "it is measured")


def make_private_step(name: str, case: Case, device: str) -> Step:
    """Return a function that takes one step of a registered private optimizer, or a variant."""
    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    known, _, kind = name.partition(" ")
    local = OPTIMIZERS[known].paper_option == "box"
    state = {"": OPTIMIZERS[known].states[0], "box": "privatised", "own squares": "public"}
    # with so little noise, half axes replace the ball from the second step on
    plan = Plan(60_000, case.batch / 60_000, 1.0, 1e-5 * case.batch if local else 1.0)
    options: dict[str, Any] = {"threshold": 0.0} if local else {}
    if name in PAPER_VARIANTS:
        options[str(OPTIMIZERS[known].paper_option)] = True
    public = None
    if state.get(kind, kind) == "public":
        public = tuple(each[:PUBLIC_BATCH_SIZE].clone() for each in case.draw_batch(device))
    options["sparse_inputs"] = case.is_sparse
    options |= {"state": state.get(kind, kind), "public": public}
    optimizer = make_optimizer(known, net, _make_budget(plan), **options)
    for _ in range(2 if isinstance(optimizer, AdaDp) else 0):
        optimizer.step(examples, targets, case.losses)
    assert not local or optimizer.half_axes is not None
    return lambda: optimizer.step(examples, targets, case.losses)


def make_dp_sgd_variant_step(name: str, case: Case, device: str) -> Step:
    """Return a function that takes one step of DP-SGD in bfloat16, or compiled."""
    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    model = torch.compile(net) if name == COMPILED else net
    allowance = _make_budget(Plan(60_000, case.batch / 60_000, 1.0, 1.0))
    optimizer = make_optimizer("dp_sgd", model, allowance, sparse_inputs=case.is_sparse)  # type: ignore[arg-type]

    def step() -> None:
        """Take one step on the benchmark's batch."""
        with torch.autocast(device, torch.bfloat16, enabled=name == BF16):
            optimizer.step(examples, targets, case.losses)

    return step


def make_opacus_step(name: str, case: Case, device: str) -> Step:
    """Return a function that takes one step of Opacus, with hooks or ghost clipping."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    if any(isinstance(layer, nn.RNNBase) for layer in net.modules()):
        net = ModuleValidator.fix(net)  # Opacus has recurrent layers of its own
    settings: dict[str, Any] = {
        "noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": case.batch
    }  # fmt: skip
    descent = torch.optim.SGD(_trained(net), lr=0.1, momentum=0.9)
    if name == "opacus hooks":
        wrapped = GradSampleModule(net)
        optimizer = DPOptimizer(descent, **settings)
        criterion: Any = nn.CrossEntropyLoss()
    else:
        wrapped = GradSampleModuleFastGradientClipping(
            net, max_grad_norm=1.0, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(descent, **settings)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")

    def step() -> None:
        """Take one step on the benchmark's batch."""
        optimizer.zero_grad()
        outputs = wrapped(examples)
        if not case.is_generative:
            criterion(outputs, targets).backward()
        elif name == "opacus hooks":
            case.losses(outputs, targets).mean().backward()
        else:
            flat = outputs.flatten(0, 1), targets.flatten()
            criterion(*flat, shape=targets.shape).backward()
        optimizer.step()

    return step


def make_federated_step(case: Case, device: str) -> Step:
    """Return a function that runs a round of federated training with one participant."""
    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    allowance = _make_budget(Plan(case.batch, 1.0, 1.0, 1.0))
    people = [Participant("one", net, examples, targets, allowance, sparse_inputs=case.is_sparse)]
    return lambda: train_federated(net, people, case.losses, learning_rate=0.1, rounds_max=1)


def make_step(name: str, case: Case, device: str) -> Step:
    """Return a function that takes one step of the optimizer or library named `name`."""
    if name == "sgd":
        return make_ordinary_step(case, device)
    if name == A_DDP:
        return make_federated_step(case, device)
    if name in (BF16, COMPILED):
        return make_dp_sgd_variant_step(name, case, device)
    return (
        make_opacus_step(name, case, device)
        if name in OPACUS_STEPS
        else make_private_step(name, case, device)
    )


def run_in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in its own process; return its result or raise its exception."""
    context = multiprocessing.get_context("fork" if arguments[-1] == "cpu" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, arguments))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    if isinstance(found, Exception):
        raise found
    return found


def _send_result(
    sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Send the result or the exception of a function to the parent process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        sender.send(function(*arguments))
    except Exception as error:
        sender.send(error)
    os._exit(0) if arguments[-1] == "cpu" else None


def measure_step_ms(step: Step, device: str) -> float:
    """Return the duration of one step in milliseconds; on a CPU, its CPU time."""
    if device == "cpu":
        start = time.process_time()
        step()
        return 1e3 * (time.process_time() - start)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure_time(name: str, case: Case, rounds: int, device: str) -> tuple[float, float]:
    """Return a step's median milliseconds, and its ratio to an ordinary step just before."""
    plain, step = make_ordinary_step(case, device), make_step(name, case, device)
    ours, ratios = [], []
    with tune_process():  # as `train` does; for both steps
        for each in (plain, step, plain, step):
            each()
        for _ in range(rounds):
            base = measure_step_ms(plain, device)
            ours.append(measure_step_ms(step, device))
            ratios.append(ours[-1] / base)
    return statistics.median(ours), statistics.median(ratios)


def measure_memory_mib(name: str, case: Case, device: str) -> float:
    """Return the peak memory of one step in MiB: model, batch, state and temporaries."""
    if device != "cpu":
        step = make_step(name, case, device)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step()
        return float(torch.cuda.max_memory_allocated()) / 2**20
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step = make_step(name, case, device)
        for _ in range(3):
            step()
    changes = [
        e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    return max(accumulate(changes)) / 2**20


@dataclass(frozen=True)
class Row:
    """An optimizer's time and memory per step, also relative to an ordinary step.

    Numbers are None where the step cannot be made with the model.
    """

    model: str
    batch: int
    step: str
    time_ratio: float | None
    memory_ratio: float | None
    ms: float | None
    mib: float | None


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="steps to time, of each kind")] = 21,
    models: Annotated[
        str | None, typer.Option(help="names of models, with commas between; all by default")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="batch sizes to measure; all by default")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="steps to measure; the model's own by default")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="also write all rows to this file")
    ] = None,
) -> None:
    """Print one table for each model and batch size."""
    names = (models or ",".join(each.name for each in CASES)).split(",")
    _require_known("model", names, {each.name for each in CASES})
    _require_known("step", only or [], set(STEPS))
    CONSOLE.print(f"{device}, torch {torch.__version__}, one thread" if device == "cpu" else device)
    rows = []
    for case in CASES:
        if case.name in names and case.batch in (batch or [case.batch]):
            steps = only or (STEPS if case.all_steps else MAIN_STEPS)
            found = measure_case(case, steps, rounds, device)
            CONSOLE.print(build_table(case, found))
            rows += found
    if json_file is not None:
        json_file.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")


def _require_known(kind: str, given: list[str], known: set[str]) -> None:
    """Exit with code 2 if a name is unknown."""
    unknown = sorted(set(given) - known)
    if unknown:
        raise typer.BadParameter(
            f"unknown {kind} {', '.join(unknown)}: use {', '.join(sorted(known))}"
        )


def measure_case(case: Case, names: list[str], rounds: int, device: str) -> list[Row]:
    """Measure the named optimizers' steps on a model, each in a process of its own."""
    base = run_in_process(measure_memory_mib, "sgd", case, device)
    rows = []
    for name in names:
        slow = name in ("opacus hooks", *PAPER_VARIANTS)
        count = 3 if slow else min(rounds, case.rounds)
        try:
            ms, ratio = run_in_process(measure_time, name, case, count, device)
            mib = run_in_process(measure_memory_mib, name, case, device)
        except Exception as error:
            CONSOLE.print(f"{case.name}, {name}: {str(error).splitlines()[0][:80]}")
            rows.append(Row(case.name, case.batch, name, None, None, None, None))
            continue
        memory = round(mib / max(base, 1), 3)
        rows.append(
            Row(case.name, case.batch, name, round(ratio, 3), memory, round(ms, 2), round(mib, 1))
        )
    return rows


def build_table(case: Case, rows: list[Row]) -> Table:
    """Return the table of a model's measurements, with a row for each optimizer."""
    table = Table(title=f"{case.name}: {case.title}, batch {case.batch}", title_justify="left")
    for column in ("step", "ms", "time / SGD", "MiB", "memory / SGD"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for row in rows:
        numbers = [(row.ms, ".1f"), (row.time_ratio, ".2f"), (row.mib, ".0f"),
                   (row.memory_ratio, ".2f")]  # fmt: skip
        table.add_row(row.step, *("–" if n is None else format(n, how) for n, how in numbers))
    return table


if __name__ == "__main__":
    typer.run(main)
