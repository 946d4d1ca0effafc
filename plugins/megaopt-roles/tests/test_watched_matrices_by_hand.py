"""Products with bare matrices that look like something else."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "a layer before an einsum is hidden": (
        """
        self.a = nn.Linear(6, 8)
        self.w = nn.Parameter(torch.zeros(3, 8, 5))
        """,
        "x",
        """
        x = self.a(x)
        return torch.einsum('bi,nio->nbo', x, self.w)
        """,
        "x(5, 6)",
        {"output": "w", "matrix": "a.weight"},
    ),
    "what the example does not tell": (
        """
        self.a, self.w = (nn.Linear(6, 16), nn.Parameter(torch.zeros(16, 4)))
        self.s = nn.Parameter(torch.zeros(4, 1))
        """,
        "x",
        """
        y = self.a(x).relu() @ self.w
        return (y @ self.s).transpose(1, 2).softmax(-1) @ y
        """,
        "x(2, 5, 6)",
        {"matrix transposed": "w", "matrix": "a.weight"},
    ),
    "a weight that activations are added to": (
        """
        self.base, self.position = (nn.Parameter(torch.zeros(8, 6)), nn.Parameter(torch.zeros(5, 6)))
        self.make, self.head = (nn.Linear(6, 48), nn.Linear(8, 3))
        """,
        "x",
        """
        x = x + self.position
        w = self.base + self.make(x.mean(0)).view(8, 6)
        return self.head(F.linear(x, w).relu())
        """,
        "x(5, 6)",
        {"elementwise": "base position", "matrix": "make.weight", "output": "head.weight"},
    ),
    "convolutions of codes": (
        "self.table, self.b, self.head = (nn.Conv1d(9, 6, 1), nn.Linear(6, 8), nn.Linear(8, 7))",
        "ids",
        "return self.head(self.b(self.table(F.one_hot(ids, 9).float().transpose(1, 2)).mT).relu())",
        "ids(2, 5)",
        {"embedding": "table.weight", "matrix": "b.weight", "output": "head.weight"},
    ),
    "fused heads of four axes": (
        """
        self.e, self.w = (nn.Embedding(9, 6), nn.Parameter(torch.zeros(3, 6, 2, 4)))
        self.o, self.head = (nn.Linear(8, 6), nn.Linear(6, 9))
        """,
        "x",
        """
        x = self.e(x)
        q, k, v = torch.einsum('btd,cdhk->cbhtk', x, self.w)
        y = (q @ k.mT).softmax(-1) @ v
        return self.head(self.o(y.transpose(1, 2).flatten(2)))
        """,
        "ids(2, 5)",
        {
            "matrix batch1 transposed": "w",
            "embedding": "e.weight",
            "matrix": "o.weight",
            "output": "head.weight",
        },
    ),
    "hidden products": (
        """
        self.a, self.head = (nn.Linear(5, 6), nn.Linear(8, 7))
        self.w = nn.Parameter(torch.zeros(8, 6))
        self.register_buffer('order', torch.arange(8))
        """,
        "x",
        """
        x = self.a(x).relu()
        return self.head(F.relu(F.linear(x, torch.distributions.Normal(self.w, 0.1).rsample())))
        """,
        "x(2, 5, 5)",
        {"matrix": "w a.weight", "output": "head.weight"},
    ),
    "sums of shares": (
        "self.a, self.value, self.share, self.other = (nn.Linear(6, n) for n in (6, 3, 1, 3))",
        "x",
        """
        x = self.a(x).relu()
        return (self.other(x) * self.value(x)).sum(-1)
        """,
        "x(2, 5, 6)",
        {"matrix": "a.weight", "output": "value.weight other.weight"},
    ),
    "weights that move for each sample": (
        """
        self.a, self.delta, self.head = (nn.Linear(5, 6), nn.Linear(3, 48), nn.Linear(8, 7))
        self.w = nn.Parameter(torch.zeros(6, 8))
        """,
        "x, c",
        """
        x = self.a(x).relu()
        return self.head(F.relu(x @ (self.delta(c).unflatten(-1, (6, 8)) + self.w)))
        """,
        "x(5, 5), x(2, 5, 3)",
        {"elementwise": "w", "matrix": "a.weight delta.weight", "output": "head.weight"},
    ),
    "a layer before an einsum is hidden (2)": (
        """
        self.a = nn.Linear(6, 8)
        self.w, self.s = (nn.Parameter(torch.zeros(5, 8)), nn.Parameter(torch.zeros(5)))
        """,
        "x",
        """
        x = self.a(x)
        return torch.einsum('bi,oi,o->bo', x, self.w, self.s)
        """,
        "x(5, 6)",
        {"output": "w", "matrix": "a.weight"},
    ),
    "a layer makes the weight that takes the product of another": (
        """
        self.a, self.b = (nn.Linear(6, 16), nn.Linear(16, 24))
        self.c = nn.Linear(6, 8)
        """,
        "x",
        "return self.c(x).relu() @ self.b(self.a(x[:, 0]).relu()).view(-1, 8, 3)",
        "x(2, 5, 6)",
        {"matrix": "a.weight b.weight c.weight"},
    ),
    "convolutions of codes (2)": (
        "self.table, self.b, self.head = (nn.Conv1d(9, 6, 2), nn.Linear(6, 8), nn.Linear(8, 7))",
        "ids",
        "return self.head(self.b(self.table(F.pad(F.one_hot(ids, 9).float().mT, (1, 0))).mT).relu())",
        "ids(2, 5)",
        {"embedding": "table.weight", "matrix": "b.weight", "output": "head.weight"},
    ),
    "hidden products (2)": (
        """
        self.a, self.head = (nn.Linear(5, 6), nn.Linear(8, 7))
        self.w = nn.Parameter(torch.zeros(8, 6))
        self.register_buffer('order', torch.arange(8))
        """,
        "x",
        """
        x = self.a(x).relu()
        return self.head(F.relu(F.linear(x, self.w.index_select(0, self.order))))
        """,
        "x(2, 5, 5)",
        {"elementwise": "w", "matrix": "a.weight", "output": "head.weight"},
    ),
    "weights that move for each sample (2)": (
        """
        self.a, self.delta, self.head = (nn.Linear(5, 6), nn.Linear(3, 48), nn.Linear(8, 7))
        self.w = nn.Parameter(torch.zeros(6, 8))
        """,
        "x, c",
        """
        x = self.a(x).relu()
        return self.head(F.relu(x @ (self.w - self.delta(c).view(-1, 6, 8))))
        """,
        "x(5, 5), x(2, 5, 3)",
        {"elementwise": "w", "matrix": "a.weight delta.weight", "output": "head.weight"},
    ),
    "a layer before an einsum is hidden (3)": (
        """
        self.a = nn.Linear(6, 8)
        self.w = nn.Parameter(torch.zeros(5, 8))
        """,
        "x",
        """
        x = self.a(x)
        return torch.einsum('oi,bi->bo', self.w, x)
        """,
        "x(5, 6)",
        {"output": "w", "matrix": "a.weight"},
    ),
    "what the example does not tell (3)": (
        """
        self.a, self.b = (nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 12)) for _ in range(2))
        """,
        "x",
        "return self.a(x[:, 0]) @ self.b(x[:, 1]).T",
        "x(2, 5, 6)",
        {"matrix": "a.0.weight b.0.weight", "output": "a.2.weight b.2.weight"},
    ),
    "convolutions of codes (3)": (
        "self.table, self.b, self.head = (nn.Conv1d(9, 6, 1), nn.Linear(6, 8), nn.Linear(8, 7))",
        "ids",
        "return self.head(self.b(self.table(F.one_hot(ids, 9).float().permute(0, 2, 1)).mT).relu())",
        "ids(2, 5)",
        {"embedding": "table.weight", "matrix": "b.weight", "output": "head.weight"},
    ),
    "hidden products (3)": (
        """
        self.a, self.head = (nn.Linear(5, 6), nn.Linear(8, 7))
        self.w = nn.Parameter(torch.zeros(8, 6))
        self.register_buffer('order', torch.arange(8))
        """,
        "x",
        """
        x = self.a(x).relu()
        return self.head(F.relu(F.linear(x, self.w[self.order])))
        """,
        "x(2, 5, 5)",
        {"elementwise": "w", "matrix": "a.weight", "output": "head.weight"},
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
