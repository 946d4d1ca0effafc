"""In the manner of torchtitan: mesh and optimizer from a TOML file, FSDP2 per block, DCP, checkpointed activations."""

import argparse
import tomllib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megaopt_core import build_optimizer

arguments = argparse.ArgumentParser()
arguments.add_argument("config", type=Path)
arguments.add_argument("--resume", metavar="FOLDER")
arguments.add_argument("--tp", type=int)
args = arguments.parse_args()
config = tomllib.loads(args.config.read_text())
training, parallel = config["training"], config["parallelism"]
parallel["tp"] = args.tp or parallel["tp"]
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocabulary=64, width=32, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


mesh = init_device_mesh(device, (parallel["dp_shard"], parallel["tp"]), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)  # all ranks begin alike
model = Model().to(device)
for number, block in enumerate(model.blocks):
    if parallel["tp"] > 1:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if training["activation_checkpointing"]:
        model.blocks[number] = block = checkpoint_wrapper(block)
    if training["compile"]:
        block.compile()
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])

settings = dict(config["optimizer"])
optimizer = build_optimizer(model, settings.pop("name"), **settings, pg_collection=mesh)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training["steps"])
state = {"model": model, "optimizer": optimizer.checkpoint_state(), "schedule": schedule, "step": 0}
first = 0
if args.resume:
    dcp.load(state, checkpoint_id=args.resume)
    first = state["step"]
if dist.get_rank() == 0:
    print(optimizer.report())

for step in range(first, training["steps"]):
    chance = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (8, 17), generator=chance).sort(dim=1).values.to(device)
    mine = tokens.chunk(parallel["dp_shard"])[mesh["dp"].get_local_rank()]
    logits = model(mine[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 5 == 4:
        dist.all_reduce(loss.detach_(), group=mesh["dp"].get_group())
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item() / parallel['dp_shard']:.3f}")
    if (step + 1) % training["checkpoint_every"] == 0:
        state["step"] = step + 1
        dcp.save(state, checkpoint_id=f"step-{step + 1}" if args.resume is None else f"resumed-{step + 1}")
dist.barrier()
dist.destroy_process_group()
