"""Every exception that megaopt raises on purpose.

An error says who raised it, what was given and what is allowed, and carries the offending object as an
attribute, so that a program can react to it without parsing the message. Classes that replace a standard
exception inherit from it too (`ValueError`, `LookupError`...): code that catches those keeps working.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

__all__ = [
    "BrokenPluginError",
    "BrokenPluginWarning",
    "CheckpointBusyError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointVersionError",
    "CheckpointWarning",
    "ConfigFileError",
    "ConfigurationError",
    "ConformanceError",
    "DoubtfulRolesWarning",
    "DuplicateNameError",
    "GradientError",
    "MegaoptError",
    "MissingRanksError",
    "MovedNameError",
    "OverrideConflictError",
    "OverrideError",
    "OwnershipError",
    "ParallelGroupError",
    "PluginError",
    "PluginHookError",
    "PluginNotInstalledError",
    "RankMismatchError",
    "RoutingChangedError",
    "RoutingError",
    "ScheduleError",
    "ShardingError",
    "StateDictError",
    "UnknownNameError",
    "UnknownSettingError",
    "UnmatchedKeyError",
    "UnsupportedOperationError",
    "UnsupportedSettingError",
    "UnusedSettingWarning",
    "ViewError",
    "naming_user_function",
    "shown_value",
    "warn_user",
]


def shown_value(value: Any) -> str:
    """Return a value as an error shows it, whatever it is: one that nests too deep, or fails to show itself, by type.

    Args:
        value: what was given.

    Example:
        >>> shown_value("fast")
        "'fast'"
    """
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - whatever its class raises
        return f"a {type(value).__name__} that cannot be shown"


class MegaoptError(Exception):
    """Base class of everything that megaopt raises on purpose."""


class _NamingError(MegaoptError):
    """Base class of errors that name what they are about."""

    def __init__(self, message: str, *, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class ConfigurationError(MegaoptError, ValueError):
    """A setting has a value that it cannot have.

    Attributes:
        setting: the full name of the setting.
        value: what was given.
    """

    def __init__(self, message: str, *, setting: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.setting = setting
        self.value = value

    @classmethod
    def of(
        cls, setting: str, value: Any, why: str, *, where: str = "", shown: str | None = None, **about: Any
    ) -> Self:
        """Return the error that says of a setting's value why it cannot be.

        Args:
            setting: the full name of the setting.
            value: what was given.
            why: what is allowed, or what speaks against the value.
            where: what precedes the message, such as `"param group 3: "`.
            shown: the value as the message writes it; None: as `repr` does.
            **about: what else the class takes.

        Example:
            >>> ConfigurationError.of("lr", -1.0, "must be a number of at least 0")
            ConfigurationError('lr=-1.0: must be a number of at least 0')
        """
        written = shown_value(value) if shown is None else shown
        return cls(f"{where}{setting}={written}: {why}", setting=setting, value=value, **about)

    @classmethod
    def got(cls, setting: str, value: Any, advice: str, *, shown: str | None = None, **about: Any) -> Self:
        """Return the error that says that something of another kind was given than is needed.

        Args:
            setting: the full name of the setting or argument.
            value: what was given.
            advice: what to give.
            shown: what was given, in words; None: its type.
            **about: what else the class takes.

        Example:
            >>> ConfigurationError.got("model", 3, "give a torch.nn.Module")
            ConfigurationError('model: got int; give a torch.nn.Module')
        """
        kind = type(value).__name__ if shown is None else shown
        return cls(f"{setting}: got {kind}; {advice}", setting=setting, value=value, **about)


class UnsupportedSettingError(ConfigurationError):
    """A setting is known, but the value that was given asks for something that megaopt does not do."""


class UnusedSettingWarning(UserWarning):
    """A setting was given, and nothing that is in use acts on it."""


class UnknownSettingError(ConfigurationError, AttributeError):
    """No core field and no installed plugin has a setting of this name."""


class ConfigFileError(ConfigurationError):
    """A configuration file says something wrong; the message begins with file and line.

    Attributes:
        path: the file.
        line: the line number, counted from 1; None where it is not known.

    Example:
        >>> ConfigFileError.of("lr", -1.0, "must be a number of at least 0", path="run.toml", line=3)
        ConfigFileError('run.toml:3: lr=-1.0: must be a number of at least 0')
    """

    def __init__(
        self,
        message: str,
        *,
        path: str,
        line: int | None = None,
        setting: str | None = None,
        value: Any = None,
    ) -> None:
        where = path if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {message}", setting=setting, value=value)
        self.path = path
        self.line = line


class ConformanceError(MegaoptError, AssertionError):
    """An optimizer fails a check of the conformance kit.

    Attributes:
        optimizer: its registered name.
    """

    def __init__(self, message: str, *, optimizer: str) -> None:
        super().__init__(f"{optimizer!r}: {message}")
        self.optimizer = optimizer


class PluginError(MegaoptError):
    """Base class of what goes wrong with plugins."""


class PluginNotInstalledError(PluginError, LookupError, AttributeError):
    """What was asked for comes from a plugin that is not installed (or is blocked).

    Attributes:
        name: the optimizer, strategy or setting that was asked for.
        distribution: the distribution that would bring it, None where it is not known.
    """

    def __init__(self, message: str, *, name: str, distribution: str | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.distribution = distribution

    def __str__(self) -> str:
        return str(self.args[0])


class MovedNameError(MegaoptError, ImportError):
    """A public name was asked of the core, and another distribution has it.

    It is an `ImportError`, so that `from megaopt_core import NAME` shows the message.

    Attributes:
        name: the name.
        distribution: the distribution that has it.
    """

    def __init__(self, message: str, *, name: str, distribution: str) -> None:
        super().__init__(message)
        self.name = name
        self.distribution = distribution


class BrokenPluginError(PluginError):
    """What was asked for should come from a plugin that is installed but failed to load.

    Attributes:
        plugin: the entry point's name.
    """

    def __init__(self, message: str, *, plugin: str) -> None:
        super().__init__(message)
        self.plugin = plugin


class DoubtfulRolesWarning(UserWarning):
    """An optimizer for matrices was built for a model of which it is in doubt which parameters are matrices."""


class BrokenPluginWarning(UserWarning):
    """A plugin failed to load, or in a hook on which nothing in use depends; it is left out, and all else works."""


class PluginHookError(PluginError):
    """A plugin raised inside a hook; what it raised is the cause.

    Attributes:
        plugin: the entry point's name.
        hook: the hook's name.
    """

    def __init__(self, message: str, *, plugin: str, hook: str) -> None:
        super().__init__(message)
        self.plugin = plugin
        self.hook = hook


class DuplicateNameError(PluginError):
    """Two plugins give one name.

    Attributes:
        name: the name that both give.
        owners: the two plugins.
    """

    def __init__(self, message: str, *, name: str, owners: tuple[str, ...]) -> None:
        super().__init__(message)
        self.name = name
        self.owners = owners


class UnknownNameError(PluginError, LookupError):
    """Nobody registers this optimizer, strategy or schedule.

    Attributes:
        name: what was asked for.
        known: the names that exist.
    """

    def __init__(self, message: str, *, name: str, known: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.known = tuple(known)


class OverrideError(MegaoptError, ValueError):
    """An override has a key or a value that it cannot have.

    Attributes:
        key: the key inside the override.
        value: its value.
    """

    def __init__(self, message: str, *, key: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


class OverrideConflictError(OverrideError):
    """Two overrides give one key unequal values.

    Attributes:
        key: the key inside the overrides.
        values: the two values.
        sources: what each came from, where that is known.
    """

    def __init__(
        self, message: str, *, key: str, values: tuple[Any, Any], sources: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, key=key, value=values)
        self.values = values
        self.sources = sources


class UnmatchedKeyError(OverrideError):
    """A name pattern matches no parameter on any rank.

    Attributes:
        pattern: the pattern.
        close: parameter names that look like it.
    """

    def __init__(self, message: str, *, pattern: str, close: Iterable[str] = ()) -> None:
        super().__init__(message, key=pattern)
        self.pattern = pattern
        self.close = tuple(close)


class RoutingError(_NamingError):
    """A parameter cannot be routed.

    Attributes:
        names: the qualified names of the parameters.
    """


class OwnershipError(RoutingError):
    """A trainable parameter is owned by no optimizer, or by more than one."""


class RoutingChangedError(RoutingError):
    """Configuration or overrides would now route parameters otherwise than when the model was wrapped."""


class ViewError(RoutingError, ValueError):
    """A matrix view does not fit its parameter, or two descriptions claim one parameter."""


class ShardingError(MegaoptError):
    """A sharding strategy cannot take what it was given."""


class ParallelGroupError(MegaoptError, ValueError):
    """A process group that is needed is missing, or does not fit."""


class CommunicationError(MegaoptError, RuntimeError):
    """A collective did not finish: another rank stopped, or the process group's timeout is over."""


class MissingRanksError(CommunicationError):
    """Not all ranks of a process group have come to where they tell each other something.

    Attributes:
        came: those that have come, as ranks of the default group.
        missing: those that have not.
    """

    def __init__(self, message: str, *, came: Iterable[int] = (), missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.came = tuple(came)
        self.missing = tuple(missing)


class RankMismatchError(MegaoptError, ValueError):
    """Ranks that must have something alike differ in it; raised on all of them, with the same message.

    Attributes:
        differences: what differs and on which ranks, one line each.
    """

    def __init__(self, message: str, *, differences: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class ScheduleError(ConfigurationError):
    """A schedule's values contradict each other, or its checkpoint contradicts its configuration."""


class GradientError(_NamingError, RuntimeError):
    """A gradient cannot be used (non-finite under `check_for_nan_in_grad`, of the wrong shape...).

    Attributes:
        names: the parameters.
    """


class UnsupportedOperationError(MegaoptError, RuntimeError):
    """The operation exists on `torch.optim.Optimizer` but cannot work here; the message says what to do instead."""


class StateDictError(_NamingError, ValueError):
    """A state dict does not fit what it is loaded into; nothing has been changed.

    Attributes:
        names: the parameters or keys that do not fit.
    """


class CheckpointError(MegaoptError, RuntimeError):
    """A checkpoint cannot be written, read or trusted.

    Attributes:
        path: the file or folder.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, too short, or does not have the checksum that it was written with."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint has a format that this version does not read."""


class CheckpointBusyError(CheckpointError):
    """Somebody else is saving to the same path at this moment."""


class CheckpointWarning(UserWarning):
    """A checkpoint is complete, but something beside it did not go well."""


class CheckpointMismatchError(CheckpointError, StateDictError):
    """A checkpoint is in order but does not fit what it is loaded into; nothing has been changed.

    Attributes:
        names: the parameters that do not fit.
    """

    def __init__(self, message: str, *, path: str | None = None, names: Iterable[str] = ()) -> None:
        super().__init__(message, path=path)
        self.names = tuple(names)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the user's line: the nearest one that is neither megaopt's, nor torch's, nor that of a decorator.

    Args:
        message: what is said.
        category: of the warning.
    """
    passed = [
        Path(__file__).parent,
        Path(contextlib.__file__).with_suffix(""),
    ]  # a prefix is shorter than the name
    # The core is imported without torch, and without any of its plugins.
    packages = ("torch", *(name for name in tuple(sys.modules) if re.fullmatch(r"megaopt_\w+", name)))
    files = (getattr(sys.modules.get(name), "__file__", None) for name in packages)
    passed += [Path(file).parent for file in files if file]
    warnings.warn(message, category, skip_file_prefixes=tuple(map(str, passed)))


@contextmanager
def naming_user_function(whose: str, names: str) -> Iterator[None]:
    """Say of an exception in a function that a user gave whose it is; ours pass.

    Args:
        whose: the argument that the function was given by.
        names: what it was called with, in words.

    Raises:
        ConfigurationError: it raised; what it raised is the cause.

    Example:
        >>> with naming_user_function("fqn", "(0, 'weight')"):
        ...     {}["weight"]
        Traceback (most recent call last):
        megaopt_core.errors.ConfigurationError: fqn(0, 'weight') raised KeyError: 'weight'
    """
    try:
        yield
    except MegaoptError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{whose}{names} raised {type(error).__name__}: {error}", setting=whose
        ) from error
