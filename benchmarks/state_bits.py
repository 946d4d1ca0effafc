"""Compares training with states in 8 bits with training in fp32, on the model and text of `megaopt train`.

Each seed trains with fp32 states and with states in 8 bits; what a seed changes is the measure of what 8 bits change.
Results go into `results/state_bits.json` beside this file:

    python benchmarks/state_bits.py --steps 150
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from megaopt_tools.recipe import Recipe
from megaopt_tools.records import versions
from megaopt_tools.text import builtin_text
from megaopt_tools.training import Run

RESULTS = Path(__file__).parent / "results" / "state_bits.json"
SEEDS = (1, 2, 3)

MUON = {"adam_beta2": 0.95, "muon_extra_scale_factor": 0.2, "muon_fp32_matmul_prec": "highest"}
BYTES = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"}
SETTINGS: dict[str, tuple[float, dict[str, Any], dict[str, Any]]] = {
    "adam": (0.004, {"adam_beta2": 0.95}, BYTES),
    "muon": (0.008, MUON, {**BYTES, "muon_momentum_dtype": "uint8"}),
}
"""Optimizer to learning rate, settings, and what keeps its states in 8 bits."""


def bits(optimizer: str, steps: int, seed: int, extra: dict[str, Any]) -> float | None:
    """Return held-out bits per byte of a run.

    Args:
        optimizer: a key of `SETTINGS`.
        steps: of the run.
        seed: of weights and batches.
        extra: further settings.
    """
    lr, settings, _ = SETTINGS[optimizer]
    recipe = Recipe(optimizer, lr=lr, settings={**settings, **extra}, steps=steps, seed=seed)
    return Run(recipe, builtin_text()).train().val_bits_per_byte


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {"steps": args.steps, "seeds": SEEDS, "versions": versions(), "runs": {}}
    for optimizer, (_, _, extra) in SETTINGS.items():
        for kind, settings in (
            ("fp32", {}),
            ("8 bits", extra),
            ("8 bits, random", {**extra, "stochastic_state_rounding": True}),
        ):
            found = [bits(optimizer, args.steps, seed, settings) for seed in SEEDS]
            results["runs"][f"{optimizer}, {kind}"] = found
            print(f"{optimizer:6} {kind:15} {found}  mean {mean(found):.4f}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
