"""What a user put on a parameter, or handed over, is refused by name where it cannot be."""

from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core import OptimizerConfig, route
from megaopt_core.errors import ConfigurationError, RoutingError


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"matrix_view": "banana"}, "attribute matrix_view must be a MatrixView or a Role, got 'banana'"),
        ({"is_qkv": True, "qkv_split_shapes": 5}, "qkv_split_shapes must be whole numbers, got 5"),
        ({"is_qkv": True, "qkv_split_shapes": ("a", "b")}, "qkv_split_shapes must be whole numbers, got"),
        ({"is_qkv": True, "qkv_split_shapes": (2.0, 2.0)}, "qkv_split_shapes must be whole numbers, got"),
        (
            {"tensor_model_parallel": True, "partition_dim": None},
            "has partition_dim=None; it must be a dimension",
        ),
        (
            {"tensor_model_parallel": True, "partition_dim": "0"},
            "has partition_dim='0'; it must be a dimension",
        ),
        (
            {"tensor_model_parallel": True, "partition_dim": -2},
            "has partition_dim=-2; it must be a dimension",
        ),
        ({"grad_norm_group": ["a"]}, r"has grad_norm_group=\['a'\]; it must be a name, or None"),
        ({"grad_norm_group": 5}, "has grad_norm_group=5; it must be a name, or None"),
    ],
)
def test_an_attribute_that_cannot_be_names_the_parameter(attributes: dict[str, Any], message: str) -> None:
    """With what was given and what is allowed."""
    model = nn.Linear(4, 4)
    for name, value in attributes.items():
        setattr(model.weight, name, value)
    with pytest.raises(RoutingError, match=f"weight.*{message}"):
        route(OptimizerConfig(optimizer="plain", lr=0.1), model)


@pytest.mark.parametrize("named", [None, "x", 5])
def test_names_that_cannot_be_are_fqns_fault(named: Any) -> None:
    """It is one chunk, whose parameters are not the same."""
    with pytest.raises(
        RoutingError, match=rf"^fqn\(0, '(weight|bias)'\) returned {named!r}; it must return a different name"
    ):
        route(OptimizerConfig(optimizer="plain", lr=0.1), nn.Linear(2, 2), fqn=lambda index, name: named)


def test_settings_that_have_no_names_are_refused() -> None:
    """Of a mapping, too."""
    settings: Any = {1: torch.float32}
    with pytest.raises(
        ConfigurationError, match="from_dict: got the key 1; give a mapping of names to values"
    ):
        OptimizerConfig.from_dict(settings)
