"""Start real processes that talk over gloo, run one function of a test file on each, and collect what it returns.

Processes are forked from a server that has imported torch once, so that starting them takes a fraction of a second.

A test file says what its ranks do in functions that take `(rank, size, *arguments)`:

    def sum_of_ranks(rank, size):
        total = torch.tensor([rank])
        dist.all_reduce(total)
        return total.item()

    @pytest.mark.distributed
    def test_sum(launch):
        assert launch(sum_of_ranks, 2) == [1, 1]
"""

import importlib.util
import io
import os
import select
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from warm import server

__all__ = ["RankError", "launch"]

TIMEOUT = 600.0
"""Seconds that all ranks together may take."""


class RankError(Exception):
    """Some ranks failed; the message holds what each of them raised."""


def launch(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    timeout: float = TIMEOUT,
    group_timeout: float = 300.0,
    may_die: bool = False,
) -> list[Any]:
    """Run a function on `size` ranks of a gloo process group and return what it returned, in rank order.

    Args:
        function: a function at the top level of a file; called with `(rank, size, *arguments)`.
        size: number of processes.
        *arguments: picklable.
        timeout: seconds after which everything is killed.
        group_timeout: seconds after which a collective fails.
        may_die: a process that ends without an answer counts as one that returned None.

    Raises:
        RankError: a rank raised or died, or the time is over.
    """
    context = server()
    code = function.__code__
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            work = (code.co_filename, function.__name__, arguments)
            process = context.Process(
                target=_run, args=(theirs, rank, size, f"{folder}/store", group_timeout, *work), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout, may_die=may_die)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout: float, *, may_die: bool) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    errors: dict[int, str] = {}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            errors.update(dict.fromkeys(waiting.values(), f"no answer after {timeout} seconds"))
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                value, error = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except EOFError:
                value, error = None, None if may_die else "the process died"
            results[rank] = value
            if error is not None:
                errors[rank] = error
                # The others will wait in vain: give them a moment to say so themselves.
                deadline = min(deadline, time.monotonic() + 5)
    if errors:
        raise RankError("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))
    return results


def _load(path: str) -> ModuleType:
    name = f"launched_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)
    return module


def _await_all(folder: Path, rank: int, size: int) -> None:
    """Wait until every rank is here, so that no short timeout of a test's group runs while some are starting."""
    (folder / f"started{rank}").touch()
    while not all((folder / f"started{other}").exists() for other in range(size)):
        time.sleep(0.005)


def _run(
    pipe: Connection,
    rank: int,
    size: int,
    store: str,
    group_timeout: float,
    path: str,
    name: str,
    arguments: tuple,
) -> None:
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    torch.set_num_threads(1)
    value, error = None, None
    try:
        module = _load(path)
        _await_all(Path(store).parent, rank, size)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=group_timeout),
        )
        value = getattr(module, name)(rank, size, *arguments)
    except BaseException:  # noqa: BLE001 - everything is reported to the test
        error = traceback.format_exc()
    answer = io.BytesIO()
    torch.save((value, error), answer)
    pipe.send_bytes(answer.getvalue())
    pipe.close()
    if error is None:
        dist.destroy_process_group()


def _end_with(pipe: Connection) -> None:
    """End this process when nobody is left to read its answer: the test run is over, whatever has killed it."""
    watch = select.poll()
    watch.register(pipe.fileno(), 0)
    if watch.poll() and not pipe.closed:
        os._exit(1)
