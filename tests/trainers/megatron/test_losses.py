"""Losses of our optimizers under Megatron's training loop are those of Megatron's own, by one changed import."""

from typing import Any

import harness
import pytest

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
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    config = OptimizerConfig(**settings)
    return get_megatron_optimizer(config, [model], config_overrides=get_standard_config_overrides(config))


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
        chunk = harness.wrapped(harness.transformer_config(**model), **ddp)
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
