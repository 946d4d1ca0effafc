"""Finds the learning rates that `megaopt train` and `megaopt compare` begin with.

For each optimizer the learning rates 0.001, 0.002, 0.004, 0.008 and 0.016 are tried on one seed, and further ones by
factors of two while the best lies at an end. The best one then runs on other seeds, which chose nothing. Everything
else is what the commands do. Results go into `results/demo_grid.json` beside this file, the winners into the package:

    python benchmarks/demo_grid.py

About fifteen runs of half a minute to a minute and a half each.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from megaopt_tools.recipe import Recipe
from megaopt_tools.records import versions
from megaopt_tools.text import Text, builtin_text
from megaopt_tools.training import Run

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "demo_grid.json"
PACKAGED = HERE.parent / "plugins/megaopt-tools/src/megaopt_tools/learning_rates.json"

CANDIDATES: dict[str, dict[str, Any]] = {
    "adam": {"adam_beta2": 0.95},
    # With 0.2 an update has the size of AdamW's, so that one learning rate suits matrices and the rest.
    # Full float32 is the faster precision on most CPUs.
    "muon": {"adam_beta2": 0.95, "muon_extra_scale_factor": 0.2, "muon_fp32_matmul_prec": "highest"},
}
GRID = (0.001, 0.002, 0.004, 0.008, 0.016)
GRID_SEED = 1
OTHER_SEEDS = (0, 2, 3)


def run(optimizer: str, lr: float, seed: int, steps: int, text: Text) -> float:
    """Return held-out bits per byte; infinity for a run that diverged."""
    recipe = Recipe(optimizer, lr=lr, settings=CANDIDATES[optimizer], steps=steps, seed=seed)
    value = Run(recipe, text).train().val_bits_per_byte
    shown = "diverged" if value is None else f"{value:.4f}"
    print(f"{optimizer:10}  lr {lr:<8g}  seed {seed}  {shown}", flush=True)
    return math.inf if value is None else value


def search(optimizer: str, steps: int, text: Text) -> dict[float, float]:
    """Return bits per byte by learning rate; the best is not at an end."""
    found = {lr: run(optimizer, lr, GRID_SEED, steps, text) for lr in GRID}
    for lr in beyond(found):
        found[lr] = run(optimizer, lr, GRID_SEED, steps, text)
    return dict(sorted(found.items()))


def beyond(found: dict[float, float]) -> Iterator[float]:
    """Yield the next learning rate outside as long as the best one is at an end."""
    while True:
        best = min(found, key=lambda lr: found[lr])
        if best == min(found):
            yield best / 2
        elif best == max(found):
            yield best * 2
        else:
            return


def main() -> None:
    """Run the grid and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Recipe("").steps)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = builtin_text()
    tables, winners = {}, {}
    for optimizer, settings in CANDIDATES.items():
        grid = search(optimizer, args.steps, text)
        best = min(grid, key=lambda lr: grid[lr])
        others = [run(optimizer, best, seed, args.steps, text) for seed in OTHER_SEEDS]
        tables[optimizer] = {
            "settings": settings,
            "grid": [{"lr": lr, "val_bits_per_byte": finite(bits)} for lr, bits in grid.items()],
            "best_lr": best,
            "other_seeds": dict(zip(OTHER_SEEDS, map(finite, others), strict=True)),
            "other_seeds_mean": finite(mean(others)),
            "other_seeds_stdev": stdev(others) if all(map(math.isfinite, others)) else None,
        }
        winners[optimizer] = {"lr": best, "settings": settings}
    record = {
        "steps": args.steps,
        "grid_seed": GRID_SEED,
        "text_sha256": text.sha256,
        "threads": args.threads,
        "versions": versions(),
        "optimizers": tables,
    }
    write(RESULTS, record)
    write(PACKAGED, {"source": RESULTS.relative_to(HERE.parent).as_posix(), "optimizers": winners})
    print(f"\n{'optimizer':10}  {'best lr':>8}  bits per byte, mean of seeds {OTHER_SEEDS}")
    for optimizer, table in tables.items():
        print(f"{optimizer:10}  {table['best_lr']:>8g}  {table['other_seeds_mean']}")


def finite(value: float) -> float | None:
    """Return a number that JSON can hold."""
    return value if math.isfinite(value) else None


def write(path: Path, record: dict[str, Any]) -> None:
    """Write JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
