"""Steps, saves and loads with this tree and with an older commit, in pairs; and what the import takes.

    python benchmarks/old_pairs.py [--pairs 15] [--old COMMIT]

Two processes keep one optimizer each, of one kind, and take turns on one thread: a step of AdamW, Muon or Lion, or with
AdamW `save_checkpoint`, `load_checkpoint`, or `load_state_dict` of a `state_dict`. A pair is the same number of them in
both, one right after the other. Times are those of the processor, so that other programs count less. The median of
the pairs' ratios (new by old) is at most 1.02 where nothing has become slower.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import write_result
from same_as import OLD_COMMIT, install_old

STEPS = {"adamw": 20, "muon": 3, "lion": 20, "save": 4, "load": 4, "state_dict": 20}
"""Each kind of pair, and how often one side repeats it: all kinds take about as long."""

WORKER = """
import sys, tempfile, time, torch
from megaopt_core import build_optimizer
torch.set_num_threads(1)
torch.manual_seed(0)
name, steps = sys.argv[1], int(sys.argv[2])
layers = [torch.nn.Linear(*sizes) for sizes in [(256, 256), *6 * [(256, 1024), (1024, 256)]]]
model = torch.nn.Sequential(*layers)
for param in model.parameters():
    param.use_muon = param.dim() == 2
    param.grad = torch.randn_like(param)
is_step = name in ("adamw", "muon", "lion")
optimizer = build_optimizer(model, name if is_step else "adamw", lr=1e-6, clip_grad=1.0)
for _ in range(3):
    optimizer.step()
once = optimizer.step
if not is_step:
    from megaopt_checkpoint import load_checkpoint, save_checkpoint

    held = tempfile.TemporaryDirectory()
    folder = held.name
    once = {
        "save": lambda: save_checkpoint(folder + "/last", model, optimizer),
        "load": lambda: load_checkpoint(folder + "/last", model, optimizer),
        "state_dict": lambda: optimizer.load_state_dict(optimizer.state_dict()),
    }[name]
    save_checkpoint(folder + "/last", model, optimizer)
for _ in sys.stdin:
    start = time.process_time()
    for _ in range(steps):
        once()
    print(time.process_time() - start, flush=True)
"""

IMPORT = """
import torch, time
start = time.process_time()
import megaopt_core
print(time.process_time() - start)
"""


def environment(site: Path | None) -> dict[str, str]:
    """Return the variables of a process that imports a tree; `-P` keeps it from finding this one in the folder.

    Args:
        site: where the tree is installed; None: in this environment.
    """
    path = {} if site is None else {"PYTHONPATH": str(site)}
    return {**os.environ, "OMP_NUM_THREADS": "1", **path}


def ratios(name: str, site: Path, pairs: int) -> list[float]:
    """Return for each pair how much longer it takes now.

    Args:
        name: what is measured, a key of `STEPS`.
        site: where the old tree is installed.
        pairs: how many.
    """
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", WORKER, name, str(STEPS[name])],
            env=environment(where),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for where in (site, None)
    ]
    found = []
    for pair in range(pairs + 1):
        seconds = [0.0, 0.0]
        for side in (0, 1) if pair % 2 else (1, 0):
            worker = workers[side]
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
            seconds[side] = float(worker.stdout.readline())
        found.append(seconds[1] / seconds[0])
    for worker in workers:
        worker.communicate()
    return found[1:]  # the first warms caches up


def import_seconds(site: Path | None, times: int = 7) -> float:
    """Return the median of what importing the core takes beside torch.

    Args:
        site: where the tree is installed; None: in this environment.
        times: how often.
    """
    run = [
        float(subprocess.check_output([sys.executable, "-P", "-c", IMPORT], env=environment(site), text=True))
        for _ in range(times)
    ]
    return statistics.median(run)


def main() -> None:
    """Measure, print and write `results/old_pairs.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--old", default=OLD_COMMIT, help="the commit to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = install_old(options.old, Path(folder))
        steps = {name: ratios(name, site, options.pairs) for name in STEPS}
        imports = {"old": import_seconds(site), "new": import_seconds(None)}
    for name, found in steps.items():
        low, _, high = statistics.quantiles(found, n=4)
        print(f"{name:10} {statistics.median(found):.3f} ({low:.3f} to {high:.3f})")
    print(f"import     {1e3 * imports['new']:.0f} ms, formerly {1e3 * imports['old']:.0f} ms")
    write_result("old_pairs", {"old": options.old, "ratios": steps, "import seconds": imports})


if __name__ == "__main__":
    main()
