"""Compares training with states in 8 bits with training in fp32, on the model and text of `megaopt train`.

Each seed trains with fp32 states and with states in 8 bits; what a seed changes is the measure of what 8 bits change.
Results go into `results/state_bits.json` beside this file:

    python benchmarks/state_bits.py --steps 150
    python benchmarks/state_bits.py muon --seeds 2 3  # the others' runs in the file stay
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from megaopt_tools.recipe import Recipe
from megaopt_tools.records import versions
from megaopt_tools.text import builtin_text
from megaopt_tools.training import Run

RESULTS = Path(__file__).parent / "results" / "state_bits.json"
SEEDS = (1, 2, 3)
"""What the file is to have of every kind; each run is written when it is done."""

MUON = {"adam_beta2": 0.95, "muon_extra_scale_factor": 0.2, "muon_fp32_matmul_prec": "highest"}
BYTES: dict[str, Any] = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "uint8",
    "exp_avg_sq_dtype": "uint8",
}
SETTINGS: dict[str, tuple[float, dict[str, Any], dict[str, Any]]] = {
    "adam": (0.004, {"adam_beta2": 0.95}, {}),
    "muon": (0.008, MUON, {"muon_momentum_dtype": "uint8"}),
    "soap": (0.004, {"adam_beta2": 0.95}, {}),
}
"""Optimizer to learning rate, settings, and what keeps more than moments in 8 bits."""


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


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "8 bits": BYTES,
    "8 bits, random": {**BYTES, "stochastic_state_rounding": True},
}
"""How states are kept; what an optimizer has beside moments comes from `SETTINGS`."""


def saved(steps: int) -> dict[str, Any]:
    """Return the runs of this length that the file has.

    Args:
        steps: of each run.
    """
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found["runs"] if found.get("steps") == steps else {}


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("optimizers", nargs="*", default=list(SETTINGS), help=", ".join(SETTINGS))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for optimizer in args.optimizers:
        for seed in args.seeds:
            for kind in args.kinds:
                narrow = SETTINGS[optimizer][2] if KINDS[kind] else {}
                found = bits(optimizer, args.steps, seed, {**narrow, **KINDS[kind]})
                runs = saved(args.steps)
                runs.setdefault(f"{optimizer}, {kind}", {})[str(seed)] = found
                results = {"steps": args.steps, "versions": versions(), "runs": runs}
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{optimizer:6} {kind:15} seed {seed}  {found}", flush=True)


if __name__ == "__main__":
    main()
