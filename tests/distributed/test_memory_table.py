"""The table of bytes a parameter in the documentation is what running optimizers keep."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from long_runs import sometimes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

for plugin in ("adam", "device", "distributed", "layerwise", "lion", "muon", "soap"):
    pytest.importorskip(f"megaopt_{plugin}")
memory_table = pytest.importorskip("memory_table")

pytestmark = [
    pytest.mark.any_python,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::megaopt_core.errors.UnusedSettingWarning"),
]
ROWS = [line.strip("| ").split(" | ") for line in memory_table.written().splitlines()[2:]]
SHARED = [("adam", "fp32"), ("muon", "bf16, main parameters")]
"""Those whose rows of two ranks are counted here; `python benchmarks/memory_table.py --check` counts every one."""


def counted(rank: int, size: int, rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """Count rows of the table on each rank."""
    import warnings

    warnings.simplefilter("ignore")
    return [[memory_table.row(*row, place) for place in memory_table.PLACES] for row in rows]


def _asked(row: Sequence[str]) -> tuple[str, str, str]:
    optimizer, precision, strategy, *_ = row
    return optimizer.strip("`"), precision, strategy.partition("`, ")[0].strip("`")


def _bytes(row: Sequence[str]) -> list[float]:
    return [float(value) for value in row[3:]]


def test_the_table_has_every_combination():
    """Optimizers, precisions, strategies and places; only SOAP keeps no state in 8 bits."""
    expected = {
        (optimizer, precision, strategy)
        for optimizer in memory_table.BYTES
        for precision in memory_table.PRECISIONS
        for strategy in ("replicated", memory_table.SHARDED[optimizer])
        if memory_table.settings_of(optimizer, precision) is not None
    }
    assert {_asked(row) for row in ROWS} == expected
    assert all(len(_bytes(row)) == 3 for row in ROWS)


@pytest.mark.parametrize("optimizer", sometimes(memory_table.BYTES, always=["muon"]))
def test_rows_of_one_rank_are_what_is_counted(optimizer):
    """In place, and offloaded: on the device and on the CPU."""
    rows = [row for row in ROWS if _asked(row)[0] == optimizer and _asked(row)[2] == "replicated"]
    found = counted(0, 1, [_asked(row) for row in rows])
    assert [[in_place[0], *offloaded] for in_place, offloaded in found] == [_bytes(row) for row in rows]


def test_rows_of_two_ranks_are_what_is_counted(launch):
    """On the first rank, of an optimizer of elements and one of whole matrices."""
    rows = [row for row in ROWS if _asked(row)[:2] in SHARED and _asked(row)[2] != "replicated"]
    found = launch(counted, 2, [_asked(row) for row in rows])[0]
    assert [[in_place[0], *offloaded] for in_place, offloaded in found] == [_bytes(row) for row in rows]
