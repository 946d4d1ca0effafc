"""Step observers: each path of a step calls each method once, and their votes and errors stop steps."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megaopt_testing.plugins import temporary_plugin
from torch import nn

from megaopt_core import ChainedOptimizer, FP32Optimizer, OptimizerConfig, ParamKey, hookimpl
from megaopt_core.errors import ConfigurationError, PluginError, UnsupportedOperationError
from megaopt_core.plugin_api import Change, ReportLine, StepObserver, StepOutcome, VoteSpec

pytestmark = pytest.mark.any_python


class Recorder(StepObserver):
    """Notes every call."""

    vote_specs = (VoteSpec("test.stop", "any", stops=True), VoteSpec("test.number", "equal"))

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.calls, self.says, self.settles = optimizer, [], 0, False

    def built(self) -> None:
        """Note it."""
        self.calls.append("built")

    def before_step(self) -> None:
        """Note it."""
        self.calls.append("before")

    def votes(self) -> Mapping[str, int]:
        """Say what the test wants said."""
        self.calls.append("votes")
        return {"test.stop": self.says, "test.number": 7}

    def decide(self, fired: Mapping[str, bool]) -> Collection[str]:
        """Note what fired."""
        self.calls.append(("decide", fired["test.stop"], fired["test.number"]))
        return ("test.stop",) if self.settles else ()

    def after_step(self, outcome: StepOutcome) -> None:
        """Note how it ended."""
        self.calls.append(outcome.how)

    def changing(self, what: Change) -> None:
        """Note it."""
        self.calls.append(("changing", what))

    def changed(self, what: Change) -> None:
        """Note it."""
        self.calls.append(("changed", what))

    def check(self) -> list[str]:
        """Find a problem."""
        return ["a problem"]

    def report_lines(self) -> list[ReportLine]:
        """Add a line."""
        return [ReportLine("recorder", "it watches")]


class Plugin:
    """Gives observers of a class."""

    megaopt_api = "1"

    def __init__(self, cls: Any = Recorder) -> None:
        self.cls, self.made = cls, []

    @hookimpl
    def megaopt_step_observers(self, optimizer: Any) -> Any:
        """One for each optimizer."""
        self.made.append(self.cls(optimizer))
        return self.made[-1:]


@contextmanager
def watched(cls: Any = Recorder) -> Iterator[Plugin]:
    """Yield a plugin that watches."""
    plugin = Plugin(cls)
    with temporary_plugin(plugin, "watching"):
        yield plugin


SKIPPED = ["before", "votes", ("decide", False, False), "skipped"]
TAKEN = ["before", "votes", ("decide", False, False), "taken"]


def test_a_step_calls_each_method_once(mlp, build, give) -> None:
    """In the order that the base class gives; `built` before the first."""
    with watched() as plugin:
        model = mlp()
        optimizer = build(model)
        give(model)
        optimizer.step()
    [observer] = plugin.made
    assert observer.calls == ["built", *TAKEN]


@pytest.mark.parametrize("found_inf", [False, True])
def test_the_two_halves_are_one_step(mlp, build, give, found_inf) -> None:
    """The first half ends it where it gives the step up, else the second."""
    with watched() as plugin:
        model = mlp(torch.bfloat16)
        optimizer = build(model, bf16=True)
        give(model)
        if found_inf:
            model[0].weight.grad[0, 0] = math.inf
        assert optimizer.prepare_grads() is found_inf
        if not found_inf:
            optimizer.clip_grad_norm(1.0)
            optimizer.step_with_ready_grads()
    assert plugin.made[0].calls[1:] == (SKIPPED if found_inf else TAKEN)


def test_a_first_half_that_is_left_alone_is_a_skipped_step(mlp, build, give) -> None:
    """It is known when the next one begins."""
    with watched() as plugin:
        model = mlp()
        optimizer = build(model)
        for _ in range(2):
            give(model)
            optimizer.prepare_grads()
    assert plugin.made[0].calls[1:] == [*SKIPPED, *TAKEN[:3]]


def test_the_second_half_needs_the_first(mlp, build, give) -> None:
    """It says what to call."""
    model = mlp()
    optimizer = build(model)
    give(model)
    with pytest.raises(UnsupportedOperationError, match=r"prepare_grads\(\) has collected: call that first"):
        optimizer.step_with_ready_grads()


@pytest.mark.parametrize("settings", [{"grad_norm_skip_threshold": 1e-9}, {"bf16": True}])
def test_a_skipped_step_is_told(mlp, build, give, settings) -> None:
    """By the norm, and by found-inf."""
    with watched() as plugin:
        model = mlp(torch.bfloat16 if "bf16" in settings else torch.float32)
        optimizer = build(model, **settings)
        give(model)
        if "bf16" in settings:
            model[0].weight.grad[0, 0] = math.nan
        assert not optimizer.step().update_successful
    assert plugin.made[0].calls[1:] == SKIPPED


def test_a_refused_step_is_told_and_the_next_one_works(mlp, build, give) -> None:
    """A setting that cannot be refuses it; observers look all the same."""
    with watched() as plugin:
        model = mlp()
        optimizer = build(model)
        give(model)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises(ConfigurationError, match="lr='fast'"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        optimizer.param_groups[0]["lr"] = 0.1
        assert optimizer.step().update_successful
    assert plugin.made[0].calls[1:] == ["before", "refused", *TAKEN]


def test_a_step_that_fails_in_the_middle_is_told(mlp, build, give, monkeypatch) -> None:
    """With the error as it is."""
    with watched() as plugin:
        model = mlp()
        optimizer = build(model)
        give(model)
        monkeypatch.setattr(optimizer.parts[0].inner, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert plugin.made[0].calls[1:] == [*TAKEN[:3], "failed"]


@pytest.mark.parametrize("settles", [False, True])
def test_a_vote_that_stops_changes_nothing_unless_it_is_settled(mlp, build, give, settles) -> None:
    """The result says so."""
    with watched() as plugin:
        model = mlp()
        optimizer = build(model, clip_grad=1.0)
        plugin.made[0].says, plugin.made[0].settles = 1, settles
        give(model)
        before = [param.detach().clone() for param in model.parameters()]
        result = optimizer.step()
        assert result.update_successful is settles
        assert result.grad_norm > 0.0
        assert all(map(torch.equal, before, model.parameters())) is not settles
    assert plugin.made[0].calls[-2:] == [("decide", True, False), "taken" if settles else "skipped"]


def test_a_chain_is_watched_and_its_children_are_not(mlp, build, give) -> None:
    """One observer for a built chain; by hand, the chain's own."""
    with watched() as plugin:
        model = mlp()
        optimizer = build(model, overrides={ParamKey(name="0.*"): {"optimizer": "t_sgd"}})
        give(model)
        optimizer.step()
        assert [each.optimizer for each in plugin.made] == [optimizer]
    with watched() as plugin:
        body, head = nn.Linear(2, 2), nn.Linear(2, 1)
        config = OptimizerConfig(lr=0.1)
        made = [FP32Optimizer(torch.optim.SGD(each.parameters(), lr=0.1), config) for each in (body, head)]
        chain = ChainedOptimizer(made)
        head(body(torch.ones(1, 2))).sum().backward()
        chain.step()
        of_chain = [each for each in plugin.made if each.optimizer is chain]
        assert [each.calls[1:] for each in of_chain] == [TAKEN]
        assert all("before" not in each.calls for each in plugin.made if each not in of_chain)


def test_changes_between_steps_are_told(mlp, build, give) -> None:
    """Before and after a load and a switch of mode; after a reload and a move."""
    with watched() as plugin:
        model = mlp()
        optimizer = build(model)
        [observer] = plugin.made
        observer.calls.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.eval()
        optimizer.reload_model_params()
    assert observer.calls == [
        ("changing", Change.LOADED),
        ("changed", Change.LOADED),
        ("changing", Change.MODE),
        ("changed", Change.MODE),
        ("changed", Change.RELOADED),
    ]


def test_a_parameter_that_joins_is_told(mlp, build, give) -> None:
    """Before the observers look at the step."""
    with watched() as plugin:
        model = mlp()
        model[0].bias.requires_grad_(False)
        optimizer = build(model)
        give(model)
        model[0].bias.requires_grad_(True)
        model[0].bias.grad = torch.ones_like(model[0].bias)
        with pytest.warns(UserWarning, match="unfrozen or added"):
            optimizer.step()
    assert plugin.made[0].calls[1:4] == [("changing", Change.JOINED), ("changed", Change.JOINED), "before"]


def test_problems_and_lines_are_shown(mlp, build) -> None:
    """By `check`, and by the report."""
    with watched():
        optimizer = build(mlp())
        assert optimizer.check() == ("a problem",)
        assert ReportLine("recorder", "it watches") in optimizer.report().notes
        assert "recorder: it watches" in str(optimizer.report())


@pytest.mark.parametrize("method", ["before_step", "votes", "decide", "after_step"])
def test_an_error_names_the_plugin(mlp, build, give, method) -> None:
    """And the method; nothing has changed, but where the step was taken."""

    def fail(self: Any, *_: Any) -> Any:
        raise KeyError("lost")

    cls = type("Broken", (StepObserver,), {method: fail, "__init__": lambda self, optimizer: None})
    with watched(cls):
        model = mlp()
        optimizer = build(model)
        give(model)
        before = [param.detach().clone() for param in model.parameters()]
        said = rf"step observer Broken of plugin 'watching'.* failed in {method}\(\): KeyError: 'lost'"
        with pytest.raises(PluginError, match=said):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters())) is (method != "after_step")


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ((VoteSpec("unnamed", "any"),), "a vote 'unnamed'; it is named 'plugin.question'"),
        ((VoteSpec("a.b", "any"), VoteSpec("a.b", "equal")), "a vote 'a.b', as plugin 'watching'"),
    ],
)
def test_votes_have_names_of_their_own(mlp, build, specs, said) -> None:
    """Found at the build."""
    cls = type("Odd", (StepObserver,), {"vote_specs": specs, "__init__": lambda self, optimizer: None})
    with watched(cls), pytest.raises(PluginError, match=said):
        build(mlp())


def test_a_vote_that_is_not_declared_is_an_error(mlp, build, give) -> None:
    """It would be dropped without a word."""
    cls = type(
        "Odd",
        (StepObserver,),
        {"votes": lambda self: {"a.b": 1}, "__init__": lambda self, optimizer: None},
    )
    with watched(cls):
        model = mlp()
        optimizer = build(model)
        give(model)
        with pytest.raises(PluginError, match=r"votes that none has declared: a\.b"):
            optimizer.step()


@pytest.mark.parametrize("given", [{"rule": "most"}, {"rule": "any", "stops": 1}])
def test_a_spec_that_cannot_be_is_refused(given) -> None:
    """At construction."""
    with pytest.raises((ValueError, TypeError)):
        VoteSpec("a.b", **given)


@pytest.mark.parametrize("given", [None, "list", "observer"])
def test_anything_else_than_observers_is_refused(mlp, build, given) -> None:
    """None means that there is nothing to watch."""

    class Odd:
        megaopt_api = "1"

        @hookimpl
        def megaopt_step_observers(self, optimizer: Any) -> Any:
            return {"list": [3], "observer": StepObserver()}.get(given)

    with temporary_plugin(Odd(), "odd"):
        if given is None:
            build(mlp())
            return
        with pytest.raises(PluginError, match="it must return a list of StepObservers"):
            build(mlp())
