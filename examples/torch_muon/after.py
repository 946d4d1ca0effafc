"""Train a small network with Muon for its hidden matrices and AdamW for the rest, as one optimizer."""

import torch
from torch import nn

from megaopt_core import build_optimizer

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Linear(32, 64)
)
optimizer = build_optimizer(
    model,
    "muon",
    lr=0.02,
    weight_decay=0.1,
    muon_momentum=0.95,
    muon_nesterov=True,
    muon_num_ns_steps=5,
    muon_coefficient_type="simple",
    muon_eps=1e-7,
    muon_scale_mode="shape_scaling",
    muon_scalar_lr=3e-3,
    muon_scalar_weight_decay=0.0,
    clip_grad=0.0,
)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)

for step in range(10):
    tokens = torch.arange(64).roll(step)
    loss = nn.functional.cross_entropy(model(tokens), tokens.roll(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"step {step + 1}: loss {loss.item():.3f}")
