"""CONTRIBUTING and the page of concepts name every folder of the tree and every distribution."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = sorted(path.parent.name for path in ROOT.glob("megaopt_core/*/__init__.py"))
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text()


def _table(text: str, heading: str) -> list[tuple[str, ...]]:
    """Return the rows of the table under a heading."""
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split(" | "))
        for line in section.splitlines()
        if "|" in line
    ]
    return rows[2:]


def _name_of(plugin: str) -> str:
    project: dict[str, str] = tomllib.loads((ROOT / "plugins" / plugin / "pyproject.toml").read_text())[
        "project"
    ]
    return project["name"]


@pytest.mark.parametrize(
    "folder", [*(f"megaopt_core/{name}/" for name in FOLDERS), *(f"plugins/{name}/" for name in PLUGINS)]
)
def test_a_contributor_is_told_what_goes_into_each_folder(folder: str) -> None:
    """In a line of the table of places."""
    rows = [row for row in _table(CONTRIBUTING, "The place of a change") if f"`{folder}`" in row[1]]
    assert len(rows) >= 1


def test_the_table_for_contributors_names_nothing_that_is_not_there() -> None:
    """Folders, files and pages; what is in capitals is for the reader to fill in."""
    named = re.findall(r"`([\w./-]+/[\w./-]*)`", CONTRIBUTING.partition("## The place of a change")[2])
    assert [path for path in named if not re.search(r"[A-Z]{3}", path) and not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "what",
    [
        "an optimizer",
        "a sharding strategy",
        "a schedule style",
        "a precision policy",
        "a rule that reads",
        "a command",
    ],
)
def test_the_next_of_each_kind_has_a_line(what: str) -> None:
    """Which begins with it."""
    assert [row for row in _table(CONTRIBUTING, "The place of a change") if row[0].startswith(what)]


def test_the_concepts_list_the_folders_of_the_core_from_the_lowest_layer_up() -> None:
    """As the import contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    height = {
        name.strip().removeprefix("megaopt_core."): level
        for level, layer in enumerate(layers)
        for name in layer.split("|")
    }
    listed = [
        row[0].strip("`").removeprefix("megaopt_core.")
        for row in _table(CONCEPTS, "Folders and distributions")
    ]
    assert sorted(listed) == FOLDERS
    assert [height[name] for name in listed] == sorted((height[name] for name in listed), reverse=True)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_distribution_is_named_in_the_table_of_folders_and_in_the_concepts(plugin: str) -> None:
    """With what it brings."""
    name = _name_of(plugin)
    assert re.search(rf"`{name}` \([^)]+\)", CONTRIBUTING)
    assert f"`{name}`" in CONCEPTS


def test_contributors_are_told_what_every_folder_of_the_repository_is_for() -> None:
    """In its table of folders, which names no folder that there is not."""
    listed = [row[0].strip("`") for row in _table(CONTRIBUTING, "Folders")]
    assert [folder for folder in listed if not (ROOT / folder).is_dir()] == []
    tests = next(row[1] for row in _table(CONTRIBUTING, "Folders") if row[0] == "`tests/`")
    there = {
        path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py")) or any(path.glob("*/*.py"))
    }
    assert {name for name in there if f"`{name}/`" not in tests} == set()
