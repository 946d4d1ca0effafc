"""Copies of an optimizer: what they need beside what torch copies, which is groups and state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Self, override

from attrs import evolve

from megaopt_core.errors import UnsupportedOperationError

if TYPE_CHECKING:
    import torch

    from megaopt_muon.pieces.planner import Planner

__all__ = ["Copied"]

_KEPT: Final = (
    "newton_schulz",
    "pg_collection",
    "books",
    "local_step",
    "fp32_matmul_prec",
    "nesterov",
    "weight_decay_method",
)

_READ: Final = (
    "param_info",
    "is_qkv",
    "qkv_split_shapes",
    "partition_dim",
    "expert_tp",
    "allreduce",
)
"""Attributes of a parameter that tell its matrices; torch's copy of a parameter has none of its attributes."""


class Copied:
    """A Muon whose copies, by `copy.deepcopy` or pickle, step as it does."""

    pg_collection: Any
    planner: Planner
    param_groups: list[dict[str, Any]]

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of; torch knows of groups and state only."""
        known: Any = super().__getstate__()
        return {**known, **self._kept()}

    def _kept(self) -> dict[str, Any]:
        """Return the attributes of a copy; plans and intermediate matrices are made anew."""
        return {"planner": evolve(self.planner), **{name: getattr(self, name) for name in _KEPT}}

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what `pickle` writes.

        Args:
            protocol: of the pickle.

        Raises:
            UnsupportedOperationError: process groups cannot be written.
        """
        if self.planner.dense_group is not None or self.planner.expert_group is not None:
            raise UnsupportedOperationError(
                f"a {type(self).__name__} with process groups cannot be pickled; save its state_dict() instead"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that steps as this optimizer does, over the same process groups.

        Args:
            memo: what is copied already, by identity.
        """
        for shared in (self.pg_collection, self.planner.dense_group, self.planner.expert_group):
            memo[id(shared)] = shared
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        _carry_attributes(self.param_groups, copied.param_groups)
        return copied  # type: ignore[no-any-return]


def _carry_attributes(groups: Iterable[Mapping[str, Any]], copied: Iterable[Mapping[str, Any]]) -> None:
    """Give copies of parameters the attributes that say which matrices they are."""
    for group, other in zip(groups, copied, strict=True):
        params: Iterable[tuple[torch.Tensor, torch.Tensor]] = zip(
            group["params"], other["params"], strict=True
        )
        for param, its_copy in params:
            for name in _READ:
                if name in vars(param) and name not in vars(its_copy):
                    setattr(its_copy, name, vars(param)[name])
