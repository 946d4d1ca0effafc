"""Build every distribution, install the wheels outside the tree and run the tests against them.

An editable install finds what a wheel may lack: a data file that no setting names, an entry point, a
dependency. Here nothing of the tree is importable. The script needs `uv`; its exit status says whether all
held.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THE_SAME_ANYWHERE = ("test_conformance.py", "test_sharded_conformance.py")
NOT_SOURCE = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "dist", ".venv")


class WheelError(Exception):
    """A wheel is not what its source says that it is."""


@dataclass(frozen=True)
class Distribution:
    """One distribution of this repository: where its project file lies and where its packages are."""

    project: Path
    sources: Path

    @property
    def metadata(self) -> dict:
        """The `[project]` table."""
        return tomllib.loads((self.project / "pyproject.toml").read_text())["project"]

    @property
    def package(self) -> str:
        """The name that is imported, and of the folder that it is built in."""
        return self.metadata["name"].replace("-", "_")

    @property
    def has_package(self) -> bool:
        """False for the distribution that only depends on others."""
        return (self.sources / self.package).is_dir()

    def files(self) -> Iterator[str]:
        """Every file of the package, as a wheel should name it."""
        for path in (self.sources / self.package).rglob("*"):
            if path.is_file():
                yield path.relative_to(self.sources).as_posix()

    def entry_points(self) -> set[tuple[str, str, str]]:
        """Group, name and value of what the project file promises."""
        groups = dict(self.metadata.get("entry-points", {}))
        groups["console_scripts"] = self.metadata.get("scripts", {})
        return {(group, name, value) for group, points in groups.items() for name, value in points.items()}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that has to succeed, and return what it printed."""
    print("$", *command, flush=True)
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def copy_sources(to: Path) -> list[Distribution]:
    """Copy what the distributions are built from: nothing that an earlier build left behind gets in."""
    for name in ("megaopt_core", "plugins"):
        shutil.copytree(ROOT / name, to / name, ignore=NOT_SOURCE)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    plugins = sorted((to / "plugins").glob("megaopt-*"))
    return [Distribution(to, to), *(Distribution(plugin, plugin / "src") for plugin in plugins)]


def build(distribution: Distribution, to: Path) -> Path:
    """Build the source distribution, and from that the wheel: what a user of an index gets."""
    to.mkdir()
    options = ["--quiet", "--no-sources", "--python", sys.executable, "--out-dir", to]
    run("uv", "build", *options, cwd=distribution.project)
    (wheel,) = to.glob("*.whl")
    return wheel


def check_files(distribution: Distribution, wheel: Path) -> None:
    """The wheel holds every file of the package, its license, and nothing beside its package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = set(distribution.files())
    packed = {name for name in names if ".dist-info/" not in name}
    if expected - packed:
        raise WheelError(f"{wheel.name} lacks {sorted(expected - packed)}")
    if packed - expected:
        raise WheelError(f"{wheel.name} has {sorted(packed - expected)}, which its package does not")
    if distribution.has_package and f"{distribution.package}/py.typed" not in packed:
        raise WheelError(f"{wheel.name} has no py.typed")
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        raise WheelError(f"{wheel.name} has no LICENSE")


LOAD_ENTRY_POINTS = """\
import sys
from importlib.metadata import distribution
for point in distribution(sys.argv[1]).entry_points:
    try:
        point.load()
    except ModuleNotFoundError as error:
        # A group of another program's, as Lightning's: what is in it loads where that program is.
        if error.name.partition(".")[0] != point.group.partition(".")[0]:
            raise
    print(point.group, point.name, point.value, sep="\\t")
"""


def check_entry_points(distribution: Distribution, python: Path, outside: Path) -> None:
    """What the project file promises is there after installing, and loads."""
    name, promised = distribution.metadata["name"], distribution.entry_points()
    script = outside / f"load_entry_points_of_{distribution.package}.py"
    script.write_text(LOAD_ENTRY_POINTS)
    printed = run(python, "-I", script, name, cwd=outside)
    installed = {tuple(line.split("\t")) for line in printed.splitlines()}
    if installed != promised:
        raise WheelError(f"{name} promises the entry points {promised}, and its wheel has {installed}")


def make_environment(outside: Path) -> Path:
    """Make a fresh environment and return its Python."""
    environment = outside / "venv"
    run("uv", "venv", "--quiet", "--python", sys.executable, environment, cwd=outside)
    return environment / ("Scripts" if os.name == "nt" else "bin") / "python"


def install(python: Path, *requirements: str | Path) -> None:
    """Install wheels by path and everything else from the index; under tox with the bytecode of its environments."""
    run("uv", "pip", "install", "--quiet", "--python", python, *requirements, cwd=python.parent)
    tox = os.environ.get("TOX_WORK_DIR")
    if tox:
        run(python, "-I", ROOT / "tests" / "bytecode.py", "take", Path(tox, "bytecode"), cwd=python.parent)


FEW = {
    "core_and_muon.py": {"megaopt-core", "megaopt-muon", "megaopt-adam", "megaopt-roles"},
    "muon_and_files.py": {
        "megaopt-core",
        "megaopt-muon",
        "megaopt-adam",
        "megaopt-roles",
        "megaopt-checkpoint",
    },
    "adam_and_fsdp.py": {
        "megaopt-core",
        "megaopt-adam",
        "megaopt-fsdp",
        "megaopt-layerwise",
        "megaopt-distributed",
        "megaopt-guards",
        "megaopt-checkpoint",
    },
}
"""A script beside this file, and all that is installed where it runs."""


def check_few(distributions: list[Distribution], wheels: list[Path], outside: Path) -> None:
    """What people install by itself works, and says what brings the rest: each in an environment with nothing else."""
    for script, needed in FEW.items():
        small = outside / script.removesuffix(".py")
        small.mkdir()
        python = make_environment(small)
        chosen = [
            wheel
            for distribution, wheel in zip(distributions, wheels, strict=True)
            if distribution.metadata["name"] in needed
        ]
        install(python, *chosen)
        for name in (Path(__file__).with_name(script), ROOT / "README.md"):
            shutil.copy(name, small)
        print(run(python, "-I", small / script, small / "README.md", cwd=small))


def has_data(distribution: Distribution) -> bool:
    """Whether there are files in the package that its Python reads: a wheel may lay them elsewhere than the tree."""
    return any(not name.endswith((".py", "/py.typed")) for name in distribution.files())


def copy_tests(distributions: list[Distribution], to: Path) -> list[str]:
    """Copy the tests that need nothing else of the tree; return the folders of those that could fail on a wheel alone.

    That is what everything installed does together, and the plugins that read files of theirs. What modules compute is
    the same from wherever they are imported, so the conformance kit over every optimizer stays with the tree.
    """
    together = Path("tests/combos")
    folders = {
        Path("plugins", plugin.project.name, "tests"): has_data(plugin)
        for plugin in distributions[1:]
        if plugin.has_package
    }
    for folder in (together, *folders):
        shutil.copytree(ROOT / folder, to / folder, ignore=NOT_SOURCE)
    # The README's lines to install from a clone are held to what each project file says.
    readmes = [
        Path("plugins", plugin.project.name, name)
        for plugin in distributions[1:]
        for name in ("README.md", "pyproject.toml")
    ]
    # What recipes of the bridge are held to stands beside the benchmarks.
    results = Path("benchmarks/results/bridge.json")
    settings = (*map(Path, ("pyproject.toml", "conftest.py", "tests/leftovers.py", "tests/long_runs.py")),)
    # The front page's lines with tox are held to its environments, and the page of commands to what is installed.
    pages = ("README.md", "CONTRIBUTING.md", "docs/command-line.md", "docs/index.md", "docs/start.md")
    front = (*map(Path, (*pages, "tox.ini")),)
    for name in (*settings, *front, results, *readmes):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    return [str(together), *(str(folder) for folder, differs in folders.items() if differs)]


def check(outside: Path, *pytest_arguments: str) -> int:
    """Build, check, install and test in an empty folder, and return pytest's exit status."""
    distributions = copy_sources(outside / "sources")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as builders:
        outputs = [outside / distribution.package for distribution in distributions]
        wheels = list(builders.map(build, distributions, outputs))
    for distribution, wheel in zip(distributions, wheels, strict=True):
        check_files(distribution, wheel)
    check_few(distributions, wheels, outside)
    python = make_environment(outside)
    install(python, *wheels)
    # Before the tools of the tests are there: a plugin's own dependencies have to be enough.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as readers:
        checks = [readers.submit(check_entry_points, each, python, outside) for each in distributions]
    for each in checks:
        each.result()
    install(python, *tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["test"])
    folders = copy_tests(distributions, outside / "tests")
    log = os.environ.get("TOX_ENV_DIR")
    account = [f"--junitxml={log}/log/tests.xml"] if log else []
    # -I: neither the current folder nor PYTHONPATH can stand in for a file that a wheel lacks.
    pytest = [
        python,
        "-I",
        "-m",
        "pytest",
        "-n",
        "auto",
        "--maxprocesses=4",
        "--dist=loadscope",
        *account,
        "-m",
        "not any_python",
        *(f"--ignore-glob=*/combos/{name}" for name in THE_SAME_ANYWHERE),
        *folders,
        *pytest_arguments,
    ]
    return subprocess.run(pytest, cwd=outside / "tests", check=False).returncode


def main() -> None:
    """Do all of it in a folder that is removed afterwards."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megaopt-wheels-") as folder:
        try:
            status = check(Path(folder), *arguments.pytest)
        except (WheelError, subprocess.CalledProcessError) as error:
            status = f"{parser.prog}: {error}"
    sys.exit(status)


if __name__ == "__main__":
    main()
