"""The project files agree with each other."""

import ast
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
    has_commands = "def megaopt_commands(" in (plugin / "src" / f"megaopt_{suffix}" / "plugin.py").read_text()
    groups = ["megaopt", "megaopt.commands"] if has_commands else ["megaopt"]
    ours = {group: points for group, points in project["entry-points"].items() if group.startswith("megaopt")}
    assert ours == {group: {suffix: f"megaopt_{suffix}.plugin"} for group in groups}
    assert f"megaopt-core{_range()}" in project["dependencies"]
    assert project["requires-python"] == _pyproject(ROOT)["project"]["requires-python"]
    assert (plugin / "src" / f"megaopt_{suffix}" / "py.typed").is_file()
    assert (plugin / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


PLACES = ("CONTRIBUTING.md", "docs/plugins.md")
"""Pages with a table of all distributions."""


def _contracts() -> dict[str, list[str]]:
    """The lists of the import linter in which every package stands, by their names."""
    linter = _pyproject(ROOT)["tool"]["importlinter"]
    core = next(each for each in linter["contracts"] if each.get("source_modules") == ["megaopt_core"])
    acyclic = next(each for each in linter["contracts"] if each["type"] == "acyclic_siblings")
    return {
        "root_packages": linter["root_packages"],
        "forbidden to the core": core["forbidden_modules"],
        "acyclic": acyclic["ancestors"],
    }


def _imports_are_bounded(package: str) -> bool:
    """Return whether a contract says which plugins a package may import: none, or all but those that it needs."""
    contracts = _pyproject(ROOT)["tool"]["importlinter"]["contracts"]
    independent = next(each for each in contracts if each["type"] == "independence")["modules"]
    return package in independent or any(each.get("source_modules") == [package] for each in contracts)


def _tox_environments() -> dict[str, list[str]]:
    """The sections of tox.ini that install every distribution, and the lines of each."""
    sections = re.split(r"^\[(.+)\]$", (ROOT / "tox.ini").read_text(), flags=re.MULTILINE)
    every = {"testenv", "testenv:lint", "testenv:type", "testenv:docs", "testenv:demo{,-short}"}
    found = {
        name: lines.splitlines()
        for name, lines in zip(sections[1::2], sections[2::2], strict=True)
        if name in every
    }
    assert set(found) == every
    return found


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_a_distribution_is_named_wherever_all_are(folder: Path) -> None:
    """In its own files, tox.ini, the import contracts and tables for readers; what lacks it is listed."""
    package, is_meta = folder.name.replace("-", "_"), folder == META
    lacking = [
        f"{folder.name}/{file}" for file in ("README.md", "pyproject.toml") if not (folder / file).is_file()
    ]
    for name, lines in _tox_environments().items():
        named = re.compile(rf"-e plugins/{folder.name}(\[\w+\])?(\s|$)")
        lacking += [f"tox.ini [{name}]"] if not any(map(named.search, lines)) else []
    if not is_meta:
        lacking += (
            [f"{folder.name}/tests"]
            if not list(folder.glob("tests/test_*.py")) + list(folder.glob("tests/*/test_*.py"))
            else []
        )
        lacking += [f"import linter: {name}" for name, every in _contracts().items() if package not in every]
        lacking += [] if _imports_are_bounded(package) else ["import linter: no contract bounds its imports"]
        lacking += [page for page in PLACES if f"`{folder.name}`" not in (ROOT / page).read_text()]
    assert lacking == []


def test_every_environment_of_tox_is_a_combination_of_plugins() -> None:
    """`MEGAOPT_COMBO` knows what each environment installs, and names no plugin that is gone."""
    combos = (ROOT / "tests/combos/test_combo.py").read_text()
    tree = next(
        node
        for node in ast.parse(combos).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMBOS"
    )
    assert isinstance(tree.value, ast.Dict)
    listed = {ast.literal_eval(key) for key in tree.value.keys if key is not None}
    environments = set()
    for name in re.findall(
        r"^    py31[23]-(?:\{(.+)\}|(\w+))$", (ROOT / "tox.ini").read_text(), re.MULTILINE
    ):
        environments.update(part.strip() for part in (name[0] or name[1]).split(","))
    assert environments - listed == set()
    plugins = {plugin.name.removeprefix("megaopt-") for plugin in PLUGINS}
    named = {
        node.value
        for values in tree.value.values
        for node in ast.walk(values)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert named <= plugins
