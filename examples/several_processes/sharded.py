"""Train a text classifier in several processes, with the model sharded by FSDP2."""

import os
import sys
from pathlib import Path

import torch
from posts import MeanOfTokens, Posts
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from training_client.budget import LedgerBudget
from training_client.client import AccountingService
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer, private_batches, share_budget
from training_client.plan import Plan
from training_client.run_report import settle

distributed.init_process_group("gloo")
posts, folder = Posts(3000), Path(os.environ.get("RUN", "runs/sharded"))
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


budget, checkpoint = share_budget(reserve), folder / "checkpoint.pt"
torch.manual_seed(0)  # the same first parameters in every process
model = MeanOfTokens()
for layer in model.children():
    fully_shard(layer)
fully_shard(model)
optimizer = make_optimizer("dp_adam", model, budget, learning_rate=0.02)
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
if checkpoint.exists():
    state = torch.load(checkpoint)
    set_model_state_dict(model, state["model"], options=whole)
    optimizer.load_state_dict(state["optimizer"])
for batch in private_batches(optimizer, posts):
    label = batch.pop("label")
    loss = optimizer.step(batch, label, cross_entropy)
    if optimizer.steps_made % 10 == 0:
        parameters = get_model_state_dict(model, options=whole)  # in every process
        state = {"model": parameters, "optimizer": optimizer.state_dict()}  # in every process
        if optimizer.is_first_process:
            part = folder / "checkpoint.part"
            torch.save(state, part)
            part.replace(checkpoint)
            print(f"step {optimizer.steps_made}: loss {loss:.2f}", flush=True)
settle(budget, optimizer.steps_made, folder)
test = next(iter(torch.utils.data.DataLoader(Posts(300, start=10**6), batch_size=300)))
with torch.no_grad():  # in every process
    correct = model(test["tokens"]).argmax(1) == test["label"]
if optimizer.is_first_process:
    print(f"test accuracy {correct.float().mean():.2f} after step {optimizer.steps_made}")
distributed.barrier()  # none leaves while another still needs it
distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a thread of gloo may still hold a tensor, and PyTorch would abort
