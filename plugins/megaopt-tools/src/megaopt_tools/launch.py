"""Ranks on this machine, started by torch's elastic launcher; the first one has the display."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import uuid
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megaopt_tools.errors import CommandError

__all__ = ["launch"]

_PATHS = ("text", "out")
"""Options that are paths."""


def launch(command: str, args: Namespace) -> int:
    """Run a command on as many processes as its `--nproc` says, and wait for them.

    Args:
        command: `"train"` or `"compare"`.
        args: its parsed options.

    Returns:
        The exit status of the first rank; 130 after Ctrl-C.

    Raises:
        CommandError: a rank failed.
    """
    options = {name: value for name, value in vars(args).items() if name not in (*_PATHS, "run")}
    paths = {name: str(value) for name in _PATHS if (value := getattr(args, name)) is not None}
    with tempfile.TemporaryDirectory(prefix="megaopt-ranks-") as name:
        folder = Path(name)
        task = json.dumps({"command": command, "options": options, "paths": paths, "status": name})
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=args.nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=name, redirects=dict.fromkeys(range(1, args.nproc), Std.ALL)),
        )
        try:
            with _silent_launcher():
                elastic_launch(config, sys.executable)("-m", "megaopt_tools.rank_worker", task)
        except SignalException:
            status = _first_status(folder)
            return 130 if status is None else int(status["exit"])
        except ChildFailedError as error:
            raise _error(error, folder) from error
        status = _first_status(folder)
        return 1 if status is None else int(status["exit"])


@contextmanager
def _silent_launcher() -> Iterator[None]:
    """Keep torch's launcher from telling of what the ranks tell themselves."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


def _first_status(folder: Path) -> Mapping[str, Any] | None:
    found: dict[int, Any] = _statuses(folder)
    return found.get(0)


def _statuses(folder: Path) -> dict[int, Any]:
    """Return what the ranks have written down at their end."""
    return {
        int(path.stem.rpartition("-")[2]): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("rank-*.json"))
    }


def _error(error: ChildFailedError, folder: Path) -> CommandError:
    """Return what went wrong, in the words of the rank that said most about it."""
    said = {rank: status["message"] for rank, status in _statuses(folder).items() if status["message"]}
    if said:
        return CommandError(said[min(said)])
    rank, failure = error.get_first_failure()
    told = [line for path in folder.rglob(f"{rank}/stderr.log") for line in path.read_text().splitlines()]
    last = f": {told[-1]}" if told else ""
    return CommandError(f"rank {rank} ended with exit status {failure.exitcode}{last}")
