"""What a load will write into the state of each piece: requests first, values last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from megaopt_core.checkpoint.mapping import PieceState, is_elementwise, sliced
from megaopt_core.checkpoint.scalars import distinct_values, ranges_of
from megaopt_core.checkpoint.sources import Request, Source
from megaopt_core.checkpoint.values import decode, dtype_named
from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.optimizers.state_codes import decode_state
from megaopt_core.params.specs import Shard

__all__ = ["MAIN_PARAM", "Member", "PieceRestore"]

MAIN_PARAM = "main_param"


@frozen
class Member:
    """A parameter of a piece, and its record in the checkpoint.

    Args:
        offset: of its elements in the flattened piece.
        shard: which elements.
        state: state key to record; empty when its state starts anew.
        main: key of the tensor that a main parameter is read from, None when there is none.
        is_fresh: it was saved before its first step.
    """

    offset: int
    shard: Shard
    state: Mapping[str, Mapping[str, Any]]
    main: str | None = None
    is_fresh: bool = False


@define
class PieceRestore:
    """Collects what one piece needs, and writes it.

    Args:
        piece: whose state.
        members: its parameters.
        source: what is loaded.
        requests: `(key, place)` of what is to be read.
        missing: `"name: key"` of state that is here but not in the checkpoint.
        finals: what is to be done, in order, once everything has been read.
    """

    piece: PieceState
    members: Sequence[Member]
    source: Source
    requests: list[Request] = field(factory=list)
    missing: list[str] = field(factory=list)
    finals: list[Callable[[], None]] = field(factory=list)

    def plan(self) -> None:
        """Find out what is to be read, and check that it fits; nothing is changed.

        Raises:
            CheckpointMismatchError: a state cannot be what it should become here.
        """
        live = self.piece.inner
        stored = [key for member in self.members for key in member.state]
        for key in dict.fromkeys([*live, *stored]):
            if key == MAIN_PARAM or self._is_scale(key, live):
                continue
            holders = [member for member in self.members if key in member.state]
            if key in live:
                self.missing += [
                    f"{member.shard.name}: {key}"
                    for member in self.members
                    if member.state and key not in member.state
                ]
            if holders:
                self._plan_key(key, live, holders)
        if MAIN_PARAM in self.piece.extra:
            self._plan_main()
        if stored:
            self.finals.append(self.piece.adopt)
        elif all(member.is_fresh for member in self.members):
            self.finals.append(self.piece.start_anew)

    def _is_scale(self, key: str, live: Mapping[str, Any]) -> bool:
        base = key.removesuffix("_scale")
        return base != key and (base in live or any(base in member.state for member in self.members))

    def _plan_key(self, key: str, live: Mapping[str, Any], holders: Sequence[Member]) -> None:
        present = live.get(key)
        if any("objects" in member.state[key] for member in holders):
            self._plan_object(key, present, holders[0])
        elif all("tensor" in member.state[key] for member in holders):
            scaled = f"{key}_scale" in live or any(f"{key}_scale" in member.state for member in holders)
            if scaled:
                self._plan_scaled(key, present, holders)
            else:
                self._plan_elements(key, present, holders)
        elif is_elementwise(key, present, self.piece.stepped):
            self._mismatch(key, holders[0], "is a number there and has its parameter's shape here")
        else:
            self._plan_number(key, present, holders)

    def _mismatch(self, key: str, member: Member, what: str) -> None:
        name = member.shard.name
        raise CheckpointMismatchError(f"state {key!r} of {name!r} in {self.source.name} {what}", names=[name])

    def _new_elements(self, dtype: torch.dtype) -> torch.Tensor:
        stepped = self.piece.stepped
        return torch.zeros(stepped.shape, dtype=dtype, device=stepped.device)

    def _stored_dtype(self, key: str, holders: Sequence[Member]) -> torch.dtype:
        return dtype_named(self.source.stored(holders[0].state[key]["tensor"]).dtype)

    def _plan_elements(self, key: str, present: Any, holders: Sequence[Member]) -> None:
        stepped = self.piece.stepped
        if isinstance(present, torch.Tensor) and not is_elementwise(key, present, stepped):
            self._mismatch(
                key, holders[0], f"has its parameter's shape, here it has shape {tuple(present.shape)}"
            )
        target = present
        if not isinstance(present, torch.Tensor):
            target = self._new_elements(self._stored_dtype(key, holders))
            self.finals.append(lambda: self._set(key, target))
        elif not present.is_contiguous():
            target = present.detach().clone(memory_format=torch.contiguous_format)
            self.finals.append(lambda: _copy(present, target))
        self._request(target, [(member, member.state[key]["tensor"]) for member in holders])

    def _set(self, key: str, value: Any) -> None:
        self.piece.inner[key] = value

    def _request(self, target: torch.Tensor, wanted: Iterable[tuple[Member, str]]) -> None:
        flat = target.detach().view(-1)
        for member, key in wanted:
            shard, offset = member.shard, member.offset
            elements = flat[offset : offset + shard.numel]
            if shard.numel:
                place = sliced(shard, target.dtype, target.device, lambda elements=elements: elements)  # type: ignore[misc]
                self.requests.append((key, place))

    def _plan_main(self) -> None:
        wanted = [(member, member.main) for member in self.members if member.main is not None]
        if not wanted:
            return
        present = self.piece.extra[MAIN_PARAM]
        if present is self.piece.stepped and present.is_contiguous():
            self._request(present, wanted)
            return
        target = present.detach().clone(memory_format=torch.contiguous_format)
        self._request(target, wanted)
        self.finals.append(
            lambda: self.piece.part.precision.set_extra_state(self.piece.index, MAIN_PARAM, target)
        )

    def _plan_number(self, key: str, present: Any, holders: Sequence[Member]) -> None:
        found = [distinct_values(member.state[key], member.shard) for member in holders]
        if any(len(values) != 1 for values in found):
            self._mismatch(key, holders[0], "differs over the elements of the parameter")
        value = decode(_latest([values[0] for values in found]), _no_tensor)
        if isinstance(present, torch.Tensor):
            if present.numel() != 1:
                self._mismatch(
                    key, holders[0], f"is a number there and has shape {tuple(present.shape)} here"
                )
            self.finals.append(lambda: _copy(present, torch.as_tensor(value).reshape(present.shape)))
            return
        if isinstance(value, torch.Tensor):
            number = isinstance(present, (bool, int, float))
            value = type(present)(value.item()) if number else value.to(self.piece.stepped.device)
        self.finals.append(lambda: self._set(key, value))

    def _plan_object(self, key: str, present: Any, member: Member) -> None:
        shard = member.shard
        found = [entry[-1] for entry in member.state[key].get("objects", []) if _same_box(entry, shard)]
        if not found or not self.piece.is_whole:
            self._mismatch(
                key,
                member,
                "belongs to the whole parameter or to another part of it, and cannot be cut as this layout asks",
            )
        device = self.piece.stepped.device

        def place(name: str) -> torch.Tensor:
            stored = self.source.stored(name)
            fits = isinstance(present, torch.Tensor) and tuple(present.shape) == stored.shape
            dtype = present.dtype if fits else dtype_named(stored.dtype)
            tensor = torch.empty(stored.shape, dtype=dtype, device=device)
            self.requests.append((name, tensor))
            return tensor

        value = decode(found[0], place)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            if present.shape != value.shape:
                self._mismatch(
                    key, member, f"has shape {tuple(value.shape)}, here it has shape {tuple(present.shape)}"
                )
            self.finals.append(lambda: _copy(present, value))
        else:
            self.finals.append(lambda: self._set(key, value))

    def _plan_scaled(self, key: str, present: Any, holders: Sequence[Member]) -> None:
        """Plan a state that is kept as `value / scale`, one scale a piece: exactly where that is possible."""
        stored_dtype = self._stored_dtype(key, holders)
        raw = self._new_elements(stored_dtype)
        self._request(raw, [(member, member.state[key]["tensor"]) for member in holders])
        scale_key = f"{key}_scale"
        scales: list[tuple[int, int, Any]] = []
        for member in holders:
            record = member.state.get(scale_key)
            for start, stop, value in (
                ranges_of(record, member.shard) if record else [(0, member.shard.numel, 1.0)]
            ):
                scales.append((member.offset + start, member.offset + stop, decode(value, _no_tensor)))
        same = len({float(scale) for _, _, scale in scales}) == 1 and len(holders) == len(self.members)
        exact = same and isinstance(present, torch.Tensor) and present.dtype == stored_dtype

        def finish() -> None:
            live = self.piece.inner
            if exact and scale_key in live:
                live[key].copy_(raw)
                live[scale_key].fill_(float(scales[0][2]))
                return
            values = torch.zeros(raw.shape, dtype=torch.float32, device=raw.device).view(-1)
            for start, stop, scale in scales:
                values[start:stop] = decode_state(
                    raw.view(-1)[start:stop], torch.as_tensor(scale, device=raw.device)
                )
            values = values.view(raw.shape)
            if key in live:
                self.piece.part.precision.write_state(self.piece.index, key, live, values)
            else:
                live[key] = values

        self.finals.append(finish)


def _copy(present: torch.Tensor, value: torch.Tensor) -> None:
    present.detach().copy_(value)


def _same_box(entry: Sequence[Any], shard: Shard) -> bool:
    return (tuple(entry[0]), tuple(entry[1])) == shard.box


def _no_tensor(key: str) -> torch.Tensor:
    raise CheckpointMismatchError(f"{key!r} stands where a number is expected")


def _latest(values: Sequence[Any]) -> Any:
    """Return the one value, or where parameters that now share a piece have different step counts, the largest."""
    if all(value == values[0] for value in values):
        return values[0]
    numbers = [value for value in values if value is not None and not isinstance(value, str)]
    return max(numbers, key=lambda value: float(decode(value, _no_tensor))) if numbers else values[0]
