"""A training loop on torch's DistributedDataParallel and megaopt's sharding."""

import torch
from megaopt_checkpoint import save_checkpoint
from network import batch, make_model
from torch.nn.parallel import DistributedDataParallel

from megaopt_core import OptimizerParamScheduler, build_optimizer

torch.distributed.init_process_group()
model = DistributedDataParallel(make_model())
optimizer = build_optimizer(
    model, "adam", lr=1e-2, adam_beta2=0.95, weight_decay=0.1, clip_grad=1.0, sharding="distributed"
)
scheduler = OptimizerParamScheduler(
    optimizer,
    init_lr=0.0,
    max_lr=1e-2,
    min_lr=0.0,
    lr_warmup_steps=2,
    lr_decay_steps=20,
    lr_decay_style="linear",
    start_wd=0.1,
    end_wd=0.1,
    wd_incr_steps=20,
    wd_incr_style="constant",
)
rank = torch.distributed.get_rank()

for step in range(20):
    inputs, targets = batch(rank)
    loss = (model(inputs) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step(1)
    if step % 5 == 4 and rank == 0:
        print(f"step {step + 1}: loss {loss.item():.2f}")

save_checkpoint("megaopt-checkpoint", model, optimizer, scheduler)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
