"""`import megaopt_core` is light, and every public name resolves on first use."""

import ast
import importlib
from pathlib import Path

import pytest

import megaopt_core
from megaopt_core.errors import MovedNameError
from megaopt_core.registry._catalogue import LEFT_NAMES

SOURCE = Path(megaopt_core.__file__)

HEAVY = """
import sys
heavy = ("emerging_optimizers", "torch.distributed.checkpoint", "torch.distributed.tensor", "numpy", "matplotlib")
before = set(sys.modules)
def check(stage):
    new = set(sys.modules) - before
    loaded = sorted(m for m in new if m.startswith(heavy) or m.startswith("fake_"))
    assert loaded == [], (stage, loaded)
"""


@pytest.mark.any_python
def test_importing_is_lazy(plugins) -> None:
    """No plugin, no emerging-optimizers, no checkpoint code; a configuration of core fields loads no plugin either."""
    plugins.install("one", "print('imported')")
    done = plugins.python(
        HEAVY
        + """
import megaopt_core
assert not any(module.partition(".")[0] == "torch" for module in set(sys.modules) - before)
assert [module for module in sys.modules if module.startswith("megaopt")] == ["megaopt_core"]

import torch
before |= set(sys.modules)
for name, home in megaopt_core._HOME.items():
    if not home.startswith("checkpoint."):
        getattr(megaopt_core, name)
check("public names but those of checkpoints")
config = megaopt_core.OptimizerConfig(lr=0.1, bf16=True)
config.to_dict(), repr(config), config == config.replace(lr=0.2)
infos = megaopt_core.get_registry().plugins()
assert "one" in [info.name for info in infos]
check("configuration")
megaopt_core.get_registry().load()
assert any(module.startswith("fake_one") for module in sys.modules)
"""
    )
    assert (done.stdout, done.stderr) == ("imported\n", "")


def test_public_names_are_sorted_listed_and_imported_for_type_checkers() -> None:
    """`__all__`, the table of homes and the imports under TYPE_CHECKING say the same."""
    tree = ast.parse(SOURCE.read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.name: node.module
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"megaopt_core.{home}" for name, home in megaopt_core._HOME.items()}
    assert imported == homes
    assert set(megaopt_core.__all__) == set(homes)
    assert set(dir(megaopt_core)) >= set(homes)


@pytest.mark.parametrize("name", megaopt_core.__all__)
def test_every_public_name_resolves(name) -> None:
    """To what its module calls by this name."""
    assert getattr(megaopt_core, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    """With the usual words."""
    with pytest.raises(AttributeError, match=r"^module 'megaopt_core' has no attribute 'nonsense'$"):
        megaopt_core.nonsense  # noqa: B018 - reading is the test
    assert not hasattr(megaopt_core, "__wrapped__")


@pytest.mark.parametrize(("name", "distribution"), LEFT_NAMES.items())
def test_a_name_that_another_distribution_has_says_where_it_is(name, distribution) -> None:
    """`from megaopt_core import NAME` shows it as well."""
    package = distribution.replace("-", "_")
    message = f"{name} comes with {distribution}: from {package} import {name} (pip install {distribution})"
    with pytest.raises(MovedNameError) as caught:
        exec(f"from megaopt_core import {name}")  # noqa: S102 - importing is the test
    assert (str(caught.value), caught.value.name, caught.value.distribution) == (message, name, distribution)


def test_a_name_that_has_left_is_where_it_is_said_to_be() -> None:
    """As far as its distribution is installed."""
    for name, distribution in LEFT_NAMES.items():
        try:
            package = importlib.import_module(distribution.replace("-", "_"))
        except ModuleNotFoundError:
            continue
        assert name in package.__all__
