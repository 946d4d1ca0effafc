"""Settings of trainers that are called otherwise here, or set elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MEGATRON"]

MEGATRON: Mapping[str, str] = {
    "chunked_optimizer_state_offload": (
        "overlap_cpu_optimizer_d2h_h2d=True copies one piece while others are stepped, with optimizer_cpu_offload=True"
    ),
    "muon_use_syrk": (
        "Muon computes half of a symmetric product wherever that was measured to be faster; "
        "pip install megaopt-muon[hopper] brings kernels for GPUs of capability 9 and 10"
    ),
    "optimizer_state_offload_fraction": (
        "it is called optimizer_offload_fraction here, and goes with optimizer_cpu_offload=True"
    ),
    "use_layer_wise_param_layout": (
        "the wrapper takes a layout: full_param_layout=plan_full_param_layout(model, ddp_config, "
        "routing=route(config, [model])) for megaopt's; Megatron's own is stepped as it lies"
    ),
}
"""Settings that Megatron has added since, to what to write in their place."""
