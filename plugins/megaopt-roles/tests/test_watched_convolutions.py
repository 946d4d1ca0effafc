"""Convolutions by hand and by layers."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "kernels of gates": (
        """
        self.s, self.h = (nn.Conv1d(5, 12, 1), nn.Conv1d(18, 9, 1))
        self.k = nn.Parameter(torch.randn(36, 12, 3))
        """,
        "x",
        """
        x = self.s(x)
        a, b = torch.chunk(F.conv1d(x, weight=self.k, padding='same'), 2, dim=1)
        return self.h(torch.tanh(a) * torch.sigmoid(b))
        """,
        "x(2, 5, 8)",
        {"matrix rows:18,18": "k", "matrix": "s.weight", "output": "h.weight"},
    ),
    "shifts along time": (
        """
        self.e, self.h = (nn.Embedding(50, 16), nn.Linear(16, 50))
        self.w, self.o = (nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24, 16)))
        """,
        "ids",
        """
        x = self.e(ids)
        for _ in range(2):
            x = x + ((F.pad(x, [0, 0, 1, 0])[:, :-1] + x) @ self.w).relu() @ self.o
        return self.h(x)
        """,
        "ids(2, 5)",
        {"matrix transposed": "w o", "embedding": "e.weight", "output": "h.weight"},
    ),
    "channels by themselves stay what they are": (
        """
        self.into, self.out = (nn.Linear(9, 36), nn.Linear(12, 7))
        self.filter, self.bias = (nn.Parameter(torch.randn(36, 1, 3)), nn.Parameter(torch.zeros(36)))
        self.conv = nn.Conv1d(36, 36, 3, groups=36, padding=2)
        """,
        "x",
        """
        u = self.into(x).transpose(1, 2)
        u = self.conv(u)[..., :x.shape[1]]
        q, k, v = u.chunk(3, 1)
        return self.out((q * k.sigmoid() * v).mT)
        """,
        "x(2, 5, 9)",
        {"matrix rows:12,12,12": "into.weight", "output": "out.weight", "elementwise": "conv.weight"},
    ),
    "stacks in an einsum are taken apart": (
        """
        self.up, self.down = (nn.Parameter(torch.randn(3, 9, 40)), nn.Parameter(torch.randn(3, 20, 9)))
        self.head = nn.Linear(9, 5)
        """,
        "x",
        """
        g, u = torch.einsum('nd,edh->enh', x, self.up).chunk(2, -1)
        return self.head(torch.bmm(g.sigmoid() * u, self.down).sum(0))
        """,
        "x(5, 9)",
        {
            "matrix batch1 transposed rows:20,20": "up",
            "matrix batch1 transposed": "down",
            "output": "head.weight",
        },
    ),
    "kernels of gates (2)": (
        """
        self.s, self.h = (nn.Conv1d(5, 12, 1), nn.Conv1d(18, 9, 1))
        self.k = nn.Parameter(torch.randn(36, 12, 3))
        """,
        "x",
        """
        x = self.s(x)
        a, b = F.conv1d(x, self.k, padding=1).chunk(2, 1)
        return self.h(torch.tanh(a) * torch.sigmoid(b))
        """,
        "x(2, 5, 8)",
        {"matrix rows:18,18": "k", "matrix": "s.weight", "output": "h.weight"},
    ),
    "shifts along time (2)": (
        """
        self.e, self.h = (nn.Embedding(50, 16), nn.Linear(16, 50))
        self.w, self.o = (nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24, 16)))
        """,
        "ids",
        """
        x = self.e(ids)
        for _ in range(2):
            x = x + ((F.pad(input=x, pad=(0, 0, 1, -1)) + x) @ self.w).relu() @ self.o
        return self.h(x)
        """,
        "ids(2, 5)",
        {"matrix transposed": "w o", "embedding": "e.weight", "output": "h.weight"},
    ),
    "channels by themselves stay what they are (2)": (
        """
        self.into, self.out = (nn.Linear(9, 36), nn.Linear(12, 7))
        self.filter, self.bias = (nn.Parameter(torch.randn(36, 1, 3)), nn.Parameter(torch.zeros(36)))
        self.conv = nn.Conv1d(36, 36, 3, groups=36, padding=2)
        """,
        "x",
        """
        u = self.into(x).transpose(1, 2)
        u = F.conv1d(u, self.filter, padding=2, groups=u.size(1))[..., :x.size(1)]
        q, k, v = u.chunk(3, 1)
        return self.out((q * k.sigmoid() * v).mT)
        """,
        "x(2, 5, 9)",
        {"elementwise": "filter conv.weight", "matrix rows:12,12,12": "into.weight", "output": "out.weight"},
    ),
    "stacks in an einsum are taken apart (2)": (
        """
        self.up, self.down = (nn.Parameter(torch.randn(3, 9, 40)), nn.Parameter(torch.randn(3, 20, 9)))
        self.head = nn.Linear(9, 5)
        """,
        "x",
        """
        g, u = torch.einsum('end,edh->enh', x.expand(3, *x.shape), self.up).chunk(2, -1)
        return self.head(torch.einsum('enh,ehd->nd', g.sigmoid() * u, self.down))
        """,
        "x(5, 9)",
        {
            "matrix batch1 transposed rows:20,20": "up",
            "matrix transposed first2": "down",
            "output": "head.weight",
        },
    ),
    "kernels of gates (3)": (
        """
        self.s, self.h = (nn.Conv1d(5, 12, 1), nn.Conv1d(18, 9, 1))
        self.k = nn.Parameter(torch.randn(36, 12, 3))
        """,
        "x",
        """
        x = self.s(x)
        y = F.conv1d(x, self.k, padding=1)
        a, b = (y[:, :18], y[:, 18:])
        return self.h(torch.tanh(a) * torch.sigmoid(b))
        """,
        "x(2, 5, 8)",
        {"matrix rows:18,18": "k", "matrix": "s.weight", "output": "h.weight"},
    ),
    "shifts along time (3)": (
        """
        self.e, self.h = (nn.Embedding(50, 16), nn.Linear(16, 50))
        self.w, self.o = (nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24, 16)))
        """,
        "ids",
        """
        x = self.e(ids)
        for _ in range(2):
            x = x + ((nn.functional.pad(x, pad=(0, 0, 1, -1), value=0.0) + x) @ self.w).relu() @ self.o
        return self.h(x)
        """,
        "ids(2, 5)",
        {"matrix transposed": "w o", "embedding": "e.weight", "output": "h.weight"},
    ),
    "channels by themselves stay what they are (3)": (
        """
        self.into, self.out = (nn.Linear(9, 36), nn.Linear(12, 7))
        self.filter, self.bias = (nn.Parameter(torch.randn(36, 1, 3)), nn.Parameter(torch.zeros(36)))
        self.conv = nn.Conv1d(36, 36, 3, groups=36, padding=2)
        """,
        "x",
        """
        u = self.into(x).transpose(1, 2)
        u = F.conv1d(u, self.conv.weight, self.conv.bias, padding=2, groups=36)[..., :x.shape[1]]
        q, k, v = u.chunk(3, 1)
        return self.out((q * k.sigmoid() * v).mT)
        """,
        "x(2, 5, 9)",
        {"matrix rows:12,12,12": "into.weight", "output": "out.weight", "elementwise": "conv.weight"},
    ),
    "stacks in an einsum are taken apart (3)": (
        """
        self.up, self.down = (nn.Parameter(torch.randn(3, 9, 40)), nn.Parameter(torch.randn(3, 20, 9)))
        self.head = nn.Linear(9, 5)
        """,
        "x",
        """
        g, u = torch.einsum('bsd,edh->besh', x[None], self.up).chunk(2, -1)
        return self.head(torch.einsum('besh,ehd->bsd', g.sigmoid() * u, self.down))
        """,
        "x(5, 9)",
        {
            "matrix batch1 transposed rows:20,20": "up",
            "matrix transposed first2": "down",
            "output": "head.weight",
        },
    ),
    "kernels of gates (4)": (
        """
        self.s, self.h = (nn.Conv1d(5, 12, 1), nn.Conv1d(18, 9, 1))
        self.k = nn.Parameter(torch.randn(36, 12, 3))
        """,
        "x",
        """
        x = self.s(x)
        a, b = torch.conv1d(x, self.k, None, 1, 1).split(18, dim=1)
        return self.h(torch.tanh(a) * torch.sigmoid(b))
        """,
        "x(2, 5, 8)",
        {"matrix rows:18,18": "k", "matrix": "s.weight", "output": "h.weight"},
    ),
    "shifts along time (4)": (
        """
        self.e, self.h = (nn.Embedding(50, 16), nn.Linear(16, 50))
        self.w, self.o = (nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24, 16)))
        """,
        "ids",
        """
        x = self.e(ids)
        for _ in range(2):
            x = x + ((F.pad(x, (0, 0, 1, -1)) + x) @ self.w).relu() @ self.o
        return self.h(x)
        """,
        "ids(2, 5)",
        {"matrix transposed": "w o", "embedding": "e.weight", "output": "h.weight"},
    ),
    "channels by themselves stay what they are (4)": (
        """
        self.into, self.out = (nn.Linear(9, 36), nn.Linear(12, 7))
        self.filter, self.bias = (nn.Parameter(torch.randn(36, 1, 3)), nn.Parameter(torch.zeros(36)))
        self.conv = nn.Conv1d(36, 36, 3, groups=36, padding=2)
        """,
        "x",
        """
        u = self.into(x).transpose(1, 2)
        u = F.silu(F.conv1d(u, self.filter, self.bias, 1, 2, 1, 36)[..., :x.shape[1]])
        q, k, v = u.chunk(3, 1)
        return self.out((q * k.sigmoid() * v).mT)
        """,
        "x(2, 5, 9)",
        {"elementwise": "filter conv.weight", "matrix rows:12,12,12": "into.weight", "output": "out.weight"},
    ),
    "stacks in an einsum are taken apart (4)": (
        """
        self.up, self.down = (nn.Parameter(torch.randn(3, 9, 40)), nn.Parameter(torch.randn(3, 20, 9)))
        self.head = nn.Linear(9, 5)
        """,
        "x",
        """
        g, u = torch.einsum('nd,edh->neh', x, self.up).chunk(2, -1)
        return self.head(torch.einsum('neh,ehd->nd', g.sigmoid() * u, self.down))
        """,
        "x(5, 9)",
        {
            "matrix batch1 transposed rows:20,20": "up",
            "matrix transposed first2": "down",
            "output": "head.weight",
        },
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
