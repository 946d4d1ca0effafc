"""Gradients that tensors are stepped with: in the dtype and the order of memory that the tensors have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core import build_optimizer

pytestmark = pytest.mark.any_python

ORDERS = {
    "transposed": lambda values: values.t().contiguous().t(),
    "expanded": lambda values: values[:1].expand(values.shape),
    "strided": lambda values: torch.stack([values, values], dim=-1)[..., 0],
}
POLICIES = {
    "fp32": (torch.float32, {}),
    "main parameters": (torch.bfloat16, {"bf16": True}),
    "remainders": (torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True}),
    "8 bits": (torch.float32, {"use_precision_aware_optimizer": True, "exp_avg_dtype": "uint8"}),
}


def trained(
    dtype: torch.dtype, order: Callable[[torch.Tensor], torch.Tensor], **settings: Any
) -> tuple[torch.Tensor, list[bool]]:
    """Return the weight after three steps, and whether each left the gradient that it was given."""
    torch.manual_seed(0)
    model = nn.Linear(8, 12, bias=False).to(dtype)
    optimizer = build_optimizer(model, "adam", lr=0.1, clip_grad=0.0, **settings)
    kept = []
    for step in range(3):
        chance = torch.Generator().manual_seed(step)
        grad = order(torch.randn(12, 8, generator=chance).to(dtype))
        before = grad.clone()
        model.weight.grad = grad
        optimizer.step()
        kept.append(model.weight.grad is grad and torch.equal(grad, before))
    return model.weight.detach().clone(), kept


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_of_a_gradient_in_memory_does_not_matter(policy, order) -> None:
    """Torch's fused kernels read it as it lies; what the caller gave is left as it is."""
    dtype, settings = POLICIES[policy]
    plain, _ = trained(dtype, lambda values: ORDERS[order](values).contiguous(), **settings)
    found, kept = trained(dtype, ORDERS[order], **settings)
    assert torch.equal(found, plain)
    assert all(kept)
