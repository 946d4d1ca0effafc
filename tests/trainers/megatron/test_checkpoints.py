"""Megatron's `dist_checkpointing` saves and loads model, optimizer and scheduler, at any number of ranks."""

from pathlib import Path
from typing import Any

import megatron_harness as harness
import pytest

pytestmark = pytest.mark.distributed


def _build(parallel: dict, settings: dict, *, tied: bool = True, **model: Any) -> tuple[Any, Any, Any]:
    harness.start(**parallel)
    from megaopt_trainers.megatron import get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig

    from megaopt_core import OptimizerParamScheduler

    scatters = settings.get("use_distributed_optimizer", False)
    chunk = harness.wrapped(
        harness.transformer_config(**model), tied=tied, use_distributed_optimizer=scatters
    )
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, weight_decay=0.1, **settings)
    optimizer = get_megatron_optimizer(config, [chunk])
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-3, 1e-4, 3, 20, "cosine", 0.1, 0.1, 20, "constant")
    return chunk, optimizer, scheduler


def _sharded(chunk: Any, optimizer: Any, scheduler: Any, *, is_loading: bool = False) -> dict[str, Any]:
    """Return what Megatron's `generate_state_dict` does."""
    from megatron.core import parallel_state

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    model = chunk.module.sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer.sharded_state_dict({"model": model}, is_loading=is_loading, metadata=metadata),
        "opt_param_scheduler": scheduler.state_dict(),
    }


def _save(rank: int, size: int, folder: str, parallel: dict, settings: dict, tied: bool) -> list[float]:
    from megatron.core import dist_checkpointing

    chunk, optimizer, scheduler = _build(parallel, settings, tied=tied)
    harness.losses_of(chunk, optimizer, range(4), scheduler, global_batch=True)
    dist_checkpointing.save(_sharded(chunk, optimizer, scheduler), folder)
    return harness.losses_of(chunk, optimizer, range(4, 8), scheduler, global_batch=True)


def _resume(rank: int, size: int, folder: str, parallel: dict, settings: dict, tied: bool) -> list[float]:
    from megatron.core import dist_checkpointing

    chunk, optimizer, scheduler = _build(parallel, settings, tied=tied)
    loaded = dist_checkpointing.load(_sharded(chunk, optimizer, scheduler, is_loading=True), folder)
    chunk.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    return harness.losses_of(chunk, optimizer, range(4, 8), scheduler, global_batch=True)


SCATTERED = {"use_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((2, {}, SCATTERED), (2, {}, SCATTERED)),
        ((2, {}, SCATTERED), (1, {}, {})),
        ((2, {}, {}), (4, {"tp": 2}, SCATTERED)),
        ((4, {"pp": 2}, SCATTERED), (2, {}, {})),
    ],
    ids=str,
)
def test_a_run_goes_on_at_any_number_of_ranks(launch, tmp_path: Path, saved, resumed) -> None:
    """Losses after the resume are those of the run that was not interrupted."""
    folder = tmp_path / "step4"
    folder.mkdir()
    tied = {"pp": 2} not in (saved[1], resumed[1])
    expected = launch(_save, saved[0], str(folder), *saved[1:], tied)
    actual = launch(_resume, resumed[0], str(folder), *resumed[1:], tied)
    for losses in actual:
        assert losses == pytest.approx(expected[0], rel=1e-6)
    if saved == resumed:
        assert actual == expected


@pytest.mark.parametrize("kind", ["adam", "muon"])
@pytest.mark.parametrize(
    ("saved", "resumed"), [((4, {"pp": 2}), (2, {})), ((2, {}), (4, {"pp": 2}))], ids=str
)
def test_tied_embeddings_go_on_with_another_number_of_stages(
    launch, tmp_path: Path, saved, resumed, kind
) -> None:
    """The last stage's copy of the table is the table: it is saved once, and read where either is."""
    settings = {"optimizer": kind, "muon_fp32_matmul_prec": "highest"} if kind == "muon" else {}
    expected = launch(_save, saved[0], str(tmp_path), saved[1], settings, True)
    actual = launch(_resume, resumed[0], str(tmp_path), resumed[1], settings, True)
    for losses in actual:
        assert losses == pytest.approx(expected[0], rel=1e-6)


def _half(rank: int, size: int, folder: str) -> tuple:
    """Load a checkpoint of another model."""
    from megatron.core import dist_checkpointing

    _, optimizer, _ = _build({}, {}, hidden_size=64)
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    state = {"optimizer": optimizer.sharded_state_dict({}, is_loading=True)}
    try:
        optimizer.load_state_dict(dist_checkpointing.load(state, folder)["optimizer"])
    except BaseException as error:  # noqa: BLE001 - torch's own is none of Exception
        same = all(
            (now["exp_avg"] == old).all() for now, old in zip(optimizer.state.values(), before, strict=True)
        )
        return type(error).__name__, same
    return None, False


def test_a_checkpoint_that_does_not_fit_changes_nothing(launch, tmp_path: Path) -> None:
    """Megatron refuses shapes that differ, before anything of ours has changed."""
    launch(_save, 1, str(tmp_path), {}, {}, True)
    ((error, is_unchanged),) = launch(_half, 1, str(tmp_path))
    assert error is not None
    assert is_unchanged
