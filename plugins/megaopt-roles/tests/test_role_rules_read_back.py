"""Heads whose output other layers take as well, or that stand beside features: never a matrix that is certain."""

import textwrap

import pytest
import torch

from megaopt_core.params import Role
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

BODY = "self.body, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)"
FEATURES = "h = self.norm(self.body(x)).relu()"
BOXES = (
    BODY
    + "\nself.box = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(2)])"
    "\nself.bins = nn.Conv1d(8, 1, 1, bias=False).requires_grad_(False)"
)
REFINED = (
    BODY + "\nself.coarse, self.a, self.b = nn.Linear(32, 5), nn.Linear(5, 7), nn.Linear(7, 5)"
    "\nself.last = nn.LayerNorm(5)"
)
CASES = {  # how it is made, its forward, the heads, the hidden matrices that must be certain
    "a coarse prediction that the fine one sees": (
        BODY + "\nself.coarse, self.up, self.fine = nn.Linear(32, 4), nn.Linear(4, 32), nn.Linear(32, 4)",
        f"{FEATURES}\ny = self.coarse(h)\nreturn self.fine((h + self.up(y)).relu()), y",
        ("coarse.weight", "fine.weight"),
        ("body.weight", "up.weight"),
    ),
    "a prediction that is refined": (
        BODY + "\nself.coarse, self.up, self.fine = nn.Linear(32, 4), nn.Linear(4, 32), nn.Linear(32, 4)",
        f"{FEATURES}\ny = self.coarse(h)\nreturn y + self.fine((h + self.up(y)).relu())",
        ("coarse.weight", "fine.weight"),
        ("body.weight", "up.weight"),
    ),
    "logits that a matrix of classes mixes": (
        BODY + "\nself.head, self.mix = nn.Linear(32, 50), nn.Linear(50, 50)",
        f"{FEATURES}\ny = self.head(h)\nreturn y + self.mix(torch.tanh(y))",
        ("head.weight", "mix.weight"),
        ("body.weight",),
    ),
    "a second task that sees the first": (
        BODY + "\nself.intent, self.slot = nn.Linear(32, 5), nn.Linear(37, 9)",
        f"{FEATURES}\ny = self.intent(h)\nreturn y, self.slot(torch.cat([h, y], -1))",
        ("intent.weight", "slot.weight"),
        ("body.weight",),
    ),
    "heat maps that the next stage takes": (
        "self.body, self.back = nn.Conv2d(3, 32, 3), nn.Conv2d(17, 32, 1)\n"
        "self.maps = nn.ModuleList([nn.Conv2d(32, 17, 1), nn.Conv2d(32, 17, 1)])",
        "h, found = self.body(x).relu(), []\nfor head in self.maps:\n    found.append(head(h))\n"
        "    h = h + self.back(found[-1])\nreturn found",
        ("maps.0.weight", "maps.1.weight"),
        ("body.weight",),
    ),
    "boxes that a fixed sum reads in inference": (
        BOXES,
        f"{FEATURES}\nb = torch.cat([box(h) for box in self.box], -1)\nif self.training:\n    return {{'boxes': b}}\n"
        "return self.bins(b.view(-1, 8, 8).transpose(1, 2).softmax(1))",
        ("box.0.1.weight", "box.1.1.weight"),
        ("body.weight", "box.0.0.weight", "box.1.0.weight"),
    ),
    "a prediction beside its refinement behind a norm": (
        REFINED,
        f"{FEATURES}\ny = self.coarse(h)\nreturn y, self.last(self.b(torch.tanh(self.a(y)))) + y",
        ("coarse.weight", "b.weight"),
        ("body.weight", "a.weight"),
    ),
    "a prediction beside another one behind a norm": (
        REFINED,
        f"{FEATURES}\ny = self.coarse(h)\nreturn y, self.last(self.b(torch.tanh(self.a(y))))",
        ("coarse.weight", "b.weight"),
        ("body.weight", "a.weight"),
    ),
    "one of two branches calls the head, the other one again": (
        "self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 5)",
        "h = self.body(x).relu()\ny = self.head(h) if more is None else h\n"
        "if more is not None:\n    y = self.head(torch.cat([y, more], -1))\nreturn y.sigmoid()",
        ("head.weight",),
        (),
    ),
    "a table of logits beside the head": (
        "self.pairs, self.table = nn.Embedding(50, 50), nn.Embedding(50, 32)\n"
        "self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 50)",
        "return self.pairs(x) + self.head(self.body(self.table(x)).relu())",
        ("head.weight",),
        ("body.weight",),
    ),
    "logits of the round before, none in the first": (
        "self.table, self.back = nn.Embedding(50, 32), nn.Linear(50, 32)\n"
        "self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 50)",
        "h, y = self.table(x), None\nfor _ in range(3):\n    if y is not None:\n        h = h + self.back(y)\n"
        "    y = self.head(self.body(h).relu())\nreturn y",
        ("head.weight",),
        ("body.weight",),
    ),
    "features and coefficients side by side": (
        BODY + "\nself.coef = nn.Linear(32, 32)",
        f"{FEATURES}\nreturn torch.cat([h, self.coef(h)], -1)",
        ("coef.weight",),
        ("body.weight",),
    ),
    "an ensemble of stacks, as wide as the input": (
        "self.first = nn.Parameter(torch.zeros(5, 17, 64))\nself.last = nn.Parameter(torch.zeros(5, 64, 17))",
        "h = torch.einsum('bi,eih->ebh', x, self.first).relu()\nreturn torch.einsum('ebh,eho->ebo', h, self.last)",
        ("last",),
        ("first",),
    ),
    "a stack that one round hands to the next": (
        "self.first, self.weight = nn.Parameter(torch.zeros(2, 32, 5)), nn.Parameter(torch.zeros(2, 5, 5))\n"
        "self.root = nn.Parameter(torch.zeros(2, 32, 5))",
        "x = x.unsqueeze(-3)\ny = x\nfor t in range(2):\n    y = (y @ self.first if t == 0 else y @ self.weight)\n"
        "    y = y + x @ self.root\nreturn y.mean(-3)",
        ("root",),
        (),
    ),
    "a copy of what attention chooses": (
        BODY + "\nself.head, self.q, self.k = nn.Linear(32, 50), nn.Linear(32, 16), nn.Linear(32, 16)",
        f"{FEATURES}\nscores = (self.q(h) @ self.k(h).transpose(-1, -2)).softmax(-1)\n"
        "return self.head(h) + scores @ F.one_hot(more, 50).float()",
        ("head.weight", "q.weight", "k.weight"),
        ("body.weight",),
    ),
}
SCALES = {  # entry by entry
    "of a weight": (
        "self.weight, self.scale = nn.Parameter(torch.zeros(32, 8)), nn.Parameter(torch.ones(32, 8))\n"
        "self.head = nn.Linear(32, 5)",
        "return self.head(F.linear(x, self.weight * self.scale).relu())",
        ("scale",),
        (),
    ),
    "of noise": (
        "self.mean, self.spread = nn.Parameter(torch.zeros(32, 8)), nn.Parameter(torch.ones(32, 8))\n"
        "self.register_buffer('noise', torch.zeros(32, 8))\nself.head = nn.Linear(32, 5)",
        "return self.head(F.linear(x, self.mean + self.spread * self.noise).relu())",
        ("spread",),
        ("mean",),
    ),
    "by a mask that does not train": (
        "self.weight = nn.Parameter(torch.zeros(32, 8))\n"
        "self.mask = nn.Parameter(torch.ones(32, 8), requires_grad=False)\nself.head = nn.Linear(32, 5)",
        "return self.head(F.linear(x, self.weight * self.mask).relu())",
        ("mask",),
        ("weight",),
    ),
}


@pytest.mark.parametrize("case", {**CASES, **SCALES})
def test_what_may_be_a_head_is_no_certain_matrix(generated_models, case):
    """It is an output, element-wise, or doubtful; the layers before it are matrices, and certainly so."""
    made, forward, heads, hidden = {**CASES, **SCALES}[case]
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "x, more=None", forward)())
    for name in heads:
        assert found[name].role is not Role.MATRIX or found[name].doubt is Doubt.ROLE, found[name].reason
    for name in hidden:
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), (name, found[name].reason)


LAYERS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)
    def forward(self, x):
        return x + self.down(self.up(self.ln(x)).relu())

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(16, 16)
    def forward(self, x):
        return self.matrix(x).relu()

class Growing(nn.Sequential):
    def __init__(self):
        super().__init__(Layer(), Layer())
    def forward(self, x, found):
        for i, layer in enumerate(self):
            found.append(layer(x) if i == 0 else layer(found[-1]))
        return torch.cat(found, -1)
"""
AROUND = (
    "self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)\n"
    "self.blocks = nn.ModuleList([Block(), Block()])"
)
STREAMS = {  # how its blocks are called, its forward
    "a block by itself": ("", "for block in self.blocks:\n    x = block(x)"),
    "layers from one argument to another": (
        "",
        "for block in self.blocks[more:-1 if more is None else more + 2]:\n    x = block(x)",
    ),
    "numbered layers from one argument on": (
        "",
        "for i, block in list(zip(range(2), self.blocks))[more:]:\n    x = block(x)",
    ),
    "layers that add to a list that they are handed": (
        "self.grow, self.close = Growing(), nn.Linear(48, 16)",
        "found = [x]\nx = self.close(self.grow(x, found))\nfor block in self.blocks:\n    x = block(x)",
    ),
    "a token before the others": (
        "self.token = nn.Parameter(torch.zeros(1, 1, 16))",
        "x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)\nfor block in self.blocks:\n    x = block(x)",
    ),
    "layers that were told their type": (
        "",
        "from typing import cast\nfor block in self.blocks:\n    x = cast(nn.Module, block)(x)",
    ),
    "a mix of two that a layer weighs": (
        "self.share = nn.Linear(16, 1)",
        "first = x\nfor block in self.blocks:\n    x = torch.lerp(block(x), first, self.share(x).sigmoid())",
    ),
}


@pytest.mark.parametrize("case", STREAMS)
def test_what_adds_to_a_stream_stays_certain(generated_models, case):
    """Blocks that add to what they take are hidden, however they are called, and the model's head is its output."""
    made, forward = STREAMS[case]
    methods = (
        f"def forward(self, ids, more=None):\n    x = self.table(ids)\n{textwrap.indent(forward, ' ' * 4)}\n"
        "    return self.head(x)"
    )
    with torch.device("meta"):
        found = infer_roles(generated_models.model(f"{AROUND}\n{made}", methods, LAYERS)())
    assert [name for name, decision in found.items() if decision.uncertain] == []
    assert {found[f"blocks.{i}.{name}.weight"].role for i in (0, 1) for name in ("up", "down")} == {
        Role.MATRIX
    }
    assert found["head.weight"].role is Role.OUTPUT
