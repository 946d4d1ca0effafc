"""Losses of our optimizers under Megatron's training loop are those of Megatron's own, by one changed import."""

from typing import Any

import megatron_harness as harness
import pytest
import torch

pytestmark = pytest.mark.distributed

STEPS = range(20)
ADAM = {
    "optimizer": "adam",
    "lr": 1e-3,
    "min_lr": 1e-4,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
    "adam_beta2": 0.95,
}


def _build(is_ours: bool, model: Any, settings: dict[str, Any]) -> Any:
    if is_ours:
        from megaopt_trainers.megatron import get_megatron_optimizer
    else:
        from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer import (
        OptimizerConfig,
        ParamKey,
        ParamPredicate,
        get_standard_config_overrides,
    )

    config = OptimizerConfig(**settings)
    overrides = get_standard_config_overrides(config)
    if is_ours and settings["optimizer"] == "lion":
        # Megatron's Lion leaves them to Adam by itself, as its Muon does.
        rest = ParamPredicate("embeddings, output and vectors", _is_rest)
        overrides[ParamKey(predicate=rest)] = {"optimizer": "adam"}
    return get_megatron_optimizer(config, [model], config_overrides=overrides)


def _is_rest(param: torch.nn.Parameter) -> bool:
    return getattr(param, "is_embedding_or_output_parameter", False) or param.dim() != 2


def _scheduler(is_ours: bool, optimizer: Any) -> Any:
    if is_ours:
        from megaopt_core import OptimizerParamScheduler
    else:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=3,
        lr_decay_steps=20,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=20,
        wd_incr_style="constant",
    )


def _losses(rank: int, size: int, parallel: dict, settings: dict, model: dict, ddp: dict) -> tuple:
    harness.start(**parallel)
    harness.accept_cpu_types()
    found = []
    for is_ours in (False, True):
        # Megatron's Muon steps learned position embeddings, ours leaves them to Adam.
        positions = "learned_absolute" if settings["optimizer"] == "adam" else "rope"
        chunk = harness.wrapped(harness.transformer_config(**model), positions=positions, **ddp)
        optimizer = _build(is_ours, chunk, settings)
        found.append(harness.losses_of(chunk, optimizer, STEPS, _scheduler(is_ours, optimizer)))
    return tuple(found)


def _require_equal(found: list[tuple], tolerance: float) -> None:
    for theirs, ours in found:
        assert theirs[-1] < theirs[0]
        assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize(
    ("size", "parallel", "model", "ddp"),
    [
        (2, {}, {}, {}),
        (2, {}, {}, {"overlap_grad_reduce": True, "bucket_size": 5000}),
        (2, {}, {}, {"use_distributed_optimizer": True}),
        (4, {"tp": 2}, {}, {}),
        (4, {"tp": 2}, {}, {"use_distributed_optimizer": True}),
        (2, {"pp": 2}, {}, {}),
        (4, {"pp": 2}, {}, {"use_distributed_optimizer": True}),
        (2, {"ep": 2}, harness.MOE, {}),
        (4, {"ep": 2}, harness.MOE, {"use_distributed_optimizer": True}),
        (
            2,
            {},
            {},
            {
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "bucket_size": 5000,
            },
        ),
    ],
    ids=str,
)
def test_adam(launch, size, parallel, model, ddp) -> None:
    """In fp32, over twenty steps, to a millionth."""
    shared = ("use_distributed_optimizer", "overlap_param_gather")
    settings = ADAM | {name: ddp.get(name, False) for name in shared}
    _require_equal(launch(_losses, size, parallel, settings, model, ddp), 1e-6)


@pytest.mark.parametrize(("size", "parallel"), [(2, {}), (4, {"tp": 2})], ids=str)
def test_muon(launch, size, parallel) -> None:
    """In fp32, with products in fp32, tensor parallelism as Megatron does it: block by block."""
    settings = ADAM | {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
    _require_equal(launch(_losses, size, parallel, settings, {}, {}), 1e-6)


def test_lion(launch) -> None:
    """In fp32, with Megatron's Adam beside it, which the page names: by its betas, and for what is no matrix."""
    settings = ADAM | {"optimizer": "lion", "lion_beta1": 0.9, "lion_beta2": 0.95}
    _require_equal(launch(_losses, 2, {}, settings, {}, {}), 1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_adam_in_16_bits(launch, dtype) -> None:
    """Without clipping, bit for bit at first; one last bit that differs then flips a rounding, and so the losses."""
    settings = ADAM | {"clip_grad": 0.0, dtype: True, "initial_loss_scale": 2.0**12}
    model = {"dtype": torch.bfloat16 if dtype == "bf16" else torch.float16}
    for theirs, ours in launch(_losses, 2, {}, settings, model, {"grad_reduce_in_fp32": True}):
        assert ours[:8] == pytest.approx(theirs[:8], rel=1e-6)
        assert theirs[7] < theirs[0]


LAYER_WISE = {"use_layer_wise_distributed_optimizer": True}


def _layer_wise(rank: int, size: int, parallel: dict, settings: dict) -> list[float]:
    harness.start(**parallel)
    chunk = harness.wrapped(harness.transformer_config(), positions="rope")
    optimizer = _build(True, chunk, settings)
    return harness.losses_of(chunk, optimizer, STEPS, _scheduler(True, optimizer))


@pytest.mark.parametrize(("size", "parallel"), [(2, {}), (4, {"tp": 2})], ids=str)
def test_layer_wise_muon(launch, size, parallel) -> None:
    """Owners step whole matrices of Megatron's wrapped model; losses are those of every rank stepping all."""
    settings = ADAM | {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "muon_tp_mode": "duplicated"}
    whole = launch(_layer_wise, size, parallel, settings)
    owned = launch(_layer_wise, size, parallel, settings | LAYER_WISE)
    assert owned == [pytest.approx(each, rel=1e-6) for each in whole]


def _hybrid(rank: int, size: int, model: dict, settings: dict, ddp: dict, ep: int) -> tuple:
    harness.start(ep=ep)
    harness.accept_cpu_types()
    found = []
    for is_ours in (False, True):
        config = harness.transformer_config(num_layers=4, **model)
        chunk = harness.wrapped(config, model=harness.hybrid(config), **ddp)
        optimizer = _build(is_ours, chunk, settings)
        found.append(harness.losses_of(chunk, optimizer, STEPS, _scheduler(is_ours, optimizer)))
    return tuple(found)


MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}


@pytest.mark.parametrize(
    ("model", "settings", "ddp", "ep"),
    [
        ({}, {"use_distributed_optimizer": True}, {"use_distributed_optimizer": True}, 1),
        ({}, MUON, {}, 1),
        (harness.MOE, MUON, {}, 1),
        (harness.MOE, MUON, {}, 2),
    ],
    ids=str,
)
def test_a_hybrid_model(launch, model, settings, ddp, ep) -> None:
    """Of attention and MLP or expert layers, routed: Mamba's need CUDA."""
    _require_equal(launch(_hybrid, 2, model, ADAM | settings, ddp, ep), 1e-6)
