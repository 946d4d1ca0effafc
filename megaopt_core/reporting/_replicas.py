"""Whether the ranks that hold replicas of the same parameters hold the same values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen

from megaopt_core.errors import RankMismatchError
from megaopt_core.parallel._agreement import (
    Comparison,
    Rows,
    described,
    differences_over_ranks,
    fingerprint,
)
from megaopt_core.parallel._digest import digest_of_tensors
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates
from megaopt_core.params._parts import local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.routing._routing import ParamRoute, Routing

__all__ = ["Replicas"]

_REMEDY = (
    "Give all of these ranks the values of one before the first step: broadcast_params() of DistributedDataParallel, "
    "torch.distributed.broadcast, or the same checkpoint; then call optimizer.reload_model_params(). Ranks that hold "
    "models of their own say so with pg_collection=ProcessGroupCollection() at the build"
)


type _Kinds = Mapping[tuple[ProcessGroup, ...], Mapping[str, torch.Tensor]]
"""Parameters by the groups whose ranks hold the same values of them."""


@frozen(eq=False)
class Replicas:
    """What a rank and others hold alike.

    Args:
        pgs: the process groups.
    """

    pgs: ProcessGroupCollection

    def differences(
        self, names: Mapping[torch.nn.Parameter, str], routing: Routing | None
    ) -> tuple[str, ...]:
        """Return which parameters have other values on which ranks, one line each; a collective.

        Args:
            names: live parameter to name.
            routing: where each stands.
        """
        kinds = self._kinds(names, routing)
        return differences_over_ranks(self.pgs, "comparing the values of replicas", _comparisons(kinds))

    def require_equal(self, names: Mapping[torch.nn.Parameter, str], routing: Routing | None) -> None:
        """Raise on all ranks unless all replicas have the same values; a collective.

        Args:
            names: live parameter to name.
            routing: where each stands.

        Raises:
            RankMismatchError: it names parameters and ranks.
        """
        lines = self.differences(names, routing)
        if lines:
            raise RankMismatchError(
                described(
                    "replicas have other values before the first step, and would keep them", lines, _REMEDY
                ),
                differences=lines,
            )

    def _kinds(self, names: Mapping[torch.nn.Parameter, str], routing: Routing | None) -> _Kinds:
        kinds: dict[tuple[ProcessGroup, ...], dict[str, torch.Tensor]] = {}
        params = {name: param for param, name in names.items()}
        for name, entry in ({} if routing is None else routing.params).items():
            groups = self._groups_of(entry)
            if groups and name in params:
                kinds.setdefault(groups, {})[name] = params[name]
        return kinds

    def _groups_of(self, entry: ParamRoute) -> tuple[ProcessGroup, ...]:
        """Return the groups whose ranks hold the same values of a parameter as this one."""
        spec, pgs = entry.spec, self.pgs
        data = pgs.expt_dp if spec.is_expert else pgs.dense_dp
        if spec.divided_over_data:
            replicate = f"{spec.data_axis}_replicate"
            cut = any(placement.axis == replicate for placement in spec.dividing)
            data = None if cut else pgs.of_axis(replicate)
        tensor = None if entry.tensor_parallel else pgs.tensor_parallel(is_expert=spec.is_expert)
        return tuple(group for group in (data, tensor) if group is not None and communicates(group))


def _comparisons(kinds: _Kinds) -> list[Comparison]:
    """Return one comparison for each group: of all that its ranks hold replicas of."""
    digests = {
        groups: fingerprint((list(copies), digest_of_tensors(_plain(copies).values())))
        for groups, copies in kinds.items()
    }
    by_ranks: dict[tuple[int, ...], tuple[ProcessGroup, list[tuple[ProcessGroup, ...]]]] = {}
    for groups in kinds:
        for group in groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            by_ranks.setdefault(ranks, (group, []))[1].append(groups)
    return [
        _comparison(
            group, fingerprint([digests[groups] for groups in some]), [kinds[groups] for groups in some]
        )
        for group, some in by_ranks.values()
    ]


def _comparison(group: ProcessGroup, digest: bytes, held: Sequence[Mapping[str, torch.Tensor]]) -> Comparison:
    def rows() -> Rows:
        return [row for params in held for row in _rows(params)]

    # Tensor-parallel ranks may have parameters that others have not: those of the same name count.
    return Comparison("the values of replicas", digest, rows, group, everywhere=False)


def _plain(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what this rank holds of parameters: those whose bits can be read."""
    local = {name: local_tensor(param).detach() for name, param in params.items()}
    return {name: tensor for name, tensor in local.items() if type(tensor) is torch.Tensor}


def _rows(params: Mapping[str, torch.Tensor]) -> Rows:
    return [(f"parameter {name!r}", {"": _words(tensor)}) for name, tensor in _plain(params).items()]


def _words(tensor: torch.Tensor) -> str:
    norm = torch.linalg.vector_norm(tensor.to(torch.float64 if not tensor.is_complex() else torch.complex128))
    return f"norm {norm.item():.6g} (digest {digest_of_tensors([tensor]).hex()[:8]})"
