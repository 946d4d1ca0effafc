"""`megaopt new-plugin` writes a package whose tests pass at once: built, installed into a venv, run there."""

import os
import re
import subprocess
import sysconfig
import tomllib
import venv
from functools import partial
from pathlib import Path

import pytest
from installing import install_wheel
from long_runs import sometimes
from megaopt_testing import run_command
from megaopt_testing.new_plugin_command import KINDS
from megaopt_testing.plugin import megaopt_commands

main = partial(run_command, megaopt_commands)

pytest.importorskip("setuptools")

CHECKS = {"optimizer": 35, "strategy": 5, "schedule": 5, "roles": 4}
"""Kind to how many checks of the kit can be made of what is written."""


def _python(folder: Path) -> Path:
    """Return the interpreter of a new environment that sees what is installed here."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    lines = [
        f"import site; site.addsitedir({path!r})"
        for path in dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    ]
    (_site(python) / "outer.pth").write_text("\n".join(lines) + "\n")
    return python


def _site(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip())


@pytest.mark.parametrize("kind", sometimes(KINDS, ["optimizer", "strategy"]))
def test_its_tests_pass_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every check of the kit, and the badge that the workflow draws."""
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", f"brand-new-{kind}", "--kind", kind]) == 0
    project = tmp_path / f"megaopt-brand-new-{kind}"
    python = _python(tmp_path / "venv")
    install_wheel(project, _site(python))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MEGAOPT_", "PYTHONPATH"))}
    environ = {**kept, "MEGAOPT_PLUGINS": f"brand_new_{kind},lowbit,testing"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [python, *command],
            cwd=project,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    printed = run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert re.search(r"^\d+ passed", printed, re.MULTILINE), printed
    where = run("-c", f"import megaopt_brand_new_{kind} as m; print(m.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_is_complete(kind: str, tmp_path: Path) -> None:
    """Entry, tests, README with a badge, changelog, and the two workflows; no placeholder is left."""
    assert main(["new-plugin", "new-one", "--kind", kind, "--into", str(tmp_path / "made")]) == 0
    made = {
        path.relative_to(tmp_path / "made").as_posix(): path.read_text()
        for path in (tmp_path / "made").rglob("*")
        if path.is_file()
    }
    assert set(made) == {
        ".github/workflows/publish.yml",
        ".github/workflows/test.yml",
        ".gitignore",
        "CHANGELOG.md",
        "README.md",
        "kit.svg",
        "pyproject.toml",
        "src/megaopt_new_one/__init__.py",
        "src/megaopt_new_one/py.typed",
        "tests/test_new_one.py",
    }
    assert not [name for name, text in made.items() if re.search(r"@[A-Z_]+@", text)]
    project = tomllib.loads(made["pyproject.toml"])["project"]
    assert project["entry-points"] == {"megaopt": {"new_one": "megaopt_new_one"}}
    assert project["name"] == "megaopt-new-one"
    assert 'megaopt_api = "1"' in made["src/megaopt_new_one/__init__.py"]
    assert f"at_least={CHECKS[kind]}" in made["tests/test_new_one.py"]
    assert "id-token: write" in made[".github/workflows/publish.yml"]
    assert "--badge kit.svg" in made[".github/workflows/test.yml"]
    for name, text in made.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


@pytest.mark.parametrize("name", ["My-Opt", "my opt", "-x", "my--opt", "../x", "2fast", "megaopt_x", ""])
def test_what_is_no_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written."""
    assert main(["new-plugin", "--into", str(tmp_path / "made"), "--", name]) == 2
    assert "is no name for a plugin" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_what_is_taken_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that an installed plugin gives, and a folder that holds something."""
    assert main(["new-plugin", "replicated", "--into", str(tmp_path / "made")]) == 2
    assert "'replicated' is a strategy that is installed here" in capsys.readouterr().err
    (tmp_path / "kept.txt").write_text("mine")
    assert main(["new-plugin", "fresh", "--into", str(tmp_path)]) == 2
    assert "nothing is written over" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.txt"]
