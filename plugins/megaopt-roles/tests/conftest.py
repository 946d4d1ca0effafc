"""Optimizers for these tests, brought by a plugin of their own, and models made from source text."""

import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from megaopt_testing import temporary_plugin
from torch import nn

from megaopt_core import OptimizerEntry, hookimpl
from megaopt_core.params import Role, RoleDecision
from megaopt_core.routing import infer_roles

collect_ignore = ["unseen"]
"""Models as others wrote them: no tests of their own, and imported by one."""


class OwnLinear(nn.Module):
    """A linear layer of its own class."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kernel.t()


class StandIn:
    """Optimizers `plain` (element-wise) and `whole` (matrices, the rest to `plain`)."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return both."""
        return {
            "plain": OptimizerEntry(torch.optim.SGD),
            "whole": OptimizerEntry(
                torch.optim.SGD,
                granularity="tensor",
                accepts=lambda spec, view: None if view is not None else "not a matrix",
                fallback="plain",
            ),
        }


@pytest.fixture
def stand_in() -> Iterator[None]:
    """Register the two."""
    with temporary_plugin(StandIn(), name="stand-in"):
        yield


def _told(decision: RoleDecision) -> str:
    """Return a decision in one line: its role, `?` where any of it is in doubt, and the fields of its view."""
    view, parts = decision.view, [str(decision.role) + "?" * decision.uncertain]
    if view is not None:
        parts += [f"batch{view.batch_dims}"] if view.batch_dims else []
        parts += ["transposed"] if view.transposed else []
        parts += [f"first{view.first_dims}"] if view.first_dims != 1 else []
        side = "columns" if view.split_dim else "rows"
        parts += [f"{side}:{','.join(map(str, view.split_sizes))}"] if view.split_sizes else []
    return " ".join(parts)


def _names(text: str) -> Iterator[str]:
    """Yield the names of a list in which those that differ in a number are one: `up.weight layers.{0,1}.weight`."""
    for one in text.split():
        choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(re.split(r"[{}]", one))]
        yield from map("".join, itertools.product(*choices))


def _model(made: str, arguments: str, forward: str) -> nn.Module:
    """Return a model: how it is made, what its forward takes, and the body of that."""
    made, forward = (textwrap.indent(textwrap.dedent(text).strip(), " " * 8) for text in (made, forward))
    source = (
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"{made}\n    def forward(self, {arguments}):\n{forward}\n"
    )
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "OwnLinear": OwnLinear}
    exec(source, scope)  # noqa: S102 - the sources are those of the tests
    model: nn.Module = scope["Model"]()
    return model


@pytest.fixture
def check_model() -> Callable[..., None]:
    """Return a check of one model: what a forward with a batch shows of every parameter of two dimensions or more."""

    def check(made: str, arguments: str, forward: str, batch: str, roles: dict[str, str]) -> None:
        model = _model(made, arguments, forward)
        scope = {
            "ids": lambda *shape: torch.zeros(shape, dtype=torch.long),
            "x": lambda *shape: torch.zeros(shape),
        }
        example = eval(f"({batch},)", scope)  # noqa: S307 - the batches are those of the tests
        found = infer_roles(model, example=example)
        expected = {name: role for role, names in roles.items() for name in _names(names)}
        assert {name: _told(found[name]) for name in expected} == expected
        matrices = {name for name, said in found.items() if said.role is Role.MATRIX and not said.uncertain}
        assert matrices <= expected.keys()

    return check
