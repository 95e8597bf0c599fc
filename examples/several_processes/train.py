"""Train a text classifier in one process, or in several that `torchrun` starts."""

import os
from pathlib import Path

import torch
from posts import MeanOfTokens, Posts
from torch import distributed

from training_client.budget import LedgerBudget
from training_client.client import AccountingService
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer, private_batches, share_budget
from training_client.plan import Plan
from training_client.run_report import settle

if "RANK" in os.environ:  # torchrun sets it
    distributed.init_process_group("gloo")
posts, folder = Posts(3000), Path(os.environ.get("RUN", "runs/posts"))
plan = Plan(len(posts), sample_rate=0.05, clip_norm=1.0, noise_multiplier=1.0)
url = os.environ.get("ACCOUNTANT_SERVICE", "http://127.0.0.1:8000")
service = AccountingService(url, api_key=os.environ["ACCOUNTANT_API_KEY"])


def reserve():  # called on rank 0 only
    name = folder / "reservation"
    folder.mkdir(parents=True, exist_ok=True)
    if name.exists():
        held = service.reservation(name.read_text())
    else:
        held = service.reserve("posts", plan.mechanism(120))
        name.write_text(held.identifier)
    record = folder / "granted.json"
    return LedgerBudget(service, plan, "posts", 1e-5, held, block=10, block_max=10, record=record)


# the loop
budget = share_budget(reserve)
model, checkpoint = MeanOfTokens(), folder / "checkpoint.pt"
optimizer = make_optimizer("dp_adam", model, budget, learning_rate=0.02)
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for batch in private_batches(optimizer, posts):
    label = batch.pop("label")
    loss = optimizer.step(batch, label, cross_entropy)
    if optimizer.is_first_process and optimizer.steps_made % 10 == 0:
        part = folder / "checkpoint.part"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
        part.replace(checkpoint)
        print(f"step {optimizer.steps_made}: loss {loss:.2f}", flush=True)
settle(budget, optimizer.steps_made, folder)
# the end of the loop
if optimizer.is_first_process:
    torch.save(model.state_dict(), folder / "model.pt")
    test = next(iter(torch.utils.data.DataLoader(Posts(300, start=10**6), batch_size=300)))
    with torch.no_grad():
        correct = model(test["tokens"]).argmax(1) == test["label"]
    print(f"test accuracy {correct.float().mean():.2f} after step {optimizer.steps_made}")
if distributed.is_initialized():
    distributed.destroy_process_group()
