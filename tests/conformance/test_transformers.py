"""Models of Hugging Face, called with dictionaries: clipped sums equal the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.clipped_sums import clip_rows, gradient_rows
from tests.support.small_models import unbudgeted
from training_client.optimizers import make_optimizer
from training_client.plan import Plan
from training_client.private_step import Clipper, Transform
from training_client.testing import clipped_sum

pytestmark = pytest.mark.slow
SIZE, POSITIONS, WORDS = 4, 9, 40
MODELS = ["bert", "gpt2", "llama", "vit"]
Batch = tuple[dict[str, Any], torch.Tensor]


def classes(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each example."""
    return nn.functional.cross_entropy(outputs.logits, targets, reduction="none")


def next_tokens(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each example's tokens."""
    flat = outputs.logits.flatten(0, 1), targets.flatten()
    losses = nn.functional.cross_entropy(*flat, reduction="none")
    return losses.view(targets.shape).mean(1)


def build(name: str) -> tuple[nn.Module, Batch, Callable[..., torch.Tensor]]:
    """Return a small model, a batch with padding, and the loss."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    tokens = torch.randint(3, WORDS, (SIZE, POSITIONS))
    mask = torch.arange(POSITIONS)[None] < torch.tensor([9, 5, 1, 7])[:, None]
    examples: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask.long()}
    labels = torch.arange(SIZE) % 2
    width = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 24}  # fmt: skip
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name.startswith("bert"):
        rates = {} if name == "bert with dropout" else quiet
        config = transformers.BertConfig(vocab_size=WORDS, num_labels=2, **width, **rates)
        return transformers.BertForSequenceClassification(config), (examples, labels), classes
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, **special,
        )  # fmt: skip
        net = transformers.GPT2LMHeadModel(config)
        return net, (examples | {"use_cache": False}, tokens), next_tokens
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=WORDS, num_key_value_heads=1, max_position_embeddings=16, **width, **special
        )
        net = transformers.LlamaForCausalLM(config)
        return net, (examples | {"use_cache": False}, tokens), next_tokens
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=2, **width, **quiet)
    pixels = {"pixel_values": torch.rand(SIZE, 3, 16, 16, dtype=torch.float64)}
    return transformers.ViTForImageClassification(config), (pixels, labels), classes


@pytest.mark.parametrize("name", MODELS)
def test_a_clipped_sum_of_a_transformer_equals_its_definition(
    name: str, subtests: pytest.Subtests
) -> None:
    net, batch, loss = build(name)
    net = net.double()
    gradients, blocks = gradient_rows(net, *batch, loss), Clipper(net).blocks
    longest = float(gradients.norm(dim=1).max())
    for path in (None, "held", "replay"):
        for clip_norm in (0.3 * longest, 10 * longest):
            with subtests.test(path=path, clip_norm=clip_norm):
                found = clipped_sum(net, *batch, loss, clip_norm, path=path)  # type: ignore[arg-type]
                exact = clip_rows(gradients, Transform(clip_norm), blocks).sum(0)
                vector = torch.cat([each.flatten() for each in found])
                torch.testing.assert_close(vector, exact, rtol=1e-6, atol=1e-6 * longest)


@pytest.mark.spread(second=6)
@pytest.mark.parametrize("name", [*MODELS, "bert with dropout"])
@pytest.mark.parametrize(
    ("optimizer", "rate"), [("dp_adam", 0.02), ("dp_rmsprop", 0.0005), ("pi_rmsprop", 0.02)]
)
def test_a_transformer_trains(name: str, optimizer: str, rate: float) -> None:
    """Its loss falls, as it is without dropout."""
    net, (examples, targets), loss = build(name)
    if name == "vit":
        examples = {"pixel_values": examples["pixel_values"].float()}

    def mean_loss() -> float:
        net.eval()
        with torch.no_grad():
            found = float(loss(net(**examples), targets).mean())
        net.train()
        return found

    # far below RMSprop's ε: it would take the noise of unused coordinates for gradients
    plan = Plan(dataset_size=SIZE, sample_rate=1.0, clip_norm=1.0, noise_multiplier=1e-12)
    private = make_optimizer(optimizer, net, unbudgeted(plan), learning_rate=rate)
    before = mean_loss()
    for _ in range(12):
        private.step(examples, targets, loss)
    assert mean_loss() < before
