"""The state of a parameter of which this rank steps several pieces, as one."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megaopt_core.optimizers._live_state import ParamState

__all__ = ["JoinedState"]


class JoinedState(MutableMapping[str, Any]):
    """Several pieces of one parameter: state with one element for each of theirs is joined, anything else is the same.

    Joined state is a copy, flat in the order of the pieces (in their box's shape where they are consecutive ranges that
    make up one box): assign it to change it.

    Args:
        parts: the state of each piece.
    """

    member = ()
    """It is never all of one piece."""

    def __init__(self, parts: Sequence[ParamState]) -> None:
        self._parts = list(parts)

    @property
    def numel(self) -> int:
        """Elements of all pieces together."""
        return sum(part.numel for part in self._parts)

    @property
    def _box(self) -> tuple[int, ...] | None:
        """The shape of the box that the pieces make up, one after the other; None when they do not."""
        shards = [part.member[1] for part in self._parts if part.member is not None]
        box, position = shards[0].box, 0
        for shard in shards:
            if shard.box != box or shard.start != position:
                return None
            position = shard.stop
        return box[1] if position == torch.Size(box[1]).numel() else None

    def __getitem__(self, key: str) -> Any:
        if not all(part.is_elementwise(key) for part in self._parts):
            return self._parts[0][key]
        joined = torch.cat([part[key].reshape(-1) for part in self._parts])
        return joined if self._box is None else joined.view(self._box)

    def __setitem__(self, key: str, value: Any) -> None:
        is_cut = isinstance(value, torch.Tensor) and not self._parts[0].belongs_to_owner(key)
        if is_cut and value.numel() == self.numel and value.dim():
            for part, elements in zip(
                self._parts, value.reshape(-1).split([part.numel for part in self._parts]), strict=True
            ):
                part[key] = elements
            return
        for part in self._parts:
            part[key] = value

    def __delitem__(self, key: str) -> None:
        for part in self._parts:
            del part[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0])

    def __len__(self) -> int:
        return len(self._parts[0])

    def __repr__(self) -> str:
        return repr(dict(self))

    @property
    def is_fresh(self) -> bool:
        """True before the first step, while nothing was written here."""
        return all(part.is_fresh for part in self._parts)

    def start_anew(self) -> None:
        """Give up the state of all pieces; the inner optimizer makes it in its next step."""
        for part in self._parts:
            part.start_anew()

    def clear(self) -> None:
        """Give up the state of all pieces, where no other parameter's lies in the same tensors."""
        for part in self._parts:
            part.clear()

    def take_model(self, param: torch.Tensor, box: Any = None) -> None:
        """Start main values again from the model's, where there are any.

        Args:
            param: the model's parameter.
            box: the part of the logical tensor that it is; None: its shape tells.
        """
        for part in self._parts:
            part.take_model(param, box)
