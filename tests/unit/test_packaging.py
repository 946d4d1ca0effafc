"""The project files agree with each other."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = sorted(ROOT.glob("plugins/megaopt-*"))
META = ROOT / "plugins/megaopt-all"
PLUGINS = [folder for folder in DISTRIBUTIONS if folder != META]


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
    assert _pyproject(ROOT)["project"]["dependencies"] == ["torch>=2.11", "pluggy>=1.5", "attrs>=24.1"]


def _range() -> str:
    """The versions that a distribution of ours requires of its siblings: those of its own minor version."""
    major, minor, _ = _pyproject(ROOT)["project"]["version"].split(".")
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_distributions_carry_one_version_and_require_it_of_each_other(folder: Path) -> None:
    """A mixture is refused by pip, not found out at run time; the workspace knows every sibling."""
    pyproject = _pyproject(folder)
    project = pyproject["project"]
    optional = [need for needs in project.get("optional-dependencies", {}).values() for need in needs]
    ours = [need for need in [*project["dependencies"], *optional] if need.startswith("megaopt")]
    names = [need.removesuffix(_range()) for need in ours]
    assert project["version"] == _pyproject(ROOT)["project"]["version"]
    assert [name for name in names if not re.fullmatch(r"megaopt-[a-z]+", name)] == []
    assert set(pyproject["tool"]["uv"]["sources"]) == set(names)


def test_the_meta_distribution_brings_every_other_and_nothing_of_its_own() -> None:
    """What trains comes with `megaopt`, the rest with `megaopt[dev]`."""
    pyproject = _pyproject(META)
    project = pyproject["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    every = {"megaopt-core", *(plugin.name for plugin in PLUGINS)}
    assert project["name"] == "megaopt"
    assert {need.removesuffix(_range()) for need in needs} == every
    assert "entry-points" not in project
    assert pyproject["tool"]["setuptools"]["packages"] == []
    assert not (META / "src").exists()
    assert (META / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_pip_and_uv_install_the_same_for_development() -> None:
    """requirements-dev.txt lists every distribution, and the tools of the group `dev`."""
    editable = ["-e .", *(f"-e plugins/{folder.name}" for folder in DISTRIBUTIONS)]
    tools = _requirements(_pyproject(ROOT)["dependency-groups"], "dev")
    assert sorted(_lines("requirements-dev.txt")) == sorted([*editable, *tools])


def test_the_environment_with_all_plugins_has_every_plugin() -> None:
    """tox.ini forgets no plugin."""
    everywhere = [line for line in _lines("tox.ini") if "-e plugins/" in line]
    assert [
        folder.name for folder in DISTRIBUTIONS if not any(folder.name in line for line in everywhere)
    ] == []


def test_the_lowest_environment_has_the_oldest_versions_that_the_metadata_allow() -> None:
    """Of torch, pluggy, attrs and emerging-optimizers: a bound that is raised is raised in tox.ini, too."""
    pinned = dict(
        re.findall(r"^ +lowest: ([\w-]+)==([\d.]+?)(?:\.\*)?$", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    )
    needs = [need for folder in (ROOT, *PLUGINS) for need in _pyproject(folder)["project"]["dependencies"]]
    oldest = {found[1]: found[2] for need in needs if (found := re.match(r"([\w-]+)>=([\d.]+)", need))}
    assert set(pinned) >= {"torch", "pluggy", "attrs", "emerging-optimizers"}
    assert {name: tuple(map(int, oldest[name].split("."))) for name in pinned} == {
        name: tuple(map(int, version.split(".")))[: oldest[name].count(".") + 1]
        for name, version in pinned.items()
    }


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_plugin_has_the_shape_of_the_others(plugin: Path) -> None:
    """Name, entry point, package and license of a plugin follow from its folder's name."""
    suffix = plugin.name.removeprefix("megaopt-")
    project = _pyproject(plugin)["project"]
    assert project["name"] == plugin.name
    assert project["entry-points"] == {"megaopt": {suffix: f"megaopt_{suffix}.plugin"}}
    assert f"megaopt-core{_range()}" in project["dependencies"]
    assert project["requires-python"] == _pyproject(ROOT)["project"]["requires-python"]
    assert (plugin / "src" / f"megaopt_{suffix}" / "py.typed").is_file()
    assert (plugin / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
