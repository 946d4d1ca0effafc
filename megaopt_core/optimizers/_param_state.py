"""The live state of one parameter, in however many pieces it is stepped here."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from attrs import frozen

from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.execution._placeholders import is_placeholder
from megaopt_core.optimizers._computed_state import ComputedState
from megaopt_core.params._parts import local_tensor
from megaopt_core.params._shards import Box, Shard, whole
from megaopt_core.precision._policy import MAIN_PARAM
from megaopt_core.sharding._elements import elements_of
from megaopt_core.state._pieces import PieceState

__all__ = ["ParamState", "Slice"]


@frozen(eq=False)
class Slice:
    """What one piece keeps of one parameter, and what this rank keeps as the owner of its updates.

    Args:
        piece: the piece's state.
        offset: where the parameter's elements begin in the flattened piece.
        shard: which elements they are.
        is_param: the piece is the parameter, in its shape: all that is kept belongs to it as it is.
        owned: what this rank keeps as the one that transforms the parameter's updates; None: another rank does.
    """

    piece: PieceState
    offset: int
    shard: Shard
    is_param: bool
    owned: PieceState | None = None

    def keys(self) -> Iterator[str]:
        """Yield the keys of all that is kept; nothing is computed for it."""
        precision = self.piece.part.precision
        yield from (key for key in self.piece.inner if not precision.is_code(key))
        yield from () if self.owned is None else self.owned.inner
        yield from precision.extra_keys(self.piece.index)

    def is_elementwise(self, key: str) -> bool:
        """Return whether a state has one element for each of the piece's.

        Args:
            key: the state's key.
        """
        is_kept = self.piece.holds(key) and key in self.keys()
        return is_kept and self.piece.is_elementwise(key, self._of_piece(key))

    def _cuts(self, key: str, value: Any) -> bool:
        return not self.is_param and self.piece.is_elementwise(key, value)

    def _of_piece(self, key: str) -> Any:
        precision, index = self.piece.part.precision, self.piece.index
        if key in precision.extra_keys(index):
            return precision.extra_state(index)[key]
        return precision.read_state(index, key, self.piece.inner)

    def read(self, key: str) -> Any:
        """Return a state: of what is cut, this parameter's elements.

        Args:
            key: the state's key.
        """
        if not self.piece.holds(key):
            if self.owned is None:
                raise KeyError(key)
            return self.owned.inner[key]
        value = self._of_piece(key)
        if not self._cuts(key, value):
            return value
        elements = value.detach().view(-1)[self.offset : self.offset + self.shard.numel]
        return elements.view(self.shard.box[1]) if self.shard.is_box else elements

    def write(self, key: str, value: Any) -> None:
        """Set a state, or this parameter's elements of it.

        Args:
            key: the state's key.
            value: its new value.
        """
        if not self.piece.holds(key):
            self._write_owned(key, value)
            return
        all_of_it = self._of_piece(key) if key in self.keys() else self._new(value)
        if isinstance(value, torch.Tensor) and self._cuts(key, all_of_it):
            with torch.no_grad():
                changed = all_of_it.detach().clone()
                changed.view(-1)[self.offset : self.offset + self.shard.numel].copy_(value.reshape(-1))
            value = changed
        precision, index = self.piece.part.precision, self.piece.index
        if key == MAIN_PARAM or key in precision.extra_keys(index):
            precision.set_extra_state(index, key, value)
        else:
            precision.write_state(index, key, self.piece.inner, value)

    def _write_owned(self, key: str, value: Any) -> None:
        """Set what the owner keeps; on every other rank it has no place."""
        kept = {} if self.owned is None else self.owned.inner
        present = kept.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                present.copy_(value.reshape(present.shape))
        elif kept:
            kept[key] = value

    def _new(self, value: Any) -> Any:
        """Return zeros of the piece's shape for state that the inner optimizer has not made yet."""
        fits = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == self.shard.numel
        stepped = self.piece.stepped
        return torch.zeros(stepped.shape, dtype=value.dtype, device=stepped.device) if fits else None

    def start_anew(self) -> None:
        """Give up the state of the whole piece; the inner optimizer makes it in its next step."""
        self.piece.start_anew()
        if self.owned is not None:
            self.owned.start_anew()

    def take_model(self, param: torch.Tensor, box: Box | None) -> None:
        """Start the main value again from the model's, where there is one.

        Args:
            param: the model's parameter, or a value that is more precise; this rank's part of it, or all.
            box: which part a rank's local tensor is; None: as `param` says, or the shard's.
        """
        if MAIN_PARAM not in self.piece.part.precision.extra_keys(self.piece.index):
            return
        elements = local_tensor(param).detach().float()
        if not self.is_param:
            shape = tuple(elements.shape)
            if box is None or box[1] != shape:
                box = whole(shape) if shape == self.shard.shape else self.shard.box
            elements = elements_of(elements, box, self.shard)
        self.write(MAIN_PARAM, elements)


class ParamState(MutableMapping[str, Any]):
    """The live state of one parameter: the inner optimizer's, what the precision policy keeps, and what its owner does.

    State of whole tensors that a split step keeps is shown on the rank that owns them, as it is.

    Of a piece with several members, state tensors of the piece's shape show the member's elements: a view in the
    parameter's shape where the piece holds all of it, else flat; those of several pieces are joined, and anything else
    is the same. State that the policy stores with a scale (fp16, fp8 and 8-bit moments) and main values that it splits
    are computed when they are read, as is what is joined; writing into them raises, assign them to change them.

    Args:
        slices: what each piece keeps of the parameter, one after the other.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = slices

    @property
    def numel(self) -> int:
        """Elements of the parameter that are stepped here."""
        return sum(each.shard.numel for each in self.slices)

    @property
    def _box(self) -> tuple[int, ...] | None:
        """The shape of the box that the pieces make up, one after the other; None when they do not."""
        box, position = self.slices[0].shard.box, 0
        for shard in (each.shard for each in self.slices):
            if shard.box != box or shard.start != position:
                return None
            position = shard.stop
        return box[1] if position == torch.Size(box[1]).numel() else None

    def __getitem__(self, key: str) -> Any:
        value = self.read(key)
        if type(value) is not torch.Tensor or value.data_ptr() == self.read(key).data_ptr():
            return value
        return ComputedState.of(value, key, self.slices[0].shard.name)

    def read(self, key: str) -> Any:
        """Return a state as a plain tensor: live where it is stored as it is, else computed.

        Args:
            key: the state's key.
        """
        if len(self.slices) == 1 or not all(each.is_elementwise(key) for each in self.slices):
            return self.slices[0].read(key)
        joined = torch.cat([each.read(key).reshape(-1) for each in self.slices])
        return joined if self._box is None else joined.view(self._box)

    def exported(self, key: str) -> Any:
        """Return a state as a state dict has it: without what is attached to a parameter, which must not be pickled.

        Args:
            key: the state's key.
        """
        value = self.read(key)
        return value.detach() if isinstance(value, torch.nn.Parameter) else value

    def __setitem__(self, key: str, value: Any) -> None:
        values = [value] * len(self.slices)
        is_cut = isinstance(value, torch.Tensor) and value.dim() and value.numel() == self.numel
        if len(self.slices) > 1 and is_cut and self.slices[0].piece.holds(key):
            values = value.reshape(-1).split([each.shard.numel for each in self.slices])
        for each, elements in zip(self.slices, values, strict=True):
            each.write(key, elements)

    def __delitem__(self, key: str) -> None:
        for each in self.slices:
            del each.piece.inner[key]

    def __iter__(self) -> Iterator[str]:
        return self.slices[0].keys()

    def __contains__(self, key: object) -> bool:
        return key in list(self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    @property
    def is_fresh(self) -> bool:
        """True before the first step, while nothing was written here: that step will make the state."""
        return all(is_placeholder(each.piece.inner) for each in self.slices)

    def start_anew(self) -> None:
        """Give up the state of all pieces; the inner optimizer makes it in its next step."""
        for each in self.slices:
            each.start_anew()

    def clear(self) -> None:
        """Give up the state, as for an optimizer that is built anew; the main value stays.

        Raises:
            UnsupportedOperationError: other parameters' states lie in the same tensors.
        """
        if any(len(each.piece.members) > 1 for each in self.slices):
            raise UnsupportedOperationError(
                f"the state of {self.slices[0].shard.name!r} shares one tensor with other parameters and "
                "cannot be removed alone: optimizer.state.clear() removes all of it, and state[param][key] "
                "= value sets one parameter's elements"
            )
        self.start_anew()

    def take_model(self, param: torch.Tensor, box: Box | None) -> None:
        """Start main values again from the model's, where there are any.

        Args:
            param: the model's parameter, or a value that is more precise; this rank's part of it, or all.
            box: which part a rank's local tensor is; None: as `param` says, or the shard's.
        """
        for each in self.slices:
            each.take_model(param, box)
