"""`megaopt verify-checkpoint`: is every byte what was written, and what is inside."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from shutil import get_terminal_size
from typing import Any

from megaopt_core.plugin_api import Commands
from megaopt_core.registry import get_registry
from megaopt_core.reporting import format_table

__all__ = ["add_command", "run"]


def add_command(commands: Commands) -> None:
    """Add `megaopt verify-checkpoint`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "check every byte of a checkpoint, and show its contents"
    parser = commands.add_parser(
        "verify-checkpoint",
        help=about,
        description=f"{about.capitalize()}.",
        epilog="examples:\n  megaopt verify-checkpoint runs/checkpoint --tensors",
    )
    parser.add_argument("path", help="the checkpoint's folder")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify a checkpoint and print what it holds.

    Args:
        args: `path`, `tensors`, `json`.
    """
    from megaopt_checkpoint import verify_checkpoint

    manifest = verify_checkpoint(args.path)
    optimizers = Counter(record["optimizer"] for record in manifest.parameters.values())
    summary: dict[str, Any] = {
        "format version": manifest.version,
        "checksums": manifest.checksums,
        "written": ", ".join(f"{what} {value}" for what, value in manifest.written.items()),
        "world size": manifest.world_size,
        "bytes": manifest.nbytes,
        "model tensors": len(manifest.model.get("tensors", {})),
        "optimizers": {
            name: f"{count} parameters{_plugin(name, manifest.plugins)}" for name, count in optimizers.items()
        },
        "scheduler": manifest.scheduler is not None,
        "extra": sorted(manifest.extra) if isinstance(manifest.extra, dict) else manifest.extra is not None,
        "files": manifest.files,
    }
    tensors = [
        [_printable(key), tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar", len(tensor.chunks)]
        for key, tensor in manifest.tensors.items()
    ]
    if args.json:
        listed = {
            "tensors": [dict(zip(("name", "dtype", "shape", "boxes"), row, strict=True)) for row in tensors]
        }
        told = {"path": args.path, "ok": True, **summary, **(listed if args.tensors else {})}
        print(json.dumps(told, indent=2, default=str))
        return 0
    print(f"{args.path} is complete: every checksum is right\n")
    _print_table(["what", "value"], [[name, _printable(_words(value))] for name, value in summary.items()])
    if args.tensors:
        print()
        _print_table(["tensor", "dtype", "shape", "boxes"], tensors)
    return 0


def _print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table that is as wide as the terminal at most; in a file or pipe its lines have no limit."""
    width = get_terminal_size((10_000, 24)).columns
    print(format_table(header, rows, width=width, right=["boxes"]))


def _plugin(optimizer: str, plugins: dict[str, str]) -> str:
    distribution = plugins.get(optimizer)
    if not distribution:
        return ""
    installed = any(info.goes_by(distribution) for info in get_registry().plugins())
    return f", {distribution}" + ("" if installed else f" (not installed here: pip install {distribution})")


def _printable(text: str) -> str:
    """Return text of a stranger as a terminal may have it: what would steer it is written out."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{name}: {what}" for name, what in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
