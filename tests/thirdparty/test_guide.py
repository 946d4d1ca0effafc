"""The plugin author's guide, followed to the letter: its files install, and pass the checks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from installing import install_wheel

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-a-plugin.md"
DETAILS = [PAGE.with_name(f"{name}.md") for name in ("optimizer-entry", "conformance-kit")]
"""Pages that go on with the plugin of the first one."""
DISTRIBUTION = Path(__file__).with_name("megaopt-signum")


def _files_of_the_page() -> dict[str, str]:
    """Return the blocks that stand under a file's name."""
    blocks = re.findall(
        r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, in a folder."""
    folder = tmp_path_factory.mktemp("guide") / "megaopt-signum"
    for name, text in _files_of_the_page().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def installed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the project is installed beside what is installed here, and no other plugin is let in."""
    target = tmp_path_factory.mktemp("installed")
    install_wheel(project, target)
    known = {key: value for key, value in os.environ.items() if not key.startswith("MEGAOPT_")}
    return {**known, "PYTHONPATH": str(target), "MEGAOPT_PLUGINS": "signum,lowbit,testing,tools"}


def _run(command: list[str], environ: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _megaopt(*arguments: str) -> list[str]:
    return ["-c", f"from megaopt_tools import main; raise SystemExit(main({list(arguments)!r}))"]


def test_the_page_shows_the_files_of_the_distribution() -> None:
    """What a reader copies is what is tested here, file by file."""
    files = [path for path in DISTRIBUTION.rglob("*") if path.is_file()]
    kept = [path for path in files if path.suffix in (".py", ".toml") and "build" not in path.parts]
    assert _files_of_the_page() == {
        path.relative_to(DISTRIBUTION).as_posix(): path.read_text() for path in kept
    }


def test_the_optimizer_takes_forty_lines() -> None:
    """The page promises it."""
    assert len(_files_of_the_page()["src/megaopt_signum.py"].splitlines()) <= 40


def test_the_optimizer_is_found_and_described(project: Path, installed: dict[str, str]) -> None:
    """`megaopt plugins` names its distribution and version, `megaopt describe` its setting with help."""
    listed = json.loads(_run(_megaopt("plugins", "--json"), installed, project))
    found = [(plugin["name"], plugin["distribution"], plugin["version"]) for plugin in listed]
    assert ("signum", "megaopt-signum", "0.1.0") in found
    described = _run(_megaopt("describe", "signum"), installed, project)
    assert "signum_beta" in described
    assert "decay rate of momentum" in described


def test_check_plugin_passes(project: Path, installed: dict[str, str]) -> None:
    """`python -m megaopt_testing signum` makes every check that can be made of it, with no other plugin there."""
    from megaopt_testing import CHECKS

    command = ["-m", "megaopt_testing", "signum", "--set", "signum_beta=0.8", "--json"]
    told = json.loads(_run(command, installed, project))
    (subject,) = told["subjects"]
    assert [(result["status"], result["id"]) for result in subject["results"]] == [
        ("skipped" if check.id == "split_step" else "passed", check.id) for check in CHECKS
    ]
    counts = {key: told[key] for key in ("checks", "ran", "skipped", "failed", "xfailed")}
    assert counts == {
        "checks": len(CHECKS),
        "ran": len(CHECKS) - 1,
        "skipped": 1,
        "failed": 0,
        "xfailed": 0,
    }


def test_the_distributions_own_tests_pass(project: Path, installed: dict[str, str]) -> None:
    """pytest, as the author runs it, has a test for every check, of which some are run: `check-plugin` made all."""
    from megaopt_testing import CHECKS

    pytest_of_it = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    listed = _run([*pytest_of_it, "--collect-only"], installed, project)
    assert f"{len(CHECKS)} tests collected" in listed
    printed = _run([*pytest_of_it, "-k", "learns or report or split_step"], installed, project)
    # A step of single elements has no parts to check.
    assert "2 passed, 1 skipped" in printed


def test_the_other_examples_of_the_page_run(project: Path, installed: dict[str, str]) -> None:
    """One after the other in one program; the one for a plugin that is not installed, without installing it."""
    named = set(_files_of_the_page().values())
    text = "\n".join(page.read_text() for page in (PAGE, *DETAILS))
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    others = [block for block in blocks if block not in named]
    draft = [block for block in others if "temporary_plugin" in block]
    code = "\n".join(
        ["from megaopt_core import OptimizerEntry", *(block for block in others if block not in draft)]
    )
    assert "signum" in _run(["-W", "error", "-c", code], installed, project)
    assert len(draft) == 1
    _run(["-W", "error", "-c", draft[0]], {**installed, "PYTHONPATH": str(project / "src")}, project)
