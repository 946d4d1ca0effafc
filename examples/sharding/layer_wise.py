"""Muon under DistributedDataParallel: every matrix is stepped by one rank, which alone keeps its state."""

import torch
from megaopt_checkpoint import save_checkpoint
from network import choose_device, finish, loss_of, make_model
from torch.nn.parallel import DistributedDataParallel

from megaopt_core import build_optimizer

torch.distributed.init_process_group()
device = choose_device()
model = DistributedDataParallel(make_model(device))
optimizer = build_optimizer(model, "muon", lr=1e-2, muon_extra_scale_factor=0.2, sharding="layer_wise")

for step in range(40):
    loss = loss_of(model, step, device)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

save_checkpoint("checkpoint", model, optimizer, extra={"step": 40})
finish(optimizer, loss)
