"""Train a small GPT with Muon for its hidden matrices, AdamW for the rest."""

import argparse
import math
from pathlib import Path

import torch
from model import GPT

from megaopt_core import build_optimizer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

learning_rate, min_lr, warmup = 3e-3, 3e-4, 10
weight_decay, grad_clip = 0.1, 1.0
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(1)
text = "".join(f"{n} times {n} is {n * n}. " for n in range(2000)).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(step):
    starts = torch.randint(len(data) - 65, (8,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([data[start : start + 65] for start in starts.tolist()]).to(device)
    return windows[:, :-1], windows[:, 1:]


def lr_at(step):
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


def configure_optimizers(model):
    return build_optimizer(
        model,
        "muon",
        lr=4 * learning_rate,
        weight_decay=weight_decay / 4,
        clip_grad=grad_clip,
        muon_extra_scale_factor=0.2,
        muon_scalar_lr=learning_rate,
        muon_scalar_weight_decay=weight_decay,
        adam_beta2=0.95,
        example=batch(0),
    )


model = GPT().to(device)
optimizer = configure_optimizers(model)
print(optimizer.report())
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

first = 0
if args.resume:
    checkpoint = torch.load(args.checkpoint, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first = checkpoint["step"]

for step in range(first, args.steps):
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"] * lr_at(step) / learning_rate
    with torch.autocast(device, dtype=torch.float16, enabled=device == "cuda"):
        loss = model(*batch(step))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.2f}")
    if step + 1 == args.steps // 2:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, args.checkpoint)
