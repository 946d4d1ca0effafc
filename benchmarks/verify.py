"""Time of checking a checkpoint's checksums, beside reading its files once; and what checksums cost a save.

    python benchmarks/verify.py [--rounds 15] [--layers 2] [--folder /dev/shm]

One checkpoint has the shapes of GPT-2 with fewer layers, one a single large matrix, one 2,000 vectors. Reading is one
thread that fills one block of memory again and again, as `cat` does. Both begin with the files in the system's cache,
or, where a file system keeps one apart from the files, without them (`posix_fadvise`). A save is timed beside one whose
checksums are not computed.
"""

import argparse
import os
import shutil
import tempfile
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import patch

import torch
from checkpoint import gpt
from harness import interleave, median_interval, ratio, summary, write_result
from megaopt_checkpoint import save_checkpoint, verify_checkpoint
from torch import nn

from megaopt_core import build_optimizer

BLOCK = 2**20


def vectors():
    """Return a model of many short parameters."""
    return nn.ParameterDict({f"vector{index}": nn.Parameter(torch.ones(64)) for index in range(2_000)})


def read(folder):
    """Read every file of a folder once."""
    memory = memoryview(bytearray(BLOCK))
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def forget(folder):
    """Let the system forget what it has of a folder's files; they are on the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Without:
    """Something that is timed from the disk."""

    def __init__(self, action, folder):
        self.action, self.prepare = action, lambda: forget(folder)

    def __call__(self):
        self.action()


def no_sum(memory, beside):
    """Return a checksum that nobody computed."""
    found = Future()
    found.set_result("0" * 16)
    return found


def saves(folder, model, optimizer):
    """Return a save, and one without checksums."""

    def without():
        with patch("megaopt_checkpoint.writer._sum_meanwhile", no_sum):
            save_checkpoint(folder / "other", model, optimizer)

    return {"save": lambda: save_checkpoint(folder / "last", model, optimizer), "save without sums": without}


def compared(candidates, above, below, rounds):
    """Return times and their ratio, by the clock and by the processor's time."""
    found = {}
    for clock in (time.perf_counter, time.process_time):
        times = interleave(candidates, rounds=rounds, warmup=1, clock=clock)
        found[clock.__name__] = {
            "times": summary(times),
            "ratio": {**ratio(times, above, below), **median_interval(times, above, below)},
        }
    return found


def main():
    """Measure, print and write `results/verify.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", default=None, help="where to write; the default is the temporary folder")
    parser.add_argument("--name", default="verify", help="of the result")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    models = {
        f"gpt2 with {args.layers} layers": lambda: gpt(args.layers),
        "one matrix of 4096 x 4096": lambda: nn.Linear(4096, 4096, bias=False),
        "2,000 vectors of 64": vectors,
    }
    found = {"processors": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    for name, make in models.items():
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        last = folder / "last"
        try:
            model = make()
            optimizer = build_optimizer(model, "sgd", lr=0.1, sgd_momentum=0.9)
            save_checkpoint(last, model, optimizer)
            candidates = {
                "read": lambda last=last: read(last),
                "verify": lambda last=last: verify_checkpoint(last),
            }
            cold = {name: Without(action, last) for name, action in candidates.items()}
            size = sum(path.stat().st_size for path in last.iterdir())
            found[name] = {
                "bytes": size,
                "in the cache": compared(candidates, "verify", "read", args.rounds),
                "from the disk": compared(cold, "verify", "read", args.rounds),
                "saving": compared(saves(folder, model, optimizer), "save", "save without sums", args.rounds),
            }
            for what, by_clock in found[name].items():
                if what != "bytes":
                    print(
                        name,
                        what,
                        {clock: entry["ratio"]["median"] for clock, entry in by_clock.items()},
                        flush=True,
                    )
        finally:
            shutil.rmtree(folder)
    print(write_result(args.name, found))


if __name__ == "__main__":
    main()
