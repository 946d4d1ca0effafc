"""AdamW on GPT-2's 124 million parameters: megaopt against every implementation of torch, and what the wrapper adds.

    python benchmarks/adamw.py [--rounds 11] [--threads 2]

All candidates step the same parameters with the same gradients, each with a state of its own, in turns. Clipping is
off: `benchmarks/clip.py` measures that.
"""

import argparse
import time

import torch
from harness import gpt2_parameters, interleave, parameters_of, quartiles, ratio, summary, write_result

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


def overhead(optimizer: MegatronOptimizer, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a step takes outside of the inner step that it makes: milliseconds, and shares of the inner step.

    Both times are of the same call, so what else the machine does cannot come between them.
    """
    inner = optimizer.parts[0].inner
    step, inside, outside = inner.step, [], []

    def timed() -> None:
        start = time.perf_counter()
        step()
        inside.append(time.perf_counter() - start)

    inner.step = timed
    for _ in range(rounds + 3):
        start = time.perf_counter()
        optimizer.step()
        outside.append(time.perf_counter() - start - inside[-1])
    del inner.step
    shares = [out / within for out, within in zip(outside[3:], inside[3:], strict=True)]
    return quartiles([1e3 * seconds for seconds in outside[3:]]), quartiles(shares)


def main() -> None:
    """Measure, print and write `results/adamw_*_threads.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
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
    large_ms, large_share = overhead(mine, 3 * args.rounds)
    small_ms, _ = overhead(ours(parameters_of([(256,)] * 150)), 50 * args.rounds)
    result = {
        "elements": sum(param.numel() for param in params),
        "times": summary(times),
        "ours_over_fused": ratio(times, "ours", "fused"),
        "times_faster_than_foreach": ratio(times, "foreach", "ours"),
        "times_faster_than_for_loop": ratio(times, "for-loop", "ours"),
        "wrapper_at_124_million": {"milliseconds": large_ms, "share_of_the_inner_step": large_share},
        "wrapper_at_150_small_tensors": {"milliseconds": small_ms},
    }
    print(f"our step takes {result['ours_over_fused']['median']:.3f} of torch's fused step")
    print(f"{result['times_faster_than_foreach']['median']:.1f} x as fast as foreach")
    print(f"{result['times_faster_than_for_loop']['median']:.1f} x as fast as the for-loop")
    print(f"the wrapper adds {100 * large_share['median']:.2f} % at 124 million parameters")
    print(f"and {small_ms['median']:.3f} ms at 150 tensors of 256 elements")
    print(write_result(f"adamw_{args.threads}_threads", result))


if __name__ == "__main__":
    main()
