"""Families of hand-written language models: every table, head, product, place and block that goes with every other.

A model is made of one of each. What its parameters are is known from what it was made of.
"""

import textwrap

__all__ = ["BLOCKS", "HEADS", "PLACES", "PRODUCTS", "TABLES", "source_of"]

_WTE, _EMB = "self.wte = nn.Parameter(torch.zeros(100, 16))", "self.wte = nn.Embedding(100, 16)"
TABLES = {  # how it is made, how ids become features, the table [100, 16], its name
    "Embedding": (_EMB, "self.wte(ids)", "self.wte.weight", "wte.weight"),
    "weight": (_EMB, "self.wte.weight[ids]", "self.wte.weight", "wte.weight"),
    "index": (_WTE, "self.wte[ids]", "self.wte", "wte"),
    "F.embedding": (_WTE, "F.embedding(input=ids, weight=self.wte)", "self.wte", "wte"),
    "index_select": (
        _WTE,
        "self.wte.index_select(0, ids.view(-1)).view(*ids.shape, 16)",
        "self.wte",
        "wte",
    ),
    "one-hot @": (_WTE, "F.one_hot(ids, 100).float() @ self.wte", "self.wte", "wte"),
    "one-hot scaled": (_WTE, "(F.one_hot(ids, 100).to(torch.float32) * 4) @ self.wte", "self.wte", "wte"),
    "one-hot einsum": (
        _WTE,
        "torch.einsum('btv,vd->btd', F.one_hot(ids, 100).float(), self.wte)",
        "self.wte",
        "wte",
    ),
    "one-hot tensordot": (
        _WTE,
        "torch.tensordot(F.one_hot(ids, 100).float(), self.wte, 1)",
        "self.wte",
        "wte",
    ),
    "one-hot linear": (
        "self.wte = nn.Parameter(torch.zeros(16, 100))",
        "F.linear(F.one_hot(ids, 100).float(), self.wte)",
        "self.wte.T",
        "wte",
    ),
    "dictionary": (
        "self.tables = nn.ParameterDict({'tok': torch.zeros(100, 16)})",
        "self.tables['tok'][ids]",
        "self.tables['tok']",
        "tables.tok",
    ),
    "list": (
        "self.tables = nn.ParameterList([torch.zeros(100, 16)])",
        "self.tables[0][ids]",
        "self.tables[-1]",
        "tables.0",
    ),
    "box": (
        "self.box = Box(nn.Embedding(100, 16))",
        "self.box.inner(ids)",
        "self.box.weight",
        "box.inner.weight",
    ),
}
_HEAD = "self.head = nn.Linear(16, 100, bias=False)"
_BARE = "self.head = nn.Parameter(torch.zeros(100, 16))"
HEADS = {  # how it is made, the weight [100, 16], its name; None: the table
    "layer": (_HEAD, "self.head.weight", "head.weight"),
    "bare": (_BARE, "self.head", "head"),
    "transposed": ("self.head = nn.Parameter(torch.zeros(16, 100))", "self.head.T", "head"),
    "dictionary": (
        "self.heads = nn.ParameterDict({'lm': torch.zeros(100, 16)})",
        "self.heads['lm']",
        "heads.lm",
    ),
    "attribute": ("self.heads = nn.ParameterDict({'lm': torch.zeros(100, 16)})", "self.heads.lm", "heads.lm"),
    "modules": (
        "self.heads = nn.ModuleDict({'lm': nn.Linear(16, 100)})",
        "self.heads['lm'].weight",
        "heads.lm.weight",
    ),
    "box": ("self.box = Box(nn.Linear(16, 100))", "self.box.weight", "box.inner.weight"),
    "property": (_BARE, "self.own_head", "head"),
    "method": (_BARE, "self.get_head()", "head"),
    "scaled": (_BARE, "(self.head * 0.5)", "head"),
    "next": (_HEAD, "next(self.head.parameters())", "head.weight"),
    "cached": (_BARE, "self.kept_head", "head"),
    "by name": (_BARE, "dict(self.named_parameters())['head']", "head"),
    "one of a list": (
        "self.heads, self.which = nn.ParameterList([torch.zeros(100, 16)]), torch.zeros(1)",
        "self.heads[self.which.numel() - 1]",
        "heads.0",
    ),
    "tied": ("", None, None),
}
PRODUCTS = {  # x [b, t, 16], w [100, 16]
    "linear": "F.linear(x, {w})",
    "adjoint": "x @ {w}.adjoint()",
    "left": "({w} @ x.transpose(1, 2)).transpose(1, 2)",
    "einsum": "torch.einsum('abz,cz', x, {w})",
    "einsum of numbers": "torch.einsum(x, [0, 1, 2], {w}, [3, 2], [0, 1, 3])",
    "tensordot": "torch.tensordot(x, {w}, dims=([-1], [-1]))",
    "bmm": "torch.bmm(x, {w}.T[None].repeat(x.shape[0], 1, 1))",
    "addmm": "torch.zeros(100).addmm(x.flatten(0, 1), {w}.t()).view(*x.shape[:2], -1)",
    "convolution": "F.conv1d(x.mT, {w}[..., None]).mT",
    "in parts": "torch.cat([F.linear(x, part) for part in {w}.split(25)], -1)",
    "in slices": "torch.cat([F.linear(x, {w}[i : i + 25]) for i in range(0, 100, 25)], -1)",
    "row by row": "torch.stack([x @ row for row in {w}], -1)",
    "sum of products": "(x.unsqueeze(-2) * {w}).sum(-1)",
    "operator": "operator.matmul(x, {w}.T)",
    "Tensor.matmul": "torch.Tensor.matmul(x, {w}.T)",
    "einsum of lists": "torch.einsum(x, [..., 0], {w}, [1, 0], [..., 1])",
    "vmap of weights": "torch.vmap(torch.vmap(lambda h, w: w @ h, (0, None)), (0, None))(x, {w})",
    "vmap": "torch.vmap(lambda h: {w} @ h)(x.flatten(0, 1)).view(*x.shape[:2], -1)",
}
_LOSS = "F.cross_entropy(logits.reshape(-1, 100), torch.zeros(logits.numel() // 100, dtype=torch.long))"
PLACES = {  # {p}: the product, {w}: the weight, {pw}: the product with `weight`
    "forward": "return {p}",
    "loss": f"logits = {{p}}\nreturn {_LOSS}",
    "helper": "return self.project(x)\n\ndef project(self, x):\n    return {p}",
    "lambda": "head = lambda x: {p}\nreturn head(x)",
    "partial": "return partial(self.project, weight={w})(x)\n\ndef project(self, x, weight):\n    return {pw}",
    "checkpoint": "return checkpoint(self.project, x, use_reentrant=False)\n\ndef project(self, x):\n    return {p}",
    "checkpoint_sequential": (
        "return checkpoint_sequential([self.project], 1, x, use_reentrant=False)\n\n"
        "def project(self, x):\n    return {p}"
    ),
    "reduce": "return reduce(lambda x, weight: {pw}, [{w}], x)",
    "in chunks": (
        "losses = []\nfor x in x.chunk(2, dim=1):\n    logits = {p}\n    losses.append("
        + _LOSS
        + ")\nreturn torch.stack(losses).mean()"
    ),
    "autograd": "return FusedLoss.apply(x.flatten(0, 1), {w}, ids.flatten())",
    "unused": "return x\n\ndef loss(self, x):\n    return {p}.sum()",
    "generator": "return sum(self.pieces(x))\n\ndef pieces(self, x):\n    yield {p}",
}
_MLP, _UP = (
    "x = x + self.down(F.gelu(self.up(x)))",
    "self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)",
)
_QKV = "q, k, v = self.qkv(x).chunk(3, -1)\na = q @ k.mT + {}\nx = x + a.softmax(-1) @ v"
_QUERIES = "self.q, self.kv = nn.Parameter(torch.zeros(8, 16)), nn.Linear(16, 32)"
_RELATIVE = "self.rel, self.qkv = nn.Parameter(torch.zeros(32, 16)), nn.Linear(16, 48)"
BLOCKS = {  # how it is made, what it does, what is a matrix, what is a table
    "layers": (_UP, _MLP, ("up.weight", "down.weight"), ()),
    "by hand": (
        "self.up, self.down = nn.Parameter(torch.zeros(16, 64)), nn.Parameter(torch.zeros(64, 16))",
        "x = x + F.gelu(x @ self.up) @ self.down",
        ("up", "down"),
        (),
    ),
    "experts": (
        "self.up, self.down = nn.Parameter(torch.zeros(4, 16, 32)), nn.Parameter(torch.zeros(4, 32, 16))\n"
        "self.router = nn.Linear(16, 4)",
        "g, e = self.router(x).softmax(-1).max(-1)\n"
        "h = F.silu(torch.einsum('btd,btdh->bth', x, self.up[e]))\n"
        "x = x + torch.einsum('bth,bthd->btd', h, self.down[e]) * g[..., None]",
        ("up", "down", "router.weight"),
        (),
    ),
    "dictionary": (
        "self.ws = nn.ParameterDict({'a': torch.zeros(16, 16), 'b': torch.zeros(16, 16)})",
        "for w in self.ws.values():\n    x = x + F.relu(x @ w)",
        ("ws.a", "ws.b"),
        (),
    ),
    "convolutions": (
        "self.up, self.down = nn.Conv1d(16, 32, 3, padding=1), nn.ConvTranspose1d(32, 16, 3, padding=1)",
        "x = x + self.down(F.relu(self.up(x.mT))).mT",
        ("up.weight", "down.weight"),
        (),
    ),
    "positions": (
        f"self.wpe = nn.Parameter(torch.zeros(32, 16))\n{_UP}",
        f"x = x + self.wpe.narrow(0, 0, x.shape[1])\n{_MLP}",
        ("up.weight",),
        ("wpe",),
    ),
    "queries": (
        _QUERIES,
        "k, v = self.kv(x).chunk(2, -1)\nx = (self.q @ k.mT).softmax(-1) @ v",
        ("kv.weight",),
        ("q",),
    ),
    "queries by einsum": (
        _QUERIES,
        "k, v = self.kv(x).chunk(2, -1)\nx = F.softmax(torch.einsum('qd,btd->bqt', self.q, k) / 4, -1) @ v",
        ("kv.weight",),
        ("q",),
    ),
    "relative, narrowed": (
        _RELATIVE,
        _QKV.format("torch.einsum('bqd,kd->bqk', q, self.rel.narrow(0, 0, x.shape[1]))"),
        ("qkv.weight",),
        ("rel",),
    ),
    "relative, sliced": (
        _RELATIVE,
        _QKV.format("q @ self.rel[: x.shape[1]].T"),
        ("qkv.weight",),
        ("rel",),
    ),
    "lifted, sliced": (
        "self.lift = nn.Linear(16, 16)\n" + _RELATIVE,
        "x = self.lift(x)\n" + _QKV.format("q @ self.rel[: x.shape[1]].T"),
        ("qkv.weight", "lift.weight"),
        ("rel",),
    ),
    "queries in attention": (
        _QUERIES,
        "q = self.q.expand(x.shape[0], -1, -1)\nx = F.scaled_dot_product_attention(q, *self.kv(x).chunk(2, -1))",
        ("kv.weight",),
        ("q",),
    ),
    "codebook": (
        "self.code, self.pre = nn.Parameter(torch.zeros(10, 16)), nn.Linear(16, 16)",
        "i = (self.pre(x) @ self.code.T).argmax(-1)\nx = x + F.embedding(i, self.code)",
        ("pre.weight",),
        ("code",),
    ),
    "soft codebook": (
        "self.code, self.pre = nn.Parameter(torch.zeros(10, 16)), nn.Linear(16, 16)",
        "x = x + F.gumbel_softmax(self.pre(x) @ self.code.T, dim=-1) @ self.code",
        ("pre.weight",),
        ("code",),
    ),
    "soft codebook of a layer": (
        "self.code, self.pre = nn.Parameter(torch.zeros(10, 16)), nn.Linear(16, 10)",
        "x = x + torch.einsum('btn,nd->btd', self.pre(x).softmax(-1), self.code)",
        ("pre.weight",),
        ("code",),
    ),
    "memory": (
        "self.keys, self.values = nn.Parameter(torch.zeros(9, 16)), nn.Parameter(torch.zeros(9, 16))\n"
        "self.softmax = nn.Softmax(-1)",
        "x = x + F.dropout(self.softmax(x @ self.keys.t()), 0.1) @ self.values",
        (),
        ("keys", "values"),
    ),
    "queries over positions": (
        "self.q, self.kv = nn.Parameter(torch.zeros(8, 16)), nn.Linear(16, 32)",
        "k, v = self.kv(x).chunk(2, -1)\n"
        "x = torch.einsum('btq,btd->bqd', torch.softmax(k @ self.q.T / 4, dim=1), v)",
        ("kv.weight",),
        ("q",),
    ),
    "one by one": (
        "self.ws = nn.ParameterList([torch.zeros(16, 16) for _ in range(2)])\n"
        "self.bs = nn.ParameterList([torch.zeros(16)])",
        "for w, b in itertools.zip_longest(self.ws, self.bs):\n    x = x + F.relu(x @ w)",
        ("ws.0", "ws.1"),
        (),
    ),
    "reduced": (
        "self.ws = nn.ParameterList([torch.zeros(16, 16) for _ in range(2)])",
        "x = x + reduce(lambda h, w: F.relu(h @ w), self.ws, x)",
        ("ws.0", "ws.1"),
        (),
    ),
    "first and rest": (
        "self.ws = nn.ParameterList([torch.zeros(16, 16) for _ in range(3)])",
        "first, *rest = self.ws\nh = F.linear(x, first)\nfor w in rest:\n    h = F.linear(F.relu(h), w)\nx = x + h",
        ("ws.0", "ws.1", "ws.2"),
        (),
    ),
    "by range": (
        "self.ws = nn.ParameterList([torch.zeros(16, 16) for _ in range(12)])",
        "for i in range(len(self.ws)):\n    x = x + F.relu(x @ self.ws[i])",
        tuple(f"ws.{i}" for i in range(12)),
        (),
    ),
    "while": (
        "self.ws = nn.ParameterList([torch.zeros(16, 16) for _ in range(3)])",
        "i = 0\nwhile i < 3:\n    x = x + F.relu(x @ self.ws[i])\n    i += 1",
        ("ws.0", "ws.1", "ws.2"),
        (),
    ),
    "sliced list": (
        "self.ws = nn.ParameterList([torch.zeros(16, 16) for _ in range(3)])",
        "for w in self.ws[:-1]:\n    x = x + F.relu(x @ w)\nx = x + torch.tanh(x @ self.ws[-1])",
        ("ws.0", "ws.1", "ws.2"),
        (),
    ),
    "sorted names": (
        "self.ws = nn.ParameterDict({'b': torch.zeros(16, 16), 'a': torch.zeros(16, 16)})",
        "for name in sorted(self.ws.keys()):\n    x = x + F.relu(x @ self.ws[name])",
        ("ws.a", "ws.b"),
        (),
    ),
    "lambda": (
        "self.a, self.b = nn.Parameter(torch.zeros(16, 32)), nn.Parameter(torch.zeros(32, 16))\n"
        "self.f = lambda x: F.relu(x @ self.a) @ self.b",
        "x = x + self.f(x)",
        ("a", "b"),
        (),
    ),
    "positions, lifted": (
        f"self.wpe, self.lift = nn.Parameter(torch.zeros(32, 8)), nn.Linear(8, 16)\n{_UP}",
        f"x = x + self.lift(self.wpe[: x.shape[1]])\n{_MLP}",
        ("up.weight", "lift.weight"),
        ("wpe",),
    ),
    "joined": (
        "self.q, self.k, self.v = (nn.Parameter(torch.zeros(16, 16)) for _ in range(3))",
        "q, k, v = F.linear(x, torch.cat([self.q, self.k, self.v])).chunk(3, -1)\n"
        "x = x + F.scaled_dot_product_attention(q, k, v)",
        ("q", "k", "v"),
        (),
    ),
    "stacked": (
        "self.ws, self.router = nn.ParameterList([torch.zeros(16, 16) for _ in range(3)]), nn.Linear(16, 3)",
        "y = torch.einsum('btd,edf->btef', x, torch.stack(list(self.ws)))\n"
        "x = x + (y * self.router(x).softmax(-1)[..., None]).sum(-2)",
        ("ws.0", "ws.1", "ws.2", "router.weight"),
        (),
    ),
    "recurrence": (
        "self.wx, self.wh = nn.Parameter(torch.zeros(16, 16)), nn.Parameter(torch.zeros(16, 16))",
        "h, steps = torch.zeros(x.shape[0], 16), []\nfor i in range(x.shape[1]):\n"
        "    h = torch.tanh(torch.addmm(x[:, i] @ self.wx, h, self.wh))\n    steps.append(h)\n"
        "x = x + torch.stack(steps, 1)",
        ("wx", "wh"),
        (),
    ),
    "checkpointed": (
        _UP,
        "x = x + checkpoint_sequential([self.up, F.gelu, self.down], 1, x, use_reentrant=False)",
        ("up.weight", "down.weight"),
        (),
    ),
    "functional_call": (
        _UP,
        "h = torch.func.functional_call(self.up, dict(self.up.named_parameters()), (x,))\nx = x + self.down(F.gelu(h))",
        ("up.weight", "down.weight"),
        (),
    ),
}
_MODEL = """
import itertools
import operator
from functools import cached_property, partial, reduce

from torch.utils.checkpoint import checkpoint, checkpoint_sequential

class Box(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @property
    def weight(self):
        return self.inner.weight

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {parts}
        self.ln = nn.LayerNorm(16)

    @property
    def own_head(self):
        return self.head

    @cached_property
    def kept_head(self):
        return self.head * 1.0

    def get_head(self):
        return self.head

    def forward(self, ids):
        x = {embed}
        {block}
        x = self.ln(x)
{result}
"""


def source_of(table: str, head: str, product: str, place: str, block: str) -> tuple[str, dict[str, str]]:
    """Return the source of a model, and what its parameters are by name: `matrix`, `output` or `table`."""
    made, embed, table_weight, table_name = TABLES[table]
    head_made, weight, head_name = HEADS[head]
    block_made, block_code, matrices, tables = BLOCKS[block]
    truth = dict.fromkeys(matrices, "matrix") | dict.fromkeys((*tables, table_name), "table")
    if head_name is not None:
        truth[head_name] = "output"
    weight = weight or table_weight
    product = PRODUCTS[product]
    body, _, method = PLACES[place].partition("\n\n")
    fill = {"p": product.format(w=weight), "pw": product.format(w="weight"), "w": weight}
    result = textwrap.indent(body.format(**fill), " " * 8)
    if method:
        result += "\n\n" + textwrap.indent(method.format(**fill), " " * 4)
    parts = textwrap.indent("\n".join(filter(None, (made, block_made, head_made))), " " * 8).strip()
    block_code = textwrap.indent(block_code, " " * 8).strip()
    return _MODEL.format(parts=parts, embed=embed, block=block_code, result=result), truth
