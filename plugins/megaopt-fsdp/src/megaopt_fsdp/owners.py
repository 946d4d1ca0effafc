"""Which rank transforms or steps each block, and in which buckets blocks travel: pure data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from attrs import evolve, frozen
from megaopt_layerwise.planner import Work, plan_owners

from megaopt_core import Granularity
from megaopt_core.errors import ShardingError
from megaopt_core.params import ParamSpec
from megaopt_fsdp.blocks import Block

__all__ = ["BUCKET_BYTES", "Bucket", "Owned", "in_buckets", "owned_by", "travels"]

BUCKET_BYTES = 2**25
"""Bytes that one owner gets in one bucket, where a matrix has no more."""


def travels(spec: ParamSpec) -> bool:
    """Return whether an optimizer must see a parameter whole.

    Args:
        spec: the parameter.
    """
    return spec.granularity is not Granularity.ELEMENT


@frozen
class Owned:
    """A block with its owner.

    Args:
        block: what is transformed, or stepped.
        owner: place of the rank that does it.
    """

    block: Block
    owner: int


@frozen
class Bucket:
    """What travels together.

    Args:
        there: dtype in which updates or gradients go to owners.
        back: dtype in which transformed updates or values come back.
        owned: blocks with their owners, in an order that all ranks share.
    """

    there: torch.dtype
    back: torch.dtype
    owned: Sequence[Owned]


def owned_by(blocks: Sequence[Block], ranks: int) -> Sequence[Owned]:
    """Return blocks with owners that level what a step costs.

    All blocks of an optimizer that must have its whole group on one rank get one owner.

    Args:
        blocks: of one grid.
        ranks: number of its places.

    Raises:
        ShardingError: no rank holds a part of everything that one rank must have.
    """
    together: dict[str, list[Block]] = {}
    for block in blocks:
        grouped = block.spec.granularity is Granularity.GROUP
        together.setdefault(f"group of {block.spec.optimizer}" if grouped else block.name, []).append(block)
    plan = plan_owners([_joined(name, some) for name, some in together.items()], ranks)
    owner = {block.name: plan.owners[name].ranks[0] for name, some in together.items() for block in some}
    return [Owned(block, owner[block.name]) for block in blocks]


def _joined(name: str, blocks: Sequence[Block]) -> Work:
    """Return what blocks cost together."""
    works = [block.work for block in blocks]
    holders = sorted(set(blocks[0].holders).intersection(*(block.holders for block in blocks)))
    if not holders:
        raise ShardingError(
            f"sharding='fsdp' steps all that {blocks[0].spec.optimizer!r} has on one rank, but no rank holds parts of "
            f"all of it: {blocks[0].spec.name!r} and {blocks[-1].spec.name!r} lie on different ranks. Give some of it "
            "another optimizer"
        )
    return evolve(
        works[0],
        name=name,
        cost=sum(work.cost for work in works),
        numel=sum(work.numel for work in works),
        state_bytes=sum(work.state_bytes for work in works),
        ranks=holders,
    )


def in_buckets(owned: Iterable[Owned]) -> Sequence[Bucket]:
    """Return blocks in buckets, of one dtype each: in every bucket all owners have about as much to do.

    Args:
        owned: the blocks.
    """
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[Owned]] = {}
    for each in owned:
        by_dtype.setdefault(_dtypes(each.block.spec), []).append(each)
    return [
        Bucket(there, back, some)
        for (there, back), mine in by_dtype.items()
        for some in _shared_out(mine, there)
    ]


def _dtypes(spec: ParamSpec) -> tuple[torch.dtype, torch.dtype]:
    if spec.splits:
        wide = torch.promote_types(spec.dtype, torch.float32)
        return wide, wide
    return torch.promote_types(spec.dtype, spec.grad_dtype), spec.dtype


def _shared_out(owned: Sequence[Owned], dtype: torch.dtype) -> list[list[Owned]]:
    """Share what owners have out over buckets, each owner's dearest first, by its own work done before."""
    by_owner: dict[int, list[Owned]] = {}
    for each in owned:
        by_owner.setdefault(each.owner, []).append(each)
    needed = [min(len(mine), -(-_bytes(mine, dtype) // BUCKET_BYTES)) for mine in by_owner.values()]
    buckets: list[list[Owned]] = [[] for _ in range(max(needed, default=0))]
    for mine in by_owner.values():
        mine.sort(key=lambda each: (-each.block.work.cost, each.block.name))
        costs = [max(each.block.work.cost, 1.0) for each in mine]
        total, done = sum(costs), 0.0
        for each, cost in zip(mine, costs, strict=True):
            buckets[int(len(buckets) * (done + cost / 2) / total)].append(each)
            done += cost
    return [bucket for bucket in buckets if bucket]


def _bytes(owned: Sequence[Owned], dtype: torch.dtype) -> int:
    return sum(each.block.work.numel for each in owned) * dtype.itemsize
