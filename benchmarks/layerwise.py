"""The step of Muon on two ranks: owners of whole matrices against everything on every rank.

    python benchmarks/layerwise.py --rounds 5 --precision highest [--more]

The matrices are those of GPT-2 with 124 million elements, as many layers of it as are asked for; a step orthogonalizes
them and brings the values to both ranks. Every candidate steps in turns on both ranks at once. The result also holds
how much our own replicated step gains over emerging-optimizers in the same sitting: two ranks bring twice that at most.

`--more` adds rounds to those that the results hold already, so that a long measurement can be made in short sittings;
each pair of times is of one round, and no round is left out.
"""

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RESULTS, interleave, parameters_of, ratio, write_result
from torch import multiprocessing, nn

from megaopt_core import MatrixView, build_optimizer

RANKS = 2
WIDTH = 768
BLOCK = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
LR, MOMENTUM, DECAY = 1e-3, 0.95, 0.1
SHARE = 0.88
"""Of the ideal speed-up by two ranks, what the step shall reach with its exchange."""


def matrices(layers: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return the matrices of some layers, each with a gradient."""
    params = []
    for param in parameters_of(BLOCK * layers):
        params.append(nn.Parameter(param.detach().to(dtype)))
        params[-1].grad = param.grad.to(dtype)  # type: ignore[union-attr] # each has one
    return params


def model_of(layers: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a module that holds the matrices, each with a gradient."""
    model = nn.Module()
    for index, param in enumerate(matrices(layers, dtype)):
        param.matrix_view = MatrixView()
        model.register_parameter(f"matrix{index}", param)
    return model


def ours(layers: int, dtype: torch.dtype, precision: str, sharding: str) -> Callable[[], Any]:
    """Return a step of megaopt's Muon."""
    optimizer = build_optimizer(
        model_of(layers, dtype),
        "muon",
        lr=LR,
        weight_decay=DECAY,
        clip_grad=0.0,
        sharding=sharding,
        muon_momentum=MOMENTUM,
        muon_nesterov=True,
        muon_fp32_matmul_prec=precision,
        bf16=dtype is torch.bfloat16,
    )
    return optimizer.step


def emerging(layers: int, dtype: torch.dtype, precision: str) -> Callable[[], Any]:
    """Return a step of emerging-optimizers' Muon over everything, by way of float32 values where it needs them."""
    module = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
    wide = matrices(layers)  # its iteration takes no other dtype
    step = module.Muon(wide, LR, MOMENTUM, DECAY, nesterov=True, fp32_matmul_prec=precision).step
    if dtype is torch.float32:
        return step
    params = matrices(layers, dtype)

    def with_main_params() -> None:
        for main, param in zip(wide, params, strict=True):
            main.grad = param.grad.float()  # type: ignore[union-attr] # each has one
        step()
        torch._foreach_copy_([param.data for param in params], [main.data for main in wide])

    return with_main_params


def muon_fsdp2(layers: int, dtype: torch.dtype) -> Callable[[], Any]:
    """Return a step of muon-fsdp2 over matrices that are sharded by rows; it computes in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    params = []
    for whole in matrices(layers, dtype):
        param = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
        param.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        params.append(param)
    module = importlib.import_module("muon_fsdp2")
    group = {"params": params, "use_muon": True, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    return module.Muon([group]).step


def muonium(layers: int, dtype: torch.dtype) -> Callable[[], Any]:
    """Return a step of muonium over everything; it computes in bfloat16, and has no sharding of its own."""
    module = importlib.import_module("muonium")
    return module.Muon(matrices(layers, dtype), LR, DECAY, momentum=MOMENTUM).step


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


def others(
    layers: int, dtype: torch.dtype, precision: str, failed: dict[str, str]
) -> dict[str, Callable[[], Any]]:
    """Return the peers that step once on this machine; why the rest do not goes to `failed`."""
    found: dict[str, Callable[[], Any]] = {}
    if precision != "medium":
        return found
    for name, make in (("muon-fsdp2", muon_fsdp2), ("muonium", muonium)):
        try:
            step = make(layers, dtype)
            step()
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer from running is told
            failed[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            found[name] = step
    return found


def run(rank: int, store: str, given: argparse.Namespace) -> None:
    """Measure on one rank; the first writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    failed: dict[str, str] = {}
    kind = given.layers, getattr(torch, given.dtype), given.precision
    candidates = {
        "emerging-optimizers, replicated": emerging(*kind),
        "megaopt, replicated": ours(*kind, "replicated"),
        "megaopt, layer_wise": ours(*kind, "layer_wise"),
        **others(*kind, failed),
    }
    in_turns = {name: InStep(step) for name, step in candidates.items()}
    interleave(in_turns, rounds=0, warmup=1)
    times, exchange = earlier(given)
    exchange += exchanges(*kind, 3)
    for _ in range(given.rounds):
        seed = len(times.get("megaopt, layer_wise", ()))
        for name, seconds in interleave(in_turns, rounds=1, warmup=0, seed=seed).items():
            times.setdefault(name, []).extend(seconds)
        if rank == 0 and seed:  # a sitting may end in mid-round: what was measured is kept
            report(times, exchange, failed, given)
    if rank == 0:
        print(file_of(given).read_text())
    dist.destroy_process_group()


def exchanges(layers: int, dtype: torch.dtype, precision: str, rounds: int) -> list[float]:
    """Return the times in which owners bring their values to both ranks."""
    gather = build_optimizer(
        model_of(layers, dtype), "muon", lr=LR, sharding="layer_wise", muon_fp32_matmul_prec=precision
    ).allgather_params  # type: ignore[attr-defined] # what layer-wise sharding builds
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        gather()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def file_of(given: argparse.Namespace) -> Path:
    """Return where the results of these settings lie."""
    return RESULTS / f"layerwise_{given.dtype}_{given.precision}_{given.layers}_layers.json"


def earlier(given: argparse.Namespace) -> tuple[dict[str, list[float]], list[float]]:
    """Return what earlier sittings have measured, if it is asked for: times of rounds, and of exchanges."""
    if not given.more or not file_of(given).exists():
        return {}, []
    told = json.loads(file_of(given).read_text())
    return told["rounds"], told["exchanges"]


def report(
    times: dict[str, list[float]], exchange: list[float], failed: dict[str, str], given: argparse.Namespace
) -> None:
    """Keep times, ratios and the goal, over all rounds that there are."""
    base, alone, sharded = list(times)[:3]
    own = ratio(times, base, alone)
    ratios = {name: ratio(times, base, name) for name in list(times)[1:]}
    goal = SHARE * RANKS * own["median"]
    result = {
        "seconds": {name: round(statistics.median(of_one), 4) for name, of_one in times.items()},
        "emerging_optimizers_over": ratios,
        "goal": round(goal, 4),
        "reached": ratios[sharded]["median"] >= goal,
        "pairs": len(times[base]),
        "exchange_seconds": round(statistics.median(exchange), 4),
        "exchange_share": round(statistics.median(exchange) / statistics.median(times[sharded]), 4),
        "layers": given.layers,
        "dtype": given.dtype,
        "precision": given.precision,
        "did_not_run": failed,
        "machine_is_shared": True,
    }
    rounds = {name: [round(seconds, 4) for seconds in of_one] for name, of_one in times.items()}
    write_result(
        file_of(given).stem, {**result, "rounds": rounds, "exchanges": [round(each, 4) for each in exchange]}
    )


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=["highest", "medium"], default="highest")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of parameters")
    parser.add_argument("--more", action="store_true", help="add rounds to those of the results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (f"{folder}/store", given), nprocs=RANKS)


if __name__ == "__main__":
    main()
