"""Products of two outputs, stacks of more than three axes, softmaxes of weights, layers that are held once more."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import MatrixView, Role, RoleDecision
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

TABLE = "self.e, self.h = nn.Embedding(64, 8), nn.Linear(8, 64)\n"
STATES = {  # models that return their state beside what they predict: the projection, its forward
    "keys and values of a fused layer": (
        "self.a, self.o = nn.Linear(8, 24), nn.Linear(8, 8)",
        "q, k, v = self.a(self.e(ids)).split(8, -1)\n"
        "return self.h(self.o(F.scaled_dot_product_attention(q, k, v))), (k, v)",
    ),
    "keys and values behind those of earlier steps": (
        "self.a, self.o = nn.Linear(8, 24), nn.Linear(8, 8)",
        "q, k, v = self.a(self.e(ids)).split(8, -1)\n"
        "if more is not None:\n    k, v = torch.cat([more[0], k], 1), torch.cat([more[1], v], 1)\n"
        "q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in (q, k, v))\n"
        "y = (q @ k.transpose(-2, -1)).softmax(-1) @ v\n"
        "return self.h(self.o(y.transpose(1, 2).flatten(2))), (k, v)",
    ),
    "attention of a fused layer whose windows were lost sight of": (
        "self.a, self.o = nn.Linear(8, 24), nn.Linear(8, 8)",
        "x = self.e(ids)\nb, t, _ = x.shape\n"
        "q, k, v = self.a(x).reshape(b, t // 9, 9, 3, 2, 4).permute(3, 0, 1, 4, 2, 5).unbind(0)\n"
        "w = (q @ k.transpose(-2, -1)).softmax(-1)\n"
        "return self.h(self.o((w @ v).transpose(2, 3).reshape(b, t, 8))), w",
    ),
    "the cell of gates": (
        "self.a, self.o = nn.Linear(8, 48), nn.Linear(12, 8)",
        "c = more\ni, f, g, o = self.a(self.e(ids)).chunk(4, -1)\nc = f.sigmoid() * c + i.sigmoid() * g.tanh()\n"
        "y = o.sigmoid() * c.tanh()\nreturn self.h(self.o(y)), (y, c)",
    ),
    "the cell of gates that two layers make": (
        "self.a, self.r, self.o = nn.Linear(8, 48), nn.Linear(12, 48), nn.Linear(12, 8)",
        "y, c = more\ni, f, g, o = (self.a(self.e(ids)) + self.r(y)).chunk(4, -1)\n"
        "c = f.sigmoid() * c + i.sigmoid() * g.tanh()\ny = o.sigmoid() * c.tanh()\n"
        "return self.h(self.o(y)), (y, c)",
    ),
    "what enters a scan, beside its gate": (
        "self.a, self.conv, self.o = nn.Linear(8, 40), nn.Conv1d(20, 20, 4, groups=20), nn.Linear(20, 8)",
        "z, x = self.a(self.e(ids)).chunk(2, -1)\ny = self.conv(x.transpose(1, 2)).transpose(1, 2)\n"
        "return self.h(self.o(y * F.silu(z))), x",
    ),
}
COMPARED = {  # what is done with the outputs of the two towers
    "matmul": "return a @ b.T",
    "scaled by a temperature": "return a @ b.t() * 3",
    "einsum": "return torch.einsum('id,jd->ij', a, b)",
    "sum of products": "return (a * b).sum(-1)",
    "loss": "return F.cross_entropy(a @ b.T, torch.arange(len(a)))",
}
APART = {  # two outputs, and no comparison
    "two losses": "return F.mse_loss(a, more) + b.sum()",
    "a gate": "return a * b.sigmoid()",
}


def roles_of(generated_models: ModuleType, made: str, forward: str) -> dict[str, RoleDecision]:
    """Return the decisions for a model."""
    with torch.device("meta"):
        return infer_roles(generated_models.model_with_forward(made, "ids, more=None", forward)())


@pytest.mark.parametrize("case", STATES)
def test_a_returned_state_is_no_prediction(generated_models, case):
    """Parts that multiply each other are gates, queries and keys: a model with a head of its own returns its state."""
    made, forward = STATES[case]
    found = roles_of(generated_models, TABLE + made, forward)
    hidden = {
        name: (found[name].role, found[name].doubt) for name in found if name in ("a.weight", "r.weight")
    }
    assert set(hidden.values()) == {(Role.MATRIX, Doubt.NONE)}, found["a.weight"].reason
    assert found["h.weight"].role is Role.OUTPUT


def test_parts_without_a_head_behind_them(generated_models):
    """A mixture that the model draws from, and reads again, is its output: the projection stays doubtful."""
    made = "self.cell, self.mix = nn.GRUCell(1, 8), nn.Linear(8, 10)"
    forward = (
        "y, found = more, []\nfor _ in range(3):\n    ids = self.cell(y, ids)\n"
        "    shares, means = self.mix(ids).chunk(2, -1)\n"
        "    y = (shares.softmax(-1) * means).sum(-1, keepdim=True)\n    found.append(y)\nreturn torch.cat(found, -1)"
    )
    decision = roles_of(generated_models, made, forward)["mix.weight"]
    assert decision.role is Role.OUTPUT or decision.doubt is Doubt.ROLE, decision.reason


@pytest.mark.parametrize(
    ("case", "doubt"), [*((c, Doubt.ROLE) for c in COMPARED), *((c, Doubt.NONE) for c in APART)]
)
def test_embeddings_that_are_compared(generated_models, case, doubt):
    """The last layers of two towers make embeddings, or scores: whichever, they are outputs, and doubtful ones."""
    made = (
        "self.a = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 12))\n"
        "self.b = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 12))"
    )
    forward = f"a, b = self.a(ids), self.b(more)\n{ {**COMPARED, **APART}[case] }"
    found = roles_of(generated_models, made, forward)
    for name in ("a.3.weight", "b.3.weight"):
        assert (found[name].role, found[name].doubt) == (Role.OUTPUT, doubt), found[name].reason
    assert found["a.0.weight"].doubt is Doubt.NONE


DIRECTIONS = {  # ways to compare no more than directions
    "normalize": "a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)\nreturn a @ b.T",
    "in one loop": "a, b = (F.normalize(x, dim=-1) for x in (a, b))\nreturn torch.einsum('id,jd->ij', a, b)",
    "norm of a tensor": "a, b = a / a.norm(dim=-1, keepdim=True), b / b.norm(p=2, dim=-1, keepdim=True)\n"
    "return a @ b.T",
    "norm in place": "a /= a.norm(dim=-1)[:, None]\nb = b.div(b.norm(dim=-1).unsqueeze(-1))\nreturn (a * b).sum(-1)",
    "norm with a floor": "a, b = (x / torch.linalg.norm(x, dim=-1, keepdim=True).clamp(min=1e-6) for x in (a, b))\n"
    "return a @ b.mT",
    "norm and epsilon": "a, b = (x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-6) for x in (a, b))\n"
    "return F.cross_entropy(a @ b.mT, torch.arange(len(a)))",
    "cosine": "return F.cosine_similarity(a, b)",
    "cosine of a module": "return nn.CosineSimilarity(dim=-1)(a, b)",
}


@pytest.mark.parametrize("case", DIRECTIONS)
def test_directions_that_are_compared(generated_models, case):
    """Whose directions are compared is an embedding that leaves the model: no doubt."""
    made = (
        "self.a = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 12))\n"
        "self.b = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 12))"
    )
    found = roles_of(generated_models, made, f"a, b = self.a(ids), self.b(more)\n{DIRECTIONS[case]}")
    for name in ("a.3.weight", "b.3.weight"):
        assert (found[name].role, found[name].doubt) == (Role.OUTPUT, Doubt.NONE), found[name].reason


def test_directions_inside_a_layer(generated_models):
    """Queries and keys of unit length are compared, and a layer takes what their softmax weighs."""
    made = TABLE + "self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))"
    forward = (
        "x = self.e(ids)\nq, k = F.normalize(self.q(x), dim=-1), F.normalize(self.k(x), dim=-1)\n"
        "return self.h(self.o((q @ k.mT).softmax(-1) @ self.v(x)))"
    )
    found = roles_of(generated_models, made, forward)
    assert {(found[f"{name}.weight"].role, found[f"{name}.weight"].doubt) for name in "qkvo"} == {
        (Role.MATRIX, Doubt.NONE)
    }


@pytest.mark.parametrize(
    ("shape", "product", "view"),
    [
        ("2, 3, 8, 4", "torch.einsum('btd,cndh->cbtnh', x, self.w)[0]", MatrixView(batch_dims=2, transposed=True)),
        ("2, 3, 4, 8", "torch.einsum('btd,cnhd->cbtnh', x, self.w)[0]", MatrixView(batch_dims=2)),
        ("4, 2, 4, 6", "torch.einsum('btnd,gnde->gbtne', x.view(2, 3, 2, 4), self.w)[0]",
         MatrixView(batch_dims=2, transposed=True)),
    ],
)  # fmt: skip
def test_stacks_of_stacks(generated_models, shape, product, view):
    """The last two axes are the matrices; those before count them: layers, heads, gates."""
    made = TABLE + f"self.w, self.o = nn.Parameter(torch.zeros({shape})), nn.Linear(12, 8)"
    found = roles_of(generated_models, made, f"x = self.e(ids)\nreturn self.h(self.o({product}.flatten(2)))")
    assert (found["w"].role, found["w"].doubt, found["w"].view) == (Role.MATRIX, Doubt.NONE, view), found[
        "w"
    ].reason


def test_codes_of_nodes(generated_models):
    """A softmax of the product of two parameters makes a graph of it: they may be embeddings of its nodes."""
    made = (
        "self.a, self.h = nn.Linear(6, 8), nn.Linear(8, 3)\n"
        "self.source, self.target = nn.Parameter(torch.zeros(10, 4)), nn.Parameter(torch.zeros(4, 10))"
    )
    forward = "return self.h(F.relu(self.source @ self.target).softmax(1) @ self.a(ids).relu())"
    found = roles_of(generated_models, made, forward)
    assert found["source"].doubt is found["target"].doubt is Doubt.ROLE
    assert found["a.weight"].role is Role.MATRIX


@pytest.mark.parametrize("call", ["nn.Sequential(*self.layers)(x)", "self.layers[1:](self.layers[0](x))"])
def test_layers_that_are_held_once_more(generated_models, call):
    """A Sequential that a forward makes of layers, or cuts out of one, hands on what they return."""
    made = TABLE + "self.layers = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))"
    found = roles_of(generated_models, made, f"x = self.e(ids)\nreturn self.h({call} + x)")
    for name in ("layers.0.weight", "layers.2.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason


def test_weights_that_are_moved_along_their_gradients(generated_models):
    """Fast weights of an inner loop, one step of gradient descent away, are the weights still."""
    made = "self.v = nn.ParameterList([nn.Parameter(torch.zeros(16, 5)), nn.Parameter(torch.zeros(7, 16))])"
    forward = (
        "fast = list(self.v)\nfor _ in range(2):\n"
        "    loss = F.cross_entropy(F.linear(F.linear(ids, fast[0]).relu(), fast[1]), more)\n"
        "    fast = [p - 0.1 * g for p, g in zip(fast, torch.autograd.grad(loss, fast, create_graph=True))]\n"
        "return F.linear(F.linear(ids, fast[0]).relu(), fast[1])"
    )
    found = roles_of(generated_models, made, forward)
    assert [(found[name].role, found[name].doubt) for name in ("v.0", "v.1")] == [
        (Role.MATRIX, Doubt.NONE),
        (Role.OUTPUT, Doubt.NONE),
    ]


@pytest.mark.parametrize("pick", ["e", "int(e)", "torch.argmax(e)"])
def test_blocks_of_rows_are_matrices(generated_models, pick):
    """Experts that lie below each other, and are picked by what is given, are no rows of a table."""
    made = TABLE + "self.w, self.v = nn.Parameter(torch.zeros(63, 8)), nn.Parameter(torch.zeros(63, 8))"
    forward = (
        f"x, e = self.e(ids), more\nw, v = (p.view(3, 21, 8)[{pick}] for p in (self.w, self.v))\n"
        "return self.h(x.matmul(w.t()).relu().matmul(v) + x)"
    )
    found = roles_of(generated_models, made, forward)
    for name, transposed in (("w", False), ("v", True)):
        view = MatrixView(0, transposed, int(transposed), (21, 21, 21))
        assert (found[name].role, found[name].doubt, found[name].view) == (Role.MATRIX, Doubt.NONE, view)


@pytest.mark.parametrize(
    "size", ["w.abs().amax(1, keepdim=True)", "w.detach().abs().max()", "w.norm(dim=1)[:, None]"]
)
def test_how_large_a_weight_is(generated_models, size):
    """What a quantized product is scaled with does not make its weight one that is used element by element."""
    made = TABLE + "self.w = nn.Parameter(torch.zeros(8, 8))"
    forward = (
        f"w, x = self.w, self.e(ids)\nscale = {size}.clamp(min=1e-8) / 127\n"
        "return self.h((x @ (w / scale).round().t()) * scale.t())"
    )
    found = roles_of(generated_models, made, forward)
    assert (found["w"].role, found["w"].doubt) == (Role.MATRIX, Doubt.NONE), found["w"].reason


def test_two_heads_that_are_read_back_together(generated_models):
    """Mean and spread of an action that a critic takes, and that the model returns, are no stream for each other."""
    made = (
        "self.t, self.m, self.s = nn.Linear(9, 26), nn.Linear(26, 3), nn.Linear(26, 3)\n"
        "self.c = nn.Sequential(nn.Linear(12, 26), nn.LayerNorm(26), nn.Linear(26, 1))"
    )
    forward = (
        "h = self.t(ids).relu()\na = torch.distributions.Normal(self.m(h), self.s(h).exp()).rsample()\n"
        "return self.c(torch.cat([ids, a], -1)), a"
    )
    found = roles_of(generated_models, made, forward)
    for name in ("m.weight", "s.weight"):
        assert (found[name].role, found[name].doubt) == (Role.OUTPUT, Doubt.ROLE), found[name].reason
    assert (found["t.weight"].role, found["t.weight"].doubt) == (Role.MATRIX, Doubt.NONE)


@pytest.mark.parametrize(
    "result", ["main if not self.training else [main, *more]", "[main, *more] if self.training else main"]
)
def test_heads_that_are_returned_in_training(generated_models, result):
    """One value in one mode, and several in the other: all of them are returned."""
    made = (
        "self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 16)\n"
        "self.heads, self.h = nn.ModuleList([nn.Linear(16, 5), nn.Linear(16, 5)]), nn.Linear(16, 5)"
    )
    forward = (
        "x = self.a(ids).relu()\ny = self.b(x).relu()\nmore = [h(z) for h, z in zip(self.heads, (x, y))]\n"
        f"main = self.h(x + y)\nreturn {result}"
    )
    found = roles_of(generated_models, made, forward)
    for name in ("heads.0.weight", "heads.1.weight", "h.weight"):
        assert (found[name].role, found[name].doubt) == (Role.OUTPUT, Doubt.NONE), (name, found[name].reason)


def test_a_spread_beside_a_mean(generated_models):
    """A distribution multiplies no matrix: what gives it its mean is a head still."""
    made = "self.t, self.m, self.s = nn.Linear(9, 26), nn.Linear(26, 3), nn.Parameter(torch.zeros(2, 3))"
    forward = (
        "y = self.m(self.t(ids).relu())\na = torch.distributions.Normal(y, self.s.exp()).rsample()\n"
        "return a, a.sum(1)"
    )
    found = roles_of(generated_models, made, forward)
    assert (found["m.weight"].role, found["m.weight"].doubt) == (Role.OUTPUT, Doubt.NONE), found[
        "m.weight"
    ].reason
    assert (found["s"].role, found["s"].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found["s"].reason


@pytest.mark.parametrize(
    "weight",
    [
        "torch.kron(self.a, self.b)",
        "torch.where(self.a > self.b, self.a, self.b)",
        "torch.maximum(self.a, self.b)",
        "torch.complex(self.a, self.b).abs()",
    ],
)
def test_a_function_of_two_parameters_is_a_weight_made_of_both(
    generated_models: ModuleType, weight: str
) -> None:
    """What contracts it says the same of each of them."""
    size = 4 if "kron" in weight else 16
    made = (
        f"self.a, self.b = (nn.Parameter(torch.zeros({size}, {size})) for _ in range(2))\n"
        "self.i, self.h = nn.Linear(3, 16), nn.Linear(16, 5)"
    )
    forward = f"return self.h(F.relu(F.linear(self.i(x), {weight})))"
    found = infer_roles(generated_models.model_with_forward(made, "x", forward)())
    for name in ("a", "b"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason
