"""Tensor-parallel ranks that hold unequal parts of a matrix are refused on all of them, before anything waits."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.muon import TensorParallelMuon
from megaopt_testing.processes import run_ranks
from torch import nn

from megaopt_core.errors import ViewError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

PARTS = {"uneven": (5, 3), "empty": (8, 0), "equal": (4, 4)}


def stepped(rank: int, world: int) -> dict[str, str]:
    """Step parts of a matrix twice, in every mode; return what became of each."""
    assert world == len(PARTS["equal"])
    group = SimpleNamespace(tp=dist.group.WORLD)
    results = {}
    for cls in (TensorParallelMuon, TensorParallelAdaptiveMuon):
        for mode in ("blockwise", "duplicated", "distributed", "auto"):
            for name, parts in PARTS.items():
                for dim in (0, 1):
                    shape = [6, 6]
                    shape[dim] = parts[rank]
                    param = nn.Parameter(torch.zeros(shape))
                    param.partition_dim = dim
                    optimizer = cls([param], lr=0.1, tp_mode=mode, pg_collection=group)
                    param.grad = torch.ones(shape)
                    case = f"{cls.__name__} {mode} {name} {dim}"
                    results[case] = [outcome(optimizer), outcome(optimizer)]
    return results


def outcome(optimizer: torch.optim.Optimizer) -> str:
    """Step, and return the error, if there is one."""
    try:
        optimizer.step()
    except ViewError as error:
        return str(error)
    return "stepped"


def test_unequal_parts_are_refused_on_all_ranks() -> None:
    """Blockwise takes them; else each step says on every rank, also one without elements, what ranks hold."""
    for rank, cases in enumerate(run_ranks(stepped, 2)):
        for case, outcomes in cases.items():
            _, mode, name, dim = case.split()
            if mode == "blockwise" or name == "equal":
                assert outcomes == ["stepped", "stepped"], (case, rank)
                continue
            most, least = PARTS[name]
            for text in outcomes:
                assert f"hold from {least} to {most} of dimension {dim}" in text, (case, rank)
                assert f"tp_mode={mode!r}" in text


GROUPS = {
    "uneven": (2, 1),
    "empty": (3, 0),
    "cut": (2.5, 0.5),
}  # query groups of three heads with two rows each


def stepped_by_head(rank: int, world: int) -> dict[str, torch.Tensor | str]:
    """Step parts of a fused weight by head; return the weights, or why they were refused."""
    assert world == 2
    whole = torch.randn(18, 5, generator=torch.Generator().manual_seed(0))
    results: dict[str, torch.Tensor | str] = {}
    for cls in (TensorParallelMuon, TensorParallelAdaptiveMuon):
        for name, parts in GROUPS.items():
            rows = [round(6 * part) for part in parts]
            param = nn.Parameter(torch.zeros(rows[rank], 5))
            param.partition_dim, param.is_qkv = 0, True
            optimizer = cls(
                [param],
                lr=0.1,
                pg_collection=SimpleNamespace(tp=dist.group.WORLD),
                split="per_head",
                split_qkv=True,
                qkv_split_shapes=(2, 2, 2),
                fp32_matmul_prec="highest",
            )
            for _ in range(2):
                param.grad = whole.split(rows)[rank].clone()
                refused = outcome(optimizer)
            results[f"{cls.__name__} {name}"] = param.detach() if refused == "stepped" else refused
    return results


def test_whole_heads_may_lie_unevenly() -> None:
    """Each rank steps its heads as one process does; a head that two ranks share is refused, and so are moments."""
    one = nn.Parameter(torch.zeros(18, 5))
    one.is_qkv = True
    settings = {"split": "per_head", "split_qkv": True, "fp32_matmul_prec": "highest"}
    optimizer = TensorParallelMuon([one], lr=0.1, qkv_split_shapes=(2, 2, 2), **settings)
    for _ in range(2):
        one.grad = torch.randn(18, 5, generator=torch.Generator().manual_seed(0))
        optimizer.step()
    first, second = run_ranks(stepped_by_head, 2)
    for name in ("uneven", "empty"):
        both = torch.cat([ranks[f"TensorParallelMuon {name}"] for ranks in (first, second)])
        assert torch.equal(both, one.detach()), name
    for results in (first, second):
        assert "tensor-parallel ranks hold from" in results["TensorParallelMuon cut"]
        for name in GROUPS:
            assert "tensor-parallel ranks hold from" in results[f"TensorParallelAdaptiveMuon {name}"]
