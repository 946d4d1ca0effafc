"""Data parallelism over contiguous buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.parallel import ProcessGroupCollection, size_of
from megaopt_core.params import is_marked_expert, named_params
from megaopt_core.sharding import BufferKey, FullParamLayout, PerBufferParamLayout, ReducedBy
from megaopt_distributed import DistributedDataParallelConfig, plan_full_param_layout
from megaopt_distributed.buffers.bucket import Bucket
from megaopt_distributed.buffers.buffer import ParamAndGradBuffer
from megaopt_distributed.buffers.reduction import buckets_by_group, reduction_of, require_wide_gradients
from megaopt_distributed.ddp.accumulation import GradAccumulation
from megaopt_distributed.ddp.agreement import require_alike
from megaopt_distributed.ddp.finite import FiniteCheck
from megaopt_distributed.ddp.fitting import require_fitting
from megaopt_distributed.ddp.forward_hooks import ForwardWaits
from megaopt_distributed.ddp.instances import with_instances
from megaopt_distributed.ddp.module_check import ModuleCheck

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        RankMismatchError: data-parallel ranks wrap other parameters, or with another configuration or layout.
        MissingRanksError: a data-parallel rank has not come before the process group's timeout was over.

    Example:
        >>> import torch
        >>> from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
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
        entries = [entry for entry in named_params(module) if entry.param.requires_grad]
        pgs = ProcessGroupCollection.of(pg_collection)
        require_alike(entries, self.ddp_config, pgs, full_param_layout)
        self.process_groups = with_instances(pgs, self.ddp_config.num_distributed_optimizer_instances)
        self._params = {entry.name: entry.param for entry in entries}
        self.full_param_layout = full_param_layout or plan_full_param_layout(
            module, self.ddp_config, self.process_groups
        )
        require_fitting(self.full_param_layout, self._params, self.ddp_config, self.process_groups)
        require_wide_gradients(self.full_param_layout, self.ddp_config)
        self.param_and_grad_buffers = {
            key: self._buffer(key, layout) for key, layout in self.full_param_layout.buffers.items()
        }
        for entry in entries:
            for twin in entry.twins:
                twin.data = entry.param.data
        buffers = list(self.param_and_grad_buffers.values())
        name_of = {param: entry.name for entry in entries for param in (entry.param, *entry.twins)}
        groups = buckets_by_group(self.param_and_grad_buffers, self.process_groups)
        overlap = self.ddp_config.overlap_grad_reduce
        for param in self._params.values():
            param.reduced_by = ReducedBy(self)  # type: ignore[attr-defined]
        self._check = ModuleCheck(name_of, buffers)
        self._is_checked = False
        self._grads = GradAccumulation(self._params, name_of, buffers, groups, overlap, self._finite_check())
        self._waits = (
            ForwardWaits(module, self.buckets[::-1], self.ddp_config.align_param_gather)
            if self.ddp_config.overlap_param_gather
            else None
        )

    @property
    def scatters_grads(self) -> bool:
        """True where each gradient is reduced to the rank that steps it, not to all."""
        return self.ddp_config.use_distributed_optimizer

    @property
    def forward_waits(self) -> bool:
        """True where updated parameters are gathered while the forward pass runs."""
        return self.ddp_config.overlap_param_gather

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, those first whose gradients are ready first."""
        return [bucket for buffer in self.param_and_grad_buffers.values() for bucket in buffer.buckets]

    def _buffer(self, key: BufferKey, layout: PerBufferParamLayout) -> ParamAndGradBuffer:
        params = {name: self._params[name] for name in layout.param_ranges}
        device = next(iter(params.values())).device
        reduction = reduction_of(key, self.ddp_config, self.process_groups, device)
        return ParamAndGradBuffer(key, layout, params, reduction, self.ddp_config.use_distributed_optimizer)

    def _finite_check(self) -> FiniteCheck | None:
        if not self.ddp_config.checks_gradients or not self._params:
            return None
        device = next(iter(self._params.values())).device
        large = self.ddp_config.check_for_large_grads
        return FiniteCheck(list(self._params), self.process_groups.dense_dp, device, large)

    # Running the model.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module.

        Args:
            *inputs: passed on.
            **kwargs: passed on.
        """
        run = self.module if self._waits is None else self._waits.run
        return run(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside: for all but the last backward pass before a step."""
        before, self._grads.synchronises = self._grads.synchronises, False
        try:
            yield
        finally:
            self._grads.synchronises = before

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert the model, as long as no parameter leaves its buffer: `.to()`, `.half()`, `.cuda()`..."""
        self._check.require_kept(fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    # Gradients.

    def start_grad_sync(self) -> None:
        """Begin to reduce every bucket that is not being reduced yet."""
        self._grads.start()

    def finish_grad_sync(self) -> None:
        """Return when all gradients are reduced; optimizers of megaopt call it, and a second call does nothing.

        Raises:
            GradientError: a gradient is not finite on some rank, and `check_for_nan_in_grad` is set; again with every
                call until gradients are zeroed.
            CommunicationError: another rank has stopped.
            UnsupportedOperationError: parameters were unfrozen, added, replaced or converted since the module was
                wrapped.
        """
        self._is_checked = self._is_checked and self._grads.is_reduced
        # Reduced first: where one rank alone has changed its module, the others wait for it in the reduction.
        self._grads.finish()
        if not self._is_checked:
            self._check.require_unchanged(self.module)
            self._is_checked = True

    def zero_grad_buffer(self) -> None:
        """Fill all gradients with zeros; `optimizer.zero_grad()` does the same."""
        self._grads.zero()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill all gradients with zeros, and clear `grad` where there is one.

        Args:
            set_to_none: drop `grad` instead of filling it with zeros.
        """
        super().zero_grad(set_to_none)
        self.zero_grad_buffer()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients; with `overlap_grad_reduce` they are reduced first.

        Args:
            scaling_factor: what they are multiplied by.

        Raises:
            GradientError: as :meth:`finish_grad_sync` does.
        """
        if self.ddp_config.overlap_grad_reduce:
            self.finish_grad_sync()
        self._grads.scale(scaling_factor)

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
            pgs = self.process_groups
            group = pgs.expt_dp if is_marked_expert(param) else pgs.dense_dp
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
