"""A step that raises, as where memory is short, leaves an optimizer that goes on."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core import ParamKey
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
BATCHES = "megaopt_lowbit.policy.BATCH_ELEMENTS"


def _raise_once(optimizer: MegatronOptimizer, after: int = 0, part: int = 0) -> None:
    """Have the inner step raise before it does anything: the first time, or after some more of its calls."""
    inner = optimizer.parts[part].inner
    own, calls = inner.step, 0

    def step(closure: Any = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise MemoryError("no memory for a step")
        return own(closure)

    inner.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.float32, {"clip_grad": 0.1}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"bf16": True, "clip_grad": 0.1}),
        (torch.bfloat16, AWARE),
        (torch.bfloat16, {**AWARE, "exp_avg_dtype": torch.bfloat16}),
    ],
)
def test_the_step_after_it_is_as_if_it_had_not_been(
    mlp: Callable[..., nn.Module],
    build: Callable[..., MegatronOptimizer],
    give: Callable[..., None],
    snapshot: Callable[..., SimpleNamespace],
    dtype: torch.dtype,
    settings: dict[str, Any],
) -> None:
    """To the bit: nothing is lost of values, states and gradients."""
    models = [mlp(dtype), mlp(dtype)]
    optimizers = [build(model, **settings) for model in models]
    for step in range(4):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            give(model, step)
            if step == 2 and number:
                _raise_once(optimizer)
                with pytest.raises(MemoryError):
                    optimizer.step()
                optimizer.zero_grad()
                assert all(param.grad is None for param in model.parameters())
                give(model, step)
            optimizer.step()
    assert snapshot(models[0], optimizers[0]) == snapshot(models[1], optimizers[1])


@pytest.mark.parametrize("coded", [torch.uint8, torch.float8_e4m3fn, torch.float16])
def test_states_are_stored_again_where_a_batch_raises(
    mlp: Callable[..., nn.Module],
    build: Callable[..., MegatronOptimizer],
    give: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    coded: torch.dtype,
) -> None:
    """No batch stays in the precision that it is stepped in, and training goes on."""
    monkeypatch.setattr(BATCHES, 10)
    model = mlp(torch.bfloat16)
    optimizer = build(model, **AWARE, exp_avg_dtype=coded, exp_avg_sq_dtype=coded)
    inner = optimizer.parts[0].inner
    give(model)
    optimizer.step()
    before = [{key: value.dtype for key, value in state.items()} for state in inner.state.values()]
    give(model, 1)
    _raise_once(optimizer, after=2)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert [{key: value.dtype for key, value in state.items()} for state in inner.state.values()] == before
    memory = [param.untyped_storage().nbytes() for group in inner.param_groups for param in group["params"]]
    assert max(memory) <= torch.float32.itemsize
    assert len(memory) == len(list(model.parameters()))
    for step in range(2, 5):
        give(model, step)
        assert optimizer.step().update_successful
    assert all(torch.isfinite(param).all() for param in model.parameters())


def test_memory_that_a_piece_does_not_get_leaves_it_as_it_was(
    mlp: Callable[..., nn.Module],
    build: Callable[..., MegatronOptimizer],
    give: Callable[..., None],
    snapshot: Callable[..., SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its second state cannot be decoded: the first stays as it is stored, and what was open is stored again."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, **AWARE, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    give(model)
    optimizer.step()
    before = snapshot(model, optimizer)
    codes = optimizer.parts[0].precision._codes
    kind = type(codes["exp_avg_sq"])
    own, calls = kind.decode, 0

    def decode(self: Any, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise MemoryError("no memory for a state")
        return own(self, *args)

    monkeypatch.setattr(kind, "decode", decode)
    give(model, 1)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert calls == 6
    monkeypatch.undo()
    assert snapshot(model, optimizer) == before


def test_an_error_says_who_had_taken_the_step(
    mlp: Callable[..., nn.Module],
    build: Callable[..., MegatronOptimizer],
    give: Callable[..., None],
) -> None:
    """What one optimizer of several has written stays; whoever goes on has been told."""
    model = mlp()
    optimizer = build(model, overrides={ParamKey(name="*.weight"): {"optimizer": "t_sgd"}})
    for part, words in enumerate(
        ("may have finished it for some", r"had finished it, and .* may have finished it")
    ):
        give(model)
        _raise_once(optimizer, part=part)
        with pytest.raises(MemoryError) as caught:
            optimizer.step()
        (note,) = caught.value.__notes__
        assert re.search(f"^The step stopped in .*: .*{words}.* load a checkpoint", note)
