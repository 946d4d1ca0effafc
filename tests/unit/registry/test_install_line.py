"""The line that installs a plugin works where megaopt was installed from a clone, too."""

from importlib import metadata
from pathlib import Path

import pytest

from megaopt_core.errors import PluginNotInstalledError
from megaopt_core.registry import _install_line as module

NEEDS = {
    "megaopt-soap": ["megaopt-core>=0.1", "megaopt-roles>=0.1,<0.2"],
    "megaopt-roles": ["megaopt-core>=0.1"],
}


class _Core:
    """The core's metadata, as pip writes them.

    Args:
        clone: the folder that it was installed from.
        how: what pip notes of the folder.
    """

    def __init__(self, clone: Path, how: str) -> None:
        self.note = f'{{"url": "{clone.as_uri()}", "dir_info": {how}}}'

    def read_text(self, name: str) -> str:
        assert name == "direct_url.json"
        return self.note


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone in a folder whose name has a space, with two plugins."""
    root = tmp_path / "my clone"
    for name, needs in NEEDS.items():
        folder = root / "plugins" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(f"[project]\ndependencies = {needs}\n")
    return root


def _installed(monkeypatch: pytest.MonkeyPatch, clone: Path, how: str, *others: str) -> None:
    """Let the core come from a clone, and only the given distributions be there beside it."""
    there = {"megaopt-core": _Core(clone, how), **dict.fromkeys(others, object())}
    monkeypatch.setattr(metadata, "distributions", lambda name: [there[name]] if name in there else [])


def test_a_clone_gives_the_folder_and_all_that_it_needs(monkeypatch, clone, plugins) -> None:
    """In the order in which they build on each other, without the installed ones; in the error of a name, too."""
    soap, roles = (clone / "plugins" / name for name in ("megaopt-soap", "megaopt-roles"))
    registry = plugins.registry()
    _installed(monkeypatch, clone, "{}")
    assert module.install_line("megaopt-soap") == f"pip install '{roles}' '{soap}'"
    with pytest.raises(PluginNotInstalledError) as caught:
        registry.optimizer("soap")
    assert str(caught.value).endswith(f"which is not installed: pip install '{roles}' '{soap}'")
    _installed(monkeypatch, clone, "{}", "megaopt-roles")
    assert module.install_line("megaopt-soap") == f"pip install '{soap}'"


@pytest.mark.parametrize("how", ['{"editable": true}', "{}"])
def test_others_come_from_an_index(monkeypatch, clone, how) -> None:
    """What the clone does not hold, and everything for an editable installation."""
    _installed(monkeypatch, clone, how)
    name = "megaopt-soap" if "editable" in how else "megaopt-rare"
    assert module.install_line(name) == f"pip install {name}"


def test_a_core_that_was_never_installed_names_the_index(monkeypatch) -> None:
    """As from a source tree on the path."""
    monkeypatch.setattr(metadata, "distributions", lambda name: [])
    assert module.install_line("megaopt-soap") == "pip install megaopt-soap"
