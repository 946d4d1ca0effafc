"""`megaopt explain`: what every parameter of a model would get, and why; nothing is built."""

from __future__ import annotations

import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from megaopt_core.cli._arguments import parse_assignments
from megaopt_core.cli._commands.explain_text import rows_text, summary_text
from megaopt_core.cli._factories import build_model, make_example
from megaopt_core.cli._output import print_beside, print_json, terminal_width
from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.config._run_file import RunFile
from megaopt_core.errors import ConfigurationError, PluginNotInstalledError
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.registry._catalogue import EXPLAIN_PAGE
from megaopt_core.registry._constructor import constructor_parameters
from megaopt_core.registry._missing import absent_plugin
from megaopt_core.registry._registry import get_registry
from megaopt_core.reporting._unused_settings import unused_settings
from megaopt_core.reporting._use import Use
from megaopt_core.routing._route import route
from megaopt_core.routing._routing import ParamRoute, Routing

__all__ = ["run"]

type WritePage = Callable[[str, Mapping[str, Any]], None]


def run(args: Namespace) -> int:
    """Print the routing of a model.

    Args:
        args: `factory`, `config`, `optimizer`, `lr`, `assignments`, `device`, `example`, `json`, `html`, `all`.

    Returns:
        0.
    """
    write_page = _page_writer(args)
    given = _run_file(args)
    with print_beside():  # what a model's own code prints is no part of the answer
        chunks = build_model(args.factory, args.device)
        example = None if args.example is None else make_example(args.example, args.device)
        routing = route(given.config, chunks, given.config_overrides(), example=example)
    rows = [_row(entry, routing) for entry in routing.params.values()]
    _require_min_lr(rows, given.config)
    _warn_of_unused(given.config, routing, chunks)
    explained = {"config": given.config.to_dict(), "parameters": rows, "frozen": list(routing.frozen)}
    if write_page is not None:
        write_page(args.html, {"model": args.factory, **explained})
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        print_json(explained)
        return 0
    summary = summary_text(rows, routing, terminal_width())
    table = "" if args.html else rows_text(rows, terminal_width(), everything=args.all)
    print(f"{summary}\n\n{table}" if table else summary)
    return 0


def _page_writer(args: Namespace) -> WritePage | None:
    """Return what writes the page of `--html`, None where none is asked for.

    A plugin that can write it sets the default `write_page` on this command's parser.
    """
    write_page: WritePage | None = getattr(args, "write_page", None)
    if args.html and write_page is None:
        absent = absent_plugin("option --html", "html", EXPLAIN_PAGE, get_registry().plugins())
        raise absent or PluginNotInstalledError(
            f"option --html: {EXPLAIN_PAGE} is of another version: pip install --upgrade {EXPLAIN_PAGE}",
            name="html",
            distribution=EXPLAIN_PAGE,
        )
    return write_page if args.html else None


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
                f"must not be above lr={row['lr']!r}, which {row['optimizer']} takes where none is given",
            )


def _warn_of_unused(config: OptimizerConfig, routing: Routing, chunks: Sequence[torch.nn.Module]) -> None:
    """Print the settings that would change nothing, as a build warns of them."""
    unused = unused_settings(
        Use(
            config,
            [param for chunk in chunks for param in chunk.parameters() if param.requires_grad],
            routing,
            chunks,
            ProcessGroupCollection(),
            scales_dynamically=config.fp16 and config.loss_scale is None,
        )
    )
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
    parameter = constructor_parameters(get_registry().optimizer(optimizer).load_class()).get("lr")
    default = inspect.Parameter.empty if parameter is None else parameter.default
    return float(default) if isinstance(default, int | float) else None
