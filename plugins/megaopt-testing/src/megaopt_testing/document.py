"""The results of a run for programs, and the badge that is made of them."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import attrs

from megaopt_core.registry import PluginInfo
from megaopt_testing.check import CheckResult, Kind
from megaopt_testing.tally import Tally

__all__ = ["badge", "document"]

_COLOURS = {"good": "#2c974b", "bad": "#c9302c"}
_VERSIONS = ("megaopt-testing", "megaopt-core", "torch")

type Subject = tuple[Kind, str]


def document(found: Iterable[tuple[Subject, list[CheckResult]]], info: PluginInfo | None) -> dict[str, Any]:
    """Return everything that a run of the kit found, for `json.dumps`.

    Args:
        found: what was checked, with its results.
        info: the plugin; None where there is none.
    """
    found = list(found)
    return {
        "schema": 1,
        "plugin": None if info is None else _plugin(info),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _VERSIONS}},
        **attrs.asdict(Tally.of(result for _, results in found for result in results)),
        "subjects": [
            {
                "kind": kind.value,
                "name": name,
                **attrs.asdict(Tally.of(results)),
                "results": [attrs.asdict(result) for result in results],
            }
            for (kind, name), results in found
        ],
    }


def _plugin(info: PluginInfo) -> dict[str, str | None]:
    return {"name": info.name, "distribution": info.distribution, "version": info.version}


_BADGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{label}: {message}">
  <title>{label}: {message}</title>
  <rect width="{left}" height="20" rx="3" fill="#555"/>
  <rect x="{left}" width="{right}" height="20" rx="3" fill="{colour}"/>
  <g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
    <text x="{middle_left}" y="14">{label}</text>
    <text x="{middle_right}" y="14">{message}</text>
  </g>
</svg>
"""


def badge(results: Mapping[str, Any]) -> str:
    """Return a picture (SVG) that says how many checks held.

    Args:
        results: what :func:`document` returned, or what `python -m megaopt_testing NAME --json` printed.

    Example:
        >>> "27 of 27 checks" in badge({"ran": 27, "failed": 0, "xfailed": 0})
        True
    """
    held = results["ran"] - results["failed"] - results["xfailed"]
    label, message = "megaopt kit", f"{held} of {results['ran']} checks"
    left, right = 7 * len(label) + 10, 7 * len(message) + 10
    return _BADGE.format(
        label=label,
        message=message,
        colour=_COLOURS["bad" if results["failed"] or not results["ran"] else "good"],
        left=left,
        right=right,
        width=left + right,
        middle_left=left / 2,
        middle_right=left + right / 2,
    )
