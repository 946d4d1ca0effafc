"""Who writes to the model's values: somebody between two steps, which is found and taken over, and the step itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from megaopt_core.params._parts import is_dtensor
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.reporting._changes import Address, addresses
from megaopt_core.sharding._live_model import Piece
from megaopt_core.sharding._protocol import ShardedParams

__all__ = ["ForeignWrites", "StepWrites"]

type _Tensors = list[list[torch.Tensor]]


@define(eq=False)
class _Watch:
    """Tensors that nobody but users writes to between two steps, for each of several owners.

    Args:
        counted: those whose version counters tell of writes.
        placed: those whose memory may be exchanged.
    """

    counted: _Tensors = field(factory=list)
    placed: _Tensors = field(factory=list)
    _versions: list[list[int]] = field(factory=list, init=False)
    _places: list[list[Address]] = field(factory=list, init=False)

    def record(self) -> None:
        """Remember the present versions and places."""
        self._versions, self._places = self._present_versions(), self._present_places()

    @property
    def is_counted(self) -> bool:
        """Whether a version counter tells of a write."""
        return self._present_versions() != self._versions

    @property
    def differs(self) -> bool:
        """Whether a version counter tells of a write, or a tensor has other memory."""
        return self.is_counted or self._present_places() != self._places

    def written(self) -> set[int]:
        """Return the owners to whose tensors somebody wrote, or gave other memory."""
        versions = enumerate(zip(self._present_versions(), self._versions, strict=True))
        places = enumerate(zip(self._present_places(), self._places, strict=True))
        return {at for at, (now, before) in (*versions, *places) if now != before}

    def _present_versions(self) -> list[list[int]]:
        return [list(map(_version, tensors)) for tensors in self.counted]

    def _present_places(self) -> list[list[Address]]:
        return [addresses(tensors) for tensors in self.placed]


@define(eq=False)
class ForeignWrites:
    """Notices a load, an average, a reset: whatever wrote to model values of which a piece keeps more elsewhere.

    That is a main value or remainder, or memory of a strategy's own. Version counters tell of writes by torch's
    operations. Some kernels, and writes by way of `.data` or NumPy, do not count: an observer may compare values
    (megaopt-guards does), and :meth:`MegatronOptimizer.take_over` brings them to the pieces.

    Where only all ranks together can bring values to pieces, each looks at the values that it holds, all hear of it
    before they step, and take the values over together.

    Args:
        precision: keeps main values.
        sharded: this rank's pieces.
    """

    precision: PrecisionPolicy
    sharded: ShardedParams
    _indices: list[int] = field(factory=list, init=False)
    _own: set[int] = field(factory=set, init=False)
    _watch: _Watch = field(factory=_Watch, init=False)
    _together: list[int] = field(factory=list, init=False)
    _shared: _Watch = field(factory=_Watch, init=False)

    def __attrs_post_init__(self) -> None:
        for index, piece in enumerate(self.sharded.pieces):
            local = [_local(param) for param in piece.model_params]
            own = _has_own_memory(piece, local)
            if own and self.is_together:
                self._together.append(index)  # one rank alone cannot bring them
                continue
            if piece.param.numel() and (own or self.precision.extra_keys(index)):
                if own:
                    self._own.add(len(self._indices))
                self._indices.append(index)
                self._watch.counted.append(local)
                self._watch.placed.append(local if own else [piece.param])
        self.record()

    @property
    def is_together(self) -> bool:
        """Whether only all ranks together can bring values to the pieces."""
        return bool(getattr(self.sharded, "takes_values_together", False))

    @property
    def is_counted(self) -> bool:
        """Whether a version counter tells of a write since :meth:`record`."""
        return self._watch.is_counted

    @property
    def kept(self) -> list[tuple[Piece, list[torch.Tensor]]]:
        """The pieces that keep more of the model's values elsewhere, each with the tensors in which a write shows."""
        pieces = self.sharded.pieces
        return [(pieces[at], placed) for at, placed in zip(self._indices, self._watch.placed, strict=True)]

    @property
    def brought(self) -> list[torch.Tensor]:
        """The tensors that only all ranks together can bring to pieces, as they lie now."""
        return list(self.sharded.brought_together) if self.is_together else []

    @torch.no_grad()
    def record(self) -> None:
        """Remember the model's present values as those that belong to the pieces."""
        self.record_own()
        if self.is_together:
            self._watch_together().record()

    @torch.no_grad()
    def record_own(self) -> None:
        """Remember values of this rank alone; the next step still finds writes to values that all ranks bring."""
        self._watch.record()

    def _watch_together(self) -> _Watch:
        """Return the watch over values that only all ranks together can bring to pieces, as they lie now."""
        self._shared.counted = [[tensor] for tensor in self.brought]
        self._shared.placed = [[tensor] for tensor in self.brought if tensor.numel()]
        return self._shared

    @torch.no_grad()
    def take_over(self, names: Collection[str] = ()) -> None:
        """Bring values that somebody wrote since :meth:`record` to the pieces that keep more of them.

        Args:
            names: of parameters to which somebody wrote although no version counter tells.
        """
        written = self._watch.written()
        if names:
            members = [self.sharded.pieces[index].spec.members for index in self._indices]
            written |= {
                at for at, some in enumerate(members) if any(shard.name in names for _, shard in some)
            }
        if written & self._own:
            self.sharded.take_model_values()
        if written:
            self.precision.take_over([self._indices[at] for at in sorted(written)])
            self.record()

    def wrote_together(self) -> bool:
        """Return whether somebody wrote on this rank to values that only all ranks can bring to pieces."""
        return self.is_together and self._watch_together().differs

    @torch.no_grad()
    def take_over_together(self) -> None:
        """Bring the model's values to the pieces that need all ranks for it: a collective."""
        if self.is_together:
            self.sharded.take_model_values()
            self.precision.take_over(self._together)
            self._watch_together().record()


def _local(param: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose version counts writes to what this rank holds."""
    if not is_dtensor(param):
        return param
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined] # of DTensors; to_local() makes a new one
    return local


def _has_own_memory(piece: Piece, local: Sequence[torch.Tensor]) -> bool:
    address = piece.param.untyped_storage().data_ptr()
    return all(tensor.untyped_storage().data_ptr() != address for tensor in local)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@define(eq=False)
class StepWrites:
    """Counts one more write to each parameter that a step changes: those with a gradient, wherever they are stepped.

    Torch's fused kernels, flat memory and collectives count none. Without it, `loss.backward()` through a graph from
    before the step would take new weights for the old ones and say nothing.

    Args:
        pieces: what is stepped on this rank.
        groups: the public groups, with the parameters that other ranks step.
    """

    pieces: Sequence[Piece]
    groups: Sequence[Mapping[str, Any]]
    _elsewhere: list[torch.nn.Parameter] = field(init=False)
    _changed: list[torch.nn.Parameter] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        here = {id(each) for piece in self.pieces for each in piece.model_params}
        self._elsewhere = [each for group in self.groups for each in group["params"] if id(each) not in here]

    def expect(self, precision: PrecisionPolicy) -> bool:
        """Remember what the step will change, whose gradients have been collected; return whether it is anything.

        Args:
            precision: has them.
        """
        stepped = [piece for index, piece in enumerate(self.pieces) if precision.grad(index) is not None]
        here = [each for piece in stepped for each in piece.model_params]
        elsewhere = [each for each in self._elsewhere if each.grad is not None or hasattr(each, "main_grad")]
        self._changed = here + elsewhere
        return bool(self._changed)

    def count(self) -> None:
        """Count the writes of the step."""
        torch.autograd.graph.increment_version(self._changed)
        self._changed = []
