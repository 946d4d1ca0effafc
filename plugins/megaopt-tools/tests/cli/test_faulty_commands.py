"""Commands of faulty plugins: each is named, and the others stay usable."""

import pytest
from megaopt_tools import main

GREETS = """
@hookimpl
def megaopt_commands(commands):
    commands.add_parser("greet").set_defaults(run=lambda parsed: print("hello"))
"""

UNSPEAKABLE = """
class Unspeakable({base}):
    def __str__(self):
        raise RuntimeError("no words")
"""

RAISES = {
    "an exception": "raise RuntimeError('bad')",
    "a system exit": "raise SystemExit(3)",
    "a generator exit": "raise GeneratorExit",
    "a base exception": "raise type('Own', (BaseException,), {})('bad')",
    "an unspeakable exception": UNSPEAKABLE.format(base="Exception") + "raise Unspeakable",
    "an unspeakable base exception": UNSPEAKABLE.format(base="BaseException") + "raise Unspeakable",
    "a warning": "raise DeprecationWarning('bad')",
}
"""Ways to raise that a plugin may choose."""

CLASHES = {
    "the name of another's command": "commands.add_parser('greet')",
    "the name of the program's command": "commands.add_parser('explain')",
}


def hook(code: str) -> str:
    """Return a plugin that runs this where it is asked for commands."""
    lines = "".join(f"    {line}\n" for line in code.splitlines() if line)
    return f"@hookimpl\ndef megaopt_commands(commands):\n{lines}"


@pytest.mark.parametrize("fault", [*RAISES, *CLASHES])
def test_a_faulty_plugin_harms_no_other_and_is_named(plugins, capsys, fault) -> None:
    """A command that no fault touches runs; `plugins --load` names the faulty plugin and ends with 2."""
    plugins.install("good", GREETS)
    plugins.install("faulty", hook((RAISES | CLASHES)[fault]), version="6.6")
    plugins.registry()
    is_contested = fault == "the name of another's command"
    assert main(["greet"]) == (2 if is_contested else 0)
    assert main(["plugins", "--load"]) == 2
    captured = capsys.readouterr()
    assert ("hello" in captured.out) is not is_contested
    assert "(megaopt-faulty 6.6)" in captured.err


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise SystemExit('no data')", 2, "ended with SystemExit: no data"),
        ("raise SystemExit(4)", 2, "ended with SystemExit: 4"),
        ("raise SystemExit(0)", 0, ""),
        ("raise SystemExit", 0, ""),
        ("return 'done'", 2, "returned str; it must return an exit status"),
        ("return 5", 5, ""),
    ],
)
def test_a_command_that_exits_is_named(plugins, capsys, code, status, words) -> None:
    """With its plugin; a success stays one."""
    plugins.install(
        "exits",
        f"def run(parsed): {code}\n"
        "@hookimpl\ndef megaopt_commands(commands): commands.add_parser('leave').set_defaults(run=run)",
    )
    plugins.registry()
    assert main(["leave"]) == status
    expected = (
        f"megaopt: error: command 'leave' of plugin 'exits' (megaopt-exits 1.0) {words}\n" if words else ""
    )
    assert capsys.readouterr().err == expected


def test_a_command_without_a_function_is_named(plugins, capsys) -> None:
    """It says what is missing."""
    plugins.install("idle", "@hookimpl\ndef megaopt_commands(commands): commands.add_parser('idle')")
    plugins.registry()
    assert main(["idle"]) == 2
    assert (
        "command 'idle' of plugin 'idle' (megaopt-idle 1.0) has no function to run" in capsys.readouterr().err
    )


def test_an_unexpected_error_in_a_command_tells_whose_it_is(plugins) -> None:
    """The traceback stays, with a note."""
    plugins.install(
        "bug",
        "def run(parsed): 1 / 0\n"
        "@hookimpl\ndef megaopt_commands(commands): commands.add_parser('bug').set_defaults(run=run)",
    )
    plugins.registry()
    with pytest.raises(ZeroDivisionError) as caught:
        main(["bug"])
    assert caught.value.__notes__ == ["This came from command 'bug' of plugin 'bug' (megaopt-bug 1.0)."]
