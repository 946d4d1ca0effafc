"""What may stand in the description that torch's checkpoints hold of an optimizer: the document of a stranger."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from megaopt_checkpoint.stored import require_format
from megaopt_core.errors import CheckpointCorruptError
from megaopt_core.params import Role
from megaopt_core.state import stored_view

__all__ = ["read_description"]

type _Fields = Mapping[str, type]

_ABOUT: _Fields = {"plugins": dict, "written": dict}
_DOCUMENT: _Fields = {"parameters": dict, "groups": list, "scaler": object, **_ABOUT}
_GROUP: _Fields = {"settings": dict, "configured": dict}
_PARAMETER: _Fields = {"optimizer": str, "strategy": str, "group": int, "shape": list, "state": dict}
_SEEN: _Fields = {"fresh": bool, "role": str, "view": dict}
_STATES: _Fields = {"tensor": str, "value": object, "ranges": list, "objects": list}
_WORDS = {dict: "an object", list: "a list", str: "text", int: "a whole number", bool: "true or false"}


def read_description(name: str, text: Any) -> dict[str, Any]:
    """Return a description as data; the values in it are checked where they are decoded.

    Args:
        name: what errors call the checkpoint.
        text: the description.

    Raises:
        CheckpointVersionError: it has another format than the one that is read.
        CheckpointCorruptError: it is no JSON, or something in it is not what the format says.
    """
    try:
        described: dict[str, Any] = json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"{name}: its description is no JSON document: {error}", path=name
        ) from error
    if isinstance(described, dict):
        by = described.get("written")
        require_format(
            name, described.pop("version", None), by.get("megaopt-core") if isinstance(by, dict) else None
        )
    where = f"{name}: its description"
    _require(where, described, _DOCUMENT)
    for key in _ABOUT:
        _require(f"{where}.{key}", described[key], dict.fromkeys(described[key], str))
    for index, group in enumerate(described["groups"]):
        _require(f"{where}.groups.{index}", group, _GROUP)
    for of, parameter in described["parameters"].items():
        _require_parameter(f"{where}.parameters.{of}", parameter, len(described["groups"]))
    return described


def _require_parameter(where: str, parameter: Any, groups: int) -> None:
    _require(where, parameter, _PARAMETER, _SEEN)
    if not 0 <= parameter["group"] < groups:
        raise _fault(f"{where}.group", parameter["group"], f"one of {groups} groups")
    if not all(type(size) is int and size >= 0 for size in parameter["shape"]):
        raise _fault(f"{where}.shape", parameter["shape"], "a shape")
    if parameter.get("role", Role.MATRIX) not in list(Role):
        raise _fault(f"{where}.role", parameter["role"], f"one of {[*map(str, Role)]}")
    stored_view(parameter)
    for key, state in parameter["state"].items():
        kind = next((kind for kind in _STATES if isinstance(state, dict) and kind in state), "tensor")
        codes: _Fields = {"codes": list} if kind == "tensor" else {}
        _require(f"{where}.state.{key}", state, {kind: _STATES[kind]}, codes)


def _require(where: str, value: Any, fields: _Fields, optional: _Fields = {}) -> None:  # noqa: B006 - not changed
    """Raise unless a value is an object of fields, each of its kind."""
    kinds = {**fields, **optional}
    if not isinstance(value, dict) or not fields.keys() <= value.keys() <= kinds.keys():
        found = sorted(value) if isinstance(value, dict) else value
        raise _fault(where, found, f"an object of the fields {sorted(kinds)}")
    for key, inside in value.items():
        if not isinstance(inside, kinds[key]) or (kinds[key] is int and isinstance(inside, bool)):
            raise _fault(f"{where}.{key}", inside, _WORDS[kinds[key]])


def _fault(where: str, value: Any, expected: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{where} is {reprlib.repr(value)}, which is not {expected}", path=where.partition(":")[0]
    )
