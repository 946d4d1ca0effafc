"""Which entry points are installed, in one order, read distribution by distribution where one cannot be read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points, version

from megaopt_core.errors import BrokenPluginWarning
from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import CORE_MODULE, told_by

__all__ = ["GROUP", "in_one_order"]

GROUP = "megaopt"
"""The entry-point group in which plugins are found."""

CORE_PLUGIN = EntryPoint(name="core", value=CORE_MODULE, group=GROUP)
"""The core's own plugin, which is there even where the core runs without being installed."""


def in_one_order(given: Iterable[EntryPoint] | None) -> list[EntryPoint]:
    """Return entry points, the core's own first, the others by name, so that every rank has one order.

    Args:
        given: the entry points; None: those of group `megaopt` that are installed.
    """
    points = _once(_installed() if given is None else given)
    core = [point for point in points if point.value == CORE_MODULE]
    others = [point for point in points if point.value != CORE_MODULE]
    others.sort(key=lambda point: (point.name, told_by(point)[0] or "", point.value))
    return [*(core[:1] or [CORE_PLUGIN]), *others]


def _installed() -> list[EntryPoint]:
    """Return those of the group that can be read; Python by itself reads all distributions or none."""
    try:
        return list(entry_points(group=GROUP))
    except Exception:  # noqa: BLE001 - the files of strangers; which error depends on the version of Python
        return [point for each in distributions() for point in _points_of(each) if point.group == GROUP]


def _points_of(distribution: Distribution) -> list[EntryPoint]:
    try:
        return list(distribution.entry_points)
    except Exception as error:  # noqa: BLE001 - as above
        if f"[{GROUP}" in (distribution.read_text("entry_points.txt") or ""):
            warnings.warn(
                f"{distribution.name}: its entry_points.txt cannot be read, and its plugins are left out: "
                f"{words_of(error)}",
                BrokenPluginWarning,
                stacklevel=7,
            )
        return []


def _once(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    """Return each entry point of a distribution once: an interrupted installer leaves a second folder of metadata."""
    found: dict[tuple[str, str, str | None], EntryPoint] = {}
    for point in points:
        name, its_version = told_by(point)
        key = (point.name, point.value, name)
        if key not in found or (name and its_version == version(name)):
            found[key] = point
    owned = {key[:2] for key in found if key[2]}
    return [point for (*what, name), point in found.items() if name or tuple(what) not in owned]
