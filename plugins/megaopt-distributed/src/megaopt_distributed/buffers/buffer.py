"""The contiguous memory of all parameters of one kind: gradients, and parameters where they are sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import define, field

from megaopt_core.sharding import BufferKey, PerBufferParamLayout
from megaopt_distributed.buffers.bucket import Bucket, Reduction
from megaopt_distributed.buffers.flat import move_into

__all__ = ["ParamAndGradBuffer"]


@define(eq=False)
class ParamAndGradBuffer:
    """One buffer, divided into buckets; `main_grad` of its parameters are views of it.

    Args:
        key: what its parameters have in common.
        layout: where they lie.
        params: name to parameter.
        reduction: how its buckets are reduced.
        in_buffer: keep the parameters themselves in contiguous memory too.
    """

    key: BufferKey
    layout: PerBufferParamLayout
    params: Mapping[str, torch.nn.Parameter]
    reduction: Reduction
    in_buffer: bool
    grad_data: torch.Tensor = field(init=False)
    param_data: torch.Tensor | None = field(init=False)
    buckets: list[Bucket] = field(init=False)

    def __attrs_post_init__(self) -> None:
        device = next(iter(self.params.values())).device
        self.param_data = move_into(self.layout, self.params) if self.in_buffer else None
        self.grad_data = torch.zeros(self.layout.numel, dtype=self.key.grad_dtype, device=device)
        for name, (start, stop) in self.layout.param_ranges.items():
            param = self.params[name]
            param.main_grad = self.grad_data[start:stop].view(param.shape)  # type: ignore[attr-defined]
        self.buckets = [self._bucket(index, *ends) for index, ends in enumerate(self.layout.buckets)]

    def _bucket(self, index: int, start: int, stop: int) -> Bucket:
        inside = {
            name: (first - start, last - start)
            for name, (first, last) in self.layout.param_ranges.items()
            if self.layout.bucket_of[name] == index
        }
        params = None if self.param_data is None else self.param_data[start:stop]
        ends = self.layout.share_ends_in(index)
        return Bucket(inside, self.reduction, self.grad_data[start:stop], params, ends)
