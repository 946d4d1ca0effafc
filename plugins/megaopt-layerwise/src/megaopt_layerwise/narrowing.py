"""Narrowing optimizers that step everything on every rank to what each rank owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megaopt_core import (
    FP32Optimizer,
    MegatronOptimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ProcessGroupCollection,
)
from megaopt_core.errors import ShardingError
from megaopt_core.optimizers import OptimizerPart
from megaopt_core.parallel import rank_in, size_of
from megaopt_core.params import is_marked_expert, named_params
from megaopt_core.sharding import FullParamLayout, ReplicatedParams
from megaopt_layerwise.owned_params import OwnedParams
from megaopt_layerwise.planner import ping_pong

__all__ = [
    "holds_experts",
    "is_replicated",
    "layouts_of",
    "narrowed",
    "owners_by_layout",
    "owners_by_ping_pong",
    "wrapped",
]

type ParamLists = list[list[torch.nn.Parameter]]
"""The parameters that each rank owns."""


def is_replicated(optimizer: MegatronOptimizer) -> bool:
    """Return whether every rank steps all parameters of an optimizer.

    Args:
        optimizer: a single optimizer.
    """
    return all(isinstance(part.sharded, ReplicatedParams) for part in optimizer.parts)


def owners_by_ping_pong(params: Sequence[torch.nn.Parameter], ranks: int) -> ParamLists:
    """Return owners in the order of sizes, forwards and backwards over the ranks.

    Args:
        params: in one order on all ranks.
        ranks: number of ranks.
    """
    return [[params[at] for at in places] for places in ping_pong([param.numel() for param in params], ranks)]


def owners_by_layout(
    params: Sequence[torch.nn.Parameter],
    ranks: int,
    layouts: Sequence[FullParamLayout],
    model_chunks: Sequence[torch.nn.Module],
) -> ParamLists:
    """Return the owners that layouts give: the rank in whose share of its bucket a parameter lies.

    Args:
        params: in one order on all ranks.
        ranks: number of ranks.
        layouts: one a model chunk.
        model_chunks: the chunks, which give parameters their names.

    Raises:
        ShardingError: a layout lacks a parameter, or cuts one.
    """
    owned: ParamLists = [[] for _ in range(ranks)]
    places: dict[torch.nn.Parameter, int | None] = {}
    for chunk, full in zip(model_chunks, layouts, strict=True):
        named = {entry.name: entry.param for entry in named_params(chunk)}
        for buffer in full.buffers.values():
            for name, (begin, end) in buffer.param_ranges.items():
                ends = buffer.ends(buffer.bucket_of[name], ranks)
                first = next((rank for rank, stop in enumerate(ends) if begin < stop), ranks - 1)
                places[named[name]] = first if end <= ends[first] else None
    for param in params:
        place = places.get(param)
        if place is None:
            reason = "cuts over ranks" if param in places else "does not have"
            raise ShardingError(
                f"shard_params: a parameter of shape {tuple(param.shape)}, which the layout {reason}"
            )
        owned[place].append(param)
    return owned


def narrowed(
    optimizer: MegatronOptimizer,
    owned: ParamLists,
    pgs: ProcessGroupCollection,
    model_chunks: Sequence[torch.nn.Module],
    *,
    is_expert: bool,
) -> MegatronOptimizer:
    """Return an optimizer that steps what this rank owns; it takes inner optimizer, policy and groups over.

    Args:
        optimizer: steps everything on every rank; it must not be used any more.
        owned: for each rank, what it owns, of this optimizer and of others.
        pgs: the process groups.
        model_chunks: the model, whose wrappers reduce gradients.
        is_expert: the parameters are those of experts.
    """
    (part,) = optimizer.parts
    group = pgs.shard_group(is_expert=is_expert)
    mine = set(owned[rank_in(group) if size_of(group) > 1 else 0])
    kept = [piece for piece in part.pieces if piece.model_params[0] in mine]
    before = {piece.model_params[0]: tensor for piece, tensor in zip(part.pieces, part.stepped, strict=True)}
    stepped = part.precision.attach(kept)
    after = {piece.model_params[0]: tensor for piece, tensor in zip(kept, stepped, strict=True)}
    for param, tensor in after.items():
        info = getattr(before[param], "param_info", None)
        if info is not None:  # what the inner optimizer is told of it: main values are made anew
            tensor.param_info = info  # type: ignore[attr-defined]
    _replace(part.inner, {before[param]: after.get(param) for param in before})
    known = set(optimizer.names)
    sharded = OwnedParams(
        kept,
        [[param for param in params if param in known] for params in owned],
        group,
        pgs.sharded_stats_group(is_expert=is_expert),
        model_chunks,
    )
    narrower = OptimizerPart(
        part.inner,
        part.precision,
        sharded,
        stepped,
        part.groups,
        part.config,
        part.counting,
        part.scalar_states,
        checks=part.checks,
        honours_noop=part.honours_noop,
    )
    return MegatronOptimizer(
        [narrower],
        config=optimizer.config,
        names=optimizer.names,
        process_groups=pgs,
        grad_scaler=optimizer.grad_scaler,
        norm_groups=optimizer.norm_groups,
        twins=optimizer.twins.of,
        routing=optimizer.routing,
    )


def _replace(inner: torch.optim.Optimizer, tensors: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
    """Put other tensors into an optimizer's groups and state; None takes one out."""
    for group in inner.param_groups:
        group["params"] = [new for old in group["params"] if (new := tensors[old]) is not None]
    for old, new in tensors.items():
        if old is not new and old in inner.state:
            state = inner.state.pop(old)
            if new is not None:
                inner.state[new] = state


def wrapped(
    optimizer: MegatronOptimizer | torch.optim.Optimizer,
    config: OptimizerConfig,
    pgs: ProcessGroupCollection,
) -> MegatronOptimizer:
    """Return an optimizer that steps everything on every rank; one of ours stays as it is.

    Args:
        optimizer: it, or a plain torch optimizer.
        config: tells the precision.
        pgs: the process groups.
    """
    if isinstance(optimizer, MegatronOptimizer):
        return optimizer
    if config.bf16 or config.fp16:
        return MixedPrecisionOptimizer(optimizer, config, process_groups=pgs)
    return FP32Optimizer(optimizer, config, process_groups=pgs)


def holds_experts(optimizer: MegatronOptimizer) -> bool:
    """Return whether an optimizer steps parameters of experts.

    Args:
        optimizer: a single optimizer.
    """
    return any(map(is_marked_expert, optimizer.names))


def layouts_of(chunks: Sequence[torch.nn.Module]) -> list[FullParamLayout] | None:
    """Return the layouts of chunks whose gradients are reduced to owners; None: every rank has them whole.

    Args:
        chunks: the model.

    Raises:
        ShardingError: some are of the one kind, and some of the other.
    """
    scatters = [
        getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False) for chunk in chunks
    ]
    if not any(scatters):
        return None
    layouts = [getattr(chunk, "full_param_layout", None) for chunk in chunks]
    found = [layout for layout in layouts if isinstance(layout, FullParamLayout)]
    if not all(scatters) or len(found) != len(chunks):
        raise ShardingError(
            f"model chunks {[at for at, scatter in enumerate(scatters) if scatter]} reduce gradients to owners, "
            f"of {len(chunks)} chunks with {len(found)} layouts: wrap all with use_distributed_optimizer=True and the "
            "layouts of compute_full_param_layout, or none"
        )
    return found
