"""Train a small model under accelerate with Muon, save its state and go on: `accelerate launch train.py`."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from megaopt_core import build_optimizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save", default="run")
parser.add_argument("--resume", help="a folder that --save has written")
options = parser.parse_args()

set_seed(0)
accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
)
optimizer = build_optimizer(model, "muon", lr=1e-2, weight_decay=0.01, clip_grad=1.0)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * options.epochs)
accelerator.print(optimizer.report())

inputs = torch.randn(256, 16)
kinds = inputs[:, :4].argmax(dim=1)
data = torch.utils.data.DataLoader(list(zip(inputs, kinds, strict=True)), batch_size=64)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

first = 0
if options.resume:
    accelerator.load_state(options.resume)
    first = scheduler.scheduler.last_epoch // 4
for epoch in range(first, options.epochs):
    for batch, kind in data:
        loss = torch.nn.functional.cross_entropy(model(batch), kind)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.save_state(f"{options.save}/{epoch}")
accelerator.end_training()
