"""What happens to a model after its optimizer was built is found and told."""

import gc
from collections.abc import Iterator

import pytest
import torch
from megaopt_testing.plugins import temporary_plugin

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python


class Plain:
    """One optimizer."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return it."""
        return {"plain": OptimizerEntry(torch.optim.SGD)}


class Model(torch.nn.Module):
    """An embedding and a head of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.head(self.embed(tokens))


@pytest.fixture
def built() -> Iterator[tuple[Model, MegatronOptimizer]]:
    """A model with its optimizer."""
    with temporary_plugin(Plain(), name="plain"):
        model = Model()
        yield model, build_optimizer(model, "plain", lr=0.1)


def test_an_unchanged_model_has_no_problems(built):
    """Nothing is found, also through wrappers."""
    model, optimizer = built
    assert optimizer.check() == optimizer.check(model) == optimizer.check(torch.nn.DataParallel(model)) == ()
    assert "PROBLEM" not in str(optimizer.report())


def test_a_tie_after_the_build_is_found_by_check_and_report(built):
    """The head's own parameter is no longer in the model."""
    model, optimizer = built
    model.head.weight = model.embed.weight
    assert optimizer.check(model) == (
        "'head.weight' was tied to 'embed.weight' after the build",
        "'head.weight' is stepped, but no longer in the model",
    )
    assert "PROBLEM: 'head.weight' was tied to 'embed.weight' after the build" in str(optimizer.report())


def test_shared_memory_after_the_build_is_found(built):
    """Two parameters over one memory would be stepped twice."""
    model, optimizer = built
    model.head.weight.data = model.embed.weight.data
    assert optimizer.check() == (
        "'embed.weight' and 'head.weight' share one memory now and would be stepped twice",
    )


def test_added_replaced_and_frozen_parameters_are_found(built):
    """Each gets its own sentence."""
    model, optimizer = built
    model.embed.weight.requires_grad_(False)
    model.extra = torch.nn.Parameter(torch.zeros(2))
    model.head.weight = torch.nn.Parameter(torch.zeros(5, 3))
    assert set(optimizer.check()) == {
        "'embed.weight' was frozen after the build; without a gradient it is left alone",
        "'extra' trains, but nothing steps it: it was added, replaced or unfrozen after the build",
        "'head.weight' trains, but nothing steps it: it was added, replaced or unfrozen after the build",
        "'head.weight' is stepped, but no longer in the model",
    }


def test_the_model_is_not_kept_alive():
    """An optimizer whose model is gone has nothing to compare with."""
    with temporary_plugin(Plain(), name="plain"):
        model = Model()
        optimizer = build_optimizer(model, "plain", lr=0.1)
        del model
        gc.collect()
        assert optimizer.check() == ()
