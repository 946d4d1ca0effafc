"""Train a small network with torch's Muon for its hidden matrices and AdamW for the rest."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Linear(32, 64)
)
hidden = [model[1].weight, model[3].weight]
rest = [param for param in model.parameters() if not any(param is each for each in hidden)]
optimizers = [
    torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, ns_steps=5),
    torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0),
]
schedulers = [torch.optim.lr_scheduler.LinearLR(each, 0.1, 1.0, total_iters=5) for each in optimizers]

for step in range(10):
    tokens = torch.arange(64).roll(step)
    loss = nn.functional.cross_entropy(model(tokens), tokens.roll(-1))
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    print(f"step {step + 1}: loss {loss.item():.3f}")
