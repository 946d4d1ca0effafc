"""The step of Muon on what `fully_shard` leaves each rank: against gathered matrices, and against peers.

    pip install muonium muon-fsdp2
    python benchmarks/fsdp.py --layers 12 --rounds 3
    python benchmarks/fsdp.py --figures

Two ranks step the matrices of GPT-2 with 124 million elements, cut by rows, all in bfloat16 products. Every candidate
steps in turns on both ranks at once; bytes and collectives are counted where they reach the process group. What was
measured is written after every round; a later call adds its rounds to those of earlier ones. `--figures`
plans models on many ranks instead, without a tensor: what each rank sends in a step, and how even the work is.
"""

import argparse
import importlib
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from balance_models import MODELS
from harness import RESULTS, interleave, parameters_of, ratio, write_result
from megaopt_fsdp.layout import FsdpLayout, traffic
from megaopt_layerwise.planner import plan_owners, work_of
from torch import multiprocessing, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt_core import MatrixView, build_optimizer, get_registry
from megaopt_core.params import AxisPlacement, Granularity, ParamSpec
from megaopt_core.sharding import World

RANKS = 2
WIDTH = 768
BLOCK = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
LR, MOMENTUM, DECAY = 1e-3, 0.95, 0.1


def cut_params(layers: int, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Return the matrices cut by rows, each with a gradient, as `fully_shard` leaves them after a backward pass."""
    params = []
    for whole in parameters_of(BLOCK * layers):
        param = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
        param.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        params.append(param)
    return params


def ours(layers: int, mesh: DeviceMesh) -> Any:
    """Return megaopt's Muon."""
    model = nn.Module()
    for index, param in enumerate(cut_params(layers, mesh)):
        param.matrix_view = MatrixView()
        model.register_parameter(f"matrix{index}", param)
    return build_optimizer(
        model,
        "muon",
        lr=LR,
        weight_decay=DECAY,
        clip_grad=0.0,
        pg_collection=mesh,
        muon_momentum=MOMENTUM,
        muon_nesterov=True,
        muon_fp32_matmul_prec="medium",
    )


def gathered(layers: int, mesh: DeviceMesh) -> Callable[[], Any]:
    """Return the step that gathers every gradient on every rank and does all the work there."""
    module = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
    params, wholes = cut_params(layers, mesh), parameters_of(BLOCK * layers)
    optimizer = module.Muon(wholes, LR, MOMENTUM, DECAY, nesterov=True, fp32_matmul_prec="medium")

    def step() -> None:
        for param, whole in zip(params, wholes, strict=True):
            whole.grad = param.grad.full_tensor()  # type: ignore[union-attr] # a DTensor
        optimizer.step()
        with torch.no_grad():
            for param, whole in zip(params, wholes, strict=True):
                local = param.to_local()  # type: ignore[attr-defined]
                local.copy_(whole.chunk(RANKS)[dist.get_rank()])

    return step


def muon_fsdp2(layers: int, mesh: DeviceMesh) -> Callable[[], Any]:
    """Return a step of muon-fsdp2."""
    group = {"params": cut_params(layers, mesh), "use_muon": True, "lr": LR, "momentum": MOMENTUM}
    return importlib.import_module("muon_fsdp2").Muon([group | {"weight_decay": DECAY}]).step


def muonium(layers: int, mesh: DeviceMesh) -> Callable[[], Any]:
    """Return a step of muonium."""
    return (
        importlib.import_module("muonium").Muon(cut_params(layers, mesh), LR, DECAY, momentum=MOMENTUM).step
    )


def torchs(layers: int, mesh: DeviceMesh) -> Callable[[], Any]:
    """Return a step of torch's Muon over DTensors."""
    return torch.optim.Muon(cut_params(layers, mesh), lr=LR, weight_decay=DECAY, momentum=MOMENTUM).step


OURS = "megaopt, fsdp"
PEERS = {"muon-fsdp2": muon_fsdp2, "muonium": muonium, "torch.optim.Muon": torchs}


class Counted(TorchDispatchMode):
    """Counts collectives, and the bytes that this rank sends to the other of two ranks in them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.collectives = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on; what a DTensor does inside comes here by itself."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")) and not any(
            word in name for word in ("wait_tensor", "barrier", "monitored", "recv")
        ):
            self.collectives += 1
            tensors = [each for each in _flat(args) if isinstance(each, torch.Tensor)]
            # Of two ranks: a half goes to the other of what is exchanged or reduced, all of what is gathered.
            sent = tensors[-1] if "base" in name else tensors[0]
            part = 1.0 if "gather" in name or "broadcast" in name or "send" in name else 0.5
            self.bytes += part * sent.nbytes * (2 if "all_reduce" in name or "allreduce" in name else 1)
        return func(*args, **(kwargs or {}))


def counted(step: Callable[[], Any]) -> dict[str, Any]:
    """Return what a step sends; compiled, nothing can be counted."""
    try:
        with torch.compiler.set_stance("force_eager"), Counted() as found:
            step()
    except RuntimeError as error:  # a peer's: its times stand all the same
        return {"not_counted": str(error).splitlines()[0][:200]}
    return {"bytes": int(found.bytes), "collectives": found.collectives}


def _flat(values: Any) -> list[Any]:
    return [
        one for value in values for one in (_flat(value) if isinstance(value, (list, tuple)) else [value])
    ]


class InStep:
    """A candidate that all ranks begin together, and end together."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step

    def prepare(self) -> None:
        """Wait for the others."""
        dist.barrier()

    def __call__(self) -> None:
        """Step, and wait for the slowest."""
        self.step()
        dist.barrier()


def run(rank: int, store: str, layers: int, rounds: int) -> None:
    """Measure on one rank; the first writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    mine = ours(layers, mesh)
    candidates = {OURS: mine.step, "full_tensor, all work on each rank": gathered(layers, mesh)}
    failed, sent = {}, {}
    for name, make in PEERS.items():
        try:
            step = make(layers, mesh)
            step()
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer from running is told
            failed[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            candidates[name] = step
    for name, step in candidates.items():
        sent[name] = counted(step)
    turns = [(name, InStep(step)) for name, step in candidates.items()]
    for _ in range(rounds):
        turns = [*turns[1:], turns[0]]
        times = interleave(dict(turns), rounds=1, warmup=0)
        if rank == 0:
            report(times, sent, failed, mine, layers)
    dist.barrier()
    dist.destroy_process_group()


def with_earlier(times: dict[str, list[float]], layers: int) -> dict[str, list[float]]:
    """Return the times of all rounds, with those that earlier calls have written of the same model and candidates."""
    file = RESULTS / "fsdp.json"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    known = earlier.get("every_round", {})
    if earlier.get("layers") != layers or set(known) != set(times):
        known = {}
    return {name: [*known.get(name, ()), *times[name]] for name in sorted(times)}


def report(
    times: dict[str, list[float]], sent: dict[str, Any], failed: dict[str, str], mine: Any, layers: int
) -> None:
    """Print and keep times, ratios, bytes and balance."""
    times = with_earlier({name: [round(each, 4) for each in some] for name, some in times.items()}, layers)
    base = OURS
    rest = [name for name in times if name != base]
    (part,) = mine.report(after_step=True).parts
    layout = FsdpLayout(
        [_spec(f"m{at}", shape) for at, shape in enumerate(BLOCK * layers)], World({"dp": RANKS})
    )
    result = {
        "seconds": {name: round(statistics.median(of_one), 4) for name, of_one in times.items()},
        "over_megaopt": {name: ratio(times, name, base) for name in rest if len(times[name]) > 1},
        "every_round": times,
        "sent_by_the_first_rank": sent,
        "told_by_our_report": {"bytes": part.sent, "collectives": part.collectives},
        "bound_bytes": int(2 * (1 - 1 / RANKS) * 4 * sum(spec.numel for spec in layout.specs) / RANKS),
        "balance_max_over_mean": round(_balance(layout, is_expert=False), 4),
        "did_not_run": failed,
        "layers": layers,
        "machine_is_shared": True,
    }
    print(result)
    write_result("fsdp", result)


def _balance(layout: FsdpLayout, *, is_expert: bool) -> float:
    """Return the work of the busiest owner over the mean."""
    loads = [0.0] * layout.grid(is_expert=is_expert).size
    for owned in layout.owned(is_expert=is_expert):
        loads[owned.owner] += owned.block.work.cost
    return max(loads) * len(loads) / sum(loads)


def _spec(
    name: str, shape: tuple[int, ...], placements: tuple[AxisPlacement, ...] | None = None, **more: Any
) -> ParamSpec:
    view, cut = MatrixView(batch_dims=len(shape) - 2), (AxisPlacement("dp", RANKS, dim=0),)
    spec = ParamSpec(
        name,
        shape,
        torch.float32,
        torch.float32,
        "muon",
        0,
        Granularity.TENSOR,
        0.0,
        view=view,
        placements=cut if placements is None else placements,
        splits=True,
        **more,
    )
    return evolve(spec, cost=get_registry().optimizer("muon").step_cost(spec, view))


def figures() -> None:
    """Print and keep what ranks send and do, for models on many ranks."""
    llama = [
        _spec(name, shape, (AxisPlacement("dp", 256, dim=0),)) for name, shape in MODELS["Llama-3 70B"](True)
    ]
    mixed = []
    for name, shape in MODELS["DeepSeek-V3"](True):
        if len(shape) == 2:
            mixed.append(_spec(name, shape, (AxisPlacement("dp", 512, dim=0),)))
        else:  # more ranks than experts: fully_shard is told to cut inside them
            cuts = (AxisPlacement("ep", 64, dim=0), AxisPlacement("expert_dp", 8, dim=1))
            mixed.append(_spec(name, shape, cuts, is_expert=True))
    result = {
        "Llama-3 70B, dp 256": _figures(llama, World({"dp": 256}))
        | {"on_a_fake_rank": counted_on_a_fake_rank("Llama-3 70B", {"dp": 256})},
        "DeepSeek-V3, dp 512, of which ep 64": _figures(mixed, World({"dp": 512, "ep": 64, "expert_dp": 8})),
    }
    print(result)
    write_result("fsdp_figures", result)


def on_a_fake_rank(model: str, dims: dict[str, int], told: Any) -> None:
    """Step a model on one of many ranks that are not there, on tensors without memory, and tell what it sends.

    Args:
        model: its name in `MODELS`.
        dims: of the mesh; with `ep`, dense matrices lie over all of it, and experts over both of its dimensions.
        told: the end of a pipe.
    """
    begun = time.perf_counter()
    ranks = math.prod(dims.values())
    dist.init_process_group("fake", rank=37, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    parts = [part_of(shape, mesh) for _, shape in MODELS[model](True)]
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors without memory
        net = nn.Module()
        for at, (local, make) in enumerate(parts):
            param = nn.Parameter(make(torch.empty(local)))
            param.matrix_view = MatrixView(batch_dims=len(local) - 2)  # type: ignore[attr-defined] # for routing
            param.grad = make(torch.empty(local))
            net.register_parameter(f"matrix{at}", param)
        optimizer = build_optimizer(net, "muon", lr=LR, clip_grad=0.0, pg_collection=mesh)
        for part in optimizer.parts:
            part.collect_grads()
            assert part.split is not None
            part.split.split = Untransformed(part.split.split)
        optimizer.step_with_ready_grads()
        sent = {_kind(part): part.sharded.sent() for part in optimizer.parts}
    found = {
        kind: {"bytes": each.bytes, "collectives": each.collectives} for kind, each in sent.items() if each
    }
    told.send({"rank": dist.get_rank(), **found, "seconds": round(time.perf_counter() - begun, 1)})


def part_of(
    shape: tuple[int, ...], mesh: DeviceMesh
) -> tuple[tuple[int, ...], Callable[[torch.Tensor], DTensor]]:
    """Return the shape of what this rank has of a tensor, and what makes a DTensor of that.

    Args:
        shape: of the whole tensor; a batch of matrices lies over both dimensions of the mesh, a matrix over all ranks.
        mesh: the ranks.
    """
    where, cuts = mesh, [Shard(1), Shard(0)]
    if len(shape) == 2:
        where, cuts = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names]._flatten("all"), [Shard(0)]
    local, _ = compute_local_shape_and_global_offset(shape, where, cuts)
    stride = torch.empty(shape, device="meta").stride()
    kept = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    return tuple(local), partial(DTensor.from_local, device_mesh=where, placements=cuts, **kept)


class Untransformed:
    """A split step whose owners give back what they get: only what travels is counted."""

    def __init__(self, split: Any) -> None:
        self.local_updates, self.apply = split.local_updates, split.apply

    def transform(self, updates: Any, infos: Any) -> list[torch.Tensor]:
        """Return the updates."""
        return list(updates)


def _kind(part: Any) -> str:
    return "experts" if len(part.pieces[0].spec.members[0][1].shape) > 2 else "dense"


def counted_on_a_fake_rank(model: str, dims: dict[str, int]) -> dict[str, Any]:
    """Return what a process of its own tells: it makes a default process group.

    Args:
        model: its name in `MODELS`.
        dims: of the mesh.
    """
    start = multiprocessing.get_context("spawn")
    hears, tells = start.Pipe(duplex=False)
    process = start.Process(target=on_a_fake_rank, args=(model, dims, tells))
    process.start()
    tells.close()
    told: dict[str, Any] = hears.recv()
    process.join()
    return told


def _figures(specs: list[ParamSpec], world: World) -> dict[str, Any]:
    begun = time.perf_counter()
    layout, found = FsdpLayout(specs, world), {}
    for kind in dict.fromkeys(spec.is_expert for spec in specs):
        mine, ranks = [spec for spec in specs if spec.is_expert is kind], layout.grid(is_expert=kind).size
        sent = list(traffic(layout, {0}, is_expert=kind).values())
        elements = sum(spec.numel for spec in mine)
        planned = plan_owners([work_of(evolve(spec, placements=())) for spec in mine], ranks)
        found["experts" if kind else "dense"] = {
            "bytes_of_updates": 4 * elements,
            "bytes_sent_mean": int(statistics.mean(sent)),
            "bytes_sent_max": max(sent),
            "bytes_sent_by_rank_37": sent[37],
            "bound_over_all_ranks": int(2 * (1 - 1 / ranks) * 4 * elements / ranks),
            "collectives": 2 * len(layout.buckets({0}, is_expert=kind)),
            "work_max_over_mean": round(_balance(layout, is_expert=kind), 4),
            "planners_max_over_mean": round(planned.compute_imbalance, 4),
        }
    return {**found, "seconds_to_plan": round(time.perf_counter() - begun, 1)}


def main() -> None:
    """Start the ranks, or plan."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--figures", action="store_true")
    given = parser.parse_args()
    if given.figures:
        figures()
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (f"{folder}/store", given.layers, given.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
