"""State that is given up begins anew; groups whose members somebody changes raise, for nothing else would happen."""

from typing import Any

import pytest
import torch

from megaopt_core.errors import UnsupportedOperationError

pytestmark = pytest.mark.any_python

PRECISIONS = [{}, {"bf16": True}, {"bf16": True, "use_precision_aware_optimizer": True}]


def reference(model: Any) -> Any:
    """Return torch's own optimizer of what `build` builds."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, foreach=False)


def clear_all(optimizer: Any, model: Any) -> None:
    """Forget all state."""
    optimizer.state.clear()


def pop_one(optimizer: Any, model: Any) -> None:
    """Forget a parameter's state."""
    assert set(optimizer.state.pop(model[0].weight)) >= {"exp_avg", "exp_avg_sq", "step"}
    assert optimizer.state.pop(torch.nn.Parameter(torch.zeros(1)), None) is None


def delete_one(optimizer: Any, model: Any) -> None:
    """Delete a parameter's state."""
    del optimizer.state[model[0].weight]


def empty_one(optimizer: Any, model: Any) -> None:
    """Put an empty one in its place."""
    optimizer.state[model[0].weight] = {}


def assign_one(optimizer: Any, model: Any) -> None:
    """Assign state, all of it."""
    weight = model[0].weight
    optimizer.state[weight] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.full(weight.shape, 0.5),
        "exp_avg_sq": torch.full(weight.shape, 0.25),
    }


@pytest.mark.parametrize("change", [clear_all, pop_one, delete_one, empty_one, assign_one])
def test_torchs_ways_to_begin_anew(build, mlp, give, change):
    """As `torch.optim.AdamW` goes on after the same, bit for bit."""
    ends = []
    for make in (build, reference):
        model = mlp()
        optimizer = make(model)
        for step in range(5):
            if step == 2:
                change(optimizer, model)
            give(model, step)
            optimizer.step()
        ends.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_main_values_stay(build, mlp, give, precision):
    """Given up are moments and step counts: what training has reached is kept to the last bit."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, **precision)
    for step in range(3):
        give(model, step)
        optimizer.step()
    before = [optimizer.state[param]["main_param"].clone() for param in model.parameters()]
    optimizer.state.clear()
    for param, main in zip(model.parameters(), before, strict=True):
        assert torch.equal(optimizer.state[param]["main_param"], main)
    give(model, 3)
    optimizer.step()
    assert all(float(optimizer.state[param]["step"]) == 1.0 for param in model.parameters())


def remove(optimizer: Any) -> None:
    """Take a parameter out of its group."""
    del optimizer.param_groups[0]["params"][0]


def replace(optimizer: Any) -> None:
    """Put another list in its place."""
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def append(optimizer: Any) -> None:
    """Add a parameter that the model does not have."""
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(2)))


def pop_group(optimizer: Any) -> None:
    """Remove a group."""
    optimizer.param_groups.pop()


def append_group(optimizer: Any) -> None:
    """Add a group."""
    optimizer.param_groups.append({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.1})


@pytest.mark.parametrize("change", [remove, replace, append, pop_group, append_group])
def test_groups_whose_members_change_raise(build, mlp, give, change):
    """Before anything moves: what such a change means to do would not happen."""
    model = mlp()
    optimizer = build(model)
    give(model)
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    change(optimizer)
    give(model)
    with pytest.raises(UnsupportedOperationError, match=r"freeze (it|parameters)"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_state_that_lies_with_that_of_others_is_not_given_up_alone(build, mlp):
    """The message says what can be done instead."""
    model = mlp()
    optimizer = build(model)
    state = optimizer.state[model[0].weight]
    piece = optimizer.parts[0].pieces[0]
    members = piece.spec.members
    object.__setattr__(piece.spec, "members", (*members, *members))
    with pytest.raises(
        UnsupportedOperationError, match=r"cannot be removed alone: optimizer.state.clear\(\)"
    ):
        state.clear()
