"""`megaopt explain`: what every parameter of a model would get, and why; nothing is built."""

from __future__ import annotations

import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from megaopt_core import OptimizerConfig, Routing, route
from megaopt_core.config import parse_assignments
from megaopt_core.errors import ConfigurationError
from megaopt_core.registry import get_registry
from megaopt_core.reporting import settings_without_effect
from megaopt_core.routing import ParamRoute
from megaopt_tools.cli.output import print_beside, print_json, terminal_width
from megaopt_tools.inspection.explain_page import write_page
from megaopt_tools.inspection.explain_text import rows_text, summary_text
from megaopt_tools.inspection.factories import build_model, make_example
from megaopt_tools.run_file import RunFile

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Print the routing of a model.

    Args:
        args: `factory`, `config`, `optimizer`, `lr`, `assignments`, `device`, `example`, `json`, `html`, `all`.

    Returns:
        0.
    """
    given = _run_file(args)
    with print_beside():  # what a model's own code prints is no part of the answer
        chunks = build_model(args.factory, args.device)
        example = None if args.example is None else make_example(args.example, args.device)
        routing = route(given.config, chunks, given.config_overrides(), example=example)
    rows = [_row(entry, routing) for entry in routing.params.values()]
    _require_min_lr(rows, given.config)
    _warn_of_unused(given.config, routing, chunks)
    explained = {"config": given.config.to_dict(), "parameters": rows, "frozen": list(routing.frozen)}
    if args.html:
        write_page(args.html, {"model": args.factory, **explained})
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        print_json(explained)
        return 0
    summary = summary_text(rows, routing, terminal_width())
    table = "" if args.html else rows_text(rows, terminal_width(), everything=args.all)
    print(f"{summary}\n\n{table}" if table else summary)
    return 0


def _run_file(args: Namespace) -> RunFile:
    run = RunFile(OptimizerConfig()) if args.config is None else RunFile.load(args.config)
    changes = parse_assignments(args.assignments)
    for name, what in (("optimizer", "the optimizer"), ("lr", "the learning rate")):
        chosen = getattr(args, name)
        if chosen is None:
            continue
        if changes.setdefault(name, chosen) != chosen:
            raise ConfigurationError(
                f"--set {name}={changes[name]}: {what} is already {chosen}", setting=name, value=changes[name]
            )
    return attrs.evolve(run, config=run.config.replace(**changes))


def _require_min_lr(rows: Sequence[Mapping[str, Any]], config: OptimizerConfig) -> None:
    """Raise if the learning rate would end above where it begins: at the optimizer's own, where none is given."""
    for row in rows:
        if config.min_lr is not None and row["lr_is_default"] and config.min_lr > (row["lr"] or math.inf):
            raise ConfigurationError.of(
                "min_lr",
                config.min_lr,
                f"must not be above lr={row['lr']!r}, the default of {row['optimizer']}",
            )


def _warn_of_unused(config: OptimizerConfig, routing: Routing, chunks: Sequence[torch.nn.Module]) -> None:
    """Print the settings that would change nothing, as a build warns of them."""
    unused = settings_without_effect(config, routing, chunks)
    if unused:
        print(f"megaopt: warning: settings that change nothing here: {'; '.join(unused)}", file=sys.stderr)


def _row(entry: ParamRoute, routing: Routing) -> dict[str, Any]:
    group = routing.groups[entry.spec.group].values
    return {
        "name": entry.name,
        "shape": list(entry.local_shape),
        "elements": entry.shard.numel,
        "role": entry.decision.role.value,
        "uncertain": entry.decision.uncertain,
        "view": None if entry.decision.view is None else str(entry.decision.view),
        "optimizer": entry.spec.optimizer,
        "plugin": get_registry().owner("optimizer", entry.spec.optimizer).source,
        "strategy": entry.strategy,
        "group": entry.spec.group,
        "lr": _default_lr(entry.spec.optimizer) if group.get("lr") is None else group["lr"],
        "lr_is_default": group.get("lr") is None,
        "weight_decay": group["weight_decay"],
        "reason": entry.reason,
        "overrides": list(entry.matched),
    }


def _default_lr(optimizer: str) -> float | None:
    """Return the learning rate that an optimizer's class takes where none is given; None where it needs one."""
    parameter = inspect.signature(get_registry().optimizer(optimizer).load_class()).parameters.get("lr")
    default = inspect.Parameter.empty if parameter is None else parameter.default
    return float(default) if isinstance(default, int | float) else None
