"""What other ranks hold replicas of: parameters that train, those that do not, buffers, and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from attrs import frozen
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from megaopt_core import MegatronOptimizer, ProcessGroupCollection
from megaopt_core.optimizers import OptimizerPart, modules_of_experts
from megaopt_core.parallel import communicates, size_of
from megaopt_core.params import (
    Granularity,
    LogicalPart,
    ParamSpec,
    join,
    local_tensor,
    logical_part,
    named_modules,
    named_params,
)
from megaopt_core.reporting import NamedChunk, spread
from megaopt_core.routing import plain_words

__all__ = ["ReplicatedValue", "ReplicatedValues", "is_shared_out"]

_SAMPLED = 16
"""Parameters whose state is looked at where it must cost next to nothing."""

type _Groups = tuple[ProcessGroup, ...]


@frozen(eq=False)
class ReplicatedValue:
    """A value of which the ranks of some groups hold replicas.

    Args:
        label: what it is, in words.
        value: a tensor, or plain data.
        groups: the groups.
        is_sampled: a few elements stand for the tensor.
    """

    label: str
    value: Any
    groups: _Groups
    is_sampled: bool = False

    @property
    def tensor(self) -> torch.Tensor | None:
        """The bits that are compared, as far as they can be read; None where there are none."""
        if not isinstance(self.value, torch.Tensor):
            return None
        local = local_tensor(self.value).detach()
        if type(local) is not torch.Tensor or local.is_meta or local.layout is not torch.strided:
            return None
        return spread(local) if self.is_sampled and local.dim() else local

    @property
    def words(self) -> str:
        """What is compared of plain data; empty for tensors."""
        return "" if isinstance(self.value, torch.Tensor) else plain_words(self.value)


@frozen(eq=False)
class ReplicatedValues:
    """What one rank holds of a model and its optimizer.

    Args:
        optimizer: steps it.
        pgs: the process groups.
    """

    optimizer: MegatronOptimizer
    pgs: ProcessGroupCollection

    def all(self, *, everything: bool) -> Iterator[ReplicatedValue]:
        """Yield what other ranks hold replicas of.

        Args:
            everything: buffers too, and all of the state; False: a few elements of the state of a few parameters.
        """
        chunks = self.optimizer.watched_model.named_chunks()
        yield from self._trained()
        yield from self._left(chunks)
        yield from self._states(everything=everything)
        if everything:
            yield from self._buffers(chunks)

    def _trained(self) -> Iterator[ReplicatedValue]:
        """Yield the parameters that are stepped."""
        for param, name in self.optimizer.names.items():
            groups = self.groups_of_stepped(name, param)
            if groups:
                yield ReplicatedValue(f"parameter {name!r}", param, groups)

    def _left(self, chunks: Iterable[NamedChunk]) -> Iterator[ReplicatedValue]:
        """Yield the parameters that do not train."""
        for name_of, chunk in chunks:
            for entry in named_params(chunk):
                if not entry.param.requires_grad and entry.param not in self.optimizer.names:
                    name = name_of(entry.name)
                    groups = self._groups_by_attributes(name, entry.param)
                    if groups:
                        yield ReplicatedValue(f"frozen parameter {name!r}", entry.param, groups)

    def _buffers(self, chunks: Iterable[NamedChunk]) -> Iterator[ReplicatedValue]:
        """Yield the buffers of modules, but for running statistics that every rank has for itself."""
        for name_of, chunk in chunks:
            experts = modules_of_experts(chunk)
            for path, module in named_modules(chunk):
                if isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm):
                    continue
                group = self.pgs.expt_dp if id(module) in experts else self.pgs.dense_dp
                for name, buffer in module._buffers.items():
                    if buffer is not None and communicates(group):
                        yield ReplicatedValue(f"buffer {name_of(join(path, name))!r}", buffer, (group,))

    def _states(self, *, everything: bool) -> Iterator[ReplicatedValue]:
        """Yield the state of parameters that every replica steps by itself."""
        names, state = self.optimizer.names, self.optimizer.state
        params = [
            param
            for part in self.optimizer.parts
            if not is_shared_out(part, self.pgs)
            for piece in part.pieces
            for param, (_, shard) in zip(piece.model_params, piece.spec.members, strict=True)
            # A part of a parameter is one rank's share, whatever its strategy says of norms.
            if param in names and shard.numel == local_tensor(param).numel()
        ]
        for param in params if everything else params[:: max(len(params) // _SAMPLED, 1)]:
            groups, name = self.groups_of_stepped(names[param], param), names[param]
            for key, value in state[param].items() if groups else ():
                if isinstance(value, (torch.Tensor, int, float)):
                    yield ReplicatedValue(
                        f"state {key!r} of {name!r}", value, groups, is_sampled=not everything
                    )

    def groups_of_stepped(self, name: str, param: torch.Tensor, *, with_tensor: bool = True) -> _Groups:
        """Return the groups whose ranks hold the same values of a parameter as this one.

        Args:
            name: its name.
            param: the parameter.
            with_tensor: tensor-parallel ranks too; False: those that data parallelism makes replicas.
        """
        routing = self.optimizer.routing
        entry = None if routing is None else routing.params.get(name)
        if entry is None:
            return self._groups_by_attributes(name, param, with_tensor=with_tensor)
        return self._groups_of(entry.spec, tensor_parallel=entry.tensor_parallel or not with_tensor)

    def _groups_by_attributes(self, name: str, param: torch.Tensor, *, with_tensor: bool = True) -> _Groups:
        part = logical_part(param, name, self.pgs)  # type: ignore[arg-type] # reads attributes only
        is_cut = part.tensor_parallel or not with_tensor
        return self._groups_of(_spec(name, part, param.dtype), tensor_parallel=is_cut)

    def _groups_of(self, spec: ParamSpec, *, tensor_parallel: bool) -> _Groups:
        pgs = self.pgs
        data = pgs.expt_dp if spec.is_expert else pgs.dense_dp
        if spec.divided_over_data:
            replicate = f"{spec.data_axis}_replicate"
            cut = any(placement.axis == replicate for placement in spec.dividing)
            data = None if cut else pgs.of_axis(replicate)
        tensor = None if tensor_parallel else pgs.tensor_parallel(is_expert=spec.is_expert)
        return tuple(group for group in (data, tensor) if communicates(group))


def _spec(name: str, part: LogicalPart, dtype: torch.dtype) -> ParamSpec:
    """Return what is known of a parameter that no optimizer was found for."""
    return ParamSpec(
        name=name,
        shape=part.shape,
        dtype=dtype,
        grad_dtype=dtype,
        optimizer="",
        group=0,
        granularity=Granularity.TENSOR,
        cost=0.0,
        placements=part.placements,
        is_expert=part.is_expert,
    )


def is_shared_out(part: OptimizerPart, pgs: ProcessGroupCollection) -> bool:
    """Whether replicas step other parameters each, or other parts of them; False: every replica steps all by itself.

    Args:
        part: an inner optimizer with its pieces.
        pgs: the process groups.
    """
    group = pgs.tp_ep_pp
    is_of_experts = group is not None and part.sharded.stats_group is group
    return size_of(part.sharded.stats_group) > size_of(group if is_of_experts else pgs.mp)
