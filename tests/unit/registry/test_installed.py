"""What is installed badly is left out, and what is left behind counts once."""

import shutil
import warnings

import pytest

from megaopt_core.errors import BrokenPluginWarning
from megaopt_core.registry import PluginRegistry

OFFERS = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD)}
"""


def found(*names: str) -> PluginRegistry:
    """Return a registry of what is installed in this process, as far as it has these names."""
    return PluginRegistry(environ={"MEGAOPT_PLUGINS": ",".join(names)})


@pytest.mark.parametrize(("group", "is_told"), [("megaopt", True), ("console_scripts", False)])
def test_a_distribution_that_cannot_be_read_harms_no_other(plugins, group, is_told) -> None:
    """Python reads the entry points of all distributions or of none; who is no plugin is nobody's concern."""
    plugins.install("good", OFFERS)
    info = plugins.folder / "damaged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nno equals sign\n")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        registry = found("good")
    assert list(registry.optimizers()) == ["plain"]
    told = [str(each.message) for each in said if issubclass(each.category, BrokenPluginWarning)]
    assert [words.startswith("damaged: its entry_points.txt cannot be read") for words in told] == [
        True
    ] * is_told


@pytest.mark.parametrize("kept", ["METADATA", "nothing"])
def test_what_an_interrupted_uninstall_leaves_is_no_second_plugin(plugins, kept) -> None:
    """A folder beside the real one, under the name that pip gives to what it is about to remove."""
    plugins.install("good", OFFERS, version="1.1")
    left = plugins.folder / "~egaopt_good-1.0.dist-info"
    shutil.copytree(plugins.folder / "megaopt_good-1.1.dist-info", left)
    (left / "METADATA").write_text("Metadata-Version: 2.1\nName: megaopt-good\nVersion: 1.0\n")
    if kept == "nothing":
        (left / "METADATA").unlink()
    registry = found("good")
    assert [info.version for info in registry.plugins() if info.name == "good"] == ["1.1"]
    assert list(registry.optimizers()) == ["plain"]


def test_a_plugin_whose_metadata_are_gone_still_works(plugins) -> None:
    """It goes by the name of its entry point."""
    plugins.install("bare", OFFERS)
    (plugins.folder / "megaopt_bare-1.0.dist-info" / "METADATA").unlink()
    registry = found("bare")
    (info,) = [info for info in registry.plugins() if info.name == "bare"]
    assert (info.distribution, info.version) == (None, None)
    assert registry.owner("optimizer", "plain").name == "bare"
