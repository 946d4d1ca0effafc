"""Train on any number of ranks, under any sharding strategy, and go on from the same checkpoint on another."""

import argparse
import os

import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megaopt_core import build_optimizer

parser = argparse.ArgumentParser()
parser.add_argument("--sharding", default="replicated")
parser.add_argument("--until", type=int, default=10)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
rank, ranks = 0, int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    torch.distributed.init_process_group()
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(model)
optimizer = build_optimizer(model, "muon", lr=1e-2, muon_extra_scale_factor=0.2, sharding=args.sharding)

first = 0
if args.resume:
    report = load_checkpoint("checkpoint", model, optimizer)
    first = report.extra["step"]
    if rank == 0:
        print(f"resumed at step {first} on {ranks} rank(s), {args.sharding}")

inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
mine = inputs.chunk(ranks)[rank]
for step in range(first, args.until):
    loss = (model(mine) - mine[:, :4].cumsum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

save_checkpoint("checkpoint", model, optimizer, extra={"step": args.until})
with torch.no_grad():
    loss = (model(inputs) - inputs[:, :4].cumsum(1)).square().mean()
if rank == 0:
    print(f"step {args.until} on {ranks} rank(s): loss {loss.item():.4f}")
if ranks > 1:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
