"""Who owns what, as the buffers of a wrapped model tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megaopt_core.errors import ShardingError
from megaopt_core.params import ParamSpec
from megaopt_core.sharding import BufferKey, PerBufferParamLayout
from megaopt_layerwise.planner import Owners
from megaopt_layerwise.shares import owners_in

__all__ = ["owners_in_buffers", "require_in_buffers"]

type _Buffers = Mapping[BufferKey, PerBufferParamLayout]
type _Shards = Callable[[BufferKey], int]


def owners_in_buffers(
    specs: Mapping[str, ParamSpec], buffers: _Buffers, shards: _Shards
) -> Mapping[str, Owners]:
    """Return who owns each parameter that lies in one rank's share, or over several as a plan lays it out.

    Args:
        specs: name to parameter.
        buffers: those that the model is wrapped in.
        shards: number of ranks that share a buffer out.
    """
    found = {}
    for key, buffer in buffers.items():
        for name, (begin, end) in buffer.param_ranges.items():
            bucket = buffer.bucket_of[name]
            start, ends = buffer.buckets[bucket][0], buffer.ends(bucket, shards(key))
            owners = owners_in(specs[name], begin, end, start, ends) if name in specs else None
            if owners is not None:
                found[name] = owners
    return found


def require_in_buffers(specs: Mapping[str, ParamSpec], buffers: _Buffers, shards: _Shards) -> None:
    """Raise where buffers lack a parameter, or cut one as no plan does.

    Args:
        specs: name to parameter.
        buffers: those that the model is wrapped in.
        shards: number of ranks that share a buffer out.

    Raises:
        ShardingError: they do; the message names parameters, and how to wrap the model.
    """
    present = {name for buffer in buffers.values() for name in buffer.param_ranges}
    absent = [name for name in specs if name not in present]
    if absent:
        raise ShardingError(
            f"{len(absent)} trainable parameters are not in the buffers of the wrapped model: "
            f"{', '.join(absent[:5])}; wrap the model after its parameters are chosen to train"
        )
    places = owners_in_buffers(specs, buffers, shards)
    divided = [name for name in specs if name not in places]
    if divided:
        raise ShardingError(
            f"sharding='layer_wise' steps whole matrices, but the buffers that the model is wrapped in cut "
            f"{len(divided)} of them over ranks: {', '.join(divided[:5])}. Wrap it with "
            "full_param_layout=plan_full_param_layout(model, ddp_config, routing=route(config, [model])), or with "
            "use_distributed_optimizer=False"
        )
