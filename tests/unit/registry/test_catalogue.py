"""The core knows no optimizer by name, but for one module."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaopt_core.registry import _catalogue as catalogue

ROOT = Path(__file__).parents[3]
CORE = sorted((ROOT / "megaopt_core").rglob("*.py"))
# `use_muon` is an attribute that trainers set on parameters, whichever optimizer steps them.
NAMES = re.compile(r"(?<![a-z])(?<!use_)(adaptive_muon|adamw?|sgd|muon|lion|soap)(?![a-z])", re.IGNORECASE)

ALLOWED = {
    "megaopt_core/registry/_catalogue.py",
    "plugins/megaopt-testing/src/megaopt_testing/checks/identity.py",  # compares with torch's own classes
    "plugins/megaopt-testing/src/megaopt_testing/suite.py",  # says what it compares with
}


def words_of_code(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield identifiers and strings with their lines; docstrings and comments may name examples."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.lineno, node.value
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.lineno, node.arg or ""


def test_no_optimizer_is_named_in_the_core() -> None:
    """What an optimizer needs from the core, every plugin gets; only the catalogue knows who they are."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {word!r}"
        for file in CORE
        if str(file.relative_to(ROOT)) not in ALLOWED
        for line, word in words_of_code(ast.parse(file.read_text()))
        if NAMES.search(word)
    ]
    assert found == []


@pytest.mark.parametrize("name", catalogue.REFERENCE_SETTINGS)
def test_every_old_setting_has_an_owner(name) -> None:
    """A configuration of another trainer tells which plugin it needs."""
    owner = catalogue.distribution_of("setting", name)
    assert owner in set(catalogue.OFFERED["optimizer"].values())


def test_the_longest_prefix_decides() -> None:
    """`adaptive_muon_eps` is not a setting `adaptive` of something."""
    assert catalogue.distribution_of("setting", "adaptive_muon_eps") == "megaopt-muon"
    assert catalogue.distribution_of("setting", "muon_momentum") == "megaopt-muon"
    assert catalogue.distribution_of("setting", "lr") is None
    assert catalogue.distribution_of("setting", "adamant_x") is None


def test_the_catalogue_agrees_with_the_plugins_that_are_installed() -> None:
    """Names, strategies and prefixes are those that our own plugins register."""
    from megaopt_core.registry import PluginRegistry

    registry = PluginRegistry(environ={})
    registry.load()
    for plugin in registry.loaded_plugins():
        if plugin.info.distribution not in set(catalogue.OFFERED["optimizer"].values()):
            continue
        expected = {
            name
            for name, owner in catalogue.OFFERED["optimizer"].items()
            if owner == plugin.info.distribution
        }
        assert set(plugin.offers["optimizer"]) == expected
        owned = {info.name for info in registry.setting_owners().values() if info.plugin == plugin.info}
        for name in catalogue.REFERENCE_SETTINGS:
            assert (name in owned) is (
                catalogue.distribution_of("setting", name) == plugin.info.distribution
            ), name


def test_old_names_of_the_configuration_still_work() -> None:
    """With a warning that says the new one."""
    import megaopt_core

    for name, new in catalogue.REFERENCE_ALIASES.items():
        with pytest.warns(DeprecationWarning, match=rf"^{name} is deprecated: use {new}$") as caught:
            assert getattr(megaopt_core, name) is megaopt_core.OptimizerConfig
        assert caught[0].filename == __file__
