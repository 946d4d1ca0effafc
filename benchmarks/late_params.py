"""What it costs to look for parameters that began to train after the build, once a step.

    python benchmarks/late_params.py [--rounds 1000]

150 parameters in 75 modules; the look against listing the model's parameters once.
"""

import argparse

import torch
from harness import interleave, ratio, summary, write_result
from torch import nn

from megaopt_core import build_optimizer


def main() -> None:
    """Measure, print and write `results/late_params.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(75)))
    optimizer = build_optimizer(model, "adam", lr=0.1)
    times = interleave(
        {"look": optimizer.late.settle, "list": lambda: list(model.named_parameters())}, rounds=args.rounds
    )
    result = {"seconds": summary(times), "look over listing": ratio(times, "look", "list")}
    print(result)
    print(write_result("late_params", result))


if __name__ == "__main__":
    main()
