"""Cautious weight decay of Muon and adaptive Muon."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.muon import TensorParallelMuon
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError

pytestmark = pytest.mark.any_python

LR, WD = 0.02, 0.5


def stepped(
    cls: Callable[..., torch.optim.Optimizer], start: torch.Tensor, grad: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """Return what one step makes of a parameter."""
    param = nn.Parameter(start.clone())
    optimizer = cls([param], LR, fp32_matmul_prec="highest", **settings)
    param.grad = grad.clone()
    optimizer.step()
    return param.detach()


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
@pytest.mark.parametrize("shape", [(6, 10), (300, 257)])
def test_weights_shrink_where_update_and_weight_agree(cls, shape):
    """The update, known from a step without decay, says which weights shrink."""
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    start[0, 0] = 0.0
    update = (start - stepped(cls, start, grad, weight_decay=0.0)).double() / LR
    expected = start.double() - LR * (WD * start * (update * start >= 0) + update)
    result = stepped(cls, start, grad, weight_decay=WD, cautious_weight_decay=True)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)


def test_a_step_in_16_bits_decays_alike(in_bfloat16):
    """Where momentum is swept in pieces, decay waits for the update as well."""
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(512, 300, generator=generator) for _ in range(2))
    results = []
    for decay in (0.0, WD):
        param = nn.Parameter(start.clone())
        optimizer = TensorParallelMuon([param], LR, weight_decay=decay, cautious_weight_decay=True)
        param.grad = grad.clone()
        optimizer.step()
        results.append(param.detach())
    update = (start - results[0]).double() / LR
    clear = update.abs() > 1e-3
    expected = start.double() - LR * (WD * start * (update * start >= 0) + update)
    torch.testing.assert_close(results[1].double()[clear], expected[clear], rtol=0, atol=2e-6)


def test_groups_say_it_and_old_states_do_not():
    """Two groups may differ; what was saved before the key existed loads as not cautious; L2 is refused."""
    params = [nn.Parameter(-torch.eye(2)) for _ in range(2)]
    groups = [{"params": params[:1], "cautious_weight_decay": True}, {"params": params[1:]}]
    optimizer = TensorParallelMuon(groups, LR, weight_decay=WD)
    for param in params:
        param.grad = torch.eye(2)
    optimizer.step()
    torch.testing.assert_close(params[1] - params[0], LR * WD * torch.eye(2), rtol=0, atol=1e-6)
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        del group["cautious_weight_decay"]
    optimizer.load_state_dict(old)
    assert [group["cautious_weight_decay"] for group in optimizer.param_groups] == [False, False]
    with pytest.raises(ConfigurationError, match="with use_decoupled_weight_decay=False decay is added"):
        TensorParallelMuon(params, cautious_weight_decay=True, use_decoupled_weight_decay=False)


def test_one_field_reaches_muon_and_its_scalar_optimizer():
    """Matrices and vectors of one model are decayed cautiously alike."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    optimizer = build_optimizer(model, "muon", lr=LR, cautious_weight_decay=True)
    assert all(group["cautious_weight_decay"] for group in optimizer.param_groups)
