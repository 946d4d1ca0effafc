"""The map of names: what it points to exists, and no name of the widely used package is left out."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "map.md").read_text()
HERE = sorted(
    {
        name
        for row in re.findall(r"^\| `.*$", PAGE, re.MULTILINE)
        for name in re.findall(r"`(megaopt_[\w.]+)(?:\(\)[\w.()]*)?`", row.split("|")[2])
    }
)
PUBLIC_THERE = [
    "get_megatron_optimizer",
    "OptimizerConfig",
    "AdamOptimizerConfig",
    "SGDOptimizerConfig",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "OptimizerParamScheduler",
    "ParamGroupOverride",
    "combine_param_group_overrides",
    "param_group_override_to_tuple",
    "MegatronOptimizer",
    "FP32Optimizer",
    "MixedPrecisionOptimizer",
    "Float16OptimizerWithFloat16Params",
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DynamicGradScaler",
    "EmergingOptimizerEntry",
    "TensorParallelMuon",
    "TensorParallelAdaptiveMuon",
    "get_supported_coefficient_types",
    "validate_coefficient_type",
    "_matches",
    "_get_param_groups",
    "_get_param_groups_and_buffers",
    "_get_megatron_optimizer_based_on_param_groups",
    "_create_emerging_optimizer",
    "_default_param_overrides_factory",
    "_is_nonlinear_or_embedding",
    "_eopt_init_state_fn",
    "_kwargs_from_config",
    "_default_adam_based_eopt_config_to_kwargs",
    "_muon_config_to_kwargs",
    "_adaptive_muon_config_to_kwargs",
    "_get_qkv_split_shapes",
    "_EMERGING_OPTIMIZERS",
    "LayerWiseDistributedOptimizer",
    "is_managed_by_layer_wise_optimizer",
    "_bucket_is_managed_by_layer_wise_optimizer",
    "tag_params_for_buffer_routing",
    "_shard_divisor",
    "_compute_per_buffer_param_layout",
    "compute_full_param_layout",
    "shard_params",
    "_shard_params_from_layout",
    "_shard_params_ping_pong",
    "set_bucket_layerwise_params_list",
    "allgather_params",
    "broadcast_params",
    "start_param_sync_for_bucket_group_subset",
    "step_with_ready_grads",
    "get_grad_norm",
    "has_grad_norm_group",
    "_get_grad_norm_for_group",
    "count_zeros",
    "sharded_state_dict",
    "save_state_dict_to_file",
    "load_state_dict_from_file",
]


@pytest.mark.parametrize("name", HERE)
def test_every_name_on_the_right_exists(name):
    """Each dotted name can be imported; names of plugins where the plugin is installed."""
    package, *attributes = name.split(".")
    found = importlib.import_module(package) if package == "megaopt_core" else pytest.importorskip(package)
    for attribute in attributes:
        if not hasattr(found, attribute):
            importlib.import_module(f"{found.__name__}.{attribute}")
        found = getattr(found, attribute)


@pytest.mark.parametrize("name", PUBLIC_THERE)
def test_every_name_on_the_left_is_in_the_map(name):
    """Nobody who moves over looks for a name in vain."""
    assert f"`{name}`" in PAGE
