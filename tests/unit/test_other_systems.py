"""What POSIX alone has is missed nowhere: every module imports, and a run is saved and goes on, as on Windows."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_python

HIDE = """
import importlib, os, pkgutil, signal, sys

for name in (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.utils.tensorboard", "matplotlib.pyplot",
    "rich.console", "pytest", "emerging_optimizers", "safetensors.torch",
):  # what is not ours may use what it finds
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for name in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for name in (
    "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "RTLD_LAZY", "RTLD_NOLOAD", "RTLD_NOW", "fork",
    "getloadavg", "getuid", "killpg", "mkfifo", "pread", "preadv", "pwrite", "pwritev", "sched_getaffinity",
    "sched_setaffinity", "setsid", "statvfs", "uname",
):
    vars(os).pop(name, None)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGUSR1", "alarm", "setitimer"):
    vars(signal).pop(name, None)
os.supports_dir_fd = set()
"""

IMPORT = """
import megaopt_core

tops = ["megaopt_core", *sorted(m.name for m in pkgutil.iter_modules() if m.name.startswith("megaopt_"))]
for top in dict.fromkeys(tops):
    package = importlib.import_module(top)
    for module in pkgutil.walk_packages(package.__path__, f"{top}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as missing:  # an adapter imports its trainer
                assert missing.name in {"lightning", "torchtitan", "transformers", "tyro"}, missing
print(len(tops))
"""

RESUME = """
import tempfile
import torch
from megaopt_core import build_optimizer
from megaopt_checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint

def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return model, build_optimizer(model, "adam", lr=0.1)

def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()

with tempfile.TemporaryDirectory() as folder:
    model, optimizer = make()
    step(model, optimizer)
    for extra in (1, 2):  # the second replaces the first
        save_checkpoint(f"{folder}/last", model, optimizer, extra=extra)
    verify_checkpoint(f"{folder}/last")
    again, resumed = make()
    assert load_checkpoint(f"{folder}/last", again, resumed).extra == 2
    resumed_too = build_optimizer(again, "adam", lr=0.1, routing=f"{folder}/last")
    assert resumed_too.routing.params.keys() == resumed.routing.params.keys()
step(model, optimizer)
step(again, resumed)
assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
print("resumed")
"""


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_every_module_imports_where_posix_is_absent() -> None:
    """All distributions that are installed."""
    assert int(_run(HIDE + IMPORT).split()[-1]) >= 1


@pytest.mark.slow
def test_a_run_is_saved_and_goes_on_where_posix_is_absent() -> None:
    """Locks, folders that are held, and positions in files each have another way."""
    pytest.importorskip("megaopt_checkpoint")
    pytest.importorskip("megaopt_adam")
    assert _run(HIDE + RESUME).split() == ["resumed"]
