"""Outputs that a hook keeps, of a layer that may stand anywhere: what takes them later takes the layer's output."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

NETS = """
import functools

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(6, 16), Block(16), Block(16)
        self.turn, self.last = nn.Linear(16, 20), nn.Linear(20, 24)
    def forward(self, x):
        return self.last(self.turn(self.second(self.first(self.stem(x)))).relu())
"""
FLAT = (
    "self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 24), nn.ReLU())\nlayer = self.net[3]"
)
DEEP = "self.net = Backbone()\nlayer = self.net.last"
HOOKS = {  # how a hook is registered, the methods beside the forward, and where the output is found again
    "a method": (
        "layer.register_forward_hook(self.keep)",
        "def keep(self, module, given, made): self.kept = made.flatten(1)",
        "self.kept",
    ),
    "a name in a dictionary": (
        "self.kept = {}\nlayer.register_forward_hook(self.keep('a'))",
        "def keep(self, name):\n    def hook(module, given, made):\n        self.kept[name] = made\n    return hook",
        "self.kept['a']",
    ),
    "a method with a name": (
        "self.kept = {}\nlayer.register_forward_hook(functools.partial(self.keep, 'a'))",
        "def keep(self, name, module, given, made): self.kept[name] = made",
        "self.kept['a']",
    ),
    "with keyword arguments": (
        "layer.register_forward_hook(self.keep, with_kwargs=True)",
        "def keep(self, module, given, named, made): self.kept = made",
        "self.kept",
    ),
}


@pytest.mark.parametrize("net", [FLAT, DEEP], ids=["read on the spot", "inside of a network"])
@pytest.mark.parametrize("case", HOOKS)
def test_what_a_hook_keeps(generated_models: ModuleType, case: str, net: str) -> None:
    """The layer before is a hidden matrix, certainly, and what takes its output at the end is the head."""
    hook, methods, found_again = HOOKS[case]
    forward = f"def forward(self, x):\n    self.net(x)\n    return self.h(self.mix({found_again}).relu())"
    made = f"self.mix, self.h = nn.Linear(24, 12), nn.Linear(12, 5)\n{net}\n{hook}"
    model = generated_models.model(made, f"{methods}\n{forward}", NETS)()
    model(torch.randn(2, 6))
    found = infer_roles(model)
    layer = "net.2.weight" if net == FLAT else "net.last.weight"
    for name in (layer, "mix.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), (name, found[name].reason)
    assert (found["h.weight"].role, found["h.weight"].doubt) == (Role.OUTPUT, Doubt.NONE)


def test_what_a_hook_returns(generated_models: ModuleType) -> None:
    """It stands in place of the output: parts that it drops are no input of the next layer."""
    made = (
        "self.a, self.b, self.h = nn.Linear(6, 32), nn.Linear(16, 16), nn.Linear(16, 5)\n"
        "self.a.register_forward_hook(self.gated)"
    )
    methods = (
        "def gated(self, module, given, made):\n    gate, value = made.chunk(2, -1)\n"
        "    return gate.sigmoid() * value\n"
        "def forward(self, x):\n    return self.h(self.b(self.a(x)).relu())"
    )
    model = generated_models.model(made, methods)()
    model(torch.randn(2, 6))
    decision = infer_roles(model)["a.weight"]
    assert decision.view is not None
    assert (decision.view.split_sizes, decision.doubt) == ((16, 16), Doubt.NONE), decision


def test_a_hook_that_watches_changes_nothing(generated_models: ModuleType) -> None:
    """Blocks whose outputs are collected take the outputs of each other, not what the model is given."""
    before = (
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)\n"
        "    def forward(self, x):\n        return self.down(self.up(x).relu())\n"
        "class Body(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.stem, self.blocks = nn.Linear(6, 8), nn.Sequential(Block(), Block(), Block())\n"
        "    def forward(self, x):\n        return self.blocks(self.stem(x))\n"
        "def watched(model):\n    def watch(module, given, made):\n        model.seen.append(made)\n"
        "    for block in model.body.blocks:\n        block.register_forward_hook(watch)\n"
    )
    made = "self.body, self.h, self.seen = Body(), nn.Linear(8, 5), []"
    forward = "def forward(self, x):\n    return self.h(self.body(x))"
    plain = infer_roles(generated_models.model(made, forward, before)())
    found = infer_roles(generated_models.model(f"{made}\nwatched(self)", forward, before)())
    assert {name: (found[name].role, found[name].doubt) for name in found} == {
        name: (plain[name].role, plain[name].doubt) for name in plain
    }
    assert {found[f"body.blocks.{at}.down.weight"].role for at in range(3)} == {Role.MATRIX}
