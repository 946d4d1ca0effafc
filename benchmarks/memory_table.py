"""Bytes a parameter that optimizers keep between steps, counted on running ones: the table in `docs/memory.md`.

    python benchmarks/memory_table.py           # writes the table into the page
    python benchmarks/memory_table.py --check   # compares only; exits with 1 where it differs

Two processes train one model of matrices; every tensor that model, optimizer and policy keep is counted once, where it
lies, and divided by the number of parameters that the rank's model has. Gradients are not counted.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megaopt_core import build_optimizer

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"
SIDE, LAYERS, RANKS = 128, 4, 2

AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
BYTES = {
    "adam": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "sgd": {"sgd_momentum_dtype": "uint8"},
    "lion": {"exp_avg_dtype": "uint8"},
    "muon": {"muon_momentum_dtype": "uint8"},
    "soap": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
}
"""Optimizer to what keeps its states in 8 bits."""

PRECISIONS = ("fp32", "bf16, main parameters", "bf16, remainders", "bf16, remainders, 8-bit states")
PLACES = {"in place": {}, "offloaded": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}}
SHARDED = {
    "adam": "distributed",
    "sgd": "distributed",
    "lion": "distributed",
    "muon": "layer_wise",
    "soap": "layer_wise",
}


def settings_of(optimizer: str, precision: str) -> dict[str, Any]:
    """Return the settings of a row.

    Args:
        optimizer: a registered name.
        precision: one of `PRECISIONS`.
    """
    return {
        "fp32": {},
        "bf16, main parameters": {"bf16": True},
        "bf16, remainders": AWARE,
        "bf16, remainders, 8-bit states": {**AWARE, **BYTES[optimizer]},
    }[precision]


def kept(model: nn.Module, optimizer: Any) -> tuple[int, int]:
    """Return the bytes that a model and its optimizer keep: on the device of the model, and moved away from it.

    Where the model is on the CPU too, what is away is what a placement holds in memory of its own.

    Args:
        model: the model.
        optimizer: its optimizer, after a step.
    """
    here: dict[int, int] = {}
    away: dict[int, int] = {}
    _count(model.parameters(), here)
    for part in optimizer.parts:
        runner = part.runner
        placed = getattr(runner, "placed", frozenset())
        moved = {id(part.stepped[index]) for index in placed}
        for index, piece in enumerate(part.pieces):
            pieces = away if index in placed and getattr(runner, "params", None) is not None else here
            _count([piece.param, part.stepped[index]], pieces, but=here)
            storage = getattr(part.precision, "_storages", None)
            if storage is not None:
                _count(
                    _tensors([getattr(storage[index], name, None) for name in ("main", "remainder")]),
                    pieces,
                    but=here,
                )
        if getattr(runner, "params", None) is not None:  # the strategy's own pieces stay on the device
            _count([piece.param for piece in runner.params.source.pieces], here)
        for tensor, state in part.inner.state.items():
            _count(_tensors(list(state.values())), away if id(tensor) in moved else here)
    return sum(here.values()), sum(away.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _count(tensors: Any, into: dict[int, int], but: dict[int, int] | None = None) -> None:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Stand-ins that have memory during a step only show one element many times.
        if (0 in tensor.stride() and tensor.numel() > 1) or storage.data_ptr() in (but or {}):
            continue
        into[storage.data_ptr()] = storage.nbytes()


def row(optimizer: str, precision: str, strategy: str, place: str) -> tuple[float, float]:
    """Return bytes a parameter, on the device and on the CPU, of a run of one step.

    Args:
        optimizer: a registered name.
        precision: one of `PRECISIONS`.
        strategy: a registered name.
        place: a key of `PLACES`.
    """
    settings = settings_of(optimizer, precision)
    torch.manual_seed(0)
    layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)]
    model: nn.Module = nn.Sequential(*layers, nn.LayerNorm(SIDE)).to(
        torch.bfloat16 if settings else torch.float32
    )
    for layer in layers:
        layer.weight.use_muon = True  # all of them, whatever a reader takes for an output head
    outer = model if strategy == "replicated" else DistributedDataParallel(model)
    made = build_optimizer(outer, optimizer, lr=1e-3, sharding=strategy, **settings, **PLACES[place])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    made.step()
    made.zero_grad()
    count = sum(param.numel() for param in model.parameters())
    device, cpu = kept(model, made)
    del made, outer, model
    gc.collect()
    return round(device / count, 2), round(cpu / count, 2)


def table() -> str:
    """Return the table; called on every rank."""
    lines = [
        "| optimizer | precision | strategy | in place | offloaded: device | offloaded: CPU |",
        "|---|---|---|---|---|---|",
    ]
    for optimizer in BYTES:
        for precision in PRECISIONS:
            for strategy in ("replicated", SHARDED[optimizer]):
                in_place, offloaded = (row(optimizer, precision, strategy, place) for place in PLACES)
                shown = " | ".join(f"{value:g}" for value in (in_place[0], *offloaded))
                over = "" if strategy == "replicated" else f", {RANKS} ranks"
                lines.append(f"| `{optimizer}` | {precision} | `{strategy}`{over} | {shown} |")
    return "\n".join(lines) + "\n"


def _rank(rank: int, store: str, path: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=RANKS)
    found = table()
    if rank == 0:
        Path(path).write_text(found)
    dist.destroy_process_group()


def counted() -> str:
    """Return the table, counted by processes that are started for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/table.md"
        mp.spawn(_rank, (f"{folder}/store", path), nprocs=RANKS)
        return Path(path).read_text()


def written() -> str:
    """Return the table that stands in the page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def documented(optimizer: str, precision: str, place: str) -> float:
    """Return the bytes a parameter on the model's device, without sharding, that the page tells.

    Args:
        optimizer: a registered name.
        precision: one of `PRECISIONS`.
        place: a key of `PLACES`.
    """
    for line in written().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[:3] == [f"`{optimizer}`", precision, "`replicated`"]:
            return float(cells[3 + list(PLACES).index(place)])
    raise LookupError(f"{PAGE} has no row of {optimizer}, {precision}")


def main() -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the page, and write nothing")
    arguments = parser.parse_args()
    found = counted()
    if arguments.check:
        print("as it is counted" if found == written() else f"differs from what is counted:\n{found}")
        return int(found != written())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + found + END + rest.partition(END)[2])
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
