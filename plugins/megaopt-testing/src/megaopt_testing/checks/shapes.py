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
from megaopt_testing.long_run import built_few, step_few
from megaopt_testing.snapshot import params_of, same_bits
from megaopt_testing.trial import Trial

__all__ = ["check_shapes", "check_strides"]

_STEPS = 8
_USUAL = (5,)
_LARGE = (130, 72)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (1, 8), (8, 1), (3, 4, 5), (4, 3, 2, 2))
_CLOSE = 1e-5
_AROUND = 7
"""Elements on both sides of a parameter in larger memory."""
_UNTOUCHED = 123.0
"""What they hold."""
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
    """Numbers, single elements, rows and columns, kernels and a large matrix step to finite values, or are refused.

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
    _require_large(trial)
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


def _require_large(trial: Trial) -> None:
    """Step a matrix that is larger than any in the small GPT, and look whether it moves as small ones do."""
    moved = {}
    for shape in ((6, 4), _LARGE):
        model, built = built_few(trial, shape=shape)
        before = params_of(built)
        own = trial.own_params(built)
        step_few(model, built, range(2))
        moved[shape] = {name for name in own if not torch.equal(own[name].detach(), before[name])}
    left = moved[6, 4] - moved[_LARGE]
    if left:
        trial.fail(f"a matrix of shape (6, 4) moves, one of shape {_LARGE} stays where it was")


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


def _in_the_middle(values: torch.Tensor) -> torch.Tensor:
    """Return the values as a part of larger memory, as flat buffers of parameters are."""
    around = torch.full((values.numel() + 2 * _AROUND,), _UNTOUCHED)
    inside = around[_AROUND : _AROUND + values.numel()].view(values.shape)
    return inside.copy_(values)


_ORDERS: tuple[tuple[str, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("a transposed matrix", (12, 8), lambda values: values.t().contiguous().t()),
    ("a part of larger memory", (12, 8), _in_the_middle),
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
            given = model.weight.untyped_storage()
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
            if change is _in_the_middle:
                _require_untouched(trial, model.weight, given)
        if len(ends) == 2 and not (ends[1] - ends[0]).norm() <= _SAME_WAY * (ends[0] - start).norm():
            trial.fail(
                f"{what} goes elsewhere than the same values in plain order. Use `reshape`, not `view` or memory "
                "itself, and make state with `zeros_like(param)`"
            )
    _require_any_gradient(trial)


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
            "a step of a part of larger memory writes beside it. Write into the parameter, not into its memory"
        )


_GRADIENTS: tuple[tuple[str, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("lies in transposed order", (12, 8), lambda values: values.t().contiguous().t()),
    ("has one element for all", (12, 8), lambda values: values.reshape(-1)[0].expand(values.shape)),
    ("is a part of larger memory", (12, 8), _in_the_middle),
    (
        "lies in channels-last order",
        (4, 3, 2, 2),
        lambda values: values.contiguous(memory_format=torch.channels_last),
    ),
)


def _require_any_gradient(trial: Trial) -> None:
    """Step a plain tensor with gradients of other strides, and with contiguous ones of the same values."""
    for what, shape, order in _GRADIENTS:
        start, ends = _values(shape), []
        for change in (lambda values, order=order: order(values).contiguous(), order):
            torch.manual_seed(0)
            model = _One(start.clone())
            try:
                built = trial.build(model)
            except MegaoptError:
                break  # refused, in words
            for step in range(3):
                given = model.weight.grad = change(_values(shape, seed=10 + step))
                model.beside.grad = _values((6, 4), seed=30 + step)
                _step(trial, built, f"a tensor whose gradient {what}")
                if model.weight.grad is not given or not same_bits(
                    given, change(_values(shape, seed=10 + step))
                ):
                    trial.fail(
                        f"a step of a tensor whose gradient {what} changes that gradient, or puts another in its "
                        "place. Work on a copy"
                    )
            ends.append(model.weight.detach().clone())
        if len(ends) == 2 and not (ends[1] - ends[0]).norm() <= _SAME_WAY * (ends[0] - start).norm():
            trial.fail(
                f"a tensor whose gradient {what} goes elsewhere than with the same values in plain order. Use "
                "`reshape` and plain arithmetic on `param.grad`, not `view` or memory itself"
            )
