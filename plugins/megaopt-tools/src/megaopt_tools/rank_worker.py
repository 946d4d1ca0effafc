"""One rank of a command: `launch` starts this module as a process."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import distributed

from megaopt_core import MegaoptError
from megaopt_tools.compare_command import run_compare
from megaopt_tools.train_command import run_train

__all__ = ["main"]

_COMMANDS: Mapping[str, Callable[[Namespace], int]] = {"compare": run_compare, "train": run_train}


def main(text: str) -> int:
    """Run a command as one of the ranks that the environment tells of, and write down how it ended.

    Args:
        text: the task, as JSON.

    Returns:
        0 if the command ended by itself, whatever its exit status; 1 after an error.
    """
    task = json.loads(text)
    paths = {name: Path(value) for name, value in task["paths"].items()}
    args = Namespace(**{"text": None, "out": None, **task["options"], **paths})
    status = Path(task["status"]) / f"rank-{os.environ['RANK']}.json"
    distributed.init_process_group("gloo")
    try:
        ended, message = _COMMANDS[task["command"]](args), None
    except MegaoptError as error:
        ended, message = 2, str(error)
    except KeyboardInterrupt:
        ended, message = 130, "stopped by Ctrl-C before the first step"
    status.write_text(json.dumps({"exit": ended, "message": message}), encoding="utf-8")
    if message is not None:
        return 1
    sys.stdout.flush()
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    ended = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo may outlive Python, and the C++ runtime then aborts (pytorch issue 190489).
    os._exit(ended)
