"""`megaopt check-plugin`: the conformance kit against an installed plugin."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING

from megaopt_core.config import parse_assignments
from megaopt_core.errors import ConfigurationError, PluginError
from megaopt_core.plugin_api import Commands
from megaopt_core.registry import PluginInfo, PluginStatus, get_registry

if TYPE_CHECKING:
    from megaopt_testing.check import CheckResult, Kind

__all__ = ["add_command", "add_options", "run"]

_INDENT = " " * 10

type Subject = tuple[Kind, str]


def add_command(commands: Commands) -> None:
    """Add `megaopt check-plugin`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "run the conformance kit on everything that a plugin offers"
    parser = commands.add_parser(
        "check-plugin",
        help=about,
        description=f"{about.capitalize()}.",
        epilog="examples:\n  megaopt check-plugin my_plugin\n"
        "  megaopt check-plugin my_optimizer --set my_optimizer_beta=0.5",
    )
    add_options(parser)


def add_options(parser: ArgumentParser) -> None:
    """Add what the command takes.

    Args:
        parser: its parser.
    """
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a plugin, to check all that it offers; or one optimizer, strategy or schedule",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="NAME=VALUE",
        help="set a field of the configuration; may be repeated",
    )
    parser.add_argument(
        "--xfail",
        action="append",
        default=[],
        metavar="CHECK=REASON",
        help="a check that is known to fail; may be repeated; the run fails if the check passes",
    )
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="fail if fewer checks run")
    parser.add_argument("--badge", type=Path, metavar="FILE", help="write a picture (SVG) of the result")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run every check, and print what came of it.

    Args:
        args: `name`, `assignments`, `xfail`, `at_least`, `badge`, `json`.

    Returns:
        0 if no check failed and enough were made, else 1.
    """
    from megaopt_testing.document import badge, document  # other commands need no conformance kit
    from megaopt_testing.mistakes.diagnosis import require_sound
    from megaopt_testing.tally import Tally

    registry = get_registry()
    registry.load()
    for broken in registry.plugins():
        if broken.status is PluginStatus.BROKEN and broken.goes_by(args.name):
            require_sound(broken)
    subjects, info = _subjects(args.name)
    if info is not None:
        require_sound(info)
    _require_settings(subjects, args.assignments)
    found = list(_checked(subjects, args))
    tally = Tally.of(result for _, results in found for result in results)
    told = document(found, info)
    if args.badge is not None:
        args.badge.write_text(badge(told), encoding="utf-8")
    if args.json:
        print(json.dumps(told, indent=2, default=str))
    else:
        print(tally)
    too_few = tally.ran < args.at_least
    if too_few and not args.json:
        print(f"at least {args.at_least} are declared: more checks are skipped now, or the kit is older")
    return 1 if tally.failed or too_few else 0


def _is_configured(kind: Kind) -> bool:
    return kind.value == "optimizer"


def _require_settings(subjects: Iterable[Subject], assignments: Iterable[str]) -> None:
    """Raise for what `--set` gives in vain, before a check is made."""
    from megaopt_testing import suite

    settings = parse_assignments(assignments)
    configured = [(kind, name) for kind, name in subjects if _is_configured(kind)]
    for kind, name in configured:
        suite.require_settings(kind, name, settings)
    for setting, value in settings.items() if not configured else ():
        raise ConfigurationError(
            f"--set {setting}: only the checks of optimizers take settings", setting=setting, value=value
        )


def _checked(subjects: Iterable[Subject], args: Namespace) -> Iterator[tuple[Subject, list[CheckResult]]]:
    from megaopt_testing import suite

    settings, expected = parse_assignments(args.assignments), _reasons(args.xfail)
    met: set[str] = set()
    for kind, name in subjects:
        checks = suite.CHECKS_OF[kind]
        mine = {check.id: expected[check.id] for check in checks if check.id in expected}
        met.update(mine)
        if not args.json:
            print(f"{name} ({_source(kind, name)})")
        results = []
        mine_to_set = settings if _is_configured(kind) else {}
        for check in suite.bound_checks(name, mine_to_set, xfail=mine, kind=kind):
            results.append(check.run())
            if not args.json:
                _print_result(results[-1])
        if not args.json:
            print()
        yield (kind, name), results
    for unknown in sorted(set(expected) - met):
        raise ConfigurationError(
            f"--xfail {unknown}: no check of this name was made", setting=unknown, value=""
        )


def _reasons(given: Iterable[str]) -> dict[str, str]:
    reasons = {}
    for text in given:
        check, equals, reason = text.partition("=")
        if not (check and equals and reason.strip()):
            raise ConfigurationError(f"--xfail {text}: write it as CHECK=REASON", setting=check, value=text)
        reasons[check] = reason.strip()
    return reasons


def _subjects(name: str) -> tuple[list[Subject], PluginInfo | None]:
    """Return all that the plugin of this name offers, else the one thing of this name."""
    from megaopt_testing.check import Kind

    registry = get_registry()
    registry.require_one_owner("plugin", name)
    for plugin in registry.loaded_plugins():
        if plugin.info.goes_by(name):
            offered = [
                *((Kind.OPTIMIZER, each) for each in plugin.offers["optimizer"]),
                *((Kind.STRATEGY, each) for each in plugin.offers["strategy"]),
                *((Kind.SCHEDULE, each) for each in plugin.offers["schedule"]),
            ]
            if plugin.has("megaopt_annotate_params"):
                offered.append((Kind.ROLES, plugin.info.name))
            if plugin.has("megaopt_step_observers"):
                offered.append((Kind.OBSERVERS, plugin.info.name))
            if not offered:
                raise PluginError(
                    f"{plugin.info} offers no optimizer, strategy, schedule, reader of models or step observer: "
                    "there is nothing to check"
                )
            return offered, plugin.info
    if name in registry.strategies():
        return [(Kind.STRATEGY, name)], registry.owner("strategy", name)
    if name in registry.schedules():
        return [(Kind.SCHEDULE, name)], registry.owner("schedule", name)
    registry.optimizer(name)
    return [(Kind.OPTIMIZER, name)], registry.owner("optimizer", name)


def _source(kind: Kind, name: str) -> str:
    registry = get_registry()
    if kind.value in ("roles", "observers"):
        return next(plugin.info.source for plugin in registry.loaded_plugins() if plugin.info.goes_by(name))
    return registry.owner(kind.value, name).source  # type: ignore[arg-type] # the other three


def _indented(text: str, width: int) -> str:
    return fill(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False)


def _print_result(result: CheckResult) -> None:
    width = get_terminal_size().columns
    head = f"  {result.status.value:<8}{result.id:<26}{result.seconds:>6.1f} s"
    if len(head) + 2 + len(result.summary) <= width:
        print(f"{head}  {result.summary}", flush=True)
    else:
        print(f"{head}\n{_indented(result.summary, width)}", flush=True)
    if result.message:
        print(_indented(result.message, width))
    if result.hint:
        print(_indented(f"hint: {result.hint}", width))
    if result.traceback:
        print("".join(f"          {line}\n" for line in result.traceback.rstrip().splitlines()), end="")
