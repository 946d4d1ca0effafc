"""The command that installs a distribution: from the clone that the core came from, else from an index."""

import json
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path
from urllib.request import url2pathname

__all__ = ["install_line"]


def install_line(distribution: str) -> str:
    """Return the command that installs a distribution, from a clone with all that it needs of the clone.

    An editable installation counts as one from an index: whoever changes megaopt has `requirements-dev.txt`.

    Args:
        distribution: its name on an index.
    """
    core = next(iter(metadata.distributions(name="megaopt-core")), None)
    origin = json.loads((core and core.read_text("direct_url.json")) or "{}")
    clone = Path(url2pathname(origin.get("url", "").removeprefix("file://")), "plugins")
    folders = _folders(clone, distribution) if origin.get("dir_info") == {} else []
    return f"pip install {shlex.join(map(str, folders)) or distribution}"


def _folders(plugins: Path, distribution: str) -> list[Path]:
    """Return the folder of a distribution, after those that it needs and that are not installed."""
    project = plugins / distribution / "pyproject.toml"
    if not project.is_file() or any(metadata.distributions(name=distribution)):
        return []
    needs = tomllib.loads(project.read_text())["project"]["dependencies"]
    before = [folder for need in needs for folder in _folders(plugins, re.split(r"[^\w-]", need)[0])]
    return [*dict.fromkeys(before), project.parent]
