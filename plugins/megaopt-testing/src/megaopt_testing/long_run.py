"""Many steps of a model with one matrix and one vector: for what happens only now and then, or ends after a while."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megaopt_core import MatrixView
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_testing.trial import Trial

__all__ = ["LONG", "Few", "built_few", "step_few"]

LONG = 120
"""Steps of a long run: more than the hundred that things are usually done after."""


class Few(nn.Module):
    """One matrix and one vector.

    Args:
        seed: for their values.
        shape: of the matrix.
    """

    def __init__(self, seed: int = 0, shape: tuple[int, int] = (6, 4)) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(shape, generator=chance))
        self.bias = nn.Parameter(torch.randn(5, generator=chance))
        self.weight.matrix_view = MatrixView()  # type: ignore[attr-defined] # nothing shows what it is


def built_few(trial: Trial, seed: int = 0, shape: tuple[int, int] = (6, 4)) -> tuple[Few, MegatronOptimizer]:
    """Return the model and its optimizer.

    Args:
        trial: the optimizer under test.
        seed: for the model's values.
        shape: of its matrix.
    """
    torch.manual_seed(0)
    model = Few(seed, shape)
    return model, trial.build(model)


def step_few(model: Few, optimizer: MegatronOptimizer, steps: Iterable[int]) -> None:
    """Take steps with gradients that depend on their number alone.

    Args:
        model: the model.
        optimizer: its optimizer.
        steps: their numbers.
    """
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=chance)
        optimizer.step()
