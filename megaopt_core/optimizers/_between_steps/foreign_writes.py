"""Model values that somebody else wrote between two steps: found, and taken over before the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field

from megaopt_core.params._parts import is_dtensor
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.reporting._changes import Samples, Values, any_differ, differing_owners
from megaopt_core.sharding._live_model import Piece
from megaopt_core.sharding._protocol import ShardedParams

__all__ = ["WHOLE", "ForeignWrites"]

WHOLE = 4096
"""Values up to which all of a tensor are compared: what that costs is lost beside the kernels of its step."""


@define(eq=False)
class _Watch:
    """Tensors that nobody but users writes to between two steps.

    Args:
        flag: whether somebody wrote to one since :meth:`record`; as of the last :meth:`look`.
    """

    flag: torch.Tensor = field(factory=lambda: torch.zeros(()))
    _versions: list[int] = field(factory=list, init=False)
    _samples: Samples = field(factory=lambda: Samples(WHOLE), init=False)
    _before: Values = field(factory=dict, init=False)

    def record(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember the present values."""
        self._versions = list(map(_version, tensors))
        self._before = self._samples.read([[tensor] for tensor in tensors if tensor.numel()])

    def look(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compare with them, on the device but for version counters and addresses."""
        some = [[tensor] for tensor in tensors if tensor.numel()]
        if list(map(_version, tensors)) != self._versions or self._samples.moved(some):
            self.flag = torch.ones(())
            return
        differs = any_differ(self._before, self._samples.read_again(some))
        self.flag = torch.zeros(()) if differs is None else differs


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
    flag: torch.Tensor | None = field(default=None, init=False)
    """On the device: whether a value differs; None while nobody has looked."""
    is_told: bool | None = field(default=None, init=False)
    """What the host has read of the flag; None: nothing yet."""
    is_counted: bool = field(default=False, init=False)
    """Whether a version counter told of a write in the last look."""
    is_brought: bool = field(default=False, init=False)
    """What all ranks have agreed on: somebody wrote to what only all of them can bring to pieces."""
    _indices: list[int] = field(init=False)
    _own: set[int] = field(factory=set, init=False)
    _counted: list[list[torch.Tensor]] = field(init=False)
    _watched: list[list[torch.Tensor]] = field(init=False)
    _versions: list[list[int]] = field(factory=list, init=False)
    _samples: Samples = field(factory=lambda: Samples(WHOLE), init=False)
    _before: Values = field(factory=dict, init=False)
    _now: Values = field(factory=dict, init=False)
    _together: list[int] = field(factory=list, init=False)
    _shared: _Watch = field(factory=_Watch, init=False)

    def __attrs_post_init__(self) -> None:
        self._indices, self._counted, self._watched, self._together = [], [], [], []
        for index, piece in enumerate(self.sharded.pieces):
            local = [_local(param) for param in piece.model_params]
            own = _has_own_memory(piece, local)
            if own and self.is_together:
                self._together.append(index)  # one rank alone cannot bring them
                continue
            if piece.param.numel() and (own or self.precision.extra_keys(index)):
                self._own.update([len(self._indices)] if own else [])
                self._indices.append(index)
                self._counted.append(local)
                self._watched.append(local if own else [piece.param])
        self.record()

    @property
    def is_together(self) -> bool:
        """Whether only all ranks together can bring values to the pieces."""
        return bool(getattr(self.sharded, "takes_values_together", False))

    @torch.no_grad()
    def record(self) -> None:
        """Remember the model's present values as those that belong to the pieces."""
        if self.is_together:
            self._shared.record(self.sharded.brought_together)
        if self._indices:
            self._versions, self.is_counted = self._present_versions(), False
            self._before = self._samples.read(self._watched)
            self._now, self.flag = {}, None

    @torch.no_grad()
    def look(self) -> None:
        """Compare values with those of :meth:`record` on the device, without waiting for it: see :attr:`flag`."""
        self.is_told = None
        if self.is_together:
            self._shared.look(self.sharded.brought_together)
        if self._indices:
            self.is_counted = self._present_versions() != self._versions
            self._now = self._samples.read_again(self._watched)
            self.flag = any_differ(self._before, self._now)

    @torch.no_grad()
    def take_over(self) -> None:
        """Bring what somebody wrote since :meth:`record` to the pieces that keep more of it; nothing else changes."""
        if not self._indices:
            return
        present = self._present_versions()
        pairs = zip(present, self._versions, strict=True)
        written = {at for at, (now, before) in enumerate(pairs) if now != before}
        if self.flag is not None and (self.is_told if self.is_told is not None else bool(self.flag)):
            written |= differing_owners(self._samples, self._before, self._now)
        written |= self._samples.moved(self._watched)
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
        return self._shared.flag.to(like).view(1)

    @torch.no_grad()
    def take_over_together(self) -> None:
        """Bring the model's values to the pieces if all ranks have agreed on it: a collective then."""
        if self.is_brought:
            self.is_brought = False
            self.sharded.take_model_values()
            self.precision.take_over(self._together)
            self._shared.record(self.sharded.brought_together)

    def _present_versions(self) -> list[list[int]]:
        return [list(map(_version, tensors)) for tensors in self._counted]

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
