"""Compare Muon at the rate that `megaopt suggest` names with AdamW at the best of five rates.

    python benchmarks/suggested_rate.py

Three small trainings: a GPT on the bytes of Python's standard library, a vision transformer and a convolutional net on
the digits of scikit-learn (`pip install scikit-learn`; nothing is downloaded). AdamW runs at every rate of its grid on
three seeds. The rate with the least mean held-out loss goes into the rule, and Muon runs with its settings, untouched,
on the same seeds; it also runs at AdamW's own rate. The constant of the rule comes from another training
(`demo_grid.py`). The GPT alone, on two further seeds, shows what other multiples of AdamW's rate do. Results go into
`results/suggested_rate.json`; a run that is there already is not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from harness import RESULTS, write_result
from megaopt_tools.model import GPT
from megaopt_tools.rates import Tuned, suggested_settings
from megaopt_tools.records import versions
from megaopt_tools.shape import Shape
from megaopt_tools.text import batches, windows
from torch import nn
from torch.nn import functional

from megaopt_core import build_optimizer

NAME = "suggested_rate"
SEEDS = (0, 1, 2)
FURTHER_SEEDS = (10, 11)
GRID = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
MULTIPLES = (1.0, 2.0, 4.0, 8.0)
WEIGHT_DECAY = 0.1

type Batch = tuple[torch.Tensor, torch.Tensor]


@frozen
class Training:
    """One training.

    Args:
        model: makes the model.
        batches: yields the batches of a seed without end.
        held_out: the batches that are measured on.
        steps: how many steps are taken.
        rates: AdamW's grid.
        data: what it is trained on, with its SHA-256.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    held_out: list[Batch]
    steps: int
    rates: tuple[float, ...]
    data: str


def fingerprint(data: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def standard_library() -> torch.Tensor:
    """Return the bytes of the standard library's own modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def gpt() -> Training:
    """Return a GPT over bytes."""
    tokens = standard_library()
    cut = int(0.9 * len(tokens))
    shape = Shape(width=96, layers=3, heads=4, expansion=256)
    return Training(
        model=lambda: GPT(shape),
        batches=lambda seed: batches(tokens[:cut], 16, 64, seed),
        held_out=list(windows(tokens[cut : cut + 64 * 1024 + 1], 64, 64)),
        steps=200,
        rates=GRID,
        data=f"modules of the standard library, {len(tokens)} bytes, {fingerprint(tokens)}",
    )


class VisionTransformer(nn.Module):
    """A vision transformer of torch's own layers: 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of `[batch, 8, 8]`."""
        cut = images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(1, 2).flatten(2)
        x = self.patches(cut) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class ConvNet(nn.Module):
    """Three convolutions with group norms, and a linear head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.GroupNorm(4, 2 * width),
            nn.GELU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.GELU(),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of `[batch, 8, 8]`."""
        return self.head(self.layers(images[:, None]).mean(dim=(2, 3)))


def digits(model: Callable[[], nn.Module], steps: int, rates: tuple[float, ...] = GRID) -> Training:
    """Return a training on the digits; a third of them is held out, the rest is moved by up to a pixel."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(found.images, dtype=torch.float32) / 8 - 1)[order]
    labels = torch.tensor(found.target, dtype=torch.int64)[order]
    cut = len(labels) // 3

    def draw(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        padded = functional.pad(images[cut:], (1, 1, 1, 1), value=-1.0)
        while True:
            chosen = torch.randint(len(padded), (64,), generator=generator)
            down, right = torch.randint(3, (2, 64), generator=generator).tolist()
            moved = [
                padded[index, y : y + 8, x : x + 8]
                for index, y, x in zip(chosen.tolist(), down, right, strict=True)
            ]
            yield torch.stack(moved), labels[cut:][chosen]

    data = f"digits of scikit-learn, {len(images)} images, {fingerprint(images)}"
    return Training(model, draw, [(images[:cut], labels[:cut])], steps, rates, data)


TRAININGS: dict[str, Callable[[], Training]] = {
    "gpt": gpt,
    "vit": lambda: digits(VisionTransformer, 120),
    "convnet": lambda: digits(ConvNet, 60, tuple(4 * rate for rate in GRID)),
}


def trained(training: Training, optimizer: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train once; return the held-out loss and how long it took."""
    torch.manual_seed(seed)
    model = training.model()
    source = training.batches(seed)
    built = build_optimizer(
        model, optimizer, adam_beta2=0.95, clip_grad=1.0, example=next(training.batches(seed))[0], **settings
    )
    warmup = training.steps // 10

    def factor(step: int) -> float:
        done = max(0, step - warmup) / (training.steps - warmup)
        return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(built, factor)
    begin = time.perf_counter()
    for _, (inputs, targets) in zip(range(training.steps), source, strict=False):
        loss = functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        built.step()
        built.zero_grad()
        schedule.step()
    seconds = time.perf_counter() - begin
    model.eval()
    with torch.no_grad():
        total = sum(
            functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum").item()
            for inputs, targets in training.held_out
        )
    count = sum(targets.numel() for _, targets in training.held_out)
    value = total / count
    return {
        "loss": round(value, 4) if math.isfinite(value) else None,
        "seconds": round(seconds, 1),
    }


class Records:
    """Runs, each made once and written down at once.

    Args:
        path: where they are kept between calls.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []

    def loss(
        self, name: str, training: Training, optimizer: str, settings: dict[str, Any], seed: int
    ) -> float:
        """Return the held-out loss of a run."""
        key = {"training": name, "optimizer": optimizer, "settings": settings, "seed": seed}
        for run in self.runs:
            if all(run[field] == value for field, value in key.items()):
                return math.inf if run["loss"] is None else float(run["loss"])
        found = trained(training, optimizer, settings, seed)
        self.runs.append({**key, **found})
        write_result(NAME, {"runs": self.runs})
        print(f"{name:8} {optimizer:5} seed {seed:<3} {settings}  {found}", flush=True)
        return math.inf if found["loss"] is None else float(found["loss"])

    def losses(
        self,
        name: str,
        training: Training,
        optimizer: str,
        settings: dict[str, Any],
        seeds: tuple[int, ...] = SEEDS,
    ) -> list[float]:
        """Return the held-out losses over some seeds."""
        return [self.loss(name, training, optimizer, settings, seed) for seed in seeds]


def main() -> None:
    """Run what is missing, and write all down."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=tuple(TRAININGS), action="append")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    records = Records(RESULTS / f"{NAME}.json")
    outcome: dict[str, Any] = {}
    for name in args.only or TRAININGS:
        training = TRAININGS[name]()
        adamw = {
            rate: records.losses(name, training, "adam", {"lr": rate, "weight_decay": WEIGHT_DECAY})
            for rate in training.rates
        }
        best = min(adamw, key=lambda rate: statistics.mean(adamw[rate]))
        row = {"adamw": {f"{rate:g}": losses for rate, losses in adamw.items()}, "adamw_best": best}
        if name == "gpt":
            row["other_multiples"] = {
                f"{multiple:g}": records.losses(
                    name,
                    training,
                    "muon",
                    suggested_settings(Tuned(best, WEIGHT_DECAY), multiple=multiple),
                    FURTHER_SEEDS,
                )
                for multiple in MULTIPLES
            }
        same = suggested_settings(Tuned(best, WEIGHT_DECAY), multiple=1.0)
        row["muon_at_adamw_rate"] = records.losses(name, training, "muon", same)
        row["suggested"] = suggested_settings(Tuned(best, WEIGHT_DECAY))
        row["muon_suggested"] = records.losses(name, training, "muon", row["suggested"])
        outcome[name] = {"data": training.data, "steps": training.steps, **row}
    write_result(NAME, {"versions": versions(), "trainings": outcome, "runs": records.runs})


if __name__ == "__main__":
    main()
