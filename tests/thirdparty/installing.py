"""Install a distribution of this folder beside what is installed, without network."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["install_wheel"]

_BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def install_wheel(project: Path, target: Path) -> None:
    """Build a project's wheel in a copy of it and unpack it into a folder, which is all that installing one does.

    Args:
        project: the folder with `pyproject.toml`.
        target: the folder, which becomes part of `sys.path`.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copytree(project, Path(folder) / "source")
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _BUILD, folder],
            cwd=source,
            check=True,
            timeout=600,
            capture_output=True,
        )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
