"""A manifest from JSON: every field checked before anything is done with it."""

from __future__ import annotations

import gc
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from megaopt_checkpoint.algorithms import ALGORITHMS, OLDEST
from megaopt_checkpoint.coverage import tiles
from megaopt_checkpoint.schema import Schema
from megaopt_core.errors import CheckpointCorruptError, CheckpointVersionError
from megaopt_core.state import FORMAT_VERSION, Manifest, StoredChunk, StoredTensor, with_named_codes

__all__ = ["parse_manifest", "read_json"]

_FIELDS = {
    *("version", "world_size", "files", "tensors", "model", "optimizer", "scheduler", "extra"),
    *("configuration", "plugins", "written"),
}
_DESCRIBED = {"optimizer", "strategy", "group", "shape", "state"}
_CHUNK = {"offsets", "sizes", "file", "position", "length"}
_NAMED_SUMS = 4  # the format that says how they are computed; those before have CRC-32 as numbers
_RECORDS = {"tensor", "value", "ranges", "objects"}
_NONE: frozenset[str] = frozenset()
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character, or of a pair


def read_json(data: bytes | str, path: Path) -> Any:
    """Return a JSON document.

    Args:
        data: its text.
        path: where it comes from.

    Raises:
        CheckpointCorruptError: it is none, is nested too deeply, or readers may differ over what it says.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        with _without_collection():
            values = json.loads(
                text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_distinct
            )
        if isinstance(data, str) or _SURROGATE.search(text):
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path} is no JSON document: {error}", path=str(path)) from error
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is larger than any number here")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; which of two values a reader takes for one key is its own affair."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return values


@contextmanager
def _without_collection() -> Iterator[None]:
    """Nothing here makes circles; looking for them takes most of the time of a large document."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def parse_manifest(path: Path, values: Any, *, in_one_file: bool = False) -> Manifest:
    """Return the manifest that a JSON document holds.

    Args:
        path: where it comes from.
        values: the document.
        in_one_file: its tensors are in a consolidated file, one box each, not in files of ranks.

    Raises:
        CheckpointVersionError: a newer version of megaopt wrote it.
        CheckpointCorruptError: a field is not what the format says, a tensor has holes, or a file is outside of the
            folder.
    """
    schema = Schema(path)
    _require_version(path, schema.mapping(values, "the document"))
    names_sums = values["version"] >= _NAMED_SUMS
    schema.fields(values, "the document", _FIELDS | ({"checksums"} if names_sums else set()), _NONE)
    with _without_collection():
        manifest = _parsed(schema, values, in_one_file)
    return _upgraded(manifest) if manifest.version < FORMAT_VERSION else manifest


def _upgraded(manifest: Manifest) -> Manifest:
    """Return a manifest of an older format as one of today's; in format 1 codes of states have no names."""
    optimizer = manifest.optimizer
    if optimizer is not None and manifest.version == 1:
        optimizer = {**optimizer, "parameters": with_named_codes(optimizer["parameters"])}
    return evolve(manifest, optimizer=optimizer, version=FORMAT_VERSION)


def _parsed(schema: Schema, values: Mapping[str, Any], in_one_file: bool) -> Manifest:
    sums = _sums(schema, values)
    files = {
        schema.file(name, "files"): schema.count(size, f"files.{name}")
        for name, size in schema.mapping(values["files"], "files").items()
    }
    names = {*files, ""} if in_one_file else {*files}
    tensors = {
        key: _tensor(schema, f"tensors.{key}", entry, names, sums)
        for key, entry in schema.mapping(values["tensors"], "tensors").items()
    }
    _require_files(schema, files, tensors)
    references = _References(schema, tensors, set())
    configuration = values["configuration"]
    if configuration is not None:
        schema.mapping(configuration, "configuration")
    return Manifest(
        world_size=schema.count(values["world_size"], "world_size", 1),
        files=files,
        tensors=tensors,
        model=_model(schema, values["model"], references),
        optimizer=_optimizer(schema, values["optimizer"], references),
        scheduler=references.check(values["scheduler"], "scheduler"),
        extra=references.check(values["extra"], "extra"),
        configuration=configuration,
        plugins=schema.texts(values["plugins"], "plugins"),
        written=schema.texts(values["written"], "written"),
        version=values["version"],
        checksums=sums.algorithm,
    )


def _require_version(path: Path, values: Mapping[str, Any]) -> None:
    version, written = values.get("version"), values.get("written")
    if type(version) is int and 1 <= version <= FORMAT_VERSION:
        return
    by = written.get("megaopt-core") if isinstance(written, dict) else None
    raise CheckpointVersionError(
        f"{path.parent} has format version {version!r}, written by megaopt-core {by or 'a newer version'}; this one "
        f"reads up to version {FORMAT_VERSION}: pip install --upgrade megaopt-core",
        path=str(path.parent),
    )


@frozen
class _Sums:
    """How a manifest has the sum of a box: under which name, and as how many hexadecimal digits, or as a number."""

    algorithm: str
    field: str
    digits: int | None

    def read(self, schema: Schema, chunk: Mapping[str, Any], where: str) -> str:
        """Return the digits of a box's sum."""
        if self.digits is None:
            return f"{schema.count(chunk[self.field], where, below=2**32):08x}"
        return schema.digits(chunk[self.field], where, self.digits)


def _sums(schema: Schema, values: Mapping[str, Any]) -> _Sums:
    if values["version"] < _NAMED_SUMS:
        return _Sums(OLDEST, "crc32", None)
    name = values["checksums"]
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise schema.fault("checksums", name, f"one of {sorted(ALGORITHMS)}")
    return _Sums(name, "checksum", ALGORITHMS[name].digits)


def _tensor(schema: Schema, where: str, entry: Any, names: AbstractSet[str], sums: _Sums) -> StoredTensor:
    schema.fields(entry, where, {"dtype", "shape", "chunks"}, _NONE)
    dtype = schema.dtype(entry["dtype"], where)
    shape = schema.sizes(entry["shape"], where)
    chunks = [
        _chunk(schema, where, chunk, shape, dtype, names, sums)
        for chunk in schema.sequence(entry["chunks"], where)
    ]
    # A rank that has nothing of a DTensor saves an empty box.
    boxes_of = [(chunk.offsets, chunk.sizes) for chunk in chunks if math.prod(chunk.sizes) or 0 in shape]
    if not tiles(shape, boxes_of):
        boxes = [[*chunk.offsets, *chunk.sizes] for chunk in chunks]
        raise schema.fault(where, boxes, f"every element of the shape {shape} exactly once")
    return StoredTensor(entry["dtype"], shape, tuple(chunks))


def _chunk(
    schema: Schema,
    where: str,
    chunk: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    names: AbstractSet[str],
    sums: _Sums,
) -> StoredChunk:
    schema.fields(chunk, where, _CHUNK | {sums.field}, _NONE)
    offsets, sizes = schema.box(chunk["offsets"], chunk["sizes"], where, shape)
    file, length = schema.text(chunk["file"], where), chunk["length"]
    if file not in names:
        raise schema.fault(where, file, "one of the manifest's files")
    if type(length) is not int or length != math.prod(sizes) * dtype.itemsize:
        raise schema.fault(where, length, f"the bytes of {sizes} elements of {dtype}")
    position, checksum = schema.count(chunk["position"], where), sums.read(schema, chunk, where)
    return StoredChunk(offsets, sizes, file, position, length, checksum)


def _require_files(schema: Schema, files: Mapping[str, int], tensors: Mapping[str, StoredTensor]) -> None:
    """Every byte of every file belongs to one box: what is read into memory is no larger than the files are."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            ranges[chunk.file].append((chunk.position, chunk.length))
    for name, size in files.items():
        end = 0
        for position, length in sorted(ranges[name]):
            if position != end:
                raise schema.fault(f"files.{name}", position, f"where its next box begins, which is {end}")
            end += length
        if end != size:
            raise schema.fault(f"files.{name}", size, f"the sum of its boxes, which is {end}")


@frozen
class _References:
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


def _model(schema: Schema, model: Any, references: _References) -> dict[str, Any]:
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


def _optimizer(schema: Schema, optimizer: Any, references: _References) -> dict[str, Any] | None:
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
        for key, record in schema.mapping(described["state"], f"{where}.state").items():
            _record(schema, f"optim.state.{name}.{key}", record, shape, references)
    references.check(optimizer["scaler"], "optim.scaler")
    return dict(optimizer)


def _record(schema: Schema, where: str, record: Any, shape: tuple[int, ...], references: _References) -> None:
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


def _codes(schema: Schema, where: str, codes: Any, shape: tuple[int, ...], references: _References) -> None:
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
