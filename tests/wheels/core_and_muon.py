"""Trains with the core and Muon alone, in an empty environment.

    python -I core_and_muon.py README.md

The front page's example prints its report to the character, a step is proven, a state dict goes on where it was, and
`megaopt` lists plugins and says what brings its commands.
"""

import importlib
import io
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megaopt_core import build_optimizer
from megaopt_core.errors import MegaoptError

FOUR = {"megaopt-core", "megaopt-adam", "megaopt-muon", "megaopt-roles"}
"""The distributions that `pip install megaopt-core megaopt-muon` brings."""


def require(holds: object, words: str) -> None:
    """End with an error unless something holds."""
    if not holds:
        sys.exit(f"core and Muon alone: {words}")


def run_front_page(readme: str) -> dict[str, Any]:
    """Run the first example of the front page, hold its output to the page, and return its names."""
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "report()" in block
    )
    expected = next(
        block for block in re.findall(r"```text\n(.*?)```", readme, re.DOTALL) if "parameter" in block
    )
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own page
    require(printed.getvalue() == expected, f"the front page's report is not\n{printed.getvalue()}")
    return names


def train(model: torch.nn.Module, optimizer: Any, seeds: range) -> None:
    """Step a few times, each with a batch of its own."""
    for seed in seeds:
        batch = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()


def resume(model: torch.nn.Module, optimizer: Any) -> None:
    """Save a state dict, load it into a new run, and require that both go on alike."""
    model.eval()  # without dropout
    other = torch.nn.TransformerEncoderLayer(d_model=64, nhead=4, batch_first=True).eval()
    again = build_optimizer(other, "muon", lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/run.pt")
        saved = torch.load(f"{folder}/run.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    for run in ((model, optimizer), (other, again)):
        train(*run, range(3))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        require(torch.equal(one, two), "a run that was resumed goes on otherwise")


def use_torchs_checkpoints(model: torch.nn.Module, optimizer: Any) -> None:
    """Save and load by torch's functions, and require that what needs another distribution names it."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks that there is one process only
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/run", no_dist=True)
        dcp.load(state, checkpoint_id=f"{folder}/run", no_dist=True)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    line = "pip install megaopt-checkpoint"
    for asked in (
        optimizer.checkpoint_state,
        lambda: importlib.import_module("megaopt_core").save_checkpoint,
    ):
        try:
            asked()
        except MegaoptError as error:
            require(line in str(error), f"{error!r} does not say {line!r}")
        else:
            require(False, "what needs megaopt-checkpoint works without it")


def main() -> None:
    """Check all of it."""
    ours = {each.metadata["Name"] for each in distributions() if each.metadata["Name"].startswith("megaopt")}
    require(ours == FOUR, f"{ours} are installed, not {FOUR}")
    names = run_front_page(Path(sys.argv[1]).read_text())
    proof = str(names["optimizer"].report(after_step=True))
    for told in ("4 of 4", "8 of 8"):
        require(told in proof, f"report(after_step=True) does not say {told!r}:\n{proof}")
    resume(names["model"], names["optimizer"])
    use_torchs_checkpoints(names["model"], names["optimizer"])
    program = Path(sys.executable).with_name("megaopt")
    listed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    for told in (*FOUR, "adaptive_muon", "pip install megaopt-tools"):
        require(told in listed, f"`megaopt` does not say {told!r}:\n{listed}")
    print("core and Muon alone: trained, resumed, reported")


if __name__ == "__main__":
    main()
