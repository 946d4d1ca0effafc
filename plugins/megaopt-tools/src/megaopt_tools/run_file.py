"""A run in one file: the configuration and the overrides, read from TOML and written to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from megaopt_core import OptimizerConfig, ParamGroupOverride, ParamKey, Role
from megaopt_core.errors import ConfigFileError, ConfigurationError, MegaoptError, OverrideError
from megaopt_core.params import OVERRIDE_FIELDS, validate_override
from megaopt_tools.toml_file import ConfigFile, RawOverride, read_config_file

__all__ = ["RunFile", "read_config"]

_MATCHERS = ("name", "attr", "role")


class OverridesFromFile(dict[ParamKey, ParamGroupOverride]):
    """Overrides that remember the line each came from, for reports and errors.

    Attributes:
        sources: key to `"file:line"`.
        with_standard: the standard overrides apply as well, but for keys that stand here too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[ParamKey, str] = {}
        self.with_standard = False


@frozen
class RunFile:
    """A configuration with its overrides.

    A file looks like this:

    .. code-block:: toml

        optimizer = "adam"
        lr = 3e-4
        standard_overrides = true      # keep: no weight decay on biases and vectors

        [[overrides]]
        name = ["*.router.weight", "*.gate.weight"]
        lr = 1e-4
        optimizer = "sgd"

    A table matches by `name` (glob), `attr` or `role`, each a string or a list; everything else in it is an override.

    Args:
        config: the configuration.
        overrides: the file's overrides; None when it has none.
        standard_overrides: the standard overrides apply as well.
    """

    config: OptimizerConfig
    overrides: Mapping[ParamKey, ParamGroupOverride] | None = None
    standard_overrides: bool = field(default=True, kw_only=True)

    def config_overrides(self) -> Mapping[ParamKey, ParamGroupOverride] | None:
        """Return what to give to `route` and `get_megatron_optimizer`: None where only the standard overrides apply."""
        if self.overrides is None or not self.standard_overrides:
            return self.overrides
        combined = OverridesFromFile()
        combined.with_standard = True
        for key, override in self.overrides.items():
            combined[key] = override
            combined.sources[key] = getattr(self.overrides, "sources", {}).get(key, "config_overrides")
        return combined

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunFile:
        """Read a run from a TOML file.

        Args:
            path: the file.

        Raises:
            ConfigFileError: the file cannot be read, or says something wrong; the message begins with file and line.
        """
        file = read_config_file(path)
        config = _config_of(file, OptimizerConfig)
        overrides = OverridesFromFile()
        for table in file.overrides:
            key, override = _read_table(table)
            if key in overrides:
                raise table.fault(
                    f"{key} is in two tables; put all its settings into one ({overrides.sources[key]})"
                )
            overrides[key] = override
            overrides.sources[key] = f"{file.path}:{table.line}"
        given = file.overrides or not file.standard_overrides
        return cls(config, overrides if given else None, standard_overrides=file.standard_overrides)

    def dumps(self) -> str:
        """Return the run as TOML, which :meth:`load` reads back as an equal run.

        Raises:
            OverrideError: a key matches by a predicate, which a file cannot hold.
        """
        lines = [
            f"{key} = {_toml(value)}" for key, value in self.config.to_dict().items() if value is not None
        ]
        if self.overrides is not None:
            lines.append(f"standard_overrides = {_toml(self.standard_overrides)}")
        for key, override in (self.overrides or {}).items():
            lines += ["", "[[overrides]]", *_table_lines(key, override)]
        return "\n".join(lines) + "\n"


def read_config[C: OptimizerConfig](path: str | os.PathLike[str], cls: type[C]) -> C:
    """Read a TOML file whose keys are settings; its `[[overrides]]` tables are left to :class:`RunFile`.

    Args:
        path: the file.
        cls: the class of the configuration.

    Raises:
        ConfigFileError: the file cannot be read, or says something wrong; the message begins with file and line.
    """
    return _config_of(read_config_file(path), cls)


def _config_of[C: OptimizerConfig](file: ConfigFile, cls: type[C]) -> C:
    try:
        return cls(**file.settings)
    except ConfigurationError as error:
        line = file.lines.get(error.setting or "")
        raise ConfigFileError(
            str(error), path=file.path, line=line, setting=error.setting, value=error.value
        ) from error


def _strings(value: Any) -> tuple[str, ...]:
    entries = value if isinstance(value, list) else [value]
    if not entries or not all(isinstance(entry, str) for entry in entries):
        raise OverrideError(f"{value!r}: must be a string or a list of strings", value=value)
    return tuple(entries)


def _read_table(table: RawOverride) -> tuple[ParamKey, ParamGroupOverride]:
    matchers: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, value in table.values.items():
        try:
            if key in _MATCHERS:
                matchers[key] = _strings(value)
                if key == "role":
                    matchers[key] = tuple(_role(name) for name in matchers[key])
            else:
                validate_override({key: value})
                values[key] = value
        except MegaoptError as error:
            raise table.fault(f"[[overrides]] {key}: {error}", key) from error
    if not matchers:
        raise table.fault(
            f"an [[overrides]] table must name its parameters: add one of {', '.join(_MATCHERS)}"
        )
    if not values:
        raise table.fault(
            f"an [[overrides]] table must set something: add one of {', '.join(OVERRIDE_FIELDS)} or a setting of the "
            "optimizer"
        )
    try:
        return ParamKey(**matchers), validate_override(values)
    except MegaoptError as error:
        raise table.fault(f"[[overrides]]: {error}") from error


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        allowed = ", ".join(role.value for role in Role)
        raise OverrideError(f"{name!r} is not a role; allowed are {allowed}", value=name) from None


def _table_lines(key: ParamKey, override: ParamGroupOverride) -> list[str]:
    if key.predicate or key.with_name_predicate:
        raise OverrideError(
            f"{key} matches by a predicate, which a file cannot hold; match by name, attr or role"
        )
    lines = []
    for matcher in _MATCHERS:
        value = getattr(key, matcher)
        entries = value if isinstance(value, tuple) else (value,)
        if entries:
            lines.append(f"{matcher} = {_toml([str(entry) for entry in entries])}")
    for name, value in override.items():
        if value is None:
            raise OverrideError(
                f"{name}=None cannot be written to a file: TOML has no null", key=name, value=value
            )
        lines.append(f"{name} = {_toml(value)}")
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
