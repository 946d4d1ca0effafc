"""Gradient norm and clipping of GPT-2's 124 million gradients, against `torch.nn.utils.clip_grad_norm_`.

    python benchmarks/clip.py [--rounds 21] [--threads 2]

Three questions: what a step costs in which nothing is clipped, what it costs when the norm is above the limit, and
what it costs when a fused optimizer takes the factor over. The last is also asked of clipping together with the AdamW
step that follows it, since a fused step that scales does a little more work.

Norms are bound by memory: what torch needs to read all gradients once (their sum), and to scale them once, says how
fast anything can be on the machine at hand.
"""

import argparse
import math

import torch
from harness import gpt2_parameters, interleave, ratio, summary, write_result

from megaopt_core import FP32Optimizer, OptimizerConfig

NEVER = 1e9


class Falling:
    """Limits each of which is below the norm that the one before left: something is clipped every time."""

    def __init__(self, norm: float) -> None:
        self.limit = norm

    def __call__(self) -> float:
        """Return the next limit."""
        self.limit *= 0.95
        return self.limit


def wrapped(inner: torch.optim.Optimizer) -> FP32Optimizer:
    """Return a torch optimizer under megaopt's pipeline, which clips when it is told to."""
    return FP32Optimizer(inner, OptimizerConfig(lr=1e-9, clip_grad=0.0))


def clip(optimizer: FP32Optimizer, limit: float) -> None:
    """Compute the norm and keep the factor for the step."""
    optimizer.prepare_grads()
    optimizer.clip_grad_norm(limit)


def clip_now(optimizer: FP32Optimizer, limit: float) -> None:
    """Clip with a pass over the gradients, as for an optimizer that takes no factor."""
    clip(optimizer, limit)
    with optimizer.parts[0]._scaled_grads():
        pass


def clip_and_step(optimizer: FP32Optimizer, limit: float) -> None:
    """Clip and step, the factor being applied by the step."""
    clip(optimizer, limit)
    optimizer.step_with_ready_grads()


def main() -> None:
    """Measure, print and write `results/clip_*_threads.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    params = gpt2_parameters()
    grads = [param.grad for param in params]
    exact = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
    limits = Falling(exact)
    loop = wrapped(torch.optim.SGD(params, lr=1e-9))
    plain = torch.optim.AdamW(params, lr=1e-9, fused=True)
    fused = wrapped(plain)
    loop.prepare_grads()
    errors = {
        "ours": abs(loop.get_grad_norm() - exact) / exact,
        "torch": abs(torch.nn.utils.get_total_norm(grads).item() - exact) / exact,
    }

    def torch_clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, limits())
        plain.step()

    cases = {
        "nothing is clipped": {
            "torch": lambda: torch.nn.utils.clip_grad_norm_(params, NEVER),
            "ours": lambda: clip_now(loop, NEVER),
        },
        "clipped": {
            "torch": lambda: torch.nn.utils.clip_grad_norm_(params, limits()),
            "ours, a pass": lambda: clip_now(loop, limits()),
            "ours, left to the step": lambda: clip(fused, limits()),
        },
        "bounds": {
            "torch": lambda: torch.nn.utils.clip_grad_norm_(params, NEVER),
            "reading once": lambda: [grad.sum() for grad in grads],
            "scaling once": lambda: torch._foreach_mul_(grads, 1.0),
        },
        "clipped, with the AdamW step": {
            "torch": torch_clip_and_step,
            "ours": lambda: clip_and_step(fused, limits()),
        },
    }
    result = {
        "elements": sum(grad.numel() for grad in grads),
        "relative_error_of_the_norm": errors,
        "cases": {},
    }
    for case, candidates in cases.items():
        times = interleave(candidates, rounds=args.rounds)
        speedups = {name: ratio(times, "torch", name) for name in candidates if name != "torch"}
        result["cases"][case] = {"times": summary(times), "times_faster_than_torch": speedups}
        for name, speedup in speedups.items():
            print(f"{case}: {name} is {speedup['median']:.2f} x torch's speed")
    print(f"relative error of the norm: ours {errors['ours']:.1e}, torch {errors['torch']:.1e}")
    print(write_result(f"clip_{args.threads}_threads", result))


if __name__ == "__main__":
    main()
