"""The examples of the READMEs run as they stand."""

import re
import tomllib
from pathlib import Path

import pytest

from megaopt_core.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    ("README.md", "megaopt_muon"),
    ("plugins/megaopt-adam/README.md", "megaopt_adam"),
    ("plugins/megaopt-fsdp/README.md", "megaopt_fsdp"),
    ("plugins/megaopt-layerwise/README.md", "megaopt_layerwise"),
    ("plugins/megaopt-muon/README.md", "megaopt_muon"),
    ("plugins/megaopt-soap/README.md", "megaopt_soap"),
]


@pytest.mark.parametrize(("readme", "plugin"), EXAMPLES)
def test_python_of_the_readme_runs(readme: str, plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer can copy the example, and sees the output that is shown."""
    pytest.importorskip(plugin)
    text = (ROOT / readme).read_text()
    blocks = re.findall(
        r"^```python\n(.*?)^```$(?:\n\nprints\n\n```text\n(.*?)^```$)?", text, re.DOTALL | re.MULTILINE
    )
    assert blocks
    for block, shown in blocks:
        exec(block, {})  # noqa: S102 - running the example is the test
        printed = capsys.readouterr()
        assert printed.err == ""
        if shown:
            assert printed.out == shown


def test_the_install_lines_work_from_a_clone() -> None:
    """Every folder is there, and what a distribution needs of ours is in its line or in one before."""
    text = (ROOT / "README.md").read_text()
    installed: set[str] = set()
    lines = re.findall(r"^pip install (.*)$", text, re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        folders = [ROOT / word for word in line.split() if word.startswith(".")]
        projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in folders]
        installed |= {project["name"] for project in projects}
        for project in projects:
            ours = {re.match(r"[\w-]+", need)[0] for need in project["dependencies"] if "megaopt" in need}
            assert ours <= installed


COMMANDS = sorted(
    {
        command.split()[1]
        for command in re.findall(r"^\| (`megaopt .*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
        for command in re.findall(r"`(megaopt [^`]+)`", command)
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_readme_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each explains itself, with examples."""
    pytest.importorskip("megaopt_tools")
    pytest.importorskip("megaopt_testing")
    pytest.importorskip("megaopt_checkpoint")
    pytest.importorskip("megaopt_muon")
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"\nexamples:\n  megaopt {command}" in capsys.readouterr().out.replace(
        'eval "$(megaopt', "megaopt"
    )


@pytest.mark.parametrize("command", ["plugins", "optimizers", "describe muon"])
def test_commands_that_need_nothing_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As the table writes them."""
    pytest.importorskip("megaopt_muon")
    assert f"`megaopt {command}`" in (ROOT / "README.md").read_text()
    assert main(command.split()) == 0
    printed = capsys.readouterr()
    assert "muon" in printed.out
    assert printed.err == ""
