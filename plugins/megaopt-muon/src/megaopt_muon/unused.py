"""Which of Muon's settings change nothing for the matrices that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megaopt_core.params import Fused, ParamSpec

if TYPE_CHECKING:
    from megaopt_core.config import OptimizerConfig

__all__ = ["unused_settings"]

_TENSOR_PARALLEL = ("tp", "expert_tp")


def unused_settings(config: OptimizerConfig, specs: Sequence[ParamSpec]) -> Mapping[str, str]:
    """Return the settings that were given and change nothing, each with the reason.

    Args:
        config: the run's configuration.
        specs: the parameters that Muon steps.

    Example:
        >>> from megaopt_core import OptimizerConfig
        >>> unused_settings(OptimizerConfig(optimizer="muon", lr=0.1, muon_tp_mode="duplicated"), [])
        {'muon_tp_mode': 'tensor parallelism cuts no matrix that Muon steps'}
    """
    return dict(_unused(config, specs))


def _unused(config: OptimizerConfig, specs: Sequence[ParamSpec]) -> Iterator[tuple[str, str]]:
    views = [spec.view for spec in specs if spec.view is not None]
    split = config.muon_split
    if split == "none" and not any(view.split_sizes for view in views):
        yield "muon_split", "no weight that Muon steps is fused, as far as its reader knows"
    if split == "per_head" and not any(view.head_sizes or view.head_columns for view in views):
        yield "muon_split", "no weight that Muon steps has attention heads, as far as its reader knows"
    if not config.muon_split_qkv:
        if split == "none":
            yield "muon_split_qkv", "muon_split='none' takes nothing apart"
        elif not any(view.fused is Fused.QKV for view in views):
            yield "muon_split_qkv", "no weight that Muon steps fuses query, key and value"
    cuts = {placement.axis for spec in specs for placement in spec.dividing}
    if config.muon_tp_mode != "blockwise" and not cuts.intersection(_TENSOR_PARALLEL):
        yield "muon_tp_mode", "tensor parallelism cuts no matrix that Muon steps"
    triples, steps = config.muon_coefficients or (), config.muon_num_ns_steps
    if len(triples) > steps:
        rest = f"the last {len(triples) - steps}" if len(triples) - steps > 1 else "the last"
        yield (
            "muon_coefficients",
            f"muon_num_ns_steps={steps} takes the first {steps} triples, and not {rest}",
        )
