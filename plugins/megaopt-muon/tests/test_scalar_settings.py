"""Learning rate and weight decay of what Muon leaves to its scalar optimizer."""

from typing import Any

import pytest
import torch

from megaopt_core import OptimizerParamScheduler, ParamKey, build_optimizer, get_mup_config_overrides
from megaopt_core.config import OptimizerConfig
from megaopt_core.errors import ConfigurationError
from megaopt_core.optimizers import MegatronOptimizer


class Model(torch.nn.Module):
    """An embedding, a hidden matrix, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.hidden = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.hidden.weight.use_muon = True
        self.head.weight.is_embedding_or_output_parameter = True


SCALAR = {"embed.weight", "hidden.bias", "norm.weight", "norm.bias", "head.weight"}


def rows(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return the report's rows by name."""
    return {row.name: row for row in optimizer.report().params}


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_what_muon_does_not_take_has_a_learning_rate_of_its_own(name):
    """Embedding, head, norms and biases have it, and the report says from where."""
    found = rows(build_optimizer(Model(), name, lr=0.02, muon_scalar_lr=3e-4))
    assert {each for each, row in found.items() if row.lr == 3e-4} == SCALAR
    assert found["hidden.weight"].lr == 0.02
    assert found["embed.weight"].reason.endswith(f"; {name} gives its fallback max_lr=0.0003")


def test_a_schedule_keeps_its_shape():
    """The least learning rate is in the same proportion to the peak."""
    optimizer = build_optimizer(Model(), "muon", lr=0.02, min_lr=0.002, muon_scalar_lr=1e-3)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=0.02, min_lr=0.002, lr_warmup_steps=0, lr_decay_steps=10,
        lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=10, wd_incr_style="constant",
    )  # fmt: skip
    for _ in range(10):
        scheduler.step(1)
    assert {round(group["lr"], 9) for group in optimizer.param_groups} == {0.002, 1e-4}


def test_weight_decay_of_the_rest_leaves_biases_and_norms_alone():
    """What has no weight decay gets none."""
    optimizer = build_optimizer(Model(), "muon", lr=0.02, weight_decay=0.1, muon_scalar_weight_decay=0.02)
    decays = {
        optimizer.names[param]: pytest.approx(group["weight_decay"])
        for group in optimizer.param_groups
        for param in group["params"]
    }
    assert decays == {
        "embed.weight": 0.02, "hidden.weight": 0.1, "head.weight": 0.02,
        "hidden.bias": 0.0, "norm.weight": 0.0, "norm.bias": 0.0,
    }  # fmt: skip


def test_other_overrides_win():
    """What somebody says of a parameter by name, or with decoupled_lr, holds."""
    key = {ParamKey(name="head.weight"): {"max_lr": 0.5}}
    assert (
        rows(build_optimizer(Model(), "muon", lr=0.02, muon_scalar_lr=3e-4, overrides=key))["head.weight"].lr
        == 0.5
    )
    decoupled = rows(build_optimizer(Model(), "muon", lr=0.02, muon_scalar_lr=3e-4, decoupled_lr=0.4))
    assert (decoupled["head.weight"].lr, decoupled["norm.weight"].lr) == (0.4, 3e-4)


def test_a_weight_decay_that_is_no_multiple_is_refused():
    """The error says how to write it."""
    with pytest.raises(
        ConfigurationError, match=r"muon_scalar_weight_decay=0.1 with weight_decay=0.*wd_mult"
    ):
        build_optimizer(Model(), "muon", lr=0.02, weight_decay=0.0, muon_scalar_weight_decay=0.1)


def test_mup_scales_the_learning_rate_of_the_rest():
    """A head has the scalar learning rate over the width multiplier."""
    settings = {"lr": 0.02, "muon_scalar_lr": 1e-3, "muon_scale_mode": "unit_rms_norm"}
    overrides = get_mup_config_overrides(OptimizerConfig(optimizer="muon", **settings), 4.0)
    found = rows(build_optimizer(Model(), "muon", overrides=overrides, **settings))
    assert {name: found[name].lr for name in ("hidden.weight", "head.weight", "norm.weight")} == {
        "hidden.weight": 0.02, "head.weight": 2.5e-4, "norm.weight": 1e-3,
    }  # fmt: skip


@pytest.mark.parametrize("value", [-1.0, "big", float("nan"), True])
def test_wrong_values_are_refused(value):
    """At construction, by name."""
    with pytest.raises(ConfigurationError, match="scalar_lr"):
        OptimizerConfig(optimizer="muon", lr=0.1, muon_scalar_lr=value)


@pytest.mark.parametrize("value", ["x", "muon", "soap", "sgd", "", 5, None])
def test_another_scalar_optimizer_is_refused(value: object) -> None:
    """By the setting, with what it may be."""
    with pytest.raises(ConfigurationError, match=r"muon_scalar_optimizer=.*: must be one of 'adam', 'lion'"):
        OptimizerConfig(optimizer="muon", lr=0.1, muon_scalar_optimizer=value)


@pytest.mark.parametrize(("decay", "of"), [(1e308, 0.01), (1e30, 1e-300)])
def test_a_weight_decay_that_no_number_multiplies_to_is_refused(decay: float, of: float) -> None:
    """The error names the setting, not the multiple that becomes of it."""
    with pytest.raises(ConfigurationError, match="muon_scalar_weight_decay="):
        build_optimizer(Model(), "muon", lr=0.02, weight_decay=of, muon_scalar_weight_decay=decay)


@pytest.mark.parametrize(
    "name", ["muon_extra_scale_factor", "muon_eps", "muon_scalar_lr", "adaptive_muon_eps"]
)
def test_what_float32_does_not_hold_is_refused(name: str) -> None:
    """It made weights infinite, or zero gradients not a number."""
    with pytest.raises(ConfigurationError, match=rf"{name}=1e\+50: must be .*finite in fp32"):
        OptimizerConfig(optimizer="muon", lr=0.1, **{name: 1e50})
