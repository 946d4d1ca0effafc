"""DistributedDataParallel in a single process: buffers, hooks and errors."""

from typing import Any

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig, plan_full_param_layout
from megaopt_distributed.buffers.communicator import Pending
from torch import nn

from megaopt_core.errors import GradientError, ShardingError, UnsupportedOperationError
from megaopt_core.sharding import FullParamLayout, WrappedModel


def model_of(**settings: Any) -> DistributedDataParallel:
    """Return a wrapped model of two layers."""
    torch.manual_seed(0)
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), DistributedDataParallelConfig(**settings)
    )


def backward(model: nn.Module) -> None:
    """Run one backward pass."""
    model(torch.ones(4, 3)).square().sum().backward()


def test_gradients_are_views_of_one_buffer_in_reverse_order() -> None:
    """`main_grad` shares the buffer's memory; `grad` is given back."""
    model = model_of()
    (buffer,) = model.param_and_grad_buffers.values()
    assert list(buffer.layout.param_ranges) == ["1.bias", "1.weight", "0.bias", "0.weight"]
    backward(model)
    for name, param in model.module.named_parameters():
        assert param.grad is None
        assert param.main_grad.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()
        assert param.main_grad.shape == param.shape
        assert param.main_grad.abs().sum() > 0, name


def test_parameters_lie_in_a_buffer_only_where_they_are_sharded() -> None:
    """With use_distributed_optimizer `param.data` is a view, and keeps its value."""
    before = {name: param.detach().clone() for name, param in model_of().module.named_parameters()}
    model = model_of(use_distributed_optimizer=True)
    (buffer,) = model.param_and_grad_buffers.values()
    assert [b.param_data for b in model_of().param_and_grad_buffers.values()] == [None]
    for name, param in model.module.named_parameters():
        assert torch.equal(param, before[name])
        assert param.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()


def test_fp32_reduction_keeps_gradients_in_fp32() -> None:
    """bf16 gradients are added up in fp32."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(nn.Linear(2, 2, dtype=torch.bfloat16), config)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert model.module.weight.main_grad.dtype == torch.float32


def test_parameters_that_are_the_same_memory_share_a_gradient() -> None:
    """Tied by memory, not by object: both gradients are added up."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = nn.Parameter(first.weight.data)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(nn.ModuleList([first, second]), config)
    (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
    assert torch.equal(first.weight.main_grad, torch.full((2, 2), 2.0))
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert len(next(iter(model.param_and_grad_buffers.values())).params) == 1


@pytest.mark.parametrize("zero", ["buffer", "views"])
def test_gradients_have_to_be_zeroed_between_steps(zero: str) -> None:
    """A backward pass after the reduction is an error until somebody zeroes."""
    model = model_of()
    backward(model)
    model.finish_grad_sync()
    with pytest.raises(GradientError, match=r"call optimizer\.zero_grad"):
        backward(model)
    if zero == "buffer":
        model.zero_grad_buffer()
    else:
        for param in model.parameters():
            param.grad = None
            param.main_grad.zero_()
    backward(model)
    model.finish_grad_sync()


def test_gradients_that_come_after_the_reduction_are_refused() -> None:
    """Overlap reduced the bucket when it looked complete; a backward pass more than usual is an error."""
    model = model_of(overlap_grad_reduce=True)
    backward(model)
    model.finish_grad_sync()
    model.zero_grad_buffer()
    backward(model)
    with pytest.raises(GradientError, match=r"no_sync\(\)"):
        backward(model)


def test_state_dicts_are_those_of_the_module() -> None:
    """No prefix; loading copies into the buffers."""
    model = model_of(use_distributed_optimizer=True)
    state = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model.load_state_dict(state)
    assert all(bool((param == 2.0).all()) for param in model.parameters())
    (buffer,) = model.param_and_grad_buffers.values()
    assert buffer.param_data.sum() == 2.0 * sum(param.numel() for param in model.parameters())
    with pytest.raises(UnsupportedOperationError, match="assign"):
        model.load_state_dict(state, assign=True)


def test_a_layout_for_another_module_is_refused() -> None:
    """Missing, superfluous and resized parameters are named."""
    config = DistributedDataParallelConfig()
    layout = plan_full_param_layout(nn.Linear(2, 2), config)
    for other in (nn.Linear(2, 3), nn.Linear(2, 2, bias=False)):
        with pytest.raises(ShardingError, match="does not fit the module"):
            DistributedDataParallel(other, config, full_param_layout=layout)


def test_a_layout_that_overlaps_is_refused() -> None:
    """Two parameters cannot have one place."""
    module = nn.Linear(2, 2)
    layout = plan_full_param_layout(module, DistributedDataParallelConfig())
    ((key, buffer),) = layout.buffers.items()
    ranges = dict.fromkeys(buffer.param_ranges, (0, 4))
    broken = FullParamLayout({key: type(buffer)(ranges, buffer.bucket_ends, buffer.bucket_of)})
    with pytest.raises(ShardingError, match="no room"):
        DistributedDataParallel(module, full_param_layout=broken)


class Attends(nn.Module):
    """Attention, which reads the weight of a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def test_attention_waits_for_weights_that_it_uses_without_calling() -> None:
    """The first forward pass learns which modules run; the others' parameters belong to who runs above them."""
    settings = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 1}
    model = DistributedDataParallel(Attends(), DistributedDataParallelConfig(**settings))
    model(torch.ones(2, 1, 8))
    waited: list[int] = []
    for bucket in model.buckets:
        bucket._gather = Pending("a gather", done=lambda bucket=bucket: waited.append(id(bucket)))
    model(torch.ones(2, 1, 8))
    assert sorted(waited) == sorted(id(bucket) for bucket in model.buckets)


def test_what_somebody_adds_between_zeroing_and_backward_is_kept() -> None:
    """The first gradient may replace zeros, never what was written into `main_grad` meanwhile."""
    expected, model = model_of(), model_of()
    backward(expected)
    model.zero_grad_buffer()
    model.module[0].weight.main_grad.add_(1.0)
    backward(model)
    for (name, one), other in zip(expected.module.named_parameters(), model.module.parameters(), strict=True):
        added = 1.0 if name == "0.weight" else 0.0
        assert torch.equal(one.main_grad + added, other.main_grad)
    model.zero_grad_buffer()
    backward(model)
    assert torch.equal(model.module[0].weight.main_grad, expected.module[0].weight.main_grad)


def test_the_wrapper_is_what_the_core_asks_for():
    """The core knows the protocol, no class; torch's own wrapper does not follow it."""
    model = DistributedDataParallel(
        torch.nn.Linear(2, 1), DistributedDataParallelConfig(use_distributed_optimizer=True)
    )
    assert isinstance(model, WrappedModel)
    assert (model.scatters_grads, model.forward_waits) == (True, False)
    assert not isinstance(torch.nn.Linear(2, 1), WrappedModel)
