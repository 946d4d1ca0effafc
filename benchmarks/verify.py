"""Time of checking a checkpoint's checksums, beside reading its files once; both from the system's cache.

    python benchmarks/verify.py [--rounds 9]

One checkpoint has the shapes of GPT-2 (12 layers, or fewer), one a single large matrix, one 2,000 vectors. Reading is
one thread that fills one block of memory again and again, as `cat` does.
"""

import argparse
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
from checkpoint import gpt
from harness import interleave, ratio, summary, write_result
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


def main():
    """Measure, print and write `results/verify.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    models = {
        f"gpt2 with {args.layers} layers": lambda: gpt(args.layers),
        "one matrix of 8192 x 8192": lambda: nn.Linear(8192, 8192, bias=False),
        "2,000 vectors of 64": vectors,
    }
    found = {"processors": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    for name, make in models.items():
        folder = Path(tempfile.mkdtemp())
        try:
            model = make()
            save_checkpoint(folder / "last", model, build_optimizer(model, "sgd", lr=0.1, sgd_momentum=0.9))
            candidates = {
                "read": lambda folder=folder: read(folder / "last"),
                "verify": lambda folder=folder: verify_checkpoint(folder / "last"),
            }
            measured = {}
            for clock in (time.perf_counter, time.process_time):
                times = interleave(candidates, rounds=args.rounds, clock=clock)
                measured[clock.__name__] = {"times": summary(times), "ratio": ratio(times, "verify", "read")}
            found[name] = measured
            print(name, {clock: entry["ratio"]["median"] for clock, entry in measured.items()})
        finally:
            shutil.rmtree(folder)
    print(write_result("verify", found))


if __name__ == "__main__":
    main()
