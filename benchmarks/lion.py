"""Time one step of Lion on GPT-2's 124 million parameters, in turns, one thread.

    python benchmarks/lion.py

Against emerging-optimizers', and against the least that a step can be: one compiled pass over all elements as a single
flat tensor.
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
    }
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    times = interleave(steps, rounds=arguments.rounds, clock=CLOCKS[arguments.clock])
    speedups = {
        other: {
            name: {**ratio(times, other, name), **median_interval(times, other, name)}
            for name in ("megaopt_plain", "megaopt_compiled")
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
