"""`megaopt explain`: what every parameter of a model would get, and why; nothing is built."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from megaopt_core.cli._assignments import parse_assignments
from megaopt_core.cli._factories import build_model
from megaopt_core.cli._output import print_json, print_table
from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.config._run_file import RunFile
from megaopt_core.errors import PluginNotInstalledError
from megaopt_core.registry._catalogue import EXPLAIN_PAGE
from megaopt_core.registry._missing import absent_plugin
from megaopt_core.registry._registry import get_registry
from megaopt_core.routing._routing import ParamRoute, Routing, route

__all__ = ["MANY", "run"]

type WritePage = Callable[[str, Mapping[str, Any]], None]

MANY = 60
"""With more parameters than this, those that are alike share a row."""


def run(args: Namespace) -> int:
    """Print the routing of a model.

    Args:
        args: `factory`, `config`, `optimizer`, `assignments`, `device`, `json`, `html`, `all`.

    Returns:
        0.
    """
    write_page = _page_writer(args)
    given = _run_file(args)
    routing = route(given.config, build_model(args.factory, args.device), given.config_overrides())
    rows = [_row(entry, routing) for entry in routing.params.values()]
    explained = {"config": given.config.to_dict(), "parameters": rows, "frozen": list(routing.frozen)}
    if write_page is not None:
        write_page(args.html, {"model": args.factory, **explained})
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        print_json(explained)
        return 0
    if args.html:
        _print_summary(rows, routing)
        return 0
    _print_rows(rows, everything=args.all)
    print()
    _print_summary(rows, routing)
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
    if args.optimizer is not None:
        changes["optimizer"] = args.optimizer
    return attrs.evolve(run, config=run.config.replace(**changes))


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
        "plugin": _plugin_of(entry.spec.optimizer),
        "strategy": entry.strategy,
        "group": entry.spec.group,
        "lr": group.get("lr"),
        "weight_decay": group["weight_decay"],
        "reason": entry.reason,
        "overrides": list(entry.matched),
    }


def _plugin_of(optimizer: str) -> str:
    return get_registry().owner("optimizer", optimizer).source


def _print_rows(rows: list[dict[str, Any]], *, everything: bool) -> None:
    header = [
        "parameter",
        "count",
        "shape",
        "role",
        "matrix view",
        "optimizer",
        "plugin",
        "group",
        "lr",
        "wd",
        "why",
    ]
    groups = _alike(rows) if len(rows) > MANY and not everything else [(row["name"], [row]) for row in rows]
    if all(len(members) == 1 for _, members in groups):
        header.remove("count")
    shown = []
    for name, members in groups:
        row = members[0]
        cells = {
            "parameter": name,
            "count": len(members),
            "shape": "x".join(map(str, row["shape"])) or "scalar",
            "role": row["role"] + ("?" if row["uncertain"] else ""),
            "matrix view": _short_view(row["view"]),
            "optimizer": row["optimizer"],
            "plugin": row["plugin"].partition(" ")[0],
            "group": row["group"],
            "lr": "-" if row["lr"] is None else f"{row['lr']:.6g}",
            "wd": f"{row['weight_decay']:.6g}",
            "why": row["reason"],
        }
        shown.append([cells[column] for column in header])
    print_table(header, shown, right=["count", "group", "lr", "wd"])
    if len(groups) < len(rows):
        print(
            f"\n{len(rows)} parameters in {len(groups)} rows: * stands for a number; --all shows each by itself"
        )


def _short_view(view: str | None) -> str:
    return "-" if view is None else view.removeprefix("MatrixView(").removesuffix(")")


def _alike(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return rows that differ in nothing but the numbers in their names, together under one pattern."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{row['name']}")[1:]
        facts = tuple(str(value) for key, value in row.items() if key != "name")
        groups.setdefault((pattern, facts), []).append(row)
    return [(members[0]["name"] if len(members) == 1 else key[0], members) for key, members in groups.items()]


def _print_summary(rows: list[dict[str, Any]], routing: Routing) -> None:
    shown = []
    for child in routing.children:
        mine = [row for row in rows if row["group"] in child.groups]
        what = child.optimizer + (" (experts)" if child.is_expert else "")
        settings = ", ".join(f"{key}={value!r}" for key, value in child.settings.items()) or "-"
        plugin = _plugin_of(child.optimizer)
        shown.append(
            [what, plugin, child.strategy, len(mine), f"{sum(row['elements'] for row in mine):,}", settings]
        )
    header = ["optimizer", "plugin", "sharding", "parameters", "elements", "settings of its own"]
    print_table(header, shown, right=["parameters", "elements"])
    if routing.frozen:
        print(f"\n{len(routing.frozen)} parameters do not train: {', '.join(routing.frozen)}")
    if any(row["uncertain"] for row in rows):
        print(
            "\nA role with ? is doubtful: a matrix optimizer leaves the parameter to its fallback. The attribute that "
            "its row names settles it; so does an example batch."
        )
