"""What building asks of layouts and of what strategies attach: equal buffers, groups of peers, copies, a protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import torch.distributed as dist

from megaopt_core.errors import PluginError, ShardingError
from megaopt_core.parallel._agreement import Comparison, Rows, fingerprint
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates, size_of
from megaopt_core.parallel._reduction import gather_objects, new_group
from megaopt_core.params._shards import RankCoordinates
from megaopt_core.params._specs import ParamSpec
from megaopt_core.sharding._cuts import cut_of
from megaopt_core.sharding._layout import BufferKey, PerBufferParamLayout, World
from megaopt_core.sharding._protocol import ParamLayout, ShardedParams, spread_axes

__all__ = ["buffers_alike", "duplicated", "make_peer_groups", "require_attached", "require_sharded_params"]

type _Buffers = Mapping[BufferKey, PerBufferParamLayout]


def require_sharded_params(sharded: object, strategy: str) -> None:
    """Raise unless what a strategy attached is all of the protocol.

    Args:
        sharded: what `attach` returned.
        strategy: the strategy's name.

    Raises:
        PluginError: it lacks a member; the message names each.
    """
    if not isinstance(sharded, ShardedParams):
        names = ("pieces", "stats_group", "exchange", *_METHODS)
        lacking = [name for name in names if not hasattr(sharded, name)]
        raise PluginError(
            f"sharding strategy {strategy!r} attached a {type(sharded).__name__}, which lacks "
            f"{', '.join(lacking)}: inherit from megaopt_core.ShardedParams, which has defaults"
        )


_METHODS = ("collect_grads", "take_model_values", "start_param_sync", "finish_param_sync", "travels")


def require_attached(
    sharded: ShardedParams,
    layout: ParamLayout,
    rank: RankCoordinates,
    groups: Collection[int],
    strategy: str,
    specs: Mapping[str, ParamSpec],
    world: World,
) -> None:
    """Raise unless the live pieces are those of the layout: elements that nobody brings to life are never stepped.

    Args:
        sharded: what `attach` returned.
        layout: who steps what.
        rank: this rank's coordinates.
        groups: the routing's groups that were to be attached.
        strategy: the strategy's name.
        specs: this rank's parameters by name.
        world: number of ranks along each axis.

    Raises:
        ShardingError: a piece is missing, is not in the layout, has a tensor of another shape, or is a part of a tensor
            that must be whole, for which there is no exchange.
    """
    planned = Counter(spec for spec in layout.pieces(rank) if spec.group in groups)
    attached = Counter(piece.spec for piece in sharded.pieces)
    for what, unlike in (("does not attach", planned - attached), ("attaches more than", attached - planned)):
        if unlike:
            names = [shard.name for spec in unlike for _, shard in spec.members]
            raise ShardingError(
                f"sharding={strategy!r} {what} the pieces that its layout gives this rank: {len(names)} "
                f"differ, such as pieces of {', '.join(map(repr, names[:3]))}"
            )
    for piece in sharded.pieces:
        if tuple(piece.param.shape) != piece.spec.shape or len(piece.model_params) != len(piece.spec.members):
            raise ShardingError(
                f"sharding={strategy!r} must attach a tensor of shape {piece.spec.shape} and {len(piece.spec.members)} "
                f"model parameters for the piece of {piece.spec.members[0][1].name!r}; it attaches the shape "
                f"{tuple(piece.param.shape)} and {len(piece.model_params)} parameters"
            )
        for name in (shard.name for _, shard in piece.spec.members):
            reason = cut_of(piece.spec, specs[name], world, is_split=None if sharded.exchange else False)
            if reason is not None:
                without = " without an exchange" * (sharded.exchange is None)
                raise ShardingError(f"sharding={strategy!r} attaches {name!r}{without}: it {reason}")


def duplicated(layout: ParamLayout, rank: RankCoordinates, experts: Collection[str]) -> set[str]:
    """Return the parameters of which the first of several ranks with copies steps the same elements, and counts them.

    These are tensor-parallel ranks, and those along axes that the layout spreads owners over.

    Args:
        layout: who steps what.
        rank: this rank's coordinates.
        experts: names of the expert parameters, whose tensor-parallel ranks may be others.
    """
    mine: dict[str, set[object]] = {}
    copies: set[str] = set()
    for piece in layout.pieces(rank):
        for _, shard in piece.members:
            mine.setdefault(shard.name, set()).add(shard)
    for is_expert in (False, True):
        for axis in {"expert_tp" if is_expert else "tp", *spread_axes(layout, is_expert=is_expert)}:
            if rank.get(axis, 0):
                first = {shard for piece in layout.pieces({**rank, axis: 0}) for _, shard in piece.members}
                copies |= {
                    name
                    for name, shards in mine.items()
                    if (name in experts) is is_expert and shards <= first
                }
    return copies


def make_peer_groups(
    layouts: Iterable[ParamLayout], rank: RankCoordinates, pgs: ProcessGroupCollection
) -> Mapping[tuple[str, int], dist.ProcessGroup]:
    """Return the process groups of peers that have parts: one for each axis and block size, made in one order.

    Args:
        layouts: who steps what.
        rank: this rank's coordinates.
        pgs: the process groups.

    Raises:
        ShardingError: peers are asked for along an axis without a process group.
        CommunicationError: another rank has stopped, or the process group's timeout is over.
    """
    mine = {
        (piece.peers.axis, piece.peers.size)
        for layout in layouts
        for piece in layout.pieces(rank)
        if piece.peers is not None and piece.peers.dim is not None and piece.peers.size > 1
    }
    wanted = sorted(_of_all(mine, pgs))
    made = {}
    for axis, size in wanted:
        group = pgs.of_axis(axis)
        if group is None or size_of(group) % size:
            raise ShardingError(
                f"peers in blocks of {size} along {axis!r}, which has {size_of(group)} ranks: give blocks that divide "
                "it"
            )
        first = rank.get(axis, 0) // size * size
        members = dist.get_process_group_ranks(group)[first : first + size]
        made[axis, size] = new_group(members, group, f"making the groups of peers along {axis!r}")
    return made


def _of_all(mine: set[tuple[str, int]], pgs: ProcessGroupCollection) -> set[tuple[str, int]]:
    """Return what the ranks along each axis ask for: all of a block take part in making its group."""
    found = set(mine)
    for axis in ("dp", "expert_dp"):
        group = pgs.of_axis(axis)
        if communicates(group):
            told = gather_objects(found, group, f"telling which peers have parts along {axis!r}")
            found = set().union(*told)
    return found


def buffers_alike(buffers: _Buffers | None, pgs: ProcessGroupCollection) -> list[Comparison]:
    """Return what data-parallel ranks must have alike of buffers: dense ones over their group, experts' over theirs.

    Args:
        buffers: the buffers of this rank; None where the model has none.
        pgs: the process groups.
    """
    kinds = (("the buffers", pgs.dense_dp, False), ("the buffers of experts", pgs.expt_dp, True))
    return [
        _alike(what, buffers, group, is_expert=is_expert)
        for what, group, is_expert in kinds
        if communicates(group)
    ]


def _alike(
    what: str, buffers: _Buffers | None, group: dist.ProcessGroup | None, *, is_expert: bool
) -> Comparison:
    some = {key: buffer for key, buffer in (buffers or {}).items() if key.is_expert is is_expert}
    data = [
        (
            _words(key),
            dict(buffer.param_ranges),
            buffer.bucket_ends,
            dict(buffer.bucket_of),
            buffer.share_ends,
        )
        for key, buffer in some.items()
    ]
    return Comparison(what, fingerprint((buffers is None, data)), lambda: _rows(some), group)


def _words(key: BufferKey) -> str:
    dtypes = f"{key.param_dtype} with gradients in {key.grad_dtype}".replace("torch.", "")
    marks = ", layer-wise" if key.is_managed_by_layer_wise else ""
    return f"buffer of {dtypes}{marks}, chunk {key.chunk}"


def _rows(buffers: _Buffers) -> Rows:
    rows = []
    for key, buffer in buffers.items():
        name = _words(key)
        ends = {"bucket ends": str(buffer.bucket_ends), "shares": str(buffer.share_ends or "equal")}
        rows.append((name, ends))
        for param, (start, stop) in buffer.param_ranges.items():
            where = {"place": f"[{start}, {stop})", "bucket": str(buffer.bucket_of.get(param))}
            rows.append((f"parameter {param!r} in {name}", where))
    return rows
