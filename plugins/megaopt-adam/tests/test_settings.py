"""What the settings of adam and sgd accept, and what muP makes of them."""

import pytest
import torch
from megaopt_testing import TinyGPT

from megaopt_core import (
    OptimizerConfig,
    ParamKey,
    build_optimizer,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megaopt_core.errors import ConfigurationError, OverrideConflictError


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("adam_beta1", 1.0, r"a number in \[0.0, 1.0\)"),
        ("adam_beta2", -0.1, r"a number in \[0.0, 1.0\)"),
        ("adam_eps", 0.0, "a number above 0"),
        ("sgd_momentum", 1.5, r"a number in \[0.0, 1.0\)"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_full_name(setting: str, value: float, allowed: str) -> None:
    """The message says what was given and what is allowed."""
    with pytest.raises(ConfigurationError, match=f"^{setting}={value}: must be {allowed}$"):
        OptimizerConfig(**{setting: value})


def test_building_without_a_learning_rate_uses_torchs_default() -> None:
    """`lr=None` means the constructor's own default."""
    optimizer = build_optimizer(torch.nn.Linear(2, 2), "adam")
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}


@pytest.mark.parametrize("decoupled", [{}, {"decoupled_lr": 0.3}])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_mup_scales_as_the_table_says(name: str, decoupled: dict[str, float]) -> None:
    """Adam divides what is a matrix, heads included; SGD multiplies vectors and embeddings."""
    pytest.importorskip("megaopt_roles")
    m, model = 4.0, TinyGPT()
    config = OptimizerConfig(optimizer=name, lr=0.4, min_lr=0.04, **decoupled)
    standard = get_standard_config_overrides(config)
    overrides = {**standard, **get_mup_config_overrides(config, m)}
    optimizer = build_optimizer(model, name, lr=0.4, min_lr=0.04, overrides=overrides, **decoupled)
    group_of = {
        optimizer.names[param]: group for group in optimizer.param_groups for param in group["params"]
    }
    for row in optimizer.report().params:
        is_vector = len(row.shape) < 2 or row.role == "embedding"
        scale = {"adam": 1.0 if is_vector else 1 / m, "sgd": m if is_vector else 1.0}[name]
        lr = 0.3 if decoupled and row.role in ("embedding", "output") else 0.4 * scale
        assert row.lr == pytest.approx(lr), row.name
        if name == "adam":
            assert group_of[row.name]["eps"] == pytest.approx(1e-8 * scale), row.name
    assert {row.role for row in optimizer.report().params} >= {"embedding", "matrix"}


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_the_width_that_was_tuned_needs_no_override(name: str) -> None:
    """A multiplier of 1 gives an empty dictionary."""
    assert get_mup_config_overrides(OptimizerConfig(optimizer=name, lr=0.1), 1.0) == {}


def test_a_shared_embedding_is_vector_like_by_its_attribute_alone() -> None:
    """On the last pipeline stage it looks like a head's matrix."""
    pytest.importorskip("megaopt_roles")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4))
    model[0].weight.shared_embedding = True
    for name, lr in (("adam", 0.1), ("sgd", 0.4)):
        config = OptimizerConfig(optimizer=name, lr=0.1)
        overrides = get_mup_config_overrides(config, 4.0)
        optimizer = build_optimizer(model, name, lr=0.1, overrides=overrides)
        found = {row.name: row.lr for row in optimizer.report().params}
        assert found["0.weight"] == pytest.approx(lr)
        assert found["1.weight"] == pytest.approx(0.025 if name == "adam" else 0.1)


class Tiny(torch.nn.Module):
    """An embedding, a hidden matrix and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 16, bias=False)


def _rates_under_mup(
    name: str, overrides: dict[ParamKey, dict[str, float]], **settings: float
) -> dict[str, tuple[float, float]]:
    """Return the learning rate and the least one of each parameter of `Tiny`, four times wider than tuned."""
    config = OptimizerConfig(optimizer=name, lr=0.4, min_lr=0.04, **settings)
    every = {**get_standard_config_overrides(config), **get_mup_config_overrides(config, 4.0), **overrides}
    optimizer = build_optimizer(Tiny(), name, lr=0.4, min_lr=0.04, overrides=every, **settings)
    return {
        optimizer.names[param]: (group["max_lr"], group["min_lr"])
        for group in optimizer.param_groups
        for param in group["params"]
    }


def test_a_head_whose_logits_are_divided_by_the_width_is_left_alone_as_the_docs_say() -> None:
    """`decoupled_lr=lr` moves the head alone; an override of its own disagrees with muP's."""
    pytest.importorskip("megaopt_roles")
    plain = _rates_under_mup("adam", {})
    kept = _rates_under_mup("adam", {}, decoupled_lr=0.4, decoupled_min_lr=0.04)
    assert plain["head.weight"] == (0.1, 0.01)
    assert kept == {**plain, "head.weight": (0.4, 0.04)}
    with pytest.raises(OverrideConflictError, match=r"'max_lr' is 0\.1 .* and 0\.4 "):
        _rates_under_mup("adam", {ParamKey(name="head.weight"): {"max_lr": 0.4}})


def test_sgd_leaves_heads_alone_under_mup_without_any_setting() -> None:
    """Where `decoupled_lr` would take the factor from the embeddings."""
    pytest.importorskip("megaopt_roles")
    plain = _rates_under_mup("sgd", {})
    assert (plain["head.weight"], plain["embed.weight"]) == ((0.4, 0.04), (1.6, 0.16))
    decoupled = _rates_under_mup("sgd", {}, decoupled_lr=0.4, decoupled_min_lr=0.04)
    assert decoupled["embed.weight"] == (0.4, 0.04)
