"""Trainers move a model, and what its optimizer keeps, after the build; a sharding strategy goes on from there."""

import copy
from typing import Any

import pytest
import torch
from megaopt_checkpoint import SlicedTensor
from models import awkward, batch, loss_of, states_of, values_of
from torch.nn.parallel import DistributedDataParallel

from megaopt_core import build_optimizer
from megaopt_core.errors import UnsupportedOperationError

pytestmark = pytest.mark.distributed

KINDS = [("adam", "distributed", {}), ("muon", "layer_wise", {}), ("adam", "distributed", {"bf16": True})]


def moved(state: Any, how: str) -> Any:
    """Return a state dict whose tensors were moved as trainers do it, container by container."""
    if isinstance(state, dict):
        return type(state)({key: moved(value, how) for key, value in state.items()})
    if isinstance(state, list):
        return [moved(value, how) for value in state]
    if not isinstance(state, torch.Tensor):
        return state
    return {
        "to": lambda: state.to("cpu:0"),
        "cpu": state.cpu,
        "clone": state.clone,
        "deepcopy": lambda: copy.deepcopy(state),
    }[how]()


def trained(
    rank: int, size: int, optimizer: str, sharding: str, settings: dict[str, Any], how: str | None
) -> dict[str, torch.Tensor]:
    """Train three steps; before the second, everything is moved as `how` says, and the first build is loaded anew."""
    model = awkward(dtype=torch.bfloat16 if settings else torch.float32)
    stepper = build_optimizer(model, optimizer, lr=1e-2, sharding=sharding, clip_grad=1.0, **settings)
    if how is not None:  # as accelerate: the model to its device, then DDP, then the optimizer's state
        model.to("cpu:0")
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        if how is not None:
            stepper.load_state_dict(moved(stepper.state_dict(), how))
        if how is not None and step == 1:
            model.to("cpu:0")
        loss_of(wrapped, batch(step, rank)).backward()
        stepper.step()
        stepper.zero_grad()
    return values_of(model) | states_of(stepper)


@pytest.mark.parametrize(("optimizer", "sharding", "settings"), KINDS, ids=["adam", "muon", "bf16"])
@pytest.mark.parametrize("how", ["to", "cpu", "clone", "deepcopy"])
def test_what_a_trainer_moves_is_stepped_as_if_nothing_had_moved(
    launch, optimizer, sharding, settings, how
) -> None:
    """Bit for bit, on every rank."""
    expected = launch(trained, 2, optimizer, sharding, settings, None)
    actual = launch(trained, 2, optimizer, sharding, settings, how)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def written_by_data(rank: int, size: int) -> list[float]:
    """Give a parameter other memory with other values: they are what the next step begins with."""
    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    stepper = build_optimizer(model, "adam", lr=0.0, weight_decay=0.0, sharding="distributed", bf16=True)
    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        stepper.step()
        model.weight.data = torch.full((4, 4), 3.0, dtype=torch.bfloat16)
    model.weight.grad = torch.ones_like(model.weight)
    stepper.step()
    return model.weight.unique().tolist()


def test_other_memory_with_other_values_is_taken_over(launch) -> None:
    """Also where main values are kept."""
    assert launch(written_by_data, 2) == [[3.0], [3.0]]


def test_a_slice_in_another_dtype_is_refused() -> None:
    """A state that is rounded is not the state."""
    held = SlicedTensor((4,), torch.float32, torch.device("cpu"), ())
    with pytest.raises(UnsupportedOperationError, match="not possible on a slice of a sharded tensor"):
        held.to(torch.float16)
