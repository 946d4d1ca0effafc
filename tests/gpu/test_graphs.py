"""CUDA graphs of the inner step."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))
from device_training import (
    NO_SKIP,
    PRECISIONS,
    build,
    everything,
    give_grads,
    model_of,
    relative,
    train,
    waiting_raises,
)

pytest.importorskip("megaopt_device")


def as_tensors(optimizer: MegatronOptimizer) -> None:
    """Let an eager run read learning rates from tensors, and count on the device, as a captured one does."""
    for part in optimizer.parts:
        for outer, inner in zip(part.groups, part.inner.param_groups, strict=True):
            device = inner["params"][0].device
            for group in (outer, inner):
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
                if "capturable" in group:
                    group["capturable"] = True
        for state in part.inner.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(next(iter(part.inner.state)).device)


PLUGIN = {"adamw": "megaopt_adam", "sgd": "megaopt_adam"}
CAPTURED = [
    *(
        (name, precision)
        for name in ("adam", "adamw", "sgd", "lion", "muon")
        for precision in ("fp32", "main")
    ),
    *((name, "remainders") for name in ("adam", "sgd", "lion", "muon")),
    ("adam", "8bit"),
    ("adamw", "8bit"),
]


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(("name", "precision"), CAPTURED)
def test_a_replay_is_an_eager_step_bit_for_bit(device, on_cuda, name, precision, clip):
    """Ten steps, of which seven are replayed."""
    pytest.importorskip(PLUGIN.get(name, f"megaopt_{name}"))
    settings = {**PRECISIONS[precision], "clip_grad": clip}
    eager_model, captured_model = model_of(device, precision), model_of(device, precision)
    eager = build(eager_model, name, **settings)
    as_tensors(eager)
    captured = build(captured_model, name, **settings, optimizer_cuda_graph=True)
    train(eager_model, eager, range(10))
    train(captured_model, captured, range(10))  # a warning that a step is not captured is an error
    assert [part.runner.why_not for part in captured.parts] == [None] * len(captured.parts)
    assert relative(everything(eager_model, eager), everything(captured_model, captured)) == 0.0


@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "muon"])
def test_a_replay_waits_for_nothing(device, on_cuda, name):
    """Torch raises where the host would wait inside the inner step."""
    pytest.importorskip(PLUGIN.get(name, f"megaopt_{name}"))
    model = model_of(device)
    optimizer = build(model, name, optimizer_cuda_graph=True, clip_grad=0.0)
    train(model, optimizer, range(5))
    give_grads(model, 5)
    for part in optimizer.parts:
        part.collect_grads()
        with waiting_raises():
            part.runner.step(part, range(len(part.pieces)))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("settings", [{}, NO_SKIP, {**NO_SKIP, "use_precision_aware_optimizer": True}])
@pytest.mark.parametrize("name", ["adam", "sgd", "muon"])
def test_a_whole_step_waits_for_nothing_where_no_rule_skips(device, on_cuda, name, settings, clip, captured):
    """Measured, clipped, stepped; the norm is there when somebody asks."""
    pytest.importorskip(PLUGIN.get(name, f"megaopt_{name}"))
    model = model_of(device, "main" if settings else "fp32")
    optimizer = build(model, name, clip_grad=clip, optimizer_cuda_graph=captured, **settings)
    train(model, optimizer, range(6))
    give_grads(model, 6)
    with waiting_raises():
        result = optimizer.step()
        assert result.update_successful
    give_grads(model, 6)  # those that were there may have been clipped in place
    expected = sum(param.grad.double().square().sum() for param in model.parameters()).sqrt().item()
    assert result.grad_norm == (pytest.approx(expected, rel=1e-5) if clip else 0.0 if settings else None)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_step_that_the_device_skips_waits_for_nothing_either(device, on_cuda, name, clip):
    """Nothing changes, and the next step goes on."""
    pytest.importorskip(PLUGIN.get(name, f"megaopt_{name}"))
    model = model_of(device, "main")
    optimizer = build(model, name, clip_grad=clip, bf16=True)
    train(model, optimizer, range(3))
    before = everything(model, optimizer)
    give_grads(model, 3)
    next(model.parameters()).grad.fill_(float("inf"))
    with waiting_raises():
        result = optimizer.step()
    assert not result.update_successful
    assert relative(before, everything(model, optimizer)) == 0.0
    train(model, optimizer, range(4, 5))
    assert relative(before, everything(model, optimizer)) > 0.0


def test_a_load_and_a_phase_on_the_cpu_lead_to_new_graphs(device, on_cuda):
    """New memory, new graph; the pool goes with the old ones."""
    runs = []
    for captured in (False, True):
        model = model_of(device)
        optimizer = build(model, "adam", optimizer_cuda_graph=captured)
        if not captured:
            as_tensors(optimizer)
        train(model, optimizer, range(6))
        optimizer.offload_to_cpu()
        optimizer.restore_from_cpu()
        train(model, optimizer, range(6, 12))
        other_model = model_of(device)
        other = build(other_model, "adam", optimizer_cuda_graph=captured)
        if not captured:
            as_tensors(other)
        other_model.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
        train(other_model, other, range(12, 18))
        runs.append(everything(other_model, other))
    assert relative(*runs) == 0.0


def test_captures_again_and_again_share_one_pool(device, on_cuda):
    """Another weight decay each time: memory does not grow with the number of graphs."""
    model = model_of(device, width=512)
    optimizer = build(model, "lion", optimizer_cuda_graph=True, clip_grad=0.0)
    allocated = []
    for phase in range(6):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.125 / (phase + 1)
        train(model, optimizer, range(4))
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] <= 1.1 * allocated[1]


def test_what_is_not_captured_says_so_and_trains(device):
    """One reason, in one warning, and the values of eager steps."""
    pytest.importorskip("megaopt_soap")
    runs = []
    for settings in ({}, {"optimizer_cuda_graph": True}):
        model = model_of(device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = build_optimizer(model, "soap", lr=2.0**-7, **settings)
            train(model, optimizer, range(6))
        said = [each for each in caught if "without a graph" in str(each.message)]
        assert len(said) == (1 if settings and device.type == "cuda" else 0)
        runs.append(everything(model, optimizer))
    assert relative(*runs) <= 1e-6
