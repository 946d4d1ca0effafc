r"""Lion's update of one tensor, in one pass over memory.

.. math::
    p \leftarrow f p - \eta \operatorname{sign}(m + (1 - \beta_1)(g - m)), \qquad
    m \leftarrow m + (1 - \beta_2)(g - m)

where a cautious decay leaves a weight alone, `f = 1`, that the sign does not move towards zero.

Both ways to compute it do the same operations in the same order, each rounded to float32 (float64 for float64), and
round what is stored once: under cancellation the sign depends on the last bit. So a multiplication and an addition are
never one operation, `lerp` or a fused one, whose rounding differs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType, MappingProxyType
from typing import Any, Final

import torch
from attrs import field, frozen

__all__ = [
    "IN_A_CALL",
    "IN_CACHE",
    "Numbers",
    "Triple",
    "can_compile",
    "update_blockwise",
    "update_compiled",
    "update_together",
]

# A C++ compiler, and Triton for GPUs, may otherwise contract a product and a sum into one operation.
_EVERY_OPERATION_ROUNDED: Mapping[str, str | bool] = MappingProxyType(
    {"cpp.enable_floating_point_contract_flag": "off", "emulate_precision_casts": True}
)
IN_CACHE: Final = 1 << 16
"""Elements of a block: five blocks of float32 nearly fit a core's own cache."""
IN_A_CALL: Final = 16
"""Tensors of a compiled call: what it costs beside its work is then less than what memory costs."""

type Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A parameter, its gradient and its momentum."""


@frozen(eq=False)
class Numbers:
    """What updates multiply with, as tensors that are made once for all parameters of a step.

    Args:
        lr: learning rate; a tensor is not read by the host.
        keep: factor on the parameter: weight decay; the same.
        betas: `(beta1, beta2)`.
        cautious: decay only where update and weight agree in sign.
    """

    lr: float | torch.Tensor
    keep: float | torch.Tensor
    betas: tuple[float, float]
    cautious: bool = False
    _made: dict[torch.dtype | str, tuple[torch.Tensor, ...]] = field(factory=dict, init=False, repr=False)

    def of(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the factor on the parameter and the two weights of the gradient, in update and in momentum.

        Args:
            dtype: that is computed in.
        """
        made = self._made.get(dtype)
        if made is None:
            # As tensors: torch multiplies with them faster than with Python's numbers.
            weights = torch.tensor([1.0 - beta for beta in self.betas], dtype=dtype, device="cpu")
            kept = (
                self.keep.to(dtype)
                if isinstance(self.keep, torch.Tensor)
                else torch.tensor(self.keep, dtype=dtype, device="cpu")
            )
            made = self._made[dtype] = (kept, *weights.unbind())
        return made

    @property
    def device(self) -> torch.device:
        """Where :meth:`for_kernel` puts numbers: a kernel reads those of its own device without the host."""
        return self.lr.device if isinstance(self.lr, torch.Tensor) else torch.device("cpu")

    def for_kernel(self) -> tuple[torch.Tensor, ...]:
        """Return the learning rate and what :meth:`of` does, for a compiled kernel: it would compile in a number."""
        made = self._made.get("kernel")
        if made is None:
            values = (self.lr, self.keep, *(1.0 - beta for beta in self.betas))
            # `full` is a kernel, which a CUDA graph captures; a copy from the host is not.
            made = tuple(
                value.to(self.device, torch.float64)
                if isinstance(value, torch.Tensor)
                else torch.full((), value, dtype=torch.float64, device=self.device)
                for value in values
            )
            self._made["kernel"] = made
        return made


def update_blockwise(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, numbers: Numbers
) -> None:
    """Update parameter and momentum in place with plain torch operations.

    On a CPU block by block, so that every block is read from and written to memory once and stays in the cache between
    operations.

    Args:
        param: any shape and floating-point dtype.
        grad: its gradient, or that plus L2 decay.
        exp_avg: its momentum, possibly of another dtype.
        numbers: learning rate, decay and betas.

    Example:
        >>> p, m = torch.tensor([1.0, 1.0]), torch.zeros(2)
        >>> update_blockwise(p, torch.tensor([4.0, -4.0]), m, Numbers(lr=0.5, keep=1.0, betas=(0.5, 0.5)))
        >>> p.tolist(), m.tolist()
        ([0.5, 1.5], [2.0, -2.0])
    """
    tensors = (param, grad, exp_avg)
    if (
        param.device.type == "cpu"
        and param.numel() > IN_CACHE
        and all(tensor.is_contiguous() for tensor in tensors)
    ):
        runs = zip(*(tensor.view(-1).split(IN_CACHE) for tensor in tensors), strict=True)
    else:
        runs = zip(*((tensor,) for tensor in tensors), strict=True)
    wide = torch.promote_types(torch.promote_types(param.dtype, exp_avg.dtype), torch.float32)
    rate = numbers.lr.to(wide) if isinstance(numbers.lr, torch.Tensor) else numbers.lr
    for p, g, m in runs:
        _update(p, g, m, rate, *numbers.of(wide), cautious=numbers.cautious)


def update_together(
    params: list[torch.Tensor], grads: list[torch.Tensor], exp_avgs: list[torch.Tensor], numbers: Numbers
) -> None:
    """Update small tensors of float32 in as many calls as one takes, to the same bits.

    Args:
        params: tensors of any shapes, with not many more elements than :data:`IN_CACHE`.
        grads: one a parameter.
        exp_avgs: likewise.
        numbers: learning rate, decay and betas; none of them a tensor, and decay not cautious.

    Example:
        >>> p, m = torch.tensor([1.0, 1.0]), torch.zeros(2)
        >>> update_together([p], [torch.tensor([4.0, -4.0])], [m], Numbers(lr=0.5, keep=1.0, betas=(0.5, 0.5)))
        >>> p.tolist(), m.tolist()
        ([0.5, 1.5], [2.0, -2.0])
    """
    assert not isinstance(numbers.lr, torch.Tensor)  # noqa: S101 - what the caller promises
    keep, weight1, weight2 = numbers.of(torch.float32)
    differences = torch._foreach_sub(grads, exp_avgs)
    directions = torch._foreach_mul(differences, weight1)
    torch._foreach_add_(directions, exp_avgs)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(differences, weight2)
    torch._foreach_add_(exp_avgs, differences)
    torch._foreach_mul_(params, keep)
    torch._foreach_add_(params, directions, alpha=-numbers.lr)


@torch.no_grad()
def update_compiled(triples: Sequence[Triple], numbers: Numbers) -> None:
    """Update parameters and momenta in place with one call of a compiled kernel; the numbers are those of the others.

    Args:
        triples: parameter, gradient and momentum of each, of two elements or more, contiguous; on one device, with the
            dtypes of the first. There are as many kernels as lengths: one and :data:`IN_A_CALL`.
        numbers: learning rate, decay and betas.
    """
    kind = (triples[0][0].device, numbers.device, *(tensor.dtype for tensor in triples[0]))
    kernel = _kernel(len(triples), *kind, cautious=numbers.cautious)
    kernel([_flat(triple) for triple in triples], *numbers.for_kernel(), numbers.cautious)


@cache
def can_compile(device_type: str) -> bool:
    """Return whether torch.compile finds what it needs for this kind of device.

    Args:
        device_type: `"cpu"`, `"cuda"`...
    """
    if device_type == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)
    return importlib.util.find_spec("triton") is not None


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    lr: float | torch.Tensor,
    keep: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    *,
    cautious: bool,
) -> None:
    param, gradient, momentum = p.to(keep.dtype), g.to(keep.dtype), m.to(keep.dtype)
    difference = gradient - momentum
    direction = (difference * weight1).add_(momentum).sign_()
    momentum.add_(difference.mul_(weight2))
    if cautious:
        torch.where(direction * param >= 0, param * keep, param, out=param)
    else:
        param.mul_(keep)
    # The product is exact: fused or not, this rounds once.
    if isinstance(lr, torch.Tensor):
        param.sub_(direction.mul_(lr))
    else:
        param.add_(direction, alpha=-lr)
    for stored, computed in ((m, momentum), (p, param)):
        if stored is not computed:
            stored.copy_(computed)


def _flat(triple: Triple) -> Triple:
    """Return the tensors as flat memory, not as views: torch.compile would look at what they are views of."""
    param, grad, exp_avg = triple
    return param.view(-1).data, grad.view(-1).data, exp_avg.view(-1).data


def _fused(
    triples: Sequence[Triple],
    lr: torch.Tensor,
    keep: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    cautious: bool,
) -> None:
    for p, g, m in triples:
        param, gradient, momentum = p.float(), g.float(), m.float()
        difference = gradient - momentum
        direction = torch.sign(difference * weight1 + momentum)
        m.copy_(momentum + difference * weight2)
        shrunk = param * keep
        if cautious:
            shrunk = torch.where(direction * param >= 0, shrunk, param)
        p.copy_(shrunk - direction * lr)


@cache
def _kernel(
    length: int, device: torch.device, of_numbers: torch.device, *dtypes: torch.dtype, cautious: bool
) -> Callable[..., None]:
    """Return the update of so many triples in one call, compiled for numbers that lie on a device."""
    # With code of its own: at each call dynamo tries all that it has compiled of one code, until something fits.
    own = FunctionType(_fused.__code__.replace(), globals())
    options: dict[str, Any] = {**_EVERY_OPERATION_ROUNDED, "guard_filter_fn": _are_asked}
    kernel: Callable[..., None] = torch.compile(own, dynamic=True, options=options)
    # Sizes that are equal when it is compiled are taken to be equal always.
    sizes = range(1024, 1024 + 16 * length, 16)
    scratch = [tuple(torch.zeros(size, dtype=dtype, device=device) for dtype in dtypes) for size in sizes]
    nothing = Numbers(torch.zeros((), dtype=torch.float64, device=of_numbers), 1.0, (0.0, 0.0))
    kernel(scratch, *nothing.for_kernel(), cautious)
    return kernel


def _are_asked(guards: Sequence[Any]) -> list[bool]:
    """Return which conditions a call of a kernel is to check: not what each tensor is, which its key says.

    That is most of what a call costs. Sizes, where two were equal when it was compiled, are another condition.
    """
    return [guard.guard_type != "TENSOR_MATCH" for guard in guards]
