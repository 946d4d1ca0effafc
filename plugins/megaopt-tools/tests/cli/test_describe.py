"""`megaopt optimizers` and `megaopt describe`: what there is to choose, and what can be set."""

import json

import pytest
from megaopt_testing.fake_plugins import FakePlugins
from megaopt_tools import main

from megaopt_core.config import CORE_FIELD_NAMES

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
def test_describe_shows_every_setting_and_an_example(capsys) -> None:
    """Type, default and help; the class is named and not imported."""
    assert main(["describe", "kept"]) == 0
    printed = capsys.readouterr().out
    before, _, table = printed.partition("setting ")
    settings, _, example = f"setting {table}".partition("\n\n")
    assert [line.split()[0] for line in settings.splitlines() if line[0] != " "][2:] == [
        "kept_beta",
        "kept_dtype",
        "kept_sizes",
        "lr",
        "weight_decay",
        "clip_grad",
    ]
    assert "kept_dtype    dtype            bfloat16  in which state is kept" in settings
    assert (
        f"{before}SETTINGS\n\n{example}"
        == """\
kept: keeps the past

  plugin:      megaopt-kept 1.2
  class:       module:Kept
  granularity: tensor
  fp16:        not supported

SETTINGS

Example:

  build_optimizer(model, "kept", kept_beta=0.9)
"""
    )


@pytest.mark.usefixtures("_kept")
def test_describe_without_own_settings(capsys) -> None:
    """Settings that it shares are shown; an example is made up."""
    assert main(["describe", "both"]) == 0
    printed = capsys.readouterr().out
    assert "both: its plugin does not describe it\n" in printed
    assert "  class:       torch.optim.sgd:SGD\n" in printed
    assert "  fp16:        supported\n" in printed
    assert "kept_beta" in printed
    assert '  build_optimizer(model, "both", lr=1e-3)\n' in printed


@pytest.mark.usefixtures("_kept")
def test_describe_json(capsys) -> None:
    """The same for programs, dtypes as strings."""
    assert main(["describe", "kept", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["settings"][1] == {
        "name": "kept_dtype",
        "type": "dtype",
        "default": "bfloat16",
        "help": "in which state is kept",
    }


def test_describe_without_a_name_is_about_the_core(plugins, capsys) -> None:
    """Every core field; no plugin is needed."""
    plugins.registry()
    assert main(["describe", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [setting["name"] for setting in described["settings"]] == list(CORE_FIELD_NAMES)
    assert main(["describe"]) == 0
    assert "use_layer_wise_distributed_optimizer" in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["60", "80", "100", "140", None])
def test_describe_without_a_name_is_a_line_for_each_setting(plugins, capsys, monkeypatch, columns) -> None:
    """As long as the terminal is wide; one by itself is explained in full."""
    plugins.registry()
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert main(["describe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == list(CORE_FIELD_NAMES)
    assert max(map(len, lines[2:-2])) <= int(columns or 120)
    assert main(["describe", "clip_grad"]) == 0
    assert f"\nclip_grad{':' if columns == '60' else ' '} float" in capsys.readouterr().out


@pytest.mark.usefixtures("_kept")
def test_words_filter(capsys) -> None:
    """In names, plugins and meanings; a word that is nowhere is told."""
    assert main(["optimizers", "past"]) == 0
    printed = capsys.readouterr().out
    assert "\nkept " in printed
    assert "\nboth " not in printed
    assert main(["optimizers", "nonsense"]) == 0
    assert capsys.readouterr().out == "None of kept, both has nonsense.\n"
    assert main(["optimizers", "muon"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "None of kept, both has muon.",
        "The optimizer 'muon' comes with megaopt-muon, which is not installed: pip install megaopt-muon",
    ]
    assert main(["describe", "kept", "PAST"]) == 0
    printed = capsys.readouterr().out
    assert "\nkept_beta " in printed
    assert "kept_dtype" not in printed
    assert main(["describe", "kept", "nonsense"]) == 2
    assert capsys.readouterr().err == (
        "megaopt: error: kept has no setting with 'nonsense' in its name or meaning; it has kept_beta, kept_dtype, "
        "kept_sizes, lr, weight_decay, clip_grad\n"
    )


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_names_of_settings_stay_whole_at_every_width(plugins, capsys, monkeypatch, columns) -> None:
    """Where a table has no room, what a setting does stands below it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    plugins.install("kept", PLUGIN.replace("beta:", "beta_of_a_moving_average_of_the_past:"), version="1.2")
    plugins.registry()
    assert main(["describe", "kept"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    assert "\nkept_beta_of_a_moving_average_of_the_past" in printed
    assert ("\n    how much of the past is kept\n" in printed) == (columns < 140)


@pytest.mark.usefixtures("_kept")
def test_describe_a_setting_of_a_plugin(capsys) -> None:
    """Whose it is, and which optimizers read it."""
    assert main(["describe", "kept_beta", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "kept_beta",
        "description": "a setting of kept, both",
        "plugin": "megaopt-kept 1.2",
        "settings": [
            {"name": "kept_beta", "type": "float", "default": 0.5, "help": "how much of the past is kept"}
        ],
    }


@pytest.mark.usefixtures("_kept")
def test_describe_a_strategy(capsys) -> None:
    """What it does, what it can cut, and which settings of the core it acts on."""
    assert main(["describe", "replicated"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "replicated: a sharding strategy (sharding='replicated'): Every data-parallel rank "
    )
    assert "\n  granularity: element, group, tensor\n" in printed
    assert "\n  acts on:     not a setting of the core\n" in printed


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "megaopt-kept",
            "'megaopt-kept' is plugin 'kept' (megaopt-kept 1.2): describe one of its parts (optimizers: kept, both)",
        ),
        (
            "min_lrr",
            "no optimizer, setting, sharding strategy or schedule is called 'min_lrr'; did you mean 'min_lr'?",
        ),
        (
            "kept_bata",
            "no optimizer, setting, sharding strategy or schedule is called 'kept_bata'; did you mean 'kept_beta'?",
        ),
        ("nonsense", "unknown optimizer 'nonsense'. Known are: both, kept"),
    ],
)
def test_a_name_that_cannot_be_described_is_told_apart(capsys, name, message) -> None:
    """What it is, or what is near."""
    assert main(["describe", name]) == 2
    assert capsys.readouterr().err == f"megaopt: error: {message}\n"


@pytest.mark.usefixtures("_kept")
def test_a_setting_whose_plugin_is_absent_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    """As reading it from a configuration does."""
    assert main(["describe", "muon_momentum"]) == 2
    assert "setting 'muon_momentum' comes with megaopt-muon, which is not installed: pip install" in (
        capsys.readouterr().err
    )


STYLE = """
@frozen
class Settings:
    power: float = field(default=2.0, metadata={"help": "of the polynomial"})

@hookimpl
def megaopt_schedules():
    return {"polynomial": ScheduleStyle(
        learning_rate=lambda point: point.between((1 - point.progress) ** point.settings.power),
        settings=Settings, description="a power of what is left")}
"""


def test_a_plugins_style_is_described(plugins, capsys) -> None:
    """`megaopt describe` tells type, default and help."""
    plugins.install("poly", STYLE)
    plugins.registry()
    assert main(["describe", "polynomial", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["plugin"], told["serves"]) == ("megaopt-poly 1.0", "lr_decay_style")
    assert told["settings"] == [
        {"name": "power", "type": "float", "default": 2.0, "help": "of the polynomial"}
    ]
    assert main(["describe", "linear"]) == 0
    assert "It has no settings of its own." in capsys.readouterr().out
