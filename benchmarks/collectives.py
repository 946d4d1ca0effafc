"""Reduce-scatter and all-gather over gloo: direct exchanges of all pairs against the backend's own collectives.

    python benchmarks/collectives.py [--ranks 2] [--elements 40000000] [--rounds 7]

The variants take turns in the same processes, one thread each; a time is that of the slowest rank.
"""

import argparse
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from harness import ratio, summary, write_result
from megaopt_distributed.buffers.collectives import Native
from megaopt_distributed.buffers.point_to_point import PointToPoint


def measure(rank: int, ranks: int, store: str, elements: int, rounds: int) -> None:
    """Time every variant in turns; the first rank writes the times of the slowest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    bucket = torch.ones(elements // ranks * ranks)
    direct, native = PointToPoint(dist.group.WORLD), Native(dist.group.WORLD)
    variants = {
        "reduce-scatter, direct": lambda: direct.reduce_scatter(bucket).wait(),
        "reduce-scatter, gloo": lambda: native.reduce_scatter(bucket).wait(),
        "all-gather, direct": lambda: direct.all_gather(bucket).wait(),
        "all-gather, gloo": lambda: native.all_gather(bucket).wait(),
        "all-reduce, gloo": lambda: native.all_reduce(bucket).wait(),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-1, rounds):
        for name, variant in variants.items():
            bucket.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            variant()
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number >= 0:
                times[name].append(slowest.item())
    if rank == 0:
        ratios = {
            f"{kind}, gloo / direct": ratio(times, f"{kind}, gloo", f"{kind}, direct")
            for kind in ("reduce-scatter", "all-gather")
        }
        what = {"ranks": ranks, "elements": elements, "times": summary(times), "ratios": ratios}
        path = write_result(f"collectives_{ranks}_ranks", what)
        for name, values in what["times"].items():
            print(f"{name:24} median {values['median_ms']:8.1f} ms, best {values['best_ms']:8.1f} ms")
        for name, values in ratios.items():
            print(f"{name}: {values['median']:.2f}")
        print(path)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--elements", type=int, default=40_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.ranks, f"{folder}/store", args.elements, args.rounds)
        torch.multiprocessing.spawn(measure, arguments, nprocs=args.ranks)


if __name__ == "__main__":
    main()
