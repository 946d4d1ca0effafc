"""Names that no plugin lists are resolved by plugins when somebody asks; their settings are known from then on."""

import importlib

import pytest
import torch

from megaopt_core import OptimizerConfig, build_optimizer
from megaopt_core.errors import (
    ConfigurationError,
    DuplicateNameError,
    PluginHookError,
    PluginNotInstalledError,
    UnknownNameError,
    UnknownSettingError,
)

RESOLVES = """
from functools import cache
from megaopt_core.config import one_of
from megaopt_core.errors import UnknownNameError

asked = []

@frozen
class Settings:
    momentum: float = field(default=0.5, validator=one_of([0.5, 0.9]))

@hookimpl
def megaopt_resolve_optimizer(name):
    asked.append(name)
    if name == "house:NoSuch":
        raise UnknownNameError("house has no NoSuch", name=name)
    if name == "house:Broken":
        return 1 / 0
    if name == "house:Nonsense":
        return torch.optim.SGD
    return entry() if name == "house:SGD" else None

@cache
def entry():
    return OptimizerEntry(torch.optim.SGD, state={}, settings=Settings, setting_prefixes=("house_sgd",))
"""


def test_a_name_that_nobody_lists_is_resolved_once(plugins) -> None:
    """The entry has an owner; the list of optimizers stays what plugins list."""
    module = importlib.import_module(plugins.install("resolver", RESOLVES))
    registry = plugins.registry()
    assert registry.optimizer("house:SGD").load_class() is torch.optim.SGD
    assert registry.optimizer("house:SGD") is module.entry()
    assert registry.owner("optimizer", "house:SGD").source == "megaopt-resolver 1.0"
    assert module.asked == ["house:SGD"]
    assert registry.optimizers() == {}
    assert registry.has_optimizer("house:SGD")
    assert not registry.has_optimizer("nonsense")


def test_a_resolver_refuses_in_its_own_words_and_its_faults_are_named(plugins) -> None:
    """Errors of megaopt pass; anything else is the plugin's fault; no answer is an unknown name."""
    plugins.install("resolver", RESOLVES)
    registry = plugins.registry()
    with pytest.raises(UnknownNameError, match=r"^house has no NoSuch$"):
        registry.optimizer("house:NoSuch")
    with pytest.raises(PluginHookError) as raised:
        registry.optimizer("house:Broken")
    assert str(raised.value) == (
        "optimizer 'house:Broken': plugin 'resolver' (megaopt-resolver 1.0) failed in hook megaopt_resolve_optimizer: "
        "ZeroDivisionError: division by zero"
    )
    with pytest.raises(PluginHookError, match=r"returned type for 'house:Nonsense'; it must return an"):
        registry.optimizer("house:Nonsense")
    with pytest.raises(UnknownNameError, match=r"^unknown optimizer 'nonsense'"):
        registry.optimizer("nonsense")


def test_two_resolvers_of_one_name_are_an_error(plugins) -> None:
    """It names both, and the way out."""
    plugins.install("one", RESOLVES)
    plugins.install("two", RESOLVES)
    registry = plugins.registry()
    with pytest.raises(DuplicateNameError) as raised:
        registry.optimizer("house:SGD")
    assert str(raised.value) == (
        "optimizer 'house:SGD' is resolved by plugin 'one' (megaopt-one 1.0) and by plugin 'two' (megaopt-two 1.0); "
        "uninstall one of them, or block it: MEGAOPT_DISABLE_PLUGINS=megaopt-two"
    )


@pytest.mark.parametrize(
    ("name", "resolvers", "error"),
    [
        ("house:SGD", 2, DuplicateNameError),
        ("house:NoSuch", 1, UnknownNameError),
        ("house:Broken", 1, PluginHookError),
        ("nonsense", 1, UnknownNameError),
    ],
)
def test_of_a_missing_optimizer_and_its_settings_the_optimizer_is_named(
    plugins, name, resolvers, error
) -> None:
    """A setting that nobody has may be that optimizer's own: it is not what is wrong."""
    for resolver in ("one", "two")[:resolvers]:
        plugins.install(resolver, RESOLVES)
    plugins.registry()
    with pytest.raises(error, match=f"'{name}'|NoSuch"):
        OptimizerConfig(optimizer=name, house_sgd_momentu=0.9)


def test_settings_of_the_runs_optimizer_are_known_to_its_configuration(plugins) -> None:
    """Checked, read and saved by their full names, in a process that has not asked for the optimizer before."""
    plugins.install("resolver", RESOLVES)
    plugins.registry()
    config = OptimizerConfig(optimizer="house:SGD", lr=0.1, house_sgd_momentum=0.9)
    assert config.house_sgd_momentum == 0.9
    saved = config.to_dict()
    plugins.registry()
    assert OptimizerConfig.from_dict(saved) == config
    plugins.registry()
    with pytest.raises(
        ConfigurationError, match=r"^house_sgd_momentum=0.7: must be one of 0.5, 0.9$"
    ) as raised:
        OptimizerConfig(optimizer="house:SGD", house_sgd_momentum=0.7)
    assert raised.value.setting == "house_sgd_momentum"
    with pytest.raises(UnknownSettingError, match=r"'house_sgd_momentu'.*did you mean 'house_sgd_momentum'"):
        OptimizerConfig(optimizer="house:SGD", house_sgd_momentu=0.9)


def test_the_short_form_takes_own_settings_without_their_prefix(plugins) -> None:
    """By either name, but not by both; of listed optimizers too."""
    plugins.install("resolver", RESOLVES)
    plugins.registry()
    model = torch.nn.Linear(3, 2)
    for name in ("momentum", "house_sgd_momentum"):
        optimizer = build_optimizer(model, "house:SGD", lr=0.1, **{name: 0.9})
        assert {group["momentum"] for group in optimizer.param_groups} == {0.9}
        assert optimizer.config.house_sgd_momentum == 0.9
    with pytest.raises(
        ConfigurationError,
        match=r"^momentum=0.5 and house_sgd_momentum=0.9 are one setting; give one of them$",
    ):
        build_optimizer(model, "house:SGD", lr=0.1, momentum=0.5, house_sgd_momentum=0.9)
    with pytest.raises(UnknownSettingError, match=r"^OptimizerConfig has no setting 'dampening'"):
        build_optimizer(model, "house:SGD", lr=0.1, dampening=0.5)


def test_without_a_resolver_the_error_says_what_to_install_and_settings_are_kept(plugins) -> None:
    """A saved configuration outlives the plugin that resolved its optimizer."""
    registry = plugins.registry()
    with pytest.raises(PluginNotInstalledError) as raised:
        registry.optimizer("torch:SGD")
    assert str(raised.value) == (
        "optimizer 'torch:SGD' comes with megaopt-bridge, which is not installed: pip install megaopt-bridge"
    )
    config = OptimizerConfig(optimizer="torch:SGD", torch_sgd_momentum=0.9)
    assert config.to_dict()["torch_sgd_momentum"] == 0.9
    with pytest.raises(PluginNotInstalledError, match="pip install megaopt-bridge"):
        _ = config.torch_sgd_momentum
