"""Frameworks that hand over parameters alone: the model is found, or an error says which door works."""

from collections.abc import Iterator

import pytest
from megaopt_fsdp import build_from_params
from torch import nn

from megaopt_core import OptimizerEntry, hookimpl
from megaopt_core.errors import ConfigurationError

pytest.importorskip("megaopt_testing")
import torch
from megaopt_testing import temporary_plugin

pytestmark = pytest.mark.any_python


class Plain:
    """Offers torch's SGD."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return it by name."""
        return {"plain": OptimizerEntry(torch.optim.SGD)}


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Bring the optimizer."""
    with temporary_plugin(Plain(), name="plain"):
        yield


def test_the_innermost_module_with_just_these_parameters_is_the_model() -> None:
    """Wrappers around it, parts of it and other models are not; frozen parameters need not be given."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    wrapper, stranger = nn.ModuleDict({"net": model}), nn.Linear(3, 2)
    trained = [param for param in model.parameters() if param.requires_grad]
    for params in (trained, iter(model.parameters()), [{"params": trained}]):
        optimizer = build_from_params(params, "plain", lr=0.1)
        assert list(optimizer.names.values()) == ["0.weight", "1.weight", "1.bias"]
    assert wrapper["net"] is model
    assert stranger.weight.grad is None


def test_a_part_of_a_model_is_refused() -> None:
    """The rest would not be trained, and nobody would say so."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    params = [model[0].weight, model[1].weight]
    with pytest.raises(ConfigurationError, match=r"Sequential trains 0\.bias, 1\.bias too"):
        build_from_params(params, "plain", lr=0.1)


def test_parameters_of_no_module_are_refused() -> None:
    """Their roles cannot be seen."""
    with pytest.raises(ConfigurationError, match="1 parameters that train were given, and 0 living modules"):
        build_from_params([nn.Parameter(torch.ones(2, 2))], "plain", lr=0.1)


def test_groups_with_settings_are_refused() -> None:
    """Overrides say that."""
    model = nn.Linear(3, 2)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    with pytest.raises(ConfigurationError, match="a group of parameters brings weight_decay"):
        build_from_params(groups, "plain", lr=0.1)
