"""The registry finds plugins without importing them, asks them in one order, and refuses what is ambiguous."""

import pytest
import torch

from megaopt_core.errors import DuplicateNameError, PluginHookError
from megaopt_core.registry import PluginRegistry, PluginStatus, get_registry, reset_registry

OFFERS_PLAIN = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD, description="plain")}
"""


def statuses(registry: PluginRegistry) -> dict[str, str]:
    """Plugin names with their statuses."""
    return {info.name: info.status.value for info in registry.plugins()}


def test_listing_imports_nothing(plugins) -> None:
    """Names, distributions and versions are known before any plugin runs."""
    plugins.install("boom", "raise SystemExit('imported')", version="2.1")
    registry = plugins.registry()
    core, boom = registry.plugins()
    assert (core.name, core.distribution, core.is_core) == ("core", None, True)
    assert (boom.name, boom.distribution, boom.version) == ("boom", "megaopt-boom", "2.1")
    assert boom.status is PluginStatus.AVAILABLE


def test_look_up_finds_what_a_plugin_offers(plugins) -> None:
    """An entry, its name in the list, and its owner."""
    plugins.install("one", OFFERS_PLAIN)
    registry = plugins.registry()
    assert registry.optimizer("plain").load_class() is torch.optim.SGD
    assert list(registry.optimizers()) == ["plain"]
    assert registry.owner("optimizer", "plain").source == "megaopt-one 1.0"
    assert statuses(registry) == {"core": "loaded", "one": "loaded"}


def test_the_core_is_a_plugin_like_others(plugins) -> None:
    """Its strategy and schedules come through the same hooks, and no variable can exclude it."""
    registry = plugins.registry(MEGAOPT_DISABLE_PLUGINS="core,megaopt-core", MEGAOPT_PLUGINS="")
    assert registry.owner("strategy", "replicated").name == "core"
    assert registry.strategy("replicated").name == "replicated"
    assert list(registry.strategies()) == ["replicated"]
    assert "cosine" in registry.schedules("lr")
    assert "WSD" not in registry.schedules("wd")
    assert registry.schedule("linear", "wd").weight_decay is not None


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (OFFERS_PLAIN, "optimizer 'plain'"),
        (
            "@hookimpl\ndef megaopt_schedules(): return {'steps': ScheduleStyle(learning_rate=lambda point: 1.0)}",
            "schedule 'steps'",
        ),
        (
            (
                "from megaopt_core.sharding import Replicated\n"
                "@hookimpl\ndef megaopt_sharding_strategies(): return {'mine': Replicated()}"
            ),
            "sharding strategy 'mine'",
        ),
    ],
)
def test_one_name_from_two_plugins_names_both(plugins, code, what) -> None:
    """No look-up guesses which one is meant, until one of them is blocked."""
    plugins.install("first", code)
    plugins.install("second", code, version="3.0")
    registry = plugins.registry()
    kind, name = what.removeprefix("sharding ").split(" ")
    ask = {"optimizer": registry.optimizer, "schedule": registry.schedule, "strategy": registry.strategy}[
        kind
    ]
    for _ in range(2):
        with pytest.raises(DuplicateNameError) as caught:
            ask(name.strip("'"))
        assert str(caught.value) == (
            f"{what} is given by plugin 'first' (megaopt-first 1.0) and by plugin 'second' (megaopt-second 3.0); "
            "uninstall one of them, or block it: MEGAOPT_DISABLE_PLUGINS=megaopt-second"
        )
        assert caught.value.owners == ("megaopt-first 1.0", "megaopt-second 3.0")
    assert [str(error) for error in registry.conflicts()] == [str(caught.value)]
    assert name.strip("'") not in {*registry.optimizers(), *registry.schedules(), *registry.strategies()}
    assert "replicated" in registry.strategies()
    assert plugins.registry(MEGAOPT_DISABLE_PLUGINS="megaopt-second").conflicts() == ()


def test_a_plugin_cannot_replace_the_cores_strategy(plugins) -> None:
    """The core has no special rights, and gives none up."""
    plugins.install(
        "thief",
        "from megaopt_core.sharding import Replicated\n"
        "@hookimpl\ndef megaopt_sharding_strategies(): return {'replicated': Replicated()}",
    )
    with pytest.raises(DuplicateNameError, match=r"is given by plugin 'core' .* and by plugin 'thief'"):
        plugins.registry().strategy("replicated")


def test_two_plugins_with_one_entry_point_name_both_work(plugins) -> None:
    """They differ in their distributions, by which one of them can be blocked; who asks by the name is told."""
    plugins.install("same", OFFERS_PLAIN)
    plugins.install("same", OFFERS_PLAIN.replace('{"plain"', '{"other"'), dist="other-same")
    registry = plugins.registry()
    assert sorted(registry.optimizers()) == ["other", "plain"]
    with pytest.raises(
        DuplicateNameError, match=r"^plugin name 'same' is given by plugin 'same' \(megaopt-same 1.0\)"
    ):
        registry.require_one_owner("plugin", "same")
    assert plugins.registry(MEGAOPT_DISABLE_PLUGINS="other-same").conflicts() == ()


def test_hooks_are_called_plugin_by_plugin_in_one_order(plugins) -> None:
    """Sorted by the plugin's name, whatever the order of installation; None is no result."""
    annotate = "@hookimpl\ndef megaopt_annotate_params(model_chunk): return {'weight': %r}"
    plugins.install("zeta", annotate % "z")
    plugins.install("alpha", annotate % "a")
    plugins.install("none", "@hookimpl\ndef megaopt_annotate_params(): return None")
    results = plugins.registry().call_each(
        "megaopt_annotate_params", model_chunk=torch.nn.Linear(1, 1), example=None, no_forward=""
    )
    assert [(info.name, result) for info, result in results] == [
        ("alpha", {"weight": "a"}),
        ("zeta", {"weight": "z"}),
    ]


def test_an_argument_that_has_a_default_in_the_plugin_is_given_too(plugins) -> None:
    """So that a plugin may also be used where an older megaopt does not give it."""
    plugins.install(
        "one",
        "@hookimpl\ndef megaopt_annotate_params(model_chunk, no_forward='?', later=3): return no_forward, later",
    )
    given = {"model_chunk": torch.nn.Linear(1, 1), "example": None, "no_forward": "why"}
    assert [answer for _, answer in plugins.registry().call_each("megaopt_annotate_params", **given)] == [
        ("why", 3)
    ]


def test_an_error_inside_a_hook_names_the_plugin(plugins) -> None:
    """What it raised is the cause; with a list for the errors, the others are called."""
    plugins.install(
        "bad", "@hookimpl\ndef megaopt_commands(commands): commands.append('bad'); 1 / 0", version="4.2"
    )
    plugins.install("good", "@hookimpl\ndef megaopt_commands(commands): commands.append('good')")
    registry = plugins.registry()
    with pytest.raises(PluginHookError) as caught:
        registry.call_each("megaopt_commands", commands=[])
    assert str(caught.value) == (
        "plugin 'bad' (megaopt-bad 4.2) failed in hook megaopt_commands: ZeroDivisionError: division by zero"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.plugin, caught.value.hook) == ("bad", "megaopt_commands")
    called: list[str] = []
    failed: list[PluginHookError] = []
    registry.call_each("megaopt_commands", failed=failed, commands=called)
    assert [str(error) for error in failed] == [str(caught.value)]
    assert called == ["bad", "good"]


def test_the_registry_of_the_process_is_made_once() -> None:
    """Until a test resets it."""
    reset_registry()
    first = get_registry()
    assert get_registry() is first
    reset_registry()
    assert get_registry() is not first
    reset_registry()
