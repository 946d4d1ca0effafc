"""What is said when something is asked for that no loaded plugin offers."""

from importlib.metadata import EntryPoint

import pytest

from megaopt_core.errors import (
    BrokenPluginError,
    DuplicateNameError,
    PluginError,
    PluginHookError,
    PluginNotInstalledError,
    UnknownNameError,
)
from megaopt_core.registry import PluginRegistry
from megaopt_core.registry._missing import did_you_mean

OFFERS_PLAIN = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD, description="plain")}
"""


@pytest.mark.filterwarnings("ignore::megaopt_core.errors.BrokenPluginWarning")
def test_asking_for_what_a_broken_plugin_should_have_brought_names_it(plugins) -> None:
    """By the catalogue, by the plugin's own name, and as a guess where nobody can know."""
    plugins.install("muon", "1 / 0", version="0.2")
    plugins.install("prodigy", "1 / 0")
    registry = plugins.registry()
    with pytest.raises(BrokenPluginError) as by_catalogue:
        registry.optimizer("adaptive_muon")
    assert str(by_catalogue.value) == (
        "optimizer 'adaptive_muon' comes with plugin 'muon' (megaopt-muon 0.2), which failed to load: "
        "ZeroDivisionError: division by zero (`megaopt plugins --load` shows where)"
    )
    assert by_catalogue.value.plugin == "muon"
    with pytest.raises(BrokenPluginError, match=r"^optimizer 'prodigy' comes with plugin 'prodigy' "):
        registry.optimizer("prodigy")
    with pytest.raises(BrokenPluginError) as guess:
        registry.optimizer("something_else")
    assert str(guess.value) == (
        "unknown optimizer 'something_else'. Known are: none. It may belong to a plugin that does not work: "
        "plugin 'muon' (megaopt-muon 0.2) failed to load (ZeroDivisionError: division by zero); "
        "plugin 'prodigy' (megaopt-prodigy 1.0) failed to load (ZeroDivisionError: division by zero)"
    )


def test_a_known_optimizer_whose_plugin_is_absent_says_what_to_install(plugins) -> None:
    """The one line that helps."""
    with pytest.raises(PluginNotInstalledError) as caught:
        plugins.registry().optimizer("muon")
    assert str(caught.value) == (
        "optimizer 'muon' comes with megaopt-muon, which is not installed: pip install megaopt-muon"
    )
    assert (caught.value.name, caught.value.distribution) == ("muon", "megaopt-muon")
    with pytest.raises(PluginNotInstalledError, match="pip install megaopt-distributed"):
        plugins.registry().strategy("distributed")


def test_a_plugin_that_is_too_old_for_a_name_says_upgrade(plugins) -> None:
    """It is installed and works, but does not offer what the catalogue expects of it."""
    plugins.install("muon", version="0.0.1")
    with pytest.raises(UnknownNameError) as caught:
        plugins.registry().optimizer("adaptive_muon")
    assert str(caught.value) == (
        "optimizer 'adaptive_muon' should come with megaopt-muon, but version 0.0.1 does not offer it: "
        "pip install --upgrade megaopt-muon"
    )


def test_an_unknown_name_lists_close_ones(plugins) -> None:
    """Also names that another plugin would bring."""
    plugins.install("one", OFFERS_PLAIN)
    registry = plugins.registry()
    with pytest.raises(UnknownNameError) as close:
        registry.optimizer("plian")
    assert str(close.value) == "unknown optimizer 'plian'; did you mean 'plain'? Known are: plain"
    assert (close.value.name, close.value.known) == ("plian", ("plain",))
    with pytest.raises(UnknownNameError) as far:
        registry.optimizer("zzz")
    assert str(far.value) == "unknown optimizer 'zzz'. Known are: plain"
    with pytest.raises(
        UnknownNameError, match="unknown sharding strategy 'replicate'; did you mean 'replicated'"
    ):
        registry.strategy("replicate")
    with pytest.raises(UnknownNameError, match="unknown schedule 'cosin'; did you mean 'cosine'"):
        registry.schedule("cosin")
    with pytest.raises(
        UnknownNameError, match=r"unknown schedule 'WSD'\. Known are: constant, cosine, linear"
    ):
        registry.schedule("WSD", "wd")


def test_plugin_errors_are_of_one_family() -> None:
    """`except PluginError` catches them all."""
    family = (
        PluginNotInstalledError,
        BrokenPluginError,
        DuplicateNameError,
        UnknownNameError,
        PluginHookError,
    )
    assert all(issubclass(error, PluginError) for error in family)


def test_an_entry_point_without_a_distribution_is_named_by_its_module() -> None:
    """Whoever makes a registry by hand gets the same words."""
    point = EntryPoint(name="mine", value="mine.plugin", group="megaopt")
    registry = PluginRegistry([point], {"MEGAOPT_DISABLE_PLUGINS": "mine"})
    with pytest.raises(PluginNotInstalledError) as caught:
        registry.optimizer("mine")
    assert str(caught.value) == (
        "optimizer 'mine' comes with plugin 'mine' (mine.plugin), which is installed, but "
        "MEGAOPT_DISABLE_PLUGINS=mine blocks it"
    )
    assert caught.value.distribution is None


ALIKE = {
    "SGD": "'sgd'",
    "AdamW": "'adamw'",
    "torch.optim.AdamW": "'adamw'",
    "Adaptive-Muon": "'adaptive_muon'",
    "adamw_torch_fused": "'adamw'",
    "Layer-Wise": "'layer_wise'",
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_name_is_known_however_it_is_written(name) -> None:
    """Case, lines between words, torch's module and what others append do not matter for the guess."""
    known = ["adam", "adamw", "sgd", "muon", "adaptive_muon", "layer_wise", "x"]
    assert did_you_mean(name, known) == f"; did you mean {ALIKE[name]}?"


@pytest.mark.parametrize(
    ("name", "torchs"), [("nadam", "NAdam"), ("Adafactor", "Adafactor"), ("torch.optim.Rprop", "Rprop")]
)
def test_an_optimizer_of_torch_is_told_by_the_name_that_reaches_it(plugins, name, torchs) -> None:
    """Which the bridge resolves."""
    with pytest.raises(
        UnknownNameError, match=rf"; torch's class goes by 'torch:{torchs}' \(megaopt-bridge\)\. Known"
    ):
        plugins.registry().optimizer(name)


def test_a_name_near_to_one_that_is_absent_says_what_to_install(plugins) -> None:
    """The guess alone would lead to the next error."""
    with pytest.raises(UnknownNameError, match=r"did you mean 'muon' \(pip install megaopt-muon\)\?"):
        plugins.registry().optimizer("Muon")
    plugins.install("lion", OFFERS_PLAIN.replace("plain", "lion"))
    with pytest.raises(UnknownNameError, match=r"did you mean 'lion'\? Known are: lion$"):
        plugins.registry().optimizer("Lion")
