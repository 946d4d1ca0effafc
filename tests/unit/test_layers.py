"""The import contracts in pyproject.toml know every module and every plugin."""

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"

LEANS_ON = {
    "megaopt_fsdp": {"megaopt_layerwise", "megaopt_checkpoint"},
    "megaopt_layerwise": {"megaopt_distributed"},
    "megaopt_trainers": {"megaopt_checkpoint"},
}
"""The plugins that may import others of ours, and which."""


def _linter() -> dict:
    return tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]


def _layered() -> set[str]:
    (contract,) = [contract for contract in _linter()["contracts"] if contract["type"] == "layers"]
    return {module for layer in contract["layers"] for module in re.findall(r"[\w.]+", layer)}


def _modules() -> set[str]:
    files = (ROOT / "megaopt_core").rglob("*.py")
    return {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}


def _is_in(module: str, layered: set[str]) -> bool:
    return any(module == layer or module.startswith(f"{layer}.") for layer in layered)


def test_every_module_of_the_core_has_a_layer() -> None:
    """A new module cannot escape the layers by not being listed."""
    unlisted = {module for module in _modules() if not _is_in(module, _layered())}
    assert {module for module in unlisted if not module.endswith(".__init__")} == set()


def test_every_plugin_is_under_the_contracts() -> None:
    """A new plugin is linted, kept from the others, and kept out of the core."""
    plugins = {folder.name for folder in ROOT.glob("plugins/megaopt-*/src/megaopt_*") if folder.suffix == ""}
    contracts = {contract["type"]: contract for contract in _linter()["contracts"]}
    forbidden = {
        source: set(contract["forbidden_modules"])
        for contract in _linter()["contracts"]
        if contract["type"] == "forbidden"
        for source in contract["source_modules"]
    }
    assert set(_linter()["root_packages"]) == {"megaopt_core"} | plugins
    assert set(contracts["independence"]["modules"]) == plugins - set(LEANS_ON)
    assert forbidden["megaopt_core"] >= plugins
    for plugin, others in LEANS_ON.items():
        assert forbidden[plugin] == plugins - {plugin} - others


TYPES_FROM_ABOVE = {
    ("plugin_api", "config"),
    ("plugin_api", "execution"),
    ("plugin_api", "precision"),
}
"""A hook names the class that its implementations get or return, for type checkers only: its signature is what authors
of plugins read, and a smaller protocol would take fields of the configuration from them."""


def test_few_types_come_from_higher_layers() -> None:
    """`state` stands over a protocol, not over the optimizers."""
    (contract,) = [contract for contract in _linter()["contracts"] if contract["type"] == "layers"]
    height = {
        module.split(".")[1]: -index
        for index, layer in enumerate(contract["layers"])
        for module in re.findall(r"[\w.]+", layer)
    }
    pairs = set()
    for file in (ROOT / "megaopt_core").glob("*/**/*.py"):
        mine = file.relative_to(ROOT / "megaopt_core").parts[0]
        for name in re.findall(r"^ +from megaopt_core\.(\w+)\S* import", file.read_text(), re.MULTILINE):
            if height[name] > height[mine]:
                pairs.add((mine, name))
    assert pairs == TYPES_FROM_ABOVE


@pytest.mark.parametrize("folder", ["precision", "sharding"])
def test_precision_and_sharding_do_not_know_where_steps_run(folder) -> None:
    """Neither a word of placement or of graphs, nor an import of what runs steps."""
    words = re.compile(r"offload|pin_memory|pinned|cuda_?graph|\bgraphs?\b|step_?runner", re.IGNORECASE)
    files = sorted((ROOT / "megaopt_core" / folder).rglob("*.py"))
    assert files
    assert [
        f"{file.name}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if words.search(line)
    ] == []


STRATEGIES = ("distributed", "layerwise", "fsdp")
PLACEMENT = re.compile(
    r"offload|pinned|pin_memory|cuda.?graph|captur|step_?runner|megaopt_device|non_blocking|cuda\.stream",
    re.IGNORECASE,
)


def test_neither_precision_nor_sharding_speaks_of_placement_or_graphs() -> None:
    """Where states lie and how steps run is decided beside them; torch's own CPUOffloadPolicy may be named."""
    folders = [ROOT / "megaopt_core" / name for name in ("precision", "sharding")]
    folders += [ROOT / "plugins" / f"megaopt-{name}" / "src" for name in STRATEGIES]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 40
    found = {
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if PLACEMENT.search(line.replace("CPUOffloadPolicy", ""))
    }
    assert found == set()
