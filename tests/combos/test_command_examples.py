"""The examples that end each command's help run as they stand, each in a folder with the files that it names."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

main = pytest.importorskip("megaopt_tools").main
pytest.importorskip("megaopt_testing")
pytest.importorskip("megaopt_checkpoint")
pytest.importorskip("megaopt_muon")
pytest.importorskip("megaopt_soap")

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
COMMANDS = re.findall(r"^\| (`megaopt .*?) \|", PAGE, re.MULTILINE)
NAMES = sorted({command for line in COMMANDS for command in re.findall(r"`megaopt ([\w-]+)", line)})

STAND_INS = {"my_plugin": "cosine", "my_optimizer": "sgd", "my_optimizer_beta=0.5": "sgd_momentum=0.5"}
"""What the examples of `check-plugin` name; their checks take little time."""

MODEL = """import torch

class Model(torch.nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(16, 2, 32)

build = Model
"""
RUN = """optimizer = "muon"
lr = 1e-3
"""


def _examples(command: str) -> list[str]:
    """Return the lines under "examples:" of a command's help."""
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main([command, "--help"])
    return [line.strip() for line in printed.getvalue().partition("\nexamples:\n")[2].splitlines()]


def _words(line: str) -> list[str]:
    """Return the arguments of a line, without what the shell does with its output, and of few steps."""
    inner = re.search(r'"\$\((.*)\)"', line)
    program, *words = shlex.split((inner[1] if inner else line).partition(" > ")[0])
    assert program == "megaopt"
    if words[0] in {"train", "compare"}:
        words += ["--steps", "2", "--threads", "1"]
    return [STAND_INS.get(word, word) for word in words]


def _checkpoint(folder: Path) -> None:
    """Save a model of one layer."""
    import torch
    from megaopt_checkpoint import save_checkpoint

    from megaopt_core import build_optimizer

    model = torch.nn.Linear(4, 3)
    save_checkpoint(folder, model, build_optimizer(model, "adam", lr=1e-3))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:matplotlib", "ignore::PendingDeprecationWarning:matplotlib"
)
@pytest.mark.parametrize("name", NAMES)
def test_every_example_of_a_commands_help_runs(
    name: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, in one folder; each, and its ranks, say something on standard output alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    Path("my_model.py").write_text(MODEL)
    Path("run.toml").write_text(RUN)
    Path("my_text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    if name == "convert":
        pytest.importorskip("safetensors")
    if name in {"verify-checkpoint", "convert"}:
        _checkpoint(Path("runs/checkpoint"))
    examples = _examples(name)
    assert examples
    for line in examples:
        if line.startswith("megaopt convert model.safetensors"):
            Path("runs/checkpoint").rename("runs/before")
        words = _words(line)
        assert words[0] == name
        assert main(words) == 0, line
        printed = capfd.readouterr()
        assert printed.err == "", line
        assert printed.out, line
