"""Looks at the model before every step: at what trains now."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from attrs import define, field

from megaopt_core.errors import OwnershipError
from megaopt_core.params._names import shown
from megaopt_core.reporting._watched_model import WatchedModel

__all__ = ["ModelLook"]

_CHANGED = {
    "dtype": (
        "is {now} now, but was {before} when its optimizer was built: convert the model (.to(dtype), "
        ".half(), .bfloat16()) before you build its optimizer"
    ),
    "device": (
        "is on {now} now, but was on {before} when its optimizer was built, and its states are there: move "
        "the model (.to(device), .cuda()) before you build its optimizer"
    ),
    "shape": (
        "has shape {now} now, but had {before} when its optimizer was built, and its states have that shape: resize "
        "the model (resize_token_embeddings()) before you build its optimizer, or build it again"
    ),
}
"""What of a stepped parameter stays as it was at the build, whatever memory it is given, and what is said if not."""


@define(eq=False)
class ModelLook:
    """Compares the parameters that a model has with those that are stepped; the model is not kept alive.

    A look goes through the modules once, without names and without any tensor being read: names are found only where
    something has changed.

    Args:
        model: the model that the optimizer was built for.
        names: the parameters that are stepped, by name.
        twins: other parameter objects that share the memory of those.
    """

    model: WatchedModel
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
        self._kinds = {kind: list(map(attrgetter(kind), self._stepped)) for kind in _CHANGED}

    def leave(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Pass parameters over from now on: something else steps them.

        Args:
            params: the parameters.
        """
        self._elsewhere.update((id(param), weakref.ref(param)) for param in params)

    def strangers(self) -> list[torch.nn.Parameter]:
        """Return the parameters that have a gradient and are not stepped."""
        present: list[torch.nn.Parameter | None] = []
        stack: list[torch.nn.Module | None] = [*self.model.alive()]
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
        has_grad = param.grad is not None or getattr(param, "main_grad", None) is not None
        return param.requires_grad and has_grad and not is_left

    def frozen(self) -> list[torch.nn.Parameter]:
        """Return the stepped parameters that no longer train."""
        return [param for param in self._stepped if not param.requires_grad]

    def require_unchanged(self) -> None:
        """Raise unless all stepped parameters have the dtype, device and shape that they had.

        Raises:
            OwnershipError: it names them, and what one of them has now.
        """
        for kind, before in self._kinds.items():
            now = list(map(attrgetter(kind), self._stepped))
            if now != before:
                triples = zip(self._stepped, before, now, strict=True)
                changed = [(self.names[param], was, value) for param, was, value in triples if was != value]
                names = [name for name, _, _ in changed]
                name, was, value = changed[0]
                said = _CHANGED[kind].format(now=_plain(value), before=_plain(was))
                raise OwnershipError(f"{shown([*map(repr, names)])}: {name!r} {said}", names=names)


def _plain(value: torch.dtype | torch.device | torch.Size) -> str:
    return str(tuple(value) if isinstance(value, torch.Size) else value).removeprefix("torch.")
