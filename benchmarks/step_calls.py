"""Calls and files of a second step, and files of a second build: what Python does before and after the kernels.

    python benchmarks/step_calls.py [--where NAME]

A call is one of a function of megaopt (a comprehension that is a generator counts each time it goes on); a file is one
that such a function stands in. `--where` lists the functions of one row, most calls first.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from attrs import frozen
from torch import nn

from megaopt_core import build_optimizer

ROWS: dict[str, dict[str, Any]] = {
    "adam": {"clip_grad": 0.0},
    "adam, clipped": {},
    "adam, bf16 clipped": {"bf16": True},
    "muon, clipped": {},
}
"""Name of an optimizer, and settings."""


@frozen
class Count:
    """The calls of one action.

    Args:
        calls: file and function to how many times.
    """

    calls: Counter[tuple[str, str]]

    @property
    def total(self) -> int:
        """All calls."""
        return self.calls.total()

    def files(self, package: str = "megaopt") -> int:
        """Return how many files were visited.

        Args:
            package: what their path holds: `megaopt_core` for the core's alone.
        """
        return len({file for file, _ in self.calls if package in file})


def counted(action: Callable[[], Any]) -> Count:
    """Return what an action calls.

    Args:
        action: it is called once.
    """
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "megaopt" in file and Path(file).name != Path(__file__).name:
            calls[file, frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return Count(calls)


def model_of(settings: dict[str, Any]) -> nn.Sequential:
    """Return two layers, of the dtype that the settings ask for.

    Args:
        settings: of the optimizer.
    """
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def second_step(row: str) -> Count:
    """Return what the second step of an optimizer calls.

    Args:
        row: one of `ROWS`.
    """
    settings = ROWS[row]
    model = model_of(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model of two layers leaves roles in doubt
        optimizer = build_optimizer(model, row.partition(",")[0], lr=1e-3, **settings)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return counted(optimizer.step)


def second_build(name: str) -> Count:
    """Return what the second build of an optimizer calls.

    Args:
        name: of the optimizer.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build_optimizer(model_of({}), name, lr=1e-3)
        model = model_of({})
        return counted(lambda: build_optimizer(model, name, lr=1e-3))


def main() -> None:
    """Print the table, or the functions of one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--where", choices=[*ROWS], help="list the functions that this step calls")
    asked = parser.parse_args().where
    if asked:
        for (file, function), number in second_step(asked).calls.most_common():
            sys.stdout.write(
                f"{number:4d}  {file.partition('megaopt')[1]}{file.partition('megaopt')[2]}: {function}\n"
            )
        return
    counts = {f"a step of {row}": second_step(row) for row in ROWS}
    counts["a build of muon"] = second_build("muon")
    for name, count in counts.items():
        sys.stdout.write(
            f"{name:30} {count.total:6,} calls, {count.files():3d} files, {count.files('megaopt_core')} of the core\n"
        )


if __name__ == "__main__":
    main()
