"""`megaopt explain`: what every parameter of a model would get, and why; nothing is built."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _SubParsersAction
from typing import Any

import attrs

from megaopt_core.cli.assignments import add_set_option, parse_assignments
from megaopt_core.cli.factories import build_model
from megaopt_core.cli.output import print_json, print_table
from megaopt_core.config import OptimizerConfig
from megaopt_core.params.routing import ParamRoute, Routing, route
from megaopt_core.registry import get_registry
from megaopt_core.run_file import RunFile

__all__ = ["add_command", "run"]


def add_command(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add `megaopt explain`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "show what each parameter of a model would get, and why"
    parser = commands.add_parser(
        "explain", help=about, description=f"{about.capitalize()}; nothing is trained."
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="function or class that makes the model")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings and [[overrides]]")
    parser.add_argument("--optimizer", metavar="NAME", help="the optimizer; it wins over the file's")
    add_set_option(parser)
    parser.add_argument("--device", default="meta", help="where to make the model (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Print the routing of a model.

    Args:
        args: `factory`, `config`, `optimizer`, `assignments`, `device`, `json`.

    Returns:
        0.
    """
    given = _run_file(args)
    routing = route(given.config, build_model(args.factory, args.device), given.config_overrides())
    rows = [_row(entry, routing) for entry in routing.params.values()]
    if args.json:
        print_json({"config": given.config.to_dict(), "parameters": rows, "frozen": list(routing.frozen)})
        return 0
    _print_rows(rows)
    print()
    _print_summary(rows, routing)
    return 0


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
        "shape": list(entry.spec.local_shape),
        "elements": entry.spec.numel,
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


def _print_rows(rows: list[dict[str, Any]]) -> None:
    header = ["parameter", "shape", "role", "optimizer", "plugin", "group", "lr", "wd", "why"]
    shown = [
        [
            row["name"],
            "x".join(map(str, row["shape"])) or "scalar",
            row["role"] + ("?" if row["uncertain"] else ""),
            row["optimizer"],
            row["plugin"].partition(" ")[0],
            row["group"],
            "-" if row["lr"] is None else f"{row['lr']:.6g}",
            f"{row['weight_decay']:.6g}",
            row["reason"],
        ]
        for row in rows
    ]
    print_table(header, shown, right=["group", "lr", "wd"])


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
        print("\nA role with ? is a guess; a `matrix_view` attribute or an override settles it.")
