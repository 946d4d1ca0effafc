"""A setting that nothing in use acts on is named once, in a warning and in the report."""

import json
import re
from typing import Any

import pytest
import torch
from attrs import define, field
from megaopt_testing.plugins import temporary_plugin
from torch import nn

from megaopt_core import (
    FP32Optimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    OptimizerEntry,
    ParamKey,
    build_optimizer,
    hookimpl,
)
from megaopt_core.errors import PluginError, UnusedSettingWarning
from megaopt_core.optimizers import DynamicGradScaler

pytestmark = pytest.mark.any_python

HALF = "only a dynamic loss scale reads it, which fp16=True without loss_scale has"


class Named(nn.Module):
    """A table and a projection; one norm has the name of a query's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, dtype=dtype)
        self.table.weight.is_embedding_or_output_parameter = True
        self.q_layernorm = nn.LayerNorm(4, dtype=dtype)
        self.inner = nn.Linear(4, 4, dtype=dtype)


@pytest.mark.parametrize(
    ("settings", "dtype", "sentence"),
    [
        (
            {"params_dtype": "bf16"},
            torch.float32,
            "params_dtype='bfloat16': the model's parameters are float32; nothing casts them",
        ),
        (
            {"bf16": True},
            torch.float32,
            "bf16=True: the model's parameters are float32; cast the model before the build",
        ),
        (
            {"fp16": True},
            torch.bfloat16,
            "fp16=True: the model's parameters are bfloat16; cast the model before the build",
        ),
        ({"initial_loss_scale": 8.0}, torch.float32, f"initial_loss_scale=8.0: {HALF}"),
        ({"bf16": True, "min_loss_scale": 2.0}, torch.bfloat16, f"min_loss_scale=2.0: {HALF}"),
        ({"loss_scale_window": 9}, torch.float32, f"loss_scale_window=9: {HALF}"),
        (
            {"fp16": True, "loss_scale": 2.0, "hysteresis": 3},
            torch.float16,
            f"hysteresis=3: {HALF}",
        ),
        (
            {"store_param_remainders": False},
            torch.float32,
            "store_param_remainders=False: use_precision_aware_optimizer is False",
        ),
        (
            {"store_param_remainders": False, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
            torch.float32,
            "store_param_remainders=False: only bf16 parameters with fp32 main values have remainders",
        ),
        (
            {"use_precision_aware_optimizer": True},
            torch.float32,
            "use_precision_aware_optimizer=True: every dtype is float32 and so is the step",
        ),
        ({"decoupled_min_lr": 0.1}, torch.float32, "decoupled_min_lr=0.1: decoupled_lr is not set"),
        ({"barrier_with_L1_time": True}, torch.float32, "barrier_with_L1_time=True: there are no timers"),
        (
            {"decoupled_weight_decay": False, "weight_decay": 0.1},
            torch.float32,
            "decoupled_weight_decay=False: t_adam does not read it",
        ),
        (
            {"decoupled_lr": 0.5},
            torch.float32,
            "decoupled_lr=0.5: no parameter is an embedding or output head that the standard overrides reach",
        ),
        (
            {"apply_wd_to_qk_layernorm": True},
            torch.float32,
            "apply_wd_to_qk_layernorm=True: no parameter of a q_layernorm or k_layernorm decays",
        ),
    ],
)
def test_what_changes_nothing_is_named_in_warning_and_report(settings, dtype, sentence) -> None:
    """Setting, value and reason; once for a build."""
    model = nn.Linear(4, 4, bias=False, dtype=dtype)
    model.weight.use_muon = True  # no output head
    with pytest.warns(UnusedSettingWarning) as caught:
        optimizer = build_optimizer(model, "t_adam", lr=0.1, **settings)
    assert [str(each.message) for each in caught] == [f"settings that change nothing here: {sentence}"]
    assert optimizer.report().unused_settings == (sentence,)
    assert sentence in str(optimizer.report())
    assert json.loads(optimizer.report().to_json())["unused_settings"] == [sentence]


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"params_dtype": "bf16", "bf16": True}, torch.bfloat16),
        ({"fp16": True, "initial_loss_scale": 8.0, "min_loss_scale": 2.0, "hysteresis": 3}, torch.float16),
        (
            {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": False},
            torch.bfloat16,
        ),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, torch.float32),
        ({"use_precision_aware_optimizer": True}, torch.bfloat16),
        ({"use_precision_aware_optimizer": True}, torch.float16),
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False}, torch.bfloat16),
        ({"decoupled_lr": 0.5, "decoupled_min_lr": 0.1}, torch.float32),
        ({"apply_wd_to_qk_layernorm": True, "weight_decay": 0.1}, torch.float32),
    ],
)
def test_what_acts_is_not_named(settings, dtype) -> None:
    """Warnings are errors in these tests."""
    if "decoupled_lr" in settings:
        pytest.importorskip("megaopt_roles")  # whether the last layer is a head
    optimizer = build_optimizer(Named(dtype), "t_adam", lr=0.6, **settings)
    assert optimizer.report().unused_settings == ()


@pytest.mark.parametrize("name", ["decoupled_lr", "decoupled_min_lr"])
def test_overrides_that_replace_the_standard_ones_leave_their_settings_unread(name) -> None:
    """`{}` means no override, the decoupled learning rate's neither."""
    with pytest.warns(UnusedSettingWarning, match=f"{name}=0.1"):
        build_optimizer(Named(), "t_adam", lr=0.5, overrides={}, **{"decoupled_lr": 0.2, name: 0.1})


def test_a_wrapped_optimizer_was_built_without_the_configuration() -> None:
    """What building would have read is named."""
    config = OptimizerConfig(lr=0.1, decoupled_lr=0.2, decoupled_weight_decay=False, hysteresis=3)
    with pytest.warns(UnusedSettingWarning) as caught:
        optimizer = FP32Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), config)
    assert re.findall(r"(\w+)=[\w.]+: ", str(caught[0].message)) == [
        "decoupled_lr",
        "decoupled_weight_decay",
        "hysteresis",
    ]
    assert len(optimizer.report().unused_settings) == 3


def test_a_wrapped_optimizer_with_a_scaler_of_its_own_reads_no_scaling_settings() -> None:
    """The scaler that is given was made already."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    config = OptimizerConfig(lr=0.1, fp16=True, hysteresis=3)
    with pytest.warns(UnusedSettingWarning, match="hysteresis=3"):
        MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.1), config, DynamicGradScaler(4.0, 1.0))


def test_a_chain_tells_what_its_children_do_not_read(build, mlp) -> None:
    """One parameter of another optimizer makes a chain; both are asked."""
    with pytest.warns(
        UnusedSettingWarning, match="decoupled_weight_decay=False: t_adam, t_sgd does not read it"
    ):
        optimizer = build(
            mlp(), overrides={ParamKey(name="2.*"): {"optimizer": "t_sgd"}}, decoupled_weight_decay=False
        )
    assert len(optimizer.report().unused_settings) == 1


class _Settings:
    """A plugin with a setting that it calls unused, or with nonsense in the place of that."""

    megaopt_api = "1"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def megaopt_optimizer_entries(self) -> Any:
        @define
        class Settings:
            knob: int = field(default=0, metadata={"help": "does nothing here"})

        def kwargs(config, model_chunks, pg_collection):
            return {"lr": config.lr}

        entry = OptimizerEntry(
            torch.optim.SGD,
            config_to_kwargs=kwargs,
            settings=Settings,
            setting_prefixes=("knobby",),
            unused_settings=self.answer,
        )
        return {"knobby": entry}


def test_an_optimizer_says_what_it_does_not_need():
    """Of the parameters that it steps; the warning and the report name it."""
    seen = []

    def answer(config, specs):
        seen.extend(spec.name for spec in specs)
        return {"knobby_knob": "nothing turns"} if config.knobby_knob else {}

    with temporary_plugin(_Settings(answer), "knobs"):
        model = nn.Linear(2, 2)
        assert build_optimizer(model, "knobby", lr=0.1).report().unused_settings == ()
        with pytest.warns(UnusedSettingWarning, match="knobby_knob=3: nothing turns"):
            optimizer = build_optimizer(model, "knobby", lr=0.1, knobby_knob=3)
        assert optimizer.report().unused_settings == ("knobby_knob=3: nothing turns",)
    assert set(seen) == {"weight", "bias"}


@pytest.mark.parametrize(
    "answer", [lambda config, specs: ["knobby_knob"], lambda config, specs: {"lr": "no"}]
)
def test_nonsense_in_its_place_names_the_plugin(answer):
    """A list, or a setting that is none of a plugin's."""
    with temporary_plugin(_Settings(answer), "knobs"), pytest.raises(PluginError, match="must map settings"):
        build_optimizer(nn.Linear(2, 2), "knobby", lr=0.1)


def test_a_factor_on_the_learning_rate_that_no_schedule_reads_is_named() -> None:
    """The key is the reference's, and keeps groups apart there as here."""
    factor = {ParamKey(name="0.weight"): {"lr_mult": 0.5}}
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(
        UnusedSettingWarning, match=r"lr_mult=0\.5 in an override: .*max_lr is the learning rate"
    ):
        optimizer = build_optimizer(model, "t_adam", lr=0.1, overrides=factor)
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


class _Coupled:
    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """One optimizer whose constructor reads how weight decay is done."""

        def kwargs(config: Any, chunks: Any, pgs: Any) -> dict[str, Any]:
            return {"lr": config.lr, "amsgrad": not config.decoupled_weight_decay}

        return {"t_coupled": OptimizerEntry(torch.optim.AdamW, config_to_kwargs=kwargs)}


def test_who_reads_a_setting_is_named_beside_who_does_not(mlp) -> None:
    """It changes something, though not everything."""
    other = {ParamKey(name="2.*"): {"optimizer": "t_coupled"}}
    with (
        temporary_plugin(_Coupled(), "coupled"),
        pytest.warns(UnusedSettingWarning, match="t_adam does not read it, t_coupled does"),
    ):
        build_optimizer(mlp(), "t_adam", lr=0.1, overrides=other, decoupled_weight_decay=False)
