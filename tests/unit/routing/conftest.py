"""A plugin with one optimizer of every kind, so that routing is tested without any that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import field, frozen
from megaopt_testing.plugins import temporary_plugin
from torch import nn
from torch.optim.optimizer import ParamsT

from megaopt_core import Granularity, OptimizerEntry, Role, hookimpl
from megaopt_core.config import between
from megaopt_core.params import MATRIX, MatrixView, ParamSpec, RoleDecision, named_params
from megaopt_core.registry import PluginRegistry


@frozen
class WholeSettings:
    """Settings of `whole`."""

    rate: float = field(default=0.5, validator=between(0.0, 1.0), metadata={"help": "not used"})
    scalar: str = field(default="plain", metadata={"help": "who takes the rest"})


class Whole(torch.optim.SGD):
    """Takes whole matrices; `rate` is a constructor setting that groups do not keep."""

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.0, rate: float = 0.5) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self.rate = rate


def _whole_kwargs(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
    return {"lr": config.lr, "rate": config.whole_rate}


def only_matrices(spec: ParamSpec, view: MatrixView | None) -> str | None:
    """Refuse what has no matrix view."""
    return None if view is not None else "not a matrix"


class StandIn:
    """Optimizers `plain` (element-wise), `whole` (matrices, the rest to `plain`), `picky` (matrices, no fallback)."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module) -> dict[str, RoleDecision]:
        """Read the models of these tests, so that no other reader is needed: a hidden matrix and a head."""
        roles = {
            "hidden.weight": RoleDecision(Role.MATRIX, "hidden", MATRIX),
            "head.weight": RoleDecision(Role.OUTPUT, "the head"),
        }
        known = {named.name for named in named_params(model_chunk)} if hasattr(model_chunk, "hidden") else ()
        return {name: role for name, role in roles.items() if name in known}

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return the three."""
        return {
            "plain": OptimizerEntry(torch.optim.SGD, supports_fp16=True),
            "whole": OptimizerEntry(
                Whole,
                config_to_kwargs=_whole_kwargs,
                settings=WholeSettings,
                setting_prefixes=("whole",),
                granularity=Granularity.TENSOR,
                accepts=only_matrices,
                fallback=lambda config: config.whole_scalar,
            ),
            "picky": OptimizerEntry(torch.optim.SGD, granularity=Granularity.TENSOR, accepts=only_matrices),
        }


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[PluginRegistry]:
    """Register the stand-in plugin for one test."""
    with temporary_plugin(StandIn(), name="stand_in") as registry:
        yield registry
