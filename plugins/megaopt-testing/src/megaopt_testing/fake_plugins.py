"""Plugins that a test makes up, installed into a folder of its own."""

import importlib
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path

import pytest

from megaopt_core.registry import COMMANDS, GROUP, PluginRegistry, reset_registry

_NUMBERS = itertools.count()

HEAD = """
import torch
from attrs import field, frozen, validators
from megaopt_core import OptimizerConfig, OptimizerEntry, hookimpl
from megaopt_core.plugin_api import ScheduleStyle

megaopt_api = "1"
"""


class FakePlugins:
    """A folder of installed distributions.

    Args:
        folder: where they are installed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def install(
        self, name: str, code: str = "", *, version: str = "1.0", head: str = HEAD, dist: str = ""
    ) -> str:
        """Install a plugin whose module has this code; return the module's name."""
        module = f"fake_{name}_{next(_NUMBERS)}"
        dist = dist or f"megaopt-{name}"
        (self.folder / f"{module}.py").write_text(head + textwrap.dedent(code))
        info = self.folder / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        groups = [GROUP, COMMANDS] if "megaopt_commands" in code else [GROUP]
        lines = [f"[{group}]\n{name} = {module}\n" for group in groups]
        (info / "entry_points.txt").write_text("".join(lines))
        self.names.append(name)
        importlib.invalidate_caches()
        return module

    def entry_points(self) -> list[EntryPoint]:
        """Entry points of what is installed here."""
        found = distributions(path=[str(self.folder)])
        return [point for dist in found for point in dist.entry_points if point.group == GROUP]

    def registry(self, *installed: str, **environ: str) -> PluginRegistry:
        """Return a registry of these plugins; it becomes the process's own until the test ends.

        Args:
            *installed: names of plugins that are really installed, and belong to it as well.
            **environ: the environment's variables.
        """
        others = [point for point in entry_points(group=GROUP) if point.name in installed]
        registry = PluginRegistry([*self.entry_points(), *others], environ)
        reset_registry(registry)
        return registry

    def python(self, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run code in a process of its own that sees these plugins and no other, unless `environ` says otherwise."""
        known = {key: value for key, value in os.environ.items() if not key.startswith("MEGAOPT_")}
        mine = {"PYTHONPATH": str(self.folder), "MEGAOPT_PLUGINS": ",".join(self.names), "COLUMNS": "200"}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**known, **mine, **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )


__all__ = ["FakePlugins", "plugins"]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePlugins]:
    """An empty folder of plugins; the process's own registry comes back afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    yield FakePlugins(tmp_path)
    reset_registry()
