"""Outputs that later layers read again, refine or add to: a stream, or an output."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "boxes that are refined and returned are no certain matrices": (
        """
        self.memory, self.where, self.mix = (nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 8))
        self.boxes, self.scores = (nn.ModuleList(nn.Linear(8, 4) for _ in range(2)), nn.Linear(8, 5))
        """,
        "x",
        """
        box, h, found = (x.new_zeros(2, 5, 4), self.memory(x), [])
        for refine in self.boxes:
            h = h + self.mix((h + self.where(box)).relu())
            box = (refine(h) + box).sigmoid()
            found.append(box)
        return torch.stack(found), self.scores(h)
        """,
        "x(2, 5, 6)",
        {
            "matrix": "memory.weight where.weight mix.weight",
            "matrix?": "boxes.{0,1}.weight",
            "output": "scores.weight",
        },
    ),
    "a trained mean is a layer": (
        """
        self.n, self.a, self.b = (2, nn.Linear(6, 8), nn.Linear(8, 8))
        self.boxes = nn.ModuleList((nn.Linear(8, 5) for _ in range(2)))
        self.bins = nn.Linear(5, 1, bias=False)
        """,
        "x",
        "return self.bins(self.boxes[0](x).softmax(-1))",
        "x(2, 5, 8)",
        {"matrix": "a.weight b.weight boxes.{0,1}.weight", "output": "bins.weight"},
    ),
    "what may be a head is no certain matrix": (
        "self.body, self.head = (nn.Linear(16, 32), nn.Linear(32, 5))",
        "x, more=None",
        """
        h = self.body(x).relu()
        y = self.head(h) if more is None else h
        if more is not None:
            y = self.head(torch.cat([y, more], -1))
        return y.sigmoid()
        """,
        "x(2, 5, 16)",
        {"matrix": "body.weight", "output": "head.weight"},
    ),
    "a table refines nothing": (
        """
        self.codes = nn.Embedding(30, 10)
        self.first, self.before, self.after = (nn.Linear(9, 24), nn.Linear(24, 10), nn.Linear(10, 24))
        self.last = nn.Linear(24, 9)
        """,
        "x",
        """
        z = self.before(self.first(x).relu())
        ids = torch.cdist(z, self.codes.weight).argmin(-1)
        q = F.embedding(ids, self.codes.weight)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        y = self.last(self.after(z + (q - z).detach()).relu())
        return {'loss': F.mse_loss(y, x) + loss, 'y': y}
        """,
        "x(2, 5, 9)",
        {
            "embedding": "codes.weight",
            "matrix": "first.weight before.weight after.weight",
            "output": "last.weight",
        },
    ),
    "what may be a vector is still an activation": (
        """
        self.a, self.b, self.h = (nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 5))
        self.zero, self.row = (nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(1, 8)))
        self.w, self.many = (nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(6, 8)))
        """,
        "x, sizes=None",
        """
        a = self.a(x)
        y = self.b(a if sizes is not None else self.many[0])
        return self.h(y.relu())
        """,
        "x(2, 5, 9)",
        {"elementwise": "many", "matrix": "a.weight b.weight", "output": "h.weight"},
    ),
    "parts begin no stream": (
        """
        self.a, self.t = (nn.Linear(24, 16), nn.Linear(16, 8))
        self.b, self.o = (nn.Linear(24, 8), nn.Linear(8, 8))
        self.register_buffer('back', torch.ones(4, 24))
        self.register_buffer('front', torch.ones(4, 8))
        """,
        "x",
        """
        t = self.t(self.a(x).relu())
        x = x - t[:, :4] @ self.back
        return (x, t[:, 4:] @ self.front + self.o(self.b(x).relu()))
        """,
        "x(5, 24)",
        {"matrix": "a.weight b.weight", "output?": "o.weight", "matrix rows:4,4": "t.weight"},
    ),
    "a table refines nothing (2)": (
        """
        self.codes = nn.Parameter(torch.randn(30, 10))
        self.first, self.before, self.after = (nn.Linear(9, 24), nn.Linear(24, 10), nn.Linear(10, 24))
        self.last = nn.Linear(24, 9)
        """,
        "x",
        """
        z = self.before(self.first(x).relu())
        ids = (z @ self.codes.T).argmax(-1)
        q = self.codes[ids]
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        y = self.last(self.after(z + (q - z).detach()).relu())
        return {'loss': F.mse_loss(y, x) + loss, 'y': y}
        """,
        "x(2, 5, 9)",
        {"embedding": "codes", "matrix": "first.weight before.weight after.weight", "output": "last.weight"},
    ),
    "what may be a vector is still an activation (2)": (
        """
        self.a, self.b, self.h = (nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 5))
        self.zero, self.row = (nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(1, 8)))
        self.w, self.many = (nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(6, 8)))
        """,
        "x, sizes=None",
        """
        a = self.a(x)
        if sizes is None:
            y = self.row
        else:
            y = a
        y = self.b(y)
        return self.h(y.relu())
        """,
        "x(2, 5, 9)",
        {"matrix": "a.weight b.weight", "output": "h.weight"},
    ),
    "a table refines nothing (3)": (
        """
        self.codes = nn.Embedding(30, 10)
        self.first, self.before, self.after = (nn.Linear(9, 24), nn.Linear(24, 10), nn.Linear(10, 24))
        self.last = nn.Linear(24, 9)
        """,
        "x",
        """
        z = self.before(self.first(x).relu())
        ids = torch.cdist(z, self.codes.weight).argmin(-1)
        q = self.codes(ids)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        y = self.last(self.after(z + (q - z).detach()).relu())
        return {'loss': F.mse_loss(y, x) + loss, 'y': y}
        """,
        "x(2, 5, 9)",
        {
            "embedding": "codes.weight",
            "matrix": "first.weight before.weight after.weight",
            "output": "last.weight",
        },
    ),
    "what may be a vector is still an activation (3)": (
        """
        self.a, self.b, self.h = (nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 5))
        self.zero, self.row = (nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(1, 8)))
        self.w, self.many = (nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(6, 8)))
        """,
        "x, sizes=None",
        """
        a = self.a(x)
        y = a
        if sizes is None:
            y = self.zero
        y = self.b(y).tanh()
        return self.h(y.relu())
        """,
        "x(2, 5, 9)",
        {"matrix": "a.weight b.weight", "output": "h.weight"},
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
