"""Train a small vision transformer of timm with Muon: layer-wise rates, timm's schedule, and a resume."""

import argparse

import timm
import torch
from megaopt_trainers.timm import layer_decay_overrides
from timm.scheduler import create_scheduler_v2

from megaopt_core import build_optimizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save", default="run", help="what the files of the epochs begin with")
parser.add_argument("--resume", help="such a file")
options = parser.parse_args()

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=4)
overrides = layer_decay_overrides(model, lr=1e-2, layer_decay=0.75)
settings = {"lr": 1e-2, "weight_decay": 0.05, "clip_grad": 1.0, "overrides": overrides}
optimizer = build_optimizer(model, "muon", example=torch.zeros(1, 3, 32, 32), **settings)
scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=options.epochs, warmup_epochs=1)
print(optimizer.report())

first = 0
if options.resume:
    saved = torch.load(options.resume, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"]

# Four kinds of stripes, with noise.
kinds = torch.arange(256) % 4
waves = torch.linspace(0, 12, 32).repeat(4, 1).mul(torch.tensor([[1.0], [2.0], [3.0], [4.0]])).sin()
images = waves[kinds][:, None, None, :].expand(-1, 3, 32, -1) + torch.randn(256, 3, 32, 32)
for epoch in range(first, options.epochs):
    scheduler.step(epoch)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(32):
        loss = torch.nn.functional.cross_entropy(model(images[batch]), kinds[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(
        f"epoch {epoch}: loss {loss.item():.4f}, rate of the last group {optimizer.param_groups[-1]['lr']:.2e}"
    )
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
    torch.save(saved, f"{options.save}-{epoch}.pt")
