"""State that an entry declares: a place to load into, in which the class finds nothing in its first step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megaopt_testing import temporary_plugin
from torch import nn

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import PluginError

pytestmark = pytest.mark.any_python

KINDS = {"momentum_buffer": "param"}
ADAM = {"step": "scalar", "exp_avg": "param", "exp_avg_sq": "param"}


class Brings:
    """Torch's classes, with their state declared and without."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return the entries."""
        return {
            "declared": OptimizerEntry(torch.optim.Adam, state=ADAM),
            "learned": OptimizerEntry(torch.optim.Adam),
            "stateless": OptimizerEntry(torch.optim.SGD, state={}),
        }


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Register them."""
    with temporary_plugin(Brings(), "declared"):
        yield


def _trained(name: str, steps: int, state: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.bfloat16 if settings else torch.float32)
    optimizer = build_optimizer(model, name, lr=0.1, overrides={}, **settings)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return model, optimizer


def _layout(optimizer: Any) -> dict[str, dict[str, Any]]:
    return {
        name: {key: (value.shape, value.dtype, value.device) for key, value in optimizer.state[param].items()}
        for param, name in optimizer.names.items()
    }


@pytest.mark.parametrize("settings", [{}, {"bf16": True}])
def test_declared_state_is_there_before_the_first_step_as_it_is_after(settings) -> None:
    """Zeros of the same keys, shapes and dtypes, and no step of a copy is made."""
    model, optimizer = _trained("declared", 0, **settings)
    before = _layout(optimizer)
    for param in model.parameters():
        assert not any(optimizer.state[param][key].any() for key in ADAM)
    assert before == _layout(_trained("declared", 1, **settings)[1])


@pytest.mark.parametrize("settings", [{}, {"bf16": True}])
def test_steps_are_those_of_the_class_by_itself(settings) -> None:
    """Also where a state was loaded before the first step."""
    for is_loaded in (False, True):
        expected, actual = (
            _trained(
                name, 3, _trained(name, 2, **settings)[1].state_dict() if is_loaded else None, **settings
            )[0]
            for name in ("learned", "declared")
        )
        for one, other in zip(expected.parameters(), actual.parameters(), strict=True):
            assert torch.equal(one, other)


def test_an_optimizer_may_declare_that_it_has_no_state() -> None:
    """Then there is none."""
    model, optimizer = _trained("stateless", 0)
    assert not any(optimizer.state[param] for param in model.parameters())


def test_a_class_whose_state_is_declared_is_not_stepped_to_learn_it(monkeypatch) -> None:
    """Not even a copy of it."""
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self, closure=None: pytest.fail("it was stepped"))
    assert _layout(_trained("declared", 0)[1])["weight"].keys() == ADAM.keys()


@pytest.mark.parametrize("kind", ["tensor", (2, -1), 3, None])
def test_a_kind_that_is_none_is_named(kind) -> None:
    """With those that there are."""
    with pytest.raises(PluginError, match=r"state=\{'m': .*must be 'param'.*'scalar'.*'number'.*or a shape"):
        OptimizerEntry(torch.optim.SGD, state={"m": kind})


def test_state_is_declared_or_made() -> None:
    """Nobody could say which of both holds."""
    with pytest.raises(PluginError, match="give init_state_fn or state, not both"):
        OptimizerEntry(torch.optim.SGD, lambda optimizer, config=None: None, state=KINDS)
