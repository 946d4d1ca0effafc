"""`megaopt optimizers`: what there is to choose."""

import json

import pytest
from megaopt_testing.fake_plugins import FakePlugins

from megaopt_core.cli import main

PLUGIN = """
@frozen
class Settings:
    beta: float = field(default=0.5, metadata={"help": "how much of the past is kept"})
    dtype: torch.dtype = field(default=torch.bfloat16, metadata={"help": "in which state is kept"})
    sizes: tuple[int, ...] = field(factory=lambda: (1, 2), metadata={"help": "how large"})

@hookimpl
def megaopt_optimizer_entries():
    return {
        "kept": OptimizerEntry(
            "module:Kept", settings=Settings, setting_prefixes=("kept",), granularity="tensor",
            description="keeps the past", example='build_optimizer(model, "kept", kept_beta=0.9)',
        ),
        "both": OptimizerEntry(torch.optim.SGD, setting_prefixes=("both", "kept"), supports_fp16=True),
    }
"""


@pytest.fixture
def _kept(plugins: FakePlugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    plugins.install("kept", PLUGIN, version="1.2")
    plugins.registry()


@pytest.mark.usefixtures("_kept")
def test_optimizers(capsys) -> None:
    """Name, plugin, description; the rest is for `describe` and for programs."""
    assert main(["optimizers"]) == 0
    assert (
        capsys.readouterr().out
        == """\
optimizer  plugin            what it is
---------  ----------------  --------------
kept       megaopt-kept 1.2  keeps the past
both       megaopt-kept 1.2

`megaopt describe NAME` explains the settings of one.
"""
    )
    assert main(["optimizers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "name": "kept",
        "plugin": "megaopt-kept 1.2",
        "granularity": "tensor",
        "settings": ["kept_beta", "kept_dtype", "kept_sizes"],
        "description": "keeps the past",
    }


def test_no_optimizer_is_installed(plugins, capsys) -> None:
    """An empty table would look like a mistake."""
    plugins.registry()
    assert main(["optimizers"]) == 0
    assert capsys.readouterr().out.startswith("No optimizer is installed. Optimizers are plugins:")


@pytest.mark.usefixtures("_kept")
def test_words_filter(capsys) -> None:
    """In names, plugins and descriptions; a word that is nowhere is told."""
    assert main(["optimizers", "past"]) == 0
    printed = capsys.readouterr().out
    assert "\nkept " in printed
    assert "\nboth " not in printed
    assert main(["optimizers", "nonsense"]) == 0
    assert capsys.readouterr().out == "None of kept, both has nonsense.\n"
