"""Processes that begin with torch and our packages imported: forked from one server that each test process has.

An import of torch with what trains over ranks takes seconds of a processor, which tests of scripts and ranks would
spend hundreds of times. What is tested for what it imports starts a Python of its own instead.
"""

import atexit
import faulthandler
import importlib.util
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from megaopt_core.registry import reset_registry

__all__ = ["run_python", "run_torchrun", "server"]

PACKAGES = [
    "core",
    "adam",
    "bridge",
    "checkpoint",
    "device",
    "distributed",
    "fsdp",
    "layerwise",
    "lion",
    "muon",
    "roles",
    "soap",
    "testing",
]
"""Of ours, what ranks use; plugins may be missing."""

OTHERS = [
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
"""What takes long to import."""

_TO_TELL = 2.0
"""Seconds that a program which took too long has to write where its threads stand."""

_kept: list[Path] = []
"""Where this process, and those that it forks, write that."""


def server() -> ForkServerContext:
    """Return the context whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*OTHERS, *_modules_of_ours(), "loaded_registry"])
    return context


@cache
def _modules_of_ours() -> list[str]:
    """Return the names of all modules of our packages, so that the server imports them once, for every process."""
    names = []
    for package in PACKAGES:
        found = importlib.util.find_spec(f"megaopt_{package}")
        for folder in (found and found.submodule_search_locations) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                parts = (found.name, *path.relative_to(folder).with_suffix("").parts)
                if path.stem != "__main__":
                    names.append(".".join(parts).removesuffix(".__init__"))
    return names


def run_python(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> CompletedProcess[str]:
    """Do what `python FILE ...` or `python -c CODE` does, and return what it printed.

    Args:
        arguments: what follows `python`.
        cwd: the folder it runs in.
        env: all of its environment.
        timeout: seconds after which it is killed, with what it has started, and raised.
    """
    return _run(_as_main, list(arguments), cwd, env, timeout)


def run_torchrun(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> CompletedProcess[str]:
    """Do what `torchrun --nproc-per-node N FILE ...` does, by torch's own launcher, and return what it printed.

    Args:
        arguments: what follows `torchrun`.
        cwd: the folder it runs in.
        env: all of its environment.
        timeout: seconds after which it is killed, with its ranks, and raised.
    """
    return _run(_as_launcher, list(arguments), cwd, env, timeout)


def _run(
    program: Any, arguments: list[str], cwd: Path, env: Mapping[str, str], timeout: float
) -> CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = server().Process(target=_begin, args=(program, arguments, cwd, dict(env), out, err))
        process.start()
        pid: Any = process.pid
        process.join(timeout)
        late = process.exitcode is None
        if late:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGUSR1)  # each tells where it stands
                time.sleep(_TO_TELL)
                os.killpg(pid, signal.SIGKILL)
            process.join()
        printed, told = (path.read_text() if path.exists() else "" for path in (out, err))
        if late:
            told = "\n".join([told, *(path.read_text() for path in sorted(Path(folder).glob("at.*")))])
            raise TimeoutError(f"{shlex.join(arguments)} took more than {timeout} seconds\n{printed}\n{told}")
        status: Any = process.exitcode
        return CompletedProcess(arguments, status, printed, told)


def _begin(
    program: Any, arguments: list[str], cwd: Path, env: Mapping[str, str], out: Path, err: Path
) -> None:
    """Become a process of its own group, with that environment, which writes to these files."""
    os.setsid()
    for stream, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, stream)
        os.close(opened)
    _stand_by(err.parent)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    reset_registry()  # that environment may allow other plugins
    _leave(program, arguments)


def _stand_by(folder: Path) -> None:
    """Let a signal write where the threads of this process stand, in a file of its own."""
    faulthandler.register(signal.SIGUSR1, (folder / f"at.{os.getpid()}").open("w"))
    _kept.append(folder)


def _leave(program: Any, arguments: list[str]) -> None:
    """Run a program and end with its status, as Python ends: what was to be done at exit is done."""
    status = 0
    try:
        program(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - as Python does where nobody has caught it
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()  # a forked process would leave it out
    sys.exit(status)


def _as_main(arguments: list[str]) -> None:
    warnings.resetwarnings()
    for action in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)  # noqa: S102 - the code is ours
        return
    path, *_ = sys.argv = arguments
    sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")


def _as_launcher(arguments: list[str]) -> None:
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    parsed = run.get_args_parser().parse_args(arguments)
    config, _, _ = run.config_from_args(parsed)
    config.start_method = "fork"  # here all is imported, and nothing has been computed
    elastic_launch(config, _rank)([parsed.training_script, *parsed.training_script_args])


def _rank(arguments: list[str]) -> None:
    _stand_by(_kept[-1])
    _leave(_as_main, arguments)
