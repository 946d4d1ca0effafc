"""Kill runs while they save, and look what is left: the last complete checkpoint must load, every time.

    python tests/faults/kill_during_save.py --kills 50

A run saves to one path again and again, at every save with another number in every parameter and state. After a random
time one of its processes, or all of them, are killed with SIGKILL. What is at the path then must verify, load, hold one
number throughout, and be no older than the last save that had returned.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaopt_checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

MODES = ("alone", "all of two", "one of two", "alone, in the background")
PATIENCE = 300.0
WIDTH = 512


def build() -> tuple[torch.nn.Module, MegatronOptimizer]:
    """Return a model of half a million parameters and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    return model, build_optimizer(model, "adam", lr=1e-3)


def fill(model: torch.nn.Module, optimizer: MegatronOptimizer, number: float) -> None:
    """Put one number everywhere."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(number)
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param][key].fill_(number)


def holds(model: torch.nn.Module, optimizer: MegatronOptimizer) -> set[float]:
    """Return the numbers that are anywhere."""
    numbers = set()
    for param in model.parameters():
        for tensor in (param, optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]):
            numbers.update(tensor.detach().unique().tolist())
    return numbers


def run(
    rank: int, size: int, path: str, store: str, first: int, background: bool, returned: Any, begun: Any
) -> None:
    """Save for ever."""
    torch.set_num_threads(1)
    if size > 1:
        limit = timedelta(seconds=PATIENCE)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit
        )
    model, optimizer = build()
    number = first
    while True:
        fill(model, optimizer, number)
        if rank == 0:
            begun.set()
        try:
            pending = save_checkpoint(path, model, optimizer, extra=number, async_save=background)
            if pending is not None:
                pending.result()
        except Exception:  # noqa: BLE001 - the other rank is dead: that is the point
            os._exit(3)
        if rank == 0:
            returned.value = number
        number += 1


def kill_once(
    context: Any, folder: str, index: int, chance: random.Random, last: int
) -> tuple[int, str, bool]:
    """Start a run, kill it, check what it left; return the newest number that may be expected and what happened."""
    mode = MODES[index % len(MODES)]
    size = 2 if "two" in mode else 1
    path = Path(folder) / "last"
    # Without a lock, which a process that is killed might hold for ever.
    returned, begun = context.RawValue("q", last), context.Event()
    processes = [
        context.Process(
            target=run,
            args=(
                rank,
                size,
                str(path),
                f"{folder}/store{index}",
                last + 1,
                "background" in mode,
                returned,
                begun,
            ),
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    if not begun.wait(PATIENCE):
        raise SystemExit(f"the run did not begin to save within {PATIENCE} seconds")
    time.sleep(chance.uniform(0.0, 0.35))
    victims = [chance.choice(processes)] if mode == "one of two" else processes
    for process in victims:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            raise SystemExit(f"{mode}: the other rank waits for ever")
    interrupted = (Path(folder) / ".last.saving").exists()
    if not path.exists() and returned.value == 0 and last == 0:
        return 0, mode, interrupted
    verify_checkpoint(path)
    model, optimizer = build()
    number = load_checkpoint(path, model, optimizer).extra
    if holds(model, optimizer) != {float(number)} or number < returned.value:
        raise SystemExit(f"{mode}: lost: {number} is at the path, {returned.value} was saved before")
    return number, mode, interrupted


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill as often as asked, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)  # noqa: S311 - the same kills again
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megaopt_core.build", "megaopt_checkpoint.saving"])
    counts = dict.fromkeys(MODES, 0)
    during, last = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.kills):
            last, mode, interrupted = kill_once(context, folder, index, chance, last)
            counts[mode] += 1
            during += interrupted
    result = {
        "kills": options.kills,
        "lost": 0,
        "killed while files were being written": during,
        "modes": counts,
    }
    print(json.dumps({**result, "saves": last}))


if __name__ == "__main__":
    sys.exit(main())
