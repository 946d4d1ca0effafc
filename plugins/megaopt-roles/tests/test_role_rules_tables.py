"""Tables that a product makes of parameters, which an index looks rows up in, and kernels made of parameters alone."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import MatrixView, Role, RoleDecision
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

IDS = torch.zeros(3, dtype=torch.long)
TABLE = "self.t, self.w = nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(8, 6))\n"
LOOKED_UP = {  # how rows of a product of two parameters are taken
    "an activation": "h = F.relu(self.t @ self.w)[ids]",
    "a bag": "h = F.embedding(ids, F.linear(self.t, self.w.T))",
    "a one-hot code": "h = F.one_hot(ids, 9).float() @ (self.t @ self.w)",
    "a selection": "h = torch.mm(self.t, self.w).index_select(0, ids)",
    "a contraction": "h = torch.tensordot(self.t, self.w, 1)[ids]",
    "an einsum": "h = torch.einsum('wo,tw->to', self.w, self.t)[ids]",
    "a neighbourhood": "h = (torch.eye(9) @ (self.t @ self.w))[ids]",
}


def roles_of(models: ModuleType, made: str, forward: str, *example: torch.Tensor) -> dict[str, RoleDecision]:
    """Return the decisions for a model."""
    with torch.device("meta"):
        return infer_roles(
            models.model_with_forward(made, "ids, more=None", forward)(), example=example or None
        )


@pytest.mark.parametrize("example", [(), (IDS,)], ids=["source", "example"])
@pytest.mark.parametrize("case", LOOKED_UP)
def test_the_right_hand_factor_of_a_table_is_a_layer(generated_models, case, example):
    """The rows of a product are those of its left-hand factor, and the right-hand one makes them what they are."""
    made = TABLE + "self.h = nn.Linear(6, 4)"
    found = roles_of(generated_models, made, f"{LOOKED_UP[case]}\nreturn self.h(h.relu())", *example)
    assert found["t"].role is Role.EMBEDDING, found["t"].reason
    assert (found["w"].role, found["w"].doubt) == (Role.MATRIX, Doubt.NONE), found["w"].reason


@pytest.mark.parametrize(
    "rows",
    ["x + self.t @ self.w", "x * (self.t @ self.w)", "x + torch.sigmoid(F.linear(self.t, self.w.mT))"],
    ids=["a sum", "a gain", "a function"],
)
def test_what_is_done_with_rows_says_nothing_of_the_right_hand_factor(generated_models, rows):
    """Nodes that a layer looks at beside their neighbours: the layer's weight is `[in, out]`, and no gain."""
    made = TABLE + "self.h = nn.Linear(6, 4)"
    forward = f"x = torch.zeros(9, 6).index_add(0, ids, more)\nreturn self.h(F.relu({rows}))"
    found = roles_of(generated_models, made, forward)
    assert found["t"].role is not Role.MATRIX, found["t"].reason
    assert (found["w"].role, found["w"].doubt) == (Role.MATRIX, Doubt.NONE), found["w"].reason
    assert found["w"].view == MatrixView(transposed=True)


@pytest.mark.parametrize("example", [(), (IDS,)], ids=["source", "example"])
def test_two_tables_made_by_layers_side_by_side(generated_models, example):
    """What each layer of a graph makes of two tables is joined, cut apart and indexed: no layer is a table for it."""
    made = (
        "self.u, self.i = nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(7, 8))\n"
        "self.w = nn.ParameterList([nn.Parameter(torch.zeros(8, 6)), nn.Parameter(torch.zeros(6, 6))])"
    )
    forward = (
        "e = torch.cat([self.u, self.i], 0)\nfound = [e]\nfor w in self.w:\n"
        "    e = F.leaky_relu((torch.ones(16, 16) @ e) @ w)\n    found.append(e)\n"
        "found = torch.cat(found, 1)\nu, i = found[:9], found[9:]\nreturn (u[ids] * i[ids]).sum(1)"
    )
    found = roles_of(generated_models, made, forward, *example)
    assert found["u"].role is found["i"].role is Role.EMBEDDING
    for name in ("w.0", "w.1"):
        assert found[name].role is not Role.EMBEDDING
        assert found[name].doubt is Doubt.ROLE, found[name].reason


def test_columns_of_a_product(generated_models):
    """Transposed, it has the rows of the right-hand factor."""
    found = roles_of(
        generated_models, TABLE + "self.h = nn.Linear(9, 4)", "return self.h((self.t @ self.w).T[ids])"
    )
    assert (found["t"].role, found["w"].role) == (Role.MATRIX, Role.EMBEDDING)


@pytest.mark.parametrize("example", [(), (IDS, IDS)], ids=["source", "example"])
@pytest.mark.parametrize("made", ["F.relu(self.t @ self.w)", "self.l(self.e.weight)"])
def test_rows_that_are_compared(generated_models, made, example):
    """What a layer makes of one thing, compared with what it makes of another, is an embedding or a score: doubtful."""
    table = TABLE + "self.e, self.l = nn.Embedding(9, 8), nn.Linear(8, 6)"
    forward = f"h = {made}\nreturn (h[ids] * h[more]).sum(-1)"
    found = roles_of(generated_models, table, forward, *example)
    layer = found["w" if "self.w" in made else "l.weight"]
    assert (layer.role, layer.doubt) == (Role.OUTPUT, Doubt.ROLE), layer.reason


@pytest.mark.parametrize(
    ("result", "doubt"),
    [("y @ y.T", Doubt.ROLE), ("(y * y).sum(-1)", Doubt.NONE), ("-(y * y.exp()).sum(-1)", Doubt.NONE)],
    ids=["all with all", "a square", "an entropy"],
)
@pytest.mark.parametrize("example", [(), (torch.zeros(3, 8),)], ids=["source", "example"])
def test_an_output_that_meets_itself(generated_models, result, doubt, example):
    """Its square and its entropy compare nothing; the product of all its rows with all does."""
    made = "self.a, self.b = nn.Linear(8, 20), nn.Linear(20, 6)"
    found = roles_of(generated_models, made, f"y = self.b(self.a(ids).relu())\nreturn {result}", *example)
    assert (found["b.weight"].role, found["b.weight"].doubt) == (Role.OUTPUT, doubt), found["b.weight"].reason


@pytest.mark.parametrize(
    "product",
    [
        "torch.einsum('hn,hnl->hl', self.c, torch.exp(k))",
        "(self.c.unsqueeze(1) @ torch.exp(k)).squeeze(1)",
        "torch.bmm(self.c[:, None], k.exp())[:, 0]",
        "torch.einsum('hn,hnl->hl', self.c * (self.a.exp() - 1) / self.a, torch.exp(k)).real",
        "2 * torch.einsum('hnl, hn -> hl', k.exp(), torch.complex(self.c, self.c)).real",
    ],
    ids=["einsum", "matmul", "bmm", "scaled", "complex"],
)
def test_a_kernel_made_of_parameters_alone(generated_models, product):
    """A product that has a vector of each parameter in every entry of its batch has no matrix in them, certainly."""
    made = (
        "self.e, self.h = nn.Linear(6, 8), nn.Linear(8, 3)\n"
        "self.c, self.a = nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(8, 4))"
    )
    forward = (
        "k = -torch.exp(self.a).unsqueeze(-1) * torch.arange(ids.size(1))\n"
        f"return self.h(F.gelu(self.e(ids) * ({product}).T)).mean(1)"
    )
    found = roles_of(generated_models, made, forward)
    for name in ("c", "a"):
        assert (found[name].role, found[name].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found[name].reason


def test_a_batch_of_matrices_of_low_rank(generated_models):
    """Here every entry of the batch is a matrix of its own."""
    made = (
        "self.a, self.b = nn.Parameter(torch.zeros(3, 8, 2)), nn.Parameter(torch.zeros(3, 2, 8))\n"
        "self.h = nn.Linear(8, 3)"
    )
    found = roles_of(generated_models, made, "return self.h(F.relu(ids @ (self.a @ self.b)).sum(0))")
    for name in ("a", "b"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason


@pytest.mark.parametrize(
    "weight",
    [
        "self.w + torch.einsum('or,ri->oi', self.b, self.a)",
        "torch.einsum('ri,or->oi', self.a, self.b) + self.w",
        "self.w + torch.einsum('or,ri->io', self.b, self.a).T",
        "torch.einsum('pr,op,ri->oi', self.c, self.b, self.a) + self.w",
    ],
    ids=["added", "added to", "turned", "of three"],
)
def test_a_low_rank_update_by_einsum(generated_models, weight):
    """An einsum of parameters is a weight as `@` makes one: what it is added to stays a matrix."""
    made = (
        "self.a, self.b = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(6, 2))\n"
        "self.c, self.w = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(6, 8))\nself.h = nn.Linear(6, 3)"
    )
    found = roles_of(generated_models, made, f"return self.h(F.relu(F.linear(ids, {weight})))")
    for name in ("a", "b", "w"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason


def test_coefficients_that_choose_a_mix_of_matrices(generated_models):
    """Rows of what an einsum makes of parameters are looked up as rows of a product are: they are no hidden matrix."""
    made = (
        "self.c, self.m = nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(3, 8, 8))\n"
        "self.h = nn.Linear(8, 4)"
    )
    forward = (
        "w = torch.einsum('rb,bio->rio', self.c, self.m)[more]\n"
        "return self.h(F.relu(torch.bmm(ids[:, None], w)[:, 0]))"
    )
    found = roles_of(generated_models, made, forward)
    assert found["c"].role is Role.EMBEDDING, found["c"].reason


@pytest.mark.parametrize("loop", ["range(5)", "range(self.c.size(0))"])
def test_mixes_of_matrices_that_a_loop_goes_through(generated_models, loop):
    """The rows of what an einsum makes of parameters are coefficients, one set a round, and no factor."""
    made = (
        "self.c, self.m = nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(3, 8, 8))\n"
        "self.h = nn.Linear(8, 4)"
    )
    forward = (
        "w, y = torch.einsum('rb,bio->rio', self.c, self.m), ids\n"
        f"for r in {loop}:\n    y = y.index_add(0, more[r], ids[more[r]] @ w[r])\n"
        "return self.h(F.relu(y))"
    )
    found = roles_of(generated_models, made, forward)
    assert (found["c"].role, found["c"].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found["c"].reason


def test_codes_of_positions(generated_models):
    """A layer that takes a one-hot code of how far positions are apart is looked up, as one that is given codes."""
    forward = (
        "i = torch.arange(ids.size(1))\n"
        "code = F.one_hot((i[:, None] - i[None]).clamp(-4, 4) + 4, 9).to(more.dtype)\n"
        "return self.h(F.relu(self.p(code) + more))"
    )
    found = roles_of(generated_models, "self.p, self.h = nn.Linear(9, 8), nn.Linear(8, 4)", forward)
    assert found["p.weight"].role is Role.EMBEDDING, found["p.weight"].reason
