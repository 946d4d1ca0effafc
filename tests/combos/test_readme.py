"""The examples of the READMEs run as they stand."""

import configparser
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [Path("README.md"), *(page.relative_to(ROOT) for page in sorted((ROOT / "docs").glob("*.md")))]
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


def _installs(page: Path) -> list[str]:
    """Return what the commands of a page install, without those for tox and for a package of the reader's own."""
    lines = re.findall(r"^(?:\$ )?pip install (.*)$", page.read_text(), re.MULTILINE)
    return [line for line in lines if not line.startswith(("tox", "-e ."))]


@pytest.mark.parametrize("page", [page for page in PAGES if _installs(ROOT / page)], ids=str)
def test_the_install_lines_work_from_a_clone(page: Path) -> None:
    """The first command installs from folders that are there, and brings what each distribution needs of ours."""
    installed: set[str] = set()
    for line in _installs(ROOT / page):
        words = [word for written in line.split() for word in _expanded(written)]
        folders = [ROOT / word for word in words if word.startswith(".")]
        assert folders, f"{page}: {line!r} installs from an index"
        projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in folders]
        installed |= {project["name"] for project in projects}
        for project in projects:
            ours = {re.match(r"[\w-]+", need)[0] for need in project["dependencies"] if "megaopt" in need}
            assert ours <= installed


COMMAND_PAGE = (ROOT / "docs" / "command-line.md").read_text()
COMMANDS = sorted(
    {
        command.split()[1]
        for command in re.findall(r"^\| (`megaopt .*?) \|", COMMAND_PAGE, re.MULTILINE)
        for command in re.findall(r"`(megaopt [^`]+)`", command)
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_table_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each explains itself, with examples."""
    tools = pytest.importorskip("megaopt_tools")
    pytest.importorskip("megaopt_testing")
    pytest.importorskip("megaopt_checkpoint")
    pytest.importorskip("megaopt_muon")
    with pytest.raises(SystemExit) as stop:
        tools.main([command, "--help"])
    assert stop.value.code == 0
    assert f"\nexamples:\n  megaopt {command}" in capsys.readouterr().out.replace(
        'eval "$(megaopt', "megaopt"
    )


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        ("plugins", ""),
        ("optimizers", ""),
        ("optimizers muon", ""),
        ("describe OPTIMIZER", ""),
        ("explain MODULE:FACTORY", ""),
        ("schedule", "megaopt_tools"),
        ("completion SHELL", "megaopt_tools"),
        ("new-plugin NAME", "megaopt_testing"),
    ],
)
def test_commands_run_as_the_table_writes_them(
    command: str,
    needs: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In any folder; what is a placeholder there is a model, or a name, here."""
    tools = pytest.importorskip("megaopt_tools")
    pytest.importorskip("megaopt_muon")
    if needs:
        pytest.importorskip(needs)
    assert f"`megaopt {command}`" in COMMAND_PAGE
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_module.py").write_text(
        "import torch\nmodel = torch.nn.TransformerEncoderLayer(16, 2, 32)\n"
    )
    given = {"MODULE:FACTORY": "my_module.py:model", "NAME": "mine", "OPTIMIZER": "muon", "SHELL": "bash"}
    words = [given.get(word, word) for word in command.split()]
    assert tools.main(words) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out or (tmp_path / "megaopt-mine").is_dir()


TOX = configparser.ConfigParser(interpolation=None)
TOX.read(ROOT / "tox.ini")


def _expanded(name: str) -> set[str]:
    """Return the names that one with braces stands for: `py312-{core, muon}`, `demo{,-short}`."""
    before, opening, inner = name.partition("{")
    return {before + each.strip() for each in inner.rstrip("}").split(",")} if opening else {name}


def _environments() -> set[str]:
    """Names of tox's environments."""
    sections = (name.removeprefix("testenv:") for name in TOX.sections() if name.startswith("testenv:"))
    listed = (line.strip() for line in TOX["tox"]["env_list"].split("\n") if line.strip())
    return {name for written in (*sections, *listed) for name in _expanded(written)}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_line_with_tox_names_an_environment_that_there_is(page: str) -> None:
    """And nothing but tox has to be installed before: it brings what `requires` names."""
    text = (ROOT / page).read_text()
    named = set(re.findall(r"tox run -e ([\w-]+)", text))
    assert named
    assert named - _environments() == set()
    assert set(re.findall(r"^pip install tox.*$", text, re.MULTILINE)) <= {
        "pip install tox && tox",
        "pip install tox && tox run -e demo",
    }
    assert {"tox>=4.20", "tox-uv"} <= set(TOX["tox"]["requires"].split())


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:matplotlib", "ignore::PendingDeprecationWarning:matplotlib"
)
def test_the_demo_ends_with_a_table_and_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of its environment, of two steps: what the front page promises of it."""
    tools = pytest.importorskip("megaopt_tools")
    pytest.importorskip("megaopt_muon")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    commands = next(
        TOX[name]["commands"] for name in TOX.sections() if "demo" in _expanded(name[len("testenv:") :])
    )
    line = next(line for line in commands.split("\n") if line.startswith("!short:"))
    _, program, *arguments = shlex.split(line.replace("{posargs}", ""))
    assert program == "megaopt"
    assert tools.main([*arguments, "--steps", "2", "--threads", "1"]) == 0
    text, _, table = capsys.readouterr().out.partition("held-out")
    assert "pydoc_data.topics" in text
    assert [line.split()[0] for line in table.splitlines()[3:6]] == ["adam", "muon", "adaptive_muon"]
    assert (tmp_path / "demo" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "with AdamW and with Muon, and ends with a table and a picture" in (ROOT / "README.md").read_text()
