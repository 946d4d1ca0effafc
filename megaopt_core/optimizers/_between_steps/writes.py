"""Who writes to the model's values: somebody between two steps, which is found and taken over, and the step itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from megaopt_core.params._parts import is_dtensor
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.reporting._changes import Samples, Values, any_differ, differing_owners
from megaopt_core.sharding._live_model import Piece
from megaopt_core.sharding._protocol import ShardedParams

__all__ = ["WHOLE", "ForeignWrites", "StepWrites"]

WHOLE = 4096
"""Values up to which all of a tensor are compared: what that costs is lost beside the kernels of its step."""


type _Tensors = list[list[torch.Tensor]]


@define(eq=False)
class _Watch:
    """Tensors that nobody but users writes to between two steps, for each of several owners.

    Args:
        counted: those whose version counters tell of writes.
        watched: those whose values are compared.
        flag: on the device: whether a value differed in the last :meth:`look`; None: nobody has looked.
        is_counted: whether a version counter told of a write then.
    """

    counted: _Tensors = field(factory=list)
    watched: _Tensors = field(factory=list)
    flag: torch.Tensor | None = field(default=None, init=False)
    is_counted: bool = field(default=False, init=False)
    _versions: list[list[int]] = field(factory=list, init=False)
    _samples: Samples = field(factory=lambda: Samples(WHOLE), init=False)
    _before: Values = field(factory=dict, init=False)
    _now: Values = field(factory=dict, init=False)

    def record(self) -> None:
        """Remember the present values."""
        self._versions, self.is_counted = self._present_versions(), False
        self._before = self._samples.read(self.watched)
        self._now, self.flag = {}, None

    def look(self) -> None:
        """Compare with them, on the device but for version counters."""
        self.is_counted = self._present_versions() != self._versions
        self._now = self._samples.read_again(self.watched)
        self.flag = any_differ(self._before, self._now)

    def written(self, differs: bool) -> set[int]:
        """Return the owners to whose tensors somebody wrote, or gave other memory.

        Args:
            differs: what the flag says.
        """
        pairs = enumerate(zip(self._present_versions(), self._versions, strict=True))
        found = {at for at, (now, before) in pairs if now != before}
        if differs:
            found |= differing_owners(self._samples, self._before, self._now)
        return found | self.moved()

    def moved(self) -> set[int]:
        """Return the owners whose tensors have other memory now."""
        return self._samples.moved(self.watched)

    def _present_versions(self) -> list[list[int]]:
        return [list(map(_version, tensors)) for tensors in self.counted]


@define(eq=False)
class ForeignWrites:
    """Notices a load, an average, a reset: whatever wrote to model values of which a piece keeps more elsewhere.

    That is a main value or remainder, or memory of a strategy's own. Version counters tell who wrote by torch's
    operations. Some kernels, and writes by way of `.data` or NumPy, do not count: for these all values of tensors of up
    to :data:`WHOLE` values, and a few of larger ones, are compared with what the last step left, on the device, where
    the host reads the answer when it waits anyway. A write that nothing counts, to other values of a large tensor, is
    not noticed: :meth:`MegatronOptimizer.reload_model_params` takes it over.

    Where only all ranks together can bring values to pieces, each looks at what it holds of them, all hear of it with
    the norms, and take the values over together.

    Args:
        precision: keeps main values.
        sharded: this rank's pieces.
    """

    precision: PrecisionPolicy
    sharded: ShardedParams
    is_told: bool | None = field(default=None, init=False)
    """What the host has read of the flag; None: nothing yet."""
    is_brought: bool = field(default=False, init=False)
    """What all ranks have agreed on: somebody wrote to what only all of them can bring to pieces."""
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
                self._watch.watched.append(local if own else [piece.param])
        self.record()

    @property
    def is_together(self) -> bool:
        """Whether only all ranks together can bring values to the pieces."""
        return bool(getattr(self.sharded, "takes_values_together", False))

    @property
    def flag(self) -> torch.Tensor | None:
        """On the device: whether a value differs; None while nobody has looked."""
        return self._watch.flag

    @property
    def is_counted(self) -> bool:
        """Whether a version counter told of a write in the last look."""
        return self._watch.is_counted

    @torch.no_grad()
    def record(self) -> None:
        """Remember the model's present values as those that belong to the pieces."""
        self.record_own()
        self._watch_together().record()

    @torch.no_grad()
    def record_own(self) -> None:
        """Do so but for what only all ranks together can bring: the next step still finds what was written to that."""
        self._watch.record()

    def _watch_together(self) -> _Watch:
        """Return the watch over what only all ranks together can bring to pieces, as it lies now."""
        brought = self.sharded.brought_together if self.is_together else ()
        self._shared.counted = [[tensor] for tensor in brought]
        self._shared.watched = [[tensor] for tensor in brought if tensor.numel()]
        return self._shared

    @torch.no_grad()
    def look(self) -> None:
        """Compare values with those of :meth:`record` on the device, without waiting for it: see :attr:`flag`."""
        self.is_told = None
        self._watch.look()
        self._watch_together().look()

    @torch.no_grad()
    def take_over(self) -> None:
        """Bring what somebody wrote since :meth:`record` to the pieces that keep more of it; nothing else changes."""
        differs = self.flag is not None and (self.is_told if self.is_told is not None else bool(self.flag))
        written = self._watch.written(differs)
        if written & self._own:
            self.sharded.take_model_values()
        if written:
            self.precision.take_over([self._indices[at] for at in sorted(written)])
            self.record()

    def wrote_together(self, like: torch.Tensor) -> torch.Tensor:
        """Return, as one value, whether somebody wrote on this rank to what only all ranks can bring to pieces.

        Args:
            like: of which dtype and device.
        """
        if self._shared.is_counted or self._shared.moved():
            return like.new_ones(1)
        flag = self._shared.flag
        return like.new_zeros(1) if flag is None else flag.to(like).view(1)

    @torch.no_grad()
    def take_over_together(self) -> None:
        """Bring the model's values to the pieces if all ranks have agreed on it: a collective then."""
        if self.is_brought:
            self.is_brought = False
            self.sharded.take_model_values()
            self.precision.take_over(self._together)
            self._watch_together().record()

    def settle(self) -> None:
        """Look, and take over at once."""
        self.look()
        self.take_over()


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
        self._changed = [
            *(each for piece in stepped for each in piece.model_params),
            *(each for each in self._elsewhere if each.grad is not None or hasattr(each, "main_grad")),
        ]
        return bool(self._changed)

    def count(self) -> None:
        """Count the writes of the step."""
        torch.autograd.graph.increment_version(self._changed)
        self._changed = []
