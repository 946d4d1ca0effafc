"""The state of an optimizer, declared by its entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen

from megaopt_core.errors import PluginError

__all__ = ["DeclaredState", "StateKind"]

type StateKind = str | tuple[int, ...]
"""`"param"`: a tensor like the parameter; `"scalar"`: a tensor with one number, in fp32 on the CPU, as torch's `step`;
`"number"`: a number of Python; a tuple: a tensor of that shape, in the parameter's dtype and on its device."""


def _kinds(value: Mapping[str, Any]) -> Mapping[str, StateKind]:
    kinds = {key: tuple(kind) if isinstance(kind, list) else kind for key, kind in value.items()}
    for key, kind in kinds.items():
        is_shape = isinstance(kind, tuple) and all(isinstance(size, int) and size >= 0 for size in kind)
        if not is_shape and kind not in ("param", "scalar", "number"):
            raise PluginError(
                f"OptimizerEntry(state={{{key!r}: {kind!r}}}): must be 'param' (like the parameter), 'scalar' (a "
                "tensor with one number), 'number' (of Python), or a shape, such as (4,)"
            )
    return kinds


@frozen
class DeclaredState:
    """Makes the state that an entry declares: keys, shapes and dtypes, and zeros to load into.

    Args:
        kinds: state key to what the state is.

    Raises:
        PluginError: a kind is none.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> optimizer = torch.optim.Adam([weight])
        >>> DeclaredState({"exp_avg": "param", "step": "scalar", "factor": (2,)})(optimizer)
        >>> {key: tuple(value.shape) for key, value in optimizer.state[weight].items()}
        {'exp_avg': (2, 3), 'step': (), 'factor': (2,)}
    """

    kinds: Mapping[str, StateKind] = field(converter=_kinds)

    def __call__(self, optimizer: torch.optim.Optimizer, config: object = None) -> None:
        """Give every parameter its state.

        Args:
            optimizer: has none yet.
            config: the run's configuration, of which nothing is asked.
        """
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            optimizer.state[param] = {key: _made(kind, param) for key, kind in self.kinds.items()}


def _made(kind: StateKind, param: torch.Tensor) -> torch.Tensor | int:
    if kind == "number":
        return 0
    if kind == "scalar":
        return torch.zeros((), dtype=torch.float32)
    if kind == "param":
        return torch.zeros_like(param, requires_grad=False)
    return torch.zeros(kind, dtype=param.dtype, device=param.device)  # type: ignore[arg-type] # a shape
