"""Finding the wrapper inside of a model, or around it, in a single process."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from megaopt_core import ProcessGroupCollection, build_optimizer
from megaopt_core.errors import GradientError
from megaopt_core.sharding import ReducedBy, wrappers_of


def backward(model: nn.Module) -> None:
    """Run one backward pass."""
    model(torch.ones(4, 3)).square().sum().backward()


def test_the_wrapper_is_found_inside_and_around() -> None:
    """Once, however many of the chunks show it."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    inside, other = model.module, nn.Linear(3, 3)
    assert wrappers_of([nn.Sequential(model), inside[0], inside, None, other]) == [model]
    assert wrappers_of((), inside.parameters()) == [model]
    assert wrappers_of([other], other.parameters()) == []


def test_no_mark_outlives_the_wrapper_or_its_module() -> None:
    """A copy has none that says anything, and a module whose wrapper is gone has none at all."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    module, file = model.module, io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert wrappers_of([loaded, copy.deepcopy(module)]) == []
    del model
    assert not hasattr(module.weight, "reduced_by")
    assert wrappers_of([module]) == []


def test_a_late_wrapper_of_the_same_model_is_waited_for() -> None:
    """One after the other: the mark is that of the last."""
    first = DistributedDataParallel(nn.Linear(3, 2))
    second = DistributedDataParallel(first.module)
    assert wrappers_of([first.module]) == [second]
    del first
    assert wrappers_of([second.module]) == [second]


@pytest.mark.parametrize("sharded", [False, True])
def test_zero_grad_leaves_gradients_of_others_alone(sharded: bool) -> None:
    """An optimizer of one layer zeroes that layer's; one of the bare model all of the buffer, and all is reset."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), config)
    if not sharded:
        part = build_optimizer(model.module[0], "sgd", lr=0.1)
        backward(model)
        part.step()
        part.zero_grad()
        assert not model.module[0].weight.main_grad.any()
        assert model.module[1].weight.main_grad.any()
    whole = build_optimizer(model.module, "sgd", lr=0.1, sharding="distributed" if sharded else None)
    whole.zero_grad()
    backward(model)
    whole.step()
    whole.zero_grad()
    assert not any(param.main_grad.any() for param in model.parameters())
    backward(model)


class Foreign(nn.Module):
    """Another party's wrapper, which puts no mark on parameters."""

    process_groups = ProcessGroupCollection()
    full_param_layout = SimpleNamespace(routing=None, buffers={})
    scatters_grads = forward_waits = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls: list[str] = []

    def finish_grad_sync(self) -> None:
        """Take it down."""
        self.calls.append("grads")

    def finish_param_sync(self) -> None:
        """Take it down."""
        self.calls.append("params")

    def zero_grad_buffer(self) -> None:
        """Take it down."""
        self.calls.append("zero")


def test_another_partys_wrapper_is_found_inside() -> None:
    """Also where it is put there after the build."""
    holder = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = build_optimizer(holder, "sgd", lr=0.1)
    layer = holder[1]
    holder[1] = wrapper = Foreign(layer)
    layer(holder[0](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert wrapper.calls == ["grads", "zero"]
    assert wrappers_of([layer]) == []


def test_a_foreign_main_grad_is_taken_as_it_is() -> None:
    """Who has set it has reduced it."""
    module = nn.Linear(3, 2, bias=False)
    module.weight.main_grad = torch.ones(2, 3)
    module.weight.reduced_by = ReducedBy()
    expected = module.weight.detach() - 0.1
    optimizer = build_optimizer(module, "sgd", lr=0.1, weight_decay=0.0, clip_grad=0.0)
    optimizer.step()
    assert torch.allclose(module.weight, expected)
    optimizer.zero_grad()
    assert not module.weight.main_grad.any()


@pytest.mark.parametrize("zeroed", ["optimizer", "buffer", "by hand"])
def test_refused_gradients_are_refused_until_they_are_zeroed(zeroed: str) -> None:
    """Scaling changes nothing about them."""
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    model = DistributedDataParallel(nn.Linear(3, 2), config)
    optimizer = build_optimizer(model, "sgd", lr=0.1)
    model(torch.full((1, 3), torch.nan)).sum().backward()
    for _ in range(3):
        with pytest.raises(GradientError, match="'weight' on rank 0") as caught:
            optimizer.step()
        assert caught.value.names == ("weight",)
        model.scale_gradients(0.5)
    if zeroed == "by hand":
        for param in model.parameters():
            param.main_grad.zero_()
    else:
        {"optimizer": optimizer.zero_grad, "buffer": model.zero_grad_buffer}[zeroed]()
    assert optimizer.step().update_successful
    assert all(bool(torch.isfinite(param).all()) for param in model.parameters())
