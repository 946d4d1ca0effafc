"""Data parallelism over contiguous buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megaopt_core.distributed.bucket import Bucket, GradSync, Reduction
from megaopt_core.distributed.buffer import ParamAndGradBuffer
from megaopt_core.distributed.collectives import communicator
from megaopt_core.distributed.config import DistributedDataParallelConfig
from megaopt_core.distributed.finite import FiniteCheck
from megaopt_core.distributed.forward_hooks import ForwardWaits
from megaopt_core.distributed.instances import with_instances
from megaopt_core.distributed.planning import plan_full_param_layout, require_fitting
from megaopt_core.distributed.readiness import ReadyBuckets
from megaopt_core.errors import GradientError, UnsupportedOperationError
from megaopt_core.parallel.groups import ProcessGroupCollection, size_of
from megaopt_core.params.names import named_params
from megaopt_core.sharding.layout import BufferKey, FullParamLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from megaopt_core.params.routing import Routing

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
    """Keeps gradients in contiguous buffers, and reduces them over the data-parallel ranks bucket by bucket.

    Every trainable parameter gets `main_grad`, a view of its buffer, to which each backward pass adds its gradient;
    `grad` is None afterwards. Reduced gradients are the mean over the data-parallel ranks. Optimizers of megaopt wait
    for the reduction themselves: a loop is `zero_grad`, forward, `backward`, `step`.

    Args:
        module: the model, or one chunk of it, on its device and in its dtype.
        ddp_config: how gradients are kept and reduced.
        pg_collection: process groups, or a DeviceMesh that names them; None: the default group.
        full_param_layout: where parameters lie; None: in reverse model order, in buckets of the configured size.

    Raises:
        ShardingError: the layout does not fit the module.
        ParallelGroupError: a process group is missing.

    Example:
        >>> import torch
        >>> from megaopt_core import DistributedDataParallel, DistributedDataParallelConfig
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1), DistributedDataParallelConfig())
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> model.module.weight.main_grad
        tensor([[3., 3.]])
    """

    megaopt_wrapper = True

    def __init__(
        self,
        module: nn.Module,
        ddp_config: DistributedDataParallelConfig | None = None,
        pg_collection: ProcessGroupCollection | DeviceMesh | None = None,
        full_param_layout: FullParamLayout | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = ddp_config or DistributedDataParallelConfig()
        self.process_groups = with_instances(
            ProcessGroupCollection.of(pg_collection), self.ddp_config.num_distributed_optimizer_instances
        )
        entries = [entry for entry in named_params(module) if entry.param.requires_grad]
        self._params = {entry.name: entry.param for entry in entries}
        self.full_param_layout = full_param_layout or plan_full_param_layout(
            module, self.ddp_config, self.process_groups
        )
        require_fitting(self.full_param_layout, self._params)
        self.param_and_grad_buffers: dict[BufferKey, ParamAndGradBuffer] = {
            key: ParamAndGradBuffer(
                key,
                layout,
                {name: self._params[name] for name in layout.param_ranges},
                self._reduction(key),
                self.ddp_config.use_distributed_optimizer,
            )
            for key, layout in self.full_param_layout.buffers.items()
        }
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.params}
        self._finite = self._finite_check()
        self._queues = self._ready_buckets()
        self._synchronises = True
        self._reduced_at: tuple[int, ...] | None = None
        self._buffer_of = {
            name: index
            for index, buffer in enumerate(self.param_and_grad_buffers.values())
            for name in buffer.params
        }
        self._zeroed: set[str] = set()
        self._writes = list(self._versions())
        for entry in entries:
            for param in (entry.param, *entry.twins):
                param.register_post_accumulate_grad_hook(partial(self._accumulate, entry.name))
            for twin in entry.twins:
                twin.data = entry.param.data
        if self.ddp_config.overlap_param_gather:
            by_param = {self._params[name]: bucket for name, bucket in self._bucket_of.items()}
            ForwardWaits(module, by_param, self.finish_param_sync, self.ddp_config.align_param_gather)

    @property
    def megaopt_routing(self) -> Routing | None:
        """The routing that the layout was planned for, None when it holds for any."""
        return self.full_param_layout.routing

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, those first whose gradients are ready first."""
        return [bucket for buffer in self.param_and_grad_buffers.values() for bucket in buffer.buckets]

    def _reduction(self, key: BufferKey) -> Reduction:
        pgs, config = self.process_groups, self.ddp_config
        device = next(iter(self._params.values())).device
        shards = pgs.shard_group(is_expert=key.is_expert)
        replicas = pgs.inter_expt_dist_opt if key.is_expert else pgs.inter_dist_opt
        ranks = size_of(shards) * size_of(replicas)
        # The loss is a mean over all data-parallel ranks, whose tokens meet in the experts.
        factor = (ranks if config.average_in_collective else 1.0) / pgs.data_parallel_size
        return Reduction(
            communicator(shards, device),
            communicator(replicas, device),
            scatter=config.use_distributed_optimizer,
            average=config.average_in_collective,
            factor=factor,
        )

    def _ready_buckets(self) -> dict[str, ReadyBuckets]:
        """Return for every parameter the queue of its bucket; there is one queue a process group."""
        position = {name: index for index, name in enumerate(self._params)}
        by_group: dict[int, list[Bucket]] = {}
        for key, buffer in self.param_and_grad_buffers.items():
            group = self.process_groups.shard_group(is_expert=key.is_expert)
            by_group.setdefault(id(group), []).extend(buffer.buckets)
        queues = {}
        for buckets in by_group.values():
            # A bucket is complete when backward has reached its first parameter in the model's order.
            buckets.sort(key=lambda bucket: -min((position[name] for name in bucket.params), default=0))
            queue = ReadyBuckets(buckets, self._start)
            queues.update({name: queue for bucket in buckets for name in bucket.params})
        return queues

    def _finite_check(self) -> FiniteCheck | None:
        if not self.ddp_config.checks_gradients or not self._params:
            return None
        device = next(iter(self._params.values())).device
        return FiniteCheck(list(self._params), self.process_groups.dense_dp, device)

    # Running the model.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module.

        Args:
            *inputs: passed on.
            **kwargs: passed on.
        """
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside: for all but the last backward pass before a step."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    # Gradients.

    def _accumulate(self, name: str, param: torch.nn.Parameter) -> None:
        """Add a parameter's fresh gradient to its buffer; start its bucket's reduction when it was the last."""
        if param.grad is None:
            return
        if self._reduced_at is not None:
            self._begin_again(name)
        if self._bucket_of[name].grad_state is not GradSync.LOCAL:
            raise GradientError(
                f"a gradient of {name!r} arrived after its bucket was reduced: this backward pass handed it over more "
                "often than any before. Use no_sync() for all but the last of several backward passes, or "
                "overlap_grad_reduce=False",
                names=[name],
            )
        main_grad: torch.Tensor = self._params[name].main_grad  # type: ignore[attr-defined]
        if self._still_zero(name):
            main_grad.copy_(param.grad)
        else:
            main_grad.add_(param.grad)
        self._writes[self._buffer_of[name]] += 1
        param.grad = None
        if self._synchronises and self.ddp_config.overlap_grad_reduce:
            self._queues[name].accumulated(name)

    def _still_zero(self, name: str) -> bool:
        """Return whether a gradient is zero for sure: the first since zeroing, and nobody else has written since."""
        if name not in self._zeroed:
            return False
        self._zeroed.discard(name)
        index = self._buffer_of[name]
        return self._versions()[index] == self._writes[index]

    def _begin_again(self, name: str) -> None:
        if self._reduced_at == self._versions():
            raise GradientError(
                f"a gradient of {name!r} arrived after gradients were reduced: call optimizer.zero_grad() or "
                "zero_grad_buffer() after every step",
                names=[name],
            )
        self._begin()

    def _begin(self) -> None:
        for bucket in self.buckets:
            bucket.reset_grads()
        for queue in set(self._queues.values()):
            queue.begin()
        self._reduced_at = None

    def _versions(self) -> tuple[int, ...]:
        """Return how often each buffer was written to; zeroing `main_grad` counts."""
        return tuple(buffer.grad_data._version for buffer in self.param_and_grad_buffers.values())

    def _start(self, bucket: Bucket) -> None:
        if self._finite is not None:
            self._finite.look(bucket)
        bucket.start_grad_sync()

    def start_grad_sync(self) -> None:
        """Begin to reduce every bucket that is not being reduced yet."""
        if self._reduced_at is None:
            for queue in dict.fromkeys(self._queues.values()):
                queue.start_rest()

    def finish_grad_sync(self) -> None:
        """Return when all gradients are reduced; optimizers of megaopt call it, and a second call does nothing.

        Raises:
            GradientError: a gradient is not finite on some rank, and `check_for_nan_in_grad` is set.
            CommunicationError: another rank has stopped.
        """
        if self._reduced_at is not None:
            return
        self.start_grad_sync()
        for bucket in self.buckets:
            bucket.finish_grad_sync()
        self._reduced_at = self._versions()
        if self._finite is not None:
            self._finite.tell()

    def zero_grad_buffer(self) -> None:
        """Fill all gradients with zeros; `optimizer.zero_grad()` does the same."""
        self._begin()
        for buffer in self.param_and_grad_buffers.values():
            buffer.grad_data.zero_()
        self._zeroed, self._writes = set(self._params), list(self._versions())

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients.

        Args:
            scaling_factor: what they are multiplied by.
        """
        for buffer in self.param_and_grad_buffers.values():
            buffer.grad_data.mul_(scaling_factor)

    # Parameters.

    def start_param_sync(self) -> None:
        """Begin to bring every rank's share of the parameters to all ranks; the optimizer does it after its step."""
        for bucket in reversed(self.buckets):
            bucket.start_param_sync()

    def finish_param_sync(self) -> None:
        """Return when all parameters are up to date; the forward pass does it bucket by bucket."""
        for bucket in reversed(self.buckets):
            bucket.finish_param_sync()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Give all data-parallel ranks the parameters of the first."""
        self.finish_param_sync()
        for param in self.module.parameters():
            is_expert = not getattr(param, "allreduce", True)
            group = self.process_groups.expt_dp if is_expert else self.process_groups.dense_dp
            if size_of(group) > 1:
                dist.broadcast(param.data, group=group, group_src=0)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state dict, without a prefix.

        Args:
            *args: passed on.
            **kwargs: passed on.
        """
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the module's own state dict into the tensors that exist.

        Args:
            state_dict: what :meth:`state_dict` returned.
            strict: names must be the same on both sides.
            assign: refused: it would take parameters out of their buffers.

        Raises:
            UnsupportedOperationError: `assign` is set.
        """
        if assign:
            raise UnsupportedOperationError(
                "load_state_dict(assign=True) would take parameters out of their buffers"
            )
        self.finish_param_sync()
        return self.module.load_state_dict(state_dict, strict=strict)
