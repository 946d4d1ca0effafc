"""Plain Python values as JSON, exactly, with tensors put beside it: what stands in a manifest, never a pickle."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from megaopt_core.errors import CheckpointError

__all__ = ["decode", "dtype_named", "encode", "name_of_dtype"]


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return `"float32"` for `torch.float32`.

    Args:
        dtype: any dtype.
    """
    return str(dtype).removeprefix("torch.")


def dtype_named(name: object) -> torch.dtype:
    """Return the dtype of a name.

    Args:
        name: what :func:`name_of_dtype` returned.

    Raises:
        CheckpointError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the checkpoint holds values of dtype {name!r}, which torch {torch.__version__} lacks"
        )
    return dtype


def encode(value: Any, tensors: MutableMapping[str, torch.Tensor], where: str) -> Any:
    """Return a value as JSON has it; tensors of more than one element are put into `tensors`.

    None, booleans, integers, floats (with infinities and NaN), strings, bytes, lists, tuples, sets, mappings, dtypes
    and tensors come back from :func:`decode` as they were. The name of a tensor is the way to it: `where`, then what
    leads from one container into the next. Different ways have different names, on every rank the same.

    Args:
        value: what is to be saved.
        tensors: receives tensors under names that begin with `where`.
        where: what the value is called, for those names and for errors.

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
        return {"$dtype": name_of_dtype(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, where)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, tensors, f"{where}.{index}") for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$tuple" if isinstance(value, tuple) else "$set": items}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: it holds "
        "None, booleans, numbers, strings, bytes, tensors, dtypes, and lists, tuples, sets and dicts of them"
    )


def _encode_mapping(
    value: Mapping[Any, Any], tensors: MutableMapping[str, torch.Tensor], where: str
) -> dict[str, Any]:
    ways = [f"{where}.{_escaped(key, index)}" for index, key in enumerate(value)]
    items = [encode(item, tensors, way) for item, way in zip(value.values(), ways, strict=True)]
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(zip(value, items, strict=True))
    keys = [encode(key, tensors, f"{way}$key") for key, way in zip(value, ways, strict=True)]
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
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _encode_tensor(value: torch.Tensor, tensors: MutableMapping[str, torch.Tensor], where: str) -> Any:
    if value.numel() == 1 and not value.is_complex() and type(value) in (torch.Tensor, torch.nn.Parameter):
        number = encode(value.detach().item(), tensors, where)
        return {"$scalar": [name_of_dtype(value.dtype), list(value.shape), number]}
    if where in tensors:
        raise CheckpointError(f"two tensors of a checkpoint would both be called {where!r}")
    tensors[where] = value.detach()
    return {"$tensor": where}


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return what :func:`encode` was given.

    Args:
        value: what it returned.
        tensor: returns the tensor of a name.

    Raises:
        CheckpointError: the value is of a kind that this version does not know.

    Example:
        >>> decode({"$tuple": [1, {"$float": "nan"}]}, {}.__getitem__)
        (1, nan)
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) == 1 and tag.startswith("$"):
        return _decode_tagged(tag, value[tag], tensor)
    return {key: decode(item, tensor) for key, item in value.items()}


def _decode_tagged(tag: str, inside: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if tag == "$tensor":
        return tensor(inside)
    if tag == "$scalar":
        dtype, shape, number = inside
        return torch.tensor(decode(number, tensor), dtype=dtype_named(dtype)).reshape(shape)
    kinds: dict[str, Callable[[], Any]] = {
        "$float": lambda: float(inside),
        "$dtype": lambda: dtype_named(inside),
        "$bytes": lambda: base64.b64decode(inside),
        "$dict": lambda: {decode(key, tensor): decode(item, tensor) for key, item in inside},
        "$tuple": lambda: tuple(decode(item, tensor) for item in inside),
        "$set": lambda: {decode(item, tensor) for item in inside},
    }
    if tag not in kinds:
        raise CheckpointError(f"the checkpoint holds a value of the unknown kind {tag!r}")
    return kinds[tag]()
