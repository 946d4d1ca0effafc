"""A run that began with Megatron's own Adam goes on with ours from a checkpoint of its `dist_checkpointing`."""

from pathlib import Path
from typing import Any

import megatron_harness as harness
import pytest
import torch

pytestmark = pytest.mark.distributed

SCHEDULE = (0.0, 1e-3, 1e-4, 3, 20, "cosine", 0.1, 0.1, 20, "constant")
CASES = {
    "fp32": ({}, {}),
    "tensor parallel, bf16": ({"tp": 2}, {"bf16": True}),
    "distributed": ({}, {"use_distributed_optimizer": True}),
    "distributed, bf16": ({}, {"use_distributed_optimizer": True, "bf16": True}),
}


def _theirs(parallel: dict, settings: dict) -> tuple[Any, Any, Any]:
    """Return a wrapped model, Megatron's Adam of it, and what Megatron's checkpoints are told."""
    harness.start(**parallel)
    harness.accept_cpu_types()
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_cut = settings.get("use_distributed_optimizer", False)
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    config = harness.transformer_config(dtype)
    chunk = harness.wrapped(config, use_distributed_optimizer=is_cut, grad_reduce_in_fp32=True)
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, weight_decay=0.1, clip_grad=0.0, **settings)
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "dp_reshardable",
    }
    return chunk, get_megatron_optimizer(config, [chunk]), metadata


def _sharded(chunk: Any, optimizer: Any, metadata: Any, *, is_loading: bool = False) -> dict[str, Any]:
    model = chunk.module.sharded_state_dict(metadata=metadata)
    state = optimizer.sharded_state_dict({"model": model}, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": state}


def _begun(rank: int, size: int, folder: str, parallel: dict, settings: dict) -> list[float]:
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    chunk, optimizer, metadata = _theirs(parallel, settings)
    scheduler = OptimizerParamScheduler(optimizer, *SCHEDULE)
    harness.losses_of(chunk, optimizer, range(4), scheduler)
    dist_checkpointing.save(_sharded(chunk, optimizer, metadata), folder)
    return harness.losses_of(chunk, optimizer, range(4, 8), scheduler)


def _changed(rank: int, size: int, folder: str, parallel: dict, settings: dict, kind: str) -> tuple:
    """Load the checkpoint into Megatron's Adam, hand its state over to ours, and train."""
    from megaopt_trainers.megatron import get_megatron_optimizer
    from megaopt_trainers.midrun import take_over
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    chunk, old, metadata = _theirs(parallel, settings)
    # Without Transformer Engine, Megatron's distributed optimizer loads into states that are there.
    harness.losses_of(chunk, old, range(1))
    loaded = dist_checkpointing.load(_sharded(chunk, old, metadata, is_loading=True), folder)
    chunk.module.load_state_dict(loaded["model"])
    with torch.no_grad():
        old.load_state_dict(loaded["optimizer"])
    config = OptimizerConfig(
        optimizer=kind, lr=1e-3, min_lr=1e-4, weight_decay=0.1, clip_grad=0.0, **settings
    )
    optimizer = get_megatron_optimizer(config, [chunk])
    told = take_over(optimizer, old)
    main_values = [main for each in old.chained_optimizers for main in each.get_parameters()]
    is_same = {
        "states": _same_states(optimizer, old),
        "values": all(any(map(main.equal, main_values)) for main in optimizer.get_main_params()),
    }
    scheduler = OptimizerParamScheduler(optimizer, *SCHEDULE)
    scheduler.step(increment=4)
    return harness.losses_of(chunk, optimizer, range(4, 8), scheduler), told, is_same


def _same_states(optimizer: Any, old: Any) -> bool:
    """Return whether every first moment that ours has is one of Megatron's, bit for bit, and no zeros."""
    theirs = [state["exp_avg"] for each in old.chained_optimizers for state in each.optimizer.state.values()]
    mine = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
    return bool(mine) and all(each.any() and any(map(each.equal, theirs)) for each in mine)


@pytest.mark.parametrize("case", CASES)
def test_adam_goes_on_where_megatrons_was(launch, tmp_path: Path, case) -> None:
    """With its moments, its counts, its main parameters and its schedule."""
    expected = launch(_begun, 2, str(tmp_path), *CASES[case])
    found = launch(_changed, 2, str(tmp_path), *CASES[case], "adam")
    for theirs, (ours, told, is_same) in zip(expected, found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert (len(told.kept), told.anew) == (28, ())
        if "distributed" not in case:  # there, Megatron has parts in buffers
            assert is_same == {"states": True, "values": True}


@pytest.mark.parametrize("case", ["fp32", "tensor parallel, bf16"])
def test_muon_keeps_what_adam_steps_and_every_value(launch, tmp_path: Path, case) -> None:
    """Matrices begin anew, from main parameters that are not rounded, and the report says which."""
    launch(_begun, 2, str(tmp_path), *CASES[case])
    for losses, told, is_same in launch(_changed, 2, str(tmp_path), *CASES[case], "muon"):
        assert is_same == {"states": True, "values": True}
        assert len(told.anew) == 8
        assert {name.split(".")[-2] for name in told.anew} == {
            "linear_qkv",
            "linear_proj",
            "linear_fc1",
            "linear_fc2",
        }
        assert losses[-1] < losses[0]


def _of_layer_wise(rank: int, size: int) -> str:
    harness.start()
    harness.accept_cpu_types()
    from megaopt_trainers.megatron import get_megatron_optimizer
    from megaopt_trainers.midrun import take_over
    from megatron.core import optimizer as megatron

    from megaopt_core.errors import UnsupportedOperationError

    chunk = harness.wrapped(harness.transformer_config(), positions="rope")
    config = megatron.OptimizerConfig(optimizer="muon", lr=1e-3, use_layer_wise_distributed_optimizer=True)
    old = megatron.get_megatron_optimizer(config, [chunk])
    optimizer = get_megatron_optimizer(config, [chunk])
    try:
        take_over(optimizer, old)
    except UnsupportedOperationError as error:
        return str(error)
    return ""


def test_states_that_have_owners_are_refused(launch) -> None:
    """With the way out."""
    for said in launch(_of_layer_wise, 2):
        assert (
            "LayerWiseDistributedOptimizer: load its checkpoint into an optimizer of Megatron's without"
            in said
        )
