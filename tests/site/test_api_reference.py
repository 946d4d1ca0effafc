"""The reference lists every public module, and a line for each of its names."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """What writes the pages at every build."""
    pytest.importorskip("sphinx")
    path = DOCS / "_extensions" / "public_api.py"
    spec = importlib.util.spec_from_file_location("public_api", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_folder_of_the_core_is_listed_once(reference) -> None:
    """Under one topic each."""
    listed = list(reference.modules())
    assert len(listed) == len(set(listed))
    folders = {
        f"megaopt_core.{path.parent.name}"
        for path in (DOCS.parent / "megaopt_core").glob("*/__init__.py")
        if importlib.import_module(f"megaopt_core.{path.parent.name}").__all__
    }
    single = {"megaopt_core.build", "megaopt_core.errors"}
    assert {name for name in listed if name.startswith("megaopt_core")} == folders | single


def test_every_plugin_with_public_names_is_listed(reference) -> None:
    """Those of ours that are installed here."""
    for path in PLUGINS.glob("*/src/*/__init__.py"):
        name = path.parent.name
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            offered = getattr(importlib.import_module(name), "__all__", ())
            assert (name in set(reference.modules())) is bool(offered), name


def test_every_function_and_class_has_a_line(reference) -> None:
    """The first sentence of its docstring."""
    for module in reference.modules():
        pytest.importorskip(module.partition(".")[0])
        home = importlib.import_module(module)
        for name in reference.public_names(module):
            documented = getattr(home, name)
            if isinstance(documented, type) or callable(documented):
                assert reference.summary(documented) or not isinstance(documented, type), f"{module}.{name}"
