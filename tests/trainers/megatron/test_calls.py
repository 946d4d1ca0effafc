"""The calls that Megatron's training loop and checkpoints make on an optimizer act, or say what to do instead."""

from typing import Any

import megatron_harness as harness
import pytest
import torch

pytestmark = pytest.mark.distributed


def _built(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any]:
    harness.start()
    from megaopt_trainers.megatron import get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig

    model = harness.wrapped(harness.transformer_config(dtype))
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, weight_decay=0.1, bf16=dtype == torch.bfloat16, **settings)
    return model, get_megatron_optimizer(config, [model])


def _error(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001 - returned
        return f"{type(error).__name__}: {error}"
    return ""


def _calls(rank: int, size: int) -> dict[str, Any]:
    model, optimizer = _built()
    losses = harness.losses_of(model, optimizer, range(2))
    optimizer.prepare_model_params_for_param_sync()
    state = optimizer.state_dict(is_loading=True)
    optimizer.load_state_dict(state)
    return {
        "loss": losses[-1] < losses[0],
        "stub": optimizer.is_stub_optimizer,
        "chained": [each is optimizer for each in optimizer.chained_optimizers],
        "inner": isinstance(optimizer.optimizer, torch.optim.Optimizer),
        "stats": optimizer.get_grad_stats_parallel_group().size(),
        "norms": optimizer.grad_norms_by_group,
        "scale": optimizer.get_loss_scale().item(),
        "grads": _error(optimizer.get_grads_for_grad_norm),
        "save": _error(optimizer.save_parameter_state, "file"),
        "load": _error(optimizer.load_parameter_state, "file"),
        "to_file": _error(optimizer.save_state_dict_to_file, "file"),
    }


def test_each_call_acts_or_names_the_way_out(launch) -> None:
    """On an optimizer of one part, which Megatron would have chained."""
    (found,) = launch(_calls, 1)
    assert found["loss"]
    assert found["inner"]
    assert (found["stub"], found["chained"], found["stats"]) == (False, [True], 1)
    assert (found["norms"], found["scale"]) == ({}, 1.0)
    way = "UnsupportedOperationError: "
    assert found["grads"].startswith(f"{way}get_grads_for_grad_norm: get_grad_norm() returns")
    for name in ("save", "load", "to_file"):
        assert found[name].startswith(way)
        assert "--ckpt-format torch_dist" in found[name]


def _reloaded(rank: int, size: int) -> list[bool]:
    model, optimizer = _built(torch.bfloat16)
    fine = {name: param.detach().float() + 1e-5 for name, param in model.module.module.named_parameters()}
    optimizer.reload_model_params(state_dict={"model": fine, "iteration": 3})
    mains = optimizer.get_main_params()
    return [any(torch.equal(main, value) for main in mains) for value in fine.values()]


def test_main_parameters_start_from_a_checkpoint_of_megatrons(launch) -> None:
    """Its names are a stage's own, under `model`."""
    (found,) = launch(_reloaded, 1)
    assert found
    assert all(found)


def _with_megatrons_scheduler(rank: int, size: int) -> list[list[float]]:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Theirs

    from megaopt_core import OptimizerParamScheduler as Ours

    found = []
    for scheduler in (Theirs, Ours):
        model, optimizer = _built()
        made = scheduler(optimizer, 0.0, 1e-3, 1e-4, 3, 20, "cosine", 0.1, 0.1, 20, "constant")
        harness.losses_of(model, optimizer, range(5), made)
        found.append(
            [value for group in optimizer.param_groups for value in (group["lr"], group["weight_decay"])]
        )
    return found


def test_megatrons_scheduler_drives_our_optimizer(launch) -> None:
    """Learning rates and weight decays are those of our scheduler."""
    ((theirs, ours),) = launch(_with_megatrons_scheduler, 1)
    assert theirs == pytest.approx(ours, rel=1e-12)
    assert min(theirs[::2]) > 0
