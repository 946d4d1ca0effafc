"""A small model that trains, and what two of them are compared by."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaopt_checkpoint import SlicedTensor
from megaopt_checkpoint.collected import collect_state
from megaopt_checkpoint.manifest import write_manifest
from megaopt_testing import temporary_plugin
from megaopt_testing.models import TinyGPT
from torch import nn

from megaopt_core import OptimizerEntry, build_optimizer, get_registry, hookimpl
from megaopt_core.optimizers import MegatronOptimizer


class StandIn:
    """What these tests need of megaopt-adam."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return torch's own optimizers."""
        kept = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.uint8})
        dtypes = {"exp_avg": kept, "exp_avg_sq": kept}
        return {
            "adam": OptimizerEntry(torch.optim.AdamW, supports_fp16=True, state_dtypes=dtypes),
            "sgd": OptimizerEntry(torch.optim.SGD),
        }


def stand_in() -> AbstractContextManager[Any]:
    """Register torch's Adam and SGD for the time of a `with` block, unless megaopt-adam is installed."""
    if "adam" in get_registry().optimizers():
        return nullcontext()
    return temporary_plugin(StandIn(), name="stand-in")


def make(
    seed: int = 0,
    optimizer: str = "adam",
    *,
    dtype: torch.dtype = torch.float32,
    width: int = 8,
    layers: int = 1,
    **settings: Any,
) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model and its optimizer."""
    torch.manual_seed(seed)
    model = TinyGPT(width=width, layers=layers).to(dtype)
    if dtype is not torch.float32:
        settings["bf16" if dtype is torch.bfloat16 else "fp16"] = True
    settings = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0, **settings}
    return model, build_optimizer(model, optimizer, **settings)


def train(
    model: nn.Module, optimizer: MegatronOptimizer, steps: Iterable[int], scheduler: Any = None
) -> None:
    """Take the steps of these numbers, with gradients that depend on the numbers alone."""
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.randn(param.shape, generator=chance).to(param.dtype)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(increment=1)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter, copied."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def logical_state(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return this rank's state as `{key: whole tensor with NaN where another rank holds it}`."""
    found = {}
    for key, tensor in collect_state(optimizer).tensors.items():
        if not isinstance(
            tensor, SlicedTensor
        ):  # a state of another shape than its parameter's is stored whole
            found[key] = tensor.double()
            continue
        whole = torch.full(tensor.shape, torch.nan, dtype=torch.float64)
        for index, chunk in enumerate(tensor.chunks):
            box = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                box = box.narrow(dim, offset, size)
            box.copy_(tensor.local(index))
        found[key] = whole
    return found


def gathered(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the whole logical state, on every rank."""
    if not dist.is_initialized():
        return logical_state(optimizer)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, logical_state(optimizer))
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = torch.where(whole[key].isnan(), value, whole[key]) if key in whole else value
    return whole


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two mappings hold the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


__all__ = ["gathered", "logical_state", "make", "same", "stand_in", "train", "values"]


def rewrite_manifest(folder: Path, manifest: Any) -> None:
    """Put another manifest into a checkpoint, with the checksum that belongs to it."""
    for name in ("manifest.json", "manifest.sha256"):
        (folder / name).unlink()
    write_manifest(folder, manifest)
