"""Attention heads that are orthogonalized one by one."""

from types import SimpleNamespace

import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.scale import get_muon_scale_factor
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError, ViewError
from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = pytest.mark.any_python

QKV = MatrixView(split_sizes=(8, 4, 4), head_sizes=(4, 4, 4), fused="qkv")
VIEWS = {
    "projection": (MatrixView(head_sizes=(4,)), (12, 10)),
    "stored [in, out]": (MatrixView(transposed=True, head_sizes=(4,)), (10, 12)),
    "q, k and v side by side": (MatrixView(split_sizes=(8, 8, 4), head_sizes=(4, 4, 2)), (20, 10)),
    "query groups": (QKV, (48, 10)),
    "latent keys and values": (MatrixView(split_sizes=(3, 5), head_sizes=(3, 5)), (24, 10)),
    "experts": (MatrixView(batch_dims=1, head_sizes=(4,)), (3, 12, 10)),
    "a kernel": (MatrixView(head_sizes=(4,)), (12, 5, 2)),
    "output projection": (MatrixView(head_columns=4), (10, 12)),
    "output projection, stored [in, out]": (MatrixView(transposed=True, head_columns=4), (12, 10)),
    "output projection, stored [heads, size, out]": (
        MatrixView(transposed=True, head_columns=4, first_dims=2),
        (3, 4, 10),
    ),
    "output projections of experts": (MatrixView(batch_dims=1, head_columns=6), (3, 10, 12)),
}


def heads_of(stored: torch.Tensor, view: MatrixView) -> list[torch.Tensor]:
    """Return every head of a stored tensor, cut out by the numbers of its rows or columns."""
    end = view.batch_dims + view.first_dims
    rows = stored.flatten(end).flatten(view.batch_dims, end - 1)
    rows = rows.mT if view.transposed else rows
    if view.head_columns:
        return list(rows.split(view.head_columns, dim=-1))
    sizes = view.split_sizes or (rows.shape[-2],)
    found, start = [], 0
    while start < rows.shape[-2]:
        for size, head in zip(sizes, view.head_sizes, strict=True):
            found += [rows[..., at : at + head, :] for at in range(start, start + size, head)]
            start += size
    return found


@pytest.mark.parametrize("case", VIEWS)
def test_pieces_are_batches_of_heads(case):
    """Read in order they are the heads by row number, and fold puts back what was read."""
    view, shape = VIEWS[case]
    stored = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    read = [
        head
        for piece in view.windows(shape, by_head=True)
        for head in piece.read(stored).unbind(view.batch_dims)
    ]
    expected = heads_of(stored, view)
    assert len(read) == len(expected)
    assert all(any(torch.equal(one, other) for other in expected) for one in read)
    for piece in view.windows(shape, by_head=True):
        assert torch.equal(piece.fold(piece.read(stored)), piece.window(stored))


@pytest.mark.parametrize("case", VIEWS)
@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_each_head_is_a_matrix_by_itself(case, precision, formulas):
    """Orthogonalized and scaled as one of its own size, by the formula in float64."""
    view, shape = VIEWS[case]
    param = nn.Parameter(torch.zeros(shape))
    param.param_info = ParamInfo("w", Role.MATRIX, view)
    optimizer = TensorParallelMuon(
        [param],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        split="per_head",
        split_qkv=True,
        fp32_matmul_prec=precision,
    )
    param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    for changed, grad in zip(heads_of(param.detach(), view), heads_of(param.grad, view), strict=True):
        scale = get_muon_scale_factor(*grad.shape[-2:])
        exact = formulas.newton_schulz64(grad, optimizer.newton_schulz.coefficients)
        tolerance = 1e-5 if precision == "highest" else 5 * torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(-changed.double() / scale, exact, rtol=0, atol=tolerance)


def test_heads_are_whole_matrices_unless_asked_for():
    """The default takes fused weights apart, not heads; `none` takes nothing apart."""
    shapes = {}
    for split in ("fused", "per_head", "none"):
        param = nn.Parameter(torch.zeros(48, 10))
        param.param_info = ParamInfo("w", Role.MATRIX, QKV)
        optimizer = TensorParallelMuon([param], split=split, split_qkv=True)
        shapes[split] = [piece.shape for piece in optimizer.planner.plan(param).pieces]
    assert shapes == {
        "fused": [(24, 10), (12, 10), (12, 10)],
        "per_head": [(6, 4, 10), (3, 4, 10), (3, 4, 10)],
        "none": [(48, 10)],
    }
    with pytest.raises(ConfigurationError, match="split='heads': must be one of"):
        TensorParallelMuon([nn.Parameter(torch.zeros(2, 2))], split="heads")


def test_gate_and_up_stay_together_where_nothing_is_split():
    """Of a fused gate and up as well."""
    param = nn.Parameter(torch.zeros(16, 10))
    param.param_info = ParamInfo("w", Role.MATRIX, MatrixView(split_sizes=(8, 8), fused="gate_up"))
    plans = {
        split: TensorParallelMuon([param], split=split).planner.plan(param) for split in ("fused", "none")
    }
    assert [len(plans[split].pieces) for split in ("fused", "none")] == [2, 1]


def test_groups_without_a_view_have_a_head_of_keys_each():
    """`qkv_split_shapes` are query groups, so that the rows of a key are those of a head."""
    param = nn.Parameter(torch.zeros(48, 10))
    optimizer = TensorParallelMuon(
        [param], split="per_head", split_qkv=True, is_qkv_fn=lambda _: True, qkv_split_shapes=(8, 4, 4)
    )
    assert [piece.shape for piece in optimizer.planner.plan(param).pieces] == [
        (6, 4, 10),
        (3, 4, 10),
        (3, 4, 10),
    ]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_head_that_ranks_cut_is_gathered_or_refused(dim):
    """Whole heads need no other rank; a cut through one is gathered, and blockwise refuses it."""
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    kinds = {}
    for rows in (8, 6):
        param = nn.Parameter(torch.zeros((rows, 10) if dim == 0 else (10, rows)))
        view = MatrixView(head_sizes=(4,)) if dim == 0 else MatrixView(head_columns=4)
        param.param_info = ParamInfo("w", Role.MATRIX, view, partition_dim=dim)
        plan = TensorParallelMuon([param], pg_collection=groups, split="per_head").planner.plan(param)
        kinds[rows] = plan.gather_first, plan.cut.mode
    assert kinds == {8: (False, "whole"), 6: (True, "duplicated")}
    with pytest.raises(ViewError, match="cuts through its pieces"):
        TensorParallelMuon([param], pg_collection=groups, split="per_head", tp_mode="blockwise").planner.plan(
            param
        )


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_multihead_attention_steps_by_heads(name):
    """Torch's own module tells its heads; the report counts them."""
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    optimizer = build_optimizer(model, name, lr=0.1, muon_split="per_head")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    # The plan stands before them where one was measured to be faster than the plain iteration.
    notes = {row.name: row.note.split("; ")[-1] for row in optimizer.report().params if "heads" in row.note}
    assert notes == {"self_attn.in_proj_weight": "12 heads", "self_attn.out_proj.weight": "4 heads"}


def test_second_moments_do_not_depend_on_heads():
    """Their state has the shape of the weight, however it is taken apart."""
    for method in ("adamuon", "normuon", "namo"):
        states = []
        for split in ("fused", "per_head"):
            param = nn.Parameter(torch.zeros(48, 10))
            param.param_info = ParamInfo("w", Role.MATRIX, QKV)
            optimizer = TensorParallelAdaptiveMuon(
                [param], moment2_method=method, split=split, split_qkv=True
            )
            param.grad = torch.randn(48, 10, generator=torch.Generator().manual_seed(0))
            optimizer.step()
            states.append(optimizer.state[param]["moment2_buffer"].shape)
        assert states[0] == states[1]


@pytest.mark.parametrize("other", [{"head_sizes": (4,)}, {"split_sizes": (4,)}])
def test_columns_by_head_are_not_split_otherwise(other):
    """Nor is their number negative."""
    with pytest.raises(ViewError, match="head_columns=4"):
        MatrixView(head_columns=4, **other)
    with pytest.raises(ViewError, match="head_columns=-1"):
        MatrixView(head_columns=-1)
    with pytest.raises(ViewError, match="10 columns are no multiple of the 4"):
        MatrixView(head_columns=4).windows((8, 10), by_head=True)
