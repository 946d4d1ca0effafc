"""torch's own class of an optimizer, which steps what is on the CPU where it is asked for."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from megaopt_core.errors import UnsupportedSettingError

__all__ = ["TorchStep", "torch_class"]


def torch_class(inner: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Return the class of torch that an optimizer is or extends, None where it extends none but the base.

    Args:
        inner: the optimizer.

    Example:
        >>> class Mine(torch.optim.SGD):
        ...     pass
        >>> torch_class(Mine([torch.zeros(1)], lr=0.1)).__name__
        'SGD'
    """
    for cls in type(inner).__mro__:
        if cls.__module__.startswith("torch.optim.") and cls is not torch.optim.Optimizer:
            found: type[torch.optim.Optimizer] = cls
            return found
    return None


class TorchStep:
    """Steps what the groups of an optimizer hold by torch's class; groups and state are the optimizer's own.

    Args:
        inner: the optimizer; its class extends one of torch's.
        name: its registered name, for errors.

    Raises:
        UnsupportedSettingError: a group asks for something that torch's class does not know.
    """

    def __init__(self, inner: torch.optim.Optimizer, name: str) -> None:
        cls = torch_class(inner)
        assert cls is not None  # noqa: S101 - the caller asks first
        known = inspect.signature(cls).parameters
        given = {key: value for key, value in inner.defaults.items() if key in known}
        self._inner = inner
        self._torch: Any = cls([torch.zeros(1)], **given)
        self.title = f"torch.optim.{cls.__name__}"
        self._require_known(inner, name)
        self._torch.param_groups, self._torch.state = inner.param_groups, inner.state

    def _require_known(self, inner: torch.optim.Optimizer, name: str) -> None:
        for key, default in inner.defaults.items():
            if key in self._torch.defaults:
                continue
            for group in inner.param_groups:
                if group.get(key, default):
                    raise UnsupportedSettingError.of(
                        "use_torch_optimizer_for_cpu_offload",
                        value=True,
                        why=f"{self.title} knows no {key}, which is {group[key]!r} for {name!r}",
                    )

    def __call__(self) -> None:
        """Make one step."""
        self._require_known(self._inner, self.title)
        self._torch.param_groups, self._torch.state = self._inner.param_groups, self._inner.state
        scale = getattr(self._inner, "grad_scale", None)
        if scale is not None:  # a clip factor that fused kernels take
            self._torch.grad_scale = scale
        try:
            self._torch.step()
        finally:
            if scale is not None:
                del self._torch.grad_scale
