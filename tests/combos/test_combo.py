"""What is installed is what the environment's name says."""

import os
import re
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
EVERY = {folder.parent.name.removeprefix("megaopt-") for folder in PLUGINS.glob("megaopt-*/tests")}

# Of a real trainer's environment.
TRAINERS = EVERY - {"device", "tools"}

# What users install together; their environments hold what the metadata ask for and nothing else.
PAIRS = {
    "muon-only": ("muon",),
    "muon-layerwise": ("muon", "layerwise"),
    "soap-distributed": ("soap", "distributed"),
}

# The plugins of an environment, named and needed. adam steps what lion, muon and soap leave; muon and soap read roles;
# the tests are written with the kit.
COMBOS = {
    "core": {"testing"},
    "roles": {"roles", "testing"},
    "checkpoint": {"checkpoint", "testing"},
    "adam": {"adam", "testing"},
    "adam-distributed": {"adam", "distributed", "testing"},
    "muon-only": {"adam", "muon", "roles"},
    "muon-layerwise": {"adam", "checkpoint", "distributed", "guards", "layerwise", "muon", "roles"},
    "soap-distributed": {"adam", "checkpoint", "distributed", "guards", "roles", "soap"},
    "device": {
        "adam",
        "checkpoint",
        "device",
        "distributed",
        "layerwise",
        "lion",
        "muon",
        "roles",
        "soap",
        "testing",
    },
    "guards": {"testing"},
    "lion": {"adam", "lion", "testing"},
    "lowbit": {"testing"},
    "muon": {"adam", "muon", "roles", "testing"},
    "soap": {"adam", "roles", "soap", "testing"},
    "layerwise": {"adam", "checkpoint", "distributed", "layerwise", "muon", "roles", "testing"},
    "fsdp": {"adam", "checkpoint", "distributed", "fsdp", "layerwise", "muon", "roles", "testing"},
    "bridge": {"adam", "bridge", "checkpoint", "distributed", "roles", "testing"},
    "models": {"roles", "testing"},
    "examples": {"adam", "checkpoint", "distributed", "fsdp", "layerwise", "muon", "roles", "testing"},
    "trainers-megatron": TRAINERS,
    "trainers-hub": TRAINERS,
    "trainers-torchtitan": TRAINERS,
    "thirdparty": {"adam", "checkpoint", "distributed", "muon", "roles", "testing", "tools"},
    "lowest": {"adam", "checkpoint", "distributed", "muon", "roles", "testing"},
    "long": EVERY - {"tools"},
    "all": EVERY,
    "demo": EVERY,
    "demo-short": EVERY,
    "docs": EVERY,
    "wheels": EVERY,
}


def _combo() -> str:
    name = os.environ.get("MEGAOPT_COMBO")
    if name is None:
        pytest.skip("MEGAOPT_COMBO is not set: this is no environment of tox")
    return re.sub(r"^py\d+-", "", name)


@pytest.mark.long
def test_only_the_plugins_of_the_long_runs_are_installed() -> None:
    """The same where long runs alone are made."""
    test_only_the_plugins_of_the_environment_are_installed()


def test_only_the_plugins_of_the_environment_are_installed() -> None:
    """No plugin comes in unasked, and none is left out: the matrix tests what it says that it tests."""
    installed = {point.name: point.dist.name for point in entry_points(group="megaopt") if point.dist}
    expected = {"core", *COMBOS[_combo()]}
    expected |= (
        {"bridge", "checkpoint", "guards", "lowbit"} if "testing" in expected else set()
    )  # the kit requires them
    assert installed == {name: f"megaopt-{name}" for name in expected}
    asked = {line for name in installed.values() for line in requires(name) or () if "extra ==" not in line}
    ours = {re.split(r"[^\w-]", line)[0] for line in asked if line.startswith("megaopt-")}
    assert ours <= set(installed.values())
    if _combo() in PAIRS:
        assert set(installed.values()) == ours | {f"megaopt-{name}" for name in PAIRS[_combo()]}


def test_every_environment_looks_at_what_is_installed() -> None:
    """Each combination of tox.ini is listed here, and runs this file."""
    text = (PLUGINS.parent / "tox.ini").read_text()
    listed = re.search(r"^    py312-\{(.*)\}$", text, re.MULTILINE)
    assert listed is not None
    assert {name.strip() for name in listed[1].split(",")} <= set(COMBOS)
    runs = [line for line in text.splitlines() if "{[tests]run}" in line and "py313-all" not in line]
    looking = ("{[tests]combo}", "{[tests]kit}", "tests/combos")
    assert [line for line in runs if not any(part in line for part in looking)] == []


@pytest.mark.skipif(
    not (PLUGINS.parent / ".ci" / "run").exists(), reason="these tests run without the sources around them"
)
def test_every_trainer_has_an_environment_that_runs() -> None:
    """The folders of `tests/trainers`, the environments, and what continuous integration runs are the same."""
    root = PLUGINS.parent
    folders = {path.parent.name for path in (root / "tests" / "trainers").glob("*/test_*.py")}
    loop = re.search(r"^for trainer in (.*); do$", (root / ".ci" / "run").read_text(), re.MULTILINE)
    assert loop is not None
    environments = re.findall(r"^\[testenv:trainers-(.*)\]$", (root / "tox.ini").read_text(), re.MULTILINE)
    assert set(loop[1].split()) == set(environments) == folders
    assert {f"trainers-{name}" for name in folders} <= set(COMBOS)


def test_every_entry_point_loads() -> None:
    """Each plugin can be imported with nothing installed beyond what its own metadata asks for."""
    _combo()
    for point in entry_points(group="megaopt"):
        assert point.load().megaopt_api == "1", point
