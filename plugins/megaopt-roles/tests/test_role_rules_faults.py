"""Faults of the reader itself: what it cannot decide is in doubt, and said."""

import pytest
from megaopt_roles.infer import _Rules
from torch import nn

from megaopt_core import OptimizerConfig, route
from megaopt_core.errors import BrokenPluginWarning, PluginHookError
from megaopt_core.params import Doubt, NamedParam, Role, RoleDecision


def model() -> nn.Module:
    """Return three layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def fail_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the reader fail for the parameters whose names begin so."""
    decide = _Rules.decide

    def failing(self: _Rules, entry: NamedParam) -> RoleDecision:
        if entry.name.startswith(name):
            raise IndexError("tuple index out of range")
        return decide(self, entry)

    monkeypatch.setattr(_Rules, "decide", failing)


def test_one_parameter_is_in_doubt(monkeypatch: pytest.MonkeyPatch, stand_in: None) -> None:
    """It goes to the fallback, the reason tells the error, and all others are decided as before."""
    config = OptimizerConfig(optimizer="whole", lr=0.1)
    before = route(config, model())
    fail_for(monkeypatch, "2.weight")
    told = (
        r"failed to decide what 1 of 6 parameters are.* as 2.weight \(IndexError: tuple index out of range\)"
    )
    with pytest.warns(BrokenPluginWarning, match=told):
        after = route(config, model())
    found = after.params["2.weight"]
    assert (found.decision.role, found.decision.doubt) == (Role.ELEMENTWISE, Doubt.ROLE)
    assert "IndexError" in found.reason
    assert found.spec.optimizer == "plain"
    assert {name: entry.decision for name, entry in after.params.items() if name != "2.weight"} == {
        name: entry.decision for name, entry in before.params.items() if name != "2.weight"
    }


def test_a_reader_that_decides_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch, stand_in: None) -> None:
    """A matrix optimizer that would step nothing is not built."""
    fail_for(monkeypatch, "")
    with pytest.raises(PluginHookError, match="tuple index out of range"):
        route(OptimizerConfig(optimizer="whole", lr=0.1), model())
