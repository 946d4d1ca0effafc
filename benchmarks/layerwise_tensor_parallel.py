"""The step of Muon where tensor parallelism cuts matrices: an owner for each, against the owner's work alone.

    python benchmarks/layerwise_tensor_parallel.py --blocks 2 --rounds 5

Two gloo ranks have the blocks of GPT-2 with 124 million elements under tensor parallelism. The step with owners is
compared with one process that steps half of the blocks, whole, and the time of two all-to-alls of the same bytes; and
with `muon_tp_mode="duplicated"`, where every rank gathers and steps all. All take turns in one sitting. While one
process steps its half, the other core is as busy as under the owners' step: it steps the other half.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import interleave, parameters_of, quartiles, ratio, write_result
from layerwise import BLOCK, DECAY, LR, RANKS, InStep, model_of
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh

from megaopt_core import MatrixView, ProcessGroupCollection, build_optimizer

CUT = (0, 1, 0, 1)
"""The dimension that tensor parallelism cuts of each matrix of a block."""

GOAL = 1.15

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

SETTINGS: dict[str, Any] = {
    "lr": LR,
    "weight_decay": DECAY,
    "clip_grad": 0.0,
    "muon_nesterov": True,
    "muon_fp32_matmul_prec": "highest",
}


def cut_step(blocks: int, rank: int, **settings: Any) -> Callable[[], Any]:
    """Return a step over this rank's parts."""
    model = nn.Module()
    for index, whole in enumerate(parameters_of(BLOCK * blocks)):
        dim = CUT[index % len(CUT)]
        param: Any = nn.Parameter(whole.detach().chunk(RANKS, dim)[rank].clone())
        param.grad = whole.grad.chunk(RANKS, dim)[rank].clone()
        param.matrix_view = MatrixView()
        param.tensor_model_parallel, param.partition_dim = True, dim
        model.register_parameter(f"matrix{index}", param)
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    return build_optimizer(model, "muon", pg_collection=mesh, **SETTINGS, **settings).step


def half_step(blocks: int) -> Callable[[], Any]:
    """Return a step over half of the blocks, in a process that knows of no other."""
    alone = ProcessGroupCollection()
    return build_optimizer(model_of(blocks // RANKS), "muon", pg_collection=alone, **SETTINGS).step


def exchange_twice(blocks: int) -> Callable[[], None]:
    """Return two all-to-alls of what a rank has of the blocks."""
    numel = sum(rows * columns for rows, columns in BLOCK) * blocks // RANKS
    sent, received = torch.ones(numel), torch.empty(numel)

    def run() -> None:
        for _ in range(2):
            dist.all_to_all_single(received, sent)

    return run


def run(rank: int, store: str, blocks: int, rounds: int, clock: str) -> None:
    """Measure on one rank; the first writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    candidates = {
        "layer_wise": cut_step(blocks, rank, sharding="layer_wise"),
        "duplicated": cut_step(blocks, rank, muon_tp_mode="duplicated"),
        "half in one process": half_step(blocks),
        "two all-to-alls": exchange_twice(blocks),
    }
    times = interleave(
        {name: InStep(step) for name, step in candidates.items()},
        rounds=rounds,
        warmup=1,
        clock=CLOCKS[clock],
    )
    if rank == 0:
        report(times, blocks, clock)
    dist.destroy_process_group()


def report(times: dict[str, list[float]], blocks: int, clock: str) -> None:
    """Print and keep times, ratios and the goal."""
    parts = zip(times["layer_wise"], times["half in one process"], times["two all-to-alls"], strict=True)
    over = quartiles([step / (half + exchange) for step, half, exchange in parts])
    result = {
        "seconds": {name: round(statistics.median(of_one), 4) for name, of_one in times.items()},
        "over_half_and_exchange": over,
        "goal": GOAL,
        "reached": over["median"] <= GOAL,
        "duplicated_over_layer_wise": ratio(times, "duplicated", "layer_wise"),
        "blocks": blocks,
        "clock": clock,
        "machine_is_shared": True,
    }
    print(result)
    write_result("layerwise_tensor_parallel", result)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=int, default=2, help="even, so that half of the blocks is half of the work"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of one rank, on a machine that others use"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (f"{folder}/store", given.blocks, given.rounds, given.clock), nprocs=RANKS)


if __name__ == "__main__":
    main()
