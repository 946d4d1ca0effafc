"""Fused projections: which slices of a product are used apart."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "experts of which some are taken are matrices": (
        "self.experts, self.o = (nn.Parameter(torch.randn(16, 12, 8)), nn.Linear(8, 5))",
        "x",
        """
        some = self.experts[:x.shape[1]]
        return self.o(torch.einsum('bti,tio->bto', x, some))
        """,
        "x(2, 5, 12)",
        {"matrix batch1 transposed": "experts", "output": "o.weight"},
    ),
    "what a part leaves is read": (
        """
        self.q, self.k, self.v = (nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 8))
        self.rate, self.o, self.size = (nn.Linear(12, 2), nn.Linear(8, 5), 4)
        """,
        "x",
        """
        state, made = (torch.zeros(len(x), 8, 8), [])
        for part in torch.split(x, self.size, dim=1):
            made.append(torch.bmm(self.q(part), state))
            rate = self.rate(part).sigmoid().mean(1, keepdim=True)[..., :1]
            state = state * rate + torch.bmm(self.k(part).mT, self.v(part))
        return self.o(torch.cat(made, 1))
        """,
        "x(2, 5, 12)",
        {"matrix": "q.weight k.weight v.weight rate.weight", "output": "o.weight"},
    ),
    "the extent of a row": (
        "self.w, self.h = (nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 5))",
        "x",
        "return self.h(torch.relu(x @ (self.w / self.w[0].ndim ** 0.5)))",
        "x(2, 5, 8)",
        {"matrix transposed": "w", "output": "h.weight"},
    ),
    "a loop over parts that have names": (
        """
        self.e, self.qkv, self.o, self.h = (nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9))
        """,
        "ids",
        """
        x = self.e(ids)
        b, n, _ = x.shape
        h = self.qkv(x).reshape(b, n, 3, 2, -1).permute(2, 0, 3, 1, 4)
        q, k, v = h.unbind()
        q, k, v = (part.transpose(1, 2).flatten(2) for part in (q, k, v))
        return self.h(self.o((q @ k.mT).softmax(-1) @ v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "matrix rows:8,8,8": "qkv.weight",
            "matrix": "o.weight",
            "output": "h.weight",
        },
    ),
    "cuts whose arguments are named": (
        """
        self.e, self.qkv, self.o, self.h = (nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9))
        """,
        "ids",
        """
        h = self.qkv(self.e(ids))
        q, k, v = h.split(split_size=8, dim=-1)
        return self.h(self.o((q @ k.mT).softmax(-1) @ v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "matrix rows:8,8,8": "qkv.weight",
            "matrix": "o.weight",
            "output": "h.weight",
        },
    ),
    "what no other rank has tells the rank": (
        """
        self.k, self.v, self.beta = (nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 2))
        self.out = nn.Linear(8, 5)
        """,
        "x",
        """
        k, v = (layer(x).unflatten(-1, (2, 4)) for layer in (self.k, self.v))
        rate, made = (self.beta(x).sigmoid(), [])
        state = k.new_zeros(k.size(0), 2, 4, 4)
        for t in range(k.size(1)):
            state = state * rate[:, t, :, None, None]
            error = v[:, t] - (k[:, t, :, :, None] * state).sum(-2)
            state = state + torch.einsum('bhk,bhv->bhkv', k[:, t], error)
            made.append(torch.einsum('bhk,bhkv->bhv', k[:, t], state).flatten(1))
        return self.out(torch.stack(made, 1))
        """,
        "x(2, 5, 12)",
        {"matrix": "k.weight v.weight beta.weight", "output": "out.weight"},
    ),
    "parts as wide as something that is not known": (
        "self.e, self.m, self.h = (nn.Embedding(10, 32), nn.Linear(32, 64), nn.Linear(32, 9))",
        "ids, x",
        """
        s, b = self.m(self.e(ids)).view(-1, 1, 2, x.shape[-1]).unbind(2)
        return self.h(x * (1 + s) + b)
        """,
        "ids(2, 5), x(5, 32)",
        {"embedding": "e.weight", "matrix rows:32,32": "m.weight", "output": "h.weight"},
    ),
    "parts of an einsum that get names": (
        """
        self.e, self.h = (nn.Embedding(50, 32), nn.Linear(32, 50))
        self.w, self.o = (nn.Parameter(torch.zeros(32, 3, 4, 8)), nn.Linear(32, 32))
        """,
        "ids",
        """
        x = self.e(ids)
        q, k, v = torch.einsum('btd,dshe->sbhte', x, self.w)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.h(x + self.o(y.transpose(1, 2).flatten(2)))
        """,
        "ids(2, 5)",
        {
            "matrix transposed rows:32,32,32": "w",
            "embedding": "e.weight",
            "output": "h.weight",
            "matrix": "o.weight",
        },
    ),
    "what a part leaves is read (2)": (
        """
        self.q, self.k, self.v = (nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 8))
        self.rate, self.o, self.size = (nn.Linear(12, 2), nn.Linear(8, 5), 4)
        """,
        "x",
        """
        state, made = (torch.zeros(len(x), 8, 8), [])
        for part in x.split(self.size, 1):
            made.append(torch.bmm(self.q(part), state))
            rate = self.rate(part).sigmoid().mean(1, keepdim=True)[..., :1]
            state = state * rate + torch.bmm(self.k(part).mT, self.v(part))
        return self.o(torch.cat(made, 1))
        """,
        "x(2, 5, 12)",
        {"matrix": "q.weight k.weight v.weight rate.weight", "output": "o.weight"},
    ),
    "the extent of a row (2)": (
        "self.w, self.h = (nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 5))",
        "x",
        "return self.h(torch.relu(x @ (self.w / self.w[0].numel() ** 0.5)))",
        "x(2, 5, 8)",
        {"matrix transposed": "w", "output": "h.weight"},
    ),
    "a loop over parts that have names (2)": (
        """
        self.e, self.qkv, self.o, self.h = (nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9))
        """,
        "ids",
        """
        x = self.e(ids)
        b, n, _ = x.shape
        h = self.qkv(x).reshape(b, n, 3, 2, -1).permute(2, 0, 3, 1, 4)
        q, k, v = h.unbind(0)
        q, k, v = (part.transpose(1, 2).flatten(2) for part in (q, k, v))
        return self.h(self.o((q @ k.mT).softmax(-1) @ v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "matrix rows:8,8,8": "qkv.weight",
            "matrix": "o.weight",
            "output": "h.weight",
        },
    ),
    "cuts whose arguments are named (2)": (
        """
        self.e, self.qkv, self.o, self.h = (nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9))
        """,
        "ids",
        """
        h = self.qkv(self.e(ids))
        q, k, v = torch.chunk(input=h, chunks=3, dim=-1)
        return self.h(self.o((q @ k.mT).softmax(-1) @ v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "matrix rows:8,8,8": "qkv.weight",
            "matrix": "o.weight",
            "output": "h.weight",
        },
    ),
    "what no other rank has tells the rank (2)": (
        """
        self.k, self.v, self.beta = (nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 2))
        self.out = nn.Linear(8, 5)
        """,
        "x",
        """
        k, v = (layer(x).unflatten(-1, (2, 4)) for layer in (self.k, self.v))
        rate, made = (self.beta(x).sigmoid(), [])
        state = k.new_zeros(k.size(0), 2, 4, 4)
        for t in range(k.size(1)):
            state = state * rate[:, t, :, None, None]
            error = v[:, t] - torch.einsum('bhk,bhkv->bhv', k[:, t], state)
            state = state + torch.einsum('bhk,bhv->bhkv', k[:, t], error)
            made.append(torch.einsum('bhk,bhkv->bhv', k[:, t], state).flatten(1))
        return self.out(torch.stack(made, 1))
        """,
        "x(2, 5, 12)",
        {"matrix": "k.weight v.weight beta.weight", "output": "out.weight"},
    ),
    "the extent of a row (3)": (
        "self.w, self.h = (nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 5))",
        "x",
        "return self.h(torch.relu(x @ (self.w / self.w[0].shape[0] ** 0.5)))",
        "x(2, 5, 8)",
        {"matrix transposed": "w", "output": "h.weight"},
    ),
    "a loop over parts that have names (3)": (
        """
        self.e, self.qkv, self.o, self.h = (nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9))
        """,
        "ids",
        """
        x = self.e(ids)
        b, n, _ = x.shape
        h = self.qkv(x).reshape(b, n, 3, 2, -1).permute(2, 0, 3, 1, 4)
        q, k, v = h
        q, k, v = (part.transpose(1, 2).flatten(2) for part in (q, k, v))
        return self.h(self.o((q @ k.mT).softmax(-1) @ v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "matrix rows:8,8,8": "qkv.weight",
            "matrix": "o.weight",
            "output": "h.weight",
        },
    ),
    "cuts whose arguments are named (3)": (
        """
        self.e, self.qkv, self.o, self.h = (nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9))
        """,
        "ids",
        """
        h = self.qkv(self.e(ids))
        q, k, v = torch.split(h, split_size_or_sections=[8, 8, 8], dim=-1)
        return self.h(self.o((q @ k.mT).softmax(-1) @ v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "matrix rows:8,8,8": "qkv.weight",
            "matrix": "o.weight",
            "output": "h.weight",
        },
    ),
    "the extent of a row (4)": (
        "self.w, self.h = (nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 5))",
        "x",
        "return self.h(torch.relu(x @ (self.w / self.w[1].nelement() ** 0.5)))",
        "x(2, 5, 8)",
        {"matrix transposed": "w", "output": "h.weight"},
    ),
    "a loop over parts that have names (4)": (
        """
        self.e, self.qkv, self.o, self.h = (nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9))
        """,
        "ids",
        """
        x = self.e(ids)
        b, n, _ = x.shape
        h = self.qkv(x).reshape(b, n, 3, 2, -1).permute(2, 0, 3, 1, 4)
        q, k, v = torch.unbind(h, 0)
        q, k, v = (part.transpose(1, 2).flatten(2) for part in (q, k, v))
        return self.h(self.o((q @ k.mT).softmax(-1) @ v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "matrix rows:8,8,8": "qkv.weight",
            "matrix": "o.weight",
            "output": "h.weight",
        },
    ),
    "cuts whose arguments are named (4)": (
        """
        self.e, self.qkv, self.o, self.h = (nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9))
        """,
        "ids",
        """
        h = self.qkv(self.e(ids))
        q, k, v = torch.split(tensor=h, split_size_or_sections=8, dim=2)
        return self.h(self.o((q @ k.mT).softmax(-1) @ v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "matrix rows:8,8,8": "qkv.weight",
            "matrix": "o.weight",
            "output": "h.weight",
        },
    ),
    "the extent of a row (5)": (
        "self.w, self.h = (nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 5))",
        "x",
        "return self.h(torch.relu(x @ (self.w / self.w[:, 0].size(0) ** 0.5)))",
        "x(2, 5, 8)",
        {"matrix transposed": "w", "output": "h.weight"},
    ),
    "cuts whose arguments are named (5)": (
        """
        self.e, self.qkv, self.o, self.h = (nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9))
        """,
        "ids",
        """
        h = self.qkv(self.e(ids))
        q, k, v = torch.unbind(input=h.unflatten(-1, (3, 8)), dim=-2)
        return self.h(self.o((q @ k.mT).softmax(-1) @ v))
        """,
        "ids(2, 5)",
        {
            "embedding": "e.weight",
            "matrix rows:8,8,8": "qkv.weight",
            "matrix": "o.weight",
            "output": "h.weight",
        },
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
