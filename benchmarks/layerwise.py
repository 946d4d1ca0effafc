"""The step of Muon on two ranks: owners of whole matrices against everything on every rank.

    python benchmarks/layerwise.py --layers 4 --rounds 5 --precision highest

The matrices are those of GPT-2 with 124 million elements, as many layers of it as are asked for; a step orthogonalizes
them and brings the values to both ranks. Every candidate steps in turns on both ranks at once. The result also holds
how much our own replicated step gains over emerging-optimizers in the same sitting: two ranks bring twice that at most.
"""

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import interleave, parameters_of, ratio, write_result
from torch import multiprocessing, nn

from megaopt_core import MatrixView, build_optimizer

RANKS = 2
WIDTH = 768
BLOCK = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
LR, MOMENTUM, DECAY = 1e-3, 0.95, 0.1
SHARE = 0.88
"""Of the ideal speed-up by two ranks, what the step shall reach with its exchange."""


def model_of(layers: int) -> nn.Module:
    """Return a module that holds the matrices, each with a gradient."""
    model = nn.Module()
    for index, param in enumerate(parameters_of(BLOCK * layers)):
        param.matrix_view = MatrixView()
        model.register_parameter(f"matrix{index}", param)
    return model


def ours(layers: int, precision: str, sharding: str) -> Callable[[], Any]:
    """Return a step of megaopt's Muon."""
    optimizer = build_optimizer(
        model_of(layers),
        "muon",
        lr=LR,
        weight_decay=DECAY,
        clip_grad=0.0,
        sharding=sharding,
        muon_momentum=MOMENTUM,
        muon_nesterov=True,
        muon_fp32_matmul_prec=precision,
    )
    return optimizer.step


def emerging(layers: int, precision: str) -> Callable[[], Any]:
    """Return a step of emerging-optimizers' Muon over everything."""
    module = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
    params = parameters_of(BLOCK * layers)
    return module.Muon(params, LR, MOMENTUM, DECAY, nesterov=True, fp32_matmul_prec=precision).step


def muon_fsdp2(layers: int) -> Callable[[], Any]:
    """Return a step of muon-fsdp2 over matrices that are sharded by rows; it computes in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    params = []
    for whole in parameters_of(BLOCK * layers):
        param = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
        param.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        params.append(param)
    module = importlib.import_module("muon_fsdp2")
    group = {"params": params, "use_muon": True, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    return module.Muon([group]).step


def muonium(layers: int) -> Callable[[], Any]:
    """Return a step of muonium over everything; it computes in bfloat16, and has no sharding of its own."""
    module = importlib.import_module("muonium")
    return module.Muon(parameters_of(BLOCK * layers), LR, DECAY, momentum=MOMENTUM).step


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


def others(layers: int, precision: str, failed: dict[str, str]) -> dict[str, Callable[[], Any]]:
    """Return the peers that step once on this machine; why the rest do not goes to `failed`."""
    found: dict[str, Callable[[], Any]] = {}
    if precision != "medium":
        return found
    for name, make in (("muon-fsdp2", muon_fsdp2), ("muonium", muonium)):
        try:
            step = make(layers)
            step()
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer from running is told
            failed[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            found[name] = step
    return found


def run(rank: int, store: str, layers: int, rounds: int, precision: str) -> None:
    """Measure on one rank; the first writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    failed: dict[str, str] = {}
    candidates = {
        "emerging-optimizers, replicated": emerging(layers, precision),
        "megaopt, replicated": ours(layers, precision, "replicated"),
        "megaopt, layer_wise": ours(layers, precision, "layer_wise"),
        **others(layers, precision, failed),
    }
    times = interleave({name: InStep(step) for name, step in candidates.items()}, rounds=rounds, warmup=1)
    exchange = exchanges(layers, precision, rounds)
    if rank == 0:
        report(times, exchange, failed, layers, precision)
    dist.destroy_process_group()


def exchanges(layers: int, precision: str, rounds: int) -> float:
    """Return the median time in which owners bring their values to both ranks."""
    gather = build_optimizer(
        model_of(layers), "muon", lr=LR, sharding="layer_wise", muon_fp32_matmul_prec=precision
    ).allgather_params  # type: ignore[attr-defined] # what layer-wise sharding builds
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        gather()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def report(
    times: dict[str, list[float]], exchange: float, failed: dict[str, str], layers: int, precision: str
) -> None:
    """Print and keep times, ratios and the goal."""
    base, alone, sharded = list(times)[:3]
    own = ratio(times, base, alone)
    ratios = {name: ratio(times, base, name) for name in list(times)[1:]}
    goal = SHARE * RANKS * own["median"]
    result = {
        "seconds": {name: round(statistics.median(of_one), 4) for name, of_one in times.items()},
        "emerging_optimizers_over": ratios,
        "goal": round(goal, 4),
        "reached": ratios[sharded]["median"] >= goal,
        "exchange_seconds": round(exchange, 4),
        "exchange_share": round(exchange / statistics.median(times[sharded]), 4),
        "layers": layers,
        "precision": precision,
        "did_not_run": failed,
        "machine_is_shared": True,
    }
    print(result)
    write_result(f"layerwise_{precision}", result)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=["highest", "medium"], default="highest")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", given.layers, given.rounds, given.precision)
        multiprocessing.spawn(run, arguments, nprocs=RANKS)


if __name__ == "__main__":
    main()
