"""The project files agree with each other."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(ROOT.glob("plugins/megaopt-*"))


def _pyproject(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def _requirements(groups: dict, name: str) -> Iterator[str]:
    for requirement in groups[name]:
        if isinstance(requirement, str):
            yield requirement
        else:
            yield from _requirements(groups, requirement["include-group"])


def _lines(file: str) -> list[str]:
    lines = [line.strip() for line in (ROOT / file).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_core_needs_only_torch_pluggy_and_attrs() -> None:
    """The core stays light: a dependency more is a decision, not an accident."""
    assert _pyproject(ROOT)["project"]["dependencies"] == ["torch>=2.11", "pluggy", "attrs"]


def test_pip_and_uv_install_the_same_for_development() -> None:
    """requirements-dev.txt lists every distribution, and the tools of the group `dev`."""
    editable = ["-e .", *(f"-e plugins/{plugin.name}" for plugin in PLUGINS)]
    tools = _requirements(_pyproject(ROOT)["dependency-groups"], "dev")
    assert sorted(_lines("requirements-dev.txt")) == sorted([*editable, *tools])


def test_the_environment_with_all_plugins_has_every_plugin() -> None:
    """tox.ini forgets no plugin."""
    everywhere = [line for line in _lines("tox.ini") if "-e plugins/" in line]
    assert [plugin.name for plugin in PLUGINS if not any(plugin.name in line for line in everywhere)] == []


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_plugin_has_the_shape_of_the_others(plugin: Path) -> None:
    """Name, entry point, package and license of a plugin follow from its folder's name."""
    suffix = plugin.name.removeprefix("megaopt-")
    project = _pyproject(plugin)["project"]
    assert project["name"] == plugin.name
    assert project["entry-points"] == {"megaopt": {suffix: f"megaopt_{suffix}.plugin"}}
    assert "megaopt-core" in project["dependencies"]
    assert project["requires-python"] == _pyproject(ROOT)["project"]["requires-python"]
    assert (plugin / "src" / f"megaopt_{suffix}" / "py.typed").is_file()
    assert (plugin / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
