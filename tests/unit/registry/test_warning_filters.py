"""Filters of warnings that a plugin sets are its own affair: no warning of anybody becomes an error by them."""

import warnings

import pytest
import torch

from megaopt_core import build_optimizer

FILTERS = {
    "simplefilter": "warnings.simplefilter('error')",
    "filterwarnings": "warnings.filterwarnings('error', category=UserWarning)",
    "appended": "warnings.simplefilter('error', append=True)",
    "ignored": "warnings.simplefilter('ignore')",
    "reset": "warnings.resetwarnings(); warnings.simplefilter('error')",
    "shown elsewhere": "warnings.showwarning = lambda *args, **kwargs: 1 / 0",
}
"""Ways to set filters for the whole process."""

PLACES = {
    "import": "{setting}",
    "entries": "@hookimpl\ndef megaopt_optimizer_entries():\n    {setting}\n    return {{}}",
    "schedules": "@hookimpl\ndef megaopt_schedules():\n    {setting}\n    return {{}}",
    "overrides": "@hookimpl\ndef megaopt_param_overrides(config, model_chunks):\n    {setting}",
    "resolve": "@hookimpl\ndef megaopt_resolve_optimizer(name):\n    {setting}",
    "class": "@hookimpl\n"
    "def megaopt_optimizer_entries(): return {{'late': OptimizerEntry('late_module:Late', state={{}})}}",
}
"""Where a plugin sets them."""

WARNS = """
import warnings

@hookimpl
def megaopt_optimizer_entries(): return {"plain": OptimizerEntry(torch.optim.SGD, state={})}

@hookimpl
def megaopt_process_groups(model_chunks):
    warnings.warn("old", DeprecationWarning)
"""


@pytest.mark.parametrize("setting", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("place", PLACES)
def test_filters_that_a_plugin_sets_end_with_its_turn(plugins, place, setting) -> None:
    """Warnings of the plugin itself, of a broken one and of the user stay warnings, and are shown."""
    plugins.install("strict", "import warnings\n" + PLACES[place].format(setting=setting))
    plugins.install("broken", "1 / 0")
    plugins.install("warns", WARNS)
    (plugins.folder / "late_module.py").write_text(
        f"import torch, warnings\n{setting}\nclass Late(torch.optim.SGD): pass\n"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = plugins.registry()
        registry.has_optimizer("nobody")
        name = "late" if place == "class" else "plain"
        build_optimizer(torch.nn.Linear(2, 2), name, lr=0.1)
        warnings.warn("the user's", stacklevel=1)
    said = [str(each.message).split(" failed")[0] for each in caught]
    assert said == ["plugin 'broken' (megaopt-broken 1.0)", *["old"] * said.count("old"), "the user's"]
    assert "old" in said


def test_filters_that_a_plugin_sets_end_with_a_look_at_commands(plugins) -> None:
    """Commands are listed before the plugins are loaded."""
    plugins.install(
        "strict",
        "import warnings\nwarnings.simplefilter('error')\n@hookimpl\ndef megaopt_commands(commands): pass",
    )
    before = list(warnings.filters)
    registry = plugins.registry()
    assert [plugin.info.name for plugin in registry.command_plugins()] == ["strict"]
    assert warnings.filters == before
