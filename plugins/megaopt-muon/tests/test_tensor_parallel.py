"""Tensor parallelism on real process groups gives what one process gives."""

from types import SimpleNamespace

import pytest
import torch
from long_runs import sometimes
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.pieces.groups import tensor_parallel_groups
from megaopt_testing.processes import run_ranks
from tensor_parallel_worker import differences
from torch import nn

from megaopt_core.errors import ParallelGroupError, ViewError
from megaopt_core.parallel import ProcessGroupCollection
from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = pytest.mark.any_python


@pytest.mark.distributed
@pytest.mark.parametrize("world", sometimes([2, 4], [4]))
def test_ranks_agree_with_one_process(world: int) -> None:
    """Every mode, cut and view on 2 and 4 ranks is within 1e-5 of one process; blockwise of the shard's formula."""
    # Where the sums of `distributed` are rounded to bfloat16, an element of an orthogonalized matrix, at most about
    # 1, is within one bfloat16 step of 1.
    results = run_ranks(differences, world)
    assert len(results[0]) > 50
    bfloat16 = torch.finfo(torch.bfloat16).eps
    too_far = {
        (case, rank): got
        for rank, cases in enumerate(results)
        for case, got in cases.items()
        if not got <= (bfloat16 if case.startswith("medium in bfloat16 distributed") else 1e-5)
    }
    assert not too_far


def test_blockwise_refuses_a_cut_through_the_pieces():
    """A shard that holds parts of several matrices cannot be taken blockwise; the error says what can."""
    param = nn.Parameter(torch.ones(8, 8))
    param.param_info = ParamInfo("w", Role.MATRIX, MatrixView(split_sizes=(8, 8)), partition_dim=0)
    param.grad = torch.ones(8, 8)
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    with pytest.raises(ViewError, match=r"cuts through its pieces.*'duplicated'"):
        TensorParallelMuon([param], pg_collection=groups, tp_mode="blockwise").step()


def group(size: int) -> SimpleNamespace:
    """Return what stands for a process group of this size."""
    return SimpleNamespace(size=lambda: size)


def test_groups_are_found_by_attribute():
    """Any object with the attributes will do; without one there is no group."""
    dense, expert = group(2), group(4)
    assert tensor_parallel_groups(None) == (None, None)
    assert tensor_parallel_groups(SimpleNamespace(tp=dense, expt_tp=expert)) == (dense, expert)
    assert tensor_parallel_groups(SimpleNamespace(expt_tp=expert)) == (None, expert)


def test_experts_are_cut_as_everything_else_by_default():
    """A collection without a group for experts means the dense one."""
    dense = group(2)
    for groups in ({"tp": dense}, SimpleNamespace(tp=dense), ProcessGroupCollection(tp=dense)):
        assert tensor_parallel_groups(groups) == (dense, dense)


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
def test_a_dense_parameter_that_is_cut_needs_its_group(cls):
    """With the experts' group alone nobody knows whether a dense parameter is whole; the error says what to give."""
    param = nn.Parameter(torch.ones(8, 8))
    param.partition_dim = 0
    for mode in ("duplicated", "distributed"):
        with pytest.raises(
            ParallelGroupError, match=r"shape \(8, 8\) has partition_dim=0.*expt_tp \(2 ranks\).*give tp"
        ):
            cls([param], pg_collection={"expt_tp": group(2)}, tp_mode=mode)
    cls([param], pg_collection={"expt_tp": group(2)}, tp_mode="blockwise")
    cls([param], pg_collection={"expt_tp": group(2), "tp": group(1)})
    cls([param], pg_collection={"expt_tp": group(1)})
    cls([param])
    cls([nn.Parameter(torch.ones(8, 8))], pg_collection={"expt_tp": group(2)})


def test_one_rank_takes_part_in_no_collective():
    """A tensor-parallel group of one rank is no cut."""
    param = nn.Parameter(torch.ones(8, 8))
    param.partition_dim = 0
    param.grad = torch.eye(8)
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    TensorParallelMuon([param], pg_collection=groups, tp_mode="distributed").step()
    assert param.isfinite().all()
