"""What is said when a plugin, or what it should provide, is not there."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Literal

from megaopt_core.errors import BrokenPluginError, PluginError, PluginNotInstalledError, UnknownNameError
from megaopt_core.registry import _catalogue as catalogue
from megaopt_core.registry._infos import PluginInfo, PluginStatus
from megaopt_core.registry._install_line import install_line

__all__ = [
    "WORDS",
    "Kind",
    "absent_plugin",
    "did_you_mean",
    "import_distribution",
    "may_provide",
    "missing",
]

_SHORT = 2
"""Names no longer than this begin too many others."""

type Kind = Literal["optimizer", "strategy", "schedule", "precision"]

WORDS: Mapping[str, str] = {
    "optimizer": "optimizer",
    "strategy": "sharding strategy",
    "schedule": "schedule",
    "precision": "precision policy",
    "plugin": "plugin name",
}


def missing(kind: Kind, name: str, known: Sequence[str], plugins: Sequence[PluginInfo]) -> PluginError:
    """Return the error for a name that no loaded plugin offers.

    Args:
        kind: what was asked for.
        name: its name.
        known: the names that there are.
        plugins: every installed plugin.
    """
    what = f"{WORDS[kind]} {name!r}"
    distribution = catalogue.distribution_of(kind, name)
    if distribution is not None:
        absent = absent_plugin(what, name, distribution, plugins)
        if absent is not None:
            return absent
        version = next(info.version for info in plugins if info.goes_by(distribution))
        return UnknownNameError(
            f"{what} should come with {distribution}, but version {version} does not offer it: "
            f"pip install --upgrade {distribution}",
            name=name,
            known=known,
        )
    for info in plugins:
        if info.goes_by(name) and (left_out := _left_out(what, name, info)):
            return left_out
    guess = (_torch_guess(name, known) if kind == "optimizer" else "") or _guess(kind, name, known)
    listed = ", ".join(sorted(known)) or "none"
    text = f"unknown {what}{guess or '.'} Known are: {listed}{may_provide(plugins)}"
    broken = [info for info in plugins if info.status is PluginStatus.BROKEN]
    if broken and not guess:
        return BrokenPluginError(text, plugin=broken[0].name)
    return UnknownNameError(text, name=name, known=known)


def absent_plugin(
    what: str, name: str, distribution: str, plugins: Iterable[PluginInfo]
) -> PluginError | None:
    """Return the error for something whose distribution is known, None if that distribution's plugin is loaded.

    Args:
        what: what was asked for, in words.
        name: its name.
        distribution: what brings it.
        plugins: every installed plugin.
    """
    for info in plugins:
        if info.distribution and info.goes_by(distribution):
            return _left_out(what, name, info)
    return _not_installed(what, name, distribution)


def import_distribution(distribution: str, what: str) -> ModuleType:
    """Return the package of a distribution of ours.

    Args:
        distribution: such as `"megaopt-tools"`.
        what: who needs it, in words.

    Raises:
        PluginNotInstalledError: it is not installed.
    """
    package = distribution.replace("-", "_")
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise _not_installed(what, what, distribution) from error


def _not_installed(what: str, name: str, distribution: str) -> PluginNotInstalledError:
    return PluginNotInstalledError(
        f"{what} comes with {distribution}, which is not installed: {install_line(distribution)}",
        name=name,
        distribution=distribution,
    )


def _left_out(what: str, name: str, info: PluginInfo) -> PluginError | None:
    """Return the error for what an installed plugin would offer; None if the plugin is not left out."""
    if info.status is PluginStatus.BLOCKED:
        return PluginNotInstalledError(
            f"{what} comes with {info}, which is installed, but {info.error}",
            name=name,
            distribution=info.distribution,
        )
    if info.status is PluginStatus.BROKEN:
        return BrokenPluginError(
            f"{what} comes with {info}, which failed to load: {info.error} (`megaopt plugins --load` shows where)",
            plugin=info.name,
        )
    return None


def _guess(kind: Kind, name: str, known: Sequence[str]) -> str:
    """Return which name was meant, here or in a plugin that is not here, as the end of a sentence."""
    close = _close(name, [*known, *catalogue.OFFERED[kind]])
    brings = sorted({catalogue.OFFERED[kind][one] for one in close if one not in known})
    return _meant(close, f" (pip install {' '.join(brings)})" if brings else "")


def _torch_guess(name: str, known: Sequence[str]) -> str:
    """Return the name by which torch's class of this name can be had; empty where there is none, or a known name."""
    import torch.optim

    classes = {plain_name(own): own for own, value in vars(torch.optim).items() if isinstance(value, type)}
    asked = plain_name(name)
    if asked not in classes or asked in map(plain_name, [*known, *catalogue.OFFERED["optimizer"]]):
        return ""
    return f"; torch's class goes by 'torch:{classes[asked]}' ({catalogue.RESOLVER})."


def may_provide(plugins: Iterable[PluginInfo]) -> str:
    """Return a sentence about the plugins that are installed but left out; empty when there are none.

    Args:
        plugins: every installed plugin.
    """
    broken = [
        f"{info} failed to load ({info.error})" for info in plugins if info.status is PluginStatus.BROKEN
    ]
    return f". It may belong to a plugin that does not work: {'; '.join(broken)}" if broken else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'a' or 'b'?"`, empty when nothing is close.

    Args:
        name: what was given.
        known: what there is.

    Example:
        >>> did_you_mean("cosin", ["cosine", "linear"])
        "; did you mean 'cosine'?"
        >>> did_you_mean("torch.optim.AdamW", ["adam", "adamw"])
        "; did you mean 'adamw'?"
    """
    return _meant(_close(name, known))


def _close(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are near to one, the nearest first."""
    plain: dict[str, str] = {}
    for one in known:
        plain.setdefault(plain_name(one), one)
    asked = plain_name(name)
    close = [asked] if asked in plain else get_close_matches(asked, plain, n=3, cutoff=0.7)
    # `adamw_torch_fused` and the like: a name that is there, and more.
    close = close or [one for one in plain if len(one) > _SHORT and asked.startswith(one)][-1:]
    return [plain[one] for one in close]


def _meant(close: Sequence[str], advice: str = "") -> str:
    return f"; did you mean {' or '.join(map(repr, close))}{advice}?" if close else ""


def plain_name(name: str) -> str:
    """Return a name without what people write differently: case, lines between words, the module before a class.

    Args:
        name: what was given, or what there is.

    Example:
        >>> plain_name("Adam_W")
        'adamw'
    """
    return re.sub(r"[\W_]", "", name.lower().removeprefix("torch.optim."))
