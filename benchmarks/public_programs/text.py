"""Transformers on text, and ways to fine-tune them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_programs.program import Task, program
from benchmarks.public_programs.sequences import (
    LENGTHS,
    POSITIONS,
    WORDS,
    next_token_loss,
    padded_tokens,
    tokens,
)
from benchmarks.public_programs.vision import SIZE, classes_loss, labels

_HUGGING_FACE = "https://github.com/huggingface/transformers/blob/main/src/transformers/models"
_SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def padded_text() -> dict[str, Any]:
    mask = (torch.arange(POSITIONS) < LENGTHS[:, None]).long()
    return {"input_ids": padded_tokens(), "attention_mask": mask}


def class_logits_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, targets, reduction="none")


def token_logits_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return next_token_loss(outputs.logits, targets)


@program("BERT classifier", "huggingface/transformers", f"{_HUGGING_FACE}/bert/modeling_bert.py")
def bert() -> Task:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=WORDS, num_labels=5, **_SMALL)
    return Task(BertForSequenceClassification(config), padded_text(), labels(), class_logits_loss)


@program("GPT-2", "huggingface/transformers", f"{_HUGGING_FACE}/gpt2/modeling_gpt2.py")
def gpt2() -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, **_SPECIAL
    )
    model = GPT2LMHeadModel(config).train()
    return Task(model, padded_text() | {"use_cache": False}, tokens(), token_logits_loss)


@program("Llama", "huggingface/transformers", f"{_HUGGING_FACE}/llama/modeling_llama.py")
def llama() -> Task:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, num_key_value_heads=1, max_position_embeddings=16, **_SMALL, **_SPECIAL
    )
    examples = padded_text() | {"use_cache": False}
    return Task(LlamaForCausalLM(config).train(), examples, tokens(), token_logits_loss)


@program("T5", "huggingface/transformers", f"{_HUGGING_FACE}/t5/modeling_t5.py")
def t5() -> Task:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    examples = padded_text() | {"decoder_input_ids": tokens(5), "use_cache": False}
    return Task(T5ForConditionalGeneration(config).train(), examples, tokens(5), token_logits_loss)


@program("BART", "huggingface/transformers", f"{_HUGGING_FACE}/bart/modeling_bart.py")
def bart() -> Task:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=16, decoder_start_token_id=2, **_SPECIAL,
    )  # fmt: skip
    examples = padded_text() | {"decoder_input_ids": tokens(5), "use_cache": False}
    model = BartForConditionalGeneration(config).train()
    return Task(model, examples, tokens(5), token_logits_loss)


@program(
    "DeBERTa v2", "huggingface/transformers", f"{_HUGGING_FACE}/deberta_v2/modeling_deberta_v2.py"
)
def deberta() -> Task:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=WORDS, num_labels=5, relative_attention=True, position_buckets=4,
        max_position_embeddings=16, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm",
        share_att_key=True, **_SMALL,
    )  # fmt: skip
    model = DebertaV2ForSequenceClassification(config).train()
    return Task(model, padded_text(), labels(), class_logits_loss)


@program(
    "Mixtral, two experts a token",
    "huggingface/transformers",
    f"{_HUGGING_FACE}/mixtral/modeling_mixtral.py",
)
def mixtral() -> Task:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=16, experts_implementation="batched_mm", **_SMALL, **_SPECIAL,
    )  # fmt: skip
    examples = padded_text() | {"use_cache": False}
    return Task(MixtralForCausalLM(config).train(), examples, tokens(), token_logits_loss)


class CausalAttention(nn.Module):
    bias: torch.Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (
            each.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for each in self.c_attn(x).split(c, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")).softmax(dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.h = nn.ModuleList([GptBlock(width) for _ in range(2)])
        self.drop, self.ln_f = nn.Dropout(0.1), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@program(
    "nanoGPT, tied, positions without examples",
    "karpathy/nanoGPT",
    "https://github.com/karpathy/nanoGPT/blob/master/model.py",
)
def nano_gpt() -> Task:
    return Task(NanoGpt(), tokens(), tokens(), next_token_loss)


class Translation(nn.Module):
    """PyTorch's transformer, with positions in the first dimension."""

    pos: torch.Tensor

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.width = width
        self.transformer = nn.Transformer(width, 2, 1, 1, 16, dropout=0.0)
        self.generator = nn.Linear(width, WORDS)
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        den = torch.exp(-torch.arange(0, width, 2) * math.log(10000) / width)
        at = torch.arange(0, 16).reshape(16, 1)
        pos = torch.zeros((16, width))
        pos[:, 0::2], pos[:, 1::2] = torch.sin(at * den), torch.cos(at * den)
        self.register_buffer("pos", pos.unsqueeze(-2))

    def embed(self, table: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        found = table(ids.long()) * math.sqrt(self.width)
        return found + self.pos[: found.size(0), :]

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        src_padding = src == 0
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
        mask = self.transformer.generate_square_subsequent_mask(tgt.size(0)).bool()
        outs = self.transformer(
            self.embed(self.source, src), self.embed(self.target, tgt), None, mask, None,
            src_padding, None, src_padding,
        )  # fmt: skip
        return self.generator(outs).transpose(0, 1)


@program(
    "encoder and decoder with cross attention, positions first",
    "PyTorch tutorials",
    "https://github.com/pytorch/tutorials/blob/main/beginner_source/translation_transformer.py",
)
def translation_transformer() -> Task:
    examples = {"src": padded_tokens(), "tgt": tokens(5)}
    return Task(Translation(), examples, tokens(5), next_token_loss)


class Classifier(nn.Module):
    """A frozen transformer of one block, whose parts others adapt, and a trained head."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.block = GptBlock(width)
        self.requires_grad_(False)
        self.head = nn.Linear(width, 5)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1])).unsqueeze(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)).mean(1))


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank) * 0.3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.base(x)
            + (self.dropout(x) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1))
            * self.scaling
        )


@program("LoRA", "microsoft/LoRA", "https://github.com/microsoft/LoRA/blob/main/loralib/layers.py")
def lora() -> Task:
    model = Classifier()
    model.block.attn.c_attn = LoraLinear(model.block.attn.c_attn)
    return Task(model, tokens(), labels(), classes_loss)


class DoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.m = nn.Parameter(base.weight.detach().norm(p=2, dim=0, keepdim=True))
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numerator = self.base.weight + self.lora_B @ self.lora_A
        column_norm = numerator.norm(p=2, dim=0, keepdim=True)
        return F.linear(x, self.m * numerator / column_norm, self.base.bias)


@program("DoRA", "NVlabs/DoRA", "https://github.com/NVlabs/DoRA")
def dora() -> Task:
    model = Classifier()
    model.block.attn.c_attn = DoraLinear(model.block.attn.c_attn)
    return Task(model, tokens(), labels(), classes_loss)


class PromptTuned(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.soft_prompt = nn.Embedding(3, 12)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        virtual = torch.arange(3).unsqueeze(0).expand(ids.shape[0], -1)
        return torch.cat([self.soft_prompt(virtual), super().embed(ids)], dim=1)


@program(
    "prompt tuning",
    "huggingface/peft",
    "https://github.com/huggingface/peft/blob/main/src/peft/tuners/prompt_tuning/model.py",
)
def prompt_tuning() -> Task:
    return Task(PromptTuned(), tokens(), labels(), classes_loss)


class Adapter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 3), nn.Linear(3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(F.gelu(self.down(x)))


@program(
    "adapters", "google-research/adapter-bert", "https://github.com/google-research/adapter-bert"
)
def adapters() -> Task:
    model = Classifier()
    model.block.mlp = nn.Sequential(model.block.mlp, Adapter(12))
    return Task(model, tokens(), labels(), classes_loss)


class Ia3(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.ia3_l = base, nn.Parameter(torch.ones(1, base.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.ia3_l.flatten()


@program(
    "(IA)³, biases alone",
    "huggingface/peft",
    "https://github.com/huggingface/peft/blob/main/src/peft/tuners/ia3/layer.py",
)
def ia3() -> Task:
    model = Classifier()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    model.block.attn.c_attn = Ia3(model.block.attn.c_attn)
    return Task(model, tokens(), labels(), classes_loss)


class NoisyTopExperts(nn.Module):
    """Experts of which each token uses two; all are computed, and gates leave the rest out."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.gate, self.noise = nn.Linear(width, experts), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, width))
                for _ in range(experts)
            ]
        )
        self.head = nn.Linear(width, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        logits = self.gate(x)
        logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, indices = logits.topk(2, dim=-1)
        sparse = torch.full_like(logits, float("-inf")).scatter(-1, indices, top)
        gates = F.softmax(sparse, dim=-1)
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            found = found + expert(x) * gates[..., i : i + 1]
        return self.head(found.mean(1))


@program(
    "noisy top-2 experts, all computed",
    "AviSoori1x/makeMoE",
    "https://github.com/AviSoori1x/makeMoE",
)
def mixture_of_experts() -> Task:
    return Task(NoisyTopExperts(), tokens(), labels(), classes_loss)


class SparseExperts(nn.Module):
    """Experts that are given the tokens that chose them."""

    def __init__(self, width: int = 8, experts: int = 3) -> None:
        super().__init__()
        self.words, self.gate = nn.Embedding(WORDS, width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(experts)])
        self.head = nn.Linear(width, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        b, t, c = x.shape
        flat = x.view(-1, c)
        weights, chosen = torch.topk(self.gate(flat).softmax(-1), 2)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, nth = torch.where(chosen == i)
            results[row] += weights[row, nth, None] * expert(flat[row])
        return self.head(results.view(b, t, c).mean(1))


@program(
    "experts given the tokens that chose them",
    "dzhulgakov/llama-mistral",
    "https://github.com/dzhulgakov/llama-mistral",
)
def sparse_experts() -> Task:
    return Task(SparseExperts(), tokens(), labels(), classes_loss)


class Perceiver(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.words, self.latents = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(4, width))
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.latents[None].expand(text.shape[0], -1, -1)
        context = self.words(text)
        found, _ = self.cross(x, context, context, key_padding_mask=text == 0)
        return self.head(self.norm(x + found).mean(dim=-2))


@program(
    "Perceiver, latent array",
    "lucidrains/perceiver-pytorch",
    "https://github.com/lucidrains/perceiver-pytorch/blob/main/perceiver_pytorch/perceiver_pytorch.py",
)
def perceiver() -> Task:
    return Task(Perceiver(), padded_tokens(), labels(), classes_loss)


class SentencePairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 12, padding_idx=0)
        layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def embed(self, text: torch.Tensor) -> torch.Tensor:
        mask = text != 0
        found = self.encoder(self.words(text), src_key_padding_mask=~mask)
        expanded = mask.unsqueeze(-1).expand(found.size()).to(found.dtype)
        return torch.sum(found * expanded, 1) / torch.clamp(expanded.sum(1), min=1e-9)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.cosine_similarity(self.embed(one), self.embed(other))


@program(
    "sentence pairs, cosine similarity",
    "UKPLab/sentence-transformers",
    "https://github.com/UKPLab/sentence-transformers/blob/master/sentence_transformers/losses/CosineSimilarityLoss.py",
)
def sentence_pairs() -> Task:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, target, reduction="none")

    examples = {"one": padded_tokens(), "other": padded_tokens()}
    return Task(SentencePairs(), examples, torch.rand(SIZE), loss)


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 5))
        self.teacher = nn.Sequential(
            nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)
        )
        self.teacher.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


@program(
    "distillation from a frozen teacher",
    "haitongli/knowledge-distillation-pytorch",
    "https://github.com/haitongli/knowledge-distillation-pytorch/blob/master/model/net.py",
)
def distillation() -> Task:
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        student, teacher = outputs
        soft = F.kl_div(
            F.log_softmax(student / 2.0, dim=1), F.softmax(teacher / 2.0, dim=1), reduction="none"
        )
        return soft.sum(1) * 3.6 + F.cross_entropy(student, target, reduction="none") * 0.1

    return Task(Distilled(), torch.randn(SIZE, 10), labels(), loss)
