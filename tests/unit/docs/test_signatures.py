"""Signatures that the map of names calls equal are equal, restated here as data; other rows say how they differ."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

NEEDED = inspect.Parameter.empty
PAGE = (Path(__file__).parents[3] / "docs" / "map.md").read_text()

MUON = {
    "params": NEEDED,
    "lr": 0.0003,
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.01,
    "use_decoupled_weight_decay": True,
    "split_qkv": False,
    "is_qkv_fn": None,
    "qkv_split_shapes": None,
    "fp32_matmul_prec": "medium",
    "coefficient_type": "quintic",
    "num_ns_steps": 5,
    "scale_mode": "spectral",
    "extra_scale_factor": 1.0,
    "pg_collection": None,
    "tp_mode": "duplicated",
}
SIGNATURES = {
    "get_megatron_optimizer": (
        "megaopt_core.get_megatron_optimizer",
        {
            "config": NEEDED,
            "model_chunks": NEEDED,
            "config_overrides": None,
            "use_gloo_process_groups": True,
            "pg_collection": None,
            "dump_param_to_param_group_map": None,
        },
    ),
    "ParamKey": (
        "megaopt_core.ParamKey",
        {"name": (), "attr": (), "predicate": (), "with_name_predicate": ()},
    ),
    "ParamKey.matches": (
        "megaopt_core.ParamKey.matches",
        {"self": NEEDED, "param": NEEDED, "param_name": NEEDED},
    ),
    "ParamPredicate": ("megaopt_core.ParamPredicate", {"name": NEEDED, "fn": NEEDED}),
    "ParamWithNamePredicate": ("megaopt_core.ParamWithNamePredicate", {"name": NEEDED, "fn": NEEDED}),
    "OptimizerParamScheduler": (
        "megaopt_core.OptimizerParamScheduler",
        {
            **dict.fromkeys(
                (
                    "optimizer",
                    "init_lr",
                    "max_lr",
                    "min_lr",
                    "lr_warmup_steps",
                    "lr_decay_steps",
                    "lr_decay_style",
                    "start_wd",
                    "end_wd",
                    "wd_incr_steps",
                    "wd_incr_style",
                ),
                NEEDED,
            ),
            "use_checkpoint_opt_param_scheduler": True,
            "override_opt_param_scheduler": False,
            "wsd_decay_steps": None,
            "lr_wsd_decay_style": None,
        },
    ),
    "OptimizerParamScheduler.get_wd": (
        "megaopt_core.OptimizerParamScheduler.get_wd",
        {"self": NEEDED, "param_group": None},
    ),
    "OptimizerParamScheduler.get_lr": (
        "megaopt_core.OptimizerParamScheduler.get_lr",
        {"self": NEEDED, "param_group": NEEDED},
    ),
    "OptimizerParamScheduler.step": (
        "megaopt_core.OptimizerParamScheduler.step",
        {"self": NEEDED, "increment": NEEDED},
    ),
    "OptimizerParamScheduler.state_dict": (
        "megaopt_core.OptimizerParamScheduler.state_dict",
        {"self": NEEDED},
    ),
    "OptimizerParamScheduler.load_state_dict": (
        "megaopt_core.OptimizerParamScheduler.load_state_dict",
        {"self": NEEDED, "state_dict": NEEDED},
    ),
    "combine_param_group_overrides": (
        "megaopt_core.combine_param_group_overrides",
        {"param_group_overrides": NEEDED},
    ),
    "param_group_override_to_tuple": (
        "megaopt_core.param_group_override_to_tuple",
        {"param_group_override": NEEDED},
    ),
    "get_canonical_lr_for_logging": ("megaopt_core.get_canonical_lr_for_logging", {"param_groups": NEEDED}),
    "reload_model_params": (
        "megaopt_core.MegatronOptimizer.reload_model_params",
        {"self": NEEDED, "state_dict": None},
    ),
    "TensorParallelMuon": ("megaopt_muon.TensorParallelMuon", MUON),
    "TensorParallelAdaptiveMuon": (
        "megaopt_muon.TensorParallelAdaptiveMuon",
        {**MUON, "moment2_method": "adamuon", "beta2": 0.95, "eps": 1e-08},
    ),
    "get_supported_coefficient_types": ("megaopt_muon.get_supported_coefficient_types", {}),
    "validate_coefficient_type": ("megaopt_muon.validate_coefficient_type", {"coefficient_type": NEEDED}),
}
SETTINGS = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-08,
    "sgd_momentum": 0.9,
    "muon_momentum": 0.95,
    "muon_split_qkv": True,
    "muon_nesterov": False,
    "muon_scale_mode": "spectral",
    "muon_fp32_matmul_prec": "medium",
    "muon_coefficient_type": "quintic",
    "muon_num_ns_steps": 5,
    "muon_tp_mode": "blockwise",
    "muon_extra_scale_factor": 1.0,
    "muon_scalar_optimizer": "adam",
    "lion_beta1": 0.95,
    "lion_beta2": 0.98,
    "soap_shampoo_beta": 0.95,
    "soap_precondition_frequency": 1,
    "soap_use_kl_shampoo": True,
    "adaptive_muon_moment2_method": "adamuon",
    "adaptive_muon_beta2": 0.95,
    "adaptive_muon_eps": 1e-08,
}
NAMED = {
    "_kwargs_from_config": "takes an entry",
    "_create_emerging_optimizer": "takes an entry",
    "ParamKey": "one more field, `role`",
    "OptimizerConfig": "fields of optimizers come from their plugins",
    "exp_avg_dtype": "`torch.uint8`",
    "_get_param_groups": "groups carry `lr` and `weight_decay`",
    "logger": "named after its module",
    "TensorParallelMuon": "`pg_collection` also a DeviceMesh",
    "TensorParallelAdaptiveMuon": "`namo`",
}


def _found(dotted: str) -> Any:
    """Return what a dotted name of ours is."""
    package, *attributes = dotted.split(".")
    found = importlib.import_module(package) if package == "megaopt_core" else pytest.importorskip(package)
    for attribute in attributes:
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("there", SIGNATURES)
def test_code_that_moves_over_calls_us_as_before(there):
    """Names, order and defaults are the same; what we add comes by keyword, and needs no value."""
    dotted, expected = SIGNATURES[there]
    ours = list(inspect.signature(_found(dotted)).parameters.values())
    shared = ours[: len(expected)]
    assert {each.name: each.default for each in shared} == expected
    assert [each.name for each in shared] == list(expected)
    assert all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in shared)
    for added in ours[len(expected) :]:
        assert added.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD), added
        assert added.default is not NEEDED or added.kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_plugins_have_the_defaults_that_trainers_rely_on(name):
    """Where the plugin is installed; the core's own fields are in the configuration's tests."""
    from megaopt_core import OptimizerConfig
    from megaopt_core.errors import PluginNotInstalledError

    try:
        assert getattr(OptimizerConfig(), name) == SETTINGS[name]
    except PluginNotInstalledError:
        pytest.skip("its plugin is not installed")


@pytest.mark.parametrize("name", NAMED)
def test_what_differs_is_named_in_the_map(name):
    """Nobody finds a difference by running into it."""
    row = next(
        line for line in re.findall(r"^\| .*$", PAGE, re.MULTILINE) if f"`{name}`" in line.split("|")[1]
    )
    assert NAMED[name] in row.split("|")[3]
