"""Time one step of Lion on GPT-2's 124 million parameters against emerging-optimizers', in turns, one thread.

python benchmarks/lion.py
"""

import warnings
from importlib.metadata import version

import torch
from emerging_optimizers.scalar_optimizers import Lion as Peer
from harness import gpt2_parameters, interleave, ratio, summary, write_result
from megaopt_lion.lion import Lion


def main() -> None:
    """Measure, print, and write JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    settings = {"lr": 1e-4, "betas": (0.95, 0.98), "weight_decay": 0.1}
    optimizers = {
        "emerging-optimizers": Peer(gpt2_parameters(), **settings),
        "megaopt_plain": Lion(gpt2_parameters(), **settings, compile=False),
        "megaopt_compiled": Lion(gpt2_parameters(), **settings, compile=True),
    }
    times = interleave({name: optimizer.step for name, optimizer in optimizers.items()}, rounds=6)
    speedups = {
        name: ratio(times, "emerging-optimizers", name) for name in times if name != "emerging-optimizers"
    }
    best = summary(times)
    print(best, speedups)
    versions = {"emerging-optimizers": version("emerging-optimizers")}
    write_result("lion", {"versions": versions, "times": best, "emerging_optimizers_over": speedups})


if __name__ == "__main__":
    main()
