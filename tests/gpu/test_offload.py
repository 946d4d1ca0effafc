"""States on the CPU of a model on a GPU."""

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from device_training import PRECISIONS, build, everything, model_of, relative, train

pytest.importorskip("megaopt_device")
OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
EXACT_BETAS = {"adam_beta1": 0.875, "adam_beta2": 0.9375}
"""Of which `1 - beta` is a number of fp32: torch's fused kernel rounds it on CUDA, by 1.3e-5 of 1 - 0.999, and not on a
CPU."""
NAMES = ["adam", "adamw", "sgd", "lion", "muon", "soap"]


def settings_of(name: str, precision: str) -> dict[str, Any]:
    """Leave out the state dtypes that an optimizer cannot hold."""
    if precision == "8bit" and name not in {"adam", "adamw"}:
        pytest.skip("adam's states")
    return PRECISIONS[precision]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_offloaded_steps_are_those_in_place(device, name, precision, fraction, overlap):
    """To 1e-6 of the largest value in fp32; what is rounded to bf16 or 8 bits may fall to the other side."""
    settings, runs = settings_of(name, precision), []
    # The norm is added up in another order on a CPU, and Lion takes the sign of what it scales.
    settings = {**settings, "clip_grad": 0.0} if name == "lion" else settings
    offload = {**OFFLOAD, "optimizer_offload_fraction": fraction, "overlap_cpu_optimizer_d2h_h2d": overlap}
    for extra in ({}, offload):
        model = model_of(device, precision)
        optimizer = build(model, name, **EXACT_BETAS, **settings, **extra)
        train(model, optimizer, range(5))
        runs.append(everything(model, optimizer))
    if precision == "fp32":
        assert relative(*runs) <= 1e-6
    else:
        mains = [{key: value for key, value in run.items() if key.endswith("main_param")} for run in runs]
        assert relative(*mains) <= (1e-6 if precision != "8bit" else 1e-2)


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_a_resume_is_bit_equal(device, name):
    """Offloaded, saved, loaded into an offloaded run."""
    model = model_of(device)
    optimizer = build(model, name, **OFFLOAD)
    train(model, optimizer, range(3))
    other_model = model_of(device)
    other = build(other_model, name, **OFFLOAD)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for each in ((model, optimizer), (other_model, other)):
        train(*each, range(3, 6))
    assert relative(everything(model, optimizer), everything(other_model, other)) == 0.0


def kept_after_training(
    device: torch.device, name: str, **settings: Any
) -> tuple[int, int, list[torch.Tensor]]:
    """Return the bytes that an optimizer keeps on the GPU, those of its states, and the states."""
    gc.collect()
    model = model_of(device, width=1024)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = build(model, name, **settings)
    train(model, optimizer, range(2))
    for param in model.parameters():
        param.grad = None
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    states = [
        value
        for part in optimizer.parts
        for state in part.inner.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    return kept, sum(value.numel() * value.element_size() for value in states), states


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["adam", "muon"])
def test_states_lie_in_memory_of_the_cpu(device, on_cuda, name, overlap):
    """And leave the GPU; what travels in every step is pinned."""
    kept_after_training(device, name)  # libraries make their workspaces
    in_place, size, _ = kept_after_training(device, name)
    gc.collect()
    offloaded, _, states = kept_after_training(device, name, **OFFLOAD, overlap_cpu_optimizer_d2h_h2d=overlap)
    assert {value.device.type for value in states} == {"cpu"}
    assert in_place - offloaded >= 0.9 * size
    if name == "muon":
        assert all(value.is_pinned() for value in states if value.numel() >= 1024 * 1024)


def test_pinned_memory_does_not_pile_up(device, on_cuda):
    """Of states that are stored anew in every step, too."""
    model = model_of(device, "remainders", width=256)
    optimizer = build(model, "muon", **PRECISIONS["remainders"], muon_momentum_dtype="uint8", **OFFLOAD)
    train(model, optimizer, range(3))

    def addresses():
        return {
            value.data_ptr()
            for part in optimizer.parts
            for state in part.inner.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.is_pinned()
        }

    before = addresses()
    train(model, optimizer, range(3, 8))
    assert before
    assert addresses() == before


def test_phases_free_the_gpu(device, on_cuda):
    """`offload_to_cpu` gives the states' memory back, `restore_from_cpu` takes it."""
    model = model_of(device, width=1024)
    optimizer = build(model, "adam")
    train(model, optimizer, range(2))
    expected, before = everything(model, optimizer), torch.cuda.memory_allocated()
    optimizer.offload_to_cpu()
    freed = before - torch.cuda.memory_allocated()
    assert freed >= 0.9 * 8 * sum(param.numel() for param in model.parameters())
    optimizer.restore_from_cpu()
    assert relative(expected, everything(model, optimizer)) == 0.0
