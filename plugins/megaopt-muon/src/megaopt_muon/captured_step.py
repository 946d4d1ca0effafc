"""Steps in three parts of any optimizer that only orthogonalizes with whole tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from emerging_optimizers import utils
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer

from megaopt_core.errors import PluginError
from megaopt_core.params import ParamInfo
from megaopt_muon.pieces.planner import stand_in

__all__ = ["OrthogonalizedSplit", "groups_of"]

_OVERRIDDEN = ("step", "pre_weight_update_fn_inplace", "post_weight_update_fn_inplace")


class OrthogonalizedSplit:
    """The step of an emerging-optimizers class, split where it orthogonalizes.

    The class's own `step` runs on the slices; what it hands to `orthogonalize` is the update. Where `orthogonalize`
    reads attributes of the parameter, it finds `param_info` and no others.

    Args:
        inner: an `OrthogonalizedOptimizer`.

    Raises:
        PluginError: the class does more than to orthogonalize with whole tensors: see :meth:`refusal`.

    Example:
        >>> from emerging_optimizers.orthogonalized_optimizers import Muon
        >>> weight = torch.nn.Parameter(torch.zeros(4, 8))
        >>> weight.grad = torch.eye(4, 8)
        >>> split = OrthogonalizedSplit(Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=False))
        >>> (update,) = split.local_updates([weight])
        >>> round(update[0, 0].item(), 6)
        0.1
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        reason = self.refusal(type(inner))
        if reason is not None:
            raise PluginError(f"the step of {type(inner).__name__} cannot be split: {reason}")
        self.inner: Any = inner

    @staticmethod
    def refusal(optimizer_cls: type) -> str | None:
        """Return why a class cannot be split here, None when it can.

        Args:
            optimizer_cls: the class.

        Example:
            >>> from emerging_optimizers.orthogonalized_optimizers import Muon, MuonHyperball
            >>> OrthogonalizedSplit.refusal(Muon) is None
            True
            >>> OrthogonalizedSplit.refusal(MuonHyperball)
            'it has its own pre_weight_update_fn_inplace, post_weight_update_fn_inplace, which may see whole tensors'
        """
        if not issubclass(optimizer_cls, OrthogonalizedOptimizer):
            return "it is no OrthogonalizedOptimizer of emerging-optimizers"
        own = [
            name
            for name in _OVERRIDDEN
            # torch wraps `step` of every class anew.
            if inspect.unwrap(getattr(optimizer_cls, name))
            is not inspect.unwrap(getattr(OrthogonalizedOptimizer, name))
        ]
        return f"it has its own {', '.join(own)}, which may see whole tensors" if own else None

    def init_state(self, params: Sequence[torch.Tensor]) -> None:
        """Make the state of slices, as the class makes it.

        Args:
            params: slices.
        """
        with _holding(self.inner, params):
            for group in self.inner.param_groups:
                self.inner._init_group(group, skip_non_grad_params=False)

    def local_updates(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the class would orthogonalize.

        Args:
            params: slices with gradients.
        """
        captured: dict[int, torch.Tensor] = {}

        def capture(p: torch.Tensor, grad: torch.Tensor, **_: Any) -> torch.Tensor:
            captured[id(p)] = grad
            # The step adds it times -lr: -0.0, which changes no bit.
            return grad.new_zeros(()).expand_as(grad)

        self.inner.orthogonalize = capture
        try:
            with _holding(self.inner, params):
                self.inner.step()
        finally:
            del self.inner.orthogonalize
        return [captured[id(param)] for param in params]

    def transform(self, updates: Sequence[torch.Tensor], infos: Sequence[ParamInfo]) -> list[torch.Tensor]:
        """Return orthogonalized updates.

        Args:
            updates: whole matrices.
            infos: what each is.
        """
        done = []
        for update, info in zip(updates, infos, strict=True):
            settings = {
                key: value for key, value in self.inner.param_groups[info.group].items() if key != "params"
            }
            with utils.fp32_matmul_precision(self.inner.fp32_matmul_prec):
                done.append(self.inner.orthogonalize(stand_in(update, info), update, **settings))
        return done

    def apply(self, params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]) -> None:
        """Subtract the updates times the learning rate.

        Args:
            params: slices.
            updates: of their shapes.
        """
        group_of = groups_of(self.inner)
        for param, update in zip(params, updates, strict=True):
            param.add_(update.to(param.dtype), alpha=-group_of[id(param)]["lr"])


def groups_of(inner: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return the group of every parameter by the parameter's identity.

    Args:
        inner: an optimizer.
    """
    return {id(param): group for group in inner.param_groups for param in group["params"]}


@contextmanager
def _holding(inner: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the groups of an optimizer hold only some of their parameters inside the block."""
    chosen = {id(param) for param in params}
    members = [group["params"] for group in inner.param_groups]
    try:
        for group in inner.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        yield
    finally:
        for group, all_of_it in zip(inner.param_groups, members, strict=True):
            group["params"] = all_of_it
