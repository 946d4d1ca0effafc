"""The runs that `benchmarks/same_as.py` makes with two trees of megaopt: a table of combinations, and situations.

Every case trains a small model with gradients that depend on nothing but the step, and records results, digests of
all values, and the collectives that this rank took part in. Only public names are used, so that both trees run the
same code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megaopt_distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    plan_full_param_layout,
)
from same_as_models import (
    Net,
    TensorParallelNet,
    backward,
    give_grads,
    mark_experts,
    mesh_of,
    named_params,
    shard_with_fsdp,
)
from same_as_recording import Recorder
from torch import nn

from megaopt_core import MegatronOptimizer, OptimizerConfig, build_optimizer, get_megatron_optimizer, route
from megaopt_core.errors import MegaoptError

__all__ = ["combinations", "run_case", "situations"]

STEPS = 3
"""Steps of a plain case; a state that was written wrongly shows in the second."""

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adam": {},
    "sgd": {"sgd_momentum": 0.9},
    "lion": {},
    "muon": {"muon_fp32_matmul_prec": "highest"},
    "adaptive_muon": {"muon_fp32_matmul_prec": "highest"},
    "soap": {"soap_fp32_matmul_prec": "highest", "soap_precondition_frequency": 2},
    "torch:NAdam": {},
}

_AWARE: dict[str, Any] = {"bf16": True, "use_precision_aware_optimizer": True}
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 256.0},
    "remainders": _AWARE,
    "bf16 states": {**_AWARE, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16 main": {
        **_AWARE,
        "store_param_remainders": False,
        "main_params_dtype": torch.float16,
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.float16,
    },
    "fp8 states": {**_AWARE, "exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float16},
    "8-bit states": {**_AWARE, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
}

STRATEGIES: Mapping[str, tuple[int, ...]] = {
    "replicated": (1, 2),
    "distributed": (2, 4),
    "distributed, buffers": (2,),
    "layer_wise": (2, 4),
    "layer_wise, buffers": (2,),
    "fsdp": (2,),
}
"""Strategy, and how the model is wrapped, to the numbers of ranks that it is run on."""

_NO_FP16 = "declares no support for fp16"
_FP32_STATES = "no optimizer in use can keep exp_avg in less than fp32"
_LOW_BIT = ("bf16 states", "fp16 main", "fp8 states", "8-bit states")
IMPOSSIBLE: Mapping[tuple[str, str], str] = {
    **{(name, "fp16"): _NO_FP16 for name in ("muon", "adaptive_muon", "soap", "torch:NAdam")},
    **{(name, precision): _FP32_STATES for name in ("sgd", "torch:NAdam") for precision in _LOW_BIT},
    **{
        (name, "fp8 states"): "can keep exp_avg in 'bfloat16', 'float16', 'float32', 'uint8'"
        for name in ("lion", "soap")
    },
}
"""Combinations of optimizer and precision that no strategy can build, and words of the error."""


def combinations() -> Iterator[tuple[str, int, Any, str]]:
    """Yield name, ranks, function and words of the error of every optimizer x strategy x precision."""
    for strategy, sizes in STRATEGIES.items():
        for optimizer in OPTIMIZERS:
            for precision in PRECISIONS:
                for size in sizes:
                    name = f"{optimizer} / {strategy} / {precision} / {size} ranks"
                    run = partial(combination, optimizer, strategy, precision)
                    yield name, size, run, IMPOSSIBLE.get((optimizer, precision), "")


def _dtype(precision: str) -> torch.dtype:
    settings = PRECISIONS[precision]
    return torch.float16 if "fp16" in settings else torch.bfloat16 if "bf16" in settings else torch.float32


def _settings(optimizer: str, precision: str, **more: Any) -> dict[str, Any]:
    chosen = {"optimizer": optimizer, "lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0}
    stored = dict(PRECISIONS[precision])
    if optimizer == "lion":
        stored.pop("exp_avg_sq_dtype", None)  # it has one moment
    return {**chosen, **OPTIMIZERS[optimizer], **stored, **more}


def combination(optimizer: str, strategy: str, precision: str, rank: int, size: int) -> list[Any]:
    """Train one combination for a few steps.

    Args:
        optimizer: a key of `OPTIMIZERS`.
        strategy: a key of `STRATEGIES`.
        precision: a key of `PRECISIONS`.
        rank: this rank.
        size: number of ranks.
    """
    sharding, _, wrapper = strategy.partition(", ")
    config = OptimizerConfig(**_settings(optimizer, precision, sharding=sharding))
    model: nn.Module = Net().to(_dtype(precision))
    if wrapper:
        return _in_buffers(model, config, rank)
    if strategy == "fsdp":
        model = shard_with_fsdp(model, mesh_of(dp=size))
    made = get_megatron_optimizer(config, [model])
    return _train(model, made)


def _in_buffers(model: nn.Module, config: OptimizerConfig, rank: int) -> list[Any]:
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=900
    )
    layout = plan_full_param_layout(model, ddp_config, routing=route(config, [model]))
    wrapped = DistributedDataParallel(model, ddp_config, full_param_layout=layout)
    made = get_megatron_optimizer(config, [wrapped])
    recorder = Recorder(wrapped, made)
    for step in range(STEPS):
        made.zero_grad()
        backward(wrapped, step, rank, float(made.get_loss_scale()))
        recorder.step()
    return recorder.entries


def _train(model: nn.Module, made: MegatronOptimizer, steps: range = range(STEPS)) -> list[Any]:
    recorder = Recorder(model, made)
    for step in steps:
        give_grads(model, step, scale=float(made.get_loss_scale()))
        recorder.step()
    return recorder.entries


# Situations: each returns what it recorded.

KINDS: Mapping[str, tuple[str, str]] = {
    "adam fp32": ("adam", "fp32"),
    "adam bf16": ("adam", "bf16"),
    "adam remainders": ("adam", "remainders"),
    "muon fp32": ("muon", "fp32"),
    "muon bf16": ("muon", "bf16"),
}
"""What situations are tried with."""


def overflow(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """Steps whose gradients are not finite on one rank alone, between others; the scale falls and grows."""
    optimizer = KINDS[kind][0]
    scale = {"loss_scale_window": 2, "hysteresis": 1}
    model = Net().half()
    made = build_optimizer(model, **_settings(optimizer, "fp16", sharding=sharding, **scale))
    recorder = Recorder(model, made)
    for step in range(6):
        give_grads(model, step, scale=float(made.get_loss_scale()))
        if step in (1, 4) and rank == size - 1:
            model.blocks[0].up.weight.grad[0, 0] = torch.inf
        recorder.step()
    return recorder.entries


def skip_threshold(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """A step whose norm is above `grad_norm_skip_threshold`."""
    model, made = _built(kind, sharding, grad_norm_skip_threshold=100.0, log_num_zeros_in_grad=True)
    recorder = Recorder(model, made)
    for step in range(STEPS):
        give_grads(model, step, scale=50.0 if step == 1 else 1.0)
        recorder.step()
    return recorder.entries


def no_norms(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """Steps that neither clip nor count."""
    return _train(*_built(kind, sharding, clip_grad=0.0))


def norm_groups(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """Two norms, each clipped by itself, and parameters that are not clipped."""
    model = Net().to(_dtype(KINDS[kind][1]))
    for param in model.blocks[0].parameters():
        param.grad_norm_group = "first"
    made = build_optimizer(model, **_settings(*KINDS[kind], sharding=sharding))
    return _train(model, made)


def tensor_parallel(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """Two tensor-parallel ranks, and two data-parallel ones where there are four; given mean gradients."""
    mesh = mesh_of(dp=size // 2, tp=2)
    model = TensorParallelNet(2, mesh["tp"].get_local_rank()).to(_dtype(KINDS[kind][1]))
    made = build_optimizer(model, pg_collection=mesh, **_settings(*KINDS[kind], sharding=sharding))
    return _train(model, made)


def pipeline_parallel(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """Two stages; the second has no matrix, and where there are four ranks two replicas of each."""
    mesh = mesh_of(pp=2, dp=size // 2)
    stage = mesh["pp"].get_local_rank()
    whole = Net()
    model = nn.ModuleDict({"blocks": whole.blocks} if stage == 0 else {"norm": nn.LayerNorm(8)})
    model = model.to(_dtype(KINDS[kind][1]))
    made = build_optimizer(model, pg_collection=mesh, **_settings(*KINDS[kind], sharding=sharding))
    return _train(model, made)


def experts(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """Expert parameters, which expert-parallel ranks have for themselves."""
    mesh = mesh_of(dp=size // 2, ep=2)
    model = mark_experts(Net()).to(_dtype(KINDS[kind][1]))
    place = mesh["ep"].get_local_rank()

    def names(chunk: int, name: str) -> str:
        return f"expert{place}.{name}" if ".up." in name or ".down." in name else name

    made = build_optimizer(model, pg_collection=mesh, fqn=names, **_settings(*KINDS[kind], sharding=sharding))
    return _train(model, made)


def hybrid_sharding(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """FSDP2 within two ranks, and whole copies of that."""
    model = shard_with_fsdp(Net().to(_dtype(KINDS[kind][1])), mesh_of(dp_replicate=2, dp_shard=size // 2))
    made = build_optimizer(model, **_settings(*KINDS[kind], sharding=sharding))
    return _train(model, made)


def late_params(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """A block that begins to train after the first step, and another that no longer does."""
    model = Net().to(_dtype(KINDS[kind][1]))
    model.blocks[1].requires_grad_(requires_grad=False)
    made = build_optimizer(model, **_settings(*KINDS[kind], sharding=sharding))
    recorder = Recorder(model, made)
    for step in range(4):
        if step == 1:
            model.blocks[1].requires_grad_(requires_grad=True)
        if step == 3:
            model.blocks[0].requires_grad_(requires_grad=False)
        give_grads(model, step)
        recorder.step()
    return recorder.entries


def loaded_between(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """The state of another run, loaded between two steps."""
    model, made = _built(kind, sharding)
    other, theirs = _built(kind, sharding)
    give_grads(other, 7)
    theirs.step()
    recorder = Recorder(model, made)
    give_grads(model, 0)
    recorder.step()
    model.load_state_dict(other.state_dict())
    made.load_state_dict(theirs.state_dict())
    made.reload_model_params()
    for step in (1, 2):
        give_grads(model, step)
        recorder.step()
    return recorder.entries


def foreign_writes(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """Values that somebody else writes: through `.data`, under `no_grad`, and averages that are swapped in and out."""
    model, made = _built(kind, sharding)
    recorder = Recorder(model, made)
    for step in range(6):
        if step == 1:
            model.blocks[0].up.weight.data[0] = 0.25
        if step == 2:
            with torch.no_grad():
                model.blocks[1].down.weight.mul_(0.5)
        if step == 3:
            kept = {name: param.detach().clone() for name, param in named_params(model)}
            model.load_state_dict({name: value * 0.75 for name, value in kept.items()})
            model.load_state_dict(kept)
        give_grads(model, step)
        recorder.step()
    return recorder.entries


def accumulation(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """Gradients of two batches added up by autograd, on a model without a wrapper, the same on every rank."""
    model, made = _built(kind, sharding)
    recorder = Recorder(model, made)
    for step in range(STEPS):
        made.zero_grad()
        for part in range(2):
            backward(model, 10 * step + part, 0)
        recorder.step()
    return recorder.entries


def in_stages(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """`prepare_grads`, `clip_grad_norm` and `step_with_ready_grads`, as trainers call them."""
    model, made = _built(kind, sharding)
    recorder = Recorder(model, made)

    def stages() -> Any:
        if made.prepare_grads():
            return "given up"
        return made.clip_grad_norm(0.5), made.count_zeros(), made.step_with_ready_grads()

    for step in range(STEPS):
        give_grads(model, step)
        recorder.step(stages)
    return recorder.entries


def schedules(kind: str, sharding: str, rank: int, size: int) -> list[Any]:
    """Settings that are written into groups between steps, and a scheduler of torch's."""
    model, made = _built(kind, sharding)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0 / (1 + step))
    recorder = Recorder(model, made)
    for step in range(STEPS):
        made.param_groups[0]["weight_decay"] = 0.01 * step
        give_grads(model, step)
        recorder.step()
        scheduler.step()
    return recorder.entries


def resumed(kind: str, sharding: str, rank: int, size: int, *, folder: Path, write: bool) -> list[Any]:
    """A checkpoint of two steps, saved by the old tree and loaded by both, and the steps after it.

    Args:
        kind: a key of `KINDS`.
        sharding: the strategy.
        rank: this rank.
        size: number of ranks.
        folder: where checkpoints of the old tree are.
        write: whether this is the old tree.
    """
    from megaopt_checkpoint import load_checkpoint, save_checkpoint

    path = folder / f"{kind}-{sharding}-{size}".replace(" ", "-")
    if write:
        model, made = _built(kind, sharding)
        _train(model, made, range(2))
        save_checkpoint(path, model, made)
    model, made = _built(kind, sharding)
    load_checkpoint(path, model, made)
    return _train(model, made, range(2, 4))


def _built(kind: str, sharding: str, **settings: Any) -> tuple[nn.Module, MegatronOptimizer]:
    optimizer, precision = KINDS[kind]
    model: nn.Module = Net().to(_dtype(precision))
    if sharding == "fsdp":
        model = shard_with_fsdp(model, mesh_of(dp=torch.distributed.get_world_size()))
    return model, build_optimizer(model, **_settings(optimizer, precision, sharding=sharding, **settings))


_EVERYWHERE = (("replicated", 1), ("replicated", 2), ("distributed", 2), ("layer_wise", 2))
_SITUATIONS: Mapping[Any, tuple[tuple[str, int], ...]] = {
    overflow: _EVERYWHERE,
    skip_threshold: (*_EVERYWHERE, ("fsdp", 2)),
    no_norms: (*_EVERYWHERE, ("fsdp", 2)),
    norm_groups: _EVERYWHERE,
    tensor_parallel: (("replicated", 2), ("replicated", 4), ("distributed", 4), ("layer_wise", 4)),
    pipeline_parallel: (("replicated", 2), ("replicated", 4), ("distributed", 4), ("layer_wise", 4)),
    experts: (("replicated", 2), ("replicated", 4), ("distributed", 4), ("layer_wise", 4)),
    hybrid_sharding: (("fsdp", 4),),
    late_params: (("replicated", 1), ("replicated", 2)),
    loaded_between: (*_EVERYWHERE, ("fsdp", 2)),
    foreign_writes: _EVERYWHERE,
    accumulation: _EVERYWHERE,
    in_stages: (*_EVERYWHERE, ("fsdp", 2)),
    schedules: (*_EVERYWHERE, ("fsdp", 2)),
}


def situations(checkpoints: Path, *, write: bool) -> Iterator[tuple[str, int, Any, str]]:
    """Yield name, ranks, function and no error of everything that happens beside plain steps.

    Args:
        checkpoints: where checkpoints of the old tree are.
        write: whether this is the old tree.
    """
    for function, places in _SITUATIONS.items():
        for sharding, size in places:
            for kind in ("adam fp32",) if function is overflow else KINDS:
                name = f"{function.__name__} / {kind} / {sharding} / {size} ranks"
                yield name, size, partial(function, kind, sharding), ""
    for sharding, size in (*_EVERYWHERE, ("fsdp", 2)):
        for kind in KINDS:
            name = f"resumed / {kind} / {sharding} / {size} ranks"
            yield name, size, partial(resumed, kind, sharding, folder=checkpoints, write=write), ""


def run_case(function: Any, rank: int, size: int) -> list[Any]:
    """Run one case; what it raises before the first step is what it records.

    Args:
        function: of :func:`combinations` or :func:`situations`.
        rank: this rank.
        size: number of ranks.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(rank, size)
        except MegaoptError as error:
            return [["raised", f"{type(error).__name__}: {error}"]]
