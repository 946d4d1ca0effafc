"""A run that was stopped or killed goes on, and ends with the bits of a run that was left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from megaopt_tools.checkpoints import RunCheckpoint
from megaopt_tools.errors import CommandError
from megaopt_tools.interrupts import Interrupts
from megaopt_tools.ranks import Ranks
from megaopt_tools.recipe import Recipe
from megaopt_tools.shape import Shape
from megaopt_tools.text import Text
from megaopt_tools.training import Run, StepRecord
from torch import distributed
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.any_python

TEXT = Text("letters", b"the quick brown fox jumps over the lazy dog. " * 60)
SMALL = Recipe(
    "muon",
    lr=4e-3,
    steps=9,
    batch_size=4,
    context=16,
    shape=Shape(width=32, layers=1, heads=2, expansion=48),
)
TIMES = ("milliseconds_per_step", "tokens_per_second")


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Let Ctrl-C interrupt, also where the tests are the background job of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class _EndsError(Exception):
    """Stands for the end of a process."""


class _Noise:
    """Draws a random number in every step, as an optimizer that rounds at random does, and can end the process."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.drawn: list[float] = []

    def built(self, report: Any) -> None:
        pass

    def resumed(self, records: Sequence[StepRecord]) -> None:
        pass

    def stepped(self, record: StepRecord) -> None:
        self.drawn.append(torch.rand(()).item())
        if record.step == self.last:
            raise _EndsError

    def finished(self, result: Any) -> None:
        pass


def _numbers(records: Sequence[StepRecord]) -> list[tuple[Any, ...]]:
    return [(record.step, record.loss, record.grad_norm, record.lr, record.tokens) for record in records]


@pytest.mark.parametrize("schedule", ["cosine", "WSD"])
@pytest.mark.parametrize("optimizer", ["adam", "muon", "sgd"])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, optimizer: str, schedule: str) -> None:
    """It ends two steps after its checkpoint; losses, norms, rates, random numbers and weights are equal."""
    recipe = evolve(SMALL, optimizer=optimizer, schedule=schedule)
    whole, noise = Run(recipe, TEXT), _Noise()
    expected = whole.train([noise])

    first = Run(recipe, TEXT)
    with pytest.raises(_EndsError):
        first.train([_Noise(last=6)], RunCheckpoint(tmp_path, Interrupts(), every=4))

    second, later = Run(recipe, TEXT), _Noise()
    checkpoint = RunCheckpoint(tmp_path, Interrupts(), every=4)
    checkpoint.load(second)
    assert len(second.records) == 4
    result = second.train([later], checkpoint)
    assert _numbers(result.records) == _numbers(expected.records)
    assert result.val_bits_per_byte == expected.val_bits_per_byte
    assert later.drawn == noise.drawn[4:]
    weights = second.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.model.state_dict().items())


def test_a_run_leaves_the_random_state_of_its_caller(tmp_path: Path) -> None:
    """Random numbers of a run come from its seed."""
    before = torch.get_rng_state()
    Run(SMALL, TEXT).train([_Noise()])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_of_other_options_is_refused(tmp_path: Path) -> None:
    """The message names each option with both values; strategies of sharding may differ."""
    with pytest.raises(_EndsError):
        Run(SMALL, TEXT).train([_Noise(last=5)], RunCheckpoint(tmp_path, Interrupts(), every=4))
    other = Run(evolve(SMALL, seed=3, settings={"muon_momentum": 0.9}), TEXT)
    with pytest.raises(CommandError) as refused:
        RunCheckpoint(tmp_path, Interrupts()).load(other)
    assert str(refused.value) == (
        f"--resume: the run in {tmp_path / 'checkpoint'} has seed 0 (here 3), muon_momentum None (here 0.9); "
        "give the options that began it"
    )
    RunCheckpoint(tmp_path, Interrupts()).load(Run(evolve(SMALL, settings={"sharding": "replicated"}), TEXT))


def test_a_second_ctrl_c_does_not_wait_for_the_step() -> None:
    """The first is noted, the second interrupts; afterwards Ctrl-C is what it was."""
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """As a shell's background job does."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
        assert not interrupts.pressed
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Press Ctrl-C once within a step of an optimizer's run."""

    def at(optimizer: str, number: int) -> None:
        step = Run._step
        pressed = []

        def pressing(self: Run, this: int, *batch: torch.Tensor) -> StepRecord:
            if (self.recipe.optimizer, this) == (optimizer, number) and not pressed:
                pressed.append(True)
                signal.raise_signal(signal.SIGINT)
            return step(self, this, *batch)

        monkeypatch.setattr(Run, "_step", pressing)

    return at


def _record(path: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(Path(path).read_text()).items() if name not in TIMES}


def test_train_goes_on_after_ctrl_c(megaopt, capsys, press) -> None:
    """The step in progress ends, the checkpoint follows, and the resumed run writes what an uninterrupted one does."""
    options = ("train", "--optimizer", "muon", "--steps", "6")
    assert megaopt(*options, "--out", "whole") == 0
    press("muon", 4)
    capsys.readouterr()
    assert megaopt(*options, "--out", "out") == 130
    message = (
        "megaopt: stopped by Ctrl-C after 4 of 6 steps of muon; out/checkpoint holds 4 of them: "
        "the same command with --resume goes on from there\n"
    )
    assert capsys.readouterr().err == message
    assert sorted(path.name for path in Path("out").iterdir()) == ["checkpoint", "tensorboard"]

    assert megaopt(*options, "--out", "out", "--resume") == 0
    assert "muon  goes on after step 4 of 6\n" in capsys.readouterr().out
    assert _record("out/run.json") == _record("whole/run.json")
    assert sorted(path.name for path in Path("out").iterdir()) == ["loss.png", "run.json", "tensorboard"]


def test_the_log_of_a_resumed_run_has_all_steps(megaopt, press) -> None:
    """TensorBoard draws one curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    press("adam", 2)
    options = ("train", "--optimizer", "adam", "--steps", "4", "--out", "out", "--quiet")
    assert megaopt(*options) == 130
    assert megaopt(*options, "--resume") == 0
    events = EventAccumulator("out/tensorboard").Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    losses = json.loads(Path("out/run.json").read_text())["losses"]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)


def test_compare_goes_on_after_ctrl_c(megaopt, capsys, press) -> None:
    """Finished runs take their last step again, the interrupted one goes on, the others begin."""
    options = ("compare", "adam", "muon", "sgd", "--steps", "5")
    assert megaopt(*options, "--out", "whole") == 0
    assert not list(Path("whole").rglob("checkpoint"))
    press("muon", 3)
    assert megaopt(*options, "--out", "out") == 130
    capsys.readouterr()
    assert megaopt(*options, "--out", "out", "--resume") == 0
    out = capsys.readouterr().out
    assert "adam  goes on after step 4 of 5\n" in out
    assert "muon  goes on after step 3 of 5\n" in out
    assert "sgd   goes on" not in out
    found, expected = (
        [
            {name: value for name, value in run.items() if name not in TIMES}
            for run in json.loads(Path(name, "compare.json").read_text())["runs"]
        ]
        for name in ("out", "whole")
    )
    assert found == expected


def test_without_the_distribution_of_checkpoints_a_line_names_it(megaopt, capsys, monkeypatch, press) -> None:
    """Runs need it only to be saved; options that ask for a checkpoint are refused at once."""
    monkeypatch.setitem(sys.modules, "megaopt_checkpoint", None)
    hint = (
        "the checkpoint of a run comes with megaopt-checkpoint, which is not installed: "
        "pip install megaopt-checkpoint"
    )
    assert megaopt("train", "--optimizer", "adam", "--save-every", "2") == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", f"megaopt: error: {hint}")
    assert not Path("runs").exists()
    press("adam", 2)
    assert megaopt("train", "--optimizer", "adam", "--steps", "4", "--quiet") == 130
    expected = f"megaopt: stopped by Ctrl-C after 2 of 4 steps of adam; nothing was saved: {hint}"
    assert capsys.readouterr().err.splitlines()[-1] == expected
    Path("runs/adam/checkpoint").mkdir()
    assert megaopt("train", "--optimizer", "adam", "--steps", "4", "--resume") == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"megaopt: error: {hint}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("train", "--optimizer", "adam", "--resume"),
            "--resume: there is no checkpoint at runs/adam/checkpoint; a run saves one with --save-every STEPS, "
            "and at Ctrl-C",
        ),
        (
            ("compare", "adam", "sgd", "--resume"),
            "--resume: there is no checkpoint at runs/compare/adam/checkpoint, runs/compare/sgd/checkpoint; "
            "a run saves one with --save-every STEPS, and at Ctrl-C",
        ),
        (
            ("train", "--nproc", "3"),
            "--batch-size 2: must be a multiple of --nproc 3, for the ranks share each batch",
        ),
        (
            ("train", "--sharding", "distributed", "--set", "sharding=fsdp"),
            "--set sharding=fsdp: the strategy is already distributed",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_starts(megaopt, capsys, arguments, message) -> None:
    """Nothing is printed but the message, and nothing is written."""
    assert megaopt(*arguments) == 2
    assert capsys.readouterr() == ("", f"megaopt: error: {message}\n")
    assert not Path("runs").exists()


def test_an_unknown_strategy_is_refused_before_ranks_are_started(megaopt, capsys) -> None:
    """The registry's message comes through."""
    assert megaopt("train", "--nproc", "2", "--sharding", "layerwise") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megaopt: error: unknown sharding strategy 'layerwise'; did you mean 'layer_wise'?")
    assert not Path("runs").exists()


OPTIONS = ("--threads", "1", "--batch-size", "4", "--context", "16", "--optimizer", "muon")


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    # A shell that starts the tests in the background makes their processes ignore the signal.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = f"{listen}; import sys; from megaopt_tools import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-u", "-c", command, "train", "--text", "letters.txt", *OPTIONS, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _read_until(process: subprocess.Popen[str], pattern: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(pattern, line):
            return
    raise AssertionError(process.communicate())


def test_a_killed_process_goes_on_to_the_same_bits(tmp_path: Path, letters: Path, megaopt) -> None:
    """SIGKILL between two checkpoints; the resumed run ends as one that was left alone."""
    steps = ("--steps", "30", "--save-every", "7")
    process = _start(tmp_path, *steps, "--out", "out")
    _read_until(process, r"muon  step 12/30 ")
    process.kill()
    process.communicate()
    assert not (tmp_path / "out/run.json").exists()
    assert megaopt("train", *OPTIONS, *steps, "--out", "out", "--resume", "--quiet") == 0
    assert megaopt("train", *OPTIONS, *steps, "--out", "whole", "--quiet") == 0
    assert _record("out/run.json") == _record("whole/run.json")


def test_two_ranks_share_a_run_and_one_goes_on_with_it(tmp_path: Path, letters: Path, megaopt) -> None:
    """There is one display; Ctrl-C saves on both; one rank ends as if it had been alone, but for rounding."""
    process = _start(tmp_path, "--steps", "30", "--nproc", "2", "--sharding", "layer_wise", "--out", "out")
    _read_until(process, r"muon  step  6/30 ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    expected = (
        r"megaopt: stopped by Ctrl-C after (\d+) of 30 steps of muon; out/checkpoint holds \1 of them: "
        r"the same command with --resume goes on from there\n"
    )
    assert re.fullmatch(expected, err), err
    assert process.returncode == 130
    steps = re.findall(r"^muon  step +(\d+)/30 ", out, re.MULTILINE)
    assert len(steps) == len(set(steps))

    options = ("train", *OPTIONS, "--steps", "30", "--quiet")
    assert megaopt(*options, "--out", "out", "--resume") == 0
    assert megaopt(*options, "--out", "whole") == 0
    assert _record("out/run.json")["losses"] == pytest.approx(_record("whole/run.json")["losses"], rel=1e-3)


def _on_two_ranks(index: int, folder: str, sharding: str) -> None:
    """Train without a stop, then with one, and compare; one of two processes."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=index, world_size=2)
    ranks = Ranks.current()
    recipe = evolve(SMALL, settings={"sharding": sharding})
    whole, noise = Run(recipe, TEXT, ranks), _Noise()
    expected = whole.train([noise])
    with pytest.raises(_EndsError):
        Run(recipe, TEXT, ranks).train([_Noise(6)], RunCheckpoint(Path(folder), Interrupts(), every=4))
    resumed, later = Run(recipe, TEXT, ranks), _Noise()
    RunCheckpoint(Path(folder), Interrupts()).load(resumed)
    assert _numbers(resumed.train([later]).records) == _numbers(expected.records)
    assert later.drawn == noise.drawn[4:]
    weights = [_full_tensors(run.model) for run in (whole, resumed)]
    assert all(map(torch.equal, *weights))
    distributed.barrier()
    distributed.destroy_process_group()


def _full_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters, whole where they are cut."""
    return [
        param.full_tensor() if isinstance(param, DTensor) else param.detach() for param in model.parameters()
    ]


@pytest.mark.parametrize("sharding", ["layer_wise", "fsdp"])
def test_two_ranks_go_on_to_the_bits_of_two(tmp_path: Path, sharding: str) -> None:
    """Losses, random numbers of each rank and weights are those of two ranks that were left alone."""
    torch.multiprocessing.spawn(_on_two_ranks, (str(tmp_path), sharding), nprocs=2)


def test_a_rank_that_dies_is_named(tmp_path: Path, letters: Path) -> None:
    """The launcher ends with one message."""
    process = _start(tmp_path, "--steps", "100000", "--nproc", "2", "--out", "out")
    _read_until(process, r"muon  step ")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [
        int(pid)
        for pid in children
        if b"megaopt_tools.rank_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    assert re.search(r"megaopt: error: rank 1 ended with exit status -9\b", err), err
    assert process.returncode == 2
