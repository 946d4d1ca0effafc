"""A family of faulty plugins: each is named, and the others stay usable."""

import io
import itertools
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from long_runs import sometimes

from megaopt_core import OptimizerConfig, build_optimizer
from megaopt_core.errors import (
    BrokenPluginWarning,
    DuplicateNameError,
    MegaoptError,
    PluginError,
    PluginHookError,
    UnknownNameError,
)
from megaopt_core.registry import PluginRegistry, _faults

GOOD = """
@frozen
class Settings:
    beta: float = field(default=0.5, metadata={"help": "how much is kept"})


@hookimpl
def megaopt_optimizer_entries():
    return {
        "plain": OptimizerEntry(
            torch.optim.SGD, settings=Settings, setting_prefixes=("good",), state={"momentum_buffer": "param"},
            config_to_kwargs=lambda config, chunks, pgs: {"lr": config.lr, "momentum": config.good_beta},
        ),
        "second": OptimizerEntry(torch.optim.Adagrad, state={"step": "scalar", "sum": "param"}),
    }


@hookimpl
def megaopt_schedules():
    return {"halved": ScheduleStyle(learning_rate=lambda point: point.between(0.5))}
"""

UNSPEAKABLE = """
class Unspeakable({base}):
    def __str__(self):
        raise RuntimeError("no words")
"""

RAISES = {
    "an exception": "raise RuntimeError('bad')",
    "a system exit": "raise SystemExit(3)",
    "a generator exit": "raise GeneratorExit",
    "a base exception": "raise type('Own', (BaseException,), {})('bad')",
    "an unspeakable exception": UNSPEAKABLE.format(base="Exception") + "raise Unspeakable",
    "an unspeakable base exception": UNSPEAKABLE.format(base="BaseException") + "raise Unspeakable",
    "a warning": "raise DeprecationWarning('bad')",
}
"""Ways to raise that a plugin may choose."""

IMPORT_TIME = {
    **{f"{how} at import": code for how, code in RAISES.items()},
    "a missing module": "import megaopt_that_is_not_there",
    "a missing name": "from megaopt_core import that_is_not_there",
    "a syntax error": "def f(:",
    "no version": "del megaopt_api",
    "another version": "megaopt_api = '99'",
    "a hook of another name": "@hookimpl\ndef megaopt_optimiser_entries(): return {}",
    "an unmarked hook": "def megaopt_schedules(): return {}",
    "a look-up while it is imported": "from megaopt_core import get_registry\nget_registry().optimizers()",
}

HOOKS = {
    "megaopt_optimizer_entries": "",
    "megaopt_sharding_strategies": "",
    "megaopt_schedules": "",
    "megaopt_annotate_params": "model_chunk",
    "megaopt_param_overrides": "config, model_chunks",
    "megaopt_resolve_optimizer": "name",
}

HOOK_TIME = {
    f"{how} in {hook}": f"@hookimpl\ndef {hook}({arguments}):\n"
    + "".join(f"    {line}\n" for line in code.splitlines() if line)
    for (hook, arguments), (how, code) in itertools.product(HOOKS.items(), list(RAISES.items())[:5])
}

NONSENSE = {
    f"{answer} from {hook}": f"@hookimpl\ndef {hook}({arguments}): return {answer}"
    for (hook, arguments), answer in itertools.product(HOOKS.items(), ["7", "{'x': object()}"])
}

ENTRY_TIME = {
    f"an entry whose {what} fails": f"@hookimpl\ndef megaopt_optimizer_entries(): return {{'bad': {entry}}}"
    for what, entry in {
        "class is missing": "OptimizerEntry('megaopt_that_is_not_there:Class')",
        "class is none": "OptimizerEntry(int)",
        "arguments": "OptimizerEntry(torch.optim.SGD, config_to_kwargs=lambda *_: 1 / 0)",
        "arguments are nonsense": "OptimizerEntry(torch.optim.SGD, config_to_kwargs=lambda *_: 7)",
        "arguments are unknown": "OptimizerEntry(torch.optim.SGD, config_to_kwargs=lambda *_: {'nope': 1})",
        "accepts": "OptimizerEntry(torch.optim.SGD, accepts=lambda spec, view: 1 / 0)",
        "cost": "OptimizerEntry(torch.optim.SGD, step_cost=lambda spec, view: 1 / 0)",
        "cost is nonsense": "OptimizerEntry(torch.optim.SGD, step_cost=lambda spec, view: 'much')",
        "state": "OptimizerEntry(torch.optim.SGD, init_state_fn=lambda *_: 1 / 0)",
    }.items()
}

CLASHES = {
    "the name of an optimizer": GOOD.replace("good", "other").replace("halved", "x"),
    "the name of a schedule": GOOD.replace("plain", "a").replace("second", "b").replace("good", "other"),
    "the name of a setting": GOOD.replace("plain", "a").replace("second", "b").replace("halved", "x"),
}

VERSIONS = {
    f"the version {version}": f"megaopt_api = {version}"
    for version in ("1", "1.0", "None", "b'1'", "['1']", "'1.0'", "object()")
} | {
    f"a version whose {what} raises": f"class Odd:\n    def {what}(self, *_): raise SystemExit(3)\nmegaopt_api = Odd()"
    for what in ("__eq__", "__ne__", "__repr__")
}

LATE = {
    "names that are made when they are asked for": "def __getattr__(name): raise SystemExit(name)\ndel megaopt_api",
    "a module that is none": "import sys\nsys.modules[__name__] = 7",
    "a module without a dict": (
        "import sys\nclass Slotted:\n    __slots__ = ()\n    megaopt_api = '2'\nsys.modules[__name__] = Slotted()"
    ),
    "a hook with other arguments": "@hookimpl\ndef megaopt_schedules(more): return {}",
    "a hook that is a class": "@hookimpl\nclass megaopt_schedules: pass",
    "a hook that wraps": "@hookimpl(wrapper=True)\ndef megaopt_schedules():\n    return (yield)",
    "a hook that recurses": "@hookimpl\ndef megaopt_schedules(): return megaopt_schedules()",
    "a hook that never ends its answer": (
        "@hookimpl\ndef megaopt_optimizer_entries():\n    while True: yield 'bad'"
    ),
    "a hook that is a coroutine": "@hookimpl\nasync def megaopt_schedules(): return {}",
}

ANSWERS = {
    f"{what} from megaopt_optimizer_entries": f"{code}\n@hookimpl\ndef megaopt_optimizer_entries(): return {answer}"
    for what, code, answer in [
        ("a name that is empty", "", "{'': OptimizerEntry(torch.optim.SGD)}"),
        ("a name that is no text", "", "{3: OptimizerEntry(torch.optim.SGD)}"),
        ("no name", "", "{None: OptimizerEntry(torch.optim.SGD)}"),
        ("a class in place of an entry", "", "{'bad': torch.optim.SGD}"),
        ("a generator", "", "(name for name in ['bad'])"),
        ("pairs", "", "[('bad', OptimizerEntry(torch.optim.SGD))]"),
        (
            "items that raise",
            "class Lazy(dict):\n    def items(self): raise type('Own', (BaseException,), {})('late')",
            "Lazy(bad=OptimizerEntry(torch.optim.SGD))",
        ),
        (
            "names that cannot be shown",
            "class Name(str):\n    def __repr__(self): raise SystemExit('name')",
            "{Name('bad'): 7}",
        ),
        (
            "an entry of an unknown granularity",
            "",
            "{'bad': OptimizerEntry(torch.optim.SGD, granularity='atom')}",
        ),
        ("an entry of alignment 0", "", "{'bad': OptimizerEntry(torch.optim.SGD, alignment=0)}"),
        ("an entry of alignment x", "", "{'bad': OptimizerEntry(torch.optim.SGD, alignment='x')}"),
        ("an entry of no class", "", "{'bad': OptimizerEntry(None)}"),
        ("an entry of a path without a class", "", "{'bad': OptimizerEntry('torch.optim')}"),
        ("settings that are no class", "", "{'bad': OptimizerEntry(torch.optim.SGD, settings={'a': 1})}"),
        (
            "settings without prefixes",
            "@frozen\nclass S:\n    a: int = 1",
            "{'bad': OptimizerEntry(torch.optim.SGD, settings=S)}",
        ),
        (
            "settings without defaults",
            "@frozen\nclass S:\n    a: int",
            "{'bad': OptimizerEntry(torch.optim.SGD, settings=S, setting_prefixes=('bad',))}",
        ),
        (
            "settings that exit",
            "@frozen\nclass S:\n    a: int = 1\n    def __attrs_post_init__(self): raise SystemExit(3)",
            "{'bad': OptimizerEntry(torch.optim.SGD, settings=S, setting_prefixes=('bad',))}",
        ),
        ("a description that is no text", "", "{'bad': OptimizerEntry(torch.optim.SGD, description=7)}"),
        (
            "overrides that are none",
            "",
            "{'bad': OptimizerEntry(torch.optim.SGD, default_param_overrides=7)}",
        ),
        ("dtypes of states that are none", "", "{'bad': OptimizerEntry(torch.optim.SGD, state_dtypes=7)}"),
        ("an acceptance that is no function", "", "{'bad': OptimizerEntry(torch.optim.SGD, accepts=7)}"),
    ]
}

IN_USE = {
    f"an entry whose {what}": f"{code}\n@hookimpl\ndef megaopt_optimizer_entries(): return {{'bad': {entry}}}"
    for what, code, entry in [
        ("class is not in its module", "", "OptimizerEntry('math:that')"),
        (
            "class raises when it is made",
            "class Odd(torch.optim.SGD):\n    def __init__(self, *args, **kwargs): raise GeneratorExit",
            "OptimizerEntry(Odd)",
        ),
        ("class is a function", "", "OptimizerEntry(lambda params: torch.optim.SGD(params, lr=1.0))"),
        ("reason is no text", "", "OptimizerEntry(torch.optim.SGD, accepts=lambda spec, view: 7)"),
        (
            "fallback is no name",
            "",
            "OptimizerEntry(torch.optim.SGD, accepts=lambda spec, view: 'no', fallback=lambda config: 7)",
        ),
        (
            "acceptance exits",
            "",
            "OptimizerEntry(torch.optim.SGD, accepts=lambda spec, view: __import__('sys').exit(3))",
        ),
        (
            "cost is not a number",
            "",
            "OptimizerEntry(torch.optim.SGD, step_cost=lambda spec, view: float('nan'))",
        ),
        ("cost is below zero", "", "OptimizerEntry(torch.optim.SGD, step_cost=lambda spec, view: -1.0)"),
        (
            "arguments are a generator",
            "",
            "OptimizerEntry(torch.optim.SGD, config_to_kwargs=lambda *_: (yield))",
        ),
        (
            "arguments exit",
            "",
            "OptimizerEntry(torch.optim.SGD, config_to_kwargs=lambda *_: __import__('sys').exit(3))",
        ),
        (
            "state exits",
            "",
            "OptimizerEntry(torch.optim.SGD, init_state_fn=lambda *_: __import__('sys').exit(3))",
        ),
    ]
}

ENTRY = "@hookimpl\ndef megaopt_optimizer_entries(): return {{'bad': OptimizerEntry(torch.optim.SGD, {})}}"

MISTAKES = {
    "prefixes without a comma": (
        ENTRY.format("setting_prefixes='bad'"),
        "OptimizerEntry(setting_prefixes='bad'): must be a tuple of names: ('bad',)",
    ),
    "one positive state": (
        ENTRY.format("positive_states='sum'"),
        "OptimizerEntry(positive_states='sum'): must be a set of names: {'sum'}",
    ),
    "one scalar state": (
        ENTRY.format("scalar_states='step'"),
        "OptimizerEntry(scalar_states='step'): must be a set of names: {'step'}",
    ),
    "one dtype": (
        ENTRY.format("state_dtypes={'exp_avg': torch.float32}"),
        "OptimizerEntry(state_dtypes={'exp_avg': torch.float32}): must be a set of dtypes: {'exp_avg': frozenset(",
    ),
    "a dtype by name": (
        ENTRY.format("state_dtypes={'exp_avg': 'bf16'}"),
        "OptimizerEntry(state_dtypes={'exp_avg': 'bf16'}): must be a set of dtypes: {'exp_avg': frozenset(",
    ),
    "a granularity that is none": (
        ENTRY.format("granularity='row'"),
        "OptimizerEntry(granularity='row'): must be 'element' or 'tensor' or 'group'",
    ),
    "words of several lines": ("raise ValueError('one\\n  two\\nthree')", "ValueError: one two three"),
}
"""Mistakes of authors that are found when the plugin is loaded: the code, and what is said of it."""

NEW_KINDS = {**VERSIONS, **LATE, **ANSWERS, **IN_USE}

FAULTS = {**IMPORT_TIME, **HOOK_TIME, **NONSENSE, **ENTRY_TIME, **CLASHES, **NEW_KINDS}


def step_of(name: str, **settings: Any) -> bool:
    """Build an optimizer and step it once."""
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(model, name, lr=0.1, **settings)
    model(torch.ones(1, 3)).sum().backward()
    return optimizer.step().update_successful


def said_by(work: Callable[[], object], *errors: type[Exception]) -> str:
    """Return the words of what a block raises or warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        words = []
        try:
            work()
        except errors as error:
            words.append(str(error))
    return "\n".join([*words, *(str(warning.message) for warning in caught)])


def test_there_are_sixty() -> None:
    """Import, hooks, nonsense, entries and names."""
    assert len(FAULTS) >= 60


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_with_its_remedy(plugins, mistake) -> None:
    """At the first look-up, whether or not anybody uses what is wrong."""
    code, words = MISTAKES[mistake]
    plugins.install("faulty", code, version="6.6")
    said = said_by(plugins.registry().load)
    assert said.startswith("plugin 'faulty' (megaopt-faulty 6.6) failed to load and is left out: ")
    assert words in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "value", ["mb badep", "math:", "megaopt_absent.plugin", "json.absent:plugin", "json:plugin"]
)
def test_an_entry_point_that_names_nothing_is_left_out(value) -> None:
    """Listing commands, which reads sources first, is harmed as little as loading."""
    point = EntryPoint(name="bad", value=value, group="megaopt")
    for look in (PluginRegistry.load, PluginRegistry.command_plugins):
        registry = PluginRegistry([point], {})
        said = said_by(lambda look=look, registry=registry: look(registry))
        assert said.startswith(f"plugin 'bad' ({value}) failed to load and is left out: ")


def test_a_fallback_that_nobody_offers_is_told_with_whose_it_is(plugins) -> None:
    """Where a parameter goes to it; the class of the error is that of the name itself."""
    plugins.install("good", GOOD)
    plugins.install("faulty", ENTRY.format("accepts=lambda spec, view: 'no', fallback='plian'"))
    plugins.registry()
    with pytest.raises(UnknownNameError) as caught:
        step_of("bad")
    assert str(caught.value).startswith(
        "'plian' is the fallback of optimizer 'bad' of plugin 'faulty' (megaopt-faulty 1.0): unknown optimizer "
        "'plian'; did you mean 'plain'?"
    )
    assert caught.value.name == "plian"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_plugin_harms_no_other_and_is_named(plugins, fault) -> None:
    """Plugins that no fault touches build, step and schedule; some message names the faulty one."""
    plugins.install("good", GOOD)
    plugins.install("faulty", FAULTS[fault], version="6.6")
    plugins.install(
        "zealous", "@hookimpl\ndef megaopt_schedules(): return {'late': ScheduleStyle(learning_rate=float)}"
    )
    registry = plugins.registry()
    contested = fault.removeprefix("the name of ") if fault in CLASHES else ""
    said = [said_by(registry.load)]
    assert {"plain", "second"} - set(registry.optimizers()) == (
        {"plain", "second"} if contested == "an optimizer" else set()
    )
    assert "late" in registry.schedules()
    assert ("halved" in registry.schedules()) is (contested != "a schedule")
    usable = "second" if contested != "an optimizer" else None
    if usable:
        said.append(said_by(lambda: said.append(str(step_of(usable)))))
        assert "True" in said
    said.append(said_by(lambda: step_of("bad"), MegaoptError))
    said.append(said_by(lambda: OptimizerConfig(good_beta=0.1), MegaoptError))
    said.append(said_by(lambda: registry.optimizer("plain"), MegaoptError))
    said += [str(conflict) for conflict in registry.conflicts()]
    assert any("(megaopt-faulty 6.6)" in words for words in said)


def test_keyboard_interrupt_at_import_interrupts(plugins) -> None:
    """It is the user's, not the plugin's; the next look-up loads everything."""
    plugins.install(
        "asleep", "import os\nif not os.environ.pop('MEGAOPT_TEST_AWAKE', None): raise KeyboardInterrupt"
    )
    plugins.install("good", GOOD)
    registry = plugins.registry()
    with pytest.raises(KeyboardInterrupt):
        registry.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGAOPT_TEST_AWAKE", "1")
        assert "plain" in registry.optimizers()
    assert "replicated" in registry.strategies()


def test_no_plugin_sees_what_another_does_to_the_configuration(plugins) -> None:
    """Hooks and entries get copies; the user's and everybody else's stay as they are."""
    plugins.install("good", GOOD)
    plugins.install(
        "a_meddler",
        """
        @hookimpl
        def megaopt_param_overrides(config, model_chunks):
            config.lr = 7.0
            model_chunks.clear()

        def kwargs(config, chunks, pgs):
            config.lr = 7.0
            return {"lr": 0.5}

        @hookimpl
        def megaopt_optimizer_entries():
            return {"meddling": OptimizerEntry(torch.optim.SGD, state={}, config_to_kwargs=kwargs)}
        """,
    )
    plugins.install(
        "observer",
        """
        seen = []

        @hookimpl
        def megaopt_param_overrides(config, model_chunks):
            seen.append((config.lr, len(model_chunks)))
        """,
    )
    registry = plugins.registry()
    model = torch.nn.Linear(2, 2)
    for name in ("plain", "meddling"):
        optimizer = build_optimizer(model, name, lr=0.25)
        assert (optimizer.config.lr, {group["lr"] for group in optimizer.param_groups}) == (0.25, {0.25})
    (observer,) = [plugin for plugin in registry.loaded_plugins() if plugin.info.name == "observer"]
    assert observer.implementation.seen == [(0.25, 1), (0.25, 1)]


MATRICES = """
@hookimpl
def megaopt_optimizer_entries():
    return {"whole": OptimizerEntry(torch.optim.SGD, state={}, granularity="tensor")}
"""


def test_a_reader_that_fails_is_an_error_where_roles_matter(plugins) -> None:
    """An optimizer of whole tensors depends on what parameters are; an element-wise one does not."""
    plugins.install("good", GOOD)
    plugins.install("matrices", MATRICES)
    plugins.install("reader", "@hookimpl\ndef megaopt_annotate_params(model_chunk): 1 / 0")
    plugins.registry()
    with pytest.warns(
        BrokenPluginWarning, match=r"^plugin 'reader' .* ZeroDivisionError: .* is ignored, because"
    ):
        assert step_of("second")
    with pytest.raises(PluginHookError, match=r"^plugin 'reader' \(megaopt-reader 1.0\) failed in hook"):
        step_of("whole")


def test_overrides_that_fail_are_an_error_for_what_their_plugin_brings(plugins) -> None:
    """Its own optimizer is not built without them; that of another plugin is."""
    plugins.install("good", GOOD)
    plugins.install(
        "matrices", MATRICES + "\n@hookimpl\ndef megaopt_param_overrides(config, model_chunks): return [1]"
    )
    plugins.registry()
    with pytest.warns(BrokenPluginWarning, match="overrides are a mapping"):
        assert step_of("second")
    with pytest.raises(PluginHookError, match=r"^plugin 'matrices' .* overrides are a mapping"):
        step_of("whole")


SLOW = """
def wait():
    import sys, threading, time
    assert threading.current_thread() is threading.main_thread()
    said, write = [], sys.stderr.write
    sys.stderr.write = lambda words: (said.append(words), write(words))[1]
    deadline = time.monotonic() + 300
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    del sys.stderr.write
    assert said, "nothing was written"
"""


@pytest.mark.parametrize(
    "where",
    [
        "wait()",
        "@hookimpl\ndef megaopt_optimizer_entries(): return wait() or {}",
        "@hookimpl\ndef megaopt_sharding_strategies(): return wait() or {}",
    ],
)
def test_a_plugin_that_takes_long_is_named_while_it_is_loaded(plugins, monkeypatch, where) -> None:
    """The line comes before the plugin is done, on stderr, so that a hang has a name and a remedy; the load goes on."""
    monkeypatch.setattr(_faults, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    plugins.install("slow", SLOW + where)
    plugins.install("good", GOOD)
    registry = plugins.registry()
    assert "plain" in registry.optimizers()
    assert "slow" in [plugin.info.name for plugin in registry.loaded_plugins()]
    assert sys.stderr.getvalue() == (
        "megaopt: plugin 'slow' (megaopt-slow 1.0) has been loading for more than 0.05 seconds; the environment "
        "variable MEGAOPT_DISABLE_PLUGINS=slow leaves it out\n"
    )


def test_the_wait_is_twenty_seconds() -> None:
    """An import of torch on a busy machine takes less."""
    assert _faults.SLOW_SECONDS == 20.0


def test_a_contested_name_raises_in_a_build_and_leaves_others(plugins) -> None:
    """Only whoever asks for that name is told."""
    plugins.install("good", GOOD)
    plugins.install(
        "other",
        "@hookimpl\ndef megaopt_optimizer_entries(): return {'plain': OptimizerEntry(torch.optim.SGD, state={})}",
    )
    plugins.registry()
    with pytest.raises(DuplicateNameError, match="optimizer 'plain'"):
        step_of("plain")
    assert step_of("second")


def test_an_error_inside_an_entry_keeps_its_cause(plugins) -> None:
    """What the plugin raised is the cause of the error that names it."""
    plugins.install("bad", ENTRY_TIME["an entry whose accepts fails"])
    plugins.registry()
    with pytest.raises(
        PluginError, match=r"^optimizer 'bad' of plugin 'bad' \(megaopt-bad 1.0\) failed: Zero"
    ) as caught:
        step_of("bad")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


FORKS = """
import os
if os.fork() == 0:
    {then}
else:
    os.wait()
"""


@pytest.mark.any_python
@pytest.mark.parametrize(
    "then", sometimes(["pass", "raise SystemExit(0)", "raise RuntimeError('bad')"], ["raise SystemExit(0)"])
)
def test_a_process_that_an_import_forks_off_does_not_run_the_program_again(plugins, then) -> None:
    """It ends where it came to be, and says why; the plugin works in the process that asked for it."""
    plugins.install("forks", FORKS.format(then=then))
    ran = plugins.python(
        "from megaopt_core import get_registry\nget_registry().optimizers()\nprint('the program')"
    )
    assert (ran.returncode, ran.stdout) == (0, "the program\n"), ran.stderr
    assert "plugin 'forks' (megaopt-forks 1.0) forked while it was imported" in ran.stderr


def test_hooks_may_change_what_a_configuration_holds_as_well(plugins) -> None:
    """The copy goes all the way down: settings of plugins, values in them, what the object itself keeps."""
    plugins.install("good", GOOD)
    plugins.install(
        "a_meddler",
        """
        @hookimpl
        def megaopt_param_overrides(config, model_chunks):
            for value in list(vars(config).values()):
                if isinstance(value, dict):
                    value.clear()
            vars(config).clear()
        """,
    )
    plugins.registry()
    optimizer = build_optimizer(torch.nn.Linear(2, 2), "plain", lr=0.25, good_beta=0.75)
    assert (optimizer.config.lr, optimizer.config.good_beta) == (0.25, 0.75)
    assert {group["momentum"] for group in optimizer.param_groups} == {0.75}
