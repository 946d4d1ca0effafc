"""What must not change about a module once its parameters have a place in buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from attrs import define, field
from torch import nn

from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.params import named_params
from megaopt_distributed.buffers.buffer import ParamAndGradBuffer

__all__ = ["ModuleCheck"]


@define(eq=False)
class ModuleCheck:
    """Raises when parameters have left their buffers, or when others train that have no place in them.

    Args:
        name_of: every parameter object that has a place, twins too, with its canonical name.
        buffers: the buffers.
    """

    name_of: Mapping[nn.Parameter, str]
    buffers: Sequence[ParamAndGradBuffer]
    _place: Mapping[str, tuple[torch.dtype, torch.device, int | None]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._place = {
            name: (param.dtype, param.device, param.data_ptr() if buffer.in_buffer else None)
            for buffer in self.buffers
            for name, param in buffer.params.items()
        }

    def require_unchanged(self, module: nn.Module) -> None:
        """Raise unless parameters are where they were, and only those train that have a place.

        Args:
            module: the module.

        Raises:
            UnsupportedOperationError: it names the parameter.
        """
        for param in _params(module):
            name = self.name_of.get(param)
            if name is not None:
                self._require_in_place(name, param)
            elif param.requires_grad:
                raise UnsupportedOperationError(
                    f"{_name_in(module, param)!r} trains, but DistributedDataParallel has no place for its gradient: "
                    "it was unfrozen, added or replaced after wrapping. Wrap the module when it is complete and its "
                    "trainable parameters are chosen"
                )

    def require_kept(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise when a conversion (`.to()`, `.half()`, `.cuda()`...) would give a parameter other memory.

        Args:
            convert: what is about to be applied to every parameter.

        Raises:
            UnsupportedOperationError: it names the parameter.
        """
        with torch.no_grad():
            for param, name in self.name_of.items():
                self._require_in_place(name, convert(param))

    def _require_in_place(self, name: str, tensor: torch.Tensor) -> None:
        dtype, device, address = self._place[name]
        if tensor.dtype == dtype and tensor.device == device and address in (None, tensor.data_ptr()):
            return
        raise UnsupportedOperationError(
            f"a conversion takes {name!r} out of the buffers of DistributedDataParallel: convert or move the model "
            "(.to(), .half(), .cuda(), load_state_dict(assign=True)) before it is wrapped"
        )


def _params(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield all parameters; it takes a fraction of the time of `parameters()`, and may yield one twice."""
    stack, seen = [module], {module}
    while stack:
        current = stack.pop()
        yield from (param for param in current._parameters.values() if param is not None)
        new = [child for child in current._modules.values() if child is not None and child not in seen]
        seen.update(new)
        stack += new


def _name_in(module: nn.Module, param: nn.Parameter) -> str:
    for entry in named_params(module):
        if param is entry.param or any(param is twin for twin in entry.twins):
            return entry.name
    return "a parameter"
