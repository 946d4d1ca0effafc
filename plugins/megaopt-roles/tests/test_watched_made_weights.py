"""Weights that are drawn, masked, parametrized or made of other weights."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "a triangle that mixes is a matrix": (
        """
        self.a, self.h = (nn.Linear(6, 8), nn.Linear(8, 3))
        self.q = nn.Parameter(torch.eye(8))
        """,
        "x",
        """
        x = self.a(x).relu()
        return self.h(x) + self.h(F.gelu(F.linear(x, self.q.triu())))
        """,
        "x(2, 5, 6)",
        {"matrix": "q a.weight", "output": "h.weight"},
    ),
    "a matrix under a mask is a matrix": (
        """
        self.conv, self.up, self.out = (nn.Conv2d(3, 18, 1), nn.Linear(6, 20), nn.Linear(6, 5))
        self.register_buffer('edges', torch.zeros(3, 11, 11))
        self.register_buffer('mask', torch.ones(6, 20))
        self.gain, self.hidden = (nn.Parameter(torch.ones(3, 11, 11)), nn.Parameter(torch.randn(6, 20)))
        """,
        "x",
        """
        y = self.conv(x).mean((2, 3))[:, :20]
        h = self.up(y[:, :6])
        y = h
        return self.out(F.linear(y, self.hidden * self.mask).relu())
        """,
        "x(2, 3, 8, 8)",
        {"matrix": "hidden conv.weight up.weight", "output": "out.weight"},
    ),
    "a random mask is no noise": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        self.register_buffer('mask', (torch.rand(16, 8) > 0.5).float())
        """,
        "x",
        "return self.head(F.linear(x, self.mean + self.rho * self.mask).relu())",
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "an example takes no scale for a weight": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = self.mean - sigma * torch.rand_like(sigma).sub(0.5).mul(2)
        return self.head(F.linear(x, w).relu())
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "buffers that a loop fills": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        w = self.mean + self.rho * torch.outer(self.rows, self.columns)
        return self.head(F.linear(x, w).relu())
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "other sums make no certain scale": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = self.mean + self.rho * self.head.weight.new_ones(16, 8)
        return self.head(F.linear(x, w).relu())
        """,
        "x(2, 5, 8)",
        {"matrix": "mean rho", "output": "head.weight"},
    ),
    "what noise is added to is the weight": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = self.mean + self.rho * self.eps if self.training else self.mean
        return self.head(F.linear(x, w).relu()).mean() + loss
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "a matrix under a mask is a matrix (2)": (
        """
        self.conv, self.up, self.out = (nn.Conv2d(3, 18, 1), nn.Linear(6, 20), nn.Linear(6, 5))
        self.register_buffer('edges', torch.zeros(3, 11, 11))
        self.register_buffer('mask', torch.ones(6, 20))
        self.gain, self.hidden = (nn.Parameter(torch.ones(3, 11, 11)), nn.Parameter(torch.randn(6, 20)))
        """,
        "x",
        """
        y = self.conv(x).mean((2, 3))[:, :20]
        h = self.up(y[:, :6])
        y = h
        return self.out(torch.einsum('ni,oi->no', y, self.hidden * self.mask).relu())
        """,
        "x(2, 3, 8, 8)",
        {"matrix": "hidden conv.weight up.weight", "output": "out.weight"},
    ),
    "an example takes no scale for a weight (2)": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        q = torch.distributions.Normal(loc=self.mean, scale=sigma)
        w = torch.distributions.Independent(q, 1).rsample()
        return self.head(F.linear(x, w).relu())
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "other sums make no certain scale (2)": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        a = torch.rand(1)
        w = a * self.mean + (1 - a) * self.rho
        return self.head(F.linear(x, w).relu())
        """,
        "x(2, 5, 8)",
        {"matrix": "mean rho", "output": "head.weight"},
    ),
    "what noise is added to is the weight (2)": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = torch.distributions.Normal(self.mean, sigma).rsample()
        return self.head(F.linear(x, w).relu()).mean() + loss
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "a matrix under a mask is a matrix (3)": (
        """
        self.conv, self.up, self.out = (nn.Conv2d(3, 18, 1), nn.Linear(6, 20), nn.Linear(6, 5))
        self.register_buffer('edges', torch.zeros(3, 11, 11))
        self.register_buffer('mask', torch.ones(6, 20))
        self.gain, self.hidden = (nn.Parameter(torch.ones(3, 11, 11)), nn.Parameter(torch.randn(6, 20)))
        """,
        "x",
        """
        y = self.conv(x).mean((2, 3))[:, :20]
        h = self.up(y[:, :6])
        y = y[:, :6]
        return self.out(self.up(y) @ (self.mask * self.hidden).t().relu())
        """,
        "x(2, 3, 8, 8)",
        {"matrix": "hidden conv.weight up.weight", "output": "out.weight"},
    ),
    "other sums make no certain scale (3)": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = self.mean * torch.randn_like(sigma) + self.rho * torch.randn_like(sigma)
        return self.head(F.linear(x, w).relu())
        """,
        "x(2, 5, 8)",
        {"matrix": "mean rho", "output": "head.weight"},
    ),
    "an example takes no scale for a weight (3)": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = self.mean + self.rho * (self.rows.unsqueeze(1) * self.columns)
        return self.head(F.linear(x, w).relu())
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "what noise is added to is the weight (3)": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = self.mean + sigma * torch.randn_like(self.mean)
        return self.head(F.linear(x, w).relu()).mean() + loss
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "an example takes no scale for a weight (4)": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = self.mean + sigma * torch.randn_like(self.mean)
        return self.head(F.linear(x, w).relu())
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "what noise is added to is the weight (4)": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = self.mean + sigma * self.mean.data.new(self.mean.size()).normal_(0, 1)
        return self.head(F.linear(x, w).relu()).mean() + loss
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
    "an example takes no scale for a weight (5)": (
        """
        self.mean, self.rho = (nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)))
        self.register_buffer('eps', torch.zeros(16, 8))
        self.register_buffer('rows', torch.zeros(16))
        self.register_buffer('columns', torch.zeros(8))
        self.head = nn.Linear(16, 5)
        """,
        "x",
        """
        sigma, loss = (F.softplus(self.rho), 0)
        w = sigma * torch.empty_like(sigma).normal_() + self.mean
        return self.head(F.linear(x, w).relu())
        """,
        "x(2, 5, 8)",
        {"matrix": "mean", "elementwise": "rho", "output": "head.weight"},
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
