"""The example of the page trains, saves and goes on."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import megatron_harness as harness
import pytest

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parents[3] / "examples" / "megatron_core" / "train.py"


def _run(rank: int, size: int, *arguments: str) -> tuple[list[float], str]:
    harness.without_cuda()
    printed = io.StringIO()
    main = runpy.run_path(str(SCRIPT))["main"]
    with contextlib.redirect_stdout(printed):
        return main(list(arguments)), printed.getvalue()


@pytest.mark.parametrize(("size", "arguments"), [(2, ("--layer-wise",)), (4, ("--tp", "2"))])
def test_it_learns_to_count(launch, size, arguments) -> None:
    """The loss falls, and the report on the last rank has the eight hidden matrices under Muon."""
    losses, printed = launch(_run, size, *arguments)[-1]
    assert losses[-1] < losses[0] - 1
    assert re.search(r"^muon +(megaopt-muon \S+|layer_wise) +8 +[\d,]+ ", printed, re.MULTILINE)
    of_muon = re.findall(r"^decoder\.layers\.\*\.\S+\.(\w+)\.weight +2 of \S+ +muon ", printed, re.MULTILINE)
    assert sorted(of_muon) == ["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"]
    assert printed.endswith(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} in the end\n")


def test_it_goes_on_from_its_checkpoint(launch, tmp_path: Path) -> None:
    """Losses are those of a run without a break."""
    options = ("--steps", "8", "--layer-wise")
    whole = launch(_run, 2, *options)
    launch(_run, 2, *options, "--until", "4", "--save", str(tmp_path / "at4"))
    rest = launch(_run, 2, *options, "--load", str(tmp_path / "at4"))
    assert [losses for losses, _ in rest] == [losses[4:] for losses, _ in whole]
