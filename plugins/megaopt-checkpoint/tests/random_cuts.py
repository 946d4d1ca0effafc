"""A sharding strategy whose layouts are cut anywhere: what every checkpoint must be able to load and save.

All parameters of a group lie one after the other in a random order; each rank steps the range between two random cuts,
in memory of its own.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import define, frozen
from megaopt_testing import temporary_plugin

from megaopt_core import ProcessGroupCollection, hookimpl
from megaopt_core.optimizers._building import builder
from megaopt_core.parallel import is_distributed
from megaopt_core.params import Granularity, ParamSpec, RankCoordinates
from megaopt_core.routing import _sharding as layouts
from megaopt_core.sharding import (
    LayoutOptions,
    LiveModel,
    ParamLayout,
    PieceSpec,
    ShardedParams,
    ShardingStrategy,
    World,
)


@frozen
class CutLayout:
    specs: tuple
    ranks: int
    seed: int

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        found, dp_rank = [], rank.get("dp", 0)
        for group in sorted({spec.group for spec in self.specs}):
            chance = random.Random(f"{self.seed} {group}")  # noqa: S311 - the same on every rank
            specs = [spec for spec in self.specs if spec.group == group]
            chance.shuffle(specs)
            total = sum(spec.numel for spec in specs)
            cuts = [0, *sorted(chance.randint(0, total) for _ in range(self.ranks - 1)), total]
            low, high = cuts[dp_rank], cuts[dp_rank + 1]
            members, size, at = [], 0, 0
            for spec in specs:
                start, stop = max(low - at, 0), min(high - at, spec.numel)
                if start < stop:
                    members.append((size, spec.shard(rank, start, stop)))
                    size += stop - start
                at += spec.numel
            if members:
                found.append(PieceSpec(group, (size,), tuple(members)))
        return found


@define
class CutParams(ShardedParams):
    pieces: list
    model: dict[str, torch.nn.Parameter]
    live: LiveModel
    stats_group = None

    def collect_grads(self) -> None:
        for piece in self.pieces:
            piece.grad = torch.cat(
                [
                    param.grad.reshape(-1)[shard.start : shard.stop]
                    for param, (_, shard) in zip(piece.model_params, piece.spec.members, strict=True)
                ]
            )

    def take_model_values(self) -> None:
        for piece in self.pieces:
            self.live.fill(piece)

    def start_param_sync(self) -> None:
        """Every element has one owner: the others send zeros."""
        owned = {name: torch.zeros_like(param).view(-1) for name, param in self.model.items()}
        for piece in self.pieces:
            for offset, shard in piece.spec.members:
                owned[shard.name][shard.start : shard.stop] = piece.param[offset : offset + shard.numel]
        for name, param in self.model.items():
            if is_distributed():
                dist.all_reduce(owned[name])
            param.data.copy_(owned[name].view_as(param))

    def finish_param_sync(self) -> None:
        pass


@frozen
class RandomCuts(ShardingStrategy):
    """Args: name; seed of the cuts; ranks: None means those of the world."""

    name: str
    seed: int
    ranks: int | None = None
    rank: int | None = None
    granularities = frozenset({Granularity.ELEMENT})
    fallback = "replicated"

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> CutLayout:
        return CutLayout(tuple(specs), self.ranks or world.size("dp"), self.seed)

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> CutParams:
        rank = self.rank if self.rank is not None else (dist.get_rank() if is_distributed() else 0)
        pieces = [model.new_piece(spec) for spec in layout.pieces({"dp": rank}) if spec.group in groups]
        mine = {spec.name: model.params[spec.name] for spec in layout.specs if spec.group in groups}
        return CutParams(pieces, mine, model)


class CutPlugin:
    """Strategies `cut0`, `cut1`...: one a seed."""

    megaopt_api = "1"

    def __init__(self, seeds: Iterable[int], **where: int) -> None:
        self.strategies = {f"cut{seed}": RandomCuts(f"cut{seed}", seed, **where) for seed in seeds}

    @hookimpl
    def megaopt_sharding_strategies(self) -> Mapping[str, ShardingStrategy]:
        return self.strategies


@contextmanager
def random_cuts(*seeds: int, **where: Any) -> Iterator[list[str]]:
    """Register a strategy a seed for the time of a `with` block.

    The block gets their names. With `ranks` and `rank` this process stands for one rank of several, whose layouts a
    world of one rank does not fit.
    """
    with ExitStack() as patches:
        if "rank" in where:
            patches.enter_context(mock.patch.object(layouts, "owners_of"))
            patches.enter_context(mock.patch.object(builder, "require_attached"))
        patches.enter_context(temporary_plugin(CutPlugin(seeds, **where), name="random-cuts"))
        yield [f"cut{seed}" for seed in seeds]
