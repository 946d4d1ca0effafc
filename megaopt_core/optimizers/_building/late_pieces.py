"""Pieces of a part that are added, or replaced, in the middle of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megaopt_core.execution._inner import run_inner
from megaopt_core.optimizers._gradients.norm_deduplication import Counting
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.params._specs import ParamInfo
from megaopt_core.routing._routing import ParamRoute
from megaopt_core.sharding._layout import PieceSpec
from megaopt_core.sharding._live_model import Piece

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.plugin_api._entries import InitState

__all__ = ["add_to", "init_added", "replace_in"]


def replace_in(part: OptimizerPart, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Let a parameter take the place of another; its state stays.

    Args:
        part: steps it.
        old: what has its place so far.
        new: of the same shape, dtype and device.
    """
    for group in part.groups:
        group["params"][:] = [new if param is old else param for param in group["params"]]
    at = next((at for at, piece in enumerate(part.pieces) if _is_of(piece, old)), None)
    if at is None:
        return
    piece, before = part.pieces[at], part.stepped[at]
    piece.param, piece.model_params = new, (new,)
    after = part.precision.replace(at, old)
    if after is not before:
        after.param_info = before.param_info  # type: ignore[attr-defined] # what inner optimizers are told
        part.stepped = [after if tensor is before else tensor for tensor in part.stepped]
        for group in part.inner.param_groups:
            group["params"][:] = [after if tensor is before else tensor for tensor in group["params"]]
        if before in part.inner.state:
            part.inner.state[after] = part.inner.state.pop(before)
    part.watch_again()
    part.precision.take_over([at])


def add_to(
    part: OptimizerPart,
    group: int,
    route: ParamRoute,
    param: torch.nn.Parameter,
    info: ParamInfo,
    counting: Counting,
) -> None:
    """Step one more parameter, whole.

    Args:
        part: steps it from now on.
        group: position of its group among the part's.
        route: where it is routed.
        param: the parameter.
        info: what the inner optimizer is told of it.
        counting: how it enters norms.
    """
    piece = Piece(PieceSpec.of(route.shard, route.spec.group), param, (param,))
    part.sharded.take_in(piece)
    (tensor,) = part.precision.extend([piece])
    tensor.param_info = info  # type: ignore[attr-defined] # what inner optimizers are told
    part.stepped = [*part.stepped, tensor]
    part.counting = {**part.counting, info.name: counting}
    part.groups[group]["params"].append(param)
    part.groups[group]["param_names"].append(info.name)
    part.inner.param_groups[group]["params"].append(tensor)
    part.watch_again()


def init_added(part: OptimizerPart, init_state_fn: InitState | None, config: OptimizerConfig) -> None:
    """Make the state of what was added, as the build would have: torch's fused SGD steps all with a buffer or none.

    Args:
        part: steps it.
        init_state_fn: makes state; None: the next step does.
        config: the run's configuration.
    """
    if init_state_fn is None or part.split is not None:
        return
    groups = part.inner.param_groups
    every = [group["params"] for group in groups]

    def make() -> None:
        for group, params in zip(groups, every, strict=True):
            group["params"] = [tensor for tensor in params if not part.inner.state.get(tensor)]
        try:
            init_state_fn(part.inner, config)
        finally:
            for group, params in zip(groups, every, strict=True):
                group["params"] = params

    run_inner(part.precision, part.inner, make)


def _is_of(piece: Piece, param: torch.nn.Parameter) -> bool:
    return len(piece.model_params) == 1 and piece.model_params[0] is param
