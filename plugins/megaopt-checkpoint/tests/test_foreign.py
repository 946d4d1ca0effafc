"""States of plain torch optimizers go on here with the same values."""

from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_torch_state_dict
from random_cuts import random_cuts
from torch import nn
from training import logical_state, make, train

from megaopt_core import OptimizerEntry
from megaopt_core.errors import CheckpointMismatchError, StateDictError


def stepped(plain: torch.optim.Optimizer, model: nn.Module, count: int = 3) -> dict[str, Any]:
    """Return the state dict of a torch optimizer that has stepped."""
    for step in range(count):
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=chance)
        plain.step()
    return plain.state_dict()


@pytest.mark.parametrize("how", ["param_names", "model", "argument"])
def test_adamw_by_name(how):
    """From named_parameters(), from the model that it was made from, from a list."""
    model, optimizer = make()
    given = model.named_parameters() if how == "param_names" else model.parameters()
    state = stepped(torch.optim.AdamW(given, lr=1e-3), model)
    where = {"model": {"model": model}, "argument": {"param_names": [n for n, _ in model.named_parameters()]}}
    report = load_torch_state_dict(optimizer, state, **where.get(how, {}))
    assert set(report.loaded) == {name for name, _ in model.named_parameters()}
    for index, param in enumerate(model.parameters()):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[param][key], state["state"][index][key])
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}


def test_adamw_into_a_layout_that_cuts():
    """Each rank takes what it steps."""
    model, _ = make()
    state = stepped(torch.optim.AdamW(model.named_parameters(), lr=1e-3), model)
    _, whole = make()
    load_torch_state_dict(whole, state)
    with random_cuts(4, ranks=3, rank=1):
        _, cut = make(sharding="cut4")
        load_torch_state_dict(cut, state)
    expected = logical_state(whole)
    for key, part in logical_state(cut).items():
        here = ~part.isnan()
        assert torch.equal(part[here], expected[key][here])


def test_muon_beside_adamw():
    """Two state dicts, one after the other."""
    if "muon" not in _installed():
        pytest.skip("megaopt-muon is not installed")
    model, optimizer = make(optimizer="muon")
    steps = {name: entry.spec.optimizer for name, entry in optimizer.routing.params.items()}
    split = {
        which: [(n, p) for n, p in model.named_parameters() if steps[n] == which]
        for which in ("muon", "adam")
    }
    muon = stepped(torch.optim.Muon(split["muon"], lr=1e-3), model)
    adamw = stepped(torch.optim.AdamW(split["adam"], lr=1e-3), model)
    first = load_torch_state_dict(optimizer, muon, strict=False)
    second = load_torch_state_dict(optimizer, adamw, strict=False)
    assert sorted([*first.loaded, *second.loaded]) == sorted(steps)
    for index, (_, param) in enumerate(split["muon"]):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], muon["state"][index]["momentum_buffer"])
    for index, (_, param) in enumerate(split["adam"]):
        assert torch.equal(optimizer.state[param]["exp_avg_sq"], adamw["state"][index]["exp_avg_sq"])


def _installed() -> dict[str, OptimizerEntry]:
    from megaopt_core import get_registry

    return get_registry().optimizers()


def test_what_does_not_fit_is_refused():
    """No names, too few names, other names, no state dict."""
    model, optimizer = make()
    train(model, optimizer, range(1))
    state = stepped(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    before = logical_state(optimizer)
    with pytest.raises(StateDictError, match=r"no names: give param_names"):
        load_torch_state_dict(optimizer, state)
    with pytest.raises(StateDictError, match="1 names were given"):
        load_torch_state_dict(optimizer, state, param_names=["a"])
    names = [f"other.{name}" for name, _ in model.named_parameters()]
    with pytest.raises(CheckpointMismatchError, match="it lacks"):
        load_torch_state_dict(optimizer, state, param_names=names)
    with pytest.raises(StateDictError, match="has the keys 'state' and 'param_groups'"):
        load_torch_state_dict(optimizer, {"state": {}})
    with pytest.raises(StateDictError, match=r"'fresh' of an optimizer state dict is a list of .* got int 5"):
        load_torch_state_dict(optimizer, {**state, "fresh": 5}, model=model)
    assert all(torch.equal(before[key], value) for key, value in logical_state(optimizer).items())
    report = load_torch_state_dict(optimizer, state, param_names=names, rename=lambda name: name[6:])
    assert len(report.renamed) == len(names)
    assert before.keys() == logical_state(optimizer).keys()
