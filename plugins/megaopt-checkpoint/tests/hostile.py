"""Checkpoints from strangers: manifests that were changed, with checksums that are right again."""

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from torch import nn
from training import logical_state, make, train, values

from megaopt_core import DynamicGradScaler
from megaopt_core.errors import CheckpointError
from megaopt_core.optimizers import MegatronOptimizer


class Scheduler:
    """A scheduler of plain values."""

    def __init__(self) -> None:
        self.num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "table": torch.arange(4.0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = 0 + state["num_steps"]


def build(seed: int = 0) -> tuple[Any, Any, Any]:
    """Return a model, its optimizer and a scheduler, trained for two steps: everything a manifest speaks of."""
    model, optimizer = make(seed=seed, width=4, dtype=torch.bfloat16)
    optimizer.grad_scaler = DynamicGradScaler(
        initial_scale=1.0,
        min_scale=1.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=9,
        hysteresis=2,
    )
    scheduler = Scheduler()
    train(model, optimizer, range(2))
    scheduler.num_steps = 2
    return model, optimizer, scheduler


def save_good(path: Path) -> None:
    """Save a checkpoint that has something in every field."""
    extra = {"step": 2, 1: (b"x", float("inf"), {3}), "rng": torch.arange(6), "nested": [None, {"a": [0.5]}]}
    save_checkpoint(path, *build(), extra=extra)


def copied(good: Path, path: Path) -> Path:
    """Return a copy of a checkpoint, to be changed."""
    path.mkdir()
    for file in good.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def snapshot(
    model: nn.Module, optimizer: MegatronOptimizer, scheduler: Any
) -> tuple[dict[str, torch.Tensor], Any]:
    """Return all that a load may change, by value."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    tensors = {**values(model), **logical_state(optimizer)}
    steps = [float(state["step"]) for state in optimizer.state.values()]
    plain = repr((groups, steps, scheduler.num_steps, optimizer.grad_scaler.state_dict()))
    return {name: tensor.double() for name, tensor in tensors.items()}, plain


def unchanged(
    before: tuple[dict[str, torch.Tensor], Any], after: tuple[dict[str, torch.Tensor], Any]
) -> bool:
    """Return whether two snapshots are the same, bit for bit."""
    return before[1] == after[1] and all(torch.equal(before[0][key], after[0][key]) for key in before[0])


def read(folder: Path) -> dict[str, Any]:
    """Return a manifest as JSON has it."""
    return json.loads((folder / "manifest.json").read_bytes())


def sign(folder: Path, document: Any) -> None:
    """Write a manifest with the checksum that belongs to it."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    (folder / "manifest.json").write_bytes(data)
    line = f"{hashlib.sha256(data).hexdigest()}  manifest.json\n"
    (folder / "manifest.sha256").write_text(line)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the ways to every value of a document."""
    found = [way] if way else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*way, key))
    return found


NASTY = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, float("nan"), 1e308, "", "x", "../secret.bin"),
    *("/etc/passwd", "rank-00001.bin", "float32", "int64", "quint8", "complex64", [], [0], [-1], [[]], {}),
    *(
        [2**62, 4],
        {"$tensor": "extra.rng"},
        {"$tensor": "model.norm.weight"},
        {"$tensor": 3},
        {"$float": "1"},
    ),
    *({"$scalar": ["float32", [], "x"]}, {"$scalar": ["float32", [3], 1]}, {"$dict": [[[], 1]]}, {"$x": 1}),
    *(
        {"$set": [[1]]},
        {"$bytes": "%"},
        {"$dtype": "nothing"},
        {"$tuple": 3},
        {"a": {"$tuple": [{}]}},
        "\x00",
    ),
]


def change(document: Any, chance: random.Random) -> tuple[str, tuple[Any, ...]]:
    """Change a document somewhere, in place; return what was done."""
    way = chance.choice(places(document))
    held = document
    for key in way[:-1]:
        held = held[key]
    key, kind = way[-1], chance.choice(["replace", "replace", "replace", "remove", "copy", "number"])
    if kind == "remove":
        del held[key]
    elif kind == "copy":
        other = document
        for step in chance.choice(places(document)):
            other = other[step]
        held[key] = json.loads(json.dumps(other))
    elif kind == "number" and isinstance(held[key], (int, float)):
        held[key] += chance.choice([-1, 1, 4, -8])
    else:
        held[key] = chance.choice(NASTY)
    return kind, way


_WATCHED = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _WATCHED and event == "open" and isinstance(arguments[0], (str, bytes)):
        _WATCHED[-1].append(os.fsdecode(arguments[0]))


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Return a list that fills with the paths that are opened in a `with` block."""
    if not getattr(sys, "_hostile_hook", False):
        sys.addaudithook(_hear)
        sys._hostile_hook = True
    found = []
    _WATCHED.append(found)
    try:
        yield found
    finally:
        _WATCHED.pop()


def refused(path: Path, match: str, error: type[CheckpointError]) -> None:
    """Require that verification, a load and a conversion refuse a checkpoint, and that nothing is changed."""
    live = build(seed=1)
    before = snapshot(*live)
    with pytest.raises(error, match=match):
        verify_checkpoint(path)
    with pytest.raises(error, match=match):
        load_checkpoint(path, *live)
    assert unchanged(before, snapshot(*live))
    with pytest.raises(error, match=match):
        convert_checkpoint(path, path.with_name("one.pt"))
    assert not path.with_name("one.pt").exists()
