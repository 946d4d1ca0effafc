"""A model on the device, and runs that depend on the step alone."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import UnusedSettingWarning
from megaopt_core.optimizers import MegatronOptimizer

__all__ = [
    "NO_SKIP",
    "PRECISIONS",
    "build",
    "everything",
    "give_grads",
    "model_of",
    "relative",
    "train",
    "waiting_raises",
]

NO_SKIP = {"bf16": True, "skip_nonfinite_steps": False}

PRECISIONS = {
    "fp32": {},
    "main": {"bf16": True},
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True},
    "8bit": {
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "uint8",
        "exp_avg_sq_dtype": "uint8",
    },
}


def model_of(device: torch.device, precision: str = "fp32", width: int = 64) -> nn.Module:
    """Return the same model every time."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.Linear(2 * width, width)]
    dtype = torch.bfloat16 if PRECISIONS[precision] else torch.float32
    return nn.Sequential(*layers).to(device, dtype)


def build(model: nn.Module, name: str, **settings: Any) -> MegatronOptimizer:
    """Return an optimizer; what changes nothing on this device is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedSettingWarning)
        return build_optimizer(
            model, name, **{"lr": 2.0**-7, "weight_decay": 0.125, "clip_grad": 0.5, **settings}
        )


def train(model: nn.Module, optimizer: MegatronOptimizer, steps: Iterable[int]) -> None:
    """Step on gradients of the step's own; they are new tensors every time."""
    for step in steps:
        give_grads(model, step)
        optimizer.step()


def give_grads(model: nn.Module, step: int) -> None:
    """Give every parameter a new gradient."""
    chance = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=chance).to(param.device, param.dtype)


@contextlib.contextmanager
def waiting_raises() -> Iterator[None]:
    """Let torch raise where the host would wait for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode does not see all of it
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def everything(model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return values and states by name, on the CPU in float64."""
    found = dict(model.state_dict())
    for param, name in optimizer.names.items():
        for key, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = value
    return {name: value.detach().double().cpu() for name, value in found.items()}


def relative(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return by how much two runs differ at most, relative to the largest value of each tensor."""
    assert one.keys() == other.keys()
    return max(
        float((value - other[name]).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in one.items()
        if value.numel()
    )
