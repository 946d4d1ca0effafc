"""Outputs and layers that a forward keeps in lists, dictionaries and functions are followed through them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = "self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 7)"
KEPT = {  # ways to keep what a head returns until the end; `y` is what it returns
    "a list in a dictionary": "kept = {'a': []}\nfor x in xs:\n    kept['a'].append(Y)\nreturn torch.cat(kept['a'])",
    "lists by key": "kept = {key: [] for key in ('a', 'b')}\nfor x in xs:\n    for key in kept:\n"
    "        kept[key].append(Y)\nreturn {key: torch.stack(all) for key, all in kept.items()}",
    "a list in a list": "kept = [[], []]\nfor x in xs:\n    kept[0].append(Y)\nreturn torch.cat(kept[0])",
    "some list in a list": "kept = [[] for _ in range(2)]\nfor i, x in enumerate(xs):\n    kept[i % 2].append(Y)\n"
    "return [torch.stack(some) for some in kept]",
    "lists in two": "kept = {'a': [[]]}\nfor x in xs:\n    kept['a'][0].append(Y)\nreturn torch.cat(kept['a'][0])",
    "a dictionary of defaults": "from collections import defaultdict\nkept = defaultdict(list)\nfor x in xs:\n"
    "    kept['a'].append(Y)\nreturn torch.cat(kept['a'])",
    "a default of its own": "kept = {}\nfor x in xs:\n    kept.setdefault('a', []).append(Y)\n"
    "return torch.cat(kept['a'])",
    "extended": "kept = {'a': []}\nkept['a'].extend([Y for x in xs])\nreturn torch.stack(kept['a'])",
    "an argument `out`": "result, x = xs.new_zeros(3, 7), xs\ntorch.add(result, Y, out=result)\nreturn result",
}
TAKEN = {  # ways to take layers
    "two lambdas in a line": ("self.steps = [lambda x: self.a(x).relu(), lambda x: self.b(x).tanh()]",
                              "for step in self.steps:\n    x = step(x)\nreturn self.head(x)"),
    "lambdas in a dictionary": ("self.steps = {\n    1: lambda x: self.a(x).relu(),\n    2: lambda x: self.b(x),\n}",
                                "for key in self.steps:\n    x = self.steps[key](x)\nreturn self.head(x)"),
    "a part of an iterator": ("import itertools",
                              "import itertools\nfor layer in itertools.islice([self.a, self.b], 2):\n"
                              "    x = layer(x).relu()\nreturn self.head(x)"),
    "pairs in one row": ("import itertools",
                         "import itertools\nfor layer in itertools.chain.from_iterable(zip([self.a], [self.b])):\n"
                         "    x = layer(x).relu()\nreturn self.head(x)"),
    "lists in one row": ("self.pairs = [(self.a, self.b)]",
                         "for layer in sum(map(list, self.pairs), []):\n    x = layer(x).relu()\nreturn self.head(x)"),
    "called by their class": ("self.layers = [self.a, self.b]",
                              "for layer in self.layers:\n    x = nn.Module.__call__(layer, x).relu()\n"
                              "return self.head(x)"),
    "a list of a list": ("self.groups = nn.ModuleList([nn.ModuleList([self.a]), nn.ModuleList([self.b])])",
                         "for i in range(2):\n    found = [[], []]\n    found[i].append(self.groups[i][0](x).relu())\n"
                         "    x = found[i][-1]\nreturn self.head(x)"),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_what_containers_keep(generated_models: ModuleType, case: str) -> None:
    """A head is one also where its output waits in a list inside of something else."""
    forward = KEPT[case].replace("Y", "self.head(self.hidden(x).relu())")
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(MADE, "xs", forward)())
    told = {name: (found[name].role, found[name].doubt) for name in ("hidden.weight", "head.weight")}
    assert told == {"hidden.weight": (Role.MATRIX, Doubt.NONE), "head.weight": (Role.OUTPUT, Doubt.NONE)}


@pytest.mark.parametrize("case", TAKEN)
def test_layers_that_are_taken_from_containers(generated_models: ModuleType, case: str) -> None:
    """A layer that a function or an iterator hands out takes what the one before made."""
    made, forward = TAKEN[case]
    made = f"self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 7)\n{made}"
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "x", forward)())
    hidden = {(found[f"{name}.weight"].role, found[f"{name}.weight"].doubt) for name in "ab"}
    assert hidden == {(Role.MATRIX, Doubt.NONE)}
    assert (found["head.weight"].role, found["head.weight"].doubt) == (Role.OUTPUT, Doubt.NONE)


def test_a_forward_that_calls_itself_something_else(generated_models: ModuleType) -> None:
    """`super()` is the parent of the first argument, whatever that is called."""
    child = generated_models.module(
        """
        class Parent(nn.Module):
            def __init__(this):
                super().__init__()
                this.a, this.head = nn.Linear(6, 8), nn.Linear(8, 7)

            def forward(this, x):
                return this.a(x).relu()

        class Model(Parent):
            def forward(this, x):
                return this.head(super().forward(x))
        """
    )
    with torch.device("meta"):
        found = infer_roles(child())
    assert (found["a.weight"].role, found["a.weight"].doubt) == (Role.MATRIX, Doubt.NONE)


def test_defaults_stay_as_they_are(generated_models: ModuleType) -> None:
    """A list that is the default of an argument is not put anything into while it is read."""
    methods = (
        "def collect(self, y, kept=[], *, more={'a': []}):\n"
        "    kept.append(y)\n    more['a'].append(y)\n    return kept\n"
        "def forward(self, x):\n    return self.collect(self.head(self.hidden(x).relu()))[-1]"
    )
    kind: Any = generated_models.model(MADE, methods)
    with torch.device("meta"):
        infer_roles(kind())
    assert kind.collect.__defaults__ == ([],)
    assert kind.collect.__kwdefaults__ == {"more": {"a": []}}
