"""Several settings at once, of every kind: they train and mean the same in another process, or an error names one."""

import json
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from megaopt_core import OptimizerConfig, build_optimizer, get_registry
from megaopt_core.config import core_field_info
from megaopt_core.errors import MegaoptError, UnusedSettingWarning

pytestmark = pytest.mark.any_python

LEFT_OUT = {"timers", "config_logger_dir", "sharding", "optimizer"}
"""Functions and folders, and names that are drawn by themselves."""

NUMBERS = st.sampled_from(
    [0.0, 1e-3, 0.01, 0.5, 1.0, 2.0, 1000.0, -1.0, float("nan"), float("inf"), "x", None]
)
WHOLE = st.sampled_from([0, 1, 2, 5, 1000, -1, True, 2.5, "3", None])
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "uint8", torch.bfloat16, "fp7", 3])


def values_of(name: str, default: Any, kind: str) -> Any:
    """Return values that a setting may be given: most are possible for some setting, some for none."""
    if isinstance(default, bool):
        return st.sampled_from([True, False, True, False, "no", 1])
    if isinstance(default, torch.dtype):
        return DTYPES
    if isinstance(default, int):
        return WHOLE
    if isinstance(default, str):
        return st.sampled_from([default, "", "none", "auto", "adam", "lion", 3])
    return WHOLE if "int" in str(kind) else NUMBERS


def fields() -> Any:
    """Return name to strategy of every setting that is installed."""
    core = {info.name: values_of(info.name, info.default, info.type) for info in core_field_info()}
    plugins = {
        name: values_of(name, info.default, info.type)
        for name, info in get_registry().setting_owners().items()
    }
    return {name: values for name, values in {**core, **plugins}.items() if name not in LEFT_OUT}


FIELDS = fields()
GIVEN = st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


class Model(nn.Module):
    """A table, hidden layers and a head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(5, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5, bias=False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.body(self.table(tokens))))


def trained(config: OptimizerConfig, dtype: torch.dtype) -> Any:
    """Return what three steps with given gradients make of a model, what is unused, and what was warned of."""
    torch.manual_seed(0)
    model = Model(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = build_optimizer(model, config.optimizer, **settings_of(config))
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            optimizer.step()
    warned = [str(each.message) for each in caught if issubclass(each.category, UnusedSettingWarning)]
    return (
        [param.detach().clone() for param in model.parameters()],
        optimizer.report().unused_settings,
        warned,
    )


def settings_of(config: OptimizerConfig) -> Any:
    """Return the settings of a configuration as keywords."""
    return {name: value for name, value in config.to_dict().items() if name != "optimizer"}


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    optimizer=st.sampled_from(["adam", "adamw", "sgd", "muon", "lion", "soap"]),
    chosen=GIVEN,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example("adam", {"weight_decay": float("nan")}, torch.float32)
@example("muon", {"bf16": True, "muon_scalar_optimizer": "lion"}, torch.bfloat16)
def test_settings_together(optimizer, chosen, dtype):
    """Written to JSON and read back they train to the same bits; what is unused is warned of and reported."""
    if not get_registry().has_optimizer(optimizer):
        return
    try:
        config = OptimizerConfig(optimizer=optimizer, **{"lr": 0.01, **chosen})
        values, unused, warned = trained(config, dtype)
    except MegaoptError as raised:
        error = str(raised)
    else:
        error = ""
    if error:
        assert any(name in error for name in chosen), (chosen, error)
        return
    assert list(warned) == [f"settings that change nothing here: {'; '.join(unused)}"] * bool(unused)
    again = OptimizerConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    others, unused_again, _ = trained(again, dtype)
    assert unused_again == unused
    assert all(
        torch.equal(one, other) or one.isnan().any() for one, other in zip(values, others, strict=True)
    )
