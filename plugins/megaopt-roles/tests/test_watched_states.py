"""States, first states and recurrences: they are activations."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "what a model fills in is not given": (
        """
        self.embed, self.mix, self.step = (nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(13, 12))
        self.start, self.score = (nn.Parameter(torch.zeros(12)), nn.Linear(12, 1))
        """,
        "x",
        """
        nodes = self.embed(x)
        nodes = nodes + self.mix(nodes).relu()
        last, left, found = (self.start.expand(len(nodes), -1), nodes.new_ones(len(nodes), 1), [])
        for _ in range(3):
            q = self.step(torch.cat([last, left], -1)).relu()
            found.append(self.score(q))
            last, left = (nodes[:, 1], left - 0.1)
        return torch.cat(found, -1)
        """,
        "x(2, 5, 4)",
        {"matrix": "embed.weight mix.weight step.weight", "output": "score.weight"},
    ),
    "a list of two names stays one": (
        """
        self.u, self.w = (nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.register_buffer('h0', torch.ones(2, 1, 8))
        self.h = nn.Linear(8, 5)
        """,
        "x",
        """
        kept = rows = []
        for t in x.unbind(1):
            rows.append(torch.relu(t @ self.u) @ self.w)
            rows = rows
        s = torch.stack(kept)
        return self.h(s)
        """,
        "x(2, 5, 6)",
        {"matrix transposed": "u w", "output": "h.weight"},
    ),
    "a recurrence that begins with a buffer": (
        """
        self.u, self.w = (nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.register_buffer('h0', torch.ones(2, 1, 8))
        self.h = nn.Linear(8, 5)
        """,
        "x",
        """
        s, c = [part for part in self.h0]
        for t in x.unbind(1):
            n = torch.tanh(t @ self.u + s @ self.w)
            s, c = (n * c.sigmoid(), n + c)
        return self.h(s)
        """,
        "x(2, 5, 6)",
        {"matrix transposed": "u w", "output": "h.weight"},
    ),
    "a state of a method": (
        """
        self.u, self.w = (nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.register_buffer('h0', torch.ones(2, 1, 8))
        self.h = nn.Linear(8, 5)
        """,
        "x",
        """
        step = lambda t, h: torch.tanh(t @ self.u + h @ self.w)
        s = self.h0[0]
        for t in x.unbind(1):
            s = step(t, s)
        return self.h(s)
        """,
        "x(2, 5, 6)",
        {"matrix transposed": "u w", "output": "h.weight"},
    ),
    "what stays fixed is no state": (
        """
        self.u, self.w = (nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.register_buffer('h0', torch.ones(2, 1, 8))
        self.h = nn.Linear(8, 5)
        """,
        "x",
        """
        s = 0
        for t in x.unbind(1):
            s = s + t[:, :1] * (self.h0[0] @ self.w)
        return self.h(s)
        """,
        "x(2, 5, 8)",
        {"elementwise": "w", "output": "h.weight"},
    ),
    "a matrix that meets a first state": (
        "self.up, self.w, self.out = (nn.Linear(9, 16), nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 5))",
        "x",
        """
        h, _ = [s[0] for s in (torch.zeros(1, len(x), 16), torch.zeros(1, len(x), 16))]
        w = F.dropout(self.w, 0.2, self.training).t()
        for t in range(x.size(1)):
            h = torch.tanh(self.up(x[:, t]) + h @ w)
        return self.out(h)
        """,
        "x(2, 5, 9)",
        {"matrix": "w up.weight", "output": "out.weight"},
    ),
    "what a recurrent layer takes is hidden": (
        """
        self.gate, self.up, self.side = (nn.Linear(9, 20), nn.Linear(9, 20), nn.Linear(9, 20))
        self.cell, self.out = (nn.GRU(20, 28), nn.Linear(28, 5))
        """,
        "x",
        """
        t = torch.sigmoid(self.gate(x))
        h = t * torch.relu(self.up(x)) + (1 - t) * self.side(x)
        y, s = self.cell(h)
        return (self.out(y), s[-1])
        """,
        "x(2, 5, 9)",
        {
            "matrix": "gate.weight up.weight side.weight",
            "matrix rows:28,28,28": "cell.weight_ih_l0 cell.weight_hh_l0",
            "output": "out.weight",
        },
    ),
    "first states of a recurrence": (
        """
        self.e, self.h = (nn.Embedding(50, 16), nn.Linear(24, 50))
        self.w, self.u = (nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.randn(24, 24)))
        self.first = nn.Parameter(torch.zeros(2, 1, 24))
        """,
        "ids",
        """
        h, c = (s.expand(len(ids), -1) for s in self.first)
        for x in self.e(ids).unbind(1):
            gate = torch.sigmoid(F.linear(x, self.w) + h @ self.u.T)
            c = gate * c + (1 - gate)
            h = torch.tanh(c)
        return self.h(h)
        """,
        "ids(2, 5)",
        {"matrix": "w u", "elementwise": "first", "embedding": "e.weight", "output": "h.weight"},
    ),
    "what a model fills in is not given (2)": (
        """
        self.embed, self.mix, self.step = (nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(13, 12))
        self.start, self.score = (nn.Parameter(torch.zeros(12)), nn.Linear(12, 1))
        """,
        "x",
        """
        nodes = self.embed(x)
        nodes = nodes + self.mix(nodes).relu()
        last, left, found = (self.start.expand(len(nodes), -1), torch.ones_like(nodes[:, 0, :1]), [])
        for _ in range(3):
            q = self.step(torch.cat([last, left], -1)).relu()
            found.append(self.score(q))
            last, left = (nodes[:, 1], left - 0.1)
        return torch.cat(found, -1)
        """,
        "x(2, 5, 4)",
        {"matrix": "embed.weight mix.weight step.weight", "output": "score.weight"},
    ),
    "a recurrence that begins with a buffer (2)": (
        """
        self.u, self.w = (nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.register_buffer('h0', torch.ones(2, 1, 8))
        self.h = nn.Linear(8, 5)
        """,
        "x",
        """
        s, c = [part for part in self.h0]
        i = 0
        while i < x.shape[1]:
            s = torch.tanh(x[:, i] @ self.u + s @ self.w)
            i += 1
        return self.h(s)
        """,
        "x(2, 5, 6)",
        {"matrix transposed": "u w", "output": "h.weight"},
    ),
    "a matrix that meets a first state (2)": (
        "self.up, self.w, self.out = (nn.Linear(9, 16), nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 5))",
        "x",
        """
        h = torch.zeros(len(x), 16)
        w = F.dropout(self.w, 0.2, self.training).t()
        for t in range(x.size(1)):
            h = torch.tanh(self.up(x[:, t]) + h @ w)
        return self.out(h)
        """,
        "x(2, 5, 9)",
        {"matrix": "w up.weight", "output": "out.weight"},
    ),
    "what a recurrent layer takes is hidden (2)": (
        """
        self.gate, self.up, self.side = (nn.Linear(9, 20), nn.Linear(9, 20), nn.Linear(9, 20))
        self.cell, self.out = (nn.GRUCell(20, 28), nn.Linear(28, 5))
        """,
        "x",
        """
        t = torch.sigmoid(self.gate(x))
        h = t * torch.relu(self.up(x)) + (1 - t) * self.side(x)
        s = x.new_zeros(len(x), 28)
        for t in range(h.size(1)):
            s = self.cell(h[:, t], s)
        return (self.out(s), s)
        """,
        "x(2, 5, 9)",
        {
            "matrix": "gate.weight up.weight side.weight",
            "matrix rows:28,28,28": "cell.weight_ih cell.weight_hh",
            "output": "out.weight",
        },
    ),
    "first states of a recurrence (2)": (
        """
        self.e, self.h = (nn.Embedding(50, 16), nn.Linear(24, 50))
        self.w, self.u = (nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.randn(24, 24)))
        self.first = nn.Parameter(torch.zeros(2, 1, 24))
        """,
        "ids",
        """
        h, c = (s.expand(len(ids), -1) for s in self.first)
        for x in self.e(ids).unbind(1):
            gate = torch.sigmoid(F.linear(x, self.w) + torch.einsum('bi,oi->bo', h, self.u))
            c = gate * c + (1 - gate)
            h = torch.tanh(c)
        return self.h(h)
        """,
        "ids(2, 5)",
        {"matrix": "w u", "elementwise": "first", "embedding": "e.weight", "output": "h.weight"},
    ),
    "what a model fills in is not given (3)": (
        """
        self.embed, self.mix, self.step = (nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(13, 12))
        self.start, self.score = (nn.Parameter(torch.zeros(12)), nn.Linear(12, 1))
        """,
        "x",
        """
        nodes = self.embed(x)
        nodes = nodes + self.mix(nodes).relu()
        last, left, found = (self.start.expand(len(nodes), -1), torch.ones(len(nodes), 1), [])
        for _ in range(3):
            q = self.step(torch.cat([last, left], -1)).relu()
            found.append(self.score(q))
            last, left = (nodes[:, 1], left - 0.1)
        return torch.cat(found, -1)
        """,
        "x(2, 5, 4)",
        {"matrix": "embed.weight mix.weight step.weight", "output": "score.weight"},
    ),
    "a recurrence that begins with a buffer (3)": (
        """
        self.u, self.w = (nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 8)))
        self.register_buffer('h0', torch.ones(2, 1, 8))
        self.h = nn.Linear(8, 5)
        """,
        "x",
        """
        s, c = (self.h0[0], self.h0[1])
        i = 0
        while i < x.shape[1]:
            s = torch.tanh(x[:, i] @ self.u + s @ self.w)
            i += 1
        return self.h(s)
        """,
        "x(2, 5, 6)",
        {"matrix transposed": "u w", "output": "h.weight"},
    ),
    "a matrix that meets a first state (3)": (
        "self.up, self.w, self.out = (nn.Linear(9, 16), nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 5))",
        "x",
        """
        h = torch.zeros(1, 16).expand(len(x), -1)
        w = F.dropout(self.w, 0.2, self.training).t()
        for t in range(x.size(1)):
            h = torch.tanh(self.up(x[:, t]) + h @ w)
        return self.out(h)
        """,
        "x(2, 5, 9)",
        {"matrix": "w up.weight", "output": "out.weight"},
    ),
    "what a recurrent layer takes is hidden (3)": (
        """
        self.gate, self.up, self.side = (nn.Linear(9, 20), nn.Linear(9, 20), nn.Linear(9, 20))
        self.cell, self.out = (nn.LSTMCell(20, 28), nn.Linear(28, 5))
        """,
        "x",
        """
        t = torch.sigmoid(self.gate(x))
        h = t * torch.relu(self.up(x)) + (1 - t) * self.side(x)
        s = self.cell(h)
        return (self.out(s[0]), s)
        """,
        "x(5, 9)",
        {
            "matrix": "gate.weight up.weight side.weight",
            "matrix rows:28,28,28,28": "cell.weight_ih cell.weight_hh",
            "output": "out.weight",
        },
    ),
    "first states of a recurrence (3)": (
        """
        self.e, self.h = (nn.Embedding(50, 16), nn.Linear(24, 50))
        self.w, self.u = (nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.randn(24, 24)))
        self.first = nn.Parameter(torch.zeros(2, 1, 24))
        """,
        "ids",
        """
        h, c = (s.expand(len(ids), -1) for s in self.first)
        for x in self.e(ids).unbind(1):
            gate = torch.sigmoid(F.linear(x, self.w) + F.linear(h, self.u))
            c = gate * c + (1 - gate)
            h = torch.tanh(c)
        return self.h(h)
        """,
        "ids(2, 5)",
        {"matrix": "w u", "elementwise": "first", "embedding": "e.weight", "output": "h.weight"},
    ),
    "what a model fills in is not given (4)": (
        """
        self.embed, self.mix, self.step = (nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(13, 12))
        self.start, self.score = (nn.Parameter(torch.zeros(12)), nn.Linear(12, 1))
        """,
        "x",
        """
        nodes = self.embed(x)
        nodes = nodes + self.mix(nodes).relu()
        last, left, found = (self.start.expand(len(nodes), -1), torch.full_like(nodes[:, 0, :1], 2.0), [])
        for _ in range(3):
            q = self.step(torch.cat([last, left], -1)).relu()
            found.append(self.score(q))
            last, left = (nodes[:, 1], left - 0.1)
        return torch.cat(found, -1)
        """,
        "x(2, 5, 4)",
        {"matrix": "embed.weight mix.weight step.weight", "output": "score.weight"},
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
