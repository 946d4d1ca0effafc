"""What it costs that ranks compare what they must have alike: the work on one rank, without the exchange.

    python benchmarks/rank_agreement.py [--rounds 15]

Names and settings: the digest of 70,000 parameters and of a configuration, once at the build. Values: the digest of all
parameters, once at the first step, against reading them once (`sum()`). Every step: the number that says how a rank is
about to step, of 150 parameters in two groups.
"""

import argparse
import platform
import time

import torch
from harness import gpt2_parameters, interleave, parameters_of, ratio, summary, write_result
from megaopt_guards import RanksCompared
from torch import nn

from megaopt_core import OptimizerConfig, ProcessGroupCollection, build_optimizer
from megaopt_core.parallel._digest import digest_of_tensors
from megaopt_core.routing._agreement import Holding, settings_alike
from megaopt_core.routing._one_rank import route_this_rank

NAMES = 70_000


def many_names() -> nn.Module:
    """Return a model of 70,000 parameters on the meta device, with names as long as they are in practice."""
    with torch.device("meta"):
        layers = [nn.Linear(16, 16) for _ in range(NAMES // 2)]
    return nn.ModuleDict(
        {"decoder": nn.ModuleDict({f"layers_{i}_mlp": layer for i, layer in enumerate(layers)})}
    )


def names_and_settings(rounds: int) -> dict:
    """Return the seconds that the digests take which ranks exchange at the build."""
    config, pgs = OptimizerConfig(optimizer="adam", lr=1e-3), ProcessGroupCollection()
    mine = route_this_rank(config, [many_names()], None, pgs)
    items = mine.inventory.trainable
    candidates = {
        "names, shapes, dtypes, overrides": lambda: Holding.of(items, mine.assignments),
        "settings": lambda: settings_alike(config),
    }
    times = interleave(candidates, rounds=rounds, clock=time.process_time)
    return summary(times)


def every_step(rounds: int) -> dict:
    """Return the seconds that the number of a step takes where ranks reduce gradients, without the exchange."""
    model = nn.ParameterList(parameters_of([(64,), (8, 8)] * 75))
    optimizer = build_optimizer(model, "adam", lr=1e-3)
    for param in model:
        param.grad = torch.ones_like(param)
    ranks = RanksCompared(optimizer)
    ranks.votes()
    ranks._compared = [(param, name, ()) for param, name in optimizer.names.items()]
    return summary(interleave({"the number": ranks.votes}, rounds=rounds, clock=time.process_time))


def values(rounds: int) -> dict:
    """Return how many times longer the digest of values takes than their sum."""
    gpt2 = [param.detach() for param in gpt2_parameters()]
    models = {
        "gpt2 (124 M), fp32": gpt2,
        "gpt2 (124 M), bf16": [param.bfloat16() for param in gpt2],
        "gpt2 (124 M), fp64": [param.double() for param in gpt2],
        "150 of 64, fp32": [param.detach() for param in parameters_of([(64,)] * 150)],
        "5,000 of 128 x 128, fp32": [param.detach() for param in parameters_of([(128, 128)] * 5000)],
        "70,000 of 64, fp32": [param.detach() for param in parameters_of([(64,)] * NAMES)],
    }
    found = {}
    for name, params in models.items():
        times = interleave(
            {
                "sum": lambda params=params: [param.sum() for param in params],
                "digest": lambda params=params: digest_of_tensors(params),
            },
            rounds=rounds,
        )
        found[name] = {"times": summary(times), "times_the_sum": ratio(times, "digest", "sum")}
        print(f"{name}: {found[name]['times_the_sum']['median']:.2f} x the sum")
    return found


def main() -> None:
    """Measure, print and write `results/rank_agreement.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = names_and_settings(args.rounds)
    print(names)
    result = {
        "names": NAMES,
        "seconds": names,
        "every step": every_step(args.rounds),
        "values": values(args.rounds),
        "python": platform.python_version(),
    }
    print(write_result("rank_agreement", result))


if __name__ == "__main__":
    main()
