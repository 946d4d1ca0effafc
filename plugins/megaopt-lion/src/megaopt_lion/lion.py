"""Lion, with weight decay of four kinds."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import batched
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, override

import torch

from megaopt_core.errors import ConfigurationError
from megaopt_core.plugin_api import dense_gradient, require_argument, require_decoupled_if_cautious
from megaopt_lion.settings import WORTH_A_KERNEL as _WORTH_A_KERNEL
from megaopt_lion.settings import WORTH_A_KERNEL_ELSEWHERE as _WORTH_A_KERNEL_ELSEWHERE
from megaopt_lion.settings import WORTH_COMPILING as _WORTH_COMPILING
from megaopt_lion.update import (
    IN_A_CALL,
    IN_CACHE,
    Numbers,
    Triple,
    can_compile,
    update_blockwise,
    update_compiled,
    update_together,
)

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from megaopt_core import OptimizerConfig

__all__ = ["WEIGHT_DECAY_METHODS", "Lion", "init_state"]

WEIGHT_DECAY_METHODS: Mapping[str, Callable[[Any, float], Any]] = MappingProxyType(
    {  # of numbers, or of tensors of one element
        "decoupled": lambda lr, wd: 1.0 - lr * wd,
        "independent": lambda _, wd: 1.0 - wd,
        "palm": lambda lr, wd: 1.0 - lr * lr * wd,
        "l2": lambda _lr, _wd: 1.0,
    }
)
"""Factor on the parameter, of learning rate and weight decay; `l2` adds to the gradient instead."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""What a kernel takes; of subclasses, as DTensor, it would need to know where the memory is."""


class Lion(torch.optim.Optimizer):
    r"""Lion: the sign of an interpolation between momentum and gradient.

    .. math::
        p &\leftarrow p (1 - \eta \lambda) - \eta \operatorname{sign}(\beta_1 m + (1 - \beta_1) g) \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g

    for learning rate :math:`\eta` and weight decay :math:`\lambda`. A zero gradient on a zero momentum leaves only the
    weight decay.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate; about a third to a tenth of AdamW's.
        betas: `(beta1, beta2)`, each in [0, 1).
        weight_decay: weight decay coefficient; about three to ten times AdamW's.
        weight_decay_method: `"decoupled"`; `"independent"` (not times the learning rate), `"palm"` (times its square)
            or `"l2"` (added to the gradient, in a copy).
        cautious_weight_decay: decay only where update and weight agree in sign, as published by Chen et al.
            (arXiv:2510.12402); also a key of groups.
        compile: compile the update with torch.compile; None: for at least 16 million elements on a device for which
            there is a compiler.

    Raises:
        ConfigurationError: an argument is out of range (a `ValueError`), or a parameter complex.

    Source:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2 (arXiv:2302.06675).

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.0]))
        >>> optimizer = Lion([weight], lr=0.25, weight_decay=0.0)
        >>> weight.grad = torch.tensor([3.0, 0.1, 0.0])
        >>> _ = optimizer.step()
        >>> weight.tolist()
        [0.75, -1.25, 0.0]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.01,
        *,
        weight_decay_method: str = "decoupled",
        cautious_weight_decay: bool = False,
        compile: bool | None = None,  # noqa: A002 - torch's own word for it
    ) -> None:
        require_argument(float(lr) >= 0, "lr", lr, "at least 0")
        require_argument(
            len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "betas", betas, "two numbers in [0, 1)"
        )
        require_argument(weight_decay >= 0, "weight_decay", weight_decay, "at least 0")
        require_argument(
            weight_decay_method in WEIGHT_DECAY_METHODS,
            "weight_decay_method",
            weight_decay_method,
            f"one of {list(WEIGHT_DECAY_METHODS)}",
        )
        self.weight_decay_method = weight_decay_method
        self.compile = compile
        self._automatic: bool | None = None
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "cautious_weight_decay": cautious_weight_decay,
        }
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: as for torch's optimizers; it may say `cautious_weight_decay`.

        Raises:
            ConfigurationError: it is cautious, and weight decay is added to the gradient, or a parameter is complex.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.is_complex():
                del self.param_groups[-1]
                name = getattr(
                    getattr(param, "param_info", None), "name", f"one of shape {tuple(param.shape)}"
                )
                raise ConfigurationError(
                    f"Lion cannot step {name}: a complex number has no sign; an override gives it to another optimizer"
                )
        is_decoupled = self.weight_decay_method != "l2"
        require_decoupled_if_cautious(
            self.param_groups[-1], is_decoupled, "weight_decay_method='l2'", "another method"
        )

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was pickled or loaded, also what had no cautious groups yet.

        Args:
            state: of an optimizer.
        """
        super().__setstate__(state)
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

        Raises:
            GradientError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        # A rate on the device stays there: the step then waits for nothing, and may be a part of a CUDA graph.
        given, decay = group["lr"], group["weight_decay"]
        stays = isinstance(given, torch.Tensor) and given.device.type != "mps"  # which has no float64
        lr = given.double() if stays else float(given)
        keep = WEIGHT_DECAY_METHODS[self.weight_decay_method](lr, decay)
        adds_decay = self.weight_decay_method == "l2" and decay != 0.0
        numbers = Numbers(lr, keep, group["betas"], bool(group["cautious_weight_decay"]) and decay != 0.0)
        takes_together = not stays and not numbers.cautious
        small: list[Triple] = []
        elements = 0
        compiled: defaultdict[Hashable, list[Triple]] = defaultdict(list)
        for param in group["params"]:
            if param.grad is None:
                continue
            grad = dense_gradient("Lion", param)
            if adds_decay:
                grad = grad.add(param, alpha=decay)
            tensors = (param, grad, self._momentum(param))
            if takes_together and _is_small(*tensors):
                small.append(tensors)
                elements += param.numel()
                if elements >= IN_CACHE:
                    _update_small(small, numbers)
                    small, elements = [], 0
            elif not self._may_compile(*tensors):
                update_blockwise(*tensors, numbers)
            elif adds_decay:  # the gradient is a copy: there is one of them at a time
                self._update([tensors], numbers)
            else:
                compiled[param.device, *(tensor.dtype for tensor in tensors)].append(tensors)
        _update_small(small, numbers)
        for alike in compiled.values():
            for triples in batched(alike, IN_A_CALL):
                self._update(triples, numbers)

    def _may_compile(self, param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor) -> bool:
        return (
            self._compiles()
            and param.numel() >= (_WORTH_A_KERNEL if param.is_cpu else _WORTH_A_KERNEL_ELSEWHERE)
            and param.dtype is not torch.float64
            and (type(param) in _PLAIN and type(grad) in _PLAIN and type(exp_avg) in _PLAIN)
            and (param.is_contiguous() and grad.is_contiguous() and exp_avg.is_contiguous())
            and not grad.is_neg()  # whose memory has the other sign
        )

    def _update(self, triples: Sequence[Triple], numbers: Numbers) -> None:
        together = len(triples) == IN_A_CALL
        for some in [triples] if together else [[tensors] for tensors in triples]:
            if not (self._compiles() and self._update_compiled(some, numbers)):
                for tensors in some:
                    update_blockwise(*tensors, numbers)

    def _update_compiled(self, triples: Sequence[Triple], numbers: Numbers) -> bool:
        try:
            update_compiled(triples, numbers)
        except torch._dynamo.exc.TorchDynamoException as error:
            if self.compile:
                raise
            self._automatic = False
            warnings.warn(f"Lion goes on without torch.compile, which failed: {error}", stacklevel=3)
            return False
        return True

    def _compiles(self) -> bool:
        if self.compile is not None:
            return self.compile
        if self._automatic is None:
            params = [param for group in self.param_groups for param in group["params"]]
            large = sum(param.numel() for param in params) >= _WORTH_COMPILING
            self._automatic = large and all(
                can_compile(kind) for kind in {param.device.type for param in params}
            )
        return self._automatic

    def _momentum(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        momentum: torch.Tensor | None = state.get("exp_avg")
        if momentum is None:
            momentum = state["exp_avg"] = torch.zeros_like(param)
        return momentum


def _is_small(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor) -> bool:
    """Return whether what calls cost is most of what the update of a tensor does."""
    return (
        param.numel() < _WORTH_A_KERNEL
        and param.is_cpu
        and param.dtype is torch.float32
        and grad.dtype is torch.float32
        and exp_avg.dtype is torch.float32
    )


def _update_small(triples: Sequence[Triple], numbers: Numbers) -> None:
    if triples:
        params, grads, exp_avgs = (list(some) for some in zip(*triples, strict=True))
        update_together(params, grads, exp_avgs, numbers)


def init_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Make the momentum of every parameter, without a gradient and without moving a parameter.

    Args:
        optimizer: a Lion.
        config: not read.
    """
    del config
    for group in optimizer.param_groups:
        for param in group["params"]:
            if "exp_avg" not in optimizer.state[param]:
                optimizer.state[param]["exp_avg"] = torch.zeros_like(param)
