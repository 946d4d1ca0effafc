"""The matrices of a model that Muon would step, and the width of the model."""

from __future__ import annotations

from collections import Counter

from attrs import frozen

from megaopt_core import OptimizerConfig, route
from megaopt_tools.cli.output import print_beside
from megaopt_tools.errors import CommandError
from megaopt_tools.inspection.factories import build_model

__all__ = ["ModelSizes", "model_sizes"]


@frozen
class ModelSizes:
    """Sizes of a model.

    Args:
        factory: what makes it.
        parameters: how many parameters each optimizer steps.
        elements: how many elements they have.
        width: the inputs that most elements of matrices have.
    """

    factory: str
    parameters: dict[str, int]
    elements: dict[str, int]
    width: int

    def __str__(self) -> str:
        shares = ", ".join(
            f"{name} steps {count} parameters ({self.elements[name]:,} elements)"
            for name, count in self.parameters.items()
        )
        return f"{self.factory}: width {self.width}; {shares}"


def model_sizes(factory: str, device: str) -> ModelSizes:
    """Return the sizes of the model that a factory makes.

    Args:
        factory: `module:factory` or `file.py:factory`.
        device: where to make it.

    Raises:
        CommandError: it has no matrix for Muon.
        ConfigurationError: it cannot be made.
    """
    with print_beside():  # what a model's own code prints is no part of the answer
        routing = route(OptimizerConfig(optimizer="muon", lr=1.0), build_model(factory, device))
    parameters: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    widths: Counter[int] = Counter()
    for entry in routing.params.values():
        optimizer = entry.spec.optimizer
        parameters[optimizer] += 1
        elements[optimizer] += entry.shard.numel
        if optimizer == "muon":
            widths[entry.local_shape[1]] += entry.shard.numel
    if not widths:
        raise CommandError(f"{factory}: the model has no matrix that Muon would step")
    return ModelSizes(factory, dict(parameters), dict(elements), widths.most_common(1)[0][0])
