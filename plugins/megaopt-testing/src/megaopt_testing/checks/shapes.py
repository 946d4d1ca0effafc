"""Parameters of unusual shapes, and of unusual order in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megaopt_core.errors import MegaoptError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import DEFAULT_ALIGNMENT, Granularity
from megaopt_core.registry import get_registry
from megaopt_testing.trial import Trial

__all__ = ["check_shapes", "check_strides"]

_STEPS = 8
_USUAL = (5,)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (1, 8), (8, 1))
_CLOSE = 1e-5
_SAME_WAY = 0.05
"""Products of tensors in another order of memory may round otherwise, in bf16 too; a wrong order goes elsewhere."""


class _One(nn.Module):
    """One parameter of given values, and a matrix beside it, so that matrix optimizers have something to step."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)
        self.beside = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(5)))
        for param in (self.weight, self.beside):
            if param.ndim > 1:
                param.use_muon = True  # type: ignore[attr-defined] # nothing calls it, so what it is is said


def check_shapes(optimizer: str, **settings: Any) -> None:
    """Numbers, single elements, single rows and single columns are stepped to finite values, or refused in words.

    A number moves as a vector does. Where the optimizer works element by element, not by blocks of them, it moves as
    that element of a vector.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration; weight decay is switched off.

    Raises:
        ConformanceError: a step raises, ends in values that are not finite, or leaves a number where it was.
    """
    trial = Trial(optimizer, settings)
    built = trial.build(trial.model())
    entry = get_registry().optimizer(optimizer).configured(built.config)
    usual = _stepped(trial, _USUAL)
    moves = usual is not None and not torch.equal(usual, _values(_USUAL))
    for shape in _SHAPES:
        found = _stepped(trial, shape)
        if found is None:
            continue
        if not bool(found.isfinite().all()):
            trial.fail(
                f"a parameter of shape {shape} has values that are not finite after {_STEPS} steps with finite "
                "gradients. A standard deviation, or a mean without the element itself, does not exist there"
            )
        single = found.numel() == 1 and len(shape) < 2
        if single and moves and torch.equal(found, _values(shape)):
            trial.fail(f"a parameter of shape {shape} stays where it was, and one of shape {_USUAL} moves")
        alone = entry.granularity is Granularity.ELEMENT and entry.alignment <= DEFAULT_ALIGNMENT
        if single and usual is not None and alone:
            _require_element(trial, shape, found, usual)


def _require_element(trial: Trial, shape: tuple[int, ...], found: torch.Tensor, usual: torch.Tensor) -> None:
    first = usual.reshape(-1)[0]
    moved = (first - _values(_USUAL)[0]).abs()
    if (found.reshape(-1)[0] - first).abs() > _CLOSE * moved + 1e-6 * first.abs():
        trial.fail(
            f"it is declared to work element by element, and a parameter of shape {shape} goes to {found.item():.6g}, "
            f"the same element of a vector to {first.item():.6g}"
        )


def _values(shape: tuple[int, ...], seed: int = 3) -> torch.Tensor:
    """Return values of which the first is the same for every shape."""
    count = torch.Size(shape).numel()
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))[:count].reshape(shape)


def _stepped(trial: Trial, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return where a parameter of this shape goes; None where the optimizer does not take it."""
    torch.manual_seed(0)
    model = _One(_values(shape))
    try:
        built = trial.build(model, weight_decay=0.0)
    except MegaoptError:
        return None  # refused, in words
    if not _is_own(trial, built):
        return None
    for step in range(_STEPS):
        model.weight.grad = _values(shape, seed=10 + step)
        model.beside.grad = _values((6, 4), seed=30 + step)
        _step(trial, built, f"a parameter of shape {shape}")
    return model.weight.detach().clone()


def _is_own(trial: Trial, built: MegatronOptimizer) -> bool:
    routing = built.routing
    return routing is not None and routing.params["weight"].spec.optimizer == trial.optimizer


def _step(trial: Trial, built: MegatronOptimizer, of: str) -> None:
    try:
        built.step()
    except MegaoptError:
        raise
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        trial.fail(
            f"a step of {of} raises {type(error).__name__}: {error}. Step it, or let `accepts` refuse it"
        )


_ORDERS: tuple[tuple[str, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("a transposed matrix", (12, 8), lambda values: values.t().contiguous().t()),
    (
        "a channels-last kernel",
        (4, 3, 2, 2),
        lambda values: values.contiguous(memory_format=torch.channels_last),
    ),
)


def check_strides(optimizer: str, **settings: Any) -> None:
    """The order of elements in memory does not matter: a transposed matrix steps as a plain one.

    So does a plain parameter whose gradient lies in another order, as the backward pass of a product leaves it, or
    has one element for all, as that of a sum does.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a step raises, or goes elsewhere.
    """
    trial = Trial(optimizer, settings)
    for what, shape, order in _ORDERS:
        start = _values(shape)
        ends = []
        for change in (torch.Tensor.contiguous, order):
            torch.manual_seed(0)
            model = _One(change(start.clone()))
            try:
                built = trial.build(model)
            except MegaoptError:
                break
            if not _is_own(trial, built):
                break
            for step in range(3):
                model.weight.grad = change(_values(shape, seed=10 + step))
                model.beside.grad = _values((6, 4), seed=30 + step)
                _step(trial, built, f"{what}, whose elements are in another order in memory,")
            ends.append(model.weight.detach().clone())
        if len(ends) == 2 and not (ends[1] - ends[0]).norm() <= _SAME_WAY * (ends[0] - start).norm():
            trial.fail(
                f"{what} goes elsewhere than the same values in plain order. Use `reshape`, not `view` or memory "
                "itself, and make state with `zeros_like(param)`"
            )
    _require_any_gradient(trial)


_GRADIENTS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("lies in transposed order", lambda values: values.t().contiguous().t()),
    ("has one element for all", lambda values: values.reshape(-1)[0].expand(values.shape)),
)


def _require_any_gradient(trial: Trial) -> None:
    """Step a plain matrix with gradients of other strides, and with contiguous ones of the same values."""
    shape = (12, 8)
    start = _values(shape)
    for what, order in _GRADIENTS:
        ends = []
        for change in (lambda values, order=order: order(values).contiguous(), order):
            torch.manual_seed(0)
            model = _One(start.clone())
            built = trial.build(model)
            for step in range(3):
                model.weight.grad = change(_values(shape, seed=10 + step))
                model.beside.grad = _values((6, 4), seed=30 + step)
                _step(trial, built, f"a matrix whose gradient {what}")
            ends.append(model.weight.detach().clone())
        if not (ends[1] - ends[0]).norm() <= _SAME_WAY * (ends[0] - start).norm():
            trial.fail(
                f"a matrix whose gradient {what} goes elsewhere than with the same values in plain order. Use "
                "`reshape` and plain arithmetic on `param.grad`, not `view` or memory itself"
            )
