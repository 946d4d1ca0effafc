"""A whole step of a sharded AdamW on GPT-2's 124 million parameters: backward, reduce, step, gather.

    python benchmarks/zero1.py [--ranks 2] [--rounds 7] [--only ours,ours-overlap,torch]

Candidates take turns in the same processes, one gloo rank a process with one thread each; a time is that of the slowest
rank. `torch` is `DistributedDataParallel` with `ZeroRedundancyOptimizer`, `deepspeed` is ZeRO stage 1 and is left out
where DeepSpeed is not installed. The model is nothing but its parameters: its backward pass costs all candidates the
same, and little.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing
from harness import gpt2_parameters, ratio, summary, write_result
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megaopt_core import build_optimizer

SETTINGS = {"lr": 1e-9, "weight_decay": 0.1}
PER_LAYER = 12


class Layer(torch.nn.Module):
    """Parameters whose gradients are fixed tensors."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.gradient_of = [value.grad.view(-1) for value in values].__getitem__
        self.values = torch.nn.ParameterList([torch.nn.Parameter(value.detach().clone()) for value in values])

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        """Add the products of parameters and their gradients."""
        for index, value in enumerate(self.values):
            total = total + value.view(-1) @ self.gradient_of(index)
        return total


def model_of(params: list[torch.nn.Parameter]) -> torch.nn.Module:
    """Return a model of the parameters, some a layer."""
    starts = range(0, len(params), PER_LAYER)
    return torch.nn.Sequential(*(Layer(params[start : start + PER_LAYER]) for start in starts))


def ours(
    params: list[torch.nn.Parameter], *, overlap: bool, gather_in_step: bool = False
) -> Callable[[], None]:
    """Return a step of megaopt in buffers."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    model = DistributedDataParallel(model_of(params), config)
    optimizer = build_optimizer(
        model,
        "adamw",
        overrides={},
        clip_grad=0.0,
        sharding="distributed",
        overlap_param_gather=overlap,
        overlap_param_gather_with_optimizer_step=gather_in_step,
        **SETTINGS,
    )

    def step() -> None:
        model(torch.zeros(())).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours_under_torch(params: list[torch.nn.Parameter]) -> Callable[[], None]:
    """Return a step of megaopt in memory of its own, gradients reduced by torch."""
    model = TorchDDP(model_of(params), gradient_as_bucket_view=True)
    optimizer = build_optimizer(
        model, "adamw", overrides={}, clip_grad=0.0, sharding="distributed", **SETTINGS
    )

    def step() -> None:
        model(torch.zeros(())).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_zero(params: list[torch.nn.Parameter]) -> Callable[[], None]:
    """Return a step of torch's DDP and ZeroRedundancyOptimizer, each in its fastest form."""
    model = TorchDDP(model_of(params), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **SETTINGS
    )

    def step() -> None:
        model(torch.zeros(())).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed_zero(params: list[torch.nn.Parameter]) -> Callable[[], None]:
    """Return a step of DeepSpeed's ZeRO-1."""
    import deepspeed

    model = model_of(params)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
        dist_init_required=False,
    )

    def step() -> None:
        engine.backward(engine(torch.zeros(())))
        engine.step()

    return step


CANDIDATES = {
    "ours": lambda params: ours(params, overlap=False),
    "ours-overlap": lambda params: ours(params, overlap=True),
    "ours-overlap-in-step": lambda params: ours(params, overlap=True, gather_in_step=True),
    "ours-under-torch-ddp": ours_under_torch,
    "torch": torch_zero,
    "deepspeed": deepspeed_zero,
}


def measure(rank: int, ranks: int, store: str, names: list[str], rounds: int) -> None:
    """Time the candidates in turns; the first rank writes the times of the slowest."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    params = gpt2_parameters()
    steps = {name: CANDIDATES[name](params) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-2, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number >= 0:
                times[name].append(slowest.item())
    if rank == 0:
        report(times, ranks)
    dist.barrier()
    dist.destroy_process_group()


def report(times: dict[str, list[float]], ranks: int) -> None:
    """Print and write what was measured."""
    ratios = {
        f"{above} / {below}": ratio(times, above, below)
        for below in times
        for above in times
        if above != below
    }
    path = write_result("zero1", {"ranks": ranks, "times": summary(times), "ratios": ratios})
    for name, values in times.items():
        print(f"{name:22} median {statistics.median(values):.3f} s, best {min(values):.3f} s")
    for name in times:
        if name != "ours" and "ours" in times:
            print(f"{name} / ours: {ratios[f'{name} / ours']['median']:.2f}")
    print(path)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(CANDIDATES))
    args = parser.parse_args()
    names = args.only.split(",")
    if importlib.util.find_spec("deepspeed") is None and "deepspeed" in names:
        names.remove("deepspeed")
        print("deepspeed is not installed", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.ranks, f"{folder}/store", names, args.rounds)
        torch.multiprocessing.spawn(measure, arguments, nprocs=args.ranks)


if __name__ == "__main__":
    main()
