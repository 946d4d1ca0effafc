"""Whatever the functions and classes of an optimizer's entry do, its plugin is named, and others train."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_testing.plugins import temporary_plugin
from torch import nn

from megaopt_core import OptimizerEntry, ParamKey, build_optimizer, hookimpl
from megaopt_core.errors import BrokenPluginWarning, MegaoptError

pytestmark = pytest.mark.any_python


class Evil:
    """Something of which nothing can be asked."""

    __hash__ = None

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__

    def __eq__(self, other: object) -> None:
        raise RuntimeError("no equal")

    def __bool__(self) -> None:
        raise RuntimeError("no truth")


def raises(*args: Any, **kwargs: Any) -> None:
    """Raise."""
    raise ZeroDivisionError("boom")


def leaves(*args: Any, **kwargs: Any) -> None:
    """End the process."""
    sys.exit(3)


def stops(*args: Any, **kwargs: Any) -> None:
    """Raise what no `except Exception` sees."""
    raise GeneratorExit


ANSWERS = {
    "raises": raises,
    "leaves": leaves,
    "stops": stops,
    "evil": lambda *args, **kwargs: Evil(),
    "None": lambda *args, **kwargs: None,
    "a number": lambda *args, **kwargs: 3,
    "a text": lambda *args, **kwargs: "x",
    "a list": lambda *args, **kwargs: [1],
    "an evil mapping": lambda *args, **kwargs: {"x": Evil()},
}
FUNCTIONS = (
    "config_to_kwargs",
    "init_state_fn",
    "accepts",
    "step_cost",
    "fallback",
    "fallback_override",
    "granularity_for",
    "refuses_split",
    "refuses_peers",
    "agree",
    "param_notes",
    "mup",
    "unused_settings",
)
FIELDS = {
    "supports_fp16": Evil(),
    "supports_peers": Evil(),
    "description": Evil(),
    "example": 3,
    "default_param_overrides": {ParamKey(name="*"): None},
    "optimizer_cls": "no_such_module:Class",
    "split_step": "no_such_module:Class",
}


class Leaves(torch.optim.SGD):
    """Ends the process when it is made."""

    def __init__(self, params: Any, lr: Any) -> None:
        sys.exit(1)


class NoGroups(torch.optim.SGD):
    """Throws its groups away."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, lr)
        self.param_groups = []


class Half(torch.optim.SGD):
    """Keeps some of its parameters."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__([{**params[0], "params": params[0]["params"][:1]}], lr)


class NoDefaults(torch.optim.SGD):
    """Throws its defaults away."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, lr)
        self.defaults = None


class LeavesInStep(torch.optim.SGD):
    """Ends the process in a step."""

    def step(self, closure: Any = None) -> None:
        sys.exit(1)


CLASSES = (Leaves, NoGroups, Half, NoDefaults, LeavesInStep)


def kwargs(config: Any, chunks: Any, pgs: Any) -> Any:
    """Return the constructor's arguments."""
    return {"lr": config.lr}


class Plugin:
    """A plugin with one optimizer."""

    megaopt_api = "1"

    def __init__(self, name: str, entry: Any) -> None:
        self.name, self.entry = name, entry

    @hookimpl
    def megaopt_optimizer_entries(self) -> Any:
        return {self.name: self.entry()}


def entry(**fields: Any) -> Any:
    """Return what makes an entry."""
    return lambda: OptimizerEntry(**{"optimizer_cls": torch.optim.SGD, "config_to_kwargs": kwargs, **fields})


def trained(name: str) -> None:
    """Build, step and report."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = build_optimizer(model, name, lr=0.1, overrides={})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    str(optimizer.report(full=True))


def harmless(faulty: Callable[[], OptimizerEntry]) -> None:
    """Check that the faulty optimizer trains or its plugin is named, and that another trains."""
    with warnings.catch_warnings(), temporary_plugin(Plugin("good", entry()), "good"):
        warnings.simplefilter("ignore", BrokenPluginWarning)
        told = "bad"
        try:
            with temporary_plugin(Plugin("bad", faulty), "faulty"):
                trained("good")
                trained("bad")
        except MegaoptError as error:
            told = str(error)
        trained("good")
        assert "bad" in told or "faulty" in told, told


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("field", FUNCTIONS)
def test_a_function_that_raises_or_returns_nonsense_is_named(field, answer):
    """Nothing that it raises escapes, and nothing that it returns is shown before it is known."""
    harmless(entry(**{field: ANSWERS[answer]}))


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_kind_is_named(field):
    """Also one whose words, truth and equality raise."""
    harmless(entry(**{field: FIELDS[field]}))


@pytest.mark.parametrize("cls", CLASSES)
def test_a_class_that_does_not_hold_what_it_is_given_is_named(cls):
    """Groups, parameters and defaults are those of torch's class."""
    harmless(entry(optimizer_cls=cls))


def test_default_overrides_that_are_none_are_named():
    """Whatever stands in the place of one."""
    for answer in ANSWERS.values():
        harmless(lambda answer=answer: entry(default_param_overrides={ParamKey(name="*"): answer()})())
