"""Optimizer state under the parameters that users know: the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from megaopt_core.optimizers.part import OptimizerPart

__all__ = ["LiveState", "ParamState"]


class ParamState(MutableMapping[str, Any]):
    """The live state of one parameter: the inner optimizer's, and what the precision policy keeps.

    Args:
        part: the part that steps the parameter.
        index: position of its piece.
    """

    def __init__(self, part: OptimizerPart, index: int) -> None:
        self._part = part
        self._index = index
        self._inner: MutableMapping[str, Any] = part.inner.state[part.stepped[index]]
        self._extra = part.precision.extra_state(index)

    def __getitem__(self, key: str) -> Any:
        return self._extra[key] if key in self._extra else self._inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._extra:
            self._part.precision.set_extra_state(self._index, key, value)
        else:
            self._inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self._inner[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._inner
        yield from self._extra

    def __len__(self) -> int:
        return len(self._inner) + len(self._extra)

    def __repr__(self) -> str:
        return repr(dict(self))


class LiveState(Mapping[torch.nn.Parameter, ParamState]):
    """State keyed by model parameter.

    Args:
        parts: the optimizer's parts.
        names: model parameter to canonical name.
    """

    def __init__(self, parts: Sequence[OptimizerPart], names: Mapping[torch.nn.Parameter, str]) -> None:
        self._names = names
        self._where: dict[torch.nn.Parameter, tuple[OptimizerPart, int]] = {}
        for part in parts:
            for index, piece in enumerate(part.pieces):
                for param in piece.model_params:
                    self._where[param] = (part, index)

    def __getitem__(self, param: torch.nn.Parameter) -> ParamState:
        part, index = self._where[param]
        return ParamState(part, index)

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __repr__(self) -> str:
        return repr({self._names[param]: dict(state) for param, state in self.items()})
