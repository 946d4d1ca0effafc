"""adam, adamw and sgd are torch's own optimizers: parameters, state and state dicts are equal bit for bit."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megaopt_testing import TinyGPT

from megaopt_core import (
    MegatronOptimizer,
    OptimizerParamScheduler,
    ParamGroupOverride,
    ParamKey,
    build_optimizer,
)
from megaopt_core.errors import UnusedSettingWarning

pytestmark = pytest.mark.any_python

STEPS = 10
DECAY = 0.1


def _model(dtype: torch.dtype = torch.float32) -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(width=32).to(dtype)


def _train(
    model: TinyGPT, optimizer: torch.optim.Optimizer, after: Callable[[], None] = lambda: None
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(19, (4, 9), generator=generator)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()


def _decay_groups(model: TinyGPT) -> list[dict[str, Any]]:
    """Weight decay on matrices and embeddings, none on biases, norms and other vectors."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": DECAY},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


def _assert_same(
    ours: TinyGPT, optimizer: MegatronOptimizer, theirs: TinyGPT, torch_one: torch.optim.Optimizer
) -> None:
    for (name, param), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(param, expected), name
        state, expected_state = optimizer.state[param], torch_one.state[expected]
        assert set(state) == set(expected_state)
        for key, value in expected_state.items():
            assert state[key].dtype == value.dtype
            assert state[key].shape == value.shape
            assert torch.equal(state[key], value), (name, key)


ADAM = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7}
OUR_ADAM = {"lr": 3e-3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-7, "weight_decay": DECAY}
CASES: dict[str, tuple[str, Mapping[str, Any], type[torch.optim.Optimizer], Mapping[str, Any]]] = {
    "adam": ("adam", OUR_ADAM, torch.optim.AdamW, ADAM),
    "adam with L2": (
        "adam",
        {**OUR_ADAM, "decoupled_weight_decay": False},
        torch.optim.Adam,
        ADAM,
    ),
    "adamw": ("adamw", OUR_ADAM, torch.optim.AdamW, ADAM),
    "adamw decouples always": (
        "adamw",
        {**OUR_ADAM, "decoupled_weight_decay": False},
        torch.optim.AdamW,
        ADAM,
    ),
    "adam by default": ("adam", {"lr": 1e-3, "weight_decay": DECAY}, torch.optim.AdamW, {"lr": 1e-3}),
    "sgd": (
        "sgd",
        {"lr": 0.05, "sgd_momentum": 0.8, "weight_decay": DECAY},
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8},
    ),
    "sgd by default": (
        "sgd",
        {"lr": 0.05, "weight_decay": DECAY},
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9},
    ),
    "sgd without momentum": (
        "sgd",
        {"lr": 0.05, "sgd_momentum": 0.0, "weight_decay": DECAY},
        torch.optim.SGD,
        {"lr": 0.05},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_torch_bit_for_bit(case: str) -> None:
    """Parameters and state, with weight decay groups, on the implementation that the plugin selects: fused on CPU."""
    name, settings, torch_cls, arguments = CASES[case]
    ours, theirs = _model(), _model()
    unread = name == "adamw" and "decoupled_weight_decay" in settings
    with pytest.warns(UnusedSettingWarning, match="adamw does not read it") if unread else nullcontext():
        optimizer = build_optimizer(ours, name, clip_grad=0.0, **settings)
    expected = torch_cls(_decay_groups(theirs), fused=True, **arguments)
    _train(ours, optimizer)
    _train(theirs, expected)
    _assert_same(ours, optimizer, theirs, expected)


def test_the_fused_implementation_is_selected_on_cpu() -> None:
    """Every group says so, and the loop over single tensors rounds otherwise: the test above does tell them apart."""
    ours, loop = _model(), _model()
    optimizer = build_optimizer(ours, "adam", lr=3e-3, weight_decay=DECAY, clip_grad=0.0)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    _train(ours, optimizer)
    _train(loop, torch.optim.AdamW(_decay_groups(loop), lr=3e-3, foreach=False))
    pairs = zip(ours.parameters(), loop.parameters(), strict=True)
    assert not all(torch.equal(mine, other) for mine, other in pairs)


def test_foreach_is_left_to_torch_where_a_parameter_has_no_fused_kernel() -> None:
    """A complex parameter takes the whole model off the fused path, and steps as torch steps it."""
    both = [torch.nn.Module() for _ in range(2)]
    for model in both:
        torch.manual_seed(0)
        model.spectrum = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        model.gain = torch.nn.Parameter(torch.randn(3))
    ours, theirs = both
    optimizer = build_optimizer(ours, "adam", lr=1e-2, weight_decay=0.0, clip_grad=0.0)
    expected = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    for model, one in ((ours, optimizer), (theirs, expected)):
        for _ in range(3):
            one.zero_grad()
            (model.spectrum.abs().square().sum() * model.gain.sum()).backward()
            one.step()
    assert torch.equal(ours.spectrum, theirs.spectrum)
    assert torch.equal(ours.gain, theirs.gain)


def test_the_torch_schedulers_move_both_alike() -> None:
    """A cosine with warm-up by torch.optim.lr_scheduler gives the same bits on ours and on torch's."""

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])

    ours, theirs = _model(), _model()
    optimizer = build_optimizer(ours, "adam", clip_grad=0.0, **OUR_ADAM)
    expected = torch.optim.AdamW(_decay_groups(theirs), fused=True, **ADAM)
    _train(ours, optimizer, schedule(optimizer).step)
    _train(theirs, expected, schedule(expected).step)
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in expected.param_groups
    ]
    _assert_same(ours, optimizer, theirs, expected)


def test_our_scheduler_is_the_formula_written_into_torchs_groups() -> None:
    """A linear warm-up and decay with growing weight decay equals setting both by hand before every step."""
    ours, theirs = _model(), _model()
    optimizer = build_optimizer(ours, "adam", clip_grad=0.0, **OUR_ADAM)
    for group in optimizer.param_groups:
        group["max_lr"] = None
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.004,
        min_lr=0.0,
        lr_warmup_steps=4,
        lr_decay_steps=12,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.5,
        wd_incr_steps=10,
        wd_incr_style="linear",
    )
    expected = torch.optim.AdamW(_decay_groups(theirs), fused=True, **ADAM)
    matrices, vectors = expected.param_groups
    taken = iter(range(1, STEPS + 1))

    def by_hand(step: int) -> None:
        matrices["lr"] = vectors["lr"] = 0.004 * step / 4 if step <= 4 else 0.004 * (1 - (step - 4) / 8)
        matrices["weight_decay"] = 0.05 * step

    by_hand(0)
    _train(ours, optimizer, lambda: scheduler.step(increment=1))
    _train(theirs, expected, lambda: by_hand(next(taken)))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.0, atol=1e-7)


def test_a_group_of_its_own_gets_its_own_betas() -> None:
    """An override of a constructor setting reaches torch's group."""
    ours, theirs = _model(), _model()
    slow = {ParamKey(name="embedding.*"): ParamGroupOverride(betas=(0.5, 0.9), max_lr=1e-4)}
    optimizer = build_optimizer(ours, "adam", overrides=slow, clip_grad=0.0, **OUR_ADAM)
    embedding = [theirs.embedding.weight]
    rest = [param for param in theirs.parameters() if param is not theirs.embedding.weight]
    groups = [{"params": rest}, {"params": embedding, "betas": (0.5, 0.9), "lr": 1e-4}]
    expected = torch.optim.AdamW(groups, weight_decay=DECAY, fused=True, **ADAM)
    _train(ours, optimizer)
    _train(theirs, expected)
    _assert_same(ours, optimizer, theirs, expected)


@pytest.mark.parametrize(("name", "torch_class"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_bf16_main_parameters_are_those_of_fused_adam_on_fp32_copies(name, torch_class) -> None:
    """Bit for bit over 20 steps, with gradients that are cast from bf16; the model shows them rounded."""
    model, copies = _model(torch.bfloat16), _model(torch.bfloat16).float()
    optimizer = build_optimizer(
        model, name, lr=0.01, weight_decay=DECAY, bf16=True, clip_grad=0.0, overrides={}
    )
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": DECAY, "fused": True}
    if torch_class is torch.optim.Adam:
        settings["decoupled_weight_decay"] = True
    expected = torch_class(copies.parameters(), **settings)
    assert all(part.inner.param_groups[0]["fused"] for part in optimizer.parts)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for mine, other in zip(model.parameters(), copies.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator).bfloat16()
            other.grad = mine.grad.float()
        optimizer.step()
        expected.step()
        for mine, other in zip(model.parameters(), copies.parameters(), strict=True):
            assert torch.equal(optimizer.state[mine]["main_param"], other)
            assert torch.equal(mine, other.bfloat16())


def test_sgd_takes_sparse_gradients() -> None:
    """Torch's fused kernel does not: a model with a sparse embedding gets another implementation."""
    torch.manual_seed(0)
    model, other = (torch.nn.Embedding(7, 3, sparse=True) for _ in range(2))
    other.load_state_dict(model.state_dict())
    optimizer = build_optimizer(model, "sgd", lr=0.1, clip_grad=0.0, weight_decay=0.0, overrides={})
    expected = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for table, stepper in ((model, optimizer), (other, expected)):
            stepper.zero_grad()
            table(torch.tensor([step, 4])).square().sum().backward()
            stepper.step()
    assert torch.equal(model.weight, other.weight)
    assert build_optimizer(torch.nn.Embedding(7, 3), "sgd", lr=0.1).param_groups[0]["fused"] is True
