"""Small runs of an optimizer class on parameters of chosen shapes, with gradients that are hard to step."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from attrs import frozen

__all__ = ["Outcome", "Trial", "gradient", "quiet", "reseed", "start"]

LRS = (1.0, 0.5, 2.0, 0.25)
"""What the learning rate is multiplied by, step after step."""


STEADY_STEPS = 12
"""How many of the first gradients point one way."""


def start(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return first values of a parameter.

    Args:
        shape: its shape.
        seed: for the values.
    """
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=1024)
def gradient(shape: tuple[int, ...], seed: int, step: int) -> torch.Tensor:
    """Return a gradient whose elements are of very different sizes, with zeros, and far larger in its first half.

    The first ones point one way, which is what makes a class grow that estimates its own rate; the others any way.
    They are drawn once: a class that is tried with many settings meets the same ones. Who may write to it steps a copy.

    Args:
        shape: of the parameter.
        seed: for the values.
        step: gradients differ from step to step.
    """
    steady = step < STEADY_STEPS
    generator = torch.Generator().manual_seed(1 + 1000 * seed + (0 if steady else step))
    values = torch.randn(tuple(shape), generator=generator)
    values = values * 10.0 ** (4.0 * torch.rand(tuple(shape), generator=generator) - 4.0)
    values = values * (torch.rand(tuple(shape), generator=generator) > 0.1)
    flat = values.view(-1)
    flat[: flat.numel() // 2] *= 30.0
    return values * (1.0 + 0.1 * step) if steady else values


@frozen(eq=False)
class Outcome:
    """What a run left.

    Args:
        params: values of the parameters.
        states: state of each.
        group_keys: keys of the first group and what they hold; parameters left out.
    """

    params: list[torch.Tensor]
    states: list[dict[str, Any]]
    group_keys: dict[str, Any]


@frozen
class Trial:
    """A class with the arguments that it is made with.

    Args:
        cls: the optimizer class.
        kwargs: constructor arguments; a learning rate and weight decay among them, where it has any.
        presets: what every group is given before the first step.
    """

    cls: Callable[..., torch.optim.Optimizer]
    kwargs: Mapping[str, Any]
    presets: Mapping[str, Any]

    def run(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        grads: Callable[[int], Sequence[Sequence[torch.Tensor | None]]],
        steps: int,
        rates: Sequence[float] = LRS,
        luck: int = 0,
    ) -> Outcome:
        """Step parameters that begin with these values, and return what is left.

        Args:
            groups: first values of the parameters of each group.
            grads: the step to the gradients, in the same order; None: it has none.
            steps: how many.
            rates: what the learning rate is multiplied by, step after step.
            luck: as for :func:`quiet`.
        """
        with quiet(luck):
            params = [[torch.nn.Parameter(value.clone()) for value in group] for group in groups]
            optimizer = self.make([{"params": group} for group in params])
            lrs = [group.get("lr") for group in optimizer.param_groups]
            for step in range(steps):
                for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                    if lr is not None:
                        group["lr"] = lr * rates[step % len(rates)]
                for members, given in zip(params, grads(step), strict=True):
                    for param, grad in zip(members, given, strict=True):
                        param.grad = None if grad is None else grad.clone()
                optimizer.step()
            flat = [param for group in params for param in group]
            keys = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            return Outcome(
                [param.detach() for param in flat], [dict(optimizer.state[param]) for param in flat], keys
            )

    def make(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return an optimizer that is ready to step.

        Args:
            groups: groups of parameters.
        """
        optimizer = self.cls(groups, **copy.deepcopy(dict(self.kwargs)))
        for group in optimizer.param_groups:
            for key, value in self.presets.items():
                group.setdefault(key, copy.deepcopy(value))
        train = getattr(optimizer, "train", None)
        if callable(train):
            train()
        return optimizer


@contextmanager
def quiet(luck: int = 0) -> Iterator[None]:
    """Keep warnings and random numbers, also those of Python and numpy, as they were; inside they are seeded.

    Args:
        luck: seed of Python's and numpy's generators, of which ranks have their own: some classes toss coins in steps.
    """
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), None if numpy is None else numpy.random.get_state()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        reseed(luck)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy is not None:
                numpy.random.set_state(before[1])


def reseed(seed: int) -> None:
    """Seed what a class may draw from: torch's generator, Python's, and numpy's where somebody has imported it.

    Args:
        seed: the seed.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
