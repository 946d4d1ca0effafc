"""A third party's strategy of row slices, with split steps over an exchange, as its page shows it."""

import itertools
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from long_runs import sometimes

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

import rows_worker as worker
from installing import install_wheel
from launch import launch

PAGE = Path(__file__).parents[2] / "docs" / "split-steps.md"
DISTRIBUTION = Path(__file__).with_name("megaopt-rows")
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder in which the distribution is installed."""
    pytest.importorskip("megaopt_muon")
    target = tmp_path_factory.mktemp("installed") / "rows"
    install_wheel(DISTRIBUTION, target)
    return str(target)


def test_the_page_shows_the_files_of_the_distribution() -> None:
    """It includes each of them, so that what a reader copies is what is tested here."""
    shown = dict(
        re.findall(r"^\*\*`([^`]+)`\*\*\n\n```\{literalinclude\} (\S+)$", PAGE.read_text(), re.MULTILINE)
    )
    files = [path for path in DISTRIBUTION.rglob("*") if path.suffix in (".py", ".toml")]
    assert {name: (PAGE.parent / path).resolve() for name, path in shown.items()} == {
        path.relative_to(DISTRIBUTION).as_posix(): path for path in files if "build" not in path.parts
    }


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("precision", "size"),
    sometimes(itertools.product(worker.PRECISIONS, [2, 4]), [("fp32", 4), ("main", 2), ("remainders", 4)]),
)
def test_given_gradients_give_the_bits_of_one_process(installed: str, size: int, precision: str) -> None:
    """Uneven and empty slices, missing gradients: parameters of every rank, bit for bit."""
    for results in launch(worker.against_one_process, size, installed, precision, {}):
        assert [
            name for name, made in results.items() if not _same(made["rows"][1], made["replicated"][1])
        ] == []


@pytest.mark.parametrize("size", sometimes([2, 4], [4]))
def test_clipped_steps_are_those_of_one_process(installed: str, size: int) -> None:
    """Norms add up over the slices; the order in which they do is another."""
    for results in launch(worker.against_one_process, size, installed, "fp32", {"clip_grad": 0.5}):
        for made in results.values():
            (norms, ours), (expected, theirs) = made["rows"], made["replicated"]
            assert norms == pytest.approx(expected, rel=1e-6)
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_the_report_shows_what_travels(installed: str) -> None:
    """Every matrix has one owner; all ranks together send its other rows there and back."""
    shapes = {name: param.shape for name, param in worker.Model().named_parameters()}
    matrices = {name for name, shape in shapes.items() if len(shape) == 2}
    of_rank = [results["muon"] for results in launch(worker.against_one_process, 4, installed, "fp32", {})]
    assert sorted(name for made in of_rank for name in made["owned"]) == sorted(matrices)
    assert max(len(made["owned"]) for made in of_rank) < len(matrices)
    for name, shape in shapes.items():
        told = [made["report"][name] for made in of_rank]
        assert {step for step, _ in told} == {"split" if name in matrices else ""}
        (owner,) = [rank for rank, made in enumerate(of_rank) if name in made["owned"]] or [None]
        if owner is not None:
            rows = -(-shape[0] // 4)
            own = max(0, min((owner + 1) * rows, shape[0]) - owner * rows)
            assert sum(sent for _, sent in told) == 2 * 4 * (math.prod(shape) - own * shape[1])


def test_training_with_ddp_is_that_of_replicas(installed: str) -> None:
    """Gradients of each rank's own inputs, reduced by torch's wrapper, with clipping."""
    for (ours, norms), (theirs, expected) in launch(worker.trained_with_ddp, 2, installed):
        assert norms == pytest.approx(expected, rel=1e-6)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("first", sometimes([0, 2], [0]))
def test_checkpoints_go_between_rows_and_replicas_and_other_numbers_of_ranks(
    installed: str, tmp_path: Path, first: int
) -> None:
    """Two ranks, four, one that replicates, two again: as one process that never stopped, before the first step too."""
    hops = [(2, "rows"), (4, "rows"), (2, "replicated"), (2, "rows")]
    _travel(installed, tmp_path, hops, [first, first + 1, first + 2, first + 4], worker.CASES)


@pytest.mark.parametrize("between", sometimes(["tensor parallel", "distributed"], ["tensor parallel"]))
def test_state_that_is_cut_goes_through_other_cuts(installed: str, tmp_path: Path, between: str) -> None:
    """Slices of rows on two ranks, parts of tensor parallelism or flat shards on two, slices on four."""
    adam = {f"adam {precision}": ("adam", precision) for precision in worker.PRECISIONS}
    muon = {f"muon {precision}": ("muon", precision) for precision in worker.PRECISIONS}
    if between == "distributed":
        pytest.importorskip("megaopt_distributed")
        _travel(installed, tmp_path, [(2, "rows"), (2, between), (4, "rows")], [2, 3, 4], adam)
    else:
        _travel(installed, tmp_path, [(2, "rows"), (2, between), (4, "rows")], [2, 2, 4], adam | muon)


def _travel(
    installed: str, tmp_path: Path, hops: list[tuple[int, str]], stops: list[int], cases: dict[str, Any]
) -> None:
    """Load, train to a stop and save at each hop: nothing differs from one process that never stopped."""
    folder = str(tmp_path)
    (alone,) = launch(worker.hop, 1, installed, folder, None, "alone", "replicated", range(stops[-1]), cases)
    start, source, before = 0, None, None
    for number, ((size, sharding), stop) in enumerate(zip(hops, stops, strict=True)):
        target, steps = str(number), range(start, stop)
        results = launch(worker.hop, size, installed, folder, source, target, sharding, steps, cases)
        for result in results:
            for case, (loaded, _) in result.items():
                assert before is None or _same(loaded, before[case][1]), (number, case)
        start, source, before = stop, target, results[0]
    assert [case for case in alone if not _same(alone[case][1], before[case][1])] == []


def test_a_step_that_cannot_be_split_is_refused(installed: str) -> None:
    """The strategy reads it from the spec, and says so on every rank."""
    expected = (
        "ShardingError",
        "sharding='rows' cannot take 'tall': 'adaptive_muon' only steps whole tensors",
    )
    assert launch(worker.refused, 2, installed) == [expected, expected]
