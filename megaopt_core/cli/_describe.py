"""`megaopt describe`: every setting with type, default and meaning."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from megaopt_core.cli._optimizers import settings_of_optimizer
from megaopt_core.cli._output import print_json, print_table
from megaopt_core.config._dtypes import dtype_name
from megaopt_core.config._fields import core_field_info
from megaopt_core.registry._registry import get_registry

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Print the settings of one optimizer, or of the core.

    Args:
        args: `name`, `json`.

    Returns:
        0.
    """
    about = _core() if args.name is None else _optimizer(args.name)
    if args.json:
        print_json(about)
        return 0
    print(f"{about['name']}: {about['description']}\n")
    facts = [(what, about[what]) for what in ("plugin", "class", "granularity", "fp16") if what in about]
    for what, value in facts:
        print(f"  {what + ':':<13}{value}")
    if facts:
        print()
    rows = [[row["name"], row["type"], _shown(row["default"]), row["help"]] for row in about["settings"]]
    if rows:
        print_table(["setting", "type", "default", "what it does"], rows)
    else:
        print("It has no settings of its own.")
    if about.get("example"):
        print(f"\nExample:\n\n  {about['example']}")
    return 0


def _core() -> dict[str, Any]:
    rows = [
        {"name": info.name, "type": info.type, "default": info.default, "help": info.help}
        for info in core_field_info()
    ]
    return {
        "name": "OptimizerConfig",
        "description": "what every run can set, whichever plugins are installed",
        "settings": rows,
        "example": "OptimizerConfig(lr=3e-4, weight_decay=0.1, bf16=True)",
    }


def _optimizer(name: str) -> dict[str, Any]:
    registry = get_registry()
    entry = registry.optimizer(name)
    owners = registry.setting_owners()
    cls = entry.optimizer_cls
    return {
        "name": name,
        "description": entry.description or "its plugin does not describe it",
        "plugin": registry.owner("optimizer", name).source,
        "class": cls if isinstance(cls, str) else f"{cls.__module__}:{cls.__qualname__}",
        "granularity": entry.granularity.value,
        "fp16": "supported" if entry.supports_fp16 else "not supported",
        "settings": [
            {
                "name": full,
                "type": owners[full].type,
                "default": owners[full].default,
                "help": owners[full].help,
            }
            for full in settings_of_optimizer(name)
        ],
        "example": entry.example or f'build_optimizer(model, "{name}", lr=1e-3)',
    }


def _shown(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return repr(value)
