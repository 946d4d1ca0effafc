"""What the settings of adam and sgd accept, and what muP makes of them."""

import pytest
import torch
from megaopt_testing import TinyGPT

from megaopt_core import OptimizerConfig, build_optimizer, get_mup_config_overrides
from megaopt_core.errors import ConfigurationError


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


def test_mup_of_adam_divides_hidden_matrices_and_nothing_else() -> None:
    """With width multiplier 4 a hidden matrix gets lr/4 and eps/4; embeddings, head and vectors stay."""
    pytest.importorskip("megaopt_roles")
    config = OptimizerConfig(optimizer="adam", lr=0.4, min_lr=0.04)
    model = TinyGPT()
    optimizer = build_optimizer(
        model, "adam", lr=0.4, min_lr=0.04, overrides=get_mup_config_overrides(config, 4.0)
    )
    lr = {row.name: row.lr for row in optimizer.report().params}
    hidden = {name for name in lr if name.startswith("blocks.") and lr[name] == pytest.approx(0.1)}
    assert hidden == {
        name for name, param in model.named_parameters() if "blocks" in name and param.ndim == 2
    }
    assert {lr[name] for name in lr if name not in hidden} == {0.4}
    eps = {group["eps"] for group in optimizer.param_groups}
    assert eps == {1e-8, 2.5e-9}


def test_mup_of_sgd_multiplies_vectors() -> None:
    """With width multiplier 4 a vector gets 4 lr; matrices stay."""
    config = OptimizerConfig(optimizer="sgd", lr=0.1)
    model = TinyGPT()
    optimizer = build_optimizer(model, "sgd", lr=0.1, overrides=get_mup_config_overrides(config, 4.0))
    for row in optimizer.report().params:
        assert row.lr == pytest.approx(0.4 if len(row.shape) < 2 else 0.1), row.name
