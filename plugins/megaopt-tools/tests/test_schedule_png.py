"""The picture of a schedule."""

from argparse import ArgumentParser
from pathlib import Path

import pytest
from megaopt_tools.schedule_chart import run_schedule
from megaopt_tools.schedule_command import add_schedule_arguments
from megaopt_tools.schedule_png import offer_schedule_png

pytestmark = pytest.mark.any_python

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def parser() -> ArgumentParser:
    """A command line with the core's command, to which the plugin added its drawing."""
    parser = ArgumentParser()
    commands = parser.add_subparsers()
    add_schedule_arguments(commands.add_parser("schedule"))
    offer_schedule_png(commands)
    return parser


def test_png_is_written(parser, tmp_path: Path, capsys) -> None:
    """`megaopt schedule --png FILE` prints the text as before and names the file that it wrote."""
    file = tmp_path / "schedule.png"
    options = ["--style", "WSD", "--wsd-decay-steps", "300", "--wd", "0.01", "--end-wd", "0.1"]
    assert run_schedule(parser.parse_args(["schedule", *options, "--png", str(file)])) == 0
    assert file.read_bytes().startswith(PNG_SIGNATURE)
    assert capsys.readouterr().out.endswith(f"\nwrote {file}\n")


def test_file_that_cannot_be_written(parser, tmp_path: Path, capsys) -> None:
    """A folder that is not there gives one line and nothing else."""
    file = tmp_path / "missing" / "schedule.png"
    assert run_schedule(parser.parse_args(["schedule", "--png", str(file)])) == 2
    assert capsys.readouterr() == (
        "",
        f"megaopt schedule: cannot write {file}: No such file or directory\n",
    )


def test_the_file_that_is_named_is_the_one_that_is_written(parser, tmp_path: Path, capsys) -> None:
    """Without an ending it is a PNG of that very name."""
    file = tmp_path / "noext"
    assert run_schedule(parser.parse_args(["schedule", "--png", str(file)])) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["noext"]
    assert file.read_bytes().startswith(PNG_SIGNATURE)
    assert capsys.readouterr().out.endswith(f"\nwrote {file}\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "cannot write {}: Is a directory"), ("schedule.xyz", "--png {}: pictures are written as ")],
)
def test_a_folder_or_another_kind_of_file_is_refused(
    parser, tmp_path: Path, capsys, name: str, message: str
) -> None:
    """Nothing is printed or written."""
    path = tmp_path / name
    assert run_schedule(parser.parse_args(["schedule", "--png", str(path)])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"megaopt schedule: {message.format(path)}")
    assert list(tmp_path.parent.glob(f"{tmp_path.name}.*")) == list(tmp_path.iterdir()) == []


def test_a_command_line_without_the_command_is_left_alone() -> None:
    """The plugin also works with a core that has no command `schedule`."""
    commands = ArgumentParser().add_subparsers()
    offer_schedule_png(commands)
    assert dict(commands.choices) == {}
