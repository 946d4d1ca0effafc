"""Where matrices lie in contiguous memory: the share of every rank is one segment of each bucket. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from attrs import define, field

from megaopt_core.params import ParamSpec
from megaopt_core.sharding import BufferKey, LayoutOptions, PerBufferParamLayout, World
from megaopt_layerwise.data_places import plan_dense_first
from megaopt_layerwise.planner import CostModel, Owners
from megaopt_layerwise.shares import memory_shares
from megaopt_layerwise.works import local_work

__all__ = ["in_buckets", "key_of", "lay_out_buckets", "lay_out_segments"]

_ALIGNMENT = 64
"""Elements that a parameter's start is aligned to: cache lines, and vector instructions."""


class _Sized(Protocol):
    @property
    def numel(self) -> int:
        """How many elements it has."""

    @property
    def shared_embedding(self) -> bool:
        """Pipeline stages share it."""


def key_of(spec: ParamSpec, chunk: int = 0) -> BufferKey:
    """Return the buffer that a matrix belongs to.

    Args:
        spec: the parameter.
        chunk: index of its model chunk.
    """
    return BufferKey(spec.dtype, spec.grad_dtype, spec.is_expert, is_managed_by_layer_wise=True, chunk=chunk)


def lay_out_segments(
    buckets: Sequence[Sequence[ParamSpec]], owners: Mapping[str, Owners], ranks: int
) -> PerBufferParamLayout:
    """Return a buffer in which what each rank steps lies together in every bucket, one rank after the other.

    What several ranks share lies where their shares meet, and such tensors follow each other only as ranks do. So they
    have buckets of their own behind the one with whole tensors: in each of these a rank ends one and begins another.

    Args:
        buckets: the matrices of each bucket, as this rank holds them.
        owners: name to who steps it, along the axis that shares the buffer out.
        ranks: number of ranks along that axis.

    Example:
        >>> import torch
        >>> from megaopt_core.params import Granularity
        >>> specs = [
        ...     ParamSpec(name, (n, 1), torch.float32, torch.float32, "any", 0, Granularity.TENSOR, 1.0)
        ...     for name, n in (("a", 100), ("b", 7))
        ... ]
        >>> layout = lay_out_segments([specs], {"a": Owners((1,)), "b": Owners((0,))}, 2)
        >>> layout.param_ranges, layout.share_ends
        ({'b': (0, 7), 'a': (64, 164)}, ((64, 192),))
    """
    laid_out = _Segments(ranks)
    for specs in buckets:
        whole = [spec for spec in specs if len(owners[spec.name].ranks) == 1]
        shared = [spec for spec in specs if len(owners[spec.name].ranks) > 1]
        if whole or not shared:
            laid_out.add(sorted(whole, key=lambda spec: owners[spec.name].ranks), owners)
        for chain in _chains(shared, owners):
            laid_out.add(chain, owners)
    return laid_out.layout


@define(eq=False)
class _Segments:
    """A buffer that grows bucket by bucket."""

    ranks: int
    ranges: dict[str, tuple[int, int]] = field(factory=dict)
    bucket_of: dict[str, int] = field(factory=dict)
    share_ends: list[tuple[int, ...]] = field(factory=list)
    position: int = 0

    def add(self, specs: Iterable[ParamSpec], owners: Mapping[str, Owners]) -> None:
        """Add a bucket of tensors whose ranks never go back."""
        ends: list[int] = []
        for spec in specs:
            begin = self.position
            for rank, numel in memory_shares(spec.shape, owners[spec.name]):
                # Ranks before this one have ended where the last tensor did.
                ends += [self.position] * (rank - len(ends))
                self.position += numel
            self.ranges[spec.name] = begin, self.position
            self.bucket_of[spec.name] = len(self.share_ends)
            self.position = _round_up(self.position, _ALIGNMENT)
        self.share_ends.append((*ends, *[self.position] * (self.ranks - len(ends))))

    @property
    def layout(self) -> PerBufferParamLayout:
        """What there is so far."""
        ends = tuple(ends[-1] for ends in self.share_ends)
        return PerBufferParamLayout(self.ranges, ends, self.bucket_of, tuple(self.share_ends))


def _chains(specs: Iterable[ParamSpec], owners: Mapping[str, Owners]) -> list[list[ParamSpec]]:
    """Return few lists in each of which a tensor begins with the rank that the one before ends with, or a later one."""
    chains: list[list[ParamSpec]] = []
    last: list[int] = []
    for spec in sorted(specs, key=lambda spec: (owners[spec.name].ranks[0], owners[spec.name].ranks[-1])):
        ranks = owners[spec.name].ranks
        at = next((at for at, rank in enumerate(last) if rank <= ranks[0]), len(chains))
        if at == len(chains):
            chains.append([])
            last.append(0)
        chains[at].append(spec)
        last[at] = ranks[-1]
    return chains


def lay_out_buckets(
    specs: Sequence[ParamSpec], world: World, options: LayoutOptions, model: CostModel | None = None
) -> dict[BufferKey, PerBufferParamLayout]:
    """Return the buffers of a model that will be wrapped: buckets in reverse model order, owners over the whole model.

    Shares need not be equal, so owners are chosen without regard to buckets, and each bucket is ready as early as the
    backward pass can have it.

    Args:
        specs: the matrices as this rank holds them, in model order.
        world: number of ranks along each axis.
        options: bucket size and chunks.
        model: weighs operations against exchanged bytes; None: the default one.
    """
    dense = [local_work(spec) for spec in specs if not spec.is_expert]
    experts = [local_work(spec) for spec in specs if spec.is_expert]
    owners = plan_dense_first(dense, experts, world, model)
    by_key: dict[BufferKey, list[ParamSpec]] = {}
    for spec in reversed(specs):
        by_key.setdefault(key_of(spec, options.chunk_of.get(spec.name, 0)), []).append(spec)
    return {
        key: lay_out_segments(
            list(in_buckets(some, options.bucket_size)), owners, world.size(some[0].data_axis)
        )
        for key, some in by_key.items()
    }


def in_buckets[Item: _Sized](items: Iterable[Item], size: int | None) -> Iterator[list[Item]]:
    """Yield runs of about `size` elements; an embedding that pipeline stages share stands alone.

    Args:
        items: what is laid out, in the order of backward.
        size: elements of a bucket; None: one bucket takes all.
    """
    bucket: list[Item] = []
    numel = 0
    for item in items:
        if item.shared_embedding and bucket:
            yield bucket
            bucket, numel = [], 0
        bucket.append(item)
        numel += item.numel
        if item.shared_embedding or (size is not None and numel >= size):
            yield bucket
            bucket, numel = [], 0
    if bucket:
        yield bucket


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
