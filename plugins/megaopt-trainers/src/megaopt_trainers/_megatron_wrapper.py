"""Megatron's `DistributedDataParallel` as a wrapper that megaopt knows: its buffers, and what it has reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from attrs import define, field, frozen

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import ShardingError, UnsupportedSettingError
from megaopt_core.params import named_params
from megaopt_core.sharding import BufferKey, FullParamLayout, PerBufferParamLayout, ReducedBy
from megaopt_trainers._megatron_groups import is_megatron

__all__ = ["MegatronWrapper", "wrap_megatron"]


@define(eq=False)
class _BucketGroup:
    """A bucket group of Megatron's, which gathers its buckets together.

    Args:
        theirs: Megatron's.
        overlaps: forward hooks of Megatron's begin to gather, and wait.
    """

    theirs: Any
    overlaps: bool
    _stepped: set[int] = field(factory=set, init=False)

    def stepped(self, bucket: int) -> None:
        """Gather all buckets once the last of them has been stepped."""
        self._stepped.add(bucket)
        if len(self._stepped) == len(self.theirs.buckets):
            self._stepped.clear()
            if not self.overlaps:
                self.theirs.start_param_sync()


@frozen(eq=False)
class _Bucket:
    group: _BucketGroup
    theirs: Any

    def start_param_sync(self) -> None:
        """Gather this bucket with the others of its group; with overlap the forward pass will."""
        self.group.stepped(id(self.theirs))

    def finish_param_sync(self) -> None:
        """Nothing to wait for: Megatron gathers at once, or waits in its forward hooks."""


@frozen(eq=False)
class _Buffer:
    param_data: torch.Tensor
    grad_data: torch.Tensor
    buckets: Sequence[_Bucket]


class MegatronWrapper(torch.nn.Module):
    """Stands beside a `DistributedDataParallel` of Megatron's and tells what megaopt asks of a wrapper.

    Megatron's training loop reduces gradients before it calls the optimizer, so that nothing is reduced here.

    Args:
        ddp: the wrapped chunk.
        process_groups: the process groups that it was wrapped with.

    Raises:
        ShardingError: its parameters are quantized.
        UnsupportedSettingError: it gathers parameters of layer-wise optimizers of Megatron's own.
    """

    megaopt_wrapper = True

    def __init__(self, ddp: Any, process_groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.module = ddp
        self.ddp_config = ddp.ddp_config
        self.process_groups = process_groups
        if self.forward_waits and not self.scatters_grads:
            raise UnsupportedSettingError.of(
                "overlap_param_gather",
                value=True,
                why="gathers the parameters of Megatron's own layer-wise optimizer in its wrapper, unless gradients "
                "are scattered; wrap the model with use_distributed_optimizer=True, or leave it out in both "
                "configurations",
            )
        names = {entry.param: entry.name for entry in named_params(ddp)}
        buffers = dict(self._buffers_of(ddp))
        self.full_param_layout = FullParamLayout(
            {key: _layout(buffer, names) for key, buffer in buffers.items()}
        )
        self.param_and_grad_buffers = self._live(ddp, buffers)
        for buffer in buffers.values():
            for param in buffer.params:
                param.reduced_by = ReducedBy(self)

    @classmethod
    def of(cls, ddp: Any, process_groups: ProcessGroupCollection) -> Self:
        """Return what stands beside a wrapped chunk, the same for every optimizer of it.

        Args:
            ddp: the wrapped chunk.
            process_groups: the process groups that it was wrapped with.
        """
        made: Self | None = ddp.__dict__.get("megaopt_beside")
        if made is None:
            made = ddp.__dict__["megaopt_beside"] = cls(
                ddp, process_groups
            )  # kept alive, and no child module
        return made

    @staticmethod
    def _buffers_of(ddp: Any) -> Iterator[tuple[BufferKey, Any]]:
        for is_expert, buffers in ((False, ddp.buffers), (True, ddp.expert_parallel_buffers)):
            for buffer in buffers:
                if not buffer.param_dtype.is_floating_point:
                    raise ShardingError(
                        f"Megatron keeps parameters of this model in {buffer.param_dtype}: megaopt does not train "
                        "with fp8 or fp4 parameters; leave fp8_param_gather out"
                    )
                managed = bool(getattr(buffer.params[0], "is_managed_by_layer_wise_optimizer", False))
                yield BufferKey(buffer.param_dtype, buffer.grad_dtype, is_expert, managed), buffer

    def _live(self, ddp: Any, buffers: dict[BufferKey, Any]) -> dict[BufferKey, _Buffer]:
        groups: dict[int, _BucketGroup] = {}
        for theirs in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
            group = _BucketGroup(theirs, self.forward_waits)
            groups.update((id(bucket), group) for bucket in theirs.buckets)
        return {
            key: _Buffer(
                buffer.param_data,
                buffer.grad_data,
                [_Bucket(groups[id(bucket)], bucket) for bucket in buffer.buckets],
            )
            for key, buffer in buffers.items()
        }

    @property
    def scatters_grads(self) -> bool:
        """True where each gradient is reduced to the rank that steps it."""
        return bool(self.ddp_config.use_distributed_optimizer)

    @property
    def forward_waits(self) -> bool:
        """True where Megatron's forward hooks gather parameters."""
        return bool(self.ddp_config.overlap_param_gather)

    def finish_grad_sync(self) -> None:
        """Nothing to do: `finalize_model_grads` has reduced, and a second call would reduce again."""

    def finish_param_sync(self) -> None:
        """Return when all parameters have arrived, also those that a forward pass would wait for."""
        if self.forward_waits:
            self.module.start_param_sync(force_sync=True)

    def zero_grad_buffer(self) -> None:
        """Fill all gradients with zeros."""
        self.module.zero_grad_buffer()


def _layout(buffer: Any, names: dict[torch.nn.Parameter, str]) -> PerBufferParamLayout:
    places = {names[param]: where for param, where in buffer.param_index_map.items()}
    return PerBufferParamLayout(
        param_ranges={name: (start, stop) for name, (start, stop, _) in places.items()},
        bucket_ends=tuple(bucket.offset + bucket.grad_data.numel() for bucket in buffer.buckets),
        bucket_of={name: bucket for name, (_, _, bucket) in places.items()},
    )


def wrap_megatron(chunks: Sequence[torch.nn.Module], process_groups: ProcessGroupCollection) -> None:
    """Make megaopt see Megatron's wrappers of a model.

    Args:
        chunks: the model chunks; those without such a wrapper are left alone.
        process_groups: the process groups that they were wrapped with.

    Raises:
        ShardingError: a chunk is wrapped in Megatron's own FSDP.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if not is_megatron(module):
                continue
            if getattr(getattr(module, "ddp_config", None), "use_megatron_fsdp", False):
                raise ShardingError(
                    f"{type(module).__name__} keeps parameters and gradients in shards of its own, which no strategy "
                    "of megaopt steps; wrap the model in DistributedDataParallel, or in Megatron's "
                    "TorchFullyShardedDataParallel with sharding='fsdp'"
                )
            if hasattr(module, "bucket_groups"):
                MegatronWrapper.of(module, process_groups)
