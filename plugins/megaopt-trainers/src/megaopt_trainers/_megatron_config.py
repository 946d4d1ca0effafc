"""Megatron-core's configuration, keys and overrides as ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megaopt_core import OptimizerConfig, ParamGroupOverride, ParamKey, ParamPredicate

__all__ = ["as_config", "as_overrides"]


def as_config(config: Any) -> Any:
    """Return Megatron's `OptimizerConfig` as ours: every setting that differs from its default.

    Args:
        config: Megatron's or ours, which is returned as it is; anything else is left for a build to refuse.

    Raises:
        ConfigurationError: Megatron's has a setting that nothing here acts on.
    """
    if not (type(config).__module__.startswith("megatron.") and dataclasses.is_dataclass(config)):
        return config
    ours = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}  # type: ignore[arg-type]
    given = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default or value != ours.get(field.name, value):
            given[field.name] = value
    return OptimizerConfig(**given)


def as_overrides(
    overrides: Mapping[Any, Any] | None, chunks: Sequence[torch.nn.Module]
) -> dict[ParamKey, ParamGroupOverride] | None:
    """Return overrides whose keys may be Megatron's, with keys of ours that match the same parameters.

    Megatron matches names as `named_parameters` of a wrapped chunk has them: `module.module.decoder.layers.0...`, with
    layers counted from each stage's first.

    Args:
        overrides: `{ParamKey: ParamGroupOverride}`, of Megatron's or of ours; None: the standard ones.
        chunks: the model chunks that names are matched in.
    """
    if overrides is None:
        return None
    found: dict[ParamKey, ParamGroupOverride] = {}
    for key, override in overrides.items():
        if not isinstance(key, ParamKey) and type(key).__module__.startswith("megatron."):
            found[_as_key(key, chunks)] = override
        else:
            found[key] = override
    return found


def _as_key(key: Any, chunks: Sequence[torch.nn.Module]) -> ParamKey:
    def matches(param: torch.nn.Parameter) -> bool:
        names = (name for chunk in chunks for name, each in chunk.named_parameters() if each is param)
        return any(key.matches(param, name) for name in names)

    return ParamKey(predicate=ParamPredicate(_shown(key), matches))


def _shown(key: Any) -> str:
    """Return a key of Megatron's in words that are the same on every rank: predicates go by their names."""
    words = []
    for field in dataclasses.fields(key):
        entries = getattr(key, field.name)
        entries = entries if isinstance(entries, tuple) else (entries,)
        names = [str(getattr(entry, "name", entry)) for entry in entries]
        words += [f"{field.name}={' or '.join(names)}"] if names else []
    return f"Megatron's {', '.join(words)}"
