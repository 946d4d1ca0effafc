"""One plugin is loaded by itself: whatever it does wrong stays with it, and is said in words."""

import warnings

import pytest

from megaopt_core.errors import BrokenPluginWarning
from megaopt_core.registry import PluginStatus
from megaopt_core.registry._faults import words_of

OFFERS_PLAIN = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD, description="plain")}
"""


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ("raise RuntimeError('no such device')", "RuntimeError: no such device"),
        (
            "import megaopt_that_is_not_there",
            "ModuleNotFoundError: No module named 'megaopt_that_is_not_there'",
        ),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError: "),
        (
            "del megaopt_api",
            'PluginError: it declares no megaopt_api; plugins for this megaopt declare megaopt_api = "1"',
        ),
        (
            'megaopt_api = "2"',
            (
                "PluginError: it declares megaopt_api = '2', and this megaopt loads plugins that declare '1': "
                "the plugin is written for a newer megaopt; upgrade megaopt-core, or take an older plugin"
            ),
        ),
        (
            'megaopt_api = "0"',
            (
                "PluginError: it declares megaopt_api = '0', and this megaopt loads plugins that declare '1': "
                "the plugin is written for an older megaopt; upgrade the plugin"
            ),
        ),
        (
            "megaopt_api = 1",
            (
                "PluginError: it declares megaopt_api = 1, and this megaopt loads plugins that declare '1': "
                "declare it as that text"
            ),
        ),
        (
            "@hookimpl\ndef megaopt_optimizer_entrees(): return {}",
            (
                "PluginError: it implements 'megaopt_optimizer_entrees', which is no hook; "
                "did you mean 'megaopt_optimizer_entries'?"
            ),
        ),
        (
            "def megaopt_optimizer_entries(): return {}",
            "PluginError: its function 'megaopt_optimizer_entries' is not marked with @hookimpl",
        ),
        (
            "@hookimpl\ndef megaopt_annotate_params(model): return {}",
            "PluginValidationError: Plugin 'bad' for hook 'megaopt_annotate_params' hookimpl definition: ",
        ),
        (
            "@hookimpl(wrapper=True)\ndef megaopt_optimizer_entries(): return (yield)",
            "PluginError: its 'megaopt_optimizer_entries' is a wrapper; megaopt calls every plugin by itself",
        ),
        (
            "@hookimpl\ndef megaopt_optimizer_entries(): return [1]",
            "PluginError: megaopt_optimizer_entries returned list; it must return {name: OptimizerEntry}",
        ),
        (
            "@hookimpl\ndef megaopt_optimizer_entries(): return {'x': torch.optim.SGD}",
            "PluginError: megaopt_optimizer_entries returned 'x': type; it must be of type OptimizerEntry",
        ),
        (
            "@hookimpl\ndef megaopt_optimizer_entries(): return {'': OptimizerEntry(torch.optim.SGD)}",
            "PluginError: megaopt_optimizer_entries returned the name ''; a name is a non-empty str",
        ),
        (
            "@hookimpl\ndef megaopt_optimizer_entries(): 1 / 0",
            "ZeroDivisionError: division by zero",
        ),
        (
            (
                "@hookimpl\ndef megaopt_optimizer_entries():\n"
                "    return {'x': OptimizerEntry(torch.optim.SGD, settings=dict, setting_prefixes=('x',))}"
            ),
            "PluginError: optimizer 'x': settings=<class 'dict'> is no attrs class",
        ),
        (
            (
                "@frozen\nclass S:\n    beta: float = 0.5\n"
                "@hookimpl\ndef megaopt_optimizer_entries():\n"
                "    return {'x': OptimizerEntry(torch.optim.SGD, settings=S)}"
            ),
            "PluginError: optimizer 'x' has settings but no setting_prefixes",
        ),
        (
            (
                "@frozen\nclass S:\n    beta: float\n"
                "@hookimpl\ndef megaopt_optimizer_entries():\n"
                "    return {'x': OptimizerEntry(torch.optim.SGD, settings=S, setting_prefixes=('x',))}"
            ),
            "PluginError: optimizer 'x': S cannot be made of its defaults: TypeError: S.__init__() missing 1 required",
        ),
        (
            (
                "from megaopt_core.config import not_negative, one_of\n"
                "@frozen\nclass S:\n    beta: float = field(default=-1.0, validator=not_negative())\n"
                "@hookimpl\ndef megaopt_optimizer_entries():\n"
                "    return {'x': OptimizerEntry(torch.optim.SGD, settings=S, setting_prefixes=('x',))}"
            ),
            "PluginError: optimizer 'x': S cannot be made of its defaults: "
            "ConfigurationError: beta=-1.0: must be "
            "a number of at least 0",
        ),
        (
            "@hookimpl\ndef megaopt_sharding_strategies(): return {'x': object()}",
            "PluginError: megaopt_sharding_strategies returned 'x': object; it must be of type ShardingStrategy",
        ),
        (
            "from megaopt_core import get_registry\nget_registry().optimizers()",
            "PluginError: plugins are being loaded: a plugin must not look others up while it is imported",
        ),
    ],
)
def test_a_broken_plugin_is_kept_with_its_reason_and_harms_no_other(plugins, failure, error) -> None:
    """Whatever a plugin does wrong, it is named in one warning, and everything else works."""
    plugins.install("bad", failure, version="0.3")
    plugins.install("good", OFFERS_PLAIN)
    registry = plugins.registry()
    with pytest.warns(BrokenPluginWarning) as caught:
        registry.load()
    assert len(caught) == 1
    assert str(caught[0].message).startswith(
        f"plugin 'bad' (megaopt-bad 0.3) failed to load and is left out: {error}"
    )
    assert list(registry.optimizers()) == ["plain"]
    (bad,) = [info for info in registry.plugins() if info.name == "bad"]
    assert bad.status is PluginStatus.BROKEN
    assert bad.error.startswith(error)
    assert bad.traceback.startswith("Traceback (most recent call last):") or "SyntaxError" in bad.traceback


def test_a_broken_plugin_is_warned_of_once(plugins) -> None:
    """The second look-up is silent."""
    plugins.install("bad", "1 / 0")
    registry = plugins.registry()
    with pytest.warns(BrokenPluginWarning):
        registry.optimizers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.optimizers()


def test_an_interrupt_is_never_a_plugins_fault(plugins) -> None:
    """Whoever presses the keys while a plugin answers, or while its error is put into words, is heard."""

    class PressedError(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        words_of(PressedError())
    plugins.install("slow", "@hookimpl\ndef megaopt_optimizer_entries(): raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        plugins.registry().optimizers()
