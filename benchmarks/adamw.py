"""AdamW on GPT-2's 124 million parameters: megaopt against every implementation of torch, and what the wrapper adds.

    python benchmarks/adamw.py [--rounds 11] [--threads 1]

All candidates step the same parameters with the same gradients, each with a state of its own, in turns. Clipping is
off: `benchmarks/clip.py` measures that.
"""

import argparse
import statistics

import torch
from harness import gpt2_parameters, interleave, parameters_of, ratio, summary, write_result

from megaopt_core import MegatronOptimizer, build_optimizer

SETTINGS = {"lr": 1e-9, "weight_decay": 0.1}


class Holder(torch.nn.Module):
    """A model that is nothing but parameters."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__()
        for index, param in enumerate(params):
            self.register_parameter(f"p{index}", param)


def ours(params: list[torch.nn.Parameter]) -> MegatronOptimizer:
    """Return megaopt's AdamW on parameters that belong to no layer."""
    return build_optimizer(Holder(params), "adamw", overrides={}, clip_grad=0.0, **SETTINGS)


def overhead(optimizer: MegatronOptimizer, rounds: int) -> tuple[dict[str, dict[str, float]], list[float]]:
    """Return times of our step and of the inner one, and the seconds between them, one a round."""
    times = interleave({"ours": optimizer.step, "inner": optimizer.parts[0].inner.step}, rounds=rounds)
    between = [a - b for a, b in zip(times["ours"], times["inner"], strict=True)]
    return summary(times), between


def main() -> None:
    """Measure, print and write `results/adamw.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    params = gpt2_parameters()
    mine = ours(params)
    candidates = {
        "ours": mine.step,
        "fused": torch.optim.AdamW(params, fused=True, **SETTINGS).step,
        "foreach": torch.optim.AdamW(params, foreach=True, **SETTINGS).step,
        "for-loop": torch.optim.AdamW(params, foreach=False, **SETTINGS).step,
    }
    times = interleave(candidates, rounds=args.rounds)
    large, large_between = overhead(mine, 2 * args.rounds)
    small, small_between = overhead(ours(parameters_of([(256,)] * 150)), 50 * args.rounds)
    share = statistics.median(large_between) / (large["inner"]["median_ms"] * 1e-3)
    result = {
        "elements": sum(param.numel() for param in params),
        "times": summary(times),
        "ours_over_fused": ratio(times, "ours", "fused"),
        "times_faster_than_foreach": ratio(times, "foreach", "ours"),
        "times_faster_than_for_loop": ratio(times, "for-loop", "ours"),
        "wrapper_at_124_million": {"times": large, "share_of_the_inner_step": round(share, 5)},
        "wrapper_at_150_small_tensors": {
            "times": small,
            "milliseconds_more": round(1e3 * statistics.median(small_between), 4),
        },
    }
    print(f"our step takes {result['ours_over_fused']['median']:.3f} of torch's fused step")
    print(f"{result['times_faster_than_foreach']['median']:.1f} x as fast as foreach")
    print(f"{result['times_faster_than_for_loop']['median']:.1f} x as fast as the for-loop")
    print(f"the wrapper adds {100 * share:.2f} % at 124 million parameters")
    print(
        f"and {result['wrapper_at_150_small_tensors']['milliseconds_more']:.3f} ms at 150 tensors of 256 elements"
    )
    print(write_result("adamw", result))


if __name__ == "__main__":
    main()
