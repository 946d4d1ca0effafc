"""Ranks with unlike calibrations, or none, iterate Muon's matrices alike: as the first rank's says, or measures."""

import os
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("megaopt_muon")
from launch import RankError, launch
from megaopt_muon.choice import calibration, first_rank
from megaopt_muon.choice.rates import Rates
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.products import precision
from megaopt_muon.products.onednn import is_multiplied

from megaopt_core import ProcessGroupCollection, build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

SHAPE = (256, 512)
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "clip_grad": 0.0, "muon_tp_mode": "duplicated"}
PLANS = ("256x512:gram", "256x512:plain")
SQUARE = (1e-14, 1e-10)
"""Seconds for a multiplication of square matrices: cheap on rank 0, which chooses `gram`, and dear on rank 1."""


def calibrated(rank: int, folder: str) -> None:
    """Give this rank a calibration of its own, on a processor that multiplies bfloat16."""
    precision.multiplies_bfloat16 = lambda: True
    os.environ[calibration.VARIABLE] = f"{folder}/{rank}.json"
    rates = Rates(size=256, gram=1e-11, square=SQUARE[rank], apply=1e-11, pass_=1e-13)
    calibration.calibrated = lambda: (rates,)
    calibration.write_calibration()


def tensors() -> tuple[torch.Tensor, ...]:
    """Return a matrix and two gradients, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, *SHAPE, generator=generator).unbind()


def trained(
    start: torch.Tensor,
    grads: Iterable[torch.Tensor],
    groups: ProcessGroupCollection,
    sharding: str | None = None,
    *,
    is_cut: bool = False,
    **settings: str,
) -> tuple[set[str], torch.Tensor]:
    """Return the plans by which a built Muon iterates, and the weight after its steps."""
    rows, columns = start.shape
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    weight = model[0].weight
    weight.data.copy_(start)
    weight.use_muon = True
    if is_cut:
        weight.tensor_model_parallel, weight.partition_dim = True, 0
    optimizer = build_optimizer(
        model, "muon", pg_collection=groups, sharding=sharding, **SETTINGS, **settings
    )
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    plans = {group["ns_plan"] for part in optimizer.parts for group in part.inner.param_groups}
    return plans, weight.detach()


def stepped(rank: int, size: int, folder: str, how: str) -> tuple[set[str], torch.Tensor, torch.Tensor]:
    """Return this rank's plans, its weight, and what it is where all ranks have rank 0's calibration."""
    calibrated(rank, folder)
    whole, world = tensors(), dist.group.WORLD
    is_cut = how == "duplicated"
    own = [tensor.chunk(size)[rank] for tensor in whole] if is_cut else whole
    groups = ProcessGroupCollection(tp=world) if is_cut else ProcessGroupCollection(dp=world, dp_cp=world)
    sharding = "layer_wise" if how == "owned" else None
    plans, weight = trained(own[0], own[1:], groups, sharding, is_cut=is_cut)
    dist.barrier()
    os.environ[calibration.VARIABLE] = f"{folder}/0.json"
    _, expected = trained(own[0], own[1:], groups, sharding, is_cut=is_cut)
    return plans, weight, expected


@pytest.mark.parametrize("how", ["replicated", "duplicated", "owned"])
def test_the_first_rank_chooses(tmp_path, how):
    """Replicas, tensor-parallel ranks and owners take its plan, and get the bits that its calibration gives on all."""
    if how == "owned":
        pytest.importorskip("megaopt_layerwise")
    results = launch(stepped, 2, str(tmp_path), how)
    stepping = results if how != "owned" else results[:1]  # a matrix has one owner
    assert [plans for plans, _, _ in stepping] == [{PLANS[0]}] * len(stepping)
    for _, weight, expected in results:
        assert torch.equal(weight, expected)
    if how != "duplicated":
        assert torch.equal(results[0][1], results[1][1])


def test_the_plans_would_differ(tmp_path):
    """By itself, each rank chooses by its own file."""
    assert launch(own_plan, 2, str(tmp_path)) == list(PLANS)


def own_plan(rank: int, size: int, folder: str) -> str:
    """Return what a rank chooses that settles nothing with the others."""
    del size
    calibrated(rank, folder)
    param = nn.Parameter(tensors()[0])
    param.grad = tensors()[1]
    optimizer = TensorParallelMuon([param])
    optimizer.step()
    return optimizer.param_groups[0]["ns_plan"]


def broken_on_one(rank: int, size: int, folder: str) -> None:
    """Build where the second rank's file is broken."""
    del size
    calibrated(rank, folder)
    if rank == 1:
        calibration.calibration_path().write_text("{")
        calibration.stored_rates_of.cache_clear()
    build_optimizer(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "muon", lr=0.1)


def test_a_broken_file_on_one_rank_is_told_on_all(tmp_path):
    """Nobody waits for the rank that cannot read its calibration."""
    with pytest.raises(RankError) as told:
        launch(broken_on_one, 2, str(tmp_path), group_timeout=60.0)
    assert "rank 0: " in str(told.value)
    assert "rank 1 cannot route its parameters: ConfigurationError: MEGAOPT_CALIBRATION=" in str(told.value)


def measured_by_first(
    rank: int, size: int, cut: bool, folder: str, precision_: str, deterministic: int | None, stored: bool
) -> tuple[set[str], torch.Tensor]:
    """Return plans and weight where the second rank would measure something else."""
    precision.multiplies_bfloat16 = first_rank.multiplies_bfloat16 = lambda: True
    os.environ.pop(calibration.VARIABLE, None)
    os.environ["XDG_CACHE_HOME"] = folder
    rates = Rates(size=384, gram=1e-11, square=SQUARE[rank], apply=1e-11, pass_=1e-13)
    first_rank.probed_rates = lambda: rates
    first_rank.probed_shares = lambda rows: {128: (0.5, 1.0)[rank]} if rows >= 128 else {}
    if stored and rank == 0:
        calibration.calibrated = lambda: (
            Rates(size=384, gram=1e-11, square=1e-10, apply=1e-11, pass_=1e-13),
        )
        calibration.write_calibration()
    if rank == deterministic:
        torch.use_deterministic_algorithms(True)
    whole, world = tensors(), dist.group.WORLD
    own = [tensor.chunk(size)[rank] for tensor in whole] if cut else whole
    groups = ProcessGroupCollection(tp=world) if cut else ProcessGroupCollection(dp=world, dp_cp=world)
    settings = {"muon_fp32_matmul_prec": precision_}
    return trained(own[0], own[1:], groups, is_cut=cut, **settings)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("precision_", "deterministic", "stored", "plan"),
    [
        ("highest", None, False, "256x512:gram+onednn"),
        ("highest", 1, False, "256x512:gram"),
        ("highest", None, True, "256x512:gram+onednn"),
        ("medium", None, False, "256x512:gram"),
        ("medium", None, True, "256x512:plain"),
    ],
)
def test_the_first_rank_measures_for_all(tmp_path, cut, precision_, deterministic, stored, plan):
    """What is not stored, unless some rank is to be deterministic: then torch multiplies, by rates that are assumed."""
    if plan.endswith("onednn") and not is_multiplied(256, torch.float32, torch.device("cpu")):
        pytest.skip("this torch has no such products")
    results = launch(measured_by_first, 2, cut, str(tmp_path), precision_, deterministic, stored)
    assert [plans for plans, _ in results] == [{plan}] * 2
    if not cut:
        assert torch.equal(results[0][1], results[1][1])


def unable(rank: int, size: int, folder: str) -> None:
    """Build where the first rank cannot measure."""
    del size

    def fail(rows: int) -> None:
        raise MemoryError(f"no room for {rows} rows")

    os.environ.pop(calibration.VARIABLE, None)
    os.environ["XDG_CACHE_HOME"] = folder
    if rank == 0:
        first_rank.probed_shares = fail
    build_optimizer(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "muon", lr=0.1, muon_fp32_matmul_prec="highest"
    )


def test_a_first_rank_that_cannot_measure_is_told_on_all(tmp_path):
    """Nobody waits for what it will not say."""
    with pytest.raises(RankError) as told:
        launch(unable, 2, str(tmp_path), group_timeout=60.0)
    assert "cannot measure how fast this processor multiplies: MemoryError: no room" in str(told.value)
    assert "rank 1: " in str(told.value)
