"""Layers that reach their call in other ways than by an attribute or a loop over a list: nothing is lost sight of."""

from types import ModuleType

import pytest
import torch
from torch import nn

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

BLOCKS = """
class Gate(nn.Module):
    def forward(self, x):
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value

def block():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 48), Gate(), nn.Linear(24, 16))

def those_of(model):
    for layer in model.layers:
        yield layer
"""
MADE = (
    "self.e, self.h = nn.Embedding(50, 16), nn.Linear(16, 50)\n"
    "self.layers = nn.ModuleList([block() for _ in range(3)])"
)
GENERATORS = {  # methods of the model: whatever yields its layers
    "some of them": (
        "def kept(self, p=0.9):\n    for layer in self.layers:\n"
        "        if not self.training or torch.rand(()) < p:\n            yield layer\n"
        "def forward(self, ids):\n    x = self.e(ids)\n    for layer in self.kept():\n        x = x + layer(x)\n"
        "    return self.h(x)"
    ),
    "with their number": (
        "def kept(self):\n    for i in range(len(self.layers)):\n        yield i, self.layers[i]\n"
        "def forward(self, ids):\n    x = self.e(ids)\n    for i, layer in self.kept():\n"
        "        x = x + layer(x) / (i + 1)\n    return self.h(x)"
    ),
    "from another": (
        "def kept(self):\n    yield from self.layers[:2]\n    yield self.layers[2]\n"
        "def forward(self, ids):\n    x = self.e(ids)\n    for layer in self.kept():\n        x = x + layer(x)\n"
        "    return self.h(x)"
    ),
    "a function of the module": (
        "def forward(self, ids):\n    x = self.e(ids)\n    for layer in list(those_of(self)):\n"
        "        x = x + layer(x)\n    return self.h(x)"
    ),
    "a nested function": (
        "def forward(self, ids):\n    def each():\n        for layer in self.layers:\n            yield layer\n"
        "    x = self.e(ids)\n    for i, layer in enumerate(each()):\n        x = x + layer(x)\n    return self.h(x)"
    ),
    "their outputs": (
        "def states(self, x):\n    for layer in self.layers:\n        x = x + layer(x)\n        yield x\n"
        "def forward(self, ids):\n    *_, last = self.states(self.e(ids))\n    return self.h(last)"
    ),
}


def _certain(model: nn.Module) -> dict[str, RoleDecision]:
    """Return the decisions for a model, of which none is in doubt, by name; its forward runs."""
    model(torch.zeros(2, 8, dtype=torch.long))
    found = infer_roles(model)
    assert [(name, one.reason) for name, one in found.items() if one.doubt is not Doubt.NONE] == []
    assert found["h.weight"].role is Role.OUTPUT
    return found


@pytest.mark.parametrize("case", GENERATORS)
def test_what_a_generator_yields(generated_models: ModuleType, case: str) -> None:
    """Every layer that it yields is called, and cut as it is."""
    found = _certain(generated_models.model(MADE, GENERATORS[case], BLOCKS)())
    for i in range(3):
        assert found[f"layers.{i}.1.weight"].view.split_sizes == (24, 24)
        assert found[f"layers.{i}.3.weight"].role is Role.MATRIX


OPTIONAL = (
    "self.e, self.a, self.h = nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(16, 50)\n"
    "self.back, self.mix, self.none = nn.Linear(24, 16), nn.Linear(16, 16), nn.Parameter(torch.zeros(SHAPE))"
)
ATTEND = (
    "def attend(self, x, context=None):\n    context = x if context is None else context\n"
    "    return self.mix(context).mean(1, keepdim=True)\n"
)
EITHER = {  # what a layer, which is called `made` before, takes or adds: its output, or a parameter
    "nothing given": "dense = self.none if more is None else made\nx = self.mix(x + dense)",
    "the other way round": "dense = made if more is not None else self.none\nx = self.mix(x + dense)",
    "a branch": "dense = self.none.expand(16)\nif more is not None:\n    dense = made\nx = self.mix(x + dense)",
    "one or the other": "dense = self.none if self.training else made\nx = self.mix(x + dense)",
    "a context": "x = x.mean(1, keepdim=True) + self.attend(self.none, made)",
    "a default": "x = self.mix(x + (made if flag else self.none))",
}


@pytest.mark.parametrize("case", EITHER)
def test_a_parameter_or_what_a_layer_made(generated_models: ModuleType, case: str) -> None:
    """Where either is used, what takes it takes the output of the layer, and the parameter is what it was."""
    methods = ATTEND if case == "a context" else ""
    methods += (
        "def forward(self, ids, more=None, flag=True):\n"
        "    x = self.e(ids)\n    made = self.back(self.a(x).relu())\n    "
        + EITHER[case].replace("\n", "\n    ")
        + "\n    return self.h(x)"
    )
    shape = "1, 3, 16" if methods.startswith(ATTEND) else "16"
    found = _certain(generated_models.model(OPTIONAL.replace("SHAPE", shape), methods)())
    assert (found["back.weight"].role, found["mix.weight"].role) == (Role.MATRIX, Role.MATRIX)
    assert found["none"].role is Role.ELEMENTWISE


METHODS = {  # how a method of two layers, by their names, is called with the names given before
    "by position": "both = functools.partialmethod(_both, 'a')\ndef forward(self, ids):\n",
    "by keyword": "both = functools.partialmethod(_both, name='a')\ndef forward(self, ids):\n",
    "in the forward": "def forward(self, ids):\n    self.both = functools.partial(self._both, 'a')\n",
    "a lambda of the class": "both = lambda self, x: self._both('a', x=x)\ndef forward(self, ids):\n",
}


@pytest.mark.parametrize("case", METHODS)
def test_arguments_given_before(generated_models: ModuleType, case: str) -> None:
    """The arguments that a method was given before its call tell which layers it calls."""
    made = "self.e, self.h = nn.Embedding(50, 16), nn.Linear(16, 50)\n" + "".join(
        f"self.{name}_up, self.{name}_down = nn.Linear(16, 24), nn.Linear(24, 16)\n" for name in "ab"
    )
    methods = (
        "def _both(self, name, x):\n    layer = lambda which: getattr(self, f'{name}_{which}')\n"
        f"    return x + layer('down')(layer('up')(x).relu())\n{METHODS[case]}"
        "    x = self.both(x=self.e(ids))\n    return self.h(self._both('b', x))"
    )
    found = _certain(generated_models.model(made, methods, "import functools\n")())
    roles = {found[f"{name}_{which}.weight"].role for name in "ab" for which in ("up", "down")}
    assert roles == {Role.MATRIX}


COUNTS = {  # how many layers there are, or the loop over them
    "a sum of conditions": "for i in range(sum(k.startswith('w') for k in p) - 1):",
    "a sum of ones": "for i in range(sum(1 for k in p if k[0] == 'w') - 1):",
    "a list": "for i in range(len([k for k in p if k.startswith('w')]) - 1):",
    "the largest number": "for i in range(max(int(k[1:]) for k in p)):",
    "as long as there are any": "i = -1\nwhile f'w{(i := i + 1) + 1}' in p:",
}


@pytest.mark.parametrize("case", COUNTS)
def test_numbers_of_layers_that_are_counted(generated_models: ModuleType, case: str) -> None:
    """Weights of a dictionary, whose names hold the numbers that are counted, are each what they are."""
    made = (
        "self.e, sizes = nn.Embedding(50, 16), (16, 20, 24, 50)\nself.p = nn.ParameterDict()\n"
        "for i, (a, b) in enumerate(zip(sizes, sizes[1:])):\n"
        "    self.p[f'w{i}'], self.p[f'b{i}'] = nn.Parameter(torch.randn(b, a)), nn.Parameter(torch.zeros(b))"
    )
    loop = COUNTS[case].replace("\n", "\n    ")
    methods = (
        f"def apply(self, p, x):\n    {loop}\n        x = F.silu(F.linear(x, p[f'w{{i}}'], p[f'b{{i}}']))\n"
        "    return F.linear(x, p['w2'], p['b2'])\n"
        "def forward(self, ids):\n    return self.apply(dict(self.p), self.e(ids))"
    )
    model = generated_models.model(made, methods)()
    model(torch.zeros(2, 8, dtype=torch.long))
    found = infer_roles(model)
    assert [(name, one.reason) for name, one in found.items() if one.doubt is not Doubt.NONE] == []
    roles = [found[f"p.w{i}"].role for i in range(3)]
    assert roles == [Role.MATRIX, Role.MATRIX, Role.OUTPUT]


CHOICES = {  # how one of two weights is chosen
    "an expression": "w = self.a if flag else self.b",
    "a branch": "w = self.a\nif self.training:\n    w = self.b",
    "both branches": "if flag is None:\n    w = self.a\nelse:\n    w = self.b",
    "one transposed": "w = (self.a if self.training else self.b).T.T",
    "a method": "w = self.chosen(flag)",
    "or": "w = self.a if flag else (self.b if self.training else self.a)",
}


@pytest.mark.parametrize("case", CHOICES)
def test_one_of_two_weights(generated_models: ModuleType, case: str) -> None:
    """A product with either is one with both: they are hidden matrices, and certainly so."""
    made = (
        "self.e, self.h = nn.Embedding(50, 16), nn.Linear(24, 50)\n"
        "self.a, self.b = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.randn(24, 16))"
    )
    methods = (
        "def chosen(self, flag):\n    if flag:\n        return self.a\n    return self.b\n"
        "def forward(self, ids, flag=True):\n    x = self.e(ids)\n    "
        + CHOICES[case].replace("\n", "\n    ")
        + "\n    return self.h(F.linear(x, w).relu())"
    )
    found = _certain(generated_models.model(made, methods)())
    assert {found[name].role for name in "ab"} == {Role.MATRIX}
