"""Splits where the shape of what a layer takes, or of what it makes, is not known."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, MatrixView
from megaopt_core.routing import infer_roles

BLOCK = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.o, self.qkv, self.mod = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 96), nn.Linear(32, 64)
        self.up, self.down, self.more, self.act = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32), nn.GELU()

    def shaped(self, x, y):
        shift, scale = self.mod(y).unsqueeze(1).chunk(2, -1)
        return self.qkv({taken}).reshape(*{sizes}, 3, 4, -1).movedim(2, 0)

    def forward(self, x, c, y):
        q, k, v = self.shaped(c, y)
        q = q + self.more(x).unflatten(-1, (4, -1))
        made = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        c = c + self.o(made.transpose(1, 2).flatten(2))
        return x, c + self.down(self.act(self.up(c)))
"""


def view_of(
    models: ModuleType, made: str, arguments: str, forward: str, name: str, before: str = ""
) -> MatrixView:
    """Return the view of one parameter of a model, which is certain."""
    model = models.model(made, f"def forward(self, {arguments}):\n    {forward}", before)
    found = infer_roles(model())[name]
    assert found.view is not None, found.reason
    assert found.doubt is Doubt.NONE, found.reason
    return found.view


@pytest.mark.parametrize(
    ("taken", "sizes"),
    [
        ("self.n(x) * (1 + scale) + shift", "x.shape[:2]"),
        ("self.n(x)", "x.shape[:-1]"),
        ("self.n(x)", "x.size()[:-1]"),
    ],
)
def test_sizes_of_a_stream_that_is_not_known(generated_models, taken, sizes):
    """The leading sizes of another stream than the first are as many as are taken, not one."""
    made = (
        "self.a, self.b, self.c = nn.Linear(5, 32), nn.Linear(6, 32), nn.Linear(7, 32)\n"
        "self.blocks, self.h = nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 9)"
    )
    forward = (
        "x, c, y = self.a(x), self.b(c), self.c(y)\n    for block in self.blocks:\n"
        "        x, c = block(x, c, y)\n    return self.h(c)"
    )
    before = BLOCK.replace("{sizes}", sizes).replace("{taken}", taken)
    view = view_of(generated_models, made, "x, c, y", forward, "blocks.0.qkv.weight", before)
    assert (view.split_sizes, view.head_sizes) == ((32, 32, 32), (8, 8, 8))


def test_parts_as_wide_as_something_that_is_not_known(generated_models):
    """Behind samples, and a place for positions, come the parts, and what is left of the features."""
    made = "self.e, self.m, self.h = nn.Embedding(10, 32), nn.Linear(32, 64), nn.Linear(32, 9)"
    forward = (
        "s, b = self.m(self.e(ids)).view(-1, 1, 2, x.shape[-1]).unbind(2)\n    return self.h(x * (1 + s) + b)"
    )
    view = view_of(generated_models, made, "ids, x", forward, "m.weight")
    assert view.split_sizes == (32, 32)


OWN = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = OwnLinear(32, 96), OwnLinear(32, 96), OwnLinear(32, 32)
        self.n, self.m, self.up, self.down = nn.LayerNorm(32), nn.LayerNorm(32), OwnLinear(32, 64), OwnLinear(64, 32)

    def forward(self, x):
        y = self.n(x)
        q, k, v = (self.a(y) + self.b(y)).split(x.size(-1), dim=2)
        q, k, v = (t.view(*t.shape[:-1], 4, -1).transpose(1, 2) for t in (q, k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.m(x))))
"""


def test_a_block_of_layers_of_its_own(generated_models):
    """A norm tells how wide the input is of a block whose layers are all by hand, and add to each other."""
    made = "self.e, self.b, self.h = nn.Embedding(50, 32), Block(), nn.Linear(32, 50)"
    view = view_of(generated_models, made, "ids", "return self.h(self.b(self.e(ids)))", "b.a.kernel", OWN)
    assert (view.split_sizes, view.head_sizes) == ((32, 32, 32), (8, 8, 8))


def test_parts_of_an_einsum_that_get_names(generated_models):
    """What an einsum makes is no tuple: its first axis, of parts, comes apart."""
    made = (
        "self.e, self.h = nn.Embedding(50, 32), nn.Linear(32, 50)\n"
        "self.w, self.o = nn.Parameter(torch.zeros(32, 3, 4, 8)), nn.Linear(32, 32)"
    )
    forward = (
        "x = self.e(ids)\n    q, k, v = torch.einsum('btd,dshe->sbhte', x, self.w)\n"
        "    y = F.scaled_dot_product_attention(q, k, v)\n"
        "    return self.h(x + self.o(y.transpose(1, 2).flatten(2)))"
    )
    view = view_of(generated_models, made, "ids", forward, "w")
    assert (view.split_sizes, view.head_sizes) == ((32, 32, 32), (8, 8, 8))


def test_steps_beyond_the_heads_are_positions(generated_models):
    """A loop that goes on where there are no more heads goes through time: queries of heads are one matrix."""
    made = "self.e, self.h = nn.Embedding(50, 32), nn.Linear(32, 50)\nself.b = Block()"
    before = (
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.q, self.k, self.o = (nn.Linear(32, 32) for _ in range(3))\n"
        "    def forward(self, x):\n        q, k = (z.unflatten(-1, (4, -1)) for z in (self.q(x), self.k(x)))\n"
        "        s, ys = 0, []\n        for t in range(x.size(1)):\n"
        "            s = s + torch.einsum('bhk,bhv->bhkv', k[:, t], k[:, t])\n"
        "            ys.append(torch.einsum('bhkv,bhk->bhv', s, q[:, t]))\n"
        "        return x + self.o(torch.stack(ys, 1).flatten(-2))\n"
    )
    view = view_of(generated_models, made, "ids", "return self.h(self.b(self.e(ids)))", "b.q.weight", before)
    assert (view.split_sizes, view.head_sizes) == ((), (8,))
