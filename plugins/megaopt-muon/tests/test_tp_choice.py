"""The choice between gathering a matrix and summing its Gram matrices."""

from types import SimpleNamespace

import pytest
import torch
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.tensor_parallel.tp_choice import choose_tp_mode
from torch import nn

from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = pytest.mark.any_python


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_short_dimension_that_stays_whole_is_summed(device, ranks):
    """Cut along the long dimension, Gram matrices are small; cut along the short one, they are as large as can be."""
    assert choose_tp_mode([(1024, 16384)], 1, ranks, 4, device) == "distributed"
    assert choose_tp_mode([(16384, 1024)], 0, ranks, 4, device) == "distributed"
    assert choose_tp_mode([(1024, 16384)], 0, ranks, 4, device) == "duplicated"
    assert choose_tp_mode([(16384, 1024)], 1, ranks, 4, device) == "duplicated"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_small_matrices_are_gathered(device):
    """Six collectives take longer than one where there is little to send."""
    assert choose_tp_mode([(64, 256)], 1, 4, 4, device) == "duplicated"


def test_all_matrices_of_a_weight_are_taken_alike():
    """Experts and pieces add up: many small ones are not one small one."""
    one, many = (choose_tp_mode([(*n, 64, 1024)], 1, 4, 4, "cuda") for n in ((), (4096,)))
    assert (one, many) == ("duplicated", "distributed")


def test_auto_chooses_for_each_parameter():
    """The plan of a parameter says which it takes."""
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 4, rank=lambda: 0))
    params = [nn.Parameter(torch.empty(4096, 64)), nn.Parameter(torch.empty(16, 8))]
    for param in params:
        param.param_info = ParamInfo("w", Role.MATRIX, MatrixView(), partition_dim=0)
    optimizer = TensorParallelMuon(params, pg_collection=groups, tp_mode="auto")
    assert [optimizer.planner.plan(param).cut.mode for param in params] == ["distributed", "duplicated"]
