"""Where a device says that a step changes nothing, it does not; and the host need not read what it says."""

from typing import Any

import pytest
import torch
from megaopt_adam.cautious import Adam, AdamW

from megaopt_core.registry import get_registry

pytestmark = pytest.mark.any_python

DECAY = {"weight_decay": 0.5, "decoupled_weight_decay": True}


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_the_entries_declare_it(name) -> None:
    """So that steps on accelerators wait for nothing."""
    assert get_registry().optimizer(name).honours_noop


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (Adam, DECAY),
        (Adam, {"weight_decay": 0.5}),
        (Adam, {**DECAY, "cautious_weight_decay": True}),
        (AdamW, {"weight_decay": 0.5, "cautious_weight_decay": True, "amsgrad": True}),
        (torch.optim.SGD, {"weight_decay": 0.5, "momentum": 0.9}),
        (torch.optim.SGD, {"weight_decay": 0.5}),
    ],
)
@pytest.mark.parametrize("scale", [None, 4.0])
def test_a_flag_of_one_changes_no_bit_and_of_zero_nothing_else(cls, settings, scale) -> None:
    """Neither of values nor of states; with and without a divisor of the gradient."""

    def made() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        param = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 40))
        return param, cls([param], lr=0.1, fused=True, **settings)

    def step(
        param: torch.nn.Parameter, optimizer: Any, number: int, flag: float | None
    ) -> list[torch.Tensor]:
        param.grad = torch.linspace(2.0, -3.0, 40).roll(number)
        if flag == 1.0:
            param.grad[3] = torch.nan
        if flag is not None:
            optimizer.found_inf = torch.tensor(flag)
        if scale is not None:
            optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        return [each.detach().clone() for each in (param, *optimizer.state[param].values())]

    plain, flagged = made(), made()
    step(*plain, 0, None)
    before = step(*flagged, 0, 0.0)
    assert all(map(torch.equal, before, step(*flagged, 1, 1.0)))
    assert all(map(torch.equal, step(*plain, 2, None), step(*flagged, 2, 0.0)))
