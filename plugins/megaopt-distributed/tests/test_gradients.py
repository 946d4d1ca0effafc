"""Gradients that are reduced, zeroed, scaled or sparse, and what becomes of a model whose wrapper is gone."""

import gc
import weakref
from typing import Any

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError, GradientError

pytestmark = pytest.mark.any_python


def wrapped(module: nn.Module | None = None, **settings: Any) -> DistributedDataParallel:
    """Return a wrapped model."""
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    return DistributedDataParallel(module, DistributedDataParallelConfig(**settings))


def backward(model: nn.Module) -> None:
    """Run one backward pass."""
    model(torch.ones(4, 3)).square().sum().backward()


@pytest.mark.parametrize("change", ["scale", "clip"])
def test_a_change_of_reduced_gradients_is_no_zeroing(change: str) -> None:
    """Scaling and clipping write to the buffers too; the next backward pass is an error all the same."""
    model = wrapped()
    backward(model)
    model.finish_grad_sync()
    if change == "scale":
        model.scale_gradients(0.5)
    else:
        torch._foreach_mul_([param.main_grad for param in model.parameters()], 0.1)
    with pytest.raises(GradientError, match=r"call optimizer\.zero_grad"):
        backward(model)


def test_zero_grad_of_the_wrapper_zeroes_the_buffers() -> None:
    """As with any module, the next gradients are the fresh ones."""
    expected, model = wrapped(), wrapped()
    backward(expected)
    backward(model)
    model.finish_grad_sync()
    model.zero_grad()
    assert all(not param.main_grad.any() for param in model.parameters())
    backward(model)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.main_grad, other.main_grad)


def test_gradients_under_way_are_scaled_after_they_are_reduced() -> None:
    """With overlap the buckets may be in a collective when the backward pass returns."""
    model = wrapped(overlap_grad_reduce=True, bucket_size=1)
    backward(model)
    model.scale_gradients(0.5)
    assert {bucket.grad_state.name for bucket in model.buckets} == {"REDUCED"}


@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients_are_added_to_the_buffer(passes: int) -> None:
    """An embedding with sparse gradients has the same `main_grad` as a dense one, and so has one in fp32."""
    grads = []
    for sparse in (True, False):
        module = nn.Embedding(7, 2, sparse=sparse, dtype=torch.bfloat16)
        model = wrapped(module, grad_reduce_in_fp32=True)
        model.zero_grad_buffer()
        for number in range(passes):
            model(torch.tensor([1, 2, 2 + number])).sum().backward()
        grads.append(module.weight.main_grad)
    assert torch.equal(*grads)


def test_sparse_gradients_are_stepped_as_dense_ones_where_there_is_no_buffer() -> None:
    """Torch's Adam takes none; flat memory has dense ones."""
    pytest.importorskip("megaopt_adam")
    values = []
    for sparse in (True, False):
        torch.manual_seed(0)
        module = nn.Embedding(7, 2, sparse=sparse)
        optimizer = build_optimizer(module, "adam", lr=0.1, sharding="distributed")
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.tensor([1, 2, 2])).square().sum().backward()
            optimizer.step()
        values.append(module.weight.detach())
    assert torch.equal(*values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_fp32_is_refused_where_it_would_lose_digits(dtype: torch.dtype) -> None:
    """Nothing is narrowed in silence."""
    with pytest.raises(ConfigurationError, match=rf"gradient of '\w+' \({dtype}\)") as caught:
        wrapped(nn.Linear(2, 2, dtype=dtype), grad_reduce_in_fp32=True)
    assert caught.value.setting == "grad_reduce_in_fp32"
    wrapped(nn.Linear(2, 2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_gradients_that_are_not_finite_are_found_in_every_dtype(dtype: torch.dtype) -> None:
    """The values of double precision that single precision does not hold are fine."""
    model = wrapped(nn.Linear(2, 2, dtype=dtype), check_for_nan_in_grad=True)
    largest = torch.finfo(dtype).max
    model.module.weight.main_grad.fill_(largest)
    model.finish_grad_sync()
    for value in (float("nan"), float("-inf")):
        model.zero_grad_buffer()
        model.module.weight.main_grad[1, 1] = value
        with pytest.raises(GradientError, match="gradients are not finite: 'weight'"):
            model.finish_grad_sync()


def test_a_wrapper_that_nobody_holds_is_freed() -> None:
    """At once, with its buffers; the module is an ordinary one again."""
    for settings in ({}, {"use_distributed_optimizer": True, "overlap_param_gather": True}):
        model = wrapped(**settings)
        module = model.module
        backward(model)
        backward(model)
        freed = [weakref.ref(model), *(weakref.ref(bucket.grad_data) for bucket in model.buckets)]
        del model
        gc.collect()
        assert [reference() for reference in freed] == [None] * len(freed)
        backward(module)
        for param in module.parameters():
            assert param.grad is not None
            assert not hasattr(param, "main_grad")


def test_a_module_that_is_wrapped_again_belongs_to_the_new_wrapper() -> None:
    """The end of the first takes nothing from the second."""
    module = nn.Linear(3, 2)
    model = wrapped(module)
    model = wrapped(module)
    gc.collect()
    backward(model)
    (buffer,) = model.param_and_grad_buffers.values()
    assert (
        module.weight.main_grad.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()
    )
    assert module.weight.main_grad.any()
