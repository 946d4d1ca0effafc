"""Output heads wherever a model may have them: used by hand, by losses, in lists, behind gates."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "a layer before a head is no head": (
        """
        self.first, self.middle, self.last = (nn.Linear(16, 24), nn.Linear(24, 20), nn.Linear(20, 5, bias=False))
        """,
        "x, target=None",
        """
        h = self.middle(self.first(x).relu()).relu()
        return torch.func.functional_call(self.last, dict(self.last.named_parameters()), h)
        """,
        "x(2, 5, 16)",
        {"matrix": "first.weight middle.weight", "output": "last.weight"},
    ),
    "a linear layer of its own class": (
        """
        self.wte = nn.Embedding(100, 16)
        self.head = OwnLinear(16, 100)
        self.up, self.down = (nn.Linear(16, 64), nn.Linear(64, 16))
        self.ln = nn.LayerNorm(16)
        """,
        "ids, target=None",
        """
        x = self.wte(ids)
        x = x + self.down(F.gelu(self.up(x)))
        x = self.ln(x)
        return self.head(x)
        """,
        "ids(2, 5)",
        {"embedding": "wte.weight", "output": "head.kernel", "matrix": "up.weight down.weight"},
    ),
    "heads by hand": (
        """
        self.wte = nn.Parameter(torch.zeros(100, 16))
        self.up, self.down = (nn.Linear(16, 64), nn.Linear(64, 16))
        self.ln = nn.LayerNorm(16)
        """,
        "ids, target=None",
        """
        x = F.embedding(ids, self.wte)
        x = x + self.down(F.gelu(self.up(x)))
        x = self.ln(x)
        return torch.ops.aten.linear.default(x, self.wte)
        """,
        "ids(2, 5)",
        {"embedding": "wte", "matrix": "up.weight down.weight"},
    ),
    "tables": (
        """
        self.wte = nn.Embedding(100, 16)
        self.table = nn.Parameter(torch.zeros(9, 16))
        self.head = nn.Linear(16, 100)
        self.up, self.down = (nn.Linear(16, 64), nn.Linear(64, 16))
        self.ln = nn.LayerNorm(16)
        """,
        "ids, target=None",
        """
        x = self.wte(ids)
        x = x + self.down(F.gelu(self.up(x)))
        x = self.ln(x)
        x = self.table[(x @ self.table.T).argmax(-1)]
        return self.head(self.ln(x))
        """,
        "ids(2, 5)",
        {"embedding": "table wte.weight", "output": "head.weight", "matrix": "up.weight down.weight"},
    ),
    "a distribution that is returned": (
        """
        self.body = nn.Sequential(nn.Linear(9, 20), nn.ReLU())
        self.value, self.gain = (nn.Linear(20, 7), nn.Linear(20, 3 * 7))
        self.register_buffer('support', torch.linspace(-1, 1, 7))
        """,
        "x",
        """
        h = self.body(x)
        v = self.value(h).view(-1, 1, 7)
        a = self.gain(h).view(-1, 3, 7)
        z = v + a - a.mean(1, True)
        return torch.softmax(z, -1)
        """,
        "x(2, 5, 9)",
        {"matrix": "body.0.weight", "output": "value.weight gain.weight"},
    ),
    "a softmax that weighs": (
        """
        self.body = nn.Sequential(nn.Linear(9, 20), nn.ReLU())
        self.value, self.gain = (nn.Linear(20, 7), nn.Linear(20, 3 * 7))
        self.register_buffer('support', torch.linspace(-1, 1, 7))
        """,
        "x",
        """
        h = self.body(x)
        v = self.value(h).view(-1, 1, 7)
        a = self.gain(h).view(-1, 3, 7)
        z = v + a - a.mean(1, True)
        return (z.softmax(-1) * x[:, None, :7]).sum(-1)
        """,
        "x(5, 9)",
        {"matrix": "body.0.weight", "output": "value.weight gain.weight"},
    ),
    "a policy as wide as the last action": (
        """
        self.last, self.core, self.policy = (nn.Linear(9, 8, bias=False), nn.LSTMCell(8, 16), nn.Linear(16, 9))
        """,
        "x, action, state=None",
        """
        state = state or (x.new_zeros(2, 16), x.new_zeros(2, 16))
        h, c = self.core(self.last(F.one_hot(action, 9).float()), state)
        logits = self.policy(h)
        if self.training:
            return (torch.distributions.Categorical(logits=logits), (h, c))
        return (logits.argmax(-1), (h, c))
        """,
        "x(2, 5, 9), ids(2)",
        {
            "embedding": "last.weight",
            "matrix rows:16,16,16,16": "core.weight_ih core.weight_hh",
            "output": "policy.weight",
        },
    ),
    "what a method of no forward is given": (
        """
        self.e, self.a, self.b, self.h = (nn.Embedding(9, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 7))
        self.left_over = nn.Parameter(torch.ones(7))
        """,
        "ids",
        """
        x = self.e(ids)
        return self.h(x + self.b(self.a(x).relu()))
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight b.weight", "output": "h.weight"},
    ),
    "codes that a loss holds to a prior": (
        """
        self.enc, self.mu, self.logvar = (nn.Linear(30, 24), nn.Linear(24, 7), nn.Linear(24, 7))
        self.dec, self.norm, self.out = (nn.Linear(7, 20), nn.LayerNorm(20), nn.Linear(20, 30))
        """,
        "x",
        """
        h = self.enc(x).relu()
        mu, logvar = (self.mu(h), self.logvar(h))
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        y = self.out(self.norm(self.dec(z)))
        kl = (0.5 * (mu ** 2 + logvar.exp() - 1 - logvar)).mean()
        return {'loss': F.mse_loss(y, x) + 0.1 * kl, 'kl': kl}
        """,
        "x(2, 5, 30)",
        {"matrix": "enc.weight mu.weight logvar.weight dec.weight", "output": "out.weight"},
    ),
    "a score that is made by hand": (
        "self.a, self.out, self.w = (nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(torch.zeros((1, 8))))",
        "ids",
        """
        h = F.relu(self.a(ids))
        return self.out(h * F.linear(h, self.w).sigmoid())
        """,
        "x(2, 5, 6)",
        {"matrix": "a.weight", "output": "out.weight"},
    ),
    "dictionaries of different keys": (
        "self.a, self.o = (nn.Linear(8, 9), nn.Linear(9, 1))",
        "x, y=None",
        """
        p = self.o(self.a(x).relu()).sigmoid()
        if y is not None:
            return {'loss': F.binary_cross_entropy(p, y)}
        return {'prob': p}
        """,
        "x(2, 5, 8)",
        {"matrix": "a.weight", "output": "o.weight"},
    ),
    "a form that a layer takes is hidden": (
        """
        self.a, self.b = (nn.Linear(12, 9), nn.Linear(12, 9))
        self.w = nn.Parameter(torch.zeros(5, 9, 3))
        self.h = nn.Linear(5, 3)
        """,
        "x",
        """
        a, b = (self.a(x).relu(), self.b(x).relu())
        return self.h(F.conv1d((a * b).mT, self.w, padding=1).relu().mT)
        """,
        "x(2, 5, 12)",
        {"matrix": "w a.weight b.weight", "output": "h.weight"},
    ),
    "a form that is returned is a head": (
        """
        self.a, self.b = (nn.Linear(12, 9), nn.Linear(12, 9))
        self.w = nn.Parameter(torch.zeros(5, 9, 9))
        self.h = nn.Linear(5, 3)
        """,
        "x",
        """
        a, b = (self.a(x).relu(), self.b(x).relu())
        return F.bilinear(a, b, self.w)
        """,
        "x(2, 5, 12)",
        {"output": "w", "matrix": "a.weight b.weight"},
    ),
    "what meets ones and zeros is a matrix": (
        """
        self.w, self.v, self.h = (nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 5))
        """,
        "x",
        """
        s = torch.gt(x, 0).float()
        y = s @ self.w
        return self.h(((y > 1).float() @ self.v + y).relu())
        """,
        "x(2, 5, 9)",
        {"matrix transposed": "w v", "output": "h.weight"},
    ),
    "vectors": (
        """
        self.first, self.one = (nn.Linear(9, 12), nn.Linear(12, 1))
        self.row, self.column = (nn.Parameter(torch.zeros(1, 12)), nn.Parameter(torch.zeros(12, 1)))
        self.points, self.mean = (nn.Parameter(torch.randn(7, 12)), nn.Parameter(torch.zeros(7, 1)))
        """,
        "x, y",
        """
        h = self.first(x).relu()
        return F.mse_loss((h @ self.column).squeeze(-1), y)
        """,
        "x(2, 5, 9), ids(2, 5)",
        {"matrix": "first.weight"},
    ),
    "a layer before a head is no head (2)": (
        """
        self.first, self.middle, self.last = (nn.Linear(16, 24), nn.Linear(24, 20), nn.Linear(20, 5, bias=False))
        """,
        "x, target=None",
        """
        h = self.middle(self.first(x).relu()).relu()
        out = h.new_zeros(len(h), 5)
        for i in range(5):
            out[:, i] = h @ self.last.weight[i]
        return out
        """,
        "x(5, 16)",
        {"matrix": "first.weight middle.weight", "output": "last.weight"},
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
