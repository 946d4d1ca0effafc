"""Routing: who steps what is decided by names, shapes and modules, on the meta device as with values."""

from __future__ import annotations

from typing import Any

import torch

from megaopt_core import OptimizerConfig, Routing, route
from megaopt_testing.trial import DEFAULT_SETTINGS, Trial, some

__all__ = ["check_meta_routing"]


def check_meta_routing(optimizer: str, **settings: Any) -> None:
    """A model on the meta device is routed as the same model with values: optimizer, group and overrides.

    Plans for thousands of ranks are made before there is a value.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: it raises on the meta device, or a parameter goes elsewhere.
    """
    trial = Trial(optimizer, settings)
    config = OptimizerConfig(**{**DEFAULT_SETTINGS, **settings, "optimizer": optimizer})
    real = route(config, [trial.model()])
    with torch.device("meta"):
        model = trial.model()
    try:
        meta = route(config, [model])
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        trial.fail(f"routing a model on the meta device raises {type(error).__name__}: {error}")
    told = [_told(routing) for routing in (real, meta)]
    different = [name for name in told[0] if told[0][name] != told[1].get(name)]
    if different:
        trial.fail(
            f"a model on the meta device gets another routing: {some(different)} differ. `accepts`, "
            "overrides and predicates may use names, shapes and roles, never values or devices"
        )


def _told(routing: Routing) -> dict[str, Any]:
    return {
        name: (each.spec.optimizer, each.spec.group, each.spec.granularity, each.spec.view)
        for name, each in routing.params.items()
    }
