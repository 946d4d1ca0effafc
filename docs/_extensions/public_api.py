"""Writes the API reference at every build: one page a public module, and an overview of all names by topic."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

TOPICS: Mapping[str, tuple[str, ...]] = {
    "Build and train": (
        "megaopt_core.build",
        "megaopt_core.config",
        "megaopt_core.optimizers",
        "megaopt_core.schedules",
        "megaopt_core.reporting",
    ),
    "Which parameter gets which optimizer": ("megaopt_core.params", "megaopt_core.routing"),
    "Optimizers": ("megaopt_muon", "megaopt_bridge"),
    "Precision": ("megaopt_core.precision", "megaopt_lowbit", "megaopt_device"),
    "Over many ranks": (
        "megaopt_core.parallel",
        "megaopt_guards",
        "megaopt_distributed",
        "megaopt_layerwise",
        "megaopt_fsdp",
        "megaopt_core.sharding",
    ),
    "Under a trainer": (
        "megaopt_trainers.megatron",
        "megaopt_trainers.midrun",
        "megaopt_trainers.peft",
        "megaopt_trainers.timm",
        "megaopt_trainers.whole_states",
    ),
    "State and checkpoints": ("megaopt_checkpoint", "megaopt_core.state"),
    "Write a plugin": (
        "megaopt_core.plugin_api",
        "megaopt_testing",
        "megaopt_core.registry",
        "megaopt_core.execution",
    ),
    "On the command line": ("megaopt_tools",),
    "Errors": ("megaopt_core.errors",),
}
"""Headings of the overview, and the modules whose names stand under each."""

_WITH_BASES = {"megaopt_muon": "OrthogonalizedOptimizer"}
"""Modules whose classes have public methods from bases of their own, and the first base that is another package's."""


def modules() -> Iterator[str]:
    """Yield every module of `TOPICS`."""
    for names in TOPICS.values():
        yield from names


def public_names(module: str) -> list[str]:
    """Return what a module offers, constants last.

    Args:
        module: its dotted name.
    """
    home = importlib.import_module(module)
    return sorted(home.__all__, key=lambda name: (not callable(getattr(home, name)), name.lower()))


def summary(documented: Any) -> str:
    """Return the first sentence of a docstring; nothing for a value that has none of its own.

    Args:
        documented: a class, a function or a value.
    """
    if not (inspect.isclass(documented) or inspect.isroutine(documented)):
        return ""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", (inspect.getdoc(documented) or "").partition("\n")[0])


def _overview() -> str:
    lines = ["# API reference", "", "Public names by topic. Everything else is internal and may change.", ""]
    for topic, names in TOPICS.items():
        lines += [f"## {topic}", ""]
        for module in names:
            home = importlib.import_module(module)
            lines += [f"### {{doc}}`{module}`", "", "| name | what it is |", "|---|---|"]
            for name in public_names(module):
                text = summary(getattr(home, name)).replace("|", "\\|")
                lines.append(f"| {{py:obj}}`{name} <{module}.{name}>` | {text} |")
            lines.append("")
    lines += ["```{toctree}", ":hidden:", ":maxdepth: 1", "", *modules(), "```", ""]
    return "\n".join(lines)


def _page(module: str) -> str:
    bases = _WITH_BASES.get(module)
    option = f"   :inherited-members: {bases}\n" if bases else ""
    return f"# `{module}`\n\n```{{eval-rst}}\n.. automodule:: {module}\n{option}```\n"


def write_pages(app: Sphinx) -> None:
    """Write docs/api/, leaving alone what has not changed, so that a second build is quick.

    Args:
        app: the build.
    """
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    pages = {"index.md": _overview(), **{f"{module}.md": _page(module) for module in modules()}}
    for old in folder.iterdir():
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by sphinx."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
