"""A training step under `torch.compile` may call any method of an optimizer that belongs to a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

CALLS: dict[str, Callable[[Any], object]] = {
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "zero_grad, kept": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "prepare_grads": lambda optimizer: optimizer.prepare_grads(),
    "clip_grad_norm": lambda optimizer: (optimizer.prepare_grads(), optimizer.clip_grad_norm(1.0)),
    "get_grad_norm": lambda optimizer: (optimizer.prepare_grads(), optimizer.get_grad_norm()),
    "count_zeros": lambda optimizer: (optimizer.prepare_grads(), optimizer.count_zeros()),
    "get_parameters": lambda optimizer: optimizer.get_parameters(),
    "scale_loss": lambda optimizer: optimizer.scale_loss(torch.ones(())),
    "reload_model_params": lambda optimizer: optimizer.reload_model_params(),
    "train": lambda optimizer: (optimizer.eval(), optimizer.train()),
    "check": lambda optimizer: optimizer.check(),
    "report": lambda optimizer: str(optimizer.report()),
    "state_dict": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "lr": lambda optimizer: [group.update(lr=0.02) for group in optimizer.param_groups],
}


def losses(
    model: torch.nn.Module, optimizer: Any, call: Callable[[Any], object], backend: str | None
) -> list[float]:
    """Train three steps that begin with the call, the first with gradients that are there, and return their losses."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        call(optimizer)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    torch._dynamo.reset()
    run = step if backend is None else torch.compile(step, backend=backend)
    batch = torch.linspace(-1, 1, 20).view(4, 5)
    model(batch).sum().backward()
    return [run(batch).item() for _ in range(3)]


@pytest.mark.filterwarnings("ignore")  # of torch about graph breaks
@pytest.mark.parametrize("call", CALLS)
def test_a_compiled_step_may_call_it(mlp, build, call) -> None:
    """It computes what it computes uncompiled."""
    if call == "lr" and torch.__version__.startswith("2.11."):
        pytest.skip("dynamo of torch 2.11 sets `capturable` in groups that a traced function writes to")
    models = [mlp(), mlp()]
    expected = losses(models[0], build(models[0]), CALLS[call], None)
    assert losses(models[1], build(models[1]), CALLS[call], "eager") == expected


@pytest.mark.filterwarnings("ignore")
def test_a_step_is_compiled_with_autograd(mlp, build) -> None:
    """`aot_eager` traces the graphs between the calls, as the default backend does."""
    models = [mlp(), mlp()]
    expected = losses(models[0], build(models[0]), CALLS["zero_grad"], None)
    assert losses(models[1], build(models[1]), CALLS["zero_grad"], "aot_eager") == pytest.approx(expected)
