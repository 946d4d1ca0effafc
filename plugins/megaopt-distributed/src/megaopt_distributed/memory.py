"""The flat memory that pieces are slices of: a wrapped model's buffers, or our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import define, evolve, field

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import ShardingError, UnsupportedOperationError
from megaopt_core.params import named_params
from megaopt_core.sharding import (
    BufferKey,
    LiveModel,
    Piece,
    PieceSpec,
    finish_grad_sync,
    wrappers_of,
)
from megaopt_distributed.buffers.bucket import Bucket, Reduction
from megaopt_distributed.buffers.collectives import communicator
from megaopt_distributed.buffers.flat import move_into
from megaopt_distributed.gathering import GatheredBucket, Gathering
from megaopt_distributed.layout import LayoutInBuffers

__all__ = ["FlatMemory", "memory_of"]

type _Twins = tuple[torch.nn.Parameter, Sequence[torch.nn.Parameter]]
"""A parameter and the other parameter objects that share its memory."""


class FlatMemory(Protocol):
    """Flat memory of a model, shared by all of its optimizers."""

    @property
    def gathering(self) -> Gathering:
        """When its buckets are gathered."""

    def piece(self, spec: PieceSpec) -> Piece:
        """Return a live piece.

        Args:
            spec: the piece as pure data.
        """

    def grad(self, piece: Piece) -> torch.Tensor | None:
        """Return a piece's gradient, None when its parameter has none.

        Args:
            piece: a live piece.
        """

    def finish_grad_sync(self) -> None:
        """Return when gradients are reduced, and raise when parameters are not where they will be stepped."""

    def finish_param_sync(self) -> None:
        """Return when parameters may be read, or when the forward pass will wait for them."""


@define(eq=False)
class OwnMemory:
    """Parameters moved into flat memory of our own; gradients stay where the engine puts them, already reduced."""

    layout: LayoutInBuffers
    model: LiveModel
    pgs: ProcessGroupCollection
    _data: dict[BufferKey, torch.Tensor] = field(factory=dict, init=False)
    _views: dict[str, torch.Tensor] = field(factory=dict, init=False)
    _twins: Sequence[_Twins] = field(init=False)
    gathering: Gathering = field(init=False)

    def __attrs_post_init__(self) -> None:
        for chunk in self.model.chunks:
            _require_order_of_buckets(chunk)
        # Moving parameters takes twins apart; which they are is known only before.
        self._twins = [
            (entry.param, entry.twins) for chunk in self.model.chunks for entry in named_params(chunk)
        ]
        buckets = []
        rank = self.model.rank
        for key, buffer in self.layout.buffers(rank).items():
            params = {name: self.model.params[name] for name in buffer.param_ranges}
            if not params:
                continue
            data = move_into(buffer, params)
            self._data[key] = data
            self._views.update((name, param.data) for name, param in params.items())
            comm = communicator(self.pgs.shard_group(is_expert=key.is_expert), data.device)
            reduction = Reduction(
                comm, communicator(None, data.device), scatter=False, average=False, factor=1.0
            )
            groups_of = self.layout.groups_of(key, rank)
            for index, ((start, stop), groups) in enumerate(zip(buffer.buckets, groups_of, strict=True)):
                ends = buffer.share_ends_in(index)
                bucket = Bucket({}, reduction, param_data=data[start:stop], share_ends=ends)
                buckets.append(GatheredBucket(bucket, key, start, frozenset(groups)))
        self.gathering = Gathering(buckets)
        self._join_twins()

    def _join_twins(self) -> None:
        for param, others in self._twins:
            for twin in others:
                twin.data = param.data

    def piece(self, spec: PieceSpec) -> Piece:
        """Return a slice of one parameter, or all of it.

        Args:
            spec: the piece as pure data.
        """
        return _piece(spec, self._data, self.model)

    def grad(self, piece: Piece) -> torch.Tensor | None:
        """Return the slice of the parameter's gradient; None when there is none, and the piece is left alone.

        Args:
            piece: a live piece.
        """
        _, shard = piece.spec.members[0]
        grad = self.model.grad(shard)
        return None if grad is None else grad.view(piece.spec.shape)

    def finish_grad_sync(self) -> None:
        """Wait for a wrapper of ours that all-reduces; other engines have reduced during backward.

        Raises:
            UnsupportedOperationError: a parameter has left the flat memory for another dtype or device.
        """
        self._take_back()
        finish_grad_sync(self.model.chunks)

    @torch.no_grad()
    def _take_back(self) -> None:
        """Bring parameters that were given other memory back into the flat memory, which is what a step reaches.

        `model.to("cpu:0")`, which trainers call on each model that they are given, copies what is on "cpu".
        """
        params = {name: self.model.params[name] for name in self._views}
        left = {
            name: param for name, param in params.items() if param.data_ptr() != self._views[name].data_ptr()
        }
        for name, param in left.items():
            view = self._views[name]
            if (param.dtype, param.device, param.shape) != (view.dtype, view.device, view.shape):
                raise UnsupportedOperationError(
                    f"{name!r} is no longer in the memory that its sharding strategy gave it: it is {param.dtype} on "
                    f"{param.device} now, and was {view.dtype} on {view.device}. Convert or move the model (.to(), "
                    ".half(), .cuda()) before its optimizer is built"
                )
        for name, param in left.items():
            param.data = self._views[name].copy_(param)
        if left:
            torch.autograd.graph.increment_version(left.values())
            self._join_twins()

    def finish_param_sync(self) -> None:
        """Wait for everything that is being gathered."""
        self.gathering.finish()


@define(eq=False)
class BufferMemory:
    """The buffers of a wrapped model: gradients are reduce-scattered into them."""

    layout: LayoutInBuffers
    model: LiveModel
    _wrappers: dict[int, Any] = field(factory=dict, init=False)
    _params: dict[BufferKey, torch.Tensor] = field(factory=dict, init=False)
    _grads: dict[BufferKey, torch.Tensor] = field(factory=dict, init=False)
    gathering: Gathering = field(init=False)

    def __attrs_post_init__(self) -> None:
        buckets = []
        rank = self.model.rank
        for key, layout in self.layout.buffers(rank).items():
            wrapper = self._wrapper(key.chunk)
            buffer = wrapper.param_and_grad_buffers[evolve(key, chunk=0)]
            self._params[key], self._grads[key] = buffer.param_data, buffer.grad_data
            overlaps = wrapper.ddp_config.overlap_param_gather
            starts = [start for start, _ in layout.buckets]
            for bucket, start, groups in zip(
                buffer.buckets, starts, self.layout.groups_of(key, rank), strict=True
            ):
                buckets.append(GatheredBucket(bucket, key, start, frozenset(groups), overlaps))
        self.gathering = Gathering(buckets)

    def _wrapper(self, chunk: int) -> Any:
        """Return the wrapper of a chunk, and keep it: a bare chunk does not, and without it there are no gradients."""
        if chunk not in self._wrappers:
            found = wrappers_of([self.model.chunks[chunk]])
            (self._wrappers[chunk],) = (wrapper for wrapper in found if wrapper.scatters_grads)
        return self._wrappers[chunk]

    def piece(self, spec: PieceSpec) -> Piece:
        """Return a run of parameters.

        Args:
            spec: the piece as pure data.
        """
        return _piece(spec, self._params, self.model)

    def grad(self, piece: Piece) -> torch.Tensor | None:
        """Return the run's range of the gradient buffer.

        Args:
            piece: a live piece.
        """
        if piece.spec.buffer is None:
            return None
        key, start, stop = piece.spec.buffer
        return self._grads[key][start:stop].view(piece.spec.shape)

    def finish_grad_sync(self) -> None:
        """Wait for the buckets that are being reduced; reduce those that are not."""
        self.gathering.finish()
        finish_grad_sync(self.model.chunks)

    def finish_param_sync(self) -> None:
        """Wait for the buckets that the wrapper's forward hooks will not wait for."""
        self.gathering.finish_what_forward_does_not()


def _require_order_of_buckets(chunk: torch.nn.Module) -> None:
    """Raise where torch's wrapper has laid out its buckets in another order than that of flat memory.

    It would read what it has reduced in the one order, and what it has collected in the other.
    """
    for module in chunk.modules():
        if (
            not isinstance(module, torch.nn.parallel.DistributedDataParallel)
            or module.gradient_as_bucket_view
        ):
            continue
        for entry in named_params(module.module):
            if entry.param.requires_grad and not entry.param.is_contiguous():
                raise ShardingError(
                    f"{entry.name!r} has the strides {entry.param.stride()}, as in memory_format=torch.channels_last, "
                    "and DistributedDataParallel has taken them for its buckets; a sharding strategy moves parameters "
                    "into flat memory in row-major order, and gradients would arrive permuted. Build the optimizer "
                    "before DistributedDataParallel wraps the model, or wrap it with gradient_as_bucket_view=True"
                )


def _piece(spec: PieceSpec, data: dict[BufferKey, torch.Tensor], model: LiveModel) -> Piece:
    if spec.buffer is None:
        raise ValueError("a piece of flat memory lies in a buffer")
    key, start, stop = spec.buffer
    params = tuple(model.params[shard.name] for _, shard in spec.members)
    return Piece(spec, torch.nn.Parameter(data[key][start:stop].view(spec.shape)), params)


def memory_of(layout: LayoutInBuffers, model: LiveModel, pgs: ProcessGroupCollection) -> FlatMemory:
    """Return the flat memory of a model, the same for all of its optimizers.

    Args:
        layout: the layout of all of them.
        model: the live model.
        pgs: the process groups.
    """

    def make() -> FlatMemory:
        return BufferMemory(layout, model) if layout.fused else OwnMemory(layout, model, pgs)

    make_memory: Callable[[], FlatMemory] = make
    memory: FlatMemory = model.shared(layout, make_memory)
    return memory
