"""CUDA graphs of the inner step."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from device_training import PRECISIONS, build, everything, model_of, relative, train

pytest.importorskip("megaopt_device")


def as_tensors(optimizer):
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


@pytest.mark.parametrize("precision", ["fp32", "main"])
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "muon"])
def test_a_replay_is_an_eager_step_bit_for_bit(device, on_cuda, name, precision):
    """Ten steps, of which seven are replayed."""
    eager_model, captured_model = model_of(device, precision), model_of(device, precision)
    eager = build(eager_model, name, **PRECISIONS[precision])
    as_tensors(eager)
    captured = build(captured_model, name, **PRECISIONS[precision], optimizer_cuda_graph=True)
    train(eager_model, eager, range(10))
    train(captured_model, captured, range(10))
    assert [part.runner.why_not for part in captured.parts] == [None] * len(captured.parts)
    assert relative(everything(eager_model, eager), everything(captured_model, captured)) == 0.0


def test_a_replay_waits_for_nothing(device, on_cuda):
    """Torch raises where the host would wait inside the inner step."""
    model = model_of(device)
    optimizer = build(model, "adam", optimizer_cuda_graph=True, clip_grad=0.0)
    train(model, optimizer, range(5))
    (part,) = optimizer.parts
    part.collect_grads()
    torch.cuda.set_sync_debug_mode("error")
    try:
        part.runner.step(part, range(len(part.pieces)))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["lion", "soap"])
def test_what_is_not_captured_says_so_and_trains(device, name):
    """One reason, and the values of eager steps."""
    if device.type == "cuda":
        pytest.importorskip(f"megaopt_{name}")
    models = [model_of(device) for _ in range(2)]
    runs = []
    for model, settings in zip(models, ({}, {"optimizer_cuda_graph": True}), strict=True):
        optimizer = build(model, name, **settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *args, **kwargs: None)
            train(model, optimizer, range(6))
        runs.append(everything(model, optimizer))
    assert relative(*runs) <= 1e-6
