"""A configuration checks every value, keeps what it cannot check, and survives every way of copying it."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
import pprint

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaopt_core import OptimizerConfig
from megaopt_core.config import CORE_FIELD_NAMES, core_field_info
from megaopt_core.errors import ConfigurationError, UnsupportedSettingError
from megaopt_core.registry import get_registry

DEFAULTS = {
    "lr": None,
    "min_lr": None,
    "decoupled_lr": None,
    "decoupled_min_lr": None,
    "weight_decay": 0.01,
    "apply_wd_to_qk_layernorm": False,
    "fp8_recipe": None,
    "fp16": False,
    "bf16": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "params_dtype": torch.float32,
    "use_precision_aware_optimizer": False,
    "store_param_remainders": True,
    "main_grads_dtype": torch.float32,
    "main_params_dtype": torch.float32,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32,
    "stochastic_state_rounding": False,
    "optimizer": "adam",
    "loss_scale": None,
    "initial_loss_scale": 2**32,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "decoupled_weight_decay": True,
    "cautious_weight_decay": False,
    "use_distributed_optimizer": False,
    "use_layer_wise_distributed_optimizer": False,
    "peers_per_matrix": None,
    "overlap_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
    "use_torch_optimizer_for_cpu_offload": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "pin_cpu_grads": True,
    "pin_cpu_params": True,
    "clip_grad": 1.0,
    "grad_norm_skip_threshold": float("inf"),
    "log_num_zeros_in_grad": False,
    "skip_nonfinite_steps": True,
    "read_before_step": False,
    "barrier_with_L1_time": False,
    "timers": None,
    "config_logger_dir": "",
    "optimizer_cuda_graph": False,
    "precision": None,
    "sharding": None,
}
"""Names and defaults on which trainers rely, written out."""


def test_every_field_has_the_default_that_trainers_rely_on() -> None:
    """No field more, none less."""
    config = OptimizerConfig()
    assert {name: getattr(config, name) for name in CORE_FIELD_NAMES} == DEFAULTS


def test_the_signature_shows_every_field() -> None:
    """Editors and documentation see names and defaults, then plugin settings."""
    parameters = inspect.signature(OptimizerConfig).parameters
    assert list(parameters) == [*CORE_FIELD_NAMES, "plugin_settings"]
    assert parameters["weight_decay"].default == 0.01
    assert parameters["plugin_settings"].kind is inspect.Parameter.VAR_KEYWORD


REFUSED = [
    ({"lr": -1.0}, "lr=-1.0: must be a number of at least 0"),
    ({"lr": "fast"}, "lr='fast': must be a number of at least 0"),
    ({"lr": True}, "lr=True: must be a number of at least 0"),
    ({"lr": math.nan}, "lr=nan: must be a number of at least 0"),
    ({"lr": math.inf}, "lr=inf: must be a number of at least 0"),
    ({"min_lr": -1e-5}, "min_lr=-1e-05: must be a number of at least 0"),
    ({"lr": 0.1, "min_lr": 0.2}, "min_lr=0.2: must not be above lr=0.1"),
    ({"decoupled_lr": -1}, "decoupled_lr=-1: must be a number of at least 0"),
    ({"decoupled_lr": 0.1, "decoupled_min_lr": 1}, "decoupled_min_lr=1: must not be above decoupled_lr=0.1"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1: must be a number of at least 0"),
    ({"weight_decay": None}, "weight_decay=None: must be a number of at least 0"),
    ({"clip_grad": -1.0}, "clip_grad=-1.0: must be a number of at least 0"),
    ({"fp16": True, "bf16": True}, "fp16=True and bf16=True: at most one of them can be True"),
    ({"bf16": "yes"}, "bf16='yes': must be True or False"),
    ({"bf16": 1}, "bf16=1: must be True or False"),
    ({"optimizer": ""}, "optimizer='': must be a name"),
    ({"optimizer": torch.optim.SGD}, "optimizer=<class 'torch.optim.sgd.SGD'>: must be a name"),
    ({"sharding": 1}, "sharding=1: must be a name"),
    ({"loss_scale": 0.0}, "loss_scale=0.0: must be a number above 0"),
    ({"loss_scale": -2}, "loss_scale=-2: must be a number above 0"),
    ({"initial_loss_scale": 0}, "initial_loss_scale=0: must be a number above 0"),
    (
        {"initial_loss_scale": 1.0, "min_loss_scale": 2.0},
        "min_loss_scale=2.0: must not be above initial_loss_scale=1.0",
    ),
    ({"loss_scale": 1e39}, "loss_scale=1e+39: must be above 0 and finite in fp32, as 1 over it"),
    ({"loss_scale": 1e-46}, "loss_scale=1e-46: must be above 0 and finite in fp32, as 1 over it"),
    ({"min_loss_scale": 1e-39}, "min_loss_scale=1e-39: must be above 0 and finite in fp32, as 1 over it"),
    ({"loss_scale_window": 2.5}, "loss_scale_window=2.5: must be a whole number"),
    ({"loss_scale_window": 0.5}, "loss_scale_window=0.5: must be a number of at least 1"),
    ({"hysteresis": 0}, "hysteresis=0: must be an integer of at least 1"),
    ({"hysteresis": 1.5}, "hysteresis=1.5: must be an integer of at least 1"),
    (
        {"optimizer_cpu_offload": True},
        "optimizer_cpu_offload=True: offloads optimizer_offload_fraction=0.0 of the states, which is nothing; set the "
        "fraction, 1.0 for all of them",
    ),
    ({"optimizer_offload_fraction": 1.5}, "optimizer_offload_fraction=1.5: must be a number from 0 to 1"),
    (
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "optimizer_cuda_graph": True},
        "optimizer_cuda_graph=True: a graph captures the work of the device, but optimizer_cpu_offload=True gives a "
        "part of the step to the CPU; choose one",
    ),
    ({"timers": 3}, "timers=3: must be callable or None"),
    ({"config_logger_dir": None}, "config_logger_dir=None: must be a str"),
    (
        {"params_dtype": torch.int8},
        "params_dtype='int8': must be one of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2",
    ),
    (
        {"exp_avg_dtype": "fp7", "use_precision_aware_optimizer": True},
        "exp_avg_dtype='fp7': must be one of float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, uint8",
    ),
    *[
        ({name: "bf16"}, f"{name}='bfloat16': must be 'float32' unless use_precision_aware_optimizer=True")
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ],
]


@pytest.mark.parametrize(("given_settings", "message"), REFUSED)
def test_a_bad_value_is_refused_with_name_value_and_what_is_allowed(given_settings, message) -> None:
    """At construction, not at step 7,000; the error carries the field and the value."""
    with pytest.raises(ConfigurationError) as caught:
        OptimizerConfig(**given_settings)
    assert str(caught.value) == message
    assert message.startswith(str(caught.value.setting))
    assert isinstance(caught.value, ValueError)


NO_FP8 = "megaopt does not train with fp8 parameters"


@pytest.mark.parametrize(
    ("name", "value", "why", "default"),
    [
        ("fp8_recipe", "delayed", NO_FP8, None),
        ("reuse_grad_buf_for_mxfp8_param_ag", True, NO_FP8, False),
    ],
)
def test_what_megaopt_does_not_do_is_refused_instead_of_ignored(name, value, why, default) -> None:
    """The default is accepted, so that configurations of other trainers can be taken over."""
    assert getattr(OptimizerConfig(**{name: default}), name) == default
    with pytest.raises(UnsupportedSettingError) as caught:
        OptimizerConfig(**{name: value})
    assert str(caught.value) == f"{name}={value!r}: {why}; only the default {default!r} is accepted"


@pytest.mark.parametrize("given_dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16", "bf16"])
def test_dtypes_may_be_strings(given_dtype) -> None:
    """Long, with torch's prefix, or short."""
    assert OptimizerConfig(params_dtype=given_dtype).params_dtype is torch.bfloat16


def test_state_dtypes_go_with_the_precision_aware_optimizer() -> None:
    """All four, also in fp8."""
    config = OptimizerConfig(
        use_precision_aware_optimizer=True,
        exp_avg_dtype="fp8",
        exp_avg_sq_dtype="fp16",
        main_grads_dtype="bf16",
    )
    assert config.exp_avg_dtype is torch.float8_e4m3fn
    assert config.exp_avg_sq_dtype is torch.float16
    assert config.main_grads_dtype is torch.bfloat16


def test_an_assignment_is_checked_like_construction() -> None:
    """A refused one changes nothing."""
    config = OptimizerConfig(lr=0.1, min_lr=0.01)
    config.lr = 0.2
    config.params_dtype = "bf16"
    assert (config.lr, config.params_dtype) == (0.2, torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"^lr=-1: must be a number of at least 0$"):
        config.lr = -1
    with pytest.raises(ConfigurationError, match=r"^min_lr=0.01: must not be above lr=0.001$"):
        config.lr = 0.001
    assert config.lr == 0.2
    with pytest.raises(AttributeError, match="'lr' cannot be deleted; assign its default instead"):
        del config.lr


def test_trainers_can_assign_timers() -> None:
    """They are part of the run, not of what is written."""
    config = OptimizerConfig()
    config.timers = print
    assert config.timers is print
    assert "timers" not in config.to_dict()


def test_replace_makes_another_configuration() -> None:
    """The first one stays as it is."""
    config = OptimizerConfig(lr=0.1)
    other = config.replace(lr=0.2, clip_grad=0.0)
    assert (config.lr, config.clip_grad, other.lr, other.clip_grad) == (0.1, 1.0, 0.2, 0.0)
    assert config.replace() == config
    assert config.replace() is not config
    with pytest.raises(ConfigurationError, match=r"^lr=-1: "):
        config.replace(lr=-1)


def test_private_names_are_no_settings() -> None:
    """What copies, notebooks and debuggers ask for must not load plugins."""
    config = OptimizerConfig()
    assert not hasattr(config, "_repr_html_")
    assert not hasattr(config, "__array__")
    with pytest.raises(AttributeError, match="'OptimizerConfig' object has no attribute '_x'"):
        config._x = 1


def test_repr_shows_what_is_not_default() -> None:
    """And always the optimizer."""
    assert repr(OptimizerConfig(lr=0.1, bf16=True)) == "OptimizerConfig(optimizer='adam', lr=0.1, bf16=True)"


def test_equality_is_that_of_the_values() -> None:
    """A mutable object has no hash."""
    assert OptimizerConfig(lr=0.1) == OptimizerConfig(lr=0.1)
    assert OptimizerConfig(lr=0.1) != OptimizerConfig(lr=0.2)
    assert OptimizerConfig() != {"lr": None}
    with pytest.raises(TypeError, match="unhashable"):
        hash(OptimizerConfig())


def test_copies_share_timers_and_pickles_leave_them_out() -> None:
    """Timers hold locks and process groups."""
    config = OptimizerConfig(lr=0.1, timers=lambda name, level: None)
    for copied in (copy.copy(config), copy.deepcopy(config)):
        assert copied == config
        copied.lr = 0.3
        assert config.lr == 0.1
    restored = pickle.loads(pickle.dumps(config))  # noqa: S301 - what was just pickled
    assert restored == config.replace(timers=None)


def test_every_field_has_help() -> None:
    """A field nobody can look up does not exist."""
    infos = core_field_info()
    assert [info.name for info in infos] == list(CORE_FIELD_NAMES)
    assert [info.name for info in infos if not (info.help.endswith(".") and len(info.help) > 20)] == []
    assert {info.name: info.type for info in infos}["sharding"] == "str | None"


not_negative = st.floats(min_value=0, max_value=1e6)
dtypes = st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
CONFIGURATIONS = st.fixed_dictionaries(
    {"use_precision_aware_optimizer": st.just(value=True)},
    optional={
        "lr": not_negative.map(lambda lr: lr + 1),
        "min_lr": st.floats(min_value=0, max_value=1),
        "weight_decay": not_negative,
        "clip_grad": not_negative,
        "bf16": st.booleans(),
        "log_num_zeros_in_grad": st.booleans(),
        "params_dtype": dtypes,
        "exp_avg_dtype": dtypes,
        "main_params_dtype": dtypes,
        "loss_scale": st.none() | st.floats(min_value=1e-3, max_value=1e9),
        "loss_scale_window": st.integers(min_value=1),
        "hysteresis": st.integers(min_value=1, max_value=100),
        "optimizer": st.text(min_size=1).filter(lambda name: not name.startswith("dist_")),
        "sharding": st.none() | st.sampled_from(["distributed", "layer_wise", "replicated", "mine"]),
        "config_logger_dir": st.text(),
        "muon_momentum": st.floats(min_value=0, max_value=0.9),
        "lion_beta1": st.floats(min_value=0, max_value=0.9),
    },
)


@settings(max_examples=60)
@given(CONFIGURATIONS)
def test_what_is_written_is_read_back(values) -> None:
    """Through a dict, JSON, a pickle and a copy, whether or not the plugins are installed."""
    config = OptimizerConfig(**values)
    written = config.to_dict()
    assert OptimizerConfig.from_dict(written) == config
    assert OptimizerConfig.from_dict(json.loads(json.dumps(written))) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - what was just pickled
    assert copy.deepcopy(config) == config
    assert config.replace() == config


def test_a_written_configuration_is_strict_json() -> None:
    """JSON has no infinity: it is written as text, and read back as a number."""
    config = OptimizerConfig(lr=0.1)
    written = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert written["grad_norm_skip_threshold"] == "inf"
    assert OptimizerConfig.from_dict(written) == config


def test_the_standard_library_takes_it_for_a_dataclass() -> None:
    """Trainers call `dataclasses.fields`, `replace` and `asdict` on configurations."""
    config = OptimizerConfig(lr=0.1, bf16=True)
    listed = [each.name for each in dataclasses.fields(OptimizerConfig)]
    assert listed == [*CORE_FIELD_NAMES, *get_registry().setting_owners()]
    assert {each.name: each.default for each in dataclasses.fields(config)} == DEFAULTS
    assert dataclasses.replace(config, lr=0.2) == config.replace(lr=0.2)
    assert dataclasses.asdict(config) == {**DEFAULTS, "lr": 0.1, "bf16": True}
    assert pprint.pformat(config) == repr(config)
    with pytest.raises(ConfigurationError, match="lr=-1"):
        dataclasses.replace(config, lr=-1)


def test_a_configuration_is_filled_from_arguments_with_settings_of_plugins() -> None:
    """A trainer loops over the class's fields; defaults are those of the settings."""
    pytest.importorskip("megaopt_muon")
    arguments = {"lr": 0.1, "muon_momentum": 0.5, "adam_eps": 1e-6, "batch_size": 8}
    names = [each.name for each in dataclasses.fields(OptimizerConfig)]
    config = OptimizerConfig(**{name: arguments[name] for name in names if name in arguments})
    assert (config.lr, config.muon_momentum, config.adam_eps) == (0.1, 0.5, 1e-6)
    fields = dataclasses.fields(OptimizerConfig)
    defaults = {each.name: each.default for each in fields if each.default is not dataclasses.MISSING}
    assert {name: getattr(OptimizerConfig(), name) for name in defaults} == defaults


def test_a_dataclass_of_plugin_settings_has_those_that_were_given() -> None:
    """They survive `replace`, and stand in `asdict`, which reads them."""
    pytest.importorskip("megaopt_muon")
    config = OptimizerConfig(lr=0.1, muon_momentum=0.5)
    assert dataclasses.replace(config, lr=0.2) == config.replace(lr=0.2)
    assert dataclasses.asdict(config)["muon_momentum"] == 0.5


@pytest.mark.parametrize("given", [({"lr": 0.1},), ("adam",), (0.1, 0.2), (None,), (OptimizerConfig(),)])
def test_settings_without_names_are_refused(given) -> None:
    """The error says how they are given."""
    with pytest.raises(ConfigurationError, match=r"name every setting.*OptimizerConfig.from_dict\(mapping\)"):
        OptimizerConfig(*given)
