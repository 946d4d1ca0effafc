"""The command `megaopt schedule`, and its drawing."""

import json
from argparse import ArgumentParser, Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megaopt_tools import main
from megaopt_tools.schedule_chart import run_schedule, sample_schedule, scheduler_from
from megaopt_tools.schedule_command import add_schedule_arguments
from megaopt_tools.text_plot import draw_curve, sample_steps

pytestmark = pytest.mark.any_python

BLANK, BOTTOM_LEFT = "\u2800", 0x40


def parse(*options: str) -> Namespace:
    """The parsed options of the command."""
    parser = ArgumentParser()
    add_schedule_arguments(parser)
    return parser.parse_args(options)


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the command."""
    status = run_schedule(parse(*options))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json_holds_settings_and_points(capsys) -> None:
    """Each point follows the scheduler; the settings can be handed to one."""
    options = [
        "--lr",
        "1.0",
        "--min-lr",
        "0.2",
        "--warmup-steps",
        "10",
        "--decay-steps",
        "50",
        "--style",
        "linear",
    ]
    options += ["--wd", "0.1", "--end-wd", "0.2", "--wd-steps", "25", "--points", "6", "--json"]
    status, out, err = run(capsys, *options)
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert [point["step"] for point in report["points"]] == [0, 10, 20, 30, 40, 50]
    assert [point["learning_rate"] for point in report["points"]] == pytest.approx([0, 1, 0.8, 0.6, 0.4, 0.2])
    assert [point["weight_decay"] for point in report["points"]] == pytest.approx(
        [0.1, 0.14, 0.18, 0.2, 0.2, 0.2]
    )
    assert report["settings"] == {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.2,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 50,
        "lr_decay_style": "linear",
        "wsd_decay_steps": None,
        "lr_wsd_decay_style": "exponential",
        "start_wd": 0.1,
        "end_wd": 0.2,
        "wd_incr_steps": 25,
        "wd_incr_style": "linear",
    }


def test_text_draws_both_curves_and_lists_points(capsys) -> None:
    """Titles, two drawings and a table; a terminal of 80 columns is wide enough."""
    status, out, err = run(capsys, "--style", "WSD", "--wsd-decay-steps", "200", "--points", "3")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert [line for line in lines if line.startswith(("learning", "weight"))] == [
        "learning rate: WSD (exponential)",
        "weight decay: constant",
    ]
    assert lines[-5:] == [
        "step  learning rate  weight decay",
        "----  -------------  ------------",
        "   0          0.001             0",
        " 500          0.001             0",
        "1000              0             0",
    ]
    assert max(map(len, lines)) <= 80


def test_short_schedules_list_every_step_once(capsys) -> None:
    """Three steps are three rows, however many points are asked for."""
    _, out, _ = run(capsys, "--decay-steps", "2", "--points", "11", "--json")
    assert [point["step"] for point in json.loads(out)["points"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "-1"], "max_lr=-1.0: must be finite and not negative"),
        (["--style", "WSD"], "wsd_decay_steps=None: style 'WSD' needs the length of its final decay"),
        (
            ["--style", "cosin"],
            (
                "lr_decay_style='cosin': no plugin offers this style (did you mean 'cosine'?); "
                "known are constant, cosine, inverse-square-root, linear, WSD"
            ),
        ),
        (
            ["--wsd-decay-steps", "100"],
            "--wsd-decay-steps 100: --style cosine does not read it; --style WSD does",
        ),
        (
            ["--style", "linear", "--wsd-style", "cosine"],
            "--wsd-style cosine: --style linear does not read it; --style WSD does",
        ),
        (["--png", "schedule.png"], "--png needs megaopt-tools: pip install megaopt-tools"),
    ],
)
def test_mistakes_are_one_line(capsys, options, message) -> None:
    """Nothing is drawn, and the exit status says so."""
    assert run(capsys, *options) == (2, "", f"megaopt schedule: {message}\n")


@pytest.mark.parametrize(
    ("option", "message"),
    [("1", "argument --points: 1 is below 2"), ("x", "argument --points: 'x' is not a whole number")],
)
def test_options_that_are_no_numbers(capsys, option, message) -> None:
    """The parser refuses them by name."""
    with pytest.raises(SystemExit):
        parse("--points", option)
    assert message in capsys.readouterr().err


def test_a_picture_is_drawn_by_whoever_offers_it(capsys) -> None:
    """The command hands finely sampled values to the function that a plugin set."""
    drawn = []
    args = parse("--png", "here.png", "--json")
    args.draw_png = lambda samples, path: drawn.append((samples, path))
    assert run_schedule(args) == 0
    ((samples, path),) = drawn
    assert (path, samples.steps) == ("here.png", tuple(range(1001)))
    assert json.loads(capsys.readouterr().out)


def test_sampling_leaves_the_scheduler_as_it_was() -> None:
    """Looking ahead does not step."""
    scheduler = scheduler_from(parse("--decay-steps", "100"))
    scheduler.step(7)
    before = scheduler.state_dict()
    sample_schedule(scheduler, 50)
    assert scheduler.state_dict() == before


@given(last=st.integers(0, 10**7), count=st.integers(2, 200))
def test_sampled_steps_begin_and_end_with_the_schedule(last, count) -> None:
    """They ascend from 0 to the last step."""
    steps = sample_steps(last, count)
    assert (steps[0], steps[-1], len(steps)) == (0, last, count)
    assert steps == sorted(steps)


@given(
    values=st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=42, max_size=42),
    height=st.integers(2, 12),
)
def test_a_curve_has_no_gaps(values, height) -> None:
    """Every column is marked, the frame has its size, and both ends of the range are labelled."""
    lines = draw_curve(values, 100, 21, height)
    rows = [line.ljust(33)[12:33] for line in lines[:height]]
    assert len(lines) == height + 2
    assert all(any(row[column] != " " for row in rows) for column in range(21))
    if min(values) < max(values):
        assert lines[0][:10].strip() == f"{max(values):.4g}"
        assert lines[height - 1][:10].strip() == f"{min(values):.4g}"


def test_dots_stand_where_the_values_are() -> None:
    """A rise from the lowest to the highest value starts below and ends above."""
    lines = draw_curve([index / 41 for index in range(42)], 100, 21, 5)
    assert ord(lines[4][12]) - ord(BLANK) & BOTTOM_LEFT
    assert lines[0][32] != " "
    assert lines[0][12] == " "


def test_ascii_output_is_ascii() -> None:
    """A terminal without UTF-8 gets asterisks."""
    lines = draw_curve([0.0, 1.0] * 21, 100, 21, 4, ascii_only=True)
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_drawings_fit_the_screen(columns, capsys, monkeypatch):
    """They are narrower on a narrow terminal, and no wider than they have to be on a wide one."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["schedule", "--lr", "1e-3", "--decay-steps", "100"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= min(columns, 80)
