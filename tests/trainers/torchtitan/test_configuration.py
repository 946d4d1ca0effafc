"""The door that torchtitan's configuration has for optimizers."""

import sys
from pathlib import Path

import pytest
import titan_harness as harness
import torch
from megaopt_trainers.torchtitan import MegaoptOptimizers
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import logger

from megaopt_core.errors import ConfigurationError, MegaoptError

EXAMPLE = Path(__file__).parents[3] / "examples" / "torchtitan"


def test_the_command_line_changes_the_examples_settings(monkeypatch) -> None:
    """As it changes any other field of a configuration."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    config = ConfigManager().parse_args(["--module", "after", "--config", "count", "--optimizer.lr", "0.25"])
    assert (config.optimizer.optimizer, config.optimizer.lr) == ("muon", 0.25)
    assert config.to_dict()["optimizer"]["weight_decay"] == 0.1
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizers = config.optimizer.build(model_parts=[model])
    assert {group["lr"] for group in optimizers.optimizers[0].param_groups} == {0.25}


def test_overrides_have_the_names_of_parameters() -> None:
    """In place of the standard ones, which leave biases without weight decay."""
    model = torch.nn.Linear(4, 2)
    for overrides, bias in (({"*bias": {"wd_mult": 0.5}}, 0.05), (None, 0.0), ({}, 0.1)):
        config = MegaoptOptimizers.Config(optimizer="adam", overrides=overrides)
        (optimizer,) = config.build(model_parts=[model])
        decay = {
            name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]
        }
        assert decay == {"weight": 0.1, "bias": bias}


def test_the_log_says_what_steps_what(monkeypatch) -> None:
    """As torchtitan's does of its own optimizers."""
    said = []
    monkeypatch.setattr(logger, "info", lambda message, *values: said.append(message % values))
    harness.adam().build(model_parts=[torch.nn.Linear(4, 2)])
    assert "megaopt-adam" in said[-1]
    assert "weight" in said[-1]


GROUP = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"param_groups": [GROUP]}, "is for torchtitan's own optimizers; overrides="),
        ({"implementation": "foreach"}, "is for torchtitan's own optimizers; each optimizer"),
        (
            {"optimizer_factory_kwargs_by_name": {"AdamW": {}}},
            "is for torchtitan's own optimizers; settings=",
        ),
        ({"settings": {"lr": 1.0}}, "settings has 'lr', which is a field"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(fields, message) -> None:
    """With the way out."""
    with pytest.raises(ConfigurationError, match=message):
        MegaoptOptimizers.Config(**fields).build(model_parts=[torch.nn.Linear(4, 2)])


@pytest.mark.parametrize(
    "fields", [{"optimizer": "muom"}, {"settings": {"muon_momentun": 0.9}}, {"lr": -1.0}]
)
def test_what_cannot_be_is_an_error_of_ours(fields) -> None:
    """Before anything is built."""
    with pytest.raises(MegaoptError):
        harness.MegaoptOptimizers.Config(**fields).build(model_parts=[torch.nn.Linear(4, 2)])
