"""Moving parameters into flat memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaopt_core.sharding import PerBufferParamLayout

__all__ = ["move_into"]


@torch.no_grad()
def move_into(buffer: PerBufferParamLayout, params: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
    """Copy parameters into one new flat tensor and make each a view of its range, row-major; padding is zero.

    Args:
        buffer: where each parameter goes.
        params: name to parameter, of one dtype and device.

    Returns:
        The flat tensor.
    """
    some = next(iter(params.values()))
    flat = torch.zeros(buffer.numel, dtype=some.dtype, device=some.device)
    for name, (start, stop) in buffer.param_ranges.items():
        param = params[name]
        view = flat[start:stop].view(param.shape)
        view.copy_(param.data)
        param.data = view
    return flat
