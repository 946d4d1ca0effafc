"""What a manifest says of model and optimizer: which stored tensors are whose, and what stands beside them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from megaopt_checkpoint.coverage import tiles
from megaopt_checkpoint.schema import Schema
from megaopt_checkpoint.stored import StoredTensor
from megaopt_core.errors import CheckpointCorruptError

__all__ = ["References", "check_model", "check_optimizer"]

_DESCRIBED = {"optimizer", "strategy", "group", "shape", "state"}
_RECORDS = {"tensor", "value", "ranges", "objects"}
_NONE: frozenset[str] = frozenset()


@frozen
class References:
    """Which values may name which tensors: those that were saved with them, and no tensor twice."""

    schema: Schema
    tensors: Mapping[str, StoredTensor]
    used: set[str]

    def check(self, value: Any, where: str, prefix: str | None = None) -> Any:
        """Check an encoded value whose tensors are called `prefix` or `prefix.SOMETHING`, and return it."""
        self.schema.encoded(value, where, self.named(prefix or where))
        return value

    def named(self, prefix: str) -> Callable[[str], torch.Tensor]:
        """Return what finds tensors of a prefix."""

        def find(key: str) -> torch.Tensor:
            mine = key == prefix or key.startswith((f"{prefix}.", f"{prefix}@"))
            if not mine or key not in self.tensors or key in self.used:
                what = "is used twice" if key in self.used else "is not there"
                what = what if mine else "does not belong to it"
                raise CheckpointCorruptError(f"it refers to the tensor {key!r}, which {what}")
            self.used.add(key)
            return torch.empty(0)

        return find

    def shape(self, key: Any, expected: str, where: str) -> tuple[int, ...]:
        """Return the shape of a tensor that must be called `expected`."""
        if key != expected or key not in self.tensors:
            raise self.schema.fault(where, key, f"the stored tensor {expected!r}")
        self.used.add(key)
        return self.tensors[key].shape


def check_model(schema: Schema, model: Any, references: References) -> dict[str, Any]:
    """Check what a manifest says of the model, and return it.

    Args:
        schema: of the manifest.
        model: the value.
        references: which tensors it may name.
    """
    kinds = frozenset({"tensors", "aliases", "objects"})
    found = schema.fields(model, "model", set(), kinds)
    tensors = schema.mapping(found.get("tensors", {}), "model.tensors")
    for name, key in tensors.items():
        references.shape(key, f"model.{name}", f"model.tensors.{name}")
    for name, stored in schema.texts(found.get("aliases", {}), "model.aliases").items():
        if stored not in tensors:
            raise schema.fault(f"model.aliases.{name}", stored, "a tensor of the model")
    for name, value in schema.mapping(found.get("objects", {}), "model.objects").items():
        references.check(value, f"model.objects.{name}", f"model.{name}")
    return found


def check_optimizer(schema: Schema, optimizer: Any, references: References) -> dict[str, Any] | None:
    """Check what a manifest says of the optimizer, and return it; None where none was saved.

    Args:
        schema: of the manifest.
        optimizer: the value.
        references: which tensors it may name.
    """
    if optimizer is None:
        return None
    schema.fields(optimizer, "optimizer", {"parameters", "groups", "scaler"}, _NONE)
    groups = schema.sequence(optimizer["groups"], "optimizer.groups")
    for index, group in enumerate(groups):
        where = f"optim.groups.{index}"
        schema.fields(group, where, {"settings", "configured"}, _NONE)
        schema.settings(group["configured"], f"{where}.configured", references.named(f"{where}.configured"))
        settings = schema.settings(group["settings"], where, references.named(where))
        if "params" in settings:
            raise schema.fault(where, [*settings], "settings: it names 'params'")
    parameters = schema.mapping(optimizer["parameters"], "optimizer.parameters")
    for name, described in parameters.items():
        where = f"optimizer.parameters.{name}"
        schema.fields(described, where, _DESCRIBED, frozenset({"fresh", "role", "view"}))
        schema.text(described["optimizer"], f"{where}.optimizer")
        schema.text(described["strategy"], f"{where}.strategy")
        if schema.count(described["group"], f"{where}.group") >= len(groups):
            raise schema.fault(f"{where}.group", described["group"], f"one of {len(groups)} groups")
        if described.get("fresh", True) is not True:
            raise schema.fault(f"{where}.fresh", described["fresh"], "true")
        schema.role(described, where)
        shape = schema.sizes(described["shape"], f"{where}.shape")
        stored = references.tensors.get(f"model.{name}")
        if stored is not None and stored.shape != shape:
            # Of ranks that did not save, only the names of their parameters are known.
            raise schema.fault(f"{where}.shape", [*shape], f"the shape {stored.shape} that the model has")
        for key, record in schema.mapping(described["state"], f"{where}.state").items():
            _record(schema, f"optim.state.{name}.{key}", record, shape, references)
    references.check(optimizer["scaler"], "optim.scaler")
    return dict(optimizer)


def _record(schema: Schema, where: str, record: Any, shape: tuple[int, ...], references: References) -> None:
    """Check a state: a tensor of the parameter's shape, one number, numbers of ranges, or objects of boxes."""
    found = schema.mapping(record, where)
    coded = {"codes"} if "tensor" in found else set()
    if len(found.keys() - coded) != 1 or not found.keys() - coded <= _RECORDS:
        raise schema.fault(where, record, f"an object of one of the fields {sorted(_RECORDS)}")
    if "tensor" in found:
        stored = references.shape(found["tensor"], where, where)
        if stored != shape:
            raise schema.fault(where, [*stored], f"the parameter's shape {shape}")
        if "codes" in found:
            _codes(schema, where, found["codes"], shape, references)
    elif "value" in found:
        references.check(found["value"], where)
    elif "ranges" in found:
        for entry in schema.sequence(found["ranges"], where):
            offsets, sizes, start, stop, value = schema.sequence(entry, where, 5)
            box = schema.box(offsets, sizes, where, shape)
            if not schema.count(start, where) <= schema.count(stop, where) <= math.prod(box[1]):
                raise schema.fault(where, [start, stop], f"a range of elements of a box of {box[1]}")
            references.check(value, where)
    else:
        for entry in schema.sequence(found["objects"], where):
            offsets, sizes, value = schema.sequence(entry, where, 3)
            schema.box(offsets, sizes, where, shape)
            references.check(value, where)


def _codes(schema: Schema, where: str, codes: Any, shape: tuple[int, ...], references: References) -> None:
    """Check what decodes a state: every element of the parameter lies in exactly one range."""
    ranges: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for entry in schema.sequence(codes, where):
        offsets, sizes, start, stop, code, values = schema.sequence(entry, where, 6)
        box, first, last = schema.box(offsets, sizes, where, shape), schema.count(start, where), stop
        if not first <= schema.count(last, where) <= math.prod(box[1]):
            raise schema.fault(where, [start, stop], f"a range of elements of a box of {box[1]}")
        schema.text(code, where)
        references.check(values, where)
        ranges[box].append((first, last))
    for box, some in ranges.items():
        end = 0
        for first, last in sorted(some):
            if first != end:
                raise schema.fault(where, [first, last], f"where the next range begins, which is {end}")
            end = last
        if end != math.prod(box[1]):
            raise schema.fault(where, end, f"the {math.prod(box[1])} elements of a box of {box[1]}")
    if not tiles(shape, list(ranges)):
        raise schema.fault(
            where, [[*box[0], *box[1]] for box in ranges], f"every element of the shape {shape} once"
        )
