"""The state of pieces as slices of named logical tensors: what is saved, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from megaopt_core.errors import CheckpointError
from megaopt_core.execution._placeholders import StatePlaceholder, is_placeholder
from megaopt_core.params._specs import ParamInfo, Shard, whole
from megaopt_core.precision._state_codes import CodedState
from megaopt_core.state._values.chunks import chunks_of
from megaopt_core.state._values.encoding import encode
from megaopt_core.state._values.sliced import SlicedTensor

if TYPE_CHECKING:
    from megaopt_core.execution._exchanged_step import ExchangedStep
    from megaopt_core.state._protocol import NamedPieces, NamedState

__all__ = [
    "Collected",
    "OwnedState",
    "PieceState",
    "collect_state",
    "is_elementwise",
    "is_number",
    "joined",
    "piece_states",
    "sliced",
    "state_key",
]

PREFIX = "optim.state"


def state_key(name: str, key: str) -> str:
    """Return the key of a state tensor in a checkpoint.

    Args:
        name: of the parameter.
        key: of its state.
    """
    return f"{PREFIX}.{name}.{key}"


@frozen(eq=False)
class PieceState:
    """One piece's state, wherever it is kept.

    Args:
        part: the part that steps the piece.
        index: position of the piece.
    """

    part: NamedPieces
    index: int

    @property
    def stepped(self) -> torch.Tensor:
        """The tensor that the inner optimizer steps; of no memory between steps under some precision policies."""
        return self.part.stepped[self.index]

    @property
    def members(self) -> tuple[tuple[int, Shard], ...]:
        """`(offset, shard)` of every parameter that the piece holds elements of."""
        return self.part.pieces[self.index].spec.members

    @property
    def inner(self) -> dict[str, Any]:
        """What the inner optimizer keeps; live."""
        state: dict[str, Any] = self.part.inner.state[self.stepped]
        return state

    def adopt(self) -> None:
        """Make what was written into a placeholder the inner optimizer's state."""
        self.part.inner.state[self.stepped] = dict(self.inner)

    def start_anew(self) -> None:
        """Give up the state; the inner optimizer makes it in its next step."""
        if self.inner:
            self.part.inner.state[self.stepped] = StatePlaceholder(self.inner)

    @property
    def extra(self) -> Mapping[str, torch.Tensor]:
        """What the precision policy keeps: `main_param`, or nothing."""
        return self.part.precision.extra_state(self.index)

    def is_elementwise(self, key: str, value: Any) -> bool:
        """Return whether a state has one element for every element of the piece.

        Args:
            key: the state's key.
            value: the state.
        """
        return is_elementwise(key, value, self.stepped.shape, self.part.scalar_states)

    def coded(self, key: str) -> CodedState | None:
        """Return how a state is saved that the precision policy stores in a code; None: as it is.

        Args:
            key: the state's key; without a value it has no code.
        """
        precision, state = self.part.precision, self.inner
        has_code = key in state and self.is_coded(key)
        return precision.coded_state(self.index, key, state) if has_code else None

    def is_coded(self, key: str) -> bool:
        """Return whether the precision policy stores a state in a code.

        Args:
            key: the state's key.
        """
        return self.part.precision.is_coded(self.index, key)

    @property
    def is_whole(self) -> bool:
        """True when the piece is all that this rank's model has of one parameter."""
        ((_, shard), *rest) = self.members
        return not rest and shard.numel == self.stepped.numel() and shard.start == 0

    def holds(self, key: str) -> bool:
        """Return whether a state key has its place here; with a split step some are kept by the parameter's owner.

        Args:
            key: the state's key.
        """
        return self.part.split is None or key not in self.part.split.transform_keys


@frozen(eq=False)
class OwnedState(PieceState):
    """What a split step keeps of a whole tensor that this rank transforms.

    Args:
        part: the part that transforms it.
        index: its position among the tensors that are transformed here.
        split: drives the step.
    """

    split: ExchangedStep

    @property
    def info(self) -> ParamInfo:
        """What it is."""
        return self.split.exchange.owned[self.index]

    @property
    def stepped(self) -> torch.Tensor:
        """A tensor of its shape, of no memory."""
        return self.split.stand_in(self.info)

    @property
    def members(self) -> tuple[tuple[int, Shard], ...]:
        """All of the parameter."""
        shape = self.info.shape
        return ((0, Shard(self.info.name, shape, whole(shape), 0, math.prod(shape))),)

    @property
    def inner(self) -> dict[str, Any]:
        """What `transform` keeps; live."""
        return self.split.transform_state.get(self.info.name, {})

    def adopt(self) -> None:
        """Make what was written into a placeholder the state."""
        self.split.transform_state[self.info.name] = dict(self.inner)

    def start_anew(self) -> None:
        """Give up the state; the next `transform` makes it."""
        if self.inner:
            self.split.transform_state[self.info.name] = StatePlaceholder(self.inner)

    @property
    def extra(self) -> Mapping[str, torch.Tensor]:
        """Nothing: main parameters are cut like their pieces."""
        return {}

    def is_coded(self, key: str) -> bool:
        """Return False: precision policies store the state of pieces only.

        Args:
            key: the state's key.
        """
        return False

    def holds(self, key: str) -> bool:
        """Return whether a state key belongs to `transform`.

        Args:
            key: the state's key.
        """
        return key in self.split.transform_keys


def piece_states(optimizer: NamedState) -> Iterator[PieceState]:
    """Yield the state of every piece of this rank, and of every tensor that a split step transforms here.

    Args:
        optimizer: a built optimizer.
    """
    for part in optimizer.parts:
        for index in range(len(part.pieces)):
            yield PieceState(part, index)
        if part.split is not None and part.split.transform_keys:
            for index in range(len(part.split.exchange.owned)):
                yield OwnedState(part, index, part.split)


def is_elementwise(key: str, value: Any, shape: Sequence[int], scalars: Collection[str]) -> bool:
    """Return whether a state tensor has one element for every element of what is stepped.

    Args:
        key: the state's key.
        value: the state.
        shape: of the tensor that the inner optimizer steps.
        scalars: keys that have one number for a parameter, even where the parameter is a scalar too.
    """
    return isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape) and key not in scalars


def sliced(
    shard: Shard, dtype: torch.dtype, device: torch.device, flat: Callable[[], torch.Tensor]
) -> SlicedTensor:
    """Return a shard as the part of its logical tensor that it is.

    Args:
        shard: which elements.
        dtype: of the elements.
        device: where they are.
        flat: returns the elements, flat.
    """
    return SlicedTensor(shard.shape, dtype, device, chunks_of(shard), lambda _: flat())


@define
class Collected:
    """This rank's part of an optimizer's state.

    Args:
        tensors: key to tensor: slices of logical tensors, and whole tensors of other shapes.
        state: parameter name to state key to record: `{"tensor": key}` for slices, with `"codes": [...]` where they are
            stored in a code, `{"ranges": [...]}` for numbers, `{"objects": [...]}` for anything else.
        shapes: parameter name to the shape of the whole parameter.
        fresh: parameters whose state their first step will make.
    """

    tensors: dict[str, torch.Tensor] = field(factory=dict)
    state: dict[str, dict[str, Any]] = field(factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(factory=dict)
    fresh: set[str] = field(factory=set)

    def add_slice(
        self,
        key: str,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        flat: Callable[[], torch.Tensor],
    ) -> None:
        """Add elements of a named parameter's state.

        Args:
            key: the state's key.
            shard: which elements.
            dtype: of the elements.
            device: where they are.
            flat: returns them, flat.
        """
        name = state_key(shard.name, key)
        self.state[shard.name].setdefault(key, {})["tensor"] = name
        if shard.numel or 0 in shard.shape:
            self.tensors[name] = joined(self.tensors.get(name), sliced(shard, dtype, device, flat))


def joined(present: torch.Tensor | None, more: SlicedTensor) -> SlicedTensor:
    """Return one tensor for two pieces of this rank that hold elements of one parameter.

    Args:
        present: the first; None: there is none yet.
        more: the second.
    """
    if not isinstance(present, SlicedTensor):
        return more
    count = len(present.chunks)

    def fetch(index: int) -> torch.Tensor:
        return present._fetch(index) if index < count else more._fetch(index - count)

    return SlicedTensor(more.shape, more.dtype, more.device, (*present.chunks, *more.chunks), fetch)


def collect_state(optimizer: NamedState, *, with_placeholders: bool = False) -> Collected:
    """Return this rank's state; no tensor is copied, what precision policies compute is computed when it is needed.

    Args:
        optimizer: a built optimizer.
        with_placeholders: `tensors` holds those that stand in for state before the first step too: places to load into.

    Raises:
        CheckpointError: a state is neither elementwise, nor a number, nor of a whole parameter.
    """
    collected = Collected()
    for piece in piece_states(optimizer):
        for _, shard in piece.members:
            collected.state.setdefault(shard.name, {})
            collected.shapes[shard.name] = shard.shape
        into = collected
        if is_placeholder(piece.inner):
            names = [shard.name for _, shard in piece.members]
            collected.fresh.update(names)
            into = Collected(collected.tensors if with_placeholders else {}, {name: {} for name in names})
        for key, value in piece.inner.items():
            coded = piece.coded(key)
            if coded is not None:
                _collect_coded(into, piece, key, coded)
            elif not piece.part.precision.is_code(key):
                _collect(into, piece, key, value)
        for key, value in piece.extra.items():
            for offset, shard in piece.members:
                flat = _extra_elements(piece, key, offset, shard.numel)
                collected.add_slice(key, shard, value.dtype, value.device, flat)
    return collected


def _extra_elements(piece: PieceState, key: str, offset: int, count: int) -> Callable[[], torch.Tensor]:
    return lambda: piece.extra[key].detach().reshape(-1)[offset : offset + count]


def _elements(value: torch.Tensor, offset: int, count: int) -> Callable[[], torch.Tensor]:
    return lambda: value.detach().reshape(-1)[offset : offset + count]


def _collect_coded(collected: Collected, piece: PieceState, key: str, coded: CodedState) -> None:
    """Add a state in a code: its elements as slices, and with each range of them what decodes it."""
    for offset, shard in piece.members:
        start, stop = offset, offset + shard.numel
        elements = partial(coded.elements, start, stop)
        collected.add_slice(key, shard, coded.dtype, coded.device, elements)
        where = (
            f"{state_key(shard.name, key)}.code@{','.join(map(str, shard.box[0]))}:{shard.start}-{shard.stop}"
        )
        encoded = encode(coded.values(start, stop), collected.tensors, where)
        entry = [*shard.box, shard.start, shard.stop, coded.code, encoded]
        collected.state[shard.name][key].setdefault("codes", []).append(entry)


def _collect(collected: Collected, piece: PieceState, key: str, value: Any) -> None:
    if piece.is_elementwise(key, value):
        for offset, shard in piece.members:
            collected.add_slice(key, shard, value.dtype, value.device, _elements(value, offset, shard.numel))
        return
    if is_number(value):
        for _, shard in piece.members:
            encoded = encode(value, {}, f"state {key!r} of {shard.name!r}")
            record = collected.state[shard.name].setdefault(key, {"ranges": []})
            record["ranges"].append([*shard.box, shard.start, shard.stop, encoded])
        return
    _, shard = piece.members[0]
    if not piece.is_whole:
        raise CheckpointError(
            f"state {key!r} of {shard.name!r} has neither its parameter's shape nor one element, and this rank "
            "steps only a part of the parameter: no other layout could load it"
        )
    # Where tensor parallelism cuts the parameter, every rank has a state of its own.
    box = "" if shard.is_whole else "@" + ",".join(map(str, shard.box[0]))
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(value, tensors, state_key(shard.name, f"{key}{box}"))
    collected.tensors.update(tensors)
    collected.state[shard.name][key] = {"objects": [[*shard.box, encoded]]}


def is_number(value: Any) -> bool:
    """Return whether a state is one value for all of its piece.

    Args:
        value: the state.
    """
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str))
