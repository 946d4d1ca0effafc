"""Megatron-core: our optimizers in its training loop, by one changed import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core import MegatronOptimizer, ProcessGroupCollection
from megaopt_core import get_megatron_optimizer as build
from megaopt_core.params import chunks_of
from megaopt_trainers._megatron_calls import with_megatron_calls
from megaopt_trainers._megatron_config import as_config, as_overrides
from megaopt_trainers._megatron_groups import groups_from, groups_of_megatron
from megaopt_trainers._megatron_names import global_names
from megaopt_trainers._megatron_wrapper import wrap_megatron

if TYPE_CHECKING:
    from megaopt_core.routing import GivenRouting

__all__ = ["get_megatron_optimizer"]


def get_megatron_optimizer(
    config: Any,
    model_chunks: Sequence[torch.nn.Module],
    config_overrides: Mapping[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    fqn: Callable[[int, str], str] | None = None,
    example: Any = None,
    routing: GivenRouting | None = None,
) -> MegatronOptimizer:
    """Build the optimizer of a model of Megatron-core's: in place of `megatron.core.optimizer.get_megatron_optimizer`.

    Configuration, keys and overrides may be Megatron's or ours. Process groups are those of `pg_collection`, of the
    model, or of `parallel_state`. Names count layers over all pipeline stages and experts over all expert-parallel
    ranks. Buffers of Megatron's `DistributedDataParallel` are stepped as they lie: with `use_distributed_optimizer`
    each rank steps the part that was reduced to it, and Megatron's wrapper gathers parameters.

    Args:
        config: the run's configuration.
        model_chunks: the model's chunks, wrapped or bare.
        config_overrides: `{ParamKey: ParamGroupOverride}`; None means the standard overrides.
        use_gloo_process_groups: kept for the signature.
        pg_collection: process groups; None: those of the model, or of `parallel_state`.
        dump_param_to_param_group_map: folder into which `{parameter name: group id}` is written.
        fqn: maps `(chunk index, local name)` to a globally unique name; None: layers and experts are counted.
        example: a batch that settles doubtful roles, as for :func:`megaopt_core.route`.
        routing: a checkpoint whose routing is built, as for :func:`megaopt_core.route`.

    Returns:
        The optimizer, with the calls that Megatron's training loop and checkpoints make.

    Raises:
        MegaoptError: a setting, an override or the routing is not possible; nothing has been built.
    """
    chunks = chunks_of(model_chunks)
    pgs = groups_of_megatron(chunks) if pg_collection is None else groups_from([pg_collection])
    pgs = pgs or ProcessGroupCollection.from_default()
    wrap_megatron(chunks, pgs)
    names = fqn or global_names(chunks, pgs)
    optimizer = build(
        as_config(config),
        chunks,
        as_overrides(config_overrides, chunks),
        use_gloo_process_groups,
        pgs,
        dump_param_to_param_group_map,
        fqn=names,
        example=example,
        routing=routing,
    )
    return with_megatron_calls(optimizer, chunks, names)
