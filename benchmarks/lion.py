"""Time one step of Lion on GPT-2's 124 million parameters, in turns, one thread.

    python benchmarks/lion.py

Against emerging-optimizers', and against the least that a step can be: one compiled pass over all elements as a single
flat tensor. How much of the difference is that parameters are pieces of memory of their own, the same optimizer tells
over parameters, gradients and momenta that are views of three flat tensors.
"""

import argparse
import time
import warnings
from importlib.metadata import version

import torch
from emerging_optimizers.scalar_optimizers import Lion as Peer
from harness import (
    gpt2_parameters,
    interleave,
    median_interval,
    parameters_of,
    processor,
    ratio,
    summary,
    write_result,
)
from megaopt_lion.lion import Lion

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def in_flat_memory(optimizer: torch.optim.Optimizer, elements: int) -> torch.optim.Optimizer:
    """Make parameters, gradients and momenta views of one flat tensor each, and return the optimizer.

    Args:
        optimizer: a Lion of one group that has made no step.
        elements: of all its parameters.
    """
    flat = [torch.zeros(elements) for _ in range(3)]
    params = optimizer.param_groups[0]["params"]
    sizes = [param.numel() for param in params]
    for param, *views in zip(params, *(memory.split(sizes) for memory in flat), strict=True):
        values, grad, exp_avg = (view.view(param.shape) for view in views)
        param.data = values.copy_(param.data)
        param.grad = grad.copy_(param.grad)
        optimizer.state[param]["exp_avg"] = exp_avg
    return optimizer


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of one thread, on a machine that others use"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    settings = {"lr": 1e-4, "betas": (0.95, 0.98), "weight_decay": 0.1}
    elements = sum(param.numel() for param in gpt2_parameters())
    optimizers = {
        "emerging-optimizers": Peer(gpt2_parameters(), **settings),
        "one_flat_pass": Lion(parameters_of([(elements,)]), **settings, compile=True),
        "megaopt_plain": Lion(gpt2_parameters(), **settings, compile=False),
        "megaopt_compiled": Lion(gpt2_parameters(), **settings, compile=True),
        "megaopt_compiled_in_flat_memory": in_flat_memory(
            Lion(gpt2_parameters(), **settings, compile=True), elements
        ),
    }
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    times = interleave(steps, rounds=arguments.rounds, clock=CLOCKS[arguments.clock])
    speedups = {
        other: {
            name: {**ratio(times, other, name), **median_interval(times, other, name)}
            for name in optimizers
            if name.startswith("megaopt")
        }
        for other in ("emerging-optimizers", "one_flat_pass")
    }
    best = summary(times)
    print(best, speedups, sep="\n")
    result = {
        "versions": {"emerging-optimizers": version("emerging-optimizers")},
        "clock": arguments.clock,
        "times": best,
        "emerging_optimizers_over": speedups["emerging-optimizers"],
        "one_flat_pass_over": speedups["one_flat_pass"],
    }
    # Of each kind of processor, by what it multiplies bfloat16 with, as for Muon.
    *_, kind = ("neither", *processor().split(", ")[1:])
    write_result(f"lion_{kind}", result)


if __name__ == "__main__":
    main()
