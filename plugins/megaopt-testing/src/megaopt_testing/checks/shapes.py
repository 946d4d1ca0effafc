"""Parameters of unusual shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megaopt_core.errors import MegaoptError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import DEFAULT_ALIGNMENT, Granularity, MatrixView
from megaopt_core.registry import get_registry
from megaopt_testing.long_run import built_few, step_few
from megaopt_testing.snapshot import params_of
from megaopt_testing.trial import Trial

__all__ = ["One", "check_shapes", "is_own", "step_of", "values_of"]

_STEPS = 8
_USUAL = (5,)
_LARGE = (130, 72)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (1, 8), (8, 1), (3, 4, 5), (4, 3, 2, 2))
_CLOSE = 1e-5


class One(nn.Module):
    """One parameter of given values, and a matrix beside it, so that matrix optimizers have something to step.

    Args:
        values: of the parameter, which takes their memory.
    """

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)
        self.beside = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(5)))
        for param in (self.weight, self.beside):
            if param.ndim > 1:
                param.matrix_view = MatrixView()  # type: ignore[attr-defined] # nothing shows what it is


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
    moves = usual is not None and not torch.equal(usual, values_of(_USUAL))
    for shape in _SHAPES:
        found = _stepped(trial, shape)
        if found is None:
            continue
        if not bool(found.isfinite().all()):
            trial.fail(
                f"a parameter of shape {shape} has values that are not finite after {_STEPS} steps with finite "
                "gradients. A standard deviation of one element, or a mean without the element itself, does not exist"
            )
        single = found.numel() == 1 and len(shape) < 2
        if single and moves and torch.equal(found, values_of(shape)):
            trial.fail(f"a parameter of shape {shape} does not move, but one of shape {_USUAL} does")
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
        trial.fail(f"a matrix of shape {_LARGE} does not move, but one of shape (6, 4) does")


def _require_element(trial: Trial, shape: tuple[int, ...], found: torch.Tensor, usual: torch.Tensor) -> None:
    first = usual.reshape(-1)[0]
    moved = (first - values_of(_USUAL)[0]).abs()
    if (found.reshape(-1)[0] - first).abs() > _CLOSE * moved + 1e-6 * first.abs():
        trial.fail(
            f"it is declared to work element by element, but a parameter of shape {shape} becomes "
            f"{found.item():.6g} where the same element of a vector becomes {first.item():.6g}"
        )


def values_of(shape: tuple[int, ...], seed: int = 3) -> torch.Tensor:
    """Return values of which the first is the same for every shape.

    Args:
        shape: of the values.
        seed: for them.
    """
    count = torch.Size(shape).numel()
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))[:count].reshape(shape)


def _stepped(trial: Trial, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return where a parameter of this shape goes; None where the optimizer does not take it."""
    torch.manual_seed(0)
    model = One(values_of(shape))
    try:
        built = trial.build(model, weight_decay=0.0)
    except MegaoptError:
        return None  # refused, in words
    if not is_own(trial, built):
        return None
    for step in range(_STEPS):
        model.weight.grad = values_of(shape, seed=10 + step)
        model.beside.grad = values_of((6, 4), seed=30 + step)
        step_of(trial, built, f"a parameter of shape {shape}")
    return model.weight.detach().clone()


def is_own(trial: Trial, built: MegatronOptimizer) -> bool:
    """Return whether the optimizer under test steps the parameter of given values.

    Args:
        trial: what is tried.
        built: an optimizer for a model `One`.
    """
    routing = built.routing
    return routing is not None and routing.params["weight"].spec.optimizer == trial.optimizer


def step_of(trial: Trial, built: MegatronOptimizer, of: str) -> None:
    """Take a step, which may be refused in words and raises nothing else.

    Args:
        trial: what is tried.
        built: the optimizer.
        of: what is stepped, for the message.

    Raises:
        ConformanceError: it raises something else.
    """
    try:
        built.step()
    except MegaoptError:
        raise
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        trial.fail(
            f"a step of {of} raises {type(error).__name__}: {error}. Step it, or refuse it in `accepts`"
        )
