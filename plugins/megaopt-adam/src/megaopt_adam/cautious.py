"""torch's Adam and AdamW with cautious weight decay."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast, override

import torch

from megaopt_core.plugin_api import require_decoupled_if_cautious

__all__ = ["Adam", "AdamW"]

_BLOCK: Final = 1 << 16  # elements: blocks of float32 that stay in a core's cache between operations


def _extended(torch_cls: type) -> inspect.Signature:
    """Return the constructor's signature with `cautious_weight_decay`, by which arguments are looked up."""
    signature = inspect.signature(torch_cls)
    kind = inspect.Parameter.KEYWORD_ONLY
    own = inspect.Parameter("cautious_weight_decay", kind, default=False, annotation=bool)
    parameters = list(signature.parameters.values())
    # A package that wraps torch's constructor may leave `*args, **kwargs` of it: nothing stands behind these.
    is_open = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - is_open, own)
    return signature.replace(parameters=parameters)


class _Cautious(torch.optim.Adam):
    """What Adam and AdamW share: groups with `cautious_weight_decay` decay before torch's step, which then does not."""

    def __init__(self, *args: Any, cautious_weight_decay: bool = False, **kwargs: Any) -> None:
        self._is_cautious = bool(cautious_weight_decay)
        super().__init__(*args, **kwargs)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: as for torch's optimizers; it may say `cautious_weight_decay`.

        Raises:
            ConfigurationError: it is cautious, and weight decay is added to the gradient.
        """
        self.defaults.setdefault("cautious_weight_decay", self._is_cautious)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        require_decoupled_if_cautious(
            group, group["decoupled_weight_decay"], "decoupled_weight_decay=False", "decoupled weight decay"
        )

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was pickled or loaded, also from torch's own class.

        Args:
            state: of an optimizer.
        """
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group.setdefault("cautious_weight_decay", False)

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the loss again; called once, with gradients enabled.

        Returns:
            What the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _shrunk(self.param_groups, self.state, getattr(self, "found_inf", None)):
            _torch_step(self)
        return loss


class Adam(_Cautious):
    r"""`torch.optim.Adam`, whose decoupled weight decay may be cautious.

    With `cautious_weight_decay`, a weight shrinks only where the update moves it towards zero or not at all:

    .. math::
        p \leftarrow p - \eta \lambda \, [m p \ge 0] \, p

    for the momentum `m` after this step's gradient, whose sign is that of the update. Without it every step is torch's.

    Args:
        *args: as for `torch.optim.Adam`.
        cautious_weight_decay: decay only where update and weight agree in sign; also a key of groups.
        **kwargs: as for `torch.optim.Adam`.

    Raises:
        ConfigurationError: it is cautious, and weight decay is added to the gradient (a `ValueError`).

    Source:
        Chen et al., "Cautious Weight Decay" (arXiv:2510.12402).

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> decay = {"weight_decay": 0.5, "decoupled_weight_decay": True, "cautious_weight_decay": True}
        >>> optimizer = Adam([weight], lr=0.1, **decay)
        >>> weight.grad = torch.tensor([1.0, 1.0])
        >>> _ = optimizer.step()
        >>> [round(value, 4) for value in weight.tolist()]
        [0.85, -1.1]
    """

    __signature__ = _extended(torch.optim.Adam)


class AdamW(_Cautious, torch.optim.AdamW):
    """`torch.optim.AdamW`, whose weight decay may be cautious: see :class:`Adam`.

    Args:
        *args: as for `torch.optim.AdamW`.
        cautious_weight_decay: decay only where update and weight agree in sign; also a key of groups.
        **kwargs: as for `torch.optim.AdamW`.
    """

    __signature__ = _extended(torch.optim.AdamW)


def _torch_step(optimizer: torch.optim.Adam) -> None:
    # torch wraps `step` of every class to run hooks; those of this object run around the outer one.
    cast("Callable[[torch.optim.Adam], None]", inspect.unwrap(torch.optim.Adam.step))(optimizer)


@contextmanager
def _shrunk(
    groups: list[dict[str, Any]], states: dict[torch.Tensor, Any], noop: torch.Tensor | None
) -> Iterator[None]:
    """Decay the weights of cautious groups, unless the device says not to; keep torch from doing so in the block."""
    held: list[tuple[dict[str, Any], float]] = []
    try:
        for group in groups:
            decay = group["weight_decay"]
            if not (group["cautious_weight_decay"] and decay):
                continue
            held.append((group, decay))
            keep = 1.0 - group["lr"] * decay
            if noop is not None:
                keep = torch.where(noop == 1.0, 1.0, keep)
            for param in group["params"]:
                if param.grad is not None:
                    _shrink(param, states[param].get("exp_avg"), group, keep)
            group["weight_decay"] = 0.0
        yield
    finally:
        for group, decay in held:
            group["weight_decay"] = decay


def _shrink(
    param: torch.Tensor, exp_avg: torch.Tensor | None, group: dict[str, Any], keep: float | torch.Tensor
) -> None:
    grad = param.grad
    assert grad is not None  # noqa: S101 - the caller selects those that have one
    beta1 = group["betas"][0]
    tensors = [param, grad, torch.zeros_like(param) if exp_avg is None else exp_avg]
    if param.is_complex():
        tensors = [torch.view_as_real(tensor) for tensor in tensors]
    for p, g, m in _blocks(tensors):
        momentum = m * beta1 + (g if not group["maximize"] else -g) * (1 - beta1)
        # The sign, so that no product becomes 0 because it is small.
        torch.where(torch.sign(momentum) * p >= 0, p * keep, p, out=p)


def _blocks(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape into pieces that stay in a processor's cache; an accelerator takes all at once."""
    if tensors[0].device.type == "cpu" and all(tensor.is_contiguous() for tensor in tensors):
        return zip(*(tensor.view(-1).split(_BLOCK) for tensor in tensors), strict=True)
    return iter([tuple(tensors)])
