"""Heads wherever a model may have them: never a matrix that is certain; what is hidden stays certain."""

import sys
import textwrap

import pytest
import torch

from megaopt_core.params import Role
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

COMMON = """
class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.ln(x))))

class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.norm = nn.Embedding(100, 16), nn.LayerNorm(16)
        self.blocks = nn.ModuleList([Block(), Block()])
    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

def apply_head(model, x):
    return model.head(x)
"""
HEAD = "self.body, self.head = Body(), nn.Linear(16, 100, bias=False)"
HIDDEN = ("body.blocks.0.up.weight", "body.blocks.1.down.weight")
CASES = {  # how it is made, its methods, the heads, the hidden matrices that must be certain
    "loss method": (
        HEAD,
        "def forward(self, ids): return self.body(ids)\n"
        "def loss(self, ids, t): return F.cross_entropy(self.head(self(ids)).flatten(0, 1), t)",
        ("head.weight",),
        HIDDEN,
    ),
    "weight in another method": (
        HEAD,
        "def forward(self, ids): return self.body(ids)\n"
        "def logits(self, hidden): return hidden @ self.head.weight.T",
        ("head.weight",),
        HIDDEN,
    ),
    "property": (
        HEAD,
        "@property\ndef kernel(self): return self.head.weight\n"
        "def forward(self, ids): return F.linear(self.body(ids), self.kernel)",
        ("head.weight",),
        HIDDEN,
    ),
    "alias of a function": (
        HEAD,
        "def forward(self, ids, t):\n    loss = FusedLoss.apply\n"
        "    return loss(self.body(ids), self.head.weight, t)",
        ("head.weight",),
        HIDDEN,
    ),
    "function as attribute": (
        HEAD + "\nself.loss = FusedLoss.apply",
        "def forward(self, ids, t): return self.loss(self.body(ids), self.head.weight, t)",
        ("head.weight",),
        HIDDEN,
    ),
    "in a list": (
        HEAD + "\nself.__dict__['hidden'] = [self.head]",
        "def forward(self, ids): return self.hidden[0](self.body(ids))",
        ("head.weight",),
        HIDDEN,
    ),
    "heads by task": (
        "self.body = Body()\nself.heads = nn.ModuleDict({'a': nn.Linear(16, 7), 'b': nn.Linear(16, 16)})",
        "def forward(self, ids, task): return self.heads[task](self.body(ids))",
        ("heads.a.weight", "heads.b.weight"),
        HIDDEN,
    ),
    "heads of all tasks": (
        "self.body = Body()\nself.heads = nn.ModuleDict({'a': nn.Linear(16, 7), 'b': nn.Linear(16, 16)})",
        "def forward(self, ids):\n    x = self.body(ids)\n"
        "    return {name: head(x) for name, head in self.heads.items()}",
        ("heads.a.weight", "heads.b.weight"),
        HIDDEN,
    ),
    "several tokens ahead": (
        "self.body, self.head = Body(), nn.Linear(16, 100)\n"
        "self.steps = nn.ModuleList([nn.Linear(32, 16) for _ in range(2)])",
        "def forward(self, ids):\n    x = self.body(ids)\n    found = [self.head(x)]\n"
        "    for step in self.steps:\n        x = step(torch.cat([x, self.body.wte(ids)], -1))\n"
        "        found.append(self.head(x))\n    return found",
        ("head.weight",),
        ("steps.0.weight", "steps.1.weight"),
    ),
    "as wide as the model": (
        "self.body, self.head = Body(), nn.Linear(16, 16)",
        "def forward(self, ids): return self.head(self.body(ids))",
        ("head.weight",),
        HIDDEN,
    ),
    "as wide as a norm": (
        "self.c, self.n, self.d, self.m = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 32, 3), "
        "nn.BatchNorm2d(32)\nself.fc = nn.Linear(32, 64)",
        "def forward(self, x):\n    x = F.relu(self.n(self.c(x)))\n"
        "    return self.fc(F.relu(self.m(self.d(x))).mean((2, 3)))",
        ("fc.weight",),
        ("c.weight", "d.weight"),
    ),
    "beside what comes through": (
        "self.c, self.n, self.box, self.kind = nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.Conv2d(24, 24, 1), "
        "nn.Conv2d(24, 91, 1)",
        "def forward(self, images):\n    x = F.relu(self.n(self.c(torch.stack(images))))\n"
        "    return {'boxes': self.box(x), 'kinds': self.kind(x), 'images': images}",
        ("box.weight", "kind.weight"),
        ("c.weight",),
    ),
    "before a norm": (
        HEAD + "\nself.last = nn.LayerNorm(100)",
        "def forward(self, ids): return self.last(self.head(self.body(ids)))",
        ("head.weight",),
        HIDDEN,
    ),
    "a stack, by task": (
        "self.body, self.heads = Body(), nn.Parameter(torch.zeros(4, 16, 100))",
        "def forward(self, ids, task): return self.body(ids) @ self.heads[task]",
        ("heads",),
        HIDDEN,
    ),
    "a stack at once": (
        "self.body, self.heads = Body(), nn.Parameter(torch.zeros(4, 100, 16))",
        "def forward(self, ids): return torch.einsum('btd,hvd->bthv', self.body(ids), self.heads)",
        ("heads",),
        HIDDEN,
    ),
    "row by row": (
        "self.body, self.head = Body(), nn.Parameter(torch.zeros(100, 16))",
        "def forward(self, ids):\n    x = self.body(ids)[0, 0]\n"
        "    return torch.stack([torch.dot(x, row) for row in self.head])",
        ("head",),
        HIDDEN,
    ),
    "a subclass that calls super": (
        "self.body, self.head = Body(), Scaled(16, 100)",
        "def forward(self, ids): return self.head(self.body(ids))",
        ("head.weight",),
        HIDDEN,
    ),
    "a class without a module": (
        "self.body, self.head = Body(), type('Own', (nn.Linear,), {})(16, 100)",
        "def forward(self, ids): return self.head(self.body(ids))",
        ("head.weight",),
        HIDDEN,
    ),
    "a function of its own": (
        HEAD,
        "def forward(self, ids): return apply_head(self, self.body(ids))",
        ("head.weight",),
        HIDDEN,
    ),
    "yielded": (
        HEAD,
        "def forward(self, ids):\n    for x in self.body(ids).split(1):\n        yield self.head(x)",
        ("head.weight",),
        HIDDEN,
    ),
    "matched": (
        HEAD,
        "def forward(self, ids, how='a'):\n    x = self.body(ids)\n    match how:\n"
        "        case 'a': return self.head(x)\n        case _: return x",
        ("head.weight",),
        HIDDEN,
    ),
    "fed back": (
        HEAD,
        "def forward(self, ids):\n    while True:\n        logits = self.head(self.body(ids))\n"
        "        ids = logits.argmax(-1)\n        if ids.sum() > 3:\n            return logits",
        ("head.weight",),
        HIDDEN,
    ),
    "kept in the module": (
        HEAD,
        "def forward(self, ids):\n    self.logits = self.head(self.body(ids))\n    return self.loss()\n"
        "def loss(self): return self.logits.logsumexp(-1).mean()",
        ("head.weight",),
        HIDDEN,
    ),
    "tied behind a layer": (
        "self.body, self.turn = Body(), nn.Linear(16, 16)",
        "def forward(self, ids): return F.linear(self.turn(self.body(ids)), self.body.wte.weight)",
        ("body.wte.weight",),
        (*HIDDEN, "turn.weight"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_heads_anywhere(generated_models, case):
    """A head is an output, a table, or doubtful; the layers before it are matrices, and certainly so."""
    made, methods, heads, hidden = CASES[case]
    with torch.device("meta"):
        model = generated_models.model(made, methods, COMMON)()
    found = infer_roles(model)
    for name in heads:
        assert found[name].role is not Role.MATRIX or found[name].doubt is Doubt.ROLE, found[name].reason
    for name in hidden:
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason


WORDS = {  # how it is made, its forward: the head is certain
    "an import in the forward": (HEAD, "import operator\nreturn operator.matmul(x, self.head.weight.T)"),
    "a name imported in the forward": (
        HEAD,
        "from torch.nn.functional import linear as apply\nreturn apply(x, self.head.weight)",
    ),
    "a module imported under another name": (
        HEAD,
        "import torch.nn.functional as ops\nreturn ops.linear(x, self.head.weight)",
    ),
    "a dictionary that another is added to": (
        HEAD,
        "found = {'hidden': x}\nfound |= {'logits': self.head(x)}\nreturn found['logits']",
    ),
    "a scan": (
        "import torch._higher_order_ops.associative_scan\n"
        + HEAD
        + "\nself.decay = nn.Parameter(torch.zeros(8, 16))",
        "from torch._higher_order_ops.associative_scan import associative_scan\n"
        "def combine(left, right): return left[0] * right[0], right[0] * left[1] + right[1]\n"
        "_, x = associative_scan(combine, (self.decay * x, x), dim=1, combine_mode='generic')\n"
        "return self.head(x)",
    ),
    "layers of a list and one more": (
        HEAD + "\nself.turns = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])",
        "for layer in [*self.turns, self.head]:\n    x = layer(x)\nreturn x",
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_what_python_writes_in_several_ways_is_read_alike(generated_models, case):
    """Imports inside of a forward, unions of dictionaries and starred layers leave no doubt."""
    made, forward = WORDS[case]
    methods = f"def forward(self, ids):\n    x = self.body(ids)\n{textwrap.indent(forward, ' ' * 4)}"
    with torch.device("meta"):
        model = generated_models.model(made, methods, COMMON)()
        if case != "a scan":  # torch runs it in a compiled graph
            model(torch.zeros(2, 8, dtype=torch.long))
    found = infer_roles(model)
    assert (found["head.weight"].role, found["head.weight"].doubt) == (Role.OUTPUT, Doubt.NONE)
    doubtful = [name for name, decision in found.items() if decision.uncertain]
    assert doubtful == []


def test_an_import_in_a_forward_imports_nothing(generated_models):
    """A module that nobody has imported stays unknown, and is not loaded to be looked at."""
    forward = (
        "def forward(self, ids):\n    import this\n    from . import absent\n"
        "    return this.apply(absent, self.head(self.body(ids)))"
    )
    with torch.device("meta"):
        model = generated_models.model(HEAD, forward, COMMON)()
    found = infer_roles(model)
    assert "this" not in sys.modules
    assert found["head.weight"].role is not Role.MATRIX or found["head.weight"].doubt is Doubt.ROLE


RETURNED = {  # what is returned beside the output of the last projection; whether the input is added to it
    "an object": ("Output(sample=out, cache=x)", False),
    "an object or a tuple": ("Output(sample=out, cache=x) if self.training else (out, x)", False),
    "an object with a sum": ("Output(sample=x + out, cache=x)", True),
}


@pytest.mark.parametrize("case", RETURNED)
def test_what_is_returned_beside_an_output_is_not_added_to_it(generated_models, case):
    """A projection to the width of the input is a head, or doubtful, unless its output is added to the input."""
    returned, added = RETURNED[case]
    source = f"""{COMMON}
import dataclasses

@dataclasses.dataclass
class Output:
    sample: torch.Tensor
    cache: torch.Tensor

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.block, self.norm = nn.Linear(24, 16), Block(), nn.LayerNorm(24)
        self.out = nn.Linear(16, 24)
    def forward(self, x):
        out = self.out(self.block(self.into(x)))
        return {returned}
"""
    with torch.device("meta"):
        model = generated_models.module(source)()
        model(torch.zeros(2, 8, 24))
    found = infer_roles(model)["out.weight"]
    assert ((found.role, found.doubt) == (Role.MATRIX, Doubt.NONE)) is added, found.reason


CHOSEN = {  # how layers are held, and a loop over them of which nobody knows the order
    "parts of a layer": (
        "self.layers = nn.ModuleList([nn.ModuleList([nn.LayerNorm(16), Block()]) for _ in range(2)])",
        "for norm, block in [self.layers[i] for i in order]:\n    x = x + block(norm(x))",
    ),
    "columns of several lists": (
        "self.skips = nn.ModuleList([None, None])\n"
        "self.layers = nn.ModuleList([nn.ModuleList([nn.LayerNorm(16), Block()]) for _ in range(2)])",
        "columns = tuple(tuple(column[i] for i in order) for column in (self.skips, self.layers))\n"
        "for skip, (norm, block) in zip(*columns):\n"
        "    if skip is not None:\n        x = skip(x)\n"
        "    x = x + block(norm(x))",
    ),
    "stages of layers, by two indices": (
        "self.layers = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])",
        "for i, j in order:\n    x = self.layers[i][j](x)",
    ),
    "stages of layers, in a loop": (
        "self.layers = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])",
        "for i in order:\n    for block in self.layers[i]:\n        x = block(x)",
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_layers_of_which_the_order_is_an_argument_are_all_followed(generated_models, case):
    """No layer is in doubt because another may come in its place."""
    made, loop = CHOSEN[case]
    methods = (
        f"def forward(self, ids, order):\n    x = self.body(ids)\n{textwrap.indent(loop, ' ' * 4)}\n"
        "    return self.head(x)"
    )
    with torch.device("meta"):
        model = generated_models.model(f"{HEAD}\n{made}", methods, COMMON)()
    found = infer_roles(model)
    matrices = [name for name in found if name.endswith(("up.weight", "down.weight"))]
    assert len(matrices) > 6
    for name in matrices:
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), (name, found[name].reason)
    assert (found["head.weight"].role, found["head.weight"].doubt) == (Role.OUTPUT, Doubt.NONE)


class Adaptive(torch.nn.Module):
    """Ends in torch's adaptive softmax, of two tails."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = torch.nn.Embedding(100, 16), torch.nn.Linear(16, 16)
        self.softmax = torch.nn.AdaptiveLogSoftmaxWithLoss(16, 100, [20, 50], div_value=2.0)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.softmax(self.hidden(self.table(ids)).flatten(0, 1), target.flatten()).loss


def test_adaptive_softmax():
    """Its head and the last projection of each tail are outputs; what makes their inputs smaller is hidden."""
    found = infer_roles(Adaptive())
    outputs = {name for name, decision in found.items() if decision.role is Role.OUTPUT}
    assert outputs == {"softmax.head.weight", "softmax.tail.0.1.weight", "softmax.tail.1.1.weight"}
    assert not any(decision.uncertain for decision in found.values())
    assert found["softmax.tail.0.0.weight"].role is found["hidden.weight"].role is Role.MATRIX
