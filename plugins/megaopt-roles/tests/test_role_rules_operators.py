"""Modules whose classes say what operators, indices and `len` do with them: these are methods, and read like others."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

SCOPE = """
class Scope(nn.Module):
    made = 0
    def __init__(self, depth=0):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))
        self.gain = nn.Parameter(torch.randn(4, 16))
        for i in range(depth):
            self.add_module(f'h{i}', Scope())
    def __truediv__(self, name):
        if name not in self._modules:
            self.add_module(name, Scope())
            type(self).made += 1
        return self._modules[name]
    def __getitem__(self, name):
        return getattr(self, name)
    def __contains__(self, name):
        return name in self._parameters
    def __len__(self):
        return len(self._modules)
    def __lshift__(self, x):
        return x + (x @ self.w).relu()
    def __rmatmul__(self, x):
        return x @ self.w
    def __or__(self, other):
        return lambda x: other << (self << x)

def run(p, x):
    for i in range(len(p)):
        x = layer(p / f'h{i}', x)
    return x

def layer(p, x):
    x = x + (x @ p['w']).relu() if 'w' in p else x
    return x * p['gain'].mean(0) if 'gain' in p else x
"""
FORWARDS = {  # how the two layers of the tree `self.root` are called
    "a path": "x = layer(self.root / 'h0', x)\nx = layer(self.root / 'h1', x)",
    "counted": "x = run(self.root, x)",
    "an operator that calls": "x = (self.root / 'h0') << x\nx = (self.root / 'h1') << x",
    "on the right": "x = x + (x @ (self.root / 'h0')).relu()\nx = x + (x @ (self.root / 'h1')).relu()",
    "one behind the other": "x = ((self.root / 'h0') | (self.root / 'h1'))(x)",
    "an index": "x = layer(self.root['h0'], x)\nx = layer(self.root['h1'], x)",
    "all children": "for name in self.root._modules:\n    x = layer(self.root / name, x)",
    "a function of the class": "x = type(self).apply_to(self.root, x)",
    "reduced": "x = functools.reduce(lambda x, name: layer(self.root / name, x), ('h0', 'h1'), x)",
}


@pytest.mark.parametrize("case", FORWARDS)
def test_operators_of_a_tree_of_parameters(generated_models: ModuleType, case: str) -> None:
    """What reaches the weights by an operator uses them as it would by an attribute, and no operator is run."""
    made = "self.e, self.h, self.root = nn.Embedding(50, 16), nn.Linear(16, 50), Scope(2)"
    methods = (
        "@staticmethod\ndef apply_to(p, x):\n    return run(p, x)\n"
        "def forward(self, ids):\n    x = self.e(ids)\n    "
        + FORWARDS[case].replace("\n", "\n    ")
        + "\n    return self.h(x)"
    )
    model = generated_models.model(made, methods, f"import functools\n{SCOPE}")()
    model(torch.zeros(2, 8, dtype=torch.long))
    found = infer_roles(model)
    for name in ("root.h0.w", "root.h1.w"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason
        view = found[name].view
        assert view is not None
        assert view.transposed


def test_no_operator_is_run(generated_models: ModuleType) -> None:
    """An operator that would make a child where there is none makes none when a model is read."""
    made = "self.e, self.h, self.root = nn.Embedding(50, 16), nn.Linear(16, 50), Scope(1)"
    methods = (
        "def forward(self, ids):\n    x = layer(self.root / 'h0', self.e(ids))\n"
        "    return self.h(layer(self.root / 'other', x))"
    )
    model = generated_models.model(made, methods, SCOPE)()
    found = infer_roles(model)
    assert list(model.root._modules) == ["h0"]
    assert (found["root.h0.w"].role, type(model.root).made) == (Role.MATRIX, 0)


ARGUMENTS = {  # how a forward of any arguments hands them on
    "a function": "return apply_to(self, *args)",
    "a static method": "return self.static(self, *args)",
    "of the class": "return type(self).static(self, *args)",
    "a method": "return self.method(*args)",
    "a lambda": "return (lambda table, ids: self.h(torch.cat([self.e(table), self.p[ids]], -1)))(*args)",
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_any_number(generated_models: ModuleType, case: str) -> None:
    """Each argument of what is called with all that a forward is given is something that it is given."""
    made = (
        "self.e, self.p = nn.Embedding(50, 16), nn.Parameter(torch.randn(9, 20))\nself.h = nn.Linear(36, 50)"
    )
    both = "self.h(torch.cat([self.e(one), self.p[two]], -1))"
    methods = (
        f"@staticmethod\ndef static(self, one, two):\n    return {both}\n"
        f"def method(self, one, two):\n    return {both}\n"
        f"def forward(self, *args):\n    {ARGUMENTS[case]}"
    )
    function = f"def apply_to(self, one, two):\n    return {both}\n"
    model = generated_models.model(made, methods, function)()
    model(*torch.zeros(2, 2, 8, dtype=torch.long))
    found = infer_roles(model)
    assert (found["p"].role, found["p"].doubt) == (Role.EMBEDDING, Doubt.NONE)
    assert (found["h.weight"].role, found["h.weight"].doubt) == (Role.OUTPUT, Doubt.NONE)
