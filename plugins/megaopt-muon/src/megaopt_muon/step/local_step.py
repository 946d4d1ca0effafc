"""Muon's step before it orthogonalizes: weight decay, momentum, and the update that is handed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from megaopt_core.plugin_api import dense_gradient
from megaopt_muon.step.elementwise import Decay, MomentumStep

if TYPE_CHECKING:
    from megaopt_muon.products.workspace import Workspace

__all__ = ["LocalStep", "decay_of", "gradient_of", "runs_of"]

_ALIGNMENT: Final = 32
"""Elements of 16 bits in a cache line."""

_CHUNK: Final = 1 << 25
"""So many elements are updated together: enough to save calls, little enough not to double the memory of a model."""


@frozen
class LocalStep:
    """How gradients become updates, element by element, on any slices.

    Args:
        nesterov: look one step of momentum ahead.
        is_decoupled: weight decay shrinks the parameter; else it is added to the gradient.
        workspace: where intermediate values live.
    """

    nesterov: bool
    is_decoupled: bool
    workspace: Workspace

    def updates(
        self,
        group: Mapping[str, Any],
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        *,
        swept: Sequence[bool],
        early: Sequence[bool],
    ) -> tuple[list[torch.Tensor], dict[int, float]]:
        """Move the momentum of many parameters, and return what is to be orthogonalized.

        Args:
            group: their settings.
            params: parameters, or slices of them.
            grads: their gradients.
            buffers: their momentum.
            swept: whose update is written in 16 bits while it is made.
            early: which of the others are shrunk now, where decay is decoupled.

        Returns:
            One update a parameter, and the squared norms of those that were swept, by position.
        """
        updates: dict[int, torch.Tensor] = {}
        squares: dict[int, float] = {}
        single = [index for index, alone in enumerate(swept) if alone]
        step = self.sweep(group)
        for index, out in zip(single, self.memory([params[index] for index in single]), strict=True):
            squares[index] = step(params[index], grads[index], buffers[index], out)
            updates[index] = out
        rest = [index for index in range(len(params)) if index not in updates]
        if rest:
            some = [[tensors[index] for index in rest] for tensors in (params, grads, buffers)]
            decayed = [params[index] for index in rest if early[index]]
            updates |= zip(rest, self.together(group, *some, decayed=decayed), strict=True)
        return [updates[index] for index in range(len(params))], squares

    def together(
        self,
        group: Mapping[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        buffers: list[torch.Tensor],
        *,
        decayed: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Move the momentum of many parameters in a few calls, and return what is to be orthogonalized.

        Args:
            group: their settings.
            params: parameters, or slices of them.
            grads: their gradients.
            buffers: their momentum, which without Nesterov is what is returned.
            decayed: which of them are shrunk now, where decay is decoupled.
        """
        if group["weight_decay"] != 0:
            if not self.is_decoupled:
                grads = list(torch._foreach_add(grads, params, alpha=float(group["weight_decay"])))
            elif decayed:
                torch._foreach_mul_(list(decayed), _keep(group))
        momentum = float(group["momentum"])
        torch._foreach_lerp_(buffers, grads, 1.0 - momentum)
        return list(torch._foreach_lerp(grads, buffers, momentum)) if self.nesterov else buffers

    def sweep(self, group: Mapping[str, Any]) -> MomentumStep:
        """Return the same for one parameter at a time, in one sweep over its memory.

        Args:
            group: settings.
        """
        return MomentumStep(
            momentum=float(group["momentum"]),
            added_decay=0.0 if self.is_decoupled else float(group["weight_decay"]),
            nesterov=self.nesterov,
            workspace=self.workspace,
        )

    def memory(self, params: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Return memory for updates of 16 bits, that the next list of parameters uses again.

        Args:
            params: what is swept.
        """
        if not params:
            return
        lengths = [-(-param.numel() // _ALIGNMENT) * _ALIGNMENT for param in params]
        flat = self.workspace.take("updates", (sum(lengths),), torch.bfloat16, params[0].device, dense=True)
        for param, memory in zip(params, flat.split(lengths), strict=True):
            yield memory[: param.numel()].view(param.shape)

    def late_decay(
        self, group: Mapping[str, Any], dtype: torch.dtype, *, is_customized: bool
    ) -> Decay | None:
        """Return the decay that comes with the update, when the parameter is read anyway; None where it came before.

        In 16 bits torch rounds a product otherwise where memory has gaps, so that matrices of one parameter would not
        decay as the whole does.

        Args:
            group: settings.
            dtype: of what is stepped.
            is_customized: a subclass does something before or after an update, and finds parameters decayed.
        """
        if not group["weight_decay"] or not self.is_decoupled:
            return None
        waits = group["cautious_weight_decay"] or not (is_customized or dtype.itemsize < 4)
        return decay_of(group) if waits else None


def decay_of(group: Mapping[str, Any]) -> Decay:
    """Return the decoupled decay of a group.

    Args:
        group: a parameter group.
    """
    return Decay(_keep(group), group["cautious_weight_decay"])


def _keep(group: Mapping[str, Any]) -> float | torch.Tensor:
    """Return what decoupled decay multiplies parameters by, a tensor of no dimensions where a rate is a tensor."""
    keep: float | torch.Tensor = 1.0 - group["lr"] * group["weight_decay"]
    return keep.reshape(()) if isinstance(keep, torch.Tensor) else keep


def gradient_of(param: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient in the parameter's dtype.

    Args:
        param: the tensor that is stepped; it has a gradient.

    Raises:
        GradientError: the gradient is sparse or complex.
    """
    return dense_gradient("Muon", param).to(param.dtype)


def runs_of(params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut a list into runs of limited size, equal shapes next to each other; what peers share comes last, one by one.

    Args:
        params: what is stepped.
    """
    order: dict[tuple[int, ...], list[torch.Tensor]] = {}
    shared: list[torch.Tensor] = []
    for param in params:
        if _has_peers(param):
            shared.append(param)
        else:
            order.setdefault(tuple(param.shape), []).append(param)
    chunk: list[torch.Tensor] = []
    size = 0
    for param in (param for same in order.values() for param in same):
        if chunk and size + param.numel() > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(param)
        size += param.numel()
    if chunk:
        yield chunk
    # Peers wait for each other, so they need one order on all ranks, whatever else each has.
    yield from ([param] for param in shared)


def _has_peers(param: torch.Tensor) -> bool:
    return getattr(getattr(param, "param_info", None), "peers", None) is not None
