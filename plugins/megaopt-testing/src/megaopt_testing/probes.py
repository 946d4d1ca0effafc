"""Two small optimizers with which checks of strategies step: one by single elements, one by whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megaopt_core.params import Granularity, ParamInfo
from megaopt_core.plugin_api import OptimizerEntry, hookimpl

__all__ = ["PROBES", "ProbePlugin"]


class Probe(torch.optim.Optimizer):
    """Momentum and decoupled decay; every element by itself.

    Args:
        params: what it steps.
        lr: learning rate.
        weight_decay: decoupled weight decay.
    """

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # nothing is returned
        """Step.

        Args:
            closure: not called.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    momentum.lerp_(param.grad, 0.1)
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(self.update(momentum), alpha=group["lr"])

    def update(self, momentum: torch.Tensor) -> torch.Tensor:
        """Return by what a parameter moves.

        Args:
            momentum: its momentum.
        """
        return momentum


class WholeProbe(Probe):
    """The same, and every tensor moves by one norm."""

    def update(self, momentum: torch.Tensor) -> torch.Tensor:
        """Return by what a parameter moves.

        Args:
            momentum: its momentum.
        """
        moved: torch.Tensor = momentum / momentum.norm().clamp_min(1e-12)
        return moved


class SplitProbe:
    """The step of :class:`WholeProbe` in three parts.

    Args:
        inner: the probe.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        assert isinstance(inner, WholeProbe)
        self.inner = inner

    def _groups(self, params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        found = {id(param): group for group in self.inner.param_groups for param in group["params"]}
        return [found[id(param)] for param in params]

    def init_state(self, params: Sequence[torch.Tensor]) -> None:
        """Make momentum.

        Args:
            params: slices.
        """
        for param in params:
            self.inner.state[param].setdefault("momentum", torch.zeros_like(param))

    def local_updates(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decay, and return momentum.

        Args:
            params: slices with gradients.
        """
        self.init_state(params)
        updates = []
        for param, group in zip(params, self._groups(params), strict=True):
            momentum = self.inner.state[param]["momentum"]
            momentum.lerp_(param.grad, 0.1)
            param.mul_(1 - group["lr"] * group["weight_decay"])
            updates.append(momentum)
        return updates

    def transform(self, updates: Sequence[torch.Tensor], infos: Sequence[ParamInfo]) -> list[torch.Tensor]:
        """Divide whole tensors by their norms.

        Args:
            updates: momentum of whole tensors.
            infos: what they belong to.
        """
        return [self.inner.update(update) for update in updates]

    def apply(self, params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]) -> None:
        """Move slices.

        Args:
            params: slices.
            updates: theirs.
        """
        for param, group, update in zip(params, self._groups(params), updates, strict=True):
            param.sub_(update, alpha=group["lr"])


_STATE = {"momentum": "param"}

PROBES: Mapping[str, Granularity] = {
    "kit_elements": Granularity.ELEMENT,
    "kit_tensors": Granularity.TENSOR,
}
"""Name to granularity."""


class ProbePlugin:
    """A plugin with the probes, for the time of a check."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> Mapping[str, OptimizerEntry]:
        """Offer both."""
        return {
            "kit_elements": OptimizerEntry(Probe, state=_STATE),
            "kit_tensors": OptimizerEntry(
                WholeProbe, state=_STATE, granularity=Granularity.TENSOR, split_step=SplitProbe
            ),
        }
