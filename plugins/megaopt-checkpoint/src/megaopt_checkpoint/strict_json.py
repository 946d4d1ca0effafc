"""JSON of strangers: UTF-8, every key once, finite numbers, whole characters; anything else is refused."""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaopt_core.errors import CheckpointCorruptError

__all__ = ["read_json", "without_collection"]

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
        with without_collection():
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
def without_collection() -> Iterator[None]:
    """Nothing here makes circles; looking for them takes most of the time of a large document."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
