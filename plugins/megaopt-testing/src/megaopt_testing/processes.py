"""Several ranks of a gloo process group on this machine, forked from this process: what is registered here is there."""

from __future__ import annotations

import builtins
import ctypes
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megaopt_core.errors import MegaoptError

__all__ = ["RankFailedError", "processes_missing", "run_ranks"]

TIMEOUT = 300.0
"""Seconds that all ranks together may take."""

_PR_SET_PDEATHSIG = 1
"""Linux's number of the call that asks for a signal when the parent dies."""


class RankFailedError(MegaoptError, RuntimeError):
    """A rank raised, died, or did not answer.

    Attributes:
        words: of the first rank that failed: what it raised, in one line.
    """

    def __init__(self, message: str, *, words: str) -> None:
        super().__init__(message)
        self.words = words


def processes_missing(_: Any = None) -> str | None:
    """Return why ranks cannot be started here, None when they can."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return "this platform cannot fork processes"
    if not (dist.is_available() and dist.is_gloo_available()):
        return "this torch has no gloo"
    if dist.is_initialized():
        return "a process group is there already: ranks are started by the kit itself"
    return None


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """Run a function on `size` ranks and return what each returned, in rank order.

    Ranks are forked: they see the plugins, temporary ones too, and the variables of this process, and in their
    environment `RANK`, `WORLD_SIZE` and their local ones, as a launcher sets them. The function should
    set gradients itself; a backward pass in a forked process is refused by torch where there are accelerators.

    Args:
        function: called with `(rank, size, *arguments)`; what it returns goes through `torch.save`.
        size: number of ranks.
        *arguments: anything.
        timeout: seconds after which every rank is killed.

    Raises:
        RankFailedError: a rank raised or died, or the time is over.

    Example:
        >>> def place(rank, size):
        ...     return f"{rank} of {size}"
        >>> run_ranks(place, 2)
        ['0 of 2', '1 of 2']
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            given = (theirs, os.getpid(), rank, size, f"{folder}/store", timeout, function, arguments)
            process = context.Process(target=_run, args=given, daemon=True)
            with warnings.catch_warnings():
                # Threads of torch's pools are waiting; a rank computes with one thread, and starts its own.
                warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    errors: dict[int, tuple[str, str]] = {}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            late = f"no answer after {timeout:g} s"
            errors.update({rank: (late, late) for rank in waiting.values() if not errors})
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                results[rank], error = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except EOFError:
                error = ("its process died", "its process died")
            if error is not None:
                errors[rank] = error
                # The others wait in vain: give them a moment to say so themselves.
                deadline = min(deadline, time.monotonic() + 2)
    if errors:
        first = next(iter(errors))
        told = "\n".join(f"rank {rank}: {trace}" for rank, (_, trace) in sorted(errors.items()))
        raise RankFailedError(told, words=f"rank {first} of {len(pipes)}: {errors[first][0]}")
    return results


def _end_with(parent: int) -> None:
    """End this process when its parent does, even if that is killed: nobody would be left to read its answer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _hash_as_a_process_of_its_own(rank: int) -> None:
    """Let text hash otherwise than on the first rank: it does in every process that a launcher starts.

    Not where an object tells its own hash by that of a text, as each member of an `Enum` does: dictionaries that were
    filled before the fork would no longer find it.
    """
    plain = builtins.hash

    def salted(value: object, /) -> int:
        if not isinstance(value, str | bytes) or _within_hash(sys._getframe(1)):
            return plain(value)
        return plain(value) ^ rank

    builtins.hash = salted


def _within_hash(frame: FrameType | None) -> bool:
    """Whether a `__hash__` is among a frame and its callers."""
    while frame is not None and frame.f_code.co_name != "__hash__":
        frame = frame.f_back
    return frame is not None


def _run(
    pipe: Connection,
    parent: int,
    rank: int,
    size: int,
    store: str,
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    _end_with(parent)
    torch.set_num_threads(1)
    # What launchers set: whoever goes by it does so here too.
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    )
    _hash_as_a_process_of_its_own(rank)
    value, error = None, None
    try:
        dist.init_process_group(
            "gloo",
            init_method=Path(store).as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        value = function(rank, size, *arguments)
        with suppress(RuntimeError):  # a rank that failed says so itself
            dist.barrier()
    except BaseException as raised:  # noqa: BLE001 - a rank's error is the caller's
        error = (f"{type(raised).__name__}: {raised}", traceback.format_exc())
    answer = io.BytesIO()
    torch.save((value, error), answer)
    pipe.send_bytes(answer.getvalue())
    pipe.close()
    os._exit(0)  # without what the parent has registered for its own end
