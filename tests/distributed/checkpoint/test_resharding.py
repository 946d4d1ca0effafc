"""Checkpoints over real processes: any number of ranks to any other, one file a rank, one error for all."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[3] / "plugins/megaopt-checkpoint/tests"))

from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.manifest import read_manifest
from random_cuts import random_cuts
from training import gathered, make, same, train, values

from megaopt_core.errors import CheckpointBusyError, CheckpointCorruptError, CheckpointError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def hop(
    rank: int,
    size: int,
    source: str | None,
    target: str,
    sharding: str,
    steps: range,
    settings: Mapping[str, Any],
) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[dict[str, torch.Tensor], ...]]:
    """Load, train, save; return what was loaded and what was saved."""
    seeds = [int(sharding.removeprefix("cut"))] if sharding.startswith("cut") else []
    with random_cuts(*seeds):
        model, optimizer = make(seed=rank if source else 0, sharding=sharding, **settings)
        if source:
            load_checkpoint(source, model, optimizer)
        loaded = gathered(optimizer), values(model)
        train(model, optimizer, steps)
        save_checkpoint(target, model, optimizer, extra={"steps": steps.stop})
        return loaded, (gathered(optimizer), values(model))


def test_two_to_four_to_one_to_three_ranks(launch, tmp_path):
    """The gathered state is bit-equal after every hop, and so is training with given gradients."""
    settings = {"dtype": torch.bfloat16}
    before, source, step = None, None, 0
    for size, sharding in ((2, "cut5"), (4, "cut6"), (1, "replicated"), (3, "cut7")):
        target = str(tmp_path / f"{size}")
        results = launch(hop, size, source, target, sharding, range(step, step + 2), settings)
        for loaded, _ in results:
            assert before is None or (same(loaded[0], before[0]) and same(loaded[1], before[1]))
        before, source, step = results[0][1], target, step + 2
        assert read_manifest(target).world_size == size
    alone = launch(hop, 1, None, str(tmp_path / "alone"), "replicated", range(8), settings)
    for expected, found in zip(alone[0][1], before, strict=True):
        for (
            name,
            value,
        ) in expected.items():  # vectorized steps of pieces that are cut anywhere differ in the last bit
            torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-5, atol=1e-6)


def test_distributed_strategy_both_ways(launch, tmp_path):
    """The strategy that people use, from 2 ranks to 3, and to a replicated optimizer."""
    if not _has_distributed():
        pytest.skip("megaopt-distributed is not installed")
    saved = launch(hop, 2, None, str(tmp_path / "a"), "distributed", range(3), {})[0][1]
    for size, sharding in ((3, "distributed"), (1, "replicated")):
        for loaded, _ in launch(
            hop, size, str(tmp_path / "a"), str(tmp_path / "b"), sharding, range(3, 4), {}
        ):
            assert same(loaded[0], saved[0])
            assert same(loaded[1], saved[1])


def _has_distributed() -> bool:
    from megaopt_core import get_registry

    return "distributed" in get_registry().strategies()


def hop_in_buffers(
    rank: int, size: int, source: str | None, target: str, ddp: Mapping[str, Any]
) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[dict[str, torch.Tensor], ...]]:
    """As `hop`, under megaopt's own wrapper, where parameters are views of buffers."""
    from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megaopt_core import build_optimizer

    settings = {"lr": 1e-2, "clip_grad": 0.0, "bf16": True}
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, **ddp)
    bare, _ = make(seed=rank if source else 0, dtype=torch.bfloat16)
    model = DistributedDataParallel(bare, config)
    gather = ddp.get("overlap_param_gather", False)
    optimizer = build_optimizer(
        model, "adam", sharding="distributed", overlap_param_gather=gather, **settings
    )
    if source:
        load_checkpoint(source, model, optimizer)
    model.finish_param_sync()
    loaded = gathered(optimizer), values(model.module)
    for step in range(2):
        tokens = torch.arange(8)[None] + step
        model(tokens).float().logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(target, model, optimizer)  # parameters may still be on their way
    return loaded, (gathered(optimizer), values(model.module))


def test_buffers_of_other_sizes(launch, tmp_path):
    """Two ranks with one bucket, three with many, and back to a replicated optimizer."""
    if not _has_distributed():
        pytest.skip("megaopt-distributed is not installed")
    saved = launch(hop_in_buffers, 2, None, str(tmp_path / "a"), {})[0][1]
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 400}
    for loaded, _ in launch(hop_in_buffers, 3, str(tmp_path / "a"), str(tmp_path / "b"), ddp):
        assert same(loaded[0], saved[0])
        assert same(loaded[1], saved[1])
    again = launch(
        hop, 1, str(tmp_path / "b"), str(tmp_path / "c"), "replicated", range(1), {"dtype": torch.bfloat16}
    )
    three = read_manifest(tmp_path / "b")
    assert three.world_size == 3
    assert all(not value.isnan().any() for value in again[0][0][0].values())


def save_replicated(rank: int, size: int, path: str) -> None:
    """Save what all ranks hold alike."""
    model, optimizer = make()
    train(model, optimizer, range(1))
    save_checkpoint(path, model, optimizer)


def test_replicas_are_saved_once_and_by_all(launch, tmp_path):
    """The files together have the bytes of one replica, about the same in each."""
    launch(save_replicated, 2, str(tmp_path / "two"))
    launch(save_replicated, 1, str(tmp_path / "one"))
    two, one = read_manifest(tmp_path / "two"), read_manifest(tmp_path / "one")
    assert two.nbytes == one.nbytes
    assert len(two.files) == 2
    assert max(two.files.values()) < 0.6 * two.nbytes


def errors_of_ranks(rank: int, size: int, folder: str) -> list[str]:
    """Return the words that each rank hears of several failures."""
    heard = []

    def catch(expected, action):
        try:
            action()
        except expected as error:
            heard.append(str(error))
        else:
            heard.append("nothing")

    model, optimizer = make(sharding="replicated")
    before = values(model)
    save_checkpoint(f"{folder}/good", model, optimizer)
    train(model, optimizer, range(1))
    now = values(model)
    # One rank cannot encode what it is given.
    catch(
        CheckpointError,
        lambda: save_checkpoint(f"{folder}/good", model, optimizer, extra=None if rank else object()),
    )
    # Somebody else holds the lock.
    if rank == 0:
        from megaopt_checkpoint.staging import begin

        held = ExitStack()
        begin(Path(folder) / "busy", held)
    dist.barrier()
    catch(CheckpointBusyError, lambda: save_checkpoint(f"{folder}/busy", model, optimizer))
    dist.barrier()
    if rank == 0:
        held.close()
        with Path(folder, "good", "rank-00001.bin").open("r+b") as file:
            file.seek(11)
            byte = file.read(1)[0]
            file.seek(11)
            file.write(bytes([byte ^ 4]))
    dist.barrier()
    catch(CheckpointCorruptError, lambda: load_checkpoint(f"{folder}/good", model, optimizer))
    assert same(values(model), now)
    assert not same(now, before)
    if rank == 0:
        Path(folder, "good", "rank-00001.bin").unlink()
    dist.barrier()
    catch(CheckpointCorruptError, lambda: load_checkpoint(f"{folder}/good", model, optimizer))
    return heard


def test_every_rank_hears_the_same_error(launch, tmp_path):
    """A failure on one rank ends the call on all of them, with the same words, and changes nothing."""
    first, second = launch(errors_of_ranks, 2, str(tmp_path))
    assert first == second
    assert "extra is a builtins.object" in first[0]
    assert "this process is still saving" in first[1]
    assert "rank-00001.bin is damaged" in first[2]
    assert "rank-00001.bin is missing: rank 1 of 2" in first[3]


def async_rounds(rank: int, size: int, folder: str) -> bool:
    """Save in the background while training goes on; return whether the saved state is that of the call."""
    with random_cuts(9):
        model, optimizer = make(sharding="cut9")
        train(model, optimizer, range(2))
        expected = gathered(optimizer), values(model)
        pending = save_checkpoint(f"{folder}/last", model, optimizer, async_save=True)
        train(model, optimizer, range(2, 6))
        pending.result()
        load_checkpoint(f"{folder}/last", model, optimizer)
        return same(gathered(optimizer), expected[0]) and same(values(model), expected[1])


def test_async_save_keeps_the_state_of_its_call(launch, tmp_path):
    """Steps and collectives of training do not meet those of the save."""
    assert launch(async_rounds, 2, str(tmp_path)) == [True, True]
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def stateful(
    rank: int, size: int, folder: str, sharding: str, load: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Save or load with torch's own functions."""
    with random_cuts(*([int(sharding.removeprefix("cut"))] if sharding.startswith("cut") else [])):
        model, optimizer = make(seed=rank if load else 0, sharding=sharding, dtype=torch.bfloat16)
        state = {"model": model, "optim": optimizer.checkpoint_state()}
        if load:
            dcp.load(state, checkpoint_id=folder)
        else:
            train(model, optimizer, range(2))
            dcp.save({"model": model, "optim": optimizer.checkpoint_state()}, checkpoint_id=folder)
        return gathered(optimizer), values(model)


def test_torch_saves_and_loads_slices(launch, tmp_path):
    """`dcp.save` on two ranks, `dcp.load` on three that are cut elsewhere."""
    saved = launch(stateful, 2, str(tmp_path / "dcp"), "cut1", False)[0]
    for loaded in launch(stateful, 3, str(tmp_path / "dcp"), "cut2", True):
        assert same(loaded[0], saved[0])
        assert same(loaded[1], saved[1])


def test_states_in_eight_bits_resume_and_are_cut_elsewhere(launch, tmp_path):
    """Two ranks that stop and go on have the bits of two that do not; four ranks go on from there."""
    settings = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"}
    whole, half, rest, four = (str(tmp_path / name) for name in ("whole", "half", "rest", "four"))
    expected = launch(hop, 2, None, whole, "cut5", range(6), settings)[0][1]
    saved = launch(hop, 2, None, half, "cut5", range(3), settings)[0][1]
    found = launch(hop, 2, half, rest, "cut5", range(3, 6), settings)[0][1]
    assert same(expected[0], found[0])
    assert same(expected[1], found[1])
    loaded = launch(hop, 4, half, four, "cut6", range(3, 4), settings)[0][0]
    assert same(saved[1], loaded[1])
    assert all(value.isfinite().all() for value in loaded[0].values())
