"""Every data-parallel rank steps a slice of the rows of every parameter; updates of matrices travel to owners."""

import heapq
import math
from itertools import chain

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from megaopt_core import Granularity, ShardingStrategy, hookimpl
from megaopt_core.errors import ShardingError
from megaopt_core.sharding import PieceSpec, ShardedParams, Travel

megaopt_api = "1"

BUCKET = 2**24  # elements whose updates travel together


@frozen
class RowLayout:
    """Who has which rows, and who transforms which matrix: pure data."""

    specs: tuple
    ranks: int

    def shard(self, spec, rank):
        """Return a rank's rows, which may be none, in units that keep cuts aligned; a number goes to the first."""
        if not spec.shape:
            return spec.shard({}, 0, int(rank == 0))
        rows, width = spec.shape[0], math.prod(spec.shape[1:])
        unit = spec.alignment // math.gcd(spec.alignment, width or spec.alignment)
        share = -(-rows // (self.ranks * unit)) * unit
        first, last = min(rank * share, rows), min((rank + 1) * share, rows)
        return spec.part(((first, *[0] * len(spec.shape[1:])), (last - first, *spec.shape[1:])))

    def pieces(self, rank):
        """Return a piece of every parameter; those whose updates travel also where they are empty."""
        shards = [(spec, self.shard(spec, rank.get("dp", 0))) for spec in self.specs]
        return [PieceSpec.of(shard, spec.group) for spec, shard in shards if shard.numel or travels(spec)]

    def owners(self):
        """Return the rank that transforms each matrix: the dearest first, to whom has least to do."""
        owners, loads = {}, [(0.0, rank) for rank in range(self.ranks)]
        for spec in sorted(filter(travels, self.specs), key=lambda spec: (-spec.cost, spec.name)):
            load, rank = heapq.heappop(loads)
            owners[spec.name] = rank
            heapq.heappush(loads, (load + spec.cost, rank))
        return owners


def travels(spec):
    """Say whether an optimizer must see this parameter whole."""
    return spec.granularity is not Granularity.ELEMENT


@define(eq=False)
class AllToAll:
    """Updates to their owners and back, with one all-to-all a bucket in each direction."""

    infos: list  # what the piece at each position is
    owner_of: list  # which rank transforms it
    counts: list  # how many of its elements each rank has
    buckets: list
    group: object
    rank: int
    _given: dict = field(factory=dict)
    _arriving: dict = field(factory=dict)

    @property
    def owned(self):
        """Return what this rank transforms."""
        return [info for info, owner in zip(self.infos, self.owner_of, strict=True) if owner == self.rank]

    def start_to_owners(self, bucket, updates):
        """Send each slice to the owner of its matrix."""
        self._given[bucket] = dict(zip(self.buckets[bucket], updates, strict=True))
        given, of_owner = self._given[bucket], self._by_owner(bucket)
        leaving = [[given[index].view(-1) for index in indices] for indices in of_owner]
        arriving = [[self.counts[i][rank] for i in of_owner[self.rank]] for rank in range(len(of_owner))]
        self._start(bucket, leaving, arriving)

    def finish_to_owners(self, bucket):
        """Put the slices of each matrix together."""
        mine = self._by_owner(bucket)[self.rank]
        of_rank = self._finish(bucket)
        wholes = (torch.cat(slices) for slices in zip(*of_rank, strict=True))
        return [
            (self.infos[i], whole.view(self.infos[i].shape)) for i, whole in zip(mine, wholes, strict=True)
        ]

    def start_back(self, bucket, transformed):
        """Send each rank its rows of every matrix that this one owns."""
        of_owner = self._by_owner(bucket)
        mine = zip(of_owner[self.rank], transformed, strict=True)
        cut = [whole.view(-1).split(self.counts[index]) for index, whole in mine]
        leaving = [[slices[rank] for slices in cut] for rank in range(len(of_owner))]
        arriving = [[self.counts[index][self.rank] for index in indices] for indices in of_owner]
        self._start(bucket, leaving, arriving)

    def finish_back(self, bucket):
        """Return this rank's rows of every matrix that has an update."""
        of_owner, arrived = self._by_owner(bucket), self._finish(bucket)
        rows = dict(zip(chain(*of_owner), chain(*arrived), strict=True))
        given = self._given.pop(bucket)
        return [None if update is None else rows[i].view(update.shape) for i, update in given.items()]

    def _by_owner(self, bucket):
        """Return the positions of what travels, by the rank that owns it."""
        moving = [index for index, update in self._given[bucket].items() if update is not None]
        return [[i for i in moving if self.owner_of[i] == rank] for rank in range(self.group.size())]

    def _start(self, bucket, leaving, arriving):
        """Begin to send tensors to each rank; `arriving` are the lengths of those that come from each."""
        like = next((update for update in self._given[bucket].values() if update is not None), None)
        if like is None:
            return  # so it is on every rank
        flat = torch.cat([like.new_empty(0), *chain(*leaving)])
        received = flat.new_empty(sum(map(sum, arriving)))
        sizes = [sum(lengths) for lengths in arriving], [sum(map(len, tensors)) for tensors in leaving]
        work = dist.all_to_all_single(received, flat, *sizes, group=self.group, async_op=True)
        self._arriving[bucket] = work, received, arriving, flat

    def _finish(self, bucket):
        """Return what has come from each rank."""
        if bucket not in self._arriving:
            return [[] for _ in range(self.group.size())]
        work, received, arriving, _ = self._arriving.pop(bucket)
        work.wait()
        parts = iter(received.split([*chain(*arriving)]))
        return [[next(parts) for _ in lengths] for lengths in arriving]


@define(eq=False)
class RowParams(ShardedParams):
    """Rows with memory of their own."""

    pieces: list
    model: object
    shards: list  # of each rank
    group: object
    stats_group: object
    exchange: AllToAll | None = None
    _gathered: list = field(factory=list)

    def collect_grads(self):
        """Take the rows of gradients that whoever wraps the model has reduced."""
        for piece in self.pieces:
            grad = self.model.grad(piece.spec.members[0][1])
            piece.grad = None if grad is None else grad.view(piece.param.shape)

    def take_model_values(self):
        """Take the rows of the model's present values."""
        for piece in self.pieces:
            self.model.fill(piece)

    def start_param_sync(self):
        """Gather the rows of all ranks, padded to the longest."""
        for dtype in dict.fromkeys(param.dtype for param in self.model.params.values()):
            of_rank = [
                [s for s in shards if self.model.params[s.name].dtype == dtype] for shards in self.shards
            ]
            longest = max(sum(shard.numel for shard in shards) for shards in of_rank)
            if longest:
                rows = [piece.param.detach().view(-1) for piece in self.pieces if piece.param.dtype == dtype]
                like = next(iter(self.model.params.values()))
                flat = torch.cat([*rows, like.new_empty(0, dtype=dtype)])
                flat = torch.nn.functional.pad(flat, (0, longest - len(flat)))
                gathered = [torch.empty_like(flat) for _ in of_rank]
                work = dist.all_gather(gathered, flat, group=self.group, async_op=True)
                self._gathered.append((work, gathered, of_rank))

    def finish_param_sync(self):
        """Write the rows of all ranks into the model."""
        for work, gathered, of_rank in self._gathered:
            work.wait()
            for flat, shards in zip(gathered, of_rank, strict=True):
                lengths = [shard.numel for shard in shards]
                rows = flat[: sum(lengths)].split(lengths) if lengths else ()
                for shard, values in zip(shards, rows, strict=True):
                    self.model.store(shard, values)
        self._gathered.clear()

    def travels(self):
        """Return the bytes of updates that this rank sends, there and back."""
        told = {}
        if self.exchange is not None:
            rank = self.exchange.rank
            routes = zip(self.pieces, self.exchange.owner_of, self.exchange.counts, strict=True)
            for piece, owner, counts in routes:
                elements = sum(counts) - counts[rank] if owner == rank else counts[rank]
                name, width = piece.spec.members[0][1].name, max(4, piece.param.element_size())
                told[name] = Travel("split", elements * width)
        return told


class Rows(ShardingStrategy):
    """A slice of the rows of every parameter on every data-parallel rank."""

    name = "rows"
    granularities = frozenset({Granularity.ELEMENT, Granularity.TENSOR})

    def refuse(self, param, spec):
        """Return why a parameter cannot be cut by rows."""
        if travels(spec) and not spec.splits:
            return f"{spec.optimizer!r} only steps whole tensors"
        if spec.is_expert or spec.dividing:
            return "it is divided over model-parallel ranks"
        return None

    def layout(self, specs, world, options):
        """Return who has which rows."""
        return RowLayout(tuple(specs), world.size("dp"))

    def attach(self, layout, model, pgs, groups, *, is_expert=False):
        """Return this rank's rows, and how the updates of matrices travel."""
        ranks = [
            [piece for piece in layout.pieces({**model.rank, "dp": rank}) if piece.group in groups]
            for rank in range(layout.ranks)
        ]
        rank, group = model.rank.get("dp", 0), pgs.shard_group()
        if group is None:
            raise ShardingError("sharding='rows' needs several processes: use 'replicated'")
        pieces = [model.new_piece(spec) for spec in ranks[rank]]
        shards = [[shard for piece in of_rank for _, shard in piece.members] for of_rank in ranks]
        params = RowParams(pieces, model, shards, group, pgs.sharded_stats_group())
        specs = {spec.name: spec for spec in layout.specs if travels(spec)}
        moving = [specs[shard.name] for shard in shards[rank] if shard.name in specs]
        if moving:
            owners = layout.owners()
            params.exchange = AllToAll(
                [model.infos[spec.name] for spec in moving],
                [owners[spec.name] for spec in moving],
                [[of_rank[index].numel for of_rank in shards] for index in range(len(moving))],
                buckets_of(moving),
                group,
                rank,
            )
        return params


def buckets_of(specs):
    """Return positions in runs of one dtype and of limited size."""
    buckets, size = [], 0
    for index, spec in enumerate(specs):
        if not buckets or size + spec.numel > BUCKET or spec.dtype != specs[index - 1].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += spec.numel
    return buckets


@hookimpl
def megaopt_sharding_strategies():
    """Offer `rows`."""
    return {"rows": Rows()}
