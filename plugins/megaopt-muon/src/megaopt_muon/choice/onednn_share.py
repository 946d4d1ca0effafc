"""Which part of the time of torch's own products in float32 oneDNN's take on this processor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import torch

from megaopt_muon.products.onednn import column_blocks, is_multiplied, next_blocks, with_product
from megaopt_muon.products.panels import SymmetricMatrix
from megaopt_muon.products.symmetric import gram_matrix, gram_of_columns, is_tall, symmetric_product
from megaopt_muon.products.workspace import Workspace

__all__ = ["onednn_share", "probed_share", "probed_shares", "share_for"]

_PROBED: Final = (448, 256, 192, 128)
"""Rows of the square matrices that probes measure with."""

_ROUNDS: Final = (3, 9)
"""The least and the most rounds of a probe."""

_ENOUGH: Final = 0.01
"""Seconds after which a probe ends, all its least rounds measured."""


def probed_share(small: int) -> float:
    """Measure in some milliseconds, once for matrices of about a size: oneDNN gains more with larger ones.

    Args:
        small: rows of the matrix that will be iterated.
    """
    size = next((size for size in _PROBED if small >= size), _PROBED[-1])
    return _measured(size, torch.get_num_threads())


def probed_shares(rows: int) -> dict[int, float]:
    """Return what :func:`probed_share` does for all matrices of at most so many rows, by rows from which on it holds.

    Args:
        rows: that any matrix has at most.
    """
    return {size: probed_share(size) for size in _PROBED if size <= rows}


def share_for(shares: Mapping[int, float], small: int) -> float:
    """Return the part that holds for a size; 1, as long as torch's own products, where none was measured.

    Args:
        shares: by rows from which on they hold.
        small: rows of the matrix that will be iterated.
    """
    return shares[max(sizes)] if (sizes := [size for size in shares if size <= small]) else 1.0


@cache
def _measured(size: int, threads: int) -> float:
    del threads  # the key: with another number, another share
    least, most = _ROUNDS
    return onednn_share(size, 1, least=least, most=most)


def onednn_share(size: int, aspect: int, *, least: int, most: int) -> float:
    """Return how long a step with oneDNN's products takes, in times of the same with torch's.

    Both take turns, and the fastest round of each counts: of one thread by its own time, which other work on its core
    is no part of.

    Args:
        size: rows of the matrix.
        aspect: how many times longer than high it is.
        least: how often each is measured, after one round that is not.
        most: how often it is where that takes no time.

    Returns:
        The part; 1 where oneDNN does not multiply.
    """
    device = torch.device("cpu")
    if not is_multiplied(size, torch.float32, device):
        return 1.0
    x = torch.eye(size, aspect * size, dtype=torch.float32, device=device)
    steps = {"onednn": _onednn_step(x), "torch": _torch_step(x)}
    fastest = dict.fromkeys(steps, math.inf)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = time.perf_counter()
    for number in range(most + 1):
        if number > least and time.perf_counter() - begin > _ENOUGH:
            break
        for name, step in steps.items():
            start = clock()
            step()
            if number:
                fastest[name] = min(fastest[name], max(clock() - start, 1e-9))
    return fastest["onednn"] / fastest["torch"]


def _onednn_step(x: torch.Tensor) -> Callable[[], Any]:
    blocks, like = column_blocks(x), (x.shape[0], x.shape[0])
    gram, m = (SymmetricMatrix(x.new_empty(like), onednn=True) for _ in range(2))

    def step() -> None:
        if len(gram.panels) == 1:
            next_blocks(blocks, (0.5, 0.5, 0.5))
            return
        gram_of_columns(blocks, gram)
        symmetric_product(gram, gram, m, factor=0.5, plus_left=0.5)
        for block in blocks:
            with_product(0.5, m.values, block)

    return step


def _torch_step(x: torch.Tensor) -> Callable[[], Any]:
    tall, workspace = is_tall(x), Workspace()
    like, out = ((x.shape[0], x.shape[0]), x.dtype, x.device), torch.empty_like(x)
    gram, m = (workspace.take_symmetric(name, *like) for name in ("gram", "m"))

    def step() -> None:
        gram_matrix(x, gram, tall=tall)
        symmetric_product(gram, gram, m, factor=0.5, plus_left=0.5)
        left, right = (x, m.values) if tall else (m.values, x)
        torch.addmm(x, left, right, beta=0.5, out=out)

    return step
