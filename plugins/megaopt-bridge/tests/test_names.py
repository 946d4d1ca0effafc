"""A name leads to the class that stands under it, or to an error that says why it does not."""

import sys
from types import ModuleType

import aliases
import pytest
import torch
from megaopt_bridge import bridged_entry

from megaopt_core import build_optimizer, get_registry
from megaopt_core.errors import PluginError, PluginHookError, UnknownNameError
from megaopt_core.registry import reset_registry

pytest.importorskip("megaopt_adam")
pytestmark = pytest.mark.any_python


@pytest.mark.parametrize("name", ["Better", "Ascent", "Descent", "One", "Other", "SGD", "Generated"])
def test_a_name_leads_to_what_stands_under_it(name) -> None:
    """Whatever the class calls itself: an alias, one that a function has made, two that have each other's names."""
    entry = get_registry().optimizer(f"aliases:{name}")
    model, alone = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    alone.load_state_dict(model.state_dict())
    built = build_optimizer(model, f"aliases:{name}", lr=0.1, weight_decay=0.0, clip_grad=0.0)
    by_itself = getattr(aliases, name)(alone.parameters(), lr=0.1)
    for step in range(2):
        grad = torch.randn(3, 3, generator=torch.Generator().manual_seed(step))
        model.weight.grad, alone.weight.grad = grad, grad.clone()
        built.step()
        by_itself.step()
    assert torch.equal(model.weight, alone.weight)
    assert entry.setting_prefixes == (f"aliases_{name.lower()}",)


def _define(module: ModuleType, default: float) -> None:
    def init(self, params, lr: float = 1e-2, gain: float = default) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "gain": gain})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * group["gain"])

    module.Mine = type("Mine", (torch.optim.Optimizer,), {"__init__": init, "step": step})


def _moved(by: str) -> float:
    model = torch.nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    built = build_optimizer(model, by, lr=1.0, weight_decay=0.0, clip_grad=0.0)
    model.weight.grad = torch.ones(2, 2)
    built.step()
    return round(float((before - model.weight.detach()).mean()), 3)


def test_a_class_that_is_defined_anew_is_the_new_one(monkeypatch) -> None:
    """As in a cell of a notebook that is run again; nobody is given the old one in silence."""
    module = ModuleType("a_notebook")
    monkeypatch.setitem(sys.modules, "a_notebook", module)
    try:
        _define(module, 2.0)
        first = bridged_entry("a_notebook:Mine")
        assert bridged_entry("a_notebook:Mine") is first
        assert _moved("a_notebook:Mine") == 2.0
        kept = get_registry().optimizer("a_notebook:Mine")
        _define(module, 3.0)
        assert bridged_entry("a_notebook:Mine") is not first
        if get_registry().optimizer("a_notebook:Mine") is kept:
            with pytest.raises(PluginError, match=r"defined anew since .*reset_registry\(\)"):
                _moved("a_notebook:Mine")
            reset_registry()
        assert _moved("a_notebook:Mine") == 3.0
    finally:
        reset_registry()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ValueError('no data here')", "ValueError: no data here"),
        ("def f(:", "SyntaxError: "),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
    ids=["raises", "syntax", "exits"],
)
def test_a_module_that_fails_is_named_with_its_error(text, error, tmp_path, monkeypatch) -> None:
    """It is the user's, not the bridge's."""
    (tmp_path / "a_broken_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError) as raised:
        get_registry().optimizer("a_broken_module:Mine")
    assert not isinstance(raised.value, PluginHookError)
    told = f"optimizer 'a_broken_module:Mine': module 'a_broken_module' fails to import: {error}"
    assert str(raised.value).startswith(told)


def test_a_relative_module_is_no_source() -> None:
    """There is nothing that it would be relative to."""
    with pytest.raises(UnknownNameError, match=r"^optimizer '.made:Up' must read 'source:Class'"):
        get_registry().optimizer(".made:Up")
