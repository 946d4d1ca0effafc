"""Main values and states that are on the CPU while the model stays on a GPU: torch's fake tensors have both devices."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaopt_lowbit import ParamRemainders
from megaopt_lowbit.remainders import Remainder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megaopt_core.precision import MainParams, SeparateMain, StoredSlice

POLICIES = ["remainders", "main values of the precision-aware policy", "main parameters"]


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    """Tensors without values, on devices that need not be there."""
    with FakeTensorMode():
        yield


def away(name: str) -> Any:
    """A policy of one bf16 parameter on a GPU, whose main value was brought to the CPU."""
    param = nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16, device="cuda"))
    pieces: Any = [SimpleNamespace(param=param, model_params=(param,), grad=None)]
    if name == POLICIES[2]:
        mains = MainParams()
        mains.attach(pieces)
        (main,) = mains._storages
        assert isinstance(main, SeparateMain)
        main.main = nn.Parameter(main.main.detach().cpu())
        return mains
    policy = ParamRemainders(store_param_remainders=name == POLICIES[0])
    policy.attach(pieces)
    (storage,) = policy._storages
    if isinstance(storage, Remainder):  # a fake tensor's `.data` takes no other device
        storage.remainder = storage.remainder.cpu()
    else:
        assert isinstance(storage, SeparateMain)
        storage.main = storage.main.cpu()
    return policy


@pytest.mark.parametrize("name", POLICIES)
def test_main_values_are_read_and_written_where_they_are(name) -> None:
    """Saving reads them, loading writes them, and a write to the model is taken over."""
    policy = away(name)
    assert policy.extra_state(0)["main_param"].device.type == "cpu"
    policy.set_extra_state(0, "main_param", torch.ones(4, 2))
    policy.take_over([0])
    policy.reload_model_params()
    assert policy.extra_state(0)["main_param"].device.type == "cpu"


@pytest.mark.parametrize(
    ("dtype", "fits"), [(torch.float16, True), (torch.float16, False), (torch.uint8, True)]
)
def test_states_that_are_loaded_meanwhile_stay_on_the_cpu(dtype, fits, monkeypatch) -> None:
    """Where saved elements are taken over as they are, and where they are encoded anew."""
    param = nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16, device="cuda"))
    policy = ParamRemainders(state_dtypes={"exp_avg": dtype})
    policy.attach([SimpleNamespace(param=param, model_params=(param,), grad=None)])  # type: ignore[list-item]
    code = policy._codes["exp_avg"]
    monkeypatch.setattr(
        type(code),
        "common_scale",
        lambda self, slices, like: torch.ones(1, device=like.device) if fits else None,
    )
    state: dict[str, Any] = {"exp_avg": torch.zeros(4, 2, dtype=dtype)}
    saved = StoredSlice(0, torch.zeros(8, dtype=dtype), decode=lambda stored: stored.elements.float())
    policy.restore_state(0, "exp_avg", state, [saved])
    assert {key: value.device.type for key, value in state.items()} == {
        "exp_avg": "cpu",
        "exp_avg_scale": "cpu",
    }
