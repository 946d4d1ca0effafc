"""Stages that read from a dictionary, and put more into it: each takes what an earlier one put there."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

PUTS = {  # how a stage returns what it made
    "spread": "return {**ctx, self.writes: made}",
    "zipped": "return {**ctx, **dict(zip([self.writes], (made,)))}",
    "united": "return ctx | {self.writes: made}",
    "set": "ctx[self.writes] = made\nreturn ctx",
    "updated": "ctx.update({self.writes: made})\nreturn ctx",
    "a larger one": "new = dict(ctx, **{self.writes: made})\nreturn new",
    "a tuple or not": (
        "made = made if isinstance(made, tuple) else (made,)\n"
        "return {**ctx, **dict(zip([self.writes], made))}"
    ),
}


@pytest.mark.parametrize("case", PUTS)
def test_stages_of_a_pipeline(generated_models: ModuleType, case: str) -> None:
    """Heads beside each other, which take one key, are outputs, and none of them feeds the next."""
    before = (
        "class Stage(nn.Module):\n    def __init__(self, reads, writes, *layers):\n        super().__init__()\n"
        "        self.reads, self.writes = reads.split(), writes\n        self.net = nn.Sequential(*layers)\n"
        "    def run(self, *values):\n        return self.net(torch.cat(values, -1))\n"
        "    def forward(self, ctx):\n        made = self.run(*[ctx[key] for key in self.reads])\n        "
        + PUTS[case].replace("\n", "\n        ")
        + "\ndef deep(*sizes):\n    for a, b in zip(sizes[:-1], sizes[1:]):\n        yield nn.Linear(a, b)\n"
        "        yield nn.ReLU()\n"
    )
    made = (
        "self.stages = nn.ModuleDict({'obs': Stage('x', 'e', *deep(30, 24, 14)),\n"
        "    'mix': Stage('e a', 'f', *deep(18, 25)),\n"
        "    'decoder': Stage('f', 'recon', *deep(25, 23), nn.Linear(23, 30)),\n"
        "    'reward': Stage('f', 'reward', *deep(25, 22), nn.Linear(22, 3))})"
    )
    methods = (
        "def forward(self, x, a):\n    ctx = {'x': x, 'a': a}\n    for stage in self.stages.values():\n"
        "        ctx = stage(ctx)\n    return {key: ctx[key] for key in ('recon', 'reward')}"
    )
    model = generated_models.model(made, methods, before)()
    model(torch.zeros(2, 30), torch.zeros(2, 4))
    found = infer_roles(model)
    assert [(name, one.reason) for name, one in found.items() if one.doubt is not Doubt.NONE] == []
    heads = {name for name, one in found.items() if one.role is Role.OUTPUT}
    assert heads == {"stages.decoder.net.2.weight", "stages.reward.net.2.weight"}


def test_sums_of_what_stages_predict(generated_models: ModuleType) -> None:
    """What each stage adds to a prediction is an output; what it takes off its input is not."""
    before = (
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc, self.back, self.forecast = nn.Linear(36, 24), nn.Linear(24, 36), nn.Linear(24, 9)\n"
        "    def forward(self, ctx):\n        h = self.fc(ctx['rest']).relu()\n"
        "        return {**ctx, 'rest': ctx['rest'] - self.back(h), 'sum': ctx['sum'] + self.forecast(h)}\n"
    )
    methods = (
        "def forward(self, x):\n    ctx = {'rest': x, 'sum': x[:, -1:].expand(-1, 9)}\n"
        "    for block in self.blocks:\n        ctx = block(ctx)\n    return ctx['sum']"
    )
    found = infer_roles(
        generated_models.model("self.blocks = nn.ModuleList(Block() for _ in range(3))", methods, before)()
    )
    for i in range(3):
        assert found[f"blocks.{i}.forecast.weight"].role is Role.OUTPUT
        assert found[f"blocks.{i}.fc.weight"].role is Role.MATRIX
