"""Settings of plugins on the configuration: checked by their owners, kept while those are missing."""

import copy
import json
import pickle
import sys

import pytest
from megaopt_testing.fake_plugins import FakePlugins

from megaopt_core import OptimizerConfig
from megaopt_core.errors import (
    BrokenPluginError,
    ConfigurationError,
    PluginError,
    PluginNotInstalledError,
    UnknownSettingError,
)
from megaopt_core.registry import get_registry

MUON = """
from megaopt_core.config import between

@frozen(kw_only=True)
class Settings:
    momentum: float = field(default=0.95, validator=between(0.0, 1.0))
    steps: int = field(default=5, converter=int, validator=[validators.instance_of(int), validators.ge(1)])
    sizes: tuple = field(default=(), converter=tuple)

@frozen
class MoreSettings:
    eps: float = 1e-8

@hookimpl
def megaopt_optimizer_entries():
    lazy = "a_module_that_does_not_exist:Optimizer"
    return {
        "muon": OptimizerEntry(lazy, settings=Settings, setting_prefixes=("muon",)),
        "adaptive_muon": OptimizerEntry(lazy, settings=MoreSettings, setting_prefixes=("adaptive_muon", "muon")),
    }
"""


@pytest.fixture
def settings_cls(plugins: FakePlugins) -> type:
    """The settings class of an installed plugin."""
    module = plugins.install("muon", MUON)
    plugins.registry().load()
    return sys.modules[module].Settings


@pytest.mark.usefixtures("settings_cls")
def test_settings_are_read_with_their_defaults() -> None:
    """By full name, whatever the prefix; reading imports no optimizer."""
    config = OptimizerConfig(muon_momentum=0.9, muon_steps="7")
    assert (config.muon_momentum, config.muon_steps, config.muon_sizes) == (0.9, 7, ())
    assert config.adaptive_muon_eps == 1e-8
    assert dict(config.plugin_settings) == {"muon_momentum": 0.9, "muon_steps": 7}
    assert repr(config) == "OptimizerConfig(optimizer='adam', muon_momentum=0.9, muon_steps=7)"


def test_settings_are_read_typed(settings_cls) -> None:
    """As one object of the plugin's own class."""
    config = OptimizerConfig(muon_momentum=0.9)
    assert config.settings(settings_cls) == settings_cls(momentum=0.9)
    with pytest.raises(PluginError) as caught:
        config.settings(dict)
    assert str(caught.value) == "builtins.dict is the settings class of no loaded plugin"


@pytest.mark.usefixtures("settings_cls")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("muon_momentum", 1.5, "muon_momentum=1.5: must be a number in [0.0, 1.0)"),
        ("muon_steps", 0, "muon_steps=0: 'steps' must be >= 1: 0"),
        ("muon_steps", "x", "muon_steps='x': invalid literal for int() with base 10: 'x'"),
        ("muon_sizes", 3, "muon_sizes=3: 'int' object is not iterable"),
    ],
)
def test_bad_values_are_refused_under_their_full_names(name, value, message) -> None:
    """At construction and at assignment, by the plugin's validators."""
    with pytest.raises(ConfigurationError) as caught:
        OptimizerConfig(**{name: value})
    assert str(caught.value) == message
    assert caught.value.setting == name
    config = OptimizerConfig(muon_momentum=0.8)
    with pytest.raises(ConfigurationError):
        setattr(config, name, value)
    assert config == OptimizerConfig(muon_momentum=0.8)


@pytest.mark.usefixtures("settings_cls")
def test_settings_can_be_assigned() -> None:
    """And replaced, and copied without sharing."""
    config = OptimizerConfig()
    config.muon_momentum = 0.5
    copied = copy.copy(config)
    copied.muon_momentum = 0.6
    assert (config.muon_momentum, copied.muon_momentum, config.replace(muon_momentum=0.7).muon_momentum) == (
        0.5,
        0.6,
        0.7,
    )


@pytest.mark.usefixtures("settings_cls")
def test_an_unknown_name_lists_close_ones() -> None:
    """Of the core and of plugins, when it is set and when it is read."""
    for name, close in [
        ("muon_momentun", "; did you mean 'muon_momentum'?"),
        ("weight_deacy", "; did you mean 'weight_decay'?"),
    ]:
        message = f"OptimizerConfig has no setting {name!r}, in the core or in an installed plugin{close}"
        with pytest.raises(UnknownSettingError) as at_construction:
            OptimizerConfig(**{name: 1})
        assert str(at_construction.value) == message
        with pytest.raises(UnknownSettingError) as when_read:
            getattr(OptimizerConfig(), name)
        assert str(when_read.value) == message
    assert not hasattr(OptimizerConfig(), "xyz")
    with pytest.raises(UnknownSettingError, match=r"plugin; `megaopt describe` lists the settings$"):
        OptimizerConfig().xyz  # noqa: B018 - reading it is the test


def test_settings_of_a_missing_plugin_are_kept(plugins) -> None:
    """A saved configuration outlives a plugin that is gone; only reading needs it."""
    plugins.registry()
    config = OptimizerConfig(optimizer="muon", muon_momentum=0.9, soap_sizes=[1, [2]])
    written = json.loads(json.dumps(config.to_dict()))
    assert written["muon_momentum"] == 0.9
    assert OptimizerConfig.from_dict(written) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - what was just pickled
    with pytest.raises(PluginNotInstalledError) as caught:
        config.muon_momentum  # noqa: B018 - reading is the test
    assert str(caught.value) == (
        "setting 'muon_momentum' comes with megaopt-muon, which is not installed: pip install megaopt-muon"
    )
    assert caught.value.distribution == "megaopt-muon"
    assert not hasattr(config, "muon_momentum")


def test_kept_settings_work_once_the_plugin_is_there(plugins) -> None:
    """And are checked by it then."""
    plugins.registry()
    written = OptimizerConfig(muon_momentum=0.9, muon_steps=-1).to_dict()
    plugins.install("muon", MUON)
    plugins.registry()
    with pytest.raises(ConfigurationError, match=r"^muon_steps=-1: 'steps' must be >= 1: -1$"):
        OptimizerConfig.from_dict(written)
    assert OptimizerConfig.from_dict({**written, "muon_steps": 2}).muon_momentum == 0.9


def test_settings_of_a_blocked_plugin_say_what_blocks_it(plugins) -> None:
    """It is installed: another `pip install` would not help."""
    plugins.install("muon", MUON)
    plugins.registry(MEGAOPT_DISABLE_PLUGINS="muon")
    config = OptimizerConfig(muon_momentum=0.9)
    with pytest.raises(PluginNotInstalledError) as caught:
        config.muon_momentum  # noqa: B018 - reading is the test
    assert str(caught.value) == (
        "setting 'muon_momentum' comes with plugin 'muon' (megaopt-muon 1.0), which is installed, but "
        "MEGAOPT_DISABLE_PLUGINS=muon blocks it"
    )


@pytest.mark.filterwarnings("ignore::megaopt_core.errors.BrokenPluginWarning")
def test_settings_of_a_broken_plugin_name_it(plugins) -> None:
    """Known ones are kept; for others the broken plugin is a guess."""
    plugins.install("muon", "1 / 0")
    plugins.registry()
    config = OptimizerConfig(muon_momentum=0.9)
    with pytest.raises(
        BrokenPluginError, match=r"^setting 'muon_momentum' comes with plugin 'muon' .* failed to load"
    ):
        config.muon_momentum  # noqa: B018 - reading is the test
    with pytest.raises(
        UnknownSettingError, match="It may belong to a plugin that does not work: plugin 'muon'"
    ):
        OptimizerConfig(other_momentum=0.9)


def test_core_fields_need_no_plugin(plugins) -> None:
    """Neither to set, nor to read, to write, to copy or to print."""
    plugins.install("one", "raise SystemExit('loaded')")
    registry = plugins.registry()
    config = OptimizerConfig(lr=0.1, sharding="layer_wise", bf16=True)
    config.weight_decay = 0.2
    assert OptimizerConfig.from_dict(copy.deepcopy(config).to_dict()) == config
    assert repr(config)
    assert get_registry() is registry
    assert [info.status.value for info in registry.plugins()] == ["available", "available"]
