"""Stacks of matrices: experts, bases of relations, one for every head."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "a stack that is returned is a head": (
        """
        self.tok, self.up, self.down = (nn.Embedding(50, 12), nn.Linear(12, 20), nn.Linear(20, 12))
        self.gate, self.one = (nn.Linear(12, 3), nn.Linear(12, 1))
        self.w, self.v = (nn.Parameter(torch.zeros(3, 12, 7)), nn.Parameter(torch.zeros(3, 7, 12)))
        self.s, self.t = (nn.Parameter(torch.zeros(3, 7, 1)), nn.Parameter(torch.zeros(3, 7, 1)))
        self.b, self.u = (nn.Parameter(torch.zeros(3, 1, 7)), nn.Parameter(torch.zeros(3, 12, 1)))
        """,
        "ids",
        """
        h = self.tok(ids)
        h = h + self.down(self.up(h).relu())
        return h[:, None] @ self.w + self.b
        """,
        "ids(2, 5)",
        {"output": "w", "elementwise": "b", "embedding": "tok.weight", "matrix": "up.weight down.weight"},
    ),
    "experts of a last layer are no heads": (
        """
        self.tok, self.up, self.down = (nn.Embedding(50, 12), nn.Linear(12, 20), nn.Linear(20, 12))
        self.gate, self.one = (nn.Linear(12, 3), nn.Linear(12, 1))
        self.w, self.v = (nn.Parameter(torch.zeros(3, 12, 7)), nn.Parameter(torch.zeros(3, 7, 12)))
        self.s, self.t = (nn.Parameter(torch.zeros(3, 7, 1)), nn.Parameter(torch.zeros(3, 7, 1)))
        self.b, self.u = (nn.Parameter(torch.zeros(3, 1, 7)), nn.Parameter(torch.zeros(3, 12, 1)))
        """,
        "ids",
        """
        h = self.tok(ids)
        h = h + self.down(self.up(h).relu())
        g = self.gate(h).softmax(-1)
        y = torch.einsum('btd,edf->btef', h, self.w).relu()
        y = torch.einsum('btef,efd->bted', y, self.v)
        return h + (y * g.unsqueeze(-1)).sum(-2)
        """,
        "ids(2, 5)",
        {
            "matrix batch1 transposed": "w v",
            "embedding": "tok.weight",
            "matrix": "up.weight down.weight gate.weight",
        },
    ),
    "what meets features of activations is no memory": (
        """
        self.q, self.k = (nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16)))
        self.slots = nn.Parameter(torch.randn(1, 4, 16))
        self.first, self.out = (nn.Linear(9, 16), nn.Linear(16, 5))
        """,
        "x",
        """
        h = self.first(x).relu()
        z = F.layer_norm(self.slots + h.mean(1, True), (16,))
        s = torch.einsum('bnd,bsd->bns', h @ self.k, z @ self.q)
        y = s.softmax(-1).transpose(1, 2) @ h
        return self.out(y.relu())
        """,
        "x(2, 5, 9)",
        {
            "matrix transposed": "q k",
            "elementwise": "slots",
            "matrix": "first.weight",
            "output": "out.weight",
        },
    ),
    "a function of two parameters is a weight made of both": (
        """
        self.a, self.b = (nn.Parameter(torch.zeros(16, 16)) for _ in range(2))
        self.i, self.h = (nn.Linear(3, 16), nn.Linear(16, 5))
        """,
        "x",
        "return self.h(F.relu(F.linear(self.i(x), torch.complex(self.a, self.b).abs())))",
        "x(2, 5, 3)",
        {"matrix": "a b i.weight", "output": "h.weight"},
    ),
    "a returned state is no prediction": (
        """
        self.e, self.h = (nn.Embedding(64, 8), nn.Linear(8, 64))
        self.a, self.o = (nn.Linear(8, 24), nn.Linear(8, 8))
        """,
        "ids, more=None",
        """
        q, k, v = self.a(self.e(ids)).split(8, -1)
        if more is not None:
            k, v = (torch.cat([more[0], k], 1), torch.cat([more[1], v], 1))
        q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in (q, k, v))
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return (self.h(self.o(y.transpose(1, 2).flatten(2))), (k, v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "output": "h.weight",
            "matrix rows:8,8,8": "a.weight",
            "matrix": "o.weight",
        },
    ),
    "directions inside a layer": (
        """
        self.e, self.h = (nn.Embedding(64, 8), nn.Linear(8, 64))
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        """,
        "ids, more=None",
        """
        x = self.e(ids)
        q, k = (F.normalize(self.q(x), dim=-1), F.normalize(self.k(x), dim=-1))
        return self.h(self.o((q @ k.mT).softmax(-1) @ self.v(x)))
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "output": "h.weight", "matrix": "q.weight k.weight v.weight o.weight"},
    ),
    "heads that are returned in training": (
        """
        self.a, self.b = (nn.Linear(6, 16), nn.Linear(16, 16))
        self.heads, self.h = (nn.ModuleList([nn.Linear(16, 5), nn.Linear(16, 5)]), nn.Linear(16, 5))
        """,
        "ids, more=None",
        """
        x = self.a(ids).relu()
        y = self.b(x).relu()
        more = [h(z) for h, z in zip(self.heads, (x, y))]
        main = self.h(x + y)
        return [main, *more] if self.training else main
        """,
        "x(2, 5, 6)",
        {"matrix": "a.weight b.weight", "output": "heads.{0,1}.weight h.weight"},
    ),
    "layers that are held once more": (
        """
        self.e, self.h = (nn.Embedding(64, 8), nn.Linear(8, 64))
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        """,
        "ids, more=None",
        """
        x = self.e(ids)
        return self.h(nn.Sequential(*self.layers)(x) + x)
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "output": "h.weight", "matrix": "layers.{0,2}.weight"},
    ),
    "stacks of stacks": (
        """
        self.e, self.h = (nn.Embedding(64, 8), nn.Linear(8, 64))
        self.w, self.o = (nn.Parameter(torch.zeros(2, 3, 8, 4)), nn.Linear(12, 8))
        """,
        "ids, more=None",
        """
        x = self.e(ids)
        return self.h(self.o(torch.einsum('btd,cndh->cbtnh', x, self.w)[0].flatten(2)))
        """,
        "ids(2, 5)",
        {
            "matrix batch2 transposed": "w",
            "embedding": "e.weight",
            "output": "h.weight",
            "matrix": "o.weight",
        },
    ),
    "a core that is laid flat": (
        """
        self.e, self.r, self.h = (nn.Embedding(30, 6), nn.Embedding(9, 4), nn.Linear(6, 30))
        self.w, self.turned = (nn.Parameter(torch.zeros(4, 6, 6)), nn.Parameter(torch.zeros(6, 6, 4)))
        """,
        "ids, more",
        """
        e, r = (self.e(ids), self.r(more))
        m = r @ self.w.reshape(r.shape[-1], -1)
        m = m.view(-1, e.size(1), e.size(1))
        return self.h(torch.bmm(e.view(-1, 1, e.size(1)), m).view(-1, e.size(1)))
        """,
        "ids(5), ids(5)",
        {"matrix transposed": "w", "embedding": "e.weight r.weight", "output": "h.weight"},
    ),
    "a stack that is returned is a head (2)": (
        """
        self.tok, self.up, self.down = (nn.Embedding(50, 12), nn.Linear(12, 20), nn.Linear(20, 12))
        self.gate, self.one = (nn.Linear(12, 3), nn.Linear(12, 1))
        self.w, self.v = (nn.Parameter(torch.zeros(3, 12, 7)), nn.Parameter(torch.zeros(3, 7, 12)))
        self.s, self.t = (nn.Parameter(torch.zeros(3, 7, 1)), nn.Parameter(torch.zeros(3, 7, 1)))
        self.b, self.u = (nn.Parameter(torch.zeros(3, 1, 7)), nn.Parameter(torch.zeros(3, 12, 1)))
        """,
        "ids",
        """
        h = self.tok(ids)
        h = h + self.down(self.up(h).relu())
        return [h @ w for w in self.w]
        """,
        "ids(2, 5)",
        {"output": "w", "embedding": "tok.weight", "matrix": "up.weight down.weight"},
    ),
    "experts of a last layer are no heads (2)": (
        """
        self.tok, self.up, self.down = (nn.Embedding(50, 12), nn.Linear(12, 20), nn.Linear(20, 12))
        self.gate, self.one = (nn.Linear(12, 3), nn.Linear(12, 1))
        self.w, self.v = (nn.Parameter(torch.zeros(3, 12, 7)), nn.Parameter(torch.zeros(3, 7, 12)))
        self.s, self.t = (nn.Parameter(torch.zeros(3, 7, 1)), nn.Parameter(torch.zeros(3, 7, 1)))
        self.b, self.u = (nn.Parameter(torch.zeros(3, 1, 7)), nn.Parameter(torch.zeros(3, 12, 1)))
        """,
        "ids",
        """
        h = self.tok(ids)
        h = h + self.down(self.up(h).relu())
        g = self.gate(h).sigmoid()
        y = (h[:, None] @ self.w).relu() @ self.v
        return h + torch.einsum('betd,bte->btd', y, g)
        """,
        "ids(2, 5)",
        {
            "matrix batch1 transposed": "w v",
            "embedding": "tok.weight",
            "matrix": "up.weight down.weight gate.weight",
        },
    ),
    "what meets features of activations is no memory (2)": (
        """
        self.q, self.k = (nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16)))
        self.slots = nn.Parameter(torch.randn(1, 4, 16))
        self.first, self.out = (nn.Linear(9, 16), nn.Linear(16, 5))
        """,
        "x",
        """
        h = self.first(x).relu()
        z = F.layer_norm(self.slots + h.mean(1, True), (16,))
        s = torch.einsum('bnd,bsd->bns', h @ self.k, z @ self.q)
        a = s.softmax(2)
        y = torch.einsum('bns,bnd->bsd', a / a.sum(1, keepdim=True), h)
        return self.out(y.relu())
        """,
        "x(2, 5, 9)",
        {
            "matrix transposed": "q k",
            "elementwise": "slots",
            "matrix": "first.weight",
            "output": "out.weight",
        },
    ),
    "a function of two parameters is a weight made of both (2)": (
        """
        self.a, self.b = (nn.Parameter(torch.zeros(16, 16)) for _ in range(2))
        self.i, self.h = (nn.Linear(3, 16), nn.Linear(16, 5))
        """,
        "x",
        "return self.h(F.relu(F.linear(self.i(x), torch.maximum(self.a, self.b))))",
        "x(2, 5, 3)",
        {"matrix": "a b i.weight", "output": "h.weight"},
    ),
    "a returned state is no prediction (2)": (
        """
        self.e, self.h = (nn.Embedding(64, 8), nn.Linear(8, 64))
        self.a, self.o = (nn.Linear(8, 24), nn.Linear(8, 8))
        """,
        "ids, more=None",
        """
        q, k, v = self.a(self.e(ids)).split(8, -1)
        return (self.h(self.o(F.scaled_dot_product_attention(q, k, v))), (k, v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "output": "h.weight",
            "matrix rows:8,8,8": "a.weight",
            "matrix": "o.weight",
        },
    ),
    "heads that are returned in training (2)": (
        """
        self.a, self.b = (nn.Linear(6, 16), nn.Linear(16, 16))
        self.heads, self.h = (nn.ModuleList([nn.Linear(16, 5), nn.Linear(16, 5)]), nn.Linear(16, 5))
        """,
        "ids, more=None",
        """
        x = self.a(ids).relu()
        y = self.b(x).relu()
        more = [h(z) for h, z in zip(self.heads, (x, y))]
        main = self.h(x + y)
        return main if not self.training else [main, *more]
        """,
        "x(2, 5, 6)",
        {"matrix": "a.weight b.weight", "output": "heads.{0,1}.weight h.weight"},
    ),
    "layers that are held once more (2)": (
        """
        self.e, self.h = (nn.Embedding(64, 8), nn.Linear(8, 64))
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        """,
        "ids, more=None",
        """
        x = self.e(ids)
        return self.h(self.layers[1:](self.layers[0](x)) + x)
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "output": "h.weight", "matrix": "layers.{0,2}.weight"},
    ),
    "a core that is laid flat (2)": (
        """
        self.e, self.r, self.h = (nn.Embedding(30, 6), nn.Embedding(9, 4), nn.Linear(6, 30))
        self.w, self.turned = (nn.Parameter(torch.zeros(4, 6, 6)), nn.Parameter(torch.zeros(6, 6, 4)))
        """,
        "ids, more",
        """
        e, r = (self.e(ids), self.r(more))
        m = torch.mm(r, self.w.view(r.size(1), -1))
        m = m.view(-1, e.size(1), e.size(1))
        return self.h(torch.bmm(e.view(-1, 1, e.size(1)), m).view(-1, e.size(1)))
        """,
        "ids(5), ids(5)",
        {"matrix transposed": "w", "embedding": "e.weight r.weight", "output": "h.weight"},
    ),
    "a stack that is returned is a head (3)": (
        """
        self.tok, self.up, self.down = (nn.Embedding(50, 12), nn.Linear(12, 20), nn.Linear(20, 12))
        self.gate, self.one = (nn.Linear(12, 3), nn.Linear(12, 1))
        self.w, self.v = (nn.Parameter(torch.zeros(3, 12, 7)), nn.Parameter(torch.zeros(3, 7, 12)))
        self.s, self.t = (nn.Parameter(torch.zeros(3, 7, 1)), nn.Parameter(torch.zeros(3, 7, 1)))
        self.b, self.u = (nn.Parameter(torch.zeros(3, 1, 7)), nn.Parameter(torch.zeros(3, 12, 1)))
        """,
        "ids",
        """
        h = self.tok(ids)
        h = h + self.down(self.up(h).relu())
        y = (h[:, None] @ self.u).squeeze(-1) - ids[:, None]
        return y.square().mean()
        """,
        "ids(2, 5)",
        {"output": "u", "embedding": "tok.weight", "matrix": "up.weight down.weight"},
    ),
    "experts of a last layer are no heads (3)": (
        """
        self.tok, self.up, self.down = (nn.Embedding(50, 12), nn.Linear(12, 20), nn.Linear(20, 12))
        self.gate, self.one = (nn.Linear(12, 3), nn.Linear(12, 1))
        self.w, self.v = (nn.Parameter(torch.zeros(3, 12, 7)), nn.Parameter(torch.zeros(3, 7, 12)))
        self.s, self.t = (nn.Parameter(torch.zeros(3, 7, 1)), nn.Parameter(torch.zeros(3, 7, 1)))
        self.b, self.u = (nn.Parameter(torch.zeros(3, 1, 7)), nn.Parameter(torch.zeros(3, 12, 1)))
        """,
        "ids",
        """
        h = self.tok(ids)
        h = h + self.down(self.up(h).relu())
        return h + ((h[:, None] @ self.w).relu() @ self.v).mean(1)
        """,
        "ids(2, 5)",
        {"matrix batch1 transposed": "w v", "embedding": "tok.weight", "matrix": "up.weight down.weight"},
    ),
    "what meets features of activations is no memory (3)": (
        """
        self.q, self.k = (nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16)))
        self.slots = nn.Parameter(torch.randn(1, 4, 16))
        self.first, self.out = (nn.Linear(9, 16), nn.Linear(16, 5))
        """,
        "x",
        """
        h = self.first(x).relu()
        z = F.layer_norm(self.slots + h.mean(1, True), (16,))
        s = torch.einsum('bnd,bsd->bns', h @ self.k, z @ self.q)
        y = torch.einsum('bns,bnd->bsd', s.softmax(-1), h)
        return self.out(y.relu())
        """,
        "x(2, 5, 9)",
        {
            "matrix transposed": "q k",
            "elementwise": "slots",
            "matrix": "first.weight",
            "output": "out.weight",
        },
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
