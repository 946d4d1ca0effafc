"""Runs a share of the cases of `benchmarks/same_as.py` with the tree that is importable here.

    python same_as_worker.py FOLDER CHECKPOINTS old|new TEXT SHARE SHARES

Cases of one number of ranks run in the same processes, each with process groups of its own: starting processes, and
importing what optimizers need, would take longer than the steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megaopt_testing import run_ranks
from same_as_cases import OPTIMIZERS, combination, combinations, run_case, situations

TIMEOUT = timedelta(seconds=120)
"""Time that one case may wait for another rank."""

BATCH = 40
"""Cases that run in the same processes: a case that ends them makes no more run again."""

type Case = tuple[int, str, int, Any, str]
"""Number, name, ranks, function, and words of the error that is expected."""


def import_all() -> None:
    """Run each optimizer once, so that every process that is forked from this one finds imported what it needs."""
    for optimizer in OPTIMIZERS:
        run_case(lambda rank, size, name=optimizer: combination(name, "replicated", "bf16", rank, size), 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megaopt_checkpoint  # noqa: F401 - for the cases that load
        import torch.distributed.fsdp  # noqa: F401


def run_together(rank: int, size: int, cases: Sequence[Case], folder: str) -> list[list[Any]]:
    """Run cases one after the other, each in a world of its own; return what this rank recorded in each.

    Args:
        rank: this rank.
        size: number of ranks.
        cases: the cases, the same on every rank.
        folder: an empty folder, where ranks find each other.
    """
    found = []
    store = dist.FileStore(f"{folder}/worlds", size)
    for number, _, _, function, _ in cases:
        _leave_together(store, f"before {number}", size)
        world = dist.PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=world, rank=rank, world_size=size, timeout=TIMEOUT)
        found.append(run_case(function, rank, size))
    return found


def _leave_together(store: dist.Store, name: str, size: int) -> None:
    """End the process group when every rank is done with it: a connection that ends early is an error of the others."""
    dist.barrier()
    store.add(name, 1)
    while store.add(name, 0) < size:
        time.sleep(0.001)
    dist.destroy_process_group()


def record(cases: Sequence[Case]) -> list[list[Any]]:
    """Return for each case what its ranks recorded; cases that cannot run together run one by one.

    Args:
        cases: cases of one number of ranks.
    """
    size = cases[0][2]
    if size == 1:
        return [[run_case(function, 0, 1)] for _, _, _, function, _ in cases]
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_ranks(run_together, size, cases, folder, timeout=10.0 * len(cases) + 60)
        except RuntimeError as error:
            if len(cases) == 1:
                return [[[["failed", f"{type(error).__name__}: {error}"]]]]
            print(f"one of {len(cases)} cases on {size} ranks fails: each runs alone now", file=sys.stderr)
            return [recorded for case in cases for recorded in record([case])]
    return [list(ranks) for ranks in zip(*found, strict=True)]


def main() -> None:
    """Run the share and write one file a case."""
    folder, checkpoints, tree, only, share, shares = sys.argv[1:]
    every = [*combinations(), *situations(Path(checkpoints), write=tree == "old")]
    numbered: list[Case] = [(number, *case) for number, case in enumerate(every) if only in case[0]]
    import_all()
    for size in sorted({case[2] for case in numbered}):
        mine = [case for case in numbered if case[2] == size][int(share) :: int(shares)]
        for start in range(0, len(mine), BATCH):
            batch = mine[start : start + BATCH]
            for (number, name, _, _, refusal), ranks in zip(batch, record(batch), strict=True):
                entry = {"name": name, "ranks": ranks, "refusal": refusal}
                (Path(folder) / f"{number:04}.json").write_text(json.dumps(entry))


if __name__ == "__main__":
    main()
