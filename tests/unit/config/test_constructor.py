"""Constructor arguments come from prefixed settings, then from core fields; nothing is dropped in silence."""

from collections.abc import Iterator

import pytest
import torch
from attrs import frozen
from megaopt_testing.plugins import temporary_plugin
from torch.optim.optimizer import ParamsT

from megaopt_core import OptimizerConfig, OptimizerEntry, hookimpl
from megaopt_core.config import constructor_kwargs
from megaopt_core.config._constructor import constructor_defaults, constructor_parameters
from megaopt_core.errors import ConfigurationError, PluginError


@frozen
class Settings:
    """One setting."""

    momentum: float = 0.25


@frozen
class Lost:
    """A setting that no constructor takes."""

    gone: float = 0.0


class Strict(torch.optim.SGD):
    """Needs a learning rate."""

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


FIRST = OptimizerEntry(Strict, settings=Settings, setting_prefixes=("first",))
SECOND = OptimizerEntry(torch.optim.SGD, setting_prefixes=("second", "first"))
LOSING = OptimizerEntry(torch.optim.SGD, settings=Lost, setting_prefixes=("losing",))


class Plugin:
    """The three."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return them."""
        return {"first": FIRST, "second": SECOND, "losing": LOSING}


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Register them."""
    with temporary_plugin(Plugin(), name="constructor_test"):
        yield


def test_prefixes_in_order_then_core_fields():
    """`second` has no momentum of its own and takes `first`'s; lr and weight decay come from the core."""
    config = OptimizerConfig(optimizer="second", lr=0.1, first_momentum=0.75)
    assert constructor_kwargs(SECOND, config) == {"lr": 0.1, "momentum": 0.75, "weight_decay": 0.01}


def test_settings_of_one_child_win():
    """An override's constructor setting replaces the configuration's."""
    config = OptimizerConfig(optimizer="first", lr=0.1)
    assert constructor_kwargs(FIRST, config, settings={"momentum": 0.5})["momentum"] == 0.5


def test_a_learning_rate_may_be_left_to_the_class_but_not_missing():
    """Without `lr` the class's own default holds; a class without one raises."""
    assert "lr" not in constructor_kwargs(SECOND, OptimizerConfig(optimizer="second"))
    with pytest.raises(ConfigurationError, match=r"^Strict needs a learning rate: set lr=\.\.\.$"):
        constructor_kwargs(FIRST, OptimizerConfig(optimizer="first"))


def test_a_setting_that_nothing_consumes_is_refused():
    """It would be accepted and ignored."""
    with pytest.raises(PluginError) as caught:
        constructor_kwargs(LOSING, OptimizerConfig(optimizer="losing", lr=0.1))
    assert str(caught.value) == (
        "setting 'losing_gone' is declared, but SGD has no constructor parameter 'gone'; give the entry a "
        "config_to_kwargs that consumes it"
    )


def test_defaults_and_parameters():
    """What groups keep, and what the constructor takes."""
    assert "momentum" in constructor_defaults(FIRST, {"lr": 0.1})
    assert list(constructor_parameters(Strict)) == ["lr", "momentum", "weight_decay"]
