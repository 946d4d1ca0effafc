"""Tables that ids, indices or one-hot codes look rows up in, and codebooks that a softmax chooses from."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "experts that a softmax mixes are matrices": (
        """
        self.g, self.i, self.o = (nn.Linear(6, 4), nn.Linear(6, 9), nn.Linear(4, 3))
        self.c = nn.Parameter(torch.zeros(4, 9, 4))
        """,
        "x",
        """
        g, x = (self.g(x).softmax(-1), self.i(x))
        y = sum((g[:, i, None] * (x @ self.c[i]) for i in range(4)))
        return self.o(F.relu(y))
        """,
        "x(2, 5, 6)",
        {"matrix batch1 transposed": "c", "matrix": "g.weight i.weight", "output": "o.weight"},
    ),
    "queries in a stack are as doubtful as in a table": (
        """
        self.i, self.o = (nn.Linear(6, 8), nn.Linear(8, 3))
        self.q = nn.Parameter(torch.zeros(1, 4, 8))
        """,
        "x",
        """
        x = self.i(x)
        return self.o((self.q @ x.mT).softmax(-1) @ x)
        """,
        "x(2, 5, 6)",
        {"elementwise": "q", "matrix": "i.weight", "output": "o.weight"},
    ),
    "a bank of biases that queries mix is a table": (
        """
        self.i, self.o = (nn.Linear(6, 8), nn.Linear(8, 3))
        self.q, self.k, self.r = (nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        self.bank = nn.Parameter(torch.zeros(4, 9))
        """,
        "x",
        """
        x = self.i(x)
        bias = (self.r(x) @ self.bank).gather(-1, torch.zeros(2, 5, 5, dtype=torch.long))
        return self.o(x + ((self.q(x) @ self.k(x).mT) + bias).softmax(-1) @ x)
        """,
        "x(2, 5, 6)",
        {"elementwise": "bank", "matrix": "i.weight {q,k,r}.weight", "output": "o.weight"},
    ),
    "such a bank where a norm with gains follows queries and keys": (
        """
        self.i, self.o = (nn.Linear(6, 8), nn.Linear(8, 3))
        self.q, self.k, self.r = (nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        self.qn, self.kn, self.bank = nn.RMSNorm(8), nn.RMSNorm(8), nn.Parameter(torch.zeros(4, 9))
        """,
        "x",
        """
        x = self.i(x)
        bias = (self.r(x) @ self.bank).gather(-1, torch.zeros(2, 5, 5, dtype=torch.long))
        return self.o(x + F.scaled_dot_product_attention(self.qn(self.q(x)), self.kn(self.k(x)), x, attn_mask=bias))
        """,
        "x(2, 5, 6)",
        {"elementwise": "bank", "matrix": "i.weight {q,k,r}.weight", "output": "o.weight"},
    ),
    "a layer that takes codes alone is a table": (
        "self.e, self.a, self.h = (nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))",
        "ids",
        """
        y = 0
        for c in F.one_hot(ids, 9).float():
            y = y + self.e(c)
        return self.h(self.a(y).relu())
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight", "output": "h.weight"},
    ),
    "a layer that takes more than codes is no certain table": (
        "self.e, self.a, self.h = (nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))",
        "ids",
        """
        y = self.e(F.one_hot(ids, 9).float().cumsum(-1))
        return self.h(self.a(y).relu())
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight", "output": "h.weight"},
    ),
    "codes may be made by hand": (
        """
        self.t, self.w = (nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.h = nn.Linear(8, 9)
        """,
        "ids",
        """
        c, s = (F.one_hot(ids, 9).float(), torch.zeros(2, 8))
        c = (ids[..., None] == torch.arange(9)).float()
        s = torch.tanh(torch.relu(c @ self.t) @ self.w)
        return self.h(s)
        """,
        "ids(2, 5)",
        {"embedding": "t", "matrix transposed": "w", "output": "h.weight"},
    ),
    "the codes of a step are codes": (
        """
        self.t, self.w = (nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.h = nn.Linear(8, 9)
        """,
        "ids",
        """
        c, s = (F.one_hot(ids, 9).float(), torch.zeros(2, 8))
        for x in c.transpose(0, 1):
            s = torch.tanh(x @ self.t + s @ self.w)
        return self.h(s)
        """,
        "ids(2, 5)",
        {"embedding": "t", "matrix transposed": "w", "output": "h.weight"},
    ),
    "a bare router is ranked too": (
        """
        self.e, self.g, self.h = (nn.Embedding(9, 8), nn.Parameter(torch.zeros(4, 8)), nn.Linear(8, 9))
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        """,
        "ids",
        """
        x = self.e(ids)
        w, i = F.linear(x, self.g).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            m = (i == at).any(-1)
            y[m] += expert(x[m]) * w[m][:, :1]
        return self.h(x + y)
        """,
        "ids(2, 5)",
        {"matrix": "g experts.{0,1,2,3}.weight", "embedding": "e.weight", "output": "h.weight"},
    ),
    "a sum of the values of a dictionary is followed": (
        "self.first, self.a, self.b = (nn.Linear(7, 16), nn.Linear(16, 5), nn.Linear(16, 3))",
        "x, y, z",
        """
        x = self.first(x).relu()
        losses = {'a': F.mse_loss(self.a(x), y), 'b': F.mse_loss(self.b(x), z)}
        return sum(losses.values())
        """,
        "x(2, 5, 7), x(2, 5, 5), x(2, 5, 3)",
        {"matrix": "first.weight", "output": "a.weight b.weight"},
    ),
    "parts of streams in a dictionary are followed": (
        """
        self.aq = nn.Linear(16, 16)
        self.ak = nn.Linear(16, 16)
        self.av = nn.Linear(16, 16)
        self.bq = nn.Linear(12, 16)
        self.bk = nn.Linear(12, 16)
        self.bv = nn.Linear(12, 16)
        self.first, self.second = (nn.Linear(7, 16), nn.Linear(7, 12))
        self.out, self.head = (nn.Linear(16, 16), nn.Linear(16, 5))
        """,
        "x, y",
        """
        heads = lambda z: z.unflatten(-1, (2, 8)).transpose(1, 2)
        x, y = (self.first(x), self.second(y))
        made = {'a': (self.aq(x), self.ak(x), self.av(x)), 'b': (self.bq(y), self.bk(y), self.bv(y))}
        q, k, v = [heads(torch.cat(parts, 1)) for parts in map(list, zip(*made.values()))]
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x + self.out(z)[:, :x.shape[1]])
        """,
        "x(2, 5, 7), x(2, 5, 7)",
        {
            "matrix": "{a,b}{q,k,v}.weight first.weight second.weight out.weight",
            "output": "head.weight",
        },
    ),
    "a kernel made of parameters alone": (
        """
        self.e, self.h = (nn.Linear(6, 8), nn.Linear(8, 3))
        self.c, self.a = (nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(8, 4)))
        """,
        "ids, more=None",
        """
        k = -torch.exp(self.a).unsqueeze(-1) * torch.arange(ids.size(1))
        return self.h(F.gelu(self.e(ids) * torch.bmm(self.c[:, None], k.exp())[:, 0].T)).mean(1)
        """,
        "x(2, 5, 6)",
        {"elementwise": "c a", "matrix": "e.weight", "output": "h.weight"},
    ),
    "a low rank update by einsum": (
        """
        self.a, self.b = (nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(6, 2)))
        self.c, self.w = (nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(6, 8)))
        self.h = nn.Linear(6, 3)
        """,
        "ids, more=None",
        "return self.h(F.relu(F.linear(ids, torch.einsum('ri,or->oi', self.a, self.b) + self.w)))",
        "x(2, 5, 8)",
        {"matrix": "a b w", "output": "h.weight"},
    ),
    "an output that meets itself": (
        "self.a, self.b = (nn.Linear(8, 20), nn.Linear(20, 6))",
        "ids, more=None",
        """
        y = self.b(self.a(ids).relu())
        return (y * y).sum(-1)
        """,
        "x(2, 5, 8)",
        {"matrix": "a.weight", "output": "b.weight"},
    ),
    "a layer that takes codes alone is a table (2)": (
        "self.e, self.a, self.h = (nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))",
        "ids",
        """
        y = self.e(F.one_hot(ids, 9).float())
        return self.h(self.a(y).relu())
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight", "output": "h.weight"},
    ),
    "a layer that takes more than codes is no certain table (2)": (
        "self.e, self.a, self.h = (nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))",
        "ids",
        """
        y = self.e(F.one_hot(ids, 9).float()) @ self.e.weight @ self.e.weight.T
        return self.h(self.a(y).relu())
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight", "output": "h.weight"},
    ),
    "codes may be made by hand (2)": (
        """
        self.t, self.w = (nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.h = nn.Linear(8, 9)
        """,
        "ids",
        """
        c, s = (F.one_hot(ids, 9).float(), torch.zeros(2, 8))
        c = ids.unsqueeze(-1).eq(torch.arange(9)).float()
        s = torch.tanh(torch.relu(c @ self.t) @ self.w)
        return self.h(s)
        """,
        "ids(2, 5)",
        {"embedding": "t", "matrix transposed": "w", "output": "h.weight"},
    ),
    "the codes of a step are codes (2)": (
        """
        self.t, self.w = (nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.h = nn.Linear(8, 9)
        """,
        "ids",
        """
        c, s = (F.one_hot(ids, 9).float(), torch.zeros(2, 8))
        for n in range(3):
            s = torch.tanh(c[:, n, :] @ self.t + s @ self.w)
        return self.h(s)
        """,
        "ids(2, 5)",
        {"embedding": "t", "matrix transposed": "w", "output": "h.weight"},
    ),
    "parts of streams in a dictionary are followed (2)": (
        """
        self.aq = nn.Linear(16, 16)
        self.ak = nn.Linear(16, 16)
        self.av = nn.Linear(16, 16)
        self.bq = nn.Linear(12, 16)
        self.bk = nn.Linear(12, 16)
        self.bv = nn.Linear(12, 16)
        self.first, self.second = (nn.Linear(7, 16), nn.Linear(7, 12))
        self.out, self.head = (nn.Linear(16, 16), nn.Linear(16, 5))
        """,
        "x, y",
        """
        heads = lambda z: z.unflatten(-1, (2, 8)).transpose(1, 2)
        x, y = (self.first(x), self.second(y))
        made = {key: [getattr(self, key + part)(z) for part in 'qkv'] for key, z in (('a', x), ('b', y))}
        q, k, v = (heads(torch.cat(parts, dim=1)) for parts in zip(*made.values()))
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x + self.out(z)[:, :x.shape[1]])
        """,
        "x(2, 5, 7), x(2, 5, 7)",
        {
            "matrix": "{a,b}{q,k,v}.weight first.weight second.weight out.weight",
            "output": "head.weight",
        },
    ),
    "a kernel made of parameters alone (2)": (
        """
        self.e, self.h = (nn.Linear(6, 8), nn.Linear(8, 3))
        self.c, self.a = (nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(8, 4)))
        """,
        "ids, more=None",
        """
        k = -torch.exp(self.a).unsqueeze(-1) * torch.arange(ids.size(1))
        return self.h(F.gelu(self.e(ids) * torch.einsum('hn,hnl->hl', self.c, torch.exp(k)).T)).mean(1)
        """,
        "x(2, 5, 6)",
        {"elementwise": "c a", "matrix": "e.weight", "output": "h.weight"},
    ),
    "a low rank update by einsum (2)": (
        """
        self.a, self.b = (nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(6, 2)))
        self.c, self.w = (nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(6, 8)))
        self.h = nn.Linear(6, 3)
        """,
        "ids, more=None",
        "return self.h(F.relu(F.linear(ids, self.w + torch.einsum('or,ri->oi', self.b, self.a))))",
        "x(2, 5, 8)",
        {"matrix": "a b w", "output": "h.weight"},
    ),
    "an output that meets itself (2)": (
        "self.a, self.b = (nn.Linear(8, 20), nn.Linear(20, 6))",
        "ids, more=None",
        """
        y = self.b(self.a(ids).relu())
        return y @ y.T
        """,
        "x(5, 8)",
        {"matrix": "a.weight", "output": "b.weight"},
    ),
    "a layer that takes codes alone is a table (3)": (
        "self.e, self.a, self.h = (nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))",
        "ids",
        """
        y = self.e(F.one_hot(ids, 9).to(self.a.weight.dtype))
        return self.h(self.a(y).relu())
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight", "output": "h.weight"},
    ),
    "the codes of a step are codes (3)": (
        """
        self.t, self.w = (nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.h = nn.Linear(8, 9)
        """,
        "ids",
        """
        c, s = (F.one_hot(ids, 9).float(), torch.zeros(2, 8))
        for n in range(3):
            s = torch.tanh(c[:, n] @ self.t + s @ self.w)
        return self.h(s)
        """,
        "ids(2, 5)",
        {"embedding": "t", "matrix transposed": "w", "output": "h.weight"},
    ),
    "a kernel made of parameters alone (3)": (
        """
        self.e, self.h = (nn.Linear(6, 8), nn.Linear(8, 3))
        self.c, self.a = (nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(8, 4)))
        """,
        "ids, more=None",
        """
        k = -torch.exp(self.a).unsqueeze(-1) * torch.arange(ids.size(1))
        return self.h(F.gelu(self.e(ids) * (self.c.unsqueeze(1) @ torch.exp(k)).squeeze(1).T)).mean(1)
        """,
        "x(2, 5, 6)",
        {"elementwise": "c a", "matrix": "e.weight", "output": "h.weight"},
    ),
    "a low rank update by einsum (3)": (
        """
        self.a, self.b = (nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(6, 2)))
        self.c, self.w = (nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(6, 8)))
        self.h = nn.Linear(6, 3)
        """,
        "ids, more=None",
        "return self.h(F.relu(F.linear(ids, torch.einsum('pr,op,ri->oi', self.c, self.b, self.a) + self.w)))",
        "x(2, 5, 8)",
        {"matrix": "a b c w", "output": "h.weight"},
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
