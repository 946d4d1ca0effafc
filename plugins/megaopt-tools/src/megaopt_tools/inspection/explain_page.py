"""The page of `megaopt explain --html`: one self-contained file with a table and a map of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from megaopt_core.errors import ConfigurationError

__all__ = ["write_page"]


def write_page(path: str, explained: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: the file; its folder must exist.
        explained: what `--json` prints, and `model`, its name.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    template = files("megaopt_tools").joinpath("explain_page.html").read_text(encoding="utf-8")
    # Inside a script element only "</" could end the data early.
    data = json.dumps(explained, separators=(",", ":")).replace("</", "<\\/")
    try:
        Path(path).write_text(template.replace("__DATA__", data, 1), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--html {path}: cannot be written: {error.strerror}", setting="html"
        ) from error
