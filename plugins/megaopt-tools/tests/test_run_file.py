"""A run in one file: read with the line of every error, and written so that it reads back equal."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megaopt_tools import RunFile
from torch import nn

from megaopt_core import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    Role,
    get_standard_config_overrides,
    route,
)
from megaopt_core.errors import ConfigFileError, OverrideError


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_settings_and_overrides_are_read(tmp_path):
    """Matchers make the key, the rest makes the override; each remembers its line."""
    path = _write(
        tmp_path,
        'lr = 0.1\n\n[[overrides]]\nname = ["*.bias", "head.*"]\nrole = "embedding"\nlr = 0.5\nbetas = [0.8, 0.9]\n',
    )
    run = RunFile.load(path)
    key = ParamKey(name=("*.bias", "head.*"), role=Role.EMBEDDING)
    assert run.config == OptimizerConfig(lr=0.1)
    assert run.overrides == {key: {"max_lr": 0.5, "betas": (0.8, 0.9)}}
    assert run.overrides.sources == {key: f"{path}:3"}
    assert run.config_overrides() == run.overrides


def test_the_standard_overrides_apply_as_in_code(tmp_path):
    """Without tables they do; with tables when the file says so; and a file can switch them off."""
    without = RunFile.load(_write(tmp_path, "lr = 0.1\n"))
    assert without.config_overrides() is None
    table = '\n[[overrides]]\nname = "head.*"\nwd_mult = 0.5\n'
    both = RunFile.load(_write(tmp_path, "lr = 0.1\nstandard_overrides = true\n" + table)).config_overrides()
    assert both == {ParamKey(name="head.*"): {"wd_mult": 0.5}}
    assert both.with_standard
    assert RunFile.load(_write(tmp_path, "standard_overrides = false\n")).config_overrides() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = 0.1\nlr_min = 0.2\n", "run.toml:2: "),
        ("lr = -1.0\n", "run.toml:1: lr=-1.0: must be a number of at least 0"),
        ("standard_overrides = 3\n", "run.toml:1: standard_overrides=3: must be true or false"),
        (
            'lr = 0.1\n[[overrides]]\nname = "a"\nmax_lr = -2.0\n',
            "run.toml:4: [[overrides]] max_lr: override max_lr=-2.0: must be finite and not negative",
        ),
        (
            "[[overrides]]\nname = 3\nmax_lr = 2.0\n",
            "run.toml:2: [[overrides]] name: 3: must be a string or a list of strings",
        ),
        (
            '[[overrides]]\nrole = "head"\nmax_lr = 2.0\n',
            "run.toml:2: [[overrides]] role: 'head' is not a role; allowed are embedding, output, matrix, elementwise",
        ),
        (
            "[[overrides]]\nmax_lr = 2.0\n",
            "run.toml:1: an [[overrides]] table must name its parameters: add one of name, attr, role",
        ),
        (
            '[[overrides]]\nname = "a"\n',
            "run.toml:1: an [[overrides]] table must set something: add one of max_lr, min_lr, start_wd, end_wd, "
            "wd_mult, lr_mult, optimizer, clip_grad or a setting of the optimizer",
        ),
        (
            '[[overrides]]\nname = "a"\nlr = 1.0\n[[overrides]]\nname = "a"\nwd_mult = 1.0\n',
            "run.toml:4: ParamKey(name=('a',)) is in two tables; put all its settings into one (",
        ),
        (
            '[[overrides]]\nname = "a"\nlr = 1.0\nmax_lr = 2.0\n',
            "run.toml:1: [[overrides]]: the override sets 'lr' and 'max_lr', which mean the same, to 1.0 and 2.0",
        ),
        ("lr = \n", "run.toml:1: is not valid TOML: "),
    ],
)
def test_an_error_begins_with_file_and_line(tmp_path, text, message):
    """A user can go to the line."""
    path = _write(tmp_path, text)
    with pytest.raises(ConfigFileError) as caught:
        RunFile.load(path)
    assert str(caught.value).startswith(str(path.parent) + "/" + message)


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
KEYS = st.builds(
    ParamKey,
    name=st.lists(NAMES, min_size=1, max_size=2).map(tuple),
    attr=st.lists(st.sampled_from(["shared", "use_muon"]), max_size=1).map(tuple),
    role=st.lists(st.sampled_from(Role), max_size=2).map(tuple),
)
NUMBERS = st.floats(0, 10, allow_nan=False)
OVERRIDES = st.dictionaries(
    st.sampled_from(["max_lr", "wd_mult", "betas", "nesterov", "method"]), st.none(), min_size=1
).flatmap(
    lambda keys: st.fixed_dictionaries(
        {
            key: {"betas": st.tuples(NUMBERS, NUMBERS), "nesterov": st.booleans(), "method": NAMES}.get(
                key, NUMBERS
            )
            for key in keys
        }
    )
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.none() | st.dictionaries(KEYS, OVERRIDES, max_size=3),
    st.booleans(),
    st.fixed_dictionaries({}, optional={"lr": NUMBERS, "bf16": st.booleans(), "config_logger_dir": NAMES}),
)
def test_what_is_written_reads_back_equal(tmp_path, overrides, standard, fields):
    """Configuration and overrides survive the round trip, whatever characters their names have."""
    if not overrides:
        overrides, standard = (None, True) if standard else ({}, False)
    run = RunFile(OptimizerConfig(**fields), overrides, standard_overrides=standard)
    path = tmp_path / "run.toml"
    path.write_text(run.dumps(), encoding="utf-8")
    assert RunFile.load(path) == run


def test_what_a_file_cannot_hold_is_refused():
    """A predicate is code; None has no form in TOML."""
    predicate = ParamKey(predicate=ParamPredicate(name="vector", fn=bool))
    with pytest.raises(OverrideError, match="matches by a predicate, which a file cannot hold"):
        RunFile(OptimizerConfig(), {predicate: {"max_lr": 1.0}}).dumps()
    with pytest.raises(OverrideError, match=r"^foreach=None cannot be written to a file: TOML has no null$"):
        RunFile(OptimizerConfig(), {ParamKey(name="a"): {"foreach": None}}).dumps()


PLAIN = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD)}
"""


def test_a_run_file_adds_to_the_standard_overrides_and_replaces_those_of_its_keys(plugins):
    """A key that the file names is the file's alone."""
    plugins.install("plain", PLAIN)
    plugins.registry()
    model = nn.ModuleDict({"hidden": nn.Linear(2, 2), "head": nn.Linear(2, 2, bias=False)})
    config = OptimizerConfig(optimizer="plain", lr=0.1, weight_decay=0.1)
    (no_decay,) = get_standard_config_overrides(config)
    extended = RunFile(config, {ParamKey(name="head.*"): {"wd_mult": 0.5}}).config_overrides()
    replaced = RunFile(config, {no_decay: {"wd_mult": 0.25}}).config_overrides()
    routings = [route(config, model, overrides) for overrides in (None, extended, replaced)]
    decays = [
        {
            name: routing.groups[entry.spec.group].values["weight_decay"]
            for name, entry in routing.params.items()
        }
        for routing in routings
    ]
    assert [decay["hidden.bias"] for decay in decays] == [0.0, 0.0, 0.025]
    assert [decay["head.weight"] for decay in decays] == [0.1, 0.05, 0.1]
