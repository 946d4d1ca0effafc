"""`megaopt compare`, from the command line to its files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import matplotlib.image
import pytest
from megaopt_tools.compare_command import _print_results
from megaopt_tools.console import console_for_output
from megaopt_tools.recipe import Recipe
from megaopt_tools.text import load_text
from megaopt_tools.training import Run

pytestmark = pytest.mark.any_python


@pytest.fixture
def comparison(megaopt: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> tuple[dict, str]:
    """What `compare.json` says and what is printed after four steps of two optimizers."""
    arguments = (
        "--lr",
        "0.002",
        "--lr",
        "muon=0.01",
        "--set",
        "muon:muon_momentum=0.9",
        "--set",
        "clip_grad=0.5",
    )
    assert megaopt("compare", "adam", "muon", "--steps", "4", "--out", "out", *arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(Path("out/compare.json").read_text()), out


def test_every_run_begins_with_the_same_weights_and_batches(comparison) -> None:
    """The first loss is the same; the second is not, since the optimizers differ."""
    adam, muon = comparison[0]["runs"]
    assert adam["losses"][0] == muon["losses"][0]
    assert adam["losses"][2] != muon["losses"][2]
    assert adam["text"] == muon["text"]
    assert adam["seed"] == muon["seed"]


def test_options_reach_the_optimizer_that_they_name(comparison) -> None:
    """Learning rates and settings of one, and of all."""
    adam, muon = (run["config"] for run in comparison[0]["runs"])
    assert (adam["lr"], muon["lr"]) == (0.002, 0.01)
    assert (adam["clip_grad"], muon["clip_grad"]) == (0.5, 0.5)
    assert muon["muon_momentum"] == 0.9
    assert "muon_momentum" not in adam


def test_compare_json_ranks_the_runs(comparison) -> None:
    """The best is the one with the fewest bits per byte."""
    record = comparison[0]
    values = record["val_bits_per_byte"]
    assert list(values) == ["adam", "muon"]
    assert record["best"] == min(values, key=values.__getitem__)
    assert [run["val_bits_per_byte"] for run in record["runs"]] == list(values.values())


def test_every_run_has_its_own_files(comparison) -> None:
    """The same as `megaopt train` writes, equal to what is in `compare.json`."""
    for run in comparison[0]["runs"]:
        folder = Path("out", run["optimizer"])
        assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "run.json", "tensorboard"]
        assert json.loads((folder / "run.json").read_text()) == run


def test_the_table_says_who_stepped_what(comparison) -> None:
    """One line for each optimizer: its plugin, learning rate, result, times, and how many elements each one stepped."""
    record, out = comparison
    rows = {line.split()[0]: line.split() for line in out.splitlines() if re.match(r"  (adam|muon)  ", line)}
    for run in record["runs"]:
        row = rows[run["optimizer"]]
        assert row[1:3] == [f"megaopt-{run['optimizer']}", version(f"megaopt-{run['optimizer']}")]
        assert row[3] == f"{run['lr']:g}"
        assert row[4] == f"{run['val_bits_per_byte']:.4f}"
        assert [float(cell) for cell in row[5:8]] == pytest.approx(
            list(run["milliseconds_per_step"].values()), abs=0.06
        )
    assert rows["adam"][8:] == ["adam", "869,504"]
    assert rows["muon"][8:] == ["muon", "802,816,", "adam", "66,688"]
    assert "\x1b" not in out
    assert out.endswith("files  out: compare.png, compare.json, and a folder for each run\n")


@pytest.fixture(scope="module")
def two_results() -> list:
    """Two runs of two steps."""
    text = load_text(None)
    recipes = [Recipe(name, steps=2, batch_size=2, context=16) for name in ("muon", "adaptive_muon")]
    return [Run(recipe, text).train() for recipe in recipes]


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_fits_the_terminal(two_results, monkeypatch, capsys, columns, terminal) -> None:
    """No cell is cut or wrapped; what has no room for a column stands below; colour is for terminals."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    _print_results(console_for_output(), two_results, Path("runs"))
    out = capsys.readouterr().out
    assert ("\x1b[" in out) == terminal
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    (row,) = [line.split() for line in lines if line.split()[:1] == ["adaptive_muon"]]
    assert f"{two_results[1].val_bits_per_byte:.4f}" in row
    times = two_results[1].milliseconds.values()
    expected = [sum(times)] if columns == 60 else times
    assert {f"{time:.1f}" for time in expected} <= set(row)
    assert "adaptive_muon 802,816, adam 66,688" in " ".join(" ".join(lines).split())


def test_no_color_is_heard(two_results, monkeypatch, capsys) -> None:
    """A terminal without colour."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _print_results(console_for_output(), two_results, Path("runs"))
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", capsys.readouterr().out)


def test_json_is_all_that_is_printed(megaopt, capsys) -> None:
    """The same as in `compare.json`; `--quiet` leaves the table."""
    assert megaopt("compare", "sgd", "--steps", "2", "--out", "out", "--json") == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (json.loads(Path("out/compare.json").read_text()), "")
    assert megaopt("compare", "sgd", "--steps", "2", "--out", "out", "--quiet") == 0
    out, err = capsys.readouterr()
    assert "step" not in out.replace("ms/step", "").replace("stepped", "")
    assert " sgd " in out


def test_the_picture_is_a_picture(comparison) -> None:
    """`compare.png` can be read, and is not blank."""
    image = matplotlib.image.imread("out/compare.png")
    assert image.shape[1] > image.shape[0] > 400
    assert image[..., :3].std() > 0.01


def test_one_that_diverges_does_not_stop_the_others(megaopt, capsys) -> None:
    """Its row says where it ended, and the exit status that something went wrong."""
    assert megaopt("compare", "sgd", "adam", "--steps", "6", "--lr", "sgd=1e12", "--out", "out") == 1
    record = json.loads(Path("out/compare.json").read_text())
    assert record["best"] == "adam"
    assert record["val_bits_per_byte"]["sgd"] is None
    step = record["runs"][0]["diverged_at"]
    assert f"diverged at step {step}" in " ".join(capsys.readouterr().out.split())
    assert matplotlib.image.imread("out/compare.png").std() > 0.01


def test_one_whose_held_out_loss_alone_is_not_finite_is_told(megaopt, capsys) -> None:
    """It has no result, and the exit status says so."""
    assert megaopt("compare", "sgd", "adam", "--steps", "2", "--lr", "sgd=1e30", "--out", "out") == 1
    assert json.loads(Path("out/compare.json").read_text())["runs"][0]["diverged_at"] == 2
    assert "diverged at step 2" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adam", "muon", "adam"), "adam: named more than once"),
        (("adam", "--lr", "muon=0.1"), "--lr muon=0.1: 'muon' is not among the optimizers adam"),
        (("adam", "--set", "adam:adam_beta2"), "--set adam_beta2: write it as NAME=VALUE"),
        (("adam", "--text", "nope.txt"), "nope.txt: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_gives_one_message(megaopt, capsys, arguments: tuple[str, ...], message: str) -> None:
    """Nothing is trained, printed or written."""
    assert megaopt("compare", *arguments) == 2
    assert capsys.readouterr() == ("", f"megaopt: error: {message}\n")
    assert not Path("runs").exists()


def test_the_last_one_is_checked_before_the_first_is_trained(megaopt, capsys) -> None:
    """Nobody waits for minutes to read that a name is wrong."""
    assert megaopt("compare", "adam", "nobody") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megaopt: error: unknown optimizer 'nobody'")


def test_ctrl_c_stops_all_of_them(megaopt, capsys, monkeypatch) -> None:
    """The runs that were finished keep their files."""
    train = Run.train

    def interrupted(self: Run, *arguments):
        if self.recipe.optimizer == "sgd":
            raise KeyboardInterrupt
        return train(self, *arguments)

    monkeypatch.setattr(Run, "train", interrupted)
    assert megaopt("compare", "adam", "sgd", "muon", "--steps", "2", "--out", "out") == 130
    expected = "megaopt: stopped by Ctrl-C after 0 of 2 steps of sgd; nothing was saved\n"
    assert capsys.readouterr().err == expected
    assert Path("out/adam/run.json").exists()
    assert not Path("out/compare.json").exists()
