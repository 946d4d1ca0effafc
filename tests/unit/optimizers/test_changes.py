"""The proof that a step changed what it should: every tensor of the first step, samples of later ones."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megaopt_core import FP32Optimizer, OptimizerConfig, build_optimizer
from megaopt_core.optimizers._gradients import statistics

pytestmark = pytest.mark.any_python


def convolution() -> nn.Module:
    """A convolution whose weight lies in channels-last order."""
    torch.manual_seed(0)
    return nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)


def with_gaps() -> nn.Module:
    """A layer whose weight is every second column of a larger matrix."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(torch.randn(6, 8)[:, ::2])
    return layer


@pytest.mark.parametrize("make", [convolution, with_gaps])
@pytest.mark.parametrize("frozen_by", ["nothing", "a zero learning rate"])
def test_memory_in_any_order_is_looked_at(make, frozen_by) -> None:
    """Two later steps, of which samples are compared, with and without an update."""
    model = make()
    optimizer = build_optimizer(model, "t_adam", lr=1e-2, overrides={})
    for step in range(3):
        if step == 2 and frozen_by != "nothing":
            optimizer.param_groups[0]["lr"] = 0.0
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    [part] = optimizer.report(after_step=True).parts
    assert part.stepped == 2
    assert part.changed == (2 if frozen_by == "nothing" else 0)


class Replacing(torch.optim.SGD):
    """Puts new memory under its parameters in every step."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step, out of place."""
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data - group["lr"] * param.grad


def test_parameters_with_new_memory_have_changed() -> None:
    """What lies in the old memory says nothing."""
    model = nn.Linear(3, 2)
    optimizer = FP32Optimizer(Replacing(model.parameters(), lr=0.1), OptimizerConfig(clip_grad=0.0))
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    [part] = optimizer.report(after_step=True).parts
    assert (part.changed, part.stepped) == (2, 2)


@pytest.mark.parametrize("size", [4, 6, 1022, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_that_cancel_in_a_sum_are_seen(size: int, dtype: torch.dtype) -> None:
    """Half of the values are negative, and the step moves all by the same number of units in the last place."""
    layer = nn.ParameterList(
        [torch.tensor([1.5, -1.5, -1.25, 1.25] * (size // 4) + [1.5, -1.5] * (size % 4 // 2))]
    )
    layer.to(dtype)
    settings = {"lr": 0.125, "weight_decay": 0.0, "clip_grad": 0.0}
    optimizer = build_optimizer(layer, "t_sgd", **settings, overrides={})
    layer[0].grad = torch.ones_like(layer[0])
    optimizer.step()
    [part] = optimizer.report(after_step=True).parts
    assert (part.changed, part.stepped) == (1, 1)


@pytest.mark.parametrize("exact", [False, True])
def test_a_row_that_no_sample_meets_is_seen_where_all_is_compared(exact: bool) -> None:
    """An embedding of which one row has a gradient, as users ask for it; what was compared is said."""
    model = nn.Embedding(4096, 4)
    optimizer = build_optimizer(model, "t_sgd", lr=1.0, weight_decay=0.0, overrides={})
    optimizer.record_changes(exact=exact)
    for _ in range(2):
        model.weight.grad = torch.zeros_like(model.weight)
        model.weight.grad[5] = 1.0
        optimizer.step()
    [part] = optimizer.report(after_step=True).parts
    assert part.changed == (1 if exact else 0)
    assert ("all values compared" if exact else "16 values of each compared") in str(
        optimizer.report(after_step=True)
    )


@pytest.mark.parametrize("exact", [False, True])
def test_an_accelerator_compares_the_steps_that_are_powers_of_two(monkeypatch, exact) -> None:
    """The report names the step that it speaks of; where all values are asked for, every step compares them."""
    monkeypatch.setattr(statistics, "_READ_FREELY", frozenset())
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, "t_sgd", lr=1.0, weight_decay=0.0, overrides={})
    optimizer.record_changes(exact=exact)
    said = []
    for step in range(1, 10):
        for param in model.parameters():
            # The steps that no sample is taken of change nothing.
            param.grad = torch.full_like(param, float(step.bit_count() == 1))
        optimizer.step()
        [part] = optimizer.report(after_step=True).parts
        said.append((part.changed, part.method))
    if exact:
        assert said == [(2 * (step.bit_count() == 1), "all values compared") for step in range(1, 10)]
        return
    some = "16 values of each compared"
    assert said[:3] == [(2, "all values compared"), (2, some), (2, f"{some} in step 2 of 3")]
    assert said[6:] == [
        (2, f"{some} in step 4 of 7"),
        (2, some),
        (2, f"{some} in step 8 of 9"),
    ]
