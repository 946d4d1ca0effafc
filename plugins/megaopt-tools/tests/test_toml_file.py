"""A configuration file is read with the line of everything that is wrong in it."""

import pytest
from megaopt_tools.toml_file import read_config_file

from megaopt_core import OptimizerConfig
from megaopt_core.errors import ConfigFileError

RUN = '''# a run
optimizer = "one"
"lr" = 1e-3   # quoted keys count too
config_logger_dir = """
min_lr = 5
[[overrides]]
"""
params_dtype = "bf16"

[[overrides]]  # first
name = "*.bias"
wd_mult = 0.0

[ [ overrides ] ]
attr = ["a", "b"]
  lr = 1.0
'''


def test_settings_overrides_and_their_lines_are_read(tmp_path) -> None:
    """Whatever comments, quotes and strings over several lines stand in between."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("[ [ overrides ] ]", "[[ overrides ]]"))
    file = read_config_file(path)
    assert dict(file.settings) == {
        "optimizer": "one",
        "lr": 1e-3,
        "config_logger_dir": "min_lr = 5\n[[overrides]]\n",
        "params_dtype": "bf16",
    }
    assert dict(file.lines) == {"optimizer": 2, "lr": 3, "config_logger_dir": 4, "params_dtype": 8}
    read = [(table.line, dict(table.values), dict(table.lines)) for table in file.overrides]
    assert read == [
        (10, {"name": "*.bias", "wd_mult": 0.0}, {"name": 11, "wd_mult": 12}),
        (14, {"attr": ["a", "b"], "lr": 1.0}, {"attr": 15, "lr": 16}),
    ]


def test_overrides_may_be_written_inline(tmp_path) -> None:
    """They share the line of their key."""
    path = tmp_path / "run.toml"
    path.write_text('lr = 1.0\noverrides = [{name = "a", lr = 1.0}, {name = "b", lr = 2.0}]\n')
    assert [(table.line, dict(table.lines)) for table in read_config_file(path).overrides] == [
        (2, {"name": 2, "lr": 2}),
        (2, {"name": 2, "lr": 2}),
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("lr = 1.0\nmin_lr = 2.0\n", 2, "min_lr=2.0: must not be above lr=1.0"),
        ("\n\nlr = -1.0\n", 3, "lr=-1.0: must be a number of at least 0"),
        (
            "lr = 1.0\nweight_deacy = 0.1\n",
            2,
            "OptimizerConfig has no setting 'weight_deacy', in the core or in an installed plugin; "
            "did you mean 'weight_decay'?",
        ),
        (
            "lr = 1.0\n\n[model]\nx = 1\n",
            3,
            "OptimizerConfig has no setting 'model', in the core or in an installed plugin; `megaopt describe adam` "
            "lists the settings",
        ),
        ("lr = \n", 1, "is not valid TOML: Invalid value"),
        ("lr = 1\nlr = 2\n", 2, "is not valid TOML: Cannot overwrite a value"),
        ("[overrides]\nlr = 1\n", 1, "overrides is a list of tables: begin each with [[overrides]]"),
        ('x = 1\noverrides = "all"\n', 2, "overrides is a list of tables: begin each with [[overrides]]"),
        (
            'lr = 0.1\nfp8_recipe = "delayed"\n',
            2,
            "fp8_recipe='delayed': megaopt does not train with fp8 parameters; only the default None is accepted",
        ),
    ],
)
def test_an_error_begins_with_file_and_line(plugins, text, line, message) -> None:
    """So that an editor can jump there."""
    plugins.registry("tools")
    path = plugins.folder / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigFileError) as caught:
        OptimizerConfig.from_toml(path)
    assert str(caught.value) == f"{path}:{line}: {message}"
    assert (caught.value.path, caught.value.line) == (str(path), line)


def test_a_file_that_cannot_be_read(tmp_path) -> None:
    """Missing, or no text."""
    with pytest.raises(
        ConfigFileError, match=r"none.toml: cannot be read: \[Errno 2\] No such file or directory"
    ):
        OptimizerConfig.from_toml(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigFileError, match=r"binary.toml: cannot be read: 'utf-8' codec can't decode"):
        OptimizerConfig.from_toml(tmp_path / "binary.toml")


def test_what_a_dict_holds_a_file_can_hold(plugins) -> None:
    """Settings of plugins that are missing included; overrides are left to who reads them."""
    plugins.registry()
    path = plugins.folder / "run.toml"
    path.write_text('lr = 0.1\nmuon_momentum = 0.9\nbf16 = true\n[[overrides]]\nname = "x"\nlr = 1.0\n')
    assert OptimizerConfig.from_toml(str(path)) == OptimizerConfig(lr=0.1, muon_momentum=0.9, bf16=True)
