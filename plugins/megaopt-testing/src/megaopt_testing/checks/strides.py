"""Parameters and gradients of unusual order in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megaopt_core.errors import MegaoptError
from megaopt_testing.checks.shapes import One, is_own, step_of, values_of
from megaopt_testing.snapshot import same_bits
from megaopt_testing.trial import Trial

__all__ = ["check_strides"]

type _Change = Callable[[torch.Tensor], torch.Tensor]

_STEPS = 3
_AROUND = 7
"""Elements on both sides of a parameter in larger memory."""
_UNTOUCHED = 123.0
"""What they hold."""
_SAME_WAY = 0.05
"""Part of the way that products in another order of memory may make, as they round otherwise, in bf16 too."""
_ROUNDINGS = (1, 2, 3)
"""Seeds of the roundings that are tried where an optimizer goes further than that."""
_UNLIKE = 3.0
"""How many times as far as the furthest of them it goes where a wrong order takes it."""


def check_strides(optimizer: str, **settings: Any) -> None:
    """The order of elements in memory does not matter: a transposed matrix steps as a plain one.

    So does a plain parameter whose gradient lies in another order, as the backward pass of a product leaves it, or
    has one element for all, as that of a sum does.

    Products round otherwise in another order. Where that takes steps elsewhere, as they do that begin in bases which
    rounding decides, the way is compared with the one that gradients take it that differ in their last bit.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a step raises, goes elsewhere, changes a gradient, or writes beside a parameter.
    """
    trial = Trial(optimizer, settings)
    for what, shape, order in _ORDERS:
        of = f"{what}, whose elements are in another order in memory,"
        ends = [_end(trial, of, shape, each, each) for each in (torch.Tensor.contiguous, order)]
        _require_same_way(
            trial,
            shape,
            ends,
            f"{what} gets other values than in plain order. Use `reshape`, not `view` or raw memory, and "
            "make state with `zeros_like(param)`",
        )
    for what, shape, order in _GRADIENTS:
        plain: _Change = lambda values, order=order: order(values).contiguous()  # type: ignore[misc] # noqa: E731
        of = f"a tensor whose gradient {what}"
        ends = [_end(trial, of, shape, torch.Tensor.contiguous, each) for each in (plain, order)]
        _require_same_way(
            trial,
            shape,
            ends,
            f"{of} gets other values than in plain order. Use `reshape` and plain arithmetic on "
            "`param.grad`, not `view` or raw memory",
            plain,
        )


def _transposed(values: torch.Tensor) -> torch.Tensor:
    return values.t().contiguous().t()


def _channels_last(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous(memory_format=torch.channels_last)


def _one_for_all(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1)[0].expand(values.shape)


def _in_the_middle(values: torch.Tensor) -> torch.Tensor:
    """Return the values as a part of larger memory, as flat buffers of parameters are."""
    around = torch.full((values.numel() + 2 * _AROUND,), _UNTOUCHED)
    inside = around[_AROUND : _AROUND + values.numel()].view(values.shape)
    return inside.copy_(values)


_ORDERS: tuple[tuple[str, tuple[int, ...], _Change], ...] = (
    ("a transposed matrix", (12, 8), _transposed),
    ("a part of larger memory", (12, 8), _in_the_middle),
    ("a channels-last kernel", (4, 3, 2, 2), _channels_last),
)
_GRADIENTS: tuple[tuple[str, tuple[int, ...], _Change], ...] = (
    ("lies in transposed order", (12, 8), _transposed),
    ("has one element for all", (12, 8), _one_for_all),
    ("is a part of larger memory", (12, 8), _in_the_middle),
    ("lies in channels-last order", (4, 3, 2, 2), _channels_last),
)


def _end(
    trial: Trial, of: str, shape: tuple[int, ...], order: _Change, gradient: _Change
) -> torch.Tensor | None:
    """Return where a parameter goes; None where it is refused, or another optimizer's.

    Args:
        trial: what is tried.
        of: what is stepped, for messages.
        shape: of the parameter.
        order: brings its values into an order.
        gradient: the same for gradients.
    """
    torch.manual_seed(0)
    model = One(order(values_of(shape)))
    given = model.weight.untyped_storage()
    try:
        built = trial.build(model)
    except MegaoptError:
        return None
    if not is_own(trial, built):
        return None
    for step in range(_STEPS):
        values = values_of(shape, seed=10 + step)
        grad = model.weight.grad = gradient(values)
        model.beside.grad = values_of((6, 4), seed=30 + step)
        step_of(trial, built, of)
        if model.weight.grad is not grad or not same_bits(grad, gradient(values)):
            trial.fail(f"a step of {of} changes its gradient, or replaces it. Work on a copy")
    if order is _in_the_middle:
        _require_untouched(trial, model.weight, given)
    return model.weight.detach().clone()


def _require_same_way(
    trial: Trial,
    shape: tuple[int, ...],
    ends: list[torch.Tensor | None],
    message: str,
    plain: _Change = torch.Tensor.contiguous,
) -> None:
    """Compare where a parameter goes in plain order and in another one.

    Args:
        trial: what is tried.
        shape: of the parameter.
        ends: where it went in plain order, and in the other one.
        message: what an author is told.
        plain: brings gradients into plain order.
    """
    one, other = ends
    if one is None or other is None:
        return
    way, apart = (one - values_of(shape)).norm(), (other - one).norm()
    if apart <= _SAME_WAY * way:
        return
    by_rounding = [
        _end(trial, "a tensor", shape, torch.Tensor.contiguous, _rounded(plain, seed)) for seed in _ROUNDINGS
    ]
    furthest = max(float((end - one).norm()) for end in by_rounding if end is not None)
    if not apart <= _UNLIKE * furthest:
        trial.fail(message)


def _rounded(gradient: _Change, seed: int) -> _Change:
    """Return what changes the last bit of half of the elements as well."""

    def change(values: torch.Tensor) -> torch.Tensor:
        chance = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed))
        plain = gradient(values)
        return torch.where(chance < 0.5, plain, plain * (1 + torch.finfo(plain.dtype).eps))

    return change


def _require_untouched(trial: Trial, weight: torch.Tensor, given: torch.UntypedStorage) -> None:
    """Look at what lies around a parameter in larger memory, unless something has moved it to memory of its own.

    Args:
        trial: what is tried.
        weight: the parameter.
        given: the memory that the check has made for it, held until now: its address is nobody else's.
    """
    storage = weight.untyped_storage()
    if storage.data_ptr() != given.data_ptr():
        return  # a buffer of a strategy, which lays it out as it likes
    whole = weight.detach().as_strided((storage.nbytes() // weight.element_size(),), (1,), 0)
    beside = torch.cat([whole[:_AROUND], whole[-_AROUND:]])
    if not torch.equal(beside, torch.full_like(beside, _UNTOUCHED)):
        trial.fail(
            "a step of a part of larger memory writes outside of the part. Write into the parameter, not "
            "into its memory"
        )
