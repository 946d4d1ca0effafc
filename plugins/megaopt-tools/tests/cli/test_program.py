"""`megaopt`: its commands, those of plugins, and how errors are shown."""

import argparse
import itertools

import pytest
from long_runs import sometimes
from megaopt_tools import main
from megaopt_tools.cli.arguments import OWN_COMMANDS
from megaopt_tools.cli.program import COMMANDS, build_parser

from megaopt_core.registry import reset_registry

ADDS_COMMAND = """
@hookimpl
def megaopt_commands(commands):
    parser = commands.add_parser("greet", help="say hello")
    parser.add_argument("name")
    parser.add_argument("--loud", action="store_true")
    parser.set_defaults(run=lambda args: print("hello", args.name))
"""


def commands_of(parser: argparse.ArgumentParser) -> list[str]:
    """Names of a parser's commands."""
    (action,) = [action for action in parser._actions if action.dest == "command"]
    return list(action.choices)


def test_the_commands_of_the_program(plugins) -> None:
    """The table in the documentation and the parser list the same ones."""
    plugins.registry()
    assert commands_of(build_parser()) == list(OWN_COMMANDS)


def test_without_a_command_help_is_printed(plugins, capsys) -> None:
    """Every command with a line."""
    plugins.registry()
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {command}" in printed for command in OWN_COMMANDS)


def test_plugins_add_commands(plugins, capsys) -> None:
    """They are listed, and run like the core's."""
    plugins.install("greeter", ADDS_COMMAND)
    plugins.registry()
    assert main(["greet", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"
    assert commands_of(build_parser()) == [*OWN_COMMANDS, "greet"]


@pytest.mark.parametrize(("command", "distribution"), COMMANDS.items())
def test_a_command_that_is_not_installed_says_what_brings_it(plugins, capsys, command, distribution) -> None:
    """One line, with what to install."""
    plugins.registry()
    assert main([command, "anything"]) == 2
    assert capsys.readouterr().err == (
        f"megaopt: error: command {command!r} comes with {distribution}, which is not installed: "
        f"pip install {distribution}\n"
    )


def test_a_command_that_its_plugin_does_not_bring_says_upgrade(plugins, capsys) -> None:
    """Such as an older version, or a clone whose metadata have changed since it was installed."""
    plugins.install("muon")
    plugins.registry()
    assert main(["calibrate"]) == 2
    assert capsys.readouterr().err == (
        "megaopt: error: command 'calibrate' should come with megaopt-muon, but what is installed does not bring it: "
        "pip install --upgrade megaopt-muon\n"
    )


def test_a_plugin_that_fails_to_add_its_command_takes_no_other_down(plugins, capsys) -> None:
    """It is named in one line."""
    plugins.install(
        "bad", "@hookimpl\ndef megaopt_commands(commands): commands.add_parser('x'); raise SystemExit(3)"
    )
    plugins.install("greeter", ADDS_COMMAND)
    plugins.registry()
    assert main(["greet", "you"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello you\n"
    assert captured.err.startswith(
        "megaopt: warning: plugin 'bad' (megaopt-bad 1.0) failed in hook megaopt_commands: "
    )
    assert captured.err.count("\n") == 1


def test_an_error_is_one_line_and_exit_status_2(plugins, capsys) -> None:
    """`--traceback` shows where it comes from."""
    plugins.registry()
    assert main(["describe", "muon"]) == 2
    line = "megaopt: error: optimizer 'muon' comes with megaopt-muon, which is not installed: pip install megaopt-muon"
    assert capsys.readouterr().err == f"{line}\n"
    assert main(["--traceback", "describe", "muon"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.endswith(f"{line}\n")


def test_an_unexpected_error_is_not_hidden(plugins) -> None:
    """A bug in a command shows its traceback."""
    plugins.install("greeter", ADDS_COMMAND.replace('print("hello", args.name)', "1 / 0"))
    plugins.registry()
    with pytest.raises(ZeroDivisionError):
        main(["greet", "you"])


def test_a_broken_plugin_is_one_line(plugins, capsys) -> None:
    """And not a warning with a line of megaopt's own source."""
    plugins.install("bad", "1 / 0")
    plugins.registry()
    assert main(["optimizers"]) == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "megaopt: warning: plugin 'bad' (megaopt-bad 1.0) failed to load and is left out: "
        "ZeroDivisionError: division by zero\n"
    )


WRONG = {
    (
        "explian",
    ): "megaopt: error: unknown command 'explian'; did you mean explain? `megaopt --help` lists all",
    ("nonsense",): "megaopt: error: unknown command 'nonsense'. `megaopt --help` lists all",
    ("--versoin",): "megaopt: error: unknown option --versoin; did you mean --version?",
    ("explain", "--optimzer", "muon", "m:f"): (
        "megaopt explain: error: unknown option --optimzer; did you mean --optimizer?"
    ),
    ("explain", "m:f", "--optimzer=muon"): (
        "megaopt explain: error: unknown option --optimzer; did you mean --optimizer?"
    ),
    ("explain", "m:f", "more"): "megaopt explain: error: unrecognized arguments: more",
    ("explain",): "megaopt explain: error: the following arguments are required: MODULE:FACTORY",
    ("greet", "you", "--lodu"): "megaopt greet: error: unknown option --lodu; did you mean --loud?",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_argument_shows_the_commands_usage_and_a_guess(plugins, capsys, arguments) -> None:
    """In plugins' commands as well; nothing runs."""
    plugins.install("greeter", ADDS_COMMAND)
    plugins.registry()
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    prog = WRONG[arguments].partition(":")[0]
    assert captured.err.startswith(f"usage: {prog} [")
    assert captured.err.endswith(f"\n{WRONG[arguments]}\n")


@pytest.mark.parametrize("command", OWN_COMMANDS)
@pytest.mark.parametrize("columns", ["60", "80", "100", "140"])
def test_help_ends_with_examples_as_they_are(plugins, monkeypatch, capsys, command, columns) -> None:
    """Lines to copy; all else is wrapped to the terminal."""
    monkeypatch.setenv("COLUMNS", columns)
    plugins.registry()
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert all(line.startswith(f"  megaopt {command}") for line in examples.splitlines())
    assert examples
    assert max(map(len, text.splitlines())) <= int(columns)


LIGHT = ["--version", "--help", "plugins", "plugins --json", "explain --optimzer m:f", "explain", "nonsense"]


@pytest.mark.parametrize("arguments", LIGHT)
def test_what_needs_no_torch_does_not_wait_for_it(plugins, arguments) -> None:
    """A command that a plugin brings is listed without it too, when the plugin's module does not import it."""
    head = "from megaopt_core.plugin_api import hookimpl\nmegaopt_api = '1'\n"
    plugins.install("greeter", ADDS_COMMAND, head=head)
    plugins.install("heavy", "raise SystemExit('imported without need')")
    done = plugins.python(f"""
        import sys
        sys.modules["torch"] = None
        from megaopt_tools import main
        sys.exit(main({arguments.split()!r}))
        """)
    wrong = arguments in {"explain --optimzer m:f", "explain", "nonsense"}
    assert done.returncode == (2 if wrong else 0)
    assert ("usage: megaopt" in done.stderr) if wrong else (done.stderr == "")
    assert "imported without need" not in done.stderr
    if arguments == "--help":
        assert "\n    greet " in done.stdout


def test_version(capsys) -> None:
    """Of the distribution."""
    reset_registry()
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("megaopt-core ")


def test_without_numpy_no_command_warns(plugins) -> None:
    """Torch tells of a missing numpy when it is imported; that is no news to a user of ours."""
    code = "import sys; sys.modules['numpy'] = None; from megaopt_tools import main; sys.exit(main(['optimizers']))"
    done = plugins.python(code)
    assert (done.returncode, done.stderr) == (0, "")


LIGHT_HEAD = "from megaopt_core.plugin_api import hookimpl\nmegaopt_api = '1'\n"
"""Of a plugin that does not import torch."""

LONG = """
@hookimpl
def megaopt_commands(commands):
    parser = commands.add_parser("many", help="print much")
    parser.set_defaults(run=lambda args: print("a line\\n" * 100_000))
"""


@pytest.mark.any_python
@pytest.mark.parametrize(
    ("command", "where"),
    sometimes(
        itertools.product(
            ["many", "--help", "plugins", "describe", "optimizers"], ["pipe", "full", "closed"]
        ),
        [("many", "pipe"), ("many", "closed"), ("--help", "full"), ("plugins", "pipe"), ("plugins", "full")],
    ),
)
def test_output_that_nobody_takes_is_no_traceback(plugins, command, where) -> None:
    """A pipe that `head` has closed, a disk that is full, and no output at all."""
    plugins.install("many", LONG, head=LIGHT_HEAD)
    breaks = {
        "pipe": "reader, output = os.pipe(); os.close(reader); os.dup2(output, 1)",
        "full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
        "closed": "sys.stdout = None",
    }
    code = f"""
        import os, sys
        from megaopt_tools import main
        {breaks[where]}
        sys.exit(main({command.split()!r}))
        """
    done = plugins.python(code, PYTHONUNBUFFERED="")  # argparse hides what goes wrong while it writes
    expected = {
        "pipe": (1, ""),
        "full": (2, "megaopt: error: [Errno 28] No space left on device\n"),
        "closed": (0, ""),
    }
    assert (done.returncode, done.stderr) == expected[where]


def test_letters_that_the_output_cannot_show_are_escaped(plugins) -> None:
    """A name in another script is no reason for a traceback where the locale is C."""
    plugins.install("greeter", ADDS_COMMAND, head=LIGHT_HEAD)
    code = "import sys; from megaopt_tools import main; sys.exit(main(['greet', chr(0x3b2)]))"
    done = plugins.python(code, PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello \\u03b2\n", "")
