"""What a load will write into the state of each piece: requests first, values last."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from attrs import define, evolve, field, frozen

from megaopt_checkpoint.restore.source import Request, Source
from megaopt_checkpoint.values.codes import coded_runs
from megaopt_checkpoint.values.encoding import decode, dtype_named
from megaopt_checkpoint.values.sliced import sliced
from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.params import Shard
from megaopt_core.precision import BLOCKS, MAIN_PARAM, SCALED, StoredSlice
from megaopt_core.registry import get_registry
from megaopt_core.state import PieceState, misfit

__all__ = ["Member", "PieceRestore"]

_LOWBIT = "megaopt-lowbit"
"""Reads the codes whose layouts the core names."""


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
    """Finds out what one piece needs.

    Args:
        piece: whose state.
        members: its parameters.
        source: what is loaded.
        requests: receives `(key, place)` of what is to be read.
        finals: receives what is to be done, in order, once everything has been read.
        missing: receives `"name: key"` of state that is here but not in the checkpoint.
    """

    piece: PieceState
    members: Sequence[Member]
    source: Source
    requests: list[Request]
    finals: list[Callable[[], None]]
    missing: list[str]
    _places: dict[str, torch.Tensor] = field(factory=dict, init=False)

    def plan(self) -> None:
        """Find out what is to be read, and check that it fits; nothing is changed.

        Raises:
            CheckpointMismatchError: a state cannot be what it should become here.
        """
        live = self.piece.inner
        stored = [key for member in self.members for key in member.state if self.piece.holds(key)]
        for key in dict.fromkeys([*live, *stored]):
            if key == MAIN_PARAM or (key in live and self.piece.part.precision.is_code(key)):
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
        self._plan_main()
        if stored:
            self.finals.append(self.piece.adopt)
        elif all(member.is_fresh for member in self.members):
            self.finals.append(self.piece.start_anew)

    def _plan_key(self, key: str, live: Mapping[str, Any], holders: Sequence[Member]) -> None:
        present = live.get(key)
        if any("objects" in member.state[key] for member in holders):
            self._plan_object(key, present, holders[0])
        elif all("tensor" in member.state[key] for member in holders):
            if self.piece.is_coded(key) or any("codes" in member.state[key] for member in holders):
                self._plan_coded(key, present, holders)
            else:
                self._plan_elements(key, present, holders)
        elif self.piece.is_elementwise(key, present):
            self._mismatch(key, holders[0], "is a number there and has its parameter's shape here")
        else:
            self._plan_number(key, present, holders)
        for member in holders:
            for value in _values(member.state[key]):
                why = misfit(key, present, decode(value, _some_tensor))
                if why is not None:
                    self._mismatch(key, member, f"is {value!r}, which {why}")

    def _mismatch(self, key: str, member: Member, what: str) -> NoReturn:
        name = member.shard.name
        raise CheckpointMismatchError(
            f"state {key!r} of {name!r} in {self.source.name} {what}", path=self.source.name, names=[name]
        )

    def _require_elementwise(self, key: str, present: Any, member: Member) -> None:
        if isinstance(present, torch.Tensor) and not self.piece.is_elementwise(key, present):
            self._mismatch(
                key, member, f"has its parameter's shape, here it has shape {tuple(present.shape)}"
            )

    def _stored_dtype(self, key: str, member: Member) -> torch.dtype:
        return dtype_named(self.source.stored(member.state[key]["tensor"]).dtype)

    def _plan_elements(self, key: str, present: Any, holders: Sequence[Member]) -> None:
        self._require_elementwise(key, present, holders[0])
        target = present
        if not isinstance(present, torch.Tensor):
            stepped = self.piece.stepped
            target = torch.zeros(
                stepped.shape, dtype=self._stored_dtype(key, holders[0]), device=stepped.device
            )
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
        present = self.piece.extra.get(MAIN_PARAM) if wanted else None
        if present is None:
            return
        if present is self.piece.stepped and present.is_contiguous():
            self._request(present, wanted)
            return
        target = present.detach().clone(memory_format=torch.contiguous_format)
        self._request(target, wanted)
        self.finals.append(
            lambda: self.piece.part.precision.set_extra_state(self.piece.index, MAIN_PARAM, target)
        )

    def _plan_number(self, key: str, present: Any, holders: Sequence[Member]) -> None:
        found = [_distinct_values(member.state[key], member.shard) for member in holders]
        if any(len(values) != 1 for values in found):
            self._mismatch(key, holders[0], "differs over the elements of the parameter")
        value = decode(_latest([values[0] for values in found]), _no_tensor)
        if isinstance(present, torch.Tensor):
            if present.numel() != 1:
                self._mismatch(
                    key, holders[0], f"is a number there and has shape {tuple(present.shape)} here"
                )
            try:
                made = torch.as_tensor(value).reshape(present.shape)
            except (ArithmeticError, RuntimeError, TypeError, ValueError):
                self._mismatch(
                    key,
                    holders[0],
                    f"is {reprlib.repr(value)}, which cannot become what it is here, a number",
                )
            self.finals.append(lambda: _copy(present, made))
            return
        if isinstance(value, torch.Tensor):
            number = isinstance(present, (bool, int, float))
            value = type(present)(value.item()) if number else value.to(self.piece.stepped.device, copy=True)
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
        value = decode(found[0], lambda name: self._place(name, present))
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            if present.shape != value.shape:
                self._mismatch(
                    key, member, f"has shape {tuple(value.shape)}, here it has shape {tuple(present.shape)}"
                )
            self.finals.append(lambda: _copy(present, value))
        else:
            value = value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
            self.finals.append(lambda: self._set(key, value))

    def _plan_coded(self, key: str, present: Any, holders: Sequence[Member]) -> None:
        """Plan a state that is or was stored in a code: the precision policy takes the elements and their codes."""
        if not self.piece.is_coded(key):
            self._require_elementwise(key, present, holders[0])
        slices: list[StoredSlice] = []  # of tensors that are filled later
        for member in holders:
            numel, record = member.shard.numel, member.state[key]
            raw = torch.empty(numel, dtype=self._stored_dtype(key, member), device=self.piece.stepped.device)
            self._request(raw, [(evolve(member, offset=0), record["tensor"])])
            if "codes" in record:
                slices += self._coded_slices(key, member, record["codes"], raw)
            elif numel:
                slices.append(StoredSlice(member.offset, raw))
        precision, index = self.piece.part.precision, self.piece.index
        self.finals.append(lambda: precision.restore_state(index, key, self.piece.inner, slices))

    def _coded_slices(
        self, key: str, member: Member, codes: Sequence[Sequence[Any]], raw: torch.Tensor
    ) -> Iterator[StoredSlice]:
        runs = coded_runs(codes, member.shard)
        if sum(run.stop - run.start for run in runs) != member.shard.numel:
            self._mismatch(key, member, "lacks what decodes some of its elements")
        for run in runs:
            decode_elements = self.piece.part.precision.decoder(run.code)
            if decode_elements is None:
                self._mismatch(
                    key,
                    member,
                    f"is stored in the code {run.code!r}, which nothing here reads: {_who_reads(run.code)}",
                )
            elements, values = raw[run.start : run.stop], decode(run.values, self._place)
            yield StoredSlice(
                member.offset + run.start, elements, run.code, values, run.first, run.count, decode_elements
            )

    def _place(self, name: str, present: Any = None) -> torch.Tensor:
        """Return a new tensor into which a stored one will be read, once for all that ask for it.

        It has the dtype of what is here, where that has its shape, else the stored one's.
        """
        if name not in self._places:
            stored = self.source.stored(name)
            fits = isinstance(present, torch.Tensor) and tuple(present.shape) == stored.shape
            dtype = present.dtype if fits else dtype_named(stored.dtype)
            place = torch.empty(stored.shape, dtype=dtype, device=self.piece.stepped.device)
            self._places[name] = place
            self.requests.append((name, place))
        return self._places[name]


def _copy(present: torch.Tensor, value: torch.Tensor) -> None:
    present.detach().copy_(value)


def _same_box(entry: Sequence[Any], shard: Shard) -> bool:
    return (tuple(entry[0]), tuple(entry[1])) == shard.box


def _some_tensor(key: str) -> torch.Tensor:
    return torch.empty(2, device="meta")


def _no_tensor(key: str) -> torch.Tensor:
    raise CheckpointMismatchError(f"{key!r} stands where a number is expected")


def _values(record: Mapping[str, Any]) -> list[Any]:
    """Return all values of a state that are no tensors, encoded."""
    if "value" in record:
        return [record["value"]]
    return [entry[-1] for kind in ("ranges", "objects") for entry in record.get(kind, ())]


def _distinct_values(record: Mapping[str, Any], shard: Shard) -> list[Any]:
    """Return the values of a number that a shard's elements have; one, where it belongs to the whole parameter."""
    if "value" in record:
        return [record["value"]]
    values: list[Any] = []
    for offsets, sizes, start, stop, value in record["ranges"]:
        if not _same_box((offsets, sizes), shard):
            raise CheckpointMismatchError(
                f"a number in the state of {shard.name!r} differs over its parallel parts, which are cut otherwise "
                "here",
                names=[shard.name],
            )
        if max(start, shard.start) < min(stop, shard.stop) and value not in values:
            values.append(value)
    return values


def _latest(values: Sequence[Any]) -> Any:
    """Return the one value, or where parameters that now share a piece have different step counts, the largest."""
    if all(value == values[0] for value in values):
        return values[0]
    numbers = [value for value in values if value is not None and not isinstance(value, str)]
    return max(numbers, key=lambda value: float(decode(value, _no_tensor))) if numbers else values[0]


def _who_reads(code: str) -> str:
    """Return which plugin is missing for a code, or by which hook one would offer it."""
    known = code in (BLOCKS, SCALED)
    absent = get_registry().absent_plugin(f"the code {code!r}", code, _LOWBIT) if known else None
    return str(absent) if absent else "a plugin offers it by the hook megaopt_state_codes"
