"""One rank of the tensor-parallel tests: compares this rank's part with what one process computes."""

import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.products import precision, workspace
from megaopt_muon.tensor_parallel.orthogonalize import orthogonalize_distributed
from torch import nn

from megaopt_core.params import MatrixView, ParamInfo, Role

PLAIN = MatrixView()
QKV = MatrixView(split_sizes=(4, 2, 2), label="qkv")  # 8 rows in each of 4 query groups
GATE_UP = MatrixView(split_sizes=(16, 16), label="gate_up")
EXPERTS = MatrixView(batch_dims=1)
CONV1D = MatrixView(transposed=True)
CASES = {
    "wide": (PLAIN, (16, 40), (0, 1)),
    "tall": (PLAIN, (40, 16), (0, 1)),
    "square": (PLAIN, (24, 24), (0, 1)),
    "qkv": (QKV, (32, 24), (0, 1)),
    "gate_up cut through": (GATE_UP, (32, 24), (0,)),
    "gate_up along columns": (GATE_UP, (32, 24), (1,)),
    "conv1d": (CONV1D, (24, 16), (0, 1)),
    "experts": (EXPERTS, (4, 16, 24), (0, 1, 2)),
}
MEDIUM_CASES = {"wide": (16, 40), "tall": (128, 64), "square": (64, 64)}
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "split_qkv": True, "fp32_matmul_prec": "highest"}


def part(tensor: torch.Tensor, rank: int, world: int, dim: int) -> torch.Tensor:
    """Return this rank's part of a whole tensor."""
    return tensor.chunk(world, dim)[rank].clone()


def run(
    cls: type[torch.optim.Optimizer],
    param: torch.Tensor,
    info: ParamInfo,
    grads: Iterable[torch.Tensor],
    cut: Callable[[torch.Tensor], torch.Tensor],
    **kwargs: Any,
) -> torch.Tensor:
    """Step through gradients and return the parameter."""
    param = nn.Parameter(param.clone())
    param.param_info = info
    optimizer = cls([param], **SETTINGS | kwargs)
    for grad in grads:
        param.grad = cut(grad)
        optimizer.step()
    return param.detach()


def compare(
    rank: int,
    world: int,
    groups: Any,
    *,
    cls: type[torch.optim.Optimizer],
    view: MatrixView,
    shape: tuple[int, ...],
    dim: int,
    expert: bool,
    mixed: bool = False,
    **kwargs: Any,
) -> float:
    """Return the largest difference between this rank's part and the same part of the single-process result.

    If mixed, the first rank's processor can multiply bfloat16, in contrast to the others' and the single process's.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator)
    grads = [torch.randn(shape, generator=generator) for _ in range(2)]
    mode = kwargs.pop("tp_mode")
    exact = run(cls, whole, ParamInfo("w", Role.MATRIX, view), grads, lambda grad: grad, **kwargs)
    info = ParamInfo("w", Role.MATRIX, view, is_expert=expert, partition_dim=dim)
    cut = lambda grad: part(grad, rank, world, dim)  # noqa: E731
    if mixed:
        precision.multiplies_bfloat16 = lambda: rank == 0
    own = run(cls, cut(whole), info, grads, cut, pg_collection=groups, tp_mode=mode, **kwargs)
    return (own - part(exact, rank, world, dim)).abs().max().item()


def blockwise(
    rank: int, world: int, groups: Any, view: MatrixView, shape: tuple[int, ...], dim: int
) -> float:
    """Return the difference between blockwise and a single process that sees the shard as the matrix."""
    generator = torch.Generator().manual_seed(0)
    shard = part(torch.randn(shape, generator=generator), rank, world, dim)
    grads = [part(torch.randn(shape, generator=generator), rank, world, dim) for _ in range(2)]
    info = ParamInfo("w", Role.MATRIX, view, partition_dim=dim)
    same = lambda grad: grad  # noqa: E731
    exact = run(TensorParallelMuon, shard, ParamInfo("w", Role.MATRIX, view), grads, same)
    own = run(TensorParallelMuon, shard, info, grads, same, pg_collection=groups, tp_mode="blockwise")
    return (own - exact).abs().max().item()


def medium(
    rank: int, world: int, groups: Any, shape: tuple[int, ...], dim: int, mode: str, **kwargs: Any
) -> float:
    """Return the largest difference of an orthogonalized update, unscaled, under precision medium."""
    case = {"view": PLAIN, "shape": shape, "dim": dim, "expert": False, "fp32_matmul_prec": "medium"}
    difference = compare(rank, world, groups, cls=TensorParallelMuon, tp_mode=mode, **case, **kwargs)
    return difference / (SETTINGS["lr"] * 2 * max(shape) ** 0.5)  # two steps of this scale


def two_groups(dense: dist.ProcessGroup, expert: dist.ProcessGroup, mode: str) -> float:
    """Return the largest difference of a dense and an expert weight, each cut over its own group."""
    generator = torch.Generator().manual_seed(0)
    cuts = ((PLAIN, (16, 40), dense), (EXPERTS, (4, 16, 24), expert))
    wholes = [torch.randn(shape, generator=generator) for _, shape, _ in cuts]
    grads = [[torch.randn(shape, generator=generator) for _, shape, _ in cuts] for _ in range(2)]
    own, exact = [], []
    for (view, _, group), whole in zip(cuts, wholes, strict=True):
        exact.append(nn.Parameter(whole.clone()))
        exact[-1].param_info = ParamInfo("w", Role.MATRIX, view, is_expert=group is expert)
        own.append(nn.Parameter(part(whole, group.rank(), group.size(), 1)))
        own[-1].param_info = ParamInfo("w", Role.MATRIX, view, is_expert=group is expert, partition_dim=1)
    groups = SimpleNamespace(tp=dense, expt_tp=expert)
    steps = (
        TensorParallelMuon(own, **SETTINGS, pg_collection=groups, tp_mode=mode).step,
        TensorParallelMuon(exact, **SETTINGS).step,
    )
    for both in grads:
        for index, (grad, (_, _, group)) in enumerate(zip(both, cuts, strict=True)):
            exact[index].grad = grad.clone()
            own[index].grad = part(grad, group.rank(), group.size(), 1)
        for step in steps:
            step()
    return max(
        (mine - part(whole.detach(), group.rank(), group.size(), 1)).abs().max().item()
        for mine, whole, (_, _, group) in zip(own, exact, cuts, strict=True)
    )


def special(rank: int, world: int, groups: Any) -> dict[str, float]:
    """Return the cases of zero, NaN and of attributes in place of param_info."""
    results = {}
    for mode in ("duplicated", "distributed"):
        param = nn.Parameter(part(torch.ones(16, 24), rank, world, 0))
        param.partition_dim = 0
        optimizer = TensorParallelMuon([param], weight_decay=0.0, pg_collection=groups, tp_mode=mode)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        results[f"zero {mode}"] = (param - 1).abs().max().item()
        clean, dirty = nn.Parameter(torch.ones_like(param)), nn.Parameter(torch.ones_like(param))
        clean.partition_dim = dirty.partition_dim = 0
        optimizer = TensorParallelMuon([dirty, clean], weight_decay=0.0, pg_collection=groups, tp_mode=mode)
        dirty.grad, clean.grad = torch.ones_like(param), torch.ones_like(param)
        if rank == 0:
            dirty.grad[0, 0] = float("nan")
        optimizer.step()
        results[f"nan {mode}"] = float(not dirty.isnan().all() or not clean.isfinite().all())
    return results


def blown_up(rank: int, world: int, group: dist.ProcessGroup) -> dict[str, float]:
    """Return the differences from float32 of a matrix that bfloat16 drives away, so that all iterate again."""
    # Every element, 1 / sqrt(448), is rounded up by a quarter percent, and so is the singular value, which was 1.
    whole = torch.ones(16, 28)
    coefficients = resolve_coefficients("cans", 5)
    exact = NewtonSchulz(coefficients, "highest")(whole)
    precision.multiplies_bfloat16 = lambda: True
    differences = {}
    for dim in (0, 1):
        own = orthogonalize_distributed(NewtonSchulz(coefficients), part(whole, rank, world, dim), group, dim)
        name = f"medium in bfloat16 distributed, blown up, dim {dim}"
        differences[name] = (own - part(exact, rank, world, dim)).abs().max().item()
    precision.multiplies_bfloat16 = lambda: False
    return differences


def differences(rank: int, world: int) -> dict[str, float]:
    """Run every case; return the largest difference of each."""
    if world > 2:
        # Rows are kept apart, as those of whole KiB are.
        workspace._SAME_CACHE_SET = 4
        workspace._SMALLEST = 1
    group = dist.group.WORLD
    groups = SimpleNamespace(tp=group, expt_tp=group)
    results = special(rank, world, groups)
    for (name, (view, shape, dims)), mode in itertools.product(
        CASES.items(), ("duplicated", "distributed", "auto")
    ):
        for dim in dims:
            case = {"view": view, "shape": shape, "dim": dim, "expert": name == "experts", "tp_mode": mode}
            key = f"{mode} {name} dim {dim}"
            results[key] = compare(rank, world, groups, cls=TensorParallelMuon, **case)
            for method in ("adamuon", "normuon", "namo") if name in {"wide", "qkv", "experts"} else ():
                # eps: dividing tiny elements by themselves would blow up the last bit of the orthogonalization
                eps = 5e-2 if method == "adamuon" else 1e-2
                adaptive = {"cls": TensorParallelAdaptiveMuon, "moment2_method": method, "eps": eps}
                results[f"{key} {method}"] = compare(rank, world, groups, **adaptive, **case)
    for name in ("wide", "tall", "qkv"):
        for dim in (0, 1):
            view, shape, _ = CASES[name]
            results[f"blockwise {name} dim {dim}"] = blockwise(rank, world, groups, view, shape, dim)
    only_experts = {
        "cls": TensorParallelMuon,
        "view": EXPERTS,
        "shape": (4, 16, 24),
        "dim": 1,
        "expert": True,
    }
    by_head = MatrixView(head_sizes=(4,))
    for name, shape, dim in (("whole", (32, 24), 0), ("cut", (24, 24), 0), ("along columns", (32, 24), 1)):
        case = {"view": by_head, "shape": shape, "dim": dim, "expert": False, "split": "per_head"}
        cls = TensorParallelMuon
        results[f"heads {name}"] = compare(rank, world, groups, cls=cls, tp_mode="duplicated", **case)
        adaptive = {"cls": TensorParallelAdaptiveMuon, "moment2_method": "normuon", "eps": 1e-2}
        results[f"heads {name} normuon"] = compare(
            rank, world, groups, tp_mode="duplicated", **adaptive, **case
        )
    results["experts use their own group"] = compare(
        rank, world, SimpleNamespace(expt_tp=group), tp_mode="duplicated", **only_experts
    )
    results["experts without a group of their own"] = compare(
        rank, world, SimpleNamespace(tp=group), tp_mode="duplicated", **only_experts
    )
    for dtype, (name, shape), mode, dim in itertools.product(
        ("bfloat16", "float32"), MEDIUM_CASES.items(), ("duplicated", "distributed"), (0, 1)
    ):
        precision.multiplies_bfloat16 = lambda dtype=dtype: dtype == "bfloat16"
        results[f"medium in {dtype} {mode} {name} dim {dim}"] = medium(rank, world, groups, shape, dim, mode)
    results |= blown_up(rank, world, group)
    results["mixed processors"] = medium(rank, world, groups, (16, 40), 1, "distributed", mixed=True)
    grid = dist.device_mesh.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("tp", "expt_tp"))
    first, second = grid.get_group("tp"), grid.get_group("expt_tp")
    for mode in ("duplicated", "distributed"):
        results[f"dense {first.size()} experts {second.size()} {mode}"] = two_groups(first, second, mode)
        results[f"experts {first.size()} dense {second.size()} {mode}"] = two_groups(second, first, mode)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    wide = {"cls": TensorParallelMuon, "view": PLAIN, "shape": (16, 40), "dim": 1, "expert": False}
    results["device mesh"] = compare(rank, world, mesh, tp_mode="distributed", **wide)
    return results
