"""Gates, shares and mixtures: they weigh what others make, and are hidden."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "what weighs nothing is no certain gate": (
        """
        self.first, self.base, self.gate = (nn.Linear(9, 12), nn.Linear(12, 7), nn.Linear(12, 5))
        self.hand = nn.Parameter(torch.zeros(12, 5))
        self.a, self.b = (nn.Parameter(torch.zeros(5, 4, 12)), nn.Parameter(torch.zeros(5, 7, 4)))
        self.w = nn.Parameter(torch.zeros(5, 12, 7))
        self.experts = nn.ModuleList((nn.Linear(12, 7) for _ in range(5)))
        """,
        "x",
        """
        h = self.first(x).relu()
        q = (h @ self.hand).log_softmax(-1)
        return (self.gate(h).softmax(-1) * q).sum(-1, True).expand(2, 5, 7)
        """,
        "x(2, 5, 9)",
        {"output": "hand gate.weight", "matrix": "first.weight"},
    ),
    "a rotation puts halves together again": (
        "self.i, self.turned, self.o = (nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3))",
        "x",
        """
        a, b = self.turned(self.i(x)).chunk(2, -1)
        y = torch.stack((a * 0.6 - b * 0.8, b * 0.6 + a * 0.8), -1).flatten(-2)
        return self.o(y.relu())
        """,
        "x(2, 5, 5)",
        {"matrix": "i.weight turned.weight", "output": "o.weight"},
    ),
    "steps of a scan do not put gates together again": (
        "self.i, self.gates, self.o = (nn.Linear(5, 8), nn.Linear(8, 24), nn.Linear(8, 3))",
        "x",
        """
        z, f, o = self.gates(self.i(x)).chunk(3, -1)
        c, found = (0, [])
        for t in range(x.size(1)):
            g = f[:, t].sigmoid()
            c = g * c + (1 - g) * z[:, t].tanh()
            found.append(o[:, t].sigmoid() * c)
        return self.o(torch.stack(found))
        """,
        "x(2, 5, 5)",
        {"matrix": "i.weight", "matrix rows:8,8,8": "gates.weight", "output": "o.weight"},
    ),
    "predictions stay certain": (
        """
        self.enc, self.parts, self.gate = (nn.LSTM(9, 20, batch_first=True), nn.Linear(20, 5), nn.Linear(20, 5))
        self.act = nn.Softmax(-1)
        """,
        "x, y",
        """
        h = self.enc(x)[0]
        p = self.parts(h)
        w = self.gate(h).softmax(-1)
        return (p, w, -(w * w.log()).sum(-1))
        """,
        "x(2, 5, 9), x(2, 5, 20)",
        {
            "matrix rows:20,20,20,20": "enc.weight_ih_l0 enc.weight_hh_l0",
            "output": "parts.weight gate.weight",
        },
    ),
    "shares of predictions are in doubt": (
        """
        self.enc, self.parts, self.gate = (nn.LSTM(9, 20, batch_first=True), nn.Linear(20, 5), nn.Linear(20, 5))
        self.act = nn.Softmax(-1)
        """,
        "x, y",
        """
        h = self.enc(x)[0]
        p = self.parts(h)
        w = self.gate(h).softmax(-1)
        return F.mse_loss((w * p).sum(-1), y)
        """,
        "x(2, 5, 9), ids(2, 5)",
        {
            "matrix rows:20,20,20,20": "enc.weight_ih_l0 enc.weight_hh_l0",
            "output": "parts.weight gate.weight",
        },
    ),
    "steps of a scan do not put gates together again (2)": (
        "self.i, self.gates, self.o = (nn.Linear(5, 8), nn.Linear(8, 24), nn.Linear(8, 3))",
        "x",
        """
        z, f, o = self.gates(self.i(x)).chunk(3, -1)
        c, found = (0, [])
        for t in range(x.size(1)):
            g = f[:, t].sigmoid()
            c = g * c + (1 - g) * z[:, t].tanh()
            found.append(o[:, t].sigmoid() * c)
        return self.o(torch.stack(found, 1))
        """,
        "x(2, 5, 5)",
        {"matrix": "i.weight", "matrix rows:8,8,8": "gates.weight", "output": "o.weight"},
    ),
    "predictions stay certain (2)": (
        """
        self.enc, self.parts, self.gate = (nn.LSTM(9, 20, batch_first=True), nn.Linear(20, 5), nn.Linear(20, 5))
        self.act = nn.Softmax(-1)
        """,
        "x, y",
        """
        h = self.enc(x)[0]
        p = self.parts(h)
        w = self.gate(h)
        return F.cross_entropy(w.flatten(0, 1), y.flatten()) + (w.softmax(-1) * p).sum(-1).mean()
        """,
        "x(2, 5, 9), ids(2, 5)",
        {
            "matrix rows:20,20,20,20": "enc.weight_ih_l0 enc.weight_hh_l0",
            "output": "parts.weight gate.weight",
        },
    ),
    "shares of predictions are in doubt (2)": (
        """
        self.enc, self.parts, self.gate = (nn.LSTM(9, 20, batch_first=True), nn.Linear(20, 5), nn.Linear(20, 5))
        self.act = nn.Softmax(-1)
        """,
        "x, y",
        """
        h = self.enc(x)[0]
        p = self.parts(h)
        w = self.act(self.gate(h))
        return {'score': (p * w).sum(-1), 'parts': p}
        """,
        "x(2, 5, 9), x(2, 5, 20)",
        {
            "matrix rows:20,20,20,20": "enc.weight_ih_l0 enc.weight_hh_l0",
            "output": "parts.weight gate.weight",
        },
    ),
    "steps of a scan do not put gates together again (3)": (
        "self.i, self.gates, self.o = (nn.Linear(5, 8), nn.Linear(8, 24), nn.Linear(8, 3))",
        "x",
        """
        z, f, o = self.gates(self.i(x)).chunk(3, -1)
        c, found = (0, [])
        for t in range(x.size(1)):
            g = f[:, t].sigmoid()
            c = g * c + (1 - g) * z[:, t].tanh()
            found.append(o[:, t].sigmoid() * c)
        return self.o(torch.stack(found, dim=0))
        """,
        "x(2, 5, 5)",
        {"matrix": "i.weight", "matrix rows:8,8,8": "gates.weight", "output": "o.weight"},
    ),
    "predictions stay certain (3)": (
        """
        self.enc, self.parts, self.gate = (nn.LSTM(9, 20, batch_first=True), nn.Linear(20, 5), nn.Linear(20, 5))
        self.act = nn.Softmax(-1)
        """,
        "x, y",
        """
        h = self.enc(x)[0]
        p = self.parts(h)
        w = self.gate(h)
        return (w, (w.softmax(-1) * p).sum(-1))
        """,
        "x(2, 5, 9), x(2, 5, 20)",
        {
            "matrix rows:20,20,20,20": "enc.weight_ih_l0 enc.weight_hh_l0",
            "output": "parts.weight gate.weight",
        },
    ),
    "shares of predictions are in doubt (3)": (
        """
        self.enc, self.parts, self.gate = (nn.LSTM(9, 20, batch_first=True), nn.Linear(20, 5), nn.Linear(20, 5))
        self.act = nn.Softmax(-1)
        """,
        "x, y",
        """
        h = self.enc(x)[0]
        p = self.parts(h)
        return (self.gate(h).softmax(-1) * p).sum(-1)
        """,
        "x(2, 5, 9), x(2, 5, 20)",
        {
            "matrix rows:20,20,20,20": "enc.weight_ih_l0 enc.weight_hh_l0",
            "output": "parts.weight gate.weight",
        },
    ),
    "predictions stay certain (4)": (
        """
        self.enc, self.parts, self.gate = (nn.LSTM(9, 20, batch_first=True), nn.Linear(20, 5), nn.Linear(20, 5))
        self.act = nn.Softmax(-1)
        """,
        "x, y",
        """
        h = self.enc(x)[0]
        p = self.parts(h)
        w = self.gate(h).softmax(-1)
        return (p, (w * torch.arange(5)).sum(-1))
        """,
        "x(2, 5, 9), x(2, 5, 20)",
        {
            "matrix rows:20,20,20,20": "enc.weight_ih_l0 enc.weight_hh_l0",
            "output": "parts.weight gate.weight",
        },
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
