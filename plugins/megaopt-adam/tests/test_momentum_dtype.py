"""SGD's momentum in fewer bits."""

import pytest
import torch
from megaopt_lowbit.scaled import ScaledCode
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError

pytestmark = pytest.mark.any_python


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_momentum_is_rounded_between_steps_and_nothing_else(dtype) -> None:
    """The formula written out in fp32, with the buffer rounded after each step: bit for bit."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    optimizer = build_optimizer(
        model, "sgd", lr=0.1, weight_decay=0.0, clip_grad=0.0, overrides={}, sgd_momentum=0.9,
        use_precision_aware_optimizer=True, sgd_momentum_dtype=dtype,
    )  # fmt: skip
    weight = model.weight.detach().clone()
    buffer, code = torch.zeros_like(weight), ScaledCode(dtype)
    for step in range(5):
        grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model.weight.grad = grad.clone()
        optimizer.step()
        buffer = buffer * 0.9 + grad
        weight = weight.add(buffer, alpha=-0.1)
        buffer = code.decode(*code.encode(buffer))
        assert torch.equal(model.weight, weight)
    inner = next(iter(optimizer.parts[0].inner.state.values()))
    assert inner["momentum_buffer"].dtype is dtype


def test_dtypes_that_are_none_are_refused() -> None:
    """The error names the setting, as it is written."""
    with pytest.raises(ConfigurationError, match=r"sgd_momentum_dtype='fp7': must be one of torch\.float32"):
        build_optimizer(nn.Linear(2, 2), "sgd", lr=0.1, sgd_momentum_dtype="fp7")
