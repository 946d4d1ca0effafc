"""A warning names the line that the user wrote, however deep the core found its cause."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from megaopt_core import OptimizerConfig, OptimizerParamScheduler, ParamKey, build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python


def _build(**settings: object) -> MegatronOptimizer:
    return build_optimizer(torch.nn.Linear(4, 3), "sgd", lr=0.1, **settings)


def _schedule(optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(optimizer, 0.0, 1.0, 0.0, 0, 10, "linear", 0.1, 0.1, 0, "constant")


CASES: dict[str, Callable[[], object]] = {
    "a setting that nothing reads": lambda: _build(decoupled_weight_decay=False),
    "a key that matches nothing": lambda: _build(overrides={ParamKey(attr="absent"): {"lr": 1.0}}),
    "an older name": lambda: OptimizerConfig(optimizer="dist_sgd"),
    "a scheduler's setting": lambda: _schedule(_build()),
    "a step without gradients": lambda: _build().step(),
}


@pytest.mark.parametrize("case", CASES)
def test_a_warning_names_the_users_line(case: str) -> None:
    """Through decorators of the core, of torch and of the standard library."""
    pytest.importorskip("megaopt_adam")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CASES[case]()
    assert caught
    assert {each.filename for each in caught} == {__file__}
