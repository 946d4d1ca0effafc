"""A look at the model before every step: what trains and nobody steps, what no longer trains, what was converted."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from attrs import define, field

__all__ = ["ModelLook"]

_requires_grad = attrgetter("requires_grad")
_KINDS = {name: attrgetter(name) for name in ("dtype", "device", "shape")}
"""What of a stepped parameter stays as it was at the build, whatever memory it is given."""


def _references(chunks: Sequence[torch.nn.Module]) -> list[weakref.ref[torch.nn.Module]]:
    return [weakref.ref(chunk) for chunk in chunks]


@define(eq=False)
class ModelLook:
    """Compares the parameters that a model has with those that are stepped; the model is not kept alive.

    A look goes through the modules once, without names and without any tensor being read: names are found only where
    something has changed.

    Args:
        chunks: the model's chunks.
        names: the parameters that are stepped, by name.
        twins: other parameter objects that share the memory of those.
    """

    chunks: list[weakref.ref[torch.nn.Module]] = field(converter=_references)
    names: Mapping[torch.nn.Parameter, str]
    twins: Iterable[torch.nn.Parameter] = ()
    _stepped: list[torch.nn.Parameter] = field(init=False)
    _known: set[int] = field(init=False)
    _kinds: dict[str, list[Any]] = field(init=False)
    _elsewhere: dict[int, weakref.ref[torch.nn.Parameter]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.steps(self.names, self.twins)

    def steps(self, names: Mapping[torch.nn.Parameter, str], twins: Iterable[torch.nn.Parameter]) -> None:
        """Take what is stepped from now on for known.

        Args:
            names: the parameters that are stepped, by name.
            twins: other parameter objects that share the memory of those.
        """
        self.names, self._stepped = names, list(names)
        self._known = {id(None), *map(id, self._stepped), *map(id, twins)}
        self._kinds = {kind: list(map(read, self._stepped)) for kind, read in _KINDS.items()}

    def leave(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Pass parameters over from now on: something else steps them.

        Args:
            params: the parameters.
        """
        self._elsewhere.update((id(param), weakref.ref(param)) for param in params)

    def strangers(self) -> list[torch.nn.Parameter]:
        """Return the parameters that have a gradient and are not stepped."""
        present: list[torch.nn.Parameter | None] = []
        stack: list[torch.nn.Module | None] = [reference() for reference in self.chunks]
        seen = {id(None)}
        while stack:
            module = stack.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            if params := module._parameters:
                present += params.values()
            if children := module._modules:
                stack += children.values()
        ids = list(map(id, present))
        if self._known.issuperset(ids):
            return []
        unknown = {at: param for at, param in zip(ids, present, strict=True) if at not in self._known}
        return [param for param in unknown.values() if param is not None and self._is_stranger(param)]

    def _is_stranger(self, param: torch.nn.Parameter) -> bool:
        left = self._elsewhere.get(id(param))
        is_left = left is not None and left() is param
        return param.requires_grad and not is_left and _has_grad(param)

    def frozen(self) -> list[torch.nn.Parameter]:
        """Return the stepped parameters that no longer train."""
        if all(map(_requires_grad, self._stepped)):
            return []
        return [param for param in self._stepped if not param.requires_grad]

    def changed(self) -> tuple[str, list[tuple[str, Any, torch.nn.Parameter]]] | None:
        """Return what is another now, dtype, device or shape, with names, values of before and parameters."""
        for kind, read in _KINDS.items():
            before = self._kinds[kind]
            if list(map(read, self._stepped)) != before:
                pairs = zip(self._stepped, before, strict=True)
                return kind, [(self.names[each], was, each) for each, was in pairs if read(each) != was]
        return None


def _has_grad(param: torch.nn.Parameter) -> bool:
    return param.grad is not None or getattr(param, "main_grad", None) is not None
