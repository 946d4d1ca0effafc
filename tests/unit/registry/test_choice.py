"""The environment decides which plugins are let in."""

import pytest

from megaopt_core.errors import PluginNotInstalledError
from megaopt_core.registry import PluginRegistry

pytestmark = pytest.mark.any_python

OFFERS_PLAIN = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD, description="plain")}
"""


def statuses(registry: PluginRegistry) -> dict[str, str]:
    """Plugin names with their statuses."""
    return {info.name: info.status.value for info in registry.plugins()}


def test_a_blocked_plugin_says_which_variable_blocks_it(plugins) -> None:
    """By the entry point's name, by the distribution's, and by an allow list that leaves it out."""
    plugins.install("muon", "raise RuntimeError('a blocked plugin is not imported')", version="0.2")
    for environ, reason in [
        ({"MEGAOPT_DISABLE_PLUGINS": "x, muon"}, "MEGAOPT_DISABLE_PLUGINS=x,muon blocks it"),
        ({"MEGAOPT_DISABLE_PLUGINS": "megaopt-muon"}, "MEGAOPT_DISABLE_PLUGINS=megaopt-muon blocks it"),
        ({"MEGAOPT_PLUGINS": "adam"}, "MEGAOPT_PLUGINS=adam leaves it out"),
        ({"MEGAOPT_PLUGINS": ""}, "MEGAOPT_PLUGINS= leaves it out"),
    ]:
        registry = plugins.registry(**environ)
        assert statuses(registry) == {"core": "available", "muon": "blocked"}
        with pytest.raises(PluginNotInstalledError) as caught:
            registry.optimizer("muon")
        assert str(caught.value) == (
            f"optimizer 'muon' comes with plugin 'muon' (megaopt-muon 0.2), which is installed, but {reason}"
        )
        assert statuses(registry) == {"core": "loaded", "muon": "blocked"}


def test_the_environment_of_a_process_decides(plugins) -> None:
    """The two variables work in a real process, and a plugin that raises on import leaves the rest usable."""
    plugins.install("good", OFFERS_PLAIN)
    plugins.install("bad", "raise ImportError('needs a compiler')")
    code = """
    import warnings
    warnings.simplefilter("ignore")
    from megaopt_core import get_registry
    registry = get_registry()
    names = sorted(registry.optimizers())
    print(names, [(info.name, info.status.value) for info in registry.plugins() if info.name in ("good", "bad")])
    """
    both = plugins.python(code)
    assert both.stdout == "['plain'] [('bad', 'broken'), ('good', 'loaded')]\n", both.stderr
    blocked = plugins.python(code, MEGAOPT_DISABLE_PLUGINS="good")
    assert blocked.stdout == "[] [('bad', 'broken'), ('good', 'blocked')]\n", blocked.stderr
