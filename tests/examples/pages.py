"""Runs the examples as a reader does: in a folder of their own, by the commands that the pages show."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

import pytest
from warm import run_python, run_torchrun

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FRONT = "index"
"""The page that a visitor sees first: its example and what that prints."""

PATHS = {
    "muon-in-your-script": ("nanogpt", ()),
    "from-torch-muon": ("torch_muon", ()),
    "from-megatron": ("megatron_style", ("megaopt_layerwise",)),
    "from-deepspeed": ("deepspeed_zero", ("megaopt_distributed",)),
    "huggingface-trainer": ("huggingface_trainer", ("transformers", "accelerate")),
    "lightning": ("lightning_module", ("lightning",)),
    "fsdp-trainers": (".", ("megaopt_fsdp", "lightning", "accelerate", "transformers")),
    "resume-elsewhere": ("resume_elsewhere", ("megaopt_layerwise",)),
    "which-strategy": ("sharding", ("megaopt_layerwise", "megaopt_fsdp")),
}
"""Page to the folder of its example, and what that needs beside the core, Muon and checkpoints."""

ABORTED_AT_THE_END = "terminate called without an active exception"
"""What the C++ runtime says where Python has ended before a thread of torch's gloo has (pytorch issue 190489).

The script has run to its end by then, and its ranks have waited for each other; what it printed is still compared.
"""

RANKS_NEVER_MET = "_create_gloo_process_group"
"""Where ranks stand that wait for one that never comes: it was forked while a thread of the launcher looked up a name.

A lock of the C library that this thread held stays locked in the rank, which waits for it in `getaddrinfo` for ever; a
real torchrun starts its ranks anew. No line beyond `init_process_group` or `init_device_mesh` has run by then, so the
script is started once more.
"""

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Page:
    """A page of the documentation, with its fenced blocks."""

    def __init__(self, name: str) -> None:
        self.text = (ROOT / "docs" / f"{name}.md").read_text()

    def blocks(self, language: str) -> list[str]:
        """Return the blocks of one language, as they stand there."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE)

    def runs(self) -> list[tuple[str, str]]:
        """Return each command that the page shows with the output that follows it: `$ command`, then lines."""
        found = []
        for block in self.blocks("console"):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append((command, output))
        return found


def diff_of(example: str) -> str:
    """Return what turns before.py into after.py, as `diff -u` shows it."""
    before, after = ((EXAMPLES / example / name).read_text() for name in ("before.py", "after.py"))
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "before.py", "after.py"
    )
    return "".join(lines)


def run(command: str, folder: Path, example: str) -> str:
    """Run a command that a page shows, with this Python, and return what it prints.

    Args:
        command: `python FILE ...` or `torchrun ... FILE ...`; other programs are refused.
        folder: where it leaves its files.
        example: the folder below examples/ that its files are in.
    """
    program, *arguments = command.split()
    files = [
        str(EXAMPLES / example / each) if each.endswith((".py", ".toml")) else each for each in arguments
    ]
    return run_script(" ".join([program, *files]), folder)


def run_script(command: str, folder: Path) -> str:
    """Run a command in a folder, with this Python, and return what it prints.

    Args:
        command: `python FILE ...` or `torchrun ... FILE ...`; other programs are refused.
        folder: where it runs.
    """
    program, *arguments = command.split()
    start = {"python": run_python, "torchrun": run_torchrun}[program]
    if program == "torchrun":
        arguments = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *arguments]
    told = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "default",
        "COLUMNS": "80",
        "NO_COLOR": "1",
    }
    try:
        done = start(arguments, cwd=folder, env=told, timeout=240)
    except TimeoutError as late:
        if RANKS_NEVER_MET not in str(late):
            raise
        done = start(arguments, cwd=folder, env=told, timeout=240)
    has_ended = done.returncode == 0 or (program == "torchrun" and ABORTED_AT_THE_END in done.stderr)
    assert has_ended, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def printed_by(code: str) -> str:
    """Return what a piece of Python prints, run by a process of its own.

    Args:
        code: as a reader would type it.
    """
    told = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"}
    done = run_python(["-c", code], cwd=Path.cwd(), env=told, timeout=800)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def require_alike(shown: str, printed: str) -> None:
    """Raise unless what a page shows was printed: the same words, numbers to 3 percent, `...` for lines left out."""
    lines = [line.rstrip() for line in printed.splitlines()]
    position = 0
    for line in (each.rstrip() for each in shown.splitlines()):
        if line == "...":
            continue
        while position < len(lines) and not _alike(line, lines[position]):
            position += 1
        assert position < len(lines), f"not printed (from where the page goes on): {line!r}\n\n{printed}"
        position += 1


def _alike(shown: str, printed: str) -> bool:
    if NUMBER.sub("0", shown) != NUMBER.sub("0", printed):
        return False
    numbers = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(float(one) == pytest.approx(float(other), rel=0.03, abs=0.011) for one, other in numbers)
