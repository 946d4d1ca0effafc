"""Finds the learning rates that `megaopt train` and `megaopt compare` begin with.

For each optimizer the learning rates 0.001, 0.002, 0.004, 0.008 and 0.016 are tried on seed 1, and further ones by
factors of two while the best lies at an end. Everything else is what the commands do, whose own seed, 0, chooses
nothing. Results go into `results/demo_grid.json` beside this file, the winners into the package:

    python benchmarks/demo_grid.py --threads 1

About 25 runs of half a minute to a minute and a half each; with `--minutes` it ends early, and `--resume` goes on from
what is in the results already.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from megaopt_tools.recipe import Recipe
from megaopt_tools.records import versions
from megaopt_tools.text import builtin_text
from megaopt_tools.training import Run

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "demo_grid.json"
PACKAGED = HERE.parent / "plugins/megaopt-tools/src/megaopt_tools/learning_rates.json"

CANDIDATES: dict[str, dict[str, Any]] = {
    "adam": {"adam_beta2": 0.95},
    # With 0.2 an update has the size of AdamW's, so that one learning rate suits matrices and the rest.
    # Full float32 is the faster precision on most CPUs.
    "adamw": {"adam_beta2": 0.95},
    "sgd": {},
    "lion": {},
    "muon": {"adam_beta2": 0.95, "muon_extra_scale_factor": 0.2, "muon_fp32_matmul_prec": "highest"},
    "soap": {"soap_precondition_frequency": 10},
    "adaptive_muon": {"adam_beta2": 0.95, "muon_extra_scale_factor": 0.2, "muon_fp32_matmul_prec": "highest"},
}
GRID = (0.001, 0.002, 0.004, 0.008, 0.016)
SEED = 1
WORST = 8.0  # bits per byte of a uniform guess; stands for a run that diverged


class Grid:
    """Runs that were made, each once, and written down at once.

    Args:
        steps: of every run.
        known: what an earlier call wrote down.
        minutes: after these no run is begun.
    """

    def __init__(self, steps: int, known: list[dict[str, Any]], minutes: float) -> None:
        self.steps = steps
        self.end = time.monotonic() + 60 * minutes
        self.text = builtin_text()
        self.runs = {(run["optimizer"], run["lr"], run["seed"]): run["val_bits_per_byte"] for run in known}

    def bits(self, optimizer: str, lr: float) -> float:
        """Return held-out bits per byte of a run."""
        key = optimizer, lr, SEED
        if key not in self.runs:
            if time.monotonic() > self.end:
                raise SystemExit("the time is over: go on with --resume")
            recipe = Recipe(optimizer, lr=lr, settings=CANDIDATES[optimizer], steps=self.steps, seed=SEED)
            value = Run(recipe, self.text).train().val_bits_per_byte
            self.runs[key] = None if value is None else round(value, 4)
            self.write(best={})
        value = self.runs[key]
        print(f"{optimizer:13}  lr {lr:<8g}  {'diverged' if value is None else value}", flush=True)
        return WORST if value is None else value

    def search(self, optimizer: str) -> dict[str, Any]:
        """Return the best learning rate, with what each reaches."""
        found = {lr: self.bits(optimizer, lr) for lr in GRID}
        best = min(found, key=found.__getitem__)
        while best in (min(found), max(found)):
            beyond = best / 2 if best == min(found) else best * 2
            found[beyond] = self.bits(optimizer, beyond)
            best = min(found, key=found.__getitem__)
        return {"lr": best, "by_lr": {f"{lr:g}": value for lr, value in sorted(found.items())}}

    def write(self, best: dict[str, Any]) -> None:
        """Write the results."""
        write(
            RESULTS,
            {
                "steps": self.steps,
                "settings": CANDIDATES,
                "text_sha256": self.text.sha256,
                "versions": versions(),
                "best": best,
                "runs": [
                    {"optimizer": optimizer, "lr": lr, "seed": seed, "val_bits_per_byte": value}
                    for (optimizer, lr, seed), value in sorted(self.runs.items())
                ],
            },
        )


def main() -> None:
    """Run the grid and write both files."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Recipe("").steps)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--resume", action="store_true", help="keep the runs that are in the results already")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    grid = Grid(args.steps, json.loads(RESULTS.read_text())["runs"] if args.resume else [], args.minutes)
    best = {optimizer: grid.search(optimizer) for optimizer in CANDIDATES}
    grid.write(best)
    winners = {name: {"lr": best[name]["lr"], "settings": settings} for name, settings in CANDIDATES.items()}
    write(PACKAGED, {"source": RESULTS.relative_to(HERE.parent).as_posix(), "optimizers": winners})
    print(f"\n{'optimizer':13}  {'best lr':>8}  {'bits per byte':>14}")
    for optimizer, found in best.items():
        print(f"{optimizer:13}  {found['lr']:>8g}  {found['by_lr'][format(found['lr'], 'g')]:>14}")


def write(path: Path, record: dict[str, Any]) -> None:
    """Write JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
