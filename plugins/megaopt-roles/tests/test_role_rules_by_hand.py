"""Heads and tables that are used by hand: never a matrix that is certain."""

import functools
import importlib.util
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from megaopt_core.params import Role, RoleDecision
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

_spec = importlib.util.spec_from_file_location(
    "generated_models", Path(__file__).with_name("generated_models.py")
)
assert _spec is not None
assert _spec.loader is not None
generated = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generated)

PRODUCTS = {  # x [b, t, 16], w [100, 16]
    "linear": "F.linear(x, {w})",
    "linear by keyword": "F.linear(input=x, weight={w})",
    "T": "x @ {w}.T",
    "mT": "x @ {w}.mT",
    "t()": "x @ {w}.t()",
    "transpose": "x @ {w}.transpose(0, 1)",
    "matmul": "torch.matmul(x, {w}.transpose(-1, -2))",
    "method matmul": "x.matmul({w}.T)",
    "einsum": "torch.einsum('btd,vd->btv', x, {w})",
    "einsum with ...": "torch.einsum('...d,vd->...v', x, {w})",
    "tensordot": "torch.tensordot(x, {w}, dims=([2], [1]))",
    "tensordot 1": "torch.tensordot(x, {w}.T, 1)",
    "inner": "torch.inner(x, {w})",
    "multi_dot": "torch.linalg.multi_dot([x.flatten(0, 1), {w}.T])",
    "mm": "torch.mm(x.view(-1, 16), {w}.t())",
    "addmm": "torch.addmm(torch.zeros(100), x.view(-1, 16), {w}.t())",
    "scaled_mm": "torch._scaled_mm(x.view(-1, 16), {w}.t(), torch.ones(()), torch.ones(()))",
    "aten.linear": "torch.ops.aten.linear.default(x, {w})",
    "aten.mm": "torch.ops.aten.mm.default(x.view(-1, 16), torch.ops.aten.t.default({w}))",
    "aten.matmul": "torch.ops.aten.matmul(x, torch.ops.aten.permute.default({w}, [1, 0]))",
    "cast": "F.linear(x.float(), {w}.float())",
    "normalized": "F.linear(F.normalize(x, dim=-1), F.normalize({w}, dim=-1))",
}
ENDS = {
    "logits": ("return {product}",),
    "loss": ("return F.cross_entropy(({product}).view(-1, 100), target.view(-1))",),
    "loss or logits": (
        "logits = {product}",
        "if target is None:",
        "    return logits",
        "return logits, F.cross_entropy(logits.view(-1, 100), target.view(-1))",
    ),
    "chunked loss": (
        "losses = []",
        "for x in x.split(4, dim=1):",
        "    losses.append(F.cross_entropy(({product}).view(-1, 100), target.view(-1)))",
        "return sum(losses)",
    ),
    "checkpointed": (
        "def head(x):",
        "    return {product}",
        "return torch.utils.checkpoint.checkpoint(head, x, use_reentrant=False)",
    ),
}
WEIGHTS = {
    # how it is made, how ids become features, how it is named, what it is
    "bare tied": ("self.wte = nn.Parameter(torch.zeros(100, 16))", "self.wte[ids]", "wte", Role.EMBEDDING),
    "bare tied, F.embedding": (
        "self.wte = nn.Parameter(torch.zeros(100, 16))",
        "F.embedding(ids, self.wte)",
        "wte",
        Role.EMBEDDING,
    ),
    "bare head": (
        "self.wte = nn.Embedding(100, 16)\nself.head = nn.Parameter(torch.zeros(100, 16))",
        "self.wte(ids)",
        "head",
        Role.OUTPUT,
    ),
    "head's weight": (
        "self.wte = nn.Embedding(100, 16)\nself.lm_head = nn.Linear(16, 100, bias=False)",
        "self.wte(ids)",
        "lm_head.weight",
        Role.OUTPUT,
    ),
    "table's weight": ("self.wte = nn.Embedding(100, 16)", "self.wte(ids)", "wte.weight", Role.EMBEDDING),
}
HIDDEN = ("up.weight", "down.weight")


def decided(model: Callable[[], nn.Module]) -> dict[str, RoleDecision]:
    """Return the decisions about the weights of a model."""
    with torch.device("meta"):
        made = model()
    return infer_roles(made)


@pytest.mark.parametrize(
    ("product", "end"), [*((product, "logits") for product in PRODUCTS), *(("linear", end) for end in ENDS)]
)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_heads_by_hand(weight, product, end):
    """A head or a tied table is what it is, whichever product uses it; the hidden layers stay certain matrices."""
    parts, embed, name, role = WEIGHTS[weight]
    result = [line.format(product=PRODUCTS[product].format(w=f"self.{name}")) for line in ENDS[end]]
    found = decided(generated.language_model(parts, embed, *result))
    assert (found[name].role, found[name].uncertain) == (role, False), found[name].reason
    assert [(found[name].role, found[name].uncertain) for name in HIDDEN] == [(Role.MATRIX, False)] * 2


LAST = {  # how the last weight, `head` [5, 20] of layer `last`, meets the hidden features h
    "vmap": "return torch.func.vmap(lambda v: self.last.weight @ v)(h)",
    "functional_call": "return torch.func.functional_call(self.last, dict(self.last.named_parameters()), h)",
    "other weights": "return torch.func.functional_call(self.last, {'weight': self.last.weight * 2.0}, (h,))",
    "autograd.Function": "return FusedLoss.apply(h, self.last.weight, target)",
    "unknown function": "return torch.ops.fused.head(h, self.last.weight)",
    "row by row": "return torch.stack([h @ self.last.weight[i] for i in range(5)], -1)",
    "in slots": "out = h.new_zeros(len(h), 5)\nfor i in range(5):\n    out[:, i] = h @ self.last.weight[i]\nreturn out",
    "distance": "return -torch.cdist(h, self.last.weight)",
    "checkpoint_sequential": "return torch.utils.checkpoint.checkpoint_sequential([self.last], 1, h)",
}
NARROWING = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 24), nn.Linear(24, 20), nn.Linear(20, 5, bias=False)

    def forward(self, x, target=None):
        h = self.middle(self.first(x).relu()).relu()
{result}
"""


@pytest.mark.parametrize("last", LAST)
def test_a_layer_before_a_head_is_no_head(last):
    """What meets a later weight is hidden, whatever the way in which it meets it, and that weight no certain matrix."""
    source = NARROWING.format(result=textwrap.indent(LAST[last], " " * 8))
    found = decided(generated.module(source))
    assert [
        (found[f"{name}.weight"].role, found[f"{name}.weight"].uncertain) for name in ("first", "middle")
    ] == [(Role.MATRIX, False)] * 2
    assert found["last.weight"].role is not Role.MATRIX or found["last.weight"].doubt is Doubt.ROLE


def test_a_stream_of_bare_weights_has_no_head():
    """Weights used by hand that add to a stream as wide as the input are matrices, to the last one."""
    source = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.ws = nn.ParameterList([torch.zeros(16, 16) for _ in range(3)])

        def forward(self, x):
            for w in self.ws:
                x = x + torch.tanh(F.layer_norm(x, (16,)) @ w)
            return x
    """
    found = decided(generated.module(source))
    assert {(one.role, one.uncertain) for one in found.values()} == {(Role.MATRIX, False)}


def test_a_long_body_that_is_repeated_is_read_to_its_end():
    """Sixty rounds of a body of eighty steps leave what comes after them, and the body's own weight, certain."""
    steps = "\n".join(["x = torch.sin(x + 1.0) * torch.cos(x - 1.0)"] * 80)
    source = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.step, self.head = nn.Parameter(torch.zeros(16, 16)), nn.Parameter(torch.zeros(5, 16))

    def forward(self, x):
        for i in range(60):
            x = x + torch.tanh(x @ self.step)
{steps}
        return x @ self.head.T
"""
    found = decided(generated.module(source.format(steps=textwrap.indent(steps, " " * 12))))
    assert (found["step"].role, found["step"].uncertain) == (Role.MATRIX, False), found["step"].reason
    assert (found["head"].role, found["head"].uncertain) == (Role.OUTPUT, False), found["head"].reason


HEAD = "self.wte = nn.Embedding(100, 16)\nself.lm_head = nn.Linear(16, 100, bias=False)"
OUT_OF_SIGHT = {
    "autograd.Function": ("return FusedLoss.apply(x, self.lm_head.weight, target)",),
    "or logits": (
        "if target is None:",
        "    return x, None",
        "return x, FusedLoss.apply(x.view(-1, 16), self.lm_head.weight, target)",
    ),
    "unknown function": ("return self.criterion(x, self.lm_head.weight, target)",),
    "unknown function of torch": ("return torch.ops.fused.linear_loss(x, self.lm_head.weight, target)",),
    "not called": ("return x",),
    "in another method": (
        "return x",
        "",
        "def loss(self, hidden, target): return self.lm_head(hidden).sum()",
    ),
}


@pytest.mark.parametrize("case", OUT_OF_SIGHT)
def test_heads_out_of_sight(case):
    """A head whose product was not read is doubtful, and the reason names what settles it."""
    found = decided(generated.language_model(HEAD, "self.wte(ids)", *OUT_OF_SIGHT[case]))["lm_head.weight"]
    assert found.doubt is Doubt.ROLE, found.reason
    assert found.reason.endswith("its attribute use_muon settles this")


@pytest.mark.parametrize("case", OUT_OF_SIGHT)
@pytest.mark.parametrize("is_matrix", [True, False])
def test_an_attribute_settles_it(case, is_matrix):
    """`use_muon` settles what is doubtful, either way."""
    with torch.device("meta"):
        model = generated.language_model(HEAD, "self.wte(ids)", *OUT_OF_SIGHT[case])()
    model.lm_head.weight.use_muon = is_matrix
    found = infer_roles(model)["lm_head.weight"]
    assert (found.role is Role.MATRIX, found.uncertain) == (is_matrix, False)


def test_a_linear_layer_of_its_own_class():
    """A head whose class is not torch's is found, too."""
    parts = "self.wte = nn.Embedding(100, 16)\nself.head = OwnLinear(16, 100)"
    found = decided(generated.language_model(parts, "self.wte(ids)", "return self.head(x)"))
    assert (found["head.kernel"].role, found["head.kernel"].uncertain) == (Role.OUTPUT, False)


def patched(how: str) -> nn.Sequential:
    """Return a model whose forward was replaced on the instance."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(100, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 100)
        )

    def forward(self, x):
        return F.linear(self[0](x), self[2].weight)

    if how == "method":
        model.forward = forward.__get__(model)
    else:
        model.forward = functools.partial(model.forward)
    return model


@pytest.mark.parametrize(
    ("how", "first", "last"),
    [
        ("method", (Role.MATRIX, True), (Role.OUTPUT, False)),
        ("partial", (Role.MATRIX, True), (Role.OUTPUT, True)),
    ],
)
def test_patched_forwards(how, first, last):
    """A forward that was replaced on an instance is read, or its module counts as unread."""
    found = infer_roles(patched(how))
    assert (found["1.0.weight"].role, found["1.0.weight"].uncertain) == first
    assert (found["2.weight"].role, found["2.weight"].uncertain) == last


TABLES = {  # a table of [9, 16], what meets it, whether it may be a certain matrix
    "position, sliced": "x + self.table[: x.shape[1]] + (x @ self.table.T).sum(-1, keepdim=True)",
    "position, expanded": "x @ self.table.expand(x.shape[0], -1, -1).transpose(1, 2) @ self.table",
    "fixed lookup": "x + (torch.eye(9) @ self.table)[0]",
    "codebook": "self.table[(x @ self.table.T).argmax(-1)]",
    "added and contracted": "x + (x @ self.table.T).softmax(-1) @ (self.table + x[0, :9])",
    "learned queries": "F.scaled_dot_product_attention(self.table.expand(x.shape[0], -1, -1), x, x)",
    "relative positions": "x + F.pad(x @ self.table.T, [0, 7])",
    "passed on": "self.lookup(x, self.table)",
}


@pytest.mark.parametrize("case", TABLES)
def test_tables(case):
    """A table that is contracted, and also indexed, sliced or expanded, is no certain matrix."""
    parts = (
        "self.wte = nn.Embedding(100, 16)\n"
        "self.table = nn.Parameter(torch.zeros(9, 16))\n"
        "self.head = nn.Linear(16, 100)"
    )
    found = decided(
        generated.language_model(
            parts, "self.wte(ids)", f"x = {TABLES[case]}", "return self.head(self.ln(x))"
        )
    )
    assert found["table"].role is not Role.MATRIX or found["table"].doubt is Doubt.ROLE, found["table"]
