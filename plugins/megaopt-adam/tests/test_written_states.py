"""Writing into a state acts where it is stored as it is shown, and raises where it is computed."""

import copy
import io

import pytest
import torch
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.optimizers import MegatronOptimizer

WRITES = {
    "zero_": lambda state: state.zero_(),
    "mul_": lambda state: state.mul_(0.5),
    "copy_": lambda state: state.copy_(torch.ones_like(state)),
    "an element": lambda state: state.__setitem__((0, 0), 1.0),
    "a row": lambda state: state[0].fill_(1.0),
    "flat": lambda state: state.view(-1)[3:5].add_(1.0),
    "transposed": lambda state: state.t().chunk(2)[0].neg_(),
    "data": lambda state: state.data.zero_(),
    "detached": lambda state: state.detach().clamp_(max=0.0),
    "out": lambda state: torch.add(state, 1.0, out=state),
    "foreach": lambda state: torch._foreach_zero_([state]),
    "init": nn.init.ones_,
    "operator": lambda state: state.__iadd__(1.0),
}
"""Ways to change a tensor in place."""


def stepped(**settings: str) -> tuple[nn.Parameter, MegatronOptimizer]:
    """Return a parameter that was stepped once, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).bfloat16()
    optimizer = build_optimizer(
        model, "adam", lr=0.1, bf16=True, use_precision_aware_optimizer=True, **settings
    )
    model.weight.grad = torch.randn(16, 16).bfloat16()
    optimizer.step()
    return model.weight, optimizer


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("code", ["fp16", "fp8", "uint8"])
def test_a_state_in_codes_is_not_written_in_silence(write, code):
    """Every way to write raises, and says what to assign; nothing has changed."""
    param, optimizer = stepped(exp_avg_dtype=code, exp_avg_sq_dtype="uint8")
    for key in ("exp_avg", "exp_avg_sq", "main_param"):
        before = optimizer.state[param][key].clone()
        with pytest.raises(UnsupportedOperationError) as caught:
            write(optimizer.state[param][key])
        assert f"optimizer.state[p][{key!r}] of 'weight'" in str(caught.value)
        assert f"assign optimizer.state[p][{key!r}] = value" in str(caught.value)
        assert torch.equal(optimizer.state[param][key], before)
        optimizer.state[param][key] = torch.zeros_like(before)
        assert not optimizer.state[param][key].any()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_state_that_is_stored_as_it_is_shown_is_written(write):
    """As in torch."""
    param, optimizer = stepped()
    before = optimizer.state[param]["exp_avg"].clone()
    write(optimizer.state[param]["exp_avg"])
    assert not torch.equal(optimizer.state[param]["exp_avg"], before)


def test_computed_values_are_read_as_any_tensor():
    """Torch's functions, copies, pickles and state dicts give plain tensors."""
    param, optimizer = stepped(exp_avg_dtype="fp16")
    state = optimizer.state[param]["exp_avg"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    others = [state.clone(), state + 0, copy.deepcopy(state), torch.load(file, weights_only=True)]
    others += [optimizer.state_dict()["state"][0]["exp_avg"], torch.empty_like(state).copy_(state)]
    assert all(type(other) is torch.Tensor and torch.equal(other, state) for other in others)
    assert state.norm().item() > 0
    assert state.numpy().shape == (16, 16)
    others[0].zero_()
    optimizer.state[param]["exp_avg"] = state
    assert torch.equal(optimizer.state[param]["exp_avg"], others[1])


def test_a_write_in_inference_mode_raises_too():
    """There tensors count no writes."""
    param, optimizer = stepped(exp_avg_dtype="fp16")
    with torch.inference_mode():
        state = optimizer.state[param]["exp_avg"]
        with pytest.raises(UnsupportedOperationError):
            state.zero_()
