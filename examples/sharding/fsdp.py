"""Muon under FSDP2: parameters, gradients and state are cut over all ranks."""

import os

from megaopt_checkpoint import save_checkpoint
from network import choose_device, finish, loss_of, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt_core import build_optimizer

device = choose_device()
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
model = make_model(device)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = build_optimizer(model, "muon", lr=1e-2, muon_extra_scale_factor=0.2, pg_collection=mesh)

for step in range(40):
    loss = loss_of(model, step, device)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

save_checkpoint("checkpoint", model, optimizer, extra={"step": 40})
finish(optimizer, loss)
