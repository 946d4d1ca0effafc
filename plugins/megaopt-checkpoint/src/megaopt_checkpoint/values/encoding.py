"""Plain Python values as JSON, exactly, with tensors put beside it: what stands in a manifest, never a pickle."""

from __future__ import annotations

import base64
import math
import reprlib
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from attrs import frozen

from megaopt_core.config import dtype_name
from megaopt_core.errors import CheckpointCorruptError, CheckpointError, MegaoptError

__all__ = ["AsIs", "decode", "dtype_named", "encode"]


_DEEPEST = 100
_MOST_DIMS = 64
_LONGEST_INT = 8192
"""Bits of an integer that is written in decimal."""

_SEQUENCES = {list: "", tuple: "$tuple", set: "$set", frozenset: "$frozenset"}


@frozen(eq=False, repr=False)
class AsIs:
    """A value in memory that stands where an encoded one is expected; no file can say it.

    Args:
        value: anything.
    """

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


def dtype_named(name: object) -> torch.dtype:
    """Return the dtype of a name.

    Args:
        name: what :func:`~megaopt_core.config.dtype_name` returned.

    Raises:
        CheckpointError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the checkpoint holds values of dtype {name!r}, which torch {torch.__version__} lacks"
        )
    return dtype


def encode(value: Any, tensors: MutableMapping[str, torch.Tensor], where: str, depth: int = 0) -> Any:
    """Return a value as JSON has it; tensors of more than one element are put into `tensors`.

    None, booleans, integers, floats (with infinities and NaN), strings, bytes, lists, tuples, sets, mappings, dtypes
    and tensors come back from :func:`decode` as they were. The name of a tensor is the way to it: `where`, then what
    leads from one container into the next. Different ways have different names, on every rank the same.

    Args:
        value: what is to be saved.
        tensors: receives tensors under names that begin with `where`.
        where: what the value is called, for those names and for errors.
        depth: how many containers it is in.

    Raises:
        CheckpointError: something in it is none of the above, or its name is taken.

    Example:
        >>> encode({"betas": (0.9, 0.95), "lr": float("inf")}, {}, "group")
        {'betas': {'$tuple': [0.9, 0.95]}, 'lr': {'$float': 'inf'}}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return _encode_plain(value)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, tensors, where)
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if depth == _DEEPEST:
        raise CheckpointError(f"{where} is nested more than {_DEEPEST} deep, which a checkpoint cannot hold")
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, where, depth + 1)
    for kind, tag in _SEQUENCES.items():
        if isinstance(value, kind):
            items = [encode(item, tensors, f"{where}.{index}", depth + 1) for index, item in enumerate(value)]
            return {tag: items} if tag else items
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: it holds "
        "None, booleans, numbers, strings, bytes, tensors, dtypes, and lists, tuples, sets and dicts of them"
    )


def _encode_mapping(
    value: Mapping[Any, Any], tensors: MutableMapping[str, torch.Tensor], where: str, depth: int
) -> dict[str, Any]:
    ways = [f"{where}.{_escaped(key, index)}" for index, key in enumerate(value)]
    items = [encode(item, tensors, way, depth) for item, way in zip(value.values(), ways, strict=True)]
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(zip(value, items, strict=True))
    keys = [encode(key, tensors, f"{way}$key", depth) for key, way in zip(value, ways, strict=True)]
    return {"$dict": [list(pair) for pair in zip(keys, items, strict=True)]}


def _escaped(key: object, index: int) -> str:
    """Return a key as one step of a way: text as it is, numbers by their kind, anything else by its position."""
    if isinstance(key, str):
        return key.replace("%", "%25").replace(".", "%2E").replace("$", "%24")
    if key is None or (isinstance(key, (bool, int, float, bytes)) and key == key):  # noqa: PLR0124 - NaNs differ
        return f"${type(key).__name__}:{_escaped(repr(key), index)}"
    return f"${index}"


def _encode_plain(value: bool | float | str | None) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return value
    if isinstance(value, str):
        return str(value)
    # Python reads no longer numbers as text.
    return int(value) if value.bit_length() < _LONGEST_INT else {"$int": hex(value)}


def _encode_tensor(value: torch.Tensor, tensors: MutableMapping[str, torch.Tensor], where: str) -> Any:
    if value.numel() == 1 and not value.is_complex() and type(value) in (torch.Tensor, torch.nn.Parameter):
        number = encode(value.detach().item(), tensors, where)
        return {"$scalar": [dtype_name(value.dtype), list(value.shape), number]}
    if where in tensors:
        raise CheckpointError(f"two tensors of a checkpoint would both be called {where!r}")
    tensors[where] = value.detach()
    return {"$tensor": where}


def decode(value: Any, tensor: Callable[[str], torch.Tensor], depth: int = 0) -> Any:
    """Return what :func:`encode` was given.

    Args:
        value: what it returned, or what a stranger says that it has returned.
        tensor: returns the tensor of a name.
        depth: how many containers it is in.

    Raises:
        CheckpointError: the value is of a kind that this version does not know.
        CheckpointCorruptError: `encode` does not return such a value.

    Example:
        >>> decode({"$tuple": [1, {"$float": "nan"}]}, {}.__getitem__)
        (1, nan)
    """
    if isinstance(value, (list, dict)) and depth > _DEEPEST:
        raise CheckpointCorruptError(f"a value is nested more than {_DEEPEST} deep")
    if isinstance(value, list):
        return [decode(item, tensor, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value.value if isinstance(value, AsIs) else value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: decode(item, tensor, depth + 1) for key, item in value.items()}
    if tag not in _KINDS:
        raise CheckpointError(f"the checkpoint holds a value of the unknown kind {tag!r}")
    try:
        return _KINDS[tag](value[tag], lambda item: decode(item, tensor, depth + 1), tensor)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, MegaoptError):
            raise
        raise CheckpointCorruptError(
            f"a value is said to be {tag} of {reprlib.repr(value[tag])}, which it cannot be: {error}"
        ) from error


def _decode_float(inside: Any, *_: Any) -> float:
    if inside not in {"inf", "-inf", "nan"}:
        raise ValueError("JSON has all other numbers")
    return float(inside)


def _decode_int(inside: Any, *_: Any) -> int:
    if not isinstance(inside, str) or not inside.removeprefix("-").startswith("0x"):
        raise ValueError("it is not hexadecimal")
    return int(inside, 16)


def _decode_named(inside: Any, _: Any, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
    if not isinstance(inside, str):
        raise TypeError("a tensor has a name")
    return tensor(inside)


def _decode_scalar(inside: Any, decoded: Callable[[Any], Any], _: Any) -> torch.Tensor:
    dtype, shape, number = inside
    number = decoded(number)
    if not isinstance(number, (bool, int, float)) or not isinstance(shape, list) or len(shape) > _MOST_DIMS:
        raise TypeError("it is no number with a shape")
    return torch.tensor(number, dtype=dtype_named(dtype)).reshape(shape)


def _decode_dict(inside: Any, decoded: Callable[[Any], Any], _: Any) -> dict[Any, Any]:
    found = {decoded(key): decoded(item) for key, item in inside}
    if len(found) != len(inside):
        raise ValueError("a key comes twice")
    return found


def _decode_items(kind: Callable[[Any], Any], inside: Any, decoded: Callable[[Any], Any], _: Any) -> Any:
    if not isinstance(inside, list):
        raise TypeError("it is no list")
    return kind(map(decoded, inside))


_KINDS: dict[str, Callable[[Any, Callable[[Any], Any], Callable[[str], torch.Tensor]], Any]] = {
    "$tensor": _decode_named,
    "$scalar": _decode_scalar,
    "$float": _decode_float,
    "$int": _decode_int,
    "$dtype": lambda inside, *_: dtype_named(inside),
    "$bytes": lambda inside, *_: base64.b64decode(inside, validate=True),
    "$dict": _decode_dict,
    "$tuple": partial(_decode_items, tuple),
    "$set": partial(_decode_items, set),
    "$frozenset": partial(_decode_items, frozenset),
}
