"""`megaopt train`, from the command line to its files."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import matplotlib.image
import pytest
import torch
from megaopt_tools import main
from megaopt_tools.recipe import tuned
from megaopt_tools.training import Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.any_python


@pytest.fixture
def record(megaopt: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> dict:
    """What `run.json` says after five steps of Muon."""
    assert megaopt("train", "--optimizer", "muon", "--steps", "5", "--lr", "0.01", "--out", "out") == 0
    return json.loads(Path("out/run.json").read_text())


def test_run_json_says_everything(record, letters) -> None:
    """The result, the way to it, and what is needed to repeat it."""
    assert record["optimizer"] == "muon"
    assert 0 < record["val_bits_per_byte"] < 16
    assert record["diverged_at"] is None
    assert len(record["losses"]) == len(record["grad_norms"]) == len(record["learning_rates"]) == 5
    assert record["losses"][0] == pytest.approx(math.log(256), abs=1e-4)
    assert record["lr"] == max(record["learning_rates"]) == 0.01
    assert set(record["milliseconds_per_step"]) == {"forward", "backward", "optimizer"}
    assert min(record["milliseconds_per_step"].values()) > 0
    assert record["tokens_per_second"] > 0
    assert (record["steps"], record["seed"], record["batch_size"], record["context"]) == (5, 0, 2, 16)
    assert record["schedule"] == {"style": "cosine", "warmup": 0}
    assert record["threads"] == torch.get_num_threads()
    assert record["model"]["parameters"] == 869_504
    assert record["text"] == {
        "source": "letters.txt",
        "sha256": hashlib.sha256(letters.read_bytes()).hexdigest(),
        "bytes": 2700,
        "train_bytes": 2430,
        "val_bytes": 270,
    }


def test_run_json_names_the_plugin_behind_every_optimizer(record) -> None:
    """Who supplied it, in which version, how much it owns and how much of it the last step changed."""
    muon, adam = record["optimizers"]
    assert muon == {
        "optimizer": "muon",
        "class": "TensorParallelMuon",
        "distribution": "megaopt-muon",
        "version": version("megaopt-muon"),
        "parameters": 16,
        "elements": 802_816,
        "changed_in_last_step": 16,
        "stepped": 16,
    }
    assert (adam["optimizer"], adam["distribution"], adam["version"]) == (
        "adam",
        "megaopt-adam",
        version("megaopt-adam"),
    )
    assert (adam["parameters"], adam["changed_in_last_step"]) == (11, 11)
    assert muon["elements"] + adam["elements"] == record["model"]["parameters"]


def test_run_json_can_rebuild_the_configuration(record) -> None:
    """The configuration is complete, the tuned settings and the given learning rate included."""
    from megaopt_core import OptimizerConfig

    config = OptimizerConfig.from_dict(record["config"])
    assert (config.optimizer, config.lr) == ("muon", 0.01)
    assert {name: getattr(config, name) for name in tuned("muon").settings} == dict(tuned("muon").settings)


def test_run_json_names_every_version(record) -> None:
    """Python, torch, and whatever plugs into megaopt."""
    assert record["versions"]["python"] == platform.python_version()
    assert record["versions"]["torch"] == version("torch")
    for name in ("megaopt-core", "megaopt-adam", "megaopt-muon", "megaopt-tools"):
        assert record["versions"][name] == version(name)


def test_the_picture_is_a_picture(record) -> None:
    """`loss.png` can be read, and is not blank."""
    image = matplotlib.image.imread("out/loss.png")
    assert min(image.shape[:2]) > 400
    assert image[..., :3].std() > 0.01


def test_tensorboard_reads_the_log(record) -> None:
    """The log holds the same numbers as `run.json`."""
    events = EventAccumulator("out/tensorboard").Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(record["losses"])
    assert [event.step for event in events.Scalars("train/lr")] == [1, 2, 3, 4, 5]
    assert [event.value for event in events.Scalars("val/bits_per_byte")] == pytest.approx(
        [record["val_bits_per_byte"]]
    )
    assert len(events.Scalars("milliseconds/optimizer")) == len(events.Scalars("train/grad_norm")) == 5


def test_a_second_run_replaces_the_first(megaopt) -> None:
    """One folder holds one run; TensorBoard would otherwise draw both as one."""
    for steps in ("2", "3"):
        assert megaopt("train", "--optimizer", "adam", "--steps", steps, "--out", "out") == 0
    assert len(list(Path("out/tensorboard").iterdir())) == 1
    assert len(json.loads(Path("out/run.json").read_text())["losses"]) == 3
    assert sorted(path.name for path in Path("out").iterdir()) == ["loss.png", "run.json", "tensorboard"]


def test_output_without_a_terminal_is_plain(megaopt, capsys) -> None:
    """In a file or pipe there are lines, without control codes, and the tables stay whole."""
    assert megaopt("train", "--optimizer", "muon", "--steps", "20", "--out", "out") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert "\r" not in out
    lines = out.splitlines()
    for pattern in (
        r"text    letters\.txt: 2,700 bytes, 2,430 to train on, 270 held out",
        r"sha256  [0-9a-f]{64}",
        r"blocks\.\*\.attention\.qkv\.weight +4 of 384x128 +muon .*",
        r"muon +TensorParallelMuon +megaopt-muon \S+ +16 +802,816 +16 of 16 .*",
        r"result  \d+\.\d{4} bits per byte on the held-out text",
        r"time    forward [\d.]+ ms, backward [\d.]+ ms, optimizer [\d.]+ ms a step; [\d,]+ tokens/s",
    ):
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    shown = r"muon  step +(\d+)/20  [\d.]+ bits/byte +[\d.]+k? tok/s +(?:\d:\d\d left|took \d:\d\d)"
    steps = [match[1] for match in map(re.compile(shown).fullmatch, lines) if match]
    assert steps == ["1", *map(str, range(2, 21, 2))]
    assert out.endswith("files   out: run.json, loss.png, tensorboard\n")


def test_json_is_all_that_is_printed(megaopt, capsys) -> None:
    """The same as in `run.json`."""
    assert megaopt("train", "--optimizer", "sgd", "--steps", "2", "--out", "out", "--json") == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (json.loads(Path("out/run.json").read_text()), "")


def test_quiet_prints_the_result_alone(megaopt, capsys) -> None:
    """Neither text, report nor progress."""
    assert megaopt("train", "--optimizer", "sgd", "--steps", "2", "--out", "out", "--quiet") == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines() if line] == ["result", "time", "files"]
    assert err == ""


@pytest.mark.parametrize("columns", ["60", "80", "100", "140"])
def test_what_is_printed_fits_the_terminal(megaopt, capsys, monkeypatch, columns) -> None:
    """Report, progress, table and result; only the checksum and the size of the text are one line each."""
    monkeypatch.setenv("COLUMNS", columns)
    assert megaopt("train", "--optimizer", "muon", "--steps", "2", "--out", "out") == 0
    lines = [
        line for line in capsys.readouterr().out.splitlines() if not line.startswith(("text ", "sha256 "))
    ]
    assert max(map(len, lines)) <= int(columns)
    assert any(line.startswith("muon  step 2/2  ") for line in lines)


def test_files_go_into_runs_unless_it_is_said_where(megaopt) -> None:
    """Without `--out` the folder has the optimizer's name."""
    assert megaopt("train", "--optimizer", "sgd", "--steps", "1") == 0
    assert Path("runs/sgd/run.json").exists()


def test_set_reaches_the_configuration(megaopt) -> None:
    """Any field, as often as one likes, over what was tuned; `lr` too."""
    arguments = (
        "--set",
        "lr=0.003",
        "--set",
        "adam_beta2=0.9",
        "--set",
        "bf16=false",
        "--set",
        "min_lr=null",
    )
    assert megaopt("train", "--optimizer", "adam", "--steps", "1", "--out", "out", *arguments) == 0
    config = json.loads(Path("out/run.json").read_text())["config"]
    assert (config["lr"], config["adam_beta2"], config["bf16"], config["min_lr"]) == (0.003, 0.9, False, None)


def test_a_run_that_diverges_is_reported(megaopt, capsys) -> None:
    """The files are written, and the exit status says that it went wrong."""
    assert megaopt("train", "--optimizer", "sgd", "--lr", "1e12", "--steps", "9", "--out", "out") == 1
    record = json.loads(Path("out/run.json").read_text())
    step = record["diverged_at"]
    assert record["val_bits_per_byte"] is None
    assert record["losses"][-1] is None
    assert (
        f"result  none: the loss was not finite at step {step}; --lr 1e+12 may be too high\n"
        in capsys.readouterr().out
    )


def test_a_run_whose_held_out_loss_alone_is_not_finite_is_reported(megaopt, capsys) -> None:
    """The last step is named, which is the one that ruined the weights."""
    assert megaopt("train", "--optimizer", "sgd", "--lr", "1e30", "--steps", "2", "--out", "out") == 1
    record = json.loads(Path("out/run.json").read_text())
    assert None not in record["losses"]
    assert (record["diverged_at"], record["val_bits_per_byte"]) == (2, None)
    assert (
        "result  none: the loss of the held-out text was not finite after step 2; --lr 1e+30 may be too high\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "nope.txt"), "nope.txt: cannot be read: No such file or directory"),
        (("--text", "."), ".: cannot be read: Is a directory"),
        (("--text", "empty.txt"), "empty.txt: the text is empty"),
        (
            ("--context", "2430"),
            "letters.txt: 2700 bytes are too few for a context of 2430: 90 % of the text must hold 2431 bytes, "
            "and the rest 2; give a longer text or a smaller --context",
        ),
        (("--set", "adam_beta2"), "--set adam_beta2: write it as NAME=VALUE"),
        (("--set", "optimizer=sgd"), "--set optimizer=sgd: the optimizer is already adam"),
        (
            ("--lr", "0.1", "--set", "lr=0.2"),
            "--set lr=0.2: the learning rate is already 0.1",
        ),
        (("--lr", "-1"), "lr=-1.0: must be a number of at least 0"),
        (("--out", "letters.txt"), "--out letters.txt: cannot make a folder there: File exists"),
        (("--out", "letters.txt/x"), "--out letters.txt/x: cannot make a folder there: Not a directory"),
    ],
)
def test_bad_input_gives_one_message(megaopt, capsys, arguments: tuple[str, ...], message: str) -> None:
    """Nothing is printed but the message, and nothing is written."""
    Path("empty.txt").touch()
    assert megaopt("train", "--optimizer", "adam", *arguments) == 2
    assert capsys.readouterr() == ("", f"megaopt: error: {message}\n")
    assert sorted(path.name for path in Path().iterdir()) == ["empty.txt", "letters.txt"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--set", "muon_momentun=0.9"), "muon_momentum"),
        (("--set", "muon_momentum=much"), "muon_momentum='much': must be "),
        (("--optimizer", "muno"), "'muno'; did you mean 'muon'?"),
        (
            ("--schedule", "cosin"),
            "lr_decay_style='cosin': no plugin offers this style (did you mean 'cosine'?)",
        ),
        (("--warmup", "250"), "lr_warmup_steps=250: must be below lr_decay_steps=250"),
    ],
)
def test_the_cores_messages_come_through(megaopt, capsys, arguments: tuple[str, ...], part: str) -> None:
    """What the configuration, the registry and the scheduler say is shown as it is, in one line."""
    assert megaopt("train", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megaopt: error: ")
    assert part in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "argument --steps: must be a whole number of at least 1, got '0'"),
        (("--batch-size", "2.5"), "argument --batch-size: must be a whole number of at least 1, got '2.5'"),
        (("--warmup", "-1"), "argument --warmup: must be a whole number of at least 0, got '-1'"),
        (("--lr", "fast"), "argument --lr: invalid float value: 'fast'"),
        (
            ("--threads", "9" * 20),
            f"argument --threads: must be a whole number of at most 2147483647, got '{'9' * 20}'",
        ),
        (
            ("--seed", "9" * 23),
            "argument --seed: must be a whole number from -9223372036854775808 to 18446744073709551615, "
            f"got '{'9' * 23}'",
        ),
    ],
)
def test_numbers_are_checked_as_they_are_read(capsys, arguments: tuple[str, ...], message: str) -> None:
    """Argparse says which option is wrong."""
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"megaopt train: error: {message}\n")


def test_an_interrupt_within_a_step_gives_one_message(megaopt, capsys, monkeypatch) -> None:
    """It says how far the run got; half a step is not saved."""
    step = Run._step

    def interrupted(self: Run, number: int, *batch: torch.Tensor):
        if number == 4:
            raise KeyboardInterrupt
        return step(self, number, *batch)

    monkeypatch.setattr(Run, "_step", interrupted)
    assert megaopt("train", "--optimizer", "adam", "--steps", "9", "--out", "out") == 130
    expected = "megaopt: stopped by Ctrl-C after 3 of 9 steps of adam; nothing was saved\n"
    assert capsys.readouterr().err == expected
    assert not Path("out/run.json").exists()


def test_a_signal_ends_a_real_process_cleanly(tmp_path: Path, letters: Path) -> None:
    """As when somebody presses the keys."""
    # A shell that starts the tests in the background makes their processes ignore the signal.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = f"{listen}; import sys; from megaopt_tools import main; sys.exit(main())"
    options = ["--threads", "1", "--optimizer", "adam", "--steps", "100000", "--context", "16", "--text"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", command, "train", *options, letters.name],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("adam  step"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    expected = (
        r"megaopt: stopped by Ctrl-C after (\d+) of 100000 steps of adam; runs/adam/checkpoint holds \1 of them: "
        r"the same command with --resume goes on from there\n"
    )
    assert re.fullmatch(expected, err), err
    assert process.returncode == 130
