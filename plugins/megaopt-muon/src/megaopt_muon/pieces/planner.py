"""What is to be done with each parameter of one optimizer, decided when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve, field

from megaopt_muon.pieces.groups import group_of
from megaopt_muon.pieces.plans import (
    MatrixPlan,
    cut_of,
    cuts_between_heads,
    partition_dim_of,
    plan_parameter,
    view_of,
)
from megaopt_muon.scale import get_muon_scale_factor
from megaopt_muon.tensor_parallel.equal_parts import require_equal_parts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.params import MatrixView, ParamInfo

__all__ = ["Planner", "stand_in"]


@define(eq=False)
class Planner:
    """Plans parameters, and remembers what it has planned.

    Args:
        split: which fused weights are taken apart.
        split_qkv: whether fused query, key and value are.
        is_qkv_fn: says which parameters without `param_info` are such.
        qkv_split_shapes: their rows of query, key and value in one query group.
        scale_mode: how an update grows with its matrix.
        extra_scale_factor: factor on every update.
        tp_mode: how matrices that are cut over ranks are orthogonalized.
        dense_group: tensor-parallel ranks of dense parameters.
        expert_group: the same of expert parameters.
    """

    split: str
    split_qkv: bool
    is_qkv_fn: Callable[[torch.Tensor], bool] | None
    qkv_split_shapes: tuple[int, int, int] | None
    scale_mode: str
    extra_scale_factor: float
    tp_mode: str
    dense_group: ProcessGroup | None
    expert_group: ProcessGroup | None
    _plans: dict[torch.Tensor, tuple[object, MatrixPlan]] = field(factory=dict, init=False)
    _whole: dict[str, tuple[ParamInfo, MatrixPlan]] = field(factory=dict, init=False)
    _equal: dict[torch.Tensor, object] = field(factory=dict, init=False)

    def plan(self, param: torch.Tensor) -> MatrixPlan:
        """Return what is to be done with a tensor that is stepped here.

        Args:
            param: the tensor.
        """
        info = getattr(param, "param_info", None)
        known = self._plans.get(param)
        if known is not None and known[0] is info:
            return known[1]
        plan = self._planned(param, self.group_of(param))
        self._plans[param] = (info, plan)
        return plan

    def require_equal_parts(self, params: Iterable[torch.Tensor], *, heads_alone: bool) -> None:
        """Raise on all ranks where some hold more of a matrix than others; each parameter is asked about once.

        Args:
            params: what is about to be stepped, also parts without elements, in an order that all ranks share.
            heads_alone: heads that are whole on a rank need nothing of others: ranks may hold unequal numbers of them.

        Raises:
            ViewError: ranks hold unequal parts, which only `"blockwise"` takes.
        """
        if self.tp_mode == "blockwise" or (self.dense_group is None and self.expert_group is None):
            return
        asked: dict[torch.Tensor, object] = {}
        cut: dict[ProcessGroup, tuple[list[torch.Tensor], list[int], list[bool]]] = {}
        for param in params:
            info = getattr(param, "param_info", None)
            if param in self._equal and self._equal[param] is info:
                continue
            asked[param] = info
            if partition_dim_of(param) < 0 or getattr(info, "peers", None) is not None:
                continue  # not cut, or the whole extent is known
            view = self.view(param)
            found = cut_of(param, view, self.group_of(param))
            if found is not None:
                members, dims, by_head = cut.setdefault(found.group, ([], [], []))
                members.append(param)
                dims.append(found.stored_dim)
                apart = cuts_between_heads(view, found, param.shape[found.stored_dim])
                by_head.append(heads_alone and apart)
        for group, (members, dims, by_head) in cut.items():
            require_equal_parts(members, dims, by_head, group, self.tp_mode)
        self._equal |= asked

    def plan_whole(self, info: ParamInfo) -> MatrixPlan:
        """Return what is to be done with a whole parameter, which no other rank holds a part of here.

        Args:
            info: of the parameter, which may be held elsewhere.
        """
        known = self._whole.get(info.name)
        if known is not None and known[0] == info:
            return known[1]
        plan = self._planned(stand_in(torch.empty(()).expand(info.shape), info), None)
        self._whole[info.name] = (info, plan)
        return plan

    def view(self, param: torch.Tensor) -> MatrixView:
        """Return how a parameter is taken apart.

        Args:
            param: the tensor that is stepped.

        Raises:
            ViewError: the parameter is no matrix, or is fused and nobody says how.
        """
        return view_of(
            param,
            split=self.split,
            split_qkv=self.split_qkv,
            is_qkv_fn=self.is_qkv_fn,
            qkv_split_shapes=self.qkv_split_shapes,
        )

    @property
    def known(self) -> dict[str, MatrixPlan]:
        """What is done with each named parameter, as far as it was stepped."""
        named = ((getattr(param, "param_info", None), plan) for param, (_, plan) in self._plans.items())
        plans = {info.name: plan for info, plan in named if info is not None}
        return {**plans, **{name: plan for name, (_, plan) in self._whole.items()}}

    def group_of(self, param: torch.Tensor) -> ProcessGroup | None:
        """Return the group that a parameter is cut over; None for this process alone.

        Args:
            param: the tensor that is stepped.

        Raises:
            ParallelGroupError: a dense parameter is cut, but only the experts' group is known.
        """
        return group_of(param, self.dense_group, self.expert_group, self.tp_mode)

    def scale(self, rows: int, columns: int) -> float:
        """Return the factor on the update of a whole matrix.

        Args:
            rows: of the matrix.
            columns: of the matrix.
        """
        return get_muon_scale_factor(rows, columns, self.scale_mode) * self.extra_scale_factor

    def _planned(self, param: torch.Tensor, group: ProcessGroup | None) -> MatrixPlan:
        return plan_parameter(param, self.view(param), group, self.tp_mode, self.scale)


def stand_in(update: torch.Tensor, info: ParamInfo) -> torch.Tensor:
    """Return a tensor that stands for a whole parameter: its shape and `param_info`, uncut.

    Args:
        update: of its shape and dtype.
        info: what it is.
    """
    whole = torch.empty((), dtype=update.dtype, device=update.device).expand(update.shape)
    whole.param_info = evolve(info, partition_dim=-1)  # type: ignore[attr-defined] # read from there
    return whole
