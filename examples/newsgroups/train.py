"""Train a text classifier on 20 newsgroups within the budget of a dataset in the ledger.

The model is a small BERT with random first parameters. `--method full` trains all of them;
`--method lora` trains adapters and the classification head. If the program is killed, start it
again with the same options: it goes on from the last checkpoint, with the same reservation.

The posts are downloaded once (38 MB). The tokenizer knows their most frequent tokens only; these
are declared public, and no guarantee covers them.

Before the first run, create the dataset's budget and an API key, and start the service:

  accountant dataset create newsgroups --size 11293 --epsilon 8 --delta 1e-5 --unit post
  export ACCOUNTANT_API_KEY=$(accountant keys create --scope run --dataset newsgroups --name me)
  accountant serve
"""

import argparse
import os
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordLevelTrainer
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from training_client.budget import LedgerBudget
from training_client.client import AccountingService
from training_client.lab.data import declared_public
from training_client.lab.data.newsgroups import Posts, load_newsgroup_posts
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer, private_batches
from training_client.plan import Plan
from training_client.run_report import settle

DELTA = 1e-5  # of the dataset's budget
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]"]


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(group: Any, name: str, default: Any, text: str, **how: Any) -> None:
        """Add an option whose type is that of its default, which the help names."""
        text = f"{text} (default: {default})"
        group.add_argument(name, default=default, type=type(default), help=text, **how)

    run = parser.add_argument_group("the run")
    add(run, "--method", "full", "parameters to train", choices=["full", "lora"])
    run.add_argument(
        "--folder", type=Path, help="checkpoint and results (default: runs/newsgroups-METHOD)"
    )
    add(run, "--checkpoint-every", 20, "steps between checkpoints; also charged at once")
    add(run, "--service", "http://127.0.0.1:8000", "address of the accounting service")
    add(run, "--dataset", "newsgroups", "name of the dataset in the ledger")
    add(run, "--data", Path("data"), "folder that keeps the downloaded posts")
    plan = parser.add_argument_group("the plan, which decides the privacy cost")
    add(plan, "--steps", 200, "number of steps")
    add(plan, "--sample-rate", 0.08, "probability of each post to be in a batch")
    add(plan, "--noise-multiplier", 1.25, "standard deviation of the noise over the clip norm")
    add(plan, "--clip-norm", 1.0, "bound on the norm of the gradient of each post")
    model = parser.add_argument_group("the model")
    add(model, "--learning-rate", 0.01, "learning rate of dp_adam")
    add(model, "--layers", 1, "number of layers")
    add(model, "--width", 32, "size of the hidden states, a multiple of 4")
    add(model, "--length", 64, "tokens of each post that the model reads")
    add(model, "--vocabulary", 2000, "number of tokens that the tokenizer knows")
    options = parser.parse_args()
    if "ACCOUNTANT_API_KEY" not in os.environ:
        parser.error("set ACCOUNTANT_API_KEY to a key for the dataset; --help says how to get one")
    options.folder = options.folder or Path("runs") / f"newsgroups-{options.method}"
    return options


def train_tokenizer(vocabulary: Sequence[str], length: int) -> Tokenizer:
    """Return a tokenizer of the public tokens; it cuts or pads each text to the same length."""
    tokenizer = Tokenizer(WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    trainer = WordLevelTrainer(
        vocab_size=len(vocabulary) + len(SPECIAL_TOKENS), special_tokens=SPECIAL_TOKENS
    )
    tokenizer.train_from_iterator(vocabulary, trainer)
    first = ("[CLS]", tokenizer.token_to_id("[CLS]"))
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[first])
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    return tokenizer


class EncodedPosts(Dataset[dict[str, torch.Tensor]]):
    """Posts as dictionaries of tensors, encoded when they are drawn."""

    def __init__(self, posts: Posts, tokenizer: Tokenizer) -> None:
        self.posts, self.tokenizer = posts, tokenizer

    def __len__(self) -> int:
        return len(self.posts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        post = self.posts[index]
        encoded = self.tokenizer.encode(post["text"])
        return {
            "input_ids": torch.tensor(encoded.ids),
            "attention_mask": torch.tensor(encoded.attention_mask),
            "labels": torch.tensor(post["label"]),
        }


def make_model(options: argparse.Namespace, groups: Sequence[str]) -> Any:
    """Return a BERT with the same random first parameters at every call, with LoRA if wanted."""
    torch.manual_seed(0)  # of the first parameters; it does not seed the noise or the batches
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=options.vocabulary + len(SPECIAL_TOKENS),
            hidden_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            intermediate_size=2 * options.width,
            max_position_embeddings=options.length,
            initializer_range=options.width**-0.5,  # the default is for much wider models
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label=dict(enumerate(groups)),
        )
    )
    if options.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    return get_peft_model(model, adapters)


def reserve_budget(options: argparse.Namespace, records: int) -> LedgerBudget:
    """Reserve budget for all steps; a later start of the program gets the same reservation."""
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "idempotency-key"
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_text(uuid.uuid4().hex)
        part.replace(file)
    service = AccountingService(options.service, api_key=os.environ["ACCOUNTANT_API_KEY"])
    plan = Plan(records, options.sample_rate, options.clip_norm, options.noise_multiplier)
    mechanism, key = plan.mechanism(options.steps), file.read_text()
    first = service.reserve(options.dataset, mechanism, options.method, idempotency_key=key)
    held = service.reservation(first.identifier)  # with the steps that were granted since
    block, record = options.checkpoint_every, options.folder / "granted.json"
    return LedgerBudget(
        service,
        plan,
        options.dataset,
        DELTA,
        held,
        block=block,
        block_max=block,
        record=record,  # so that a ledger restored from a backup is refused
    )


def losses(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each post."""
    return cross_entropy(outputs.logits, labels)


def measure_accuracy(model: nn.Module, posts: EncodedPosts) -> float:
    """Return the share of posts whose group the model predicts."""
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch in DataLoader(posts, batch_size=256):
            labels = batch.pop("labels")
            correct += int((model(**batch).logits.argmax(1) == labels).sum())
    return correct / len(posts)


def main() -> None:
    """Train the model, or go on with it, and print its accuracy on the test posts."""
    options = read_options()
    folder = options.folder
    loaded = load_newsgroup_posts(options.data, options.vocabulary)
    tokenizer = train_tokenizer(loaded.vocabulary, options.length)
    posts, test = EncodedPosts(loaded.train, tokenizer), EncodedPosts(loaded.test, tokenizer)

    # the loop
    budget, checkpoint = reserve_budget(options, len(posts)), folder / "checkpoint.pt"
    model = make_model(options, loaded.groups)
    rate, steps = options.learning_rate, options.steps
    optimizer = make_optimizer("dp_adam", model, budget, learning_rate=rate, physical_batch_size=64)
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for batch in private_batches(optimizer, posts):
        labels = batch.pop("labels")
        optimizer.step(batch, labels, losses)
        made = optimizer.steps_made
        if made % options.checkpoint_every == 0 or made == steps:
            part = folder / "checkpoint.part"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
            part.replace(checkpoint)
            print(f"step {made} of {steps}: ε = {budget.spent:.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    claim = budget.guarantee(budget.made).document
    claim = {**claim, "declared_public": declared_public("newsgroups")}
    file = "model.safetensors" if options.method == "full" else "adapter_model.safetensors"
    settle(budget, budget.made, folder, claim, model=folder / file)
    # the end of the loop

    print(f"{options.method}: {optimizer.size} parameters trained, {budget.made} steps charged")
    print(f"test accuracy {measure_accuracy(model, test):.3f}")
    untrained = make_model(options, loaded.groups)
    print(f"before training {measure_accuracy(untrained, test):.3f}")
    largest = max(Counter(loaded.test.labels).values()) / len(test)
    print(f"always the largest group {largest:.3f}")


if __name__ == "__main__":
    main()
