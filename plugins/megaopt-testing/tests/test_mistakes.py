"""`megaopt check-plugin` tells the mistakes of authors that loading does not see, with what to write instead."""

import warnings
from functools import partial

import pytest
from megaopt_testing import run_command
from megaopt_testing.fake_plugins import FakePlugins
from megaopt_testing.mistakes.diagnosis import require_sound
from megaopt_testing.plugin import megaopt_commands

from megaopt_core.errors import BrokenPluginWarning, PluginError
from megaopt_core.registry import PluginInfo, PluginStatus

main = partial(run_command, megaopt_commands)

ENTRY = "@hookimpl\ndef megaopt_optimizer_entries(): return {{'bad': OptimizerEntry(torch.optim.SGD, {})}}"
STYLE = "@hookimpl\ndef megaopt_schedules(): return {{'bad': ScheduleStyle({})}}"
OWN = "settings=S, setting_prefixes=('bad',)"
CLASS = "@frozen\nclass S:\n    betas: object = {}\n"
DATACLASS = "import dataclasses\n@dataclasses.dataclass\nclass S:\n    a: int = 1\n"

MISTAKES = {
    "choices without a comma": (
        "@frozen\nclass S:\n    a: str = field(default='ns', metadata={'choices': 'ns'})\n"
        + ENTRY.format(OWN),
        "optimizer 'bad': S: the choices of 'a' are the text 'ns'; they must be a tuple of texts: ('ns',)",
    ),
    "a list as a default": (
        CLASS.format("[0.9]") + ENTRY.format(OWN),
        "optimizer 'bad': S: the default of 'betas' is a list, which all configurations would share; give a tuple, or "
        "field(factory=list)",
    ),
    "a dict as a default": (
        CLASS.format("{}") + ENTRY.format(OWN),
        "optimizer 'bad': S: the default of 'betas' is a dict, which all configurations would share; give "
        "field(factory=dict)",
    ),
    "a set as a default of a style": (
        CLASS.format("{1}") + STYLE.format("learning_rate=lambda point: 1.0, settings=S"),
        "schedule 'bad': S: the default of 'betas' is a set, which all configurations would share; give a frozenset, "
        "or field(factory=set)",
    ),
    "a misspelt argument": (
        ENTRY.format("granularty='tensor'"),
        "unexpected keyword argument 'granularty' ... id you mean 'granularity'",
    ),
    "a misspelt argument of a style": (
        STYLE.format("learningrate=float"),
        "unexpected keyword argument 'learningrate' ... id you mean 'learning_rate'?",
    ),
    "an argument unlike any": (
        STYLE.format("zzz=1"),
        "unexpected keyword argument 'zzz'; it takes learning_rate, ",
    ),
    "a hook with arguments": (
        "@hookimpl\ndef megaopt_optimizer_entries(config): return {}",
        "its 'megaopt_optimizer_entries' takes 'config', which the hook is not given; it may take no arguments",
    ),
    "a hook with other arguments": (
        "@hookimpl\ndef megaopt_param_overrides(config, model): return {}",
        "its 'megaopt_param_overrides' takes 'model', which the hook is not given; it may take config, model_chunks",
    ),
    "commands that no second entry point tells of": (
        "globals()['megaopt_' + 'commands'] = hookimpl(lambda commands: None)",
        "it brings commands, which `megaopt` lists only if an entry point of the group 'megaopt.commands' names it "
        "too: faulty = 'fake_faulty",
    ),
    "settings that are an instance": (
        CLASS.format("1") + ENTRY.format("settings=S(), setting_prefixes=('bad',)"),
        "optimizer 'bad': settings is an instance of S; give the class, without (): settings=S",
    ),
    "settings that are a dataclass": (
        DATACLASS + ENTRY.format(OWN),
        ".S'> is no attrs class; decorate it with attrs.frozen (or attrs.define) in place of dataclass",
    ),
    "settings that are an instance of a dataclass": (
        DATACLASS + ENTRY.format("settings=S(), setting_prefixes=('bad',)"),
        "give the class, without (): settings=S; decorate it with attrs.frozen (or attrs.define) in place of dataclass",
    ),
    "settings that are a plain class": (
        "class S: a = 1\n" + ENTRY.format(OWN),
        ".S'> is no attrs class; decorate it with attrs.frozen (or attrs.define)",
    ),
    "an acceptance of one argument": (
        ENTRY.format("accepts=lambda spec: None"),
        "optimizer 'bad': the function given as accepts takes (spec); it is called as accepts(spec, view)",
    ),
    "a cost of none": (
        ENTRY.format("step_cost=lambda: 1.0"),
        "optimizer 'bad': the function given as step_cost takes (nothing); it is called as step_cost(spec, view)",
    ),
    "a fallback of two arguments": (
        ENTRY.format("fallback=lambda config, name: 'adam'"),
        "the function given as fallback takes (config, name); it is called as fallback(config)",
    ),
    "an acceptance that is no function": (
        ENTRY.format("accepts=7"),
        "optimizer 'bad': accepts must be a function, got int; it is called as accepts(spec, view)",
    ),
    "a style of two arguments": (
        STYLE.format("learning_rate=lambda step, lr: lr"),
        "schedule 'bad': the function given as learning_rate takes (step, lr); it is called as learning_rate(point)",
    ),
}
"""The code, and what is said of it."""


def diagnosed(plugins: FakePlugins, code: str) -> str:
    """Return what is said of a plugin with this code."""
    plugins.install("faulty", code, version="6.6")
    registry = plugins.registry()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BrokenPluginWarning)
        registry.load()
    (info,) = [info for info in registry.plugins() if info.name == "faulty"]
    try:
        require_sound(info)
    except PluginError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_with_its_remedy(plugins, mistake) -> None:
    """Whether the plugin is broken by it or not; newer Pythons guess arguments themselves."""
    code, words = MISTAKES[mistake]
    said = diagnosed(plugins, code)
    assert said.startswith("plugin 'faulty' (megaopt-faulty 6.6)")
    assert all(part in said for part in words.split(" ... "))
    assert "\n" not in said


SETTINGS = """
from megaopt_core.config import not_negative
@frozen
class S:
    beta: float = field(default={})
"""

REFUSED = {
    "a validator that is not called": (
        "0.5, validator=not_negative",
        "TypeError: not_negative() takes 0 positional arguments but 3 were given; a validator is called where it is "
        "named: validator=not_negative()",
    ),
    "a validator of one argument": ("0.5, validator=lambda value: True", "TypeError: "),
    "a default that its validator refuses": (
        "-1.0, validator=not_negative()",
        "ConfigurationError: beta=-1.0: must be a number of at least 0",
    ),
    "a validator that is none": ("0.5, validator='positive'", "TypeError: "),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_a_setting_that_cannot_have_its_default_is_named(plugins, refused) -> None:
    """Whatever its validator does."""
    code, words = REFUSED[refused]
    said = diagnosed(plugins, SETTINGS.format(code) + ENTRY.format(OWN))
    assert f"optimizer 'bad': S: the setting 'beta' cannot have its default: {words}" in said


POINTS = {
    "mb badep": "is malformed; it must read `name = module` or `name = module:object`",
    "math:": "is malformed; it must read `name = module` or `name = module:object`",
    "megaopt_absent.plugin": "asks for module 'megaopt_absent', which does not exist",
    "json.absent:plugin": "asks for module 'json.absent', which does not exist",
    "json:plugin": "asks for 'plugin' of module 'json', which does not have it",
}


@pytest.mark.parametrize("value", POINTS)
def test_an_entry_point_that_names_nothing_is_told_by_its_line(value) -> None:
    """Malformed, or without a module or an object of its name."""
    with pytest.raises(PluginError) as caught:
        require_sound(PluginInfo("bad", value, status=PluginStatus.BROKEN))
    assert str(caught.value) == f"plugin 'bad' ({value}): its entry point `bad = {value}` {POINTS[value]}"


USABLE = {
    "a list that a converter makes a tuple": (
        "@frozen\nclass S:\n    betas: object = field(default=[0.9], converter=tuple)\n" + ENTRY.format(OWN)
    ),
    "a list that is made anew": (
        "@frozen\nclass S:\n    betas: list = field(factory=list)\n" + ENTRY.format(OWN)
    ),
    "an acceptance of anything": ENTRY.format("accepts=lambda *args: None"),
    "an acceptance with more": ENTRY.format("accepts=lambda spec, view, most=3: None"),
    "a cost that shows no signature": ENTRY.format("step_cost=max"),
    "a hook with fewer arguments": "@hookimpl\ndef megaopt_param_overrides(model_chunks): return {}",
}


@pytest.mark.parametrize("code", USABLE.values(), ids=USABLE)
def test_what_only_looks_like_a_mistake_is_loaded(plugins, code) -> None:
    """A converter, a factory, and functions that can be called as they will be."""
    assert diagnosed(plugins, code) == ""


@pytest.mark.parametrize("name", ["faulty", "bad"])
def test_no_check_is_made_of_a_plugin_with_a_mistake(plugins, capsys, name) -> None:
    """By the name of the plugin, or of what it offers."""
    plugins.install("faulty", ENTRY.format("accepts=lambda spec: None"), version="6.6")
    plugins.registry("testing")
    assert main(["check-plugin", name]) == 2
    assert capsys.readouterr() == (
        "",
        "megaopt: error: plugin 'faulty' (megaopt-faulty 6.6): optimizer 'bad': the function given as accepts takes "
        "(spec); it is called as accepts(spec, view)\n",
    )
