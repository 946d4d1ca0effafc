"""Layers that loops, lists and dictionaries call, as often as they like."""

import pytest

# A model's parts, the arguments and the body of its forward, a batch, and the roles of its parameters.
MODELS = {
    "what containers keep": (
        "self.hidden, self.head = (nn.Linear(6, 8), nn.Linear(8, 7))",
        "xs",
        """
        from collections import defaultdict
        kept = defaultdict(list)
        for x in xs:
            kept['a'].append(self.head(self.hidden(x).relu()))
        return torch.cat(kept['a'])
        """,
        "x(2, 5, 6)",
        {"matrix": "hidden.weight", "output": "head.weight"},
    ),
    "a parameter or what a layer made": (
        """
        self.e, self.a, self.h = (nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(16, 50))
        self.back, self.mix, self.none = (nn.Linear(24, 16), nn.Linear(16, 16), nn.Parameter(torch.zeros(16)))
        """,
        "ids, more=None, flag=True",
        """
        x = self.e(ids)
        made = self.back(self.a(x).relu())
        dense = self.none.expand(16)
        if more is not None:
            dense = made
        x = self.mix(x + dense)
        return self.h(x)
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight back.weight mix.weight", "output": "h.weight"},
    ),
    "branches of other kinds are not taken": (
        """
        self.w, self.more, self.a = (nn.Parameter(torch.randn(9, 9)), 1.0, nn.Linear(9, 9))
        self.out = nn.Linear(9, 5)
        """,
        "x",
        """
        if not isinstance(self.w, torch.Tensor):
            return self.out(x * self.w[0])
        return self.out(x @ self.w)
        """,
        "x(2, 5, 9)",
        {"matrix transposed": "w", "matrix": "a.weight", "output": "out.weight"},
    ),
    "every form of a result is returned": (
        "self.a, self.b, self.out = (nn.Linear(9, 20), nn.Linear(20, 4), nn.Linear(20, 6))",
        "x, y=None",
        """
        h = self.a(x).relu()
        if y is not None:
            return F.cross_entropy(self.out(h), y) + self.b(h).square().mean()
        return dict(scores=self.out(h), boxes=self.b(h))
        """,
        "x(2, 5, 9)",
        {"matrix": "a.weight", "output": "b.weight out.weight"},
    ),
    "loops over rows see all of them": (
        """
        self.start, self.out = (nn.Parameter(torch.zeros(2, 9)), nn.Linear(9, 5))
        sizes = {'w0': 7, 'u0': 9, 'w1': 9, 'u1': 9}
        self.p = nn.ParameterDict({n: nn.Parameter(torch.randn(k, 9)) for n, k in sizes.items()})
        """,
        "ids",
        """
        x = F.one_hot(ids, 7).float()
        for i, h in enumerate((h.expand(len(x), -1) for h in self.start)):
            x = torch.tanh(x @ self.p[f'w{i}'] + h @ self.p[f'u{i}'])
        return self.out(x)
        """,
        "ids(5)",
        {
            "elementwise": "start",
            "output": "out.weight",
            "matrix transposed": "p.u{0,1} p.w1",
            "embedding": "p.w0",
        },
    ),
    "what is given may be of any kind": (
        "self.w, self.out = (nn.Parameter(torch.randn(9, 9)), nn.Linear(9, 5))",
        "x, scale=1.0",
        """
        if isinstance(scale, float):
            return self.out(x * self.w[0])
        return self.out(x @ self.w)
        """,
        "x(2, 5, 9)",
        {"elementwise": "w", "output": "out.weight"},
    ),
    "layers that are taken from containers": (
        """
        self.a, self.b, self.head = (nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 7))
        self.layers = [self.a, self.b]
        """,
        "x",
        """
        for layer in self.layers:
            x = nn.Module.__call__(layer, x).relu()
        return self.head(x)
        """,
        "x(2, 5, 8)",
        {"matrix": "a.weight b.weight", "output": "head.weight"},
    ),
    "what containers keep (2)": (
        "self.hidden, self.head = (nn.Linear(6, 8), nn.Linear(8, 7))",
        "xs",
        """
        kept = [[], []]
        for x in xs:
            kept[0].append(self.head(self.hidden(x).relu()))
        return torch.cat(kept[0])
        """,
        "x(2, 5, 6)",
        {"matrix": "hidden.weight", "output": "head.weight"},
    ),
    "branches of other kinds are not taken (2)": (
        """
        self.w, self.more, self.a = (nn.Parameter(torch.randn(9, 9)), 1.0, nn.Linear(9, 9))
        self.out = nn.Linear(9, 5)
        """,
        "x",
        """
        if isinstance(self.w, (list, dict)):
            return self.out(x * self.w[0])
        return self.out(x @ self.w)
        """,
        "x(2, 5, 9)",
        {"matrix transposed": "w", "matrix": "a.weight", "output": "out.weight"},
    ),
    "loops over rows see all of them (2)": (
        """
        self.start, self.out = (nn.Parameter(torch.zeros(2, 9)), nn.Linear(9, 5))
        sizes = {'w0': 7, 'u0': 9, 'w1': 9, 'u1': 9}
        self.p = nn.ParameterDict({n: nn.Parameter(torch.randn(k, 9)) for n, k in sizes.items()})
        """,
        "ids",
        """
        x = F.one_hot(ids, 7).float()
        for i, h in enumerate([h.expand(len(x), -1) for h in self.start]):
            x = torch.tanh(x @ self.p[f'w{i}'] + h @ self.p[f'u{i}'])
        return self.out(x)
        """,
        "ids(5)",
        {
            "elementwise": "start",
            "output": "out.weight",
            "matrix transposed": "p.u{0,1} p.w1",
            "embedding": "p.w0",
        },
    ),
    "what is given may be of any kind (2)": (
        "self.w, self.out = (nn.Parameter(torch.randn(9, 9)), nn.Linear(9, 5))",
        "x, scale=1.0",
        """
        if not isinstance(scale, torch.Tensor):
            return self.out(x * self.w[0])
        return self.out(x @ self.w)
        """,
        "x(2, 5, 9)",
        {"elementwise": "w", "output": "out.weight"},
    ),
    "layers that are taken from containers (2)": (
        """
        self.a, self.b, self.head = (nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 7))
        self.steps = {1: lambda x: self.a(x).relu(), 2: lambda x: self.b(x)}
        """,
        "x",
        """
        for key in self.steps:
            x = self.steps[key](x)
        return self.head(x)
        """,
        "x(2, 5, 8)",
        {"matrix": "a.weight b.weight", "output": "head.weight"},
    ),
    "what containers keep (3)": (
        "self.hidden, self.head = (nn.Linear(6, 8), nn.Linear(8, 7))",
        "xs",
        """
        kept = {'a': []}
        kept['a'].extend([self.head(self.hidden(x).relu()) for x in xs])
        return torch.stack(kept['a'])
        """,
        "x(2, 5, 6)",
        {"matrix": "hidden.weight", "output": "head.weight"},
    ),
    "a parameter or what a layer made (2)": (
        """
        self.e, self.a, self.h = (nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(16, 50))
        self.back, self.mix, self.none = (nn.Linear(24, 16), nn.Linear(16, 16), nn.Parameter(torch.zeros(16)))
        """,
        "ids, more=None, flag=True",
        """
        x = self.e(ids)
        made = self.back(self.a(x).relu())
        x = self.mix(x + (made if flag else self.none))
        return self.h(x)
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight back.weight mix.weight", "output": "h.weight"},
    ),
    "loops over rows see all of them (3)": (
        """
        self.start, self.out = (nn.Parameter(torch.zeros(2, 9)), nn.Linear(9, 5))
        sizes = {'w0': 7, 'u0': 9, 'w1': 9, 'u1': 9}
        self.p = nn.ParameterDict({n: nn.Parameter(torch.randn(k, 9)) for n, k in sizes.items()})
        """,
        "ids",
        """
        x = F.one_hot(ids, 7).float()
        for h, i in zip(self.start, '01'):
            h = h.expand(len(x), -1)
            x = torch.tanh(x @ self.p[f'w{i}'] + h @ self.p[f'u{i}'])
        return self.out(x)
        """,
        "ids(5)",
        {
            "elementwise": "start",
            "output": "out.weight",
            "matrix transposed": "p.u{0,1} p.w1",
            "embedding": "p.w0",
        },
    ),
    "layers that are taken from containers (3)": (
        """
        self.a, self.b, self.head = (nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 7))
        self.pairs = [(self.a, self.b)]
        """,
        "x",
        """
        for layer in sum(map(list, self.pairs), []):
            x = layer(x).relu()
        return self.head(x)
        """,
        "x(2, 5, 8)",
        {"matrix": "a.weight b.weight", "output": "head.weight"},
    ),
    "what containers keep (4)": (
        "self.hidden, self.head = (nn.Linear(6, 8), nn.Linear(8, 7))",
        "xs",
        """
        kept = {'a': [[]]}
        for x in xs:
            kept['a'][0].append(self.head(self.hidden(x).relu()))
        return torch.cat(kept['a'][0])
        """,
        "x(2, 5, 6)",
        {"matrix": "hidden.weight", "output": "head.weight"},
    ),
    "a parameter or what a layer made (3)": (
        """
        self.e, self.a, self.h = (nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(16, 50))
        self.back, self.mix, self.none = (nn.Linear(24, 16), nn.Linear(16, 16), nn.Parameter(torch.zeros(16)))
        """,
        "ids, more=None, flag=True",
        """
        x = self.e(ids)
        made = self.back(self.a(x).relu())
        dense = self.none if more is None else made
        x = self.mix(x + dense)
        return self.h(x)
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight back.weight mix.weight", "output": "h.weight"},
    ),
    "what containers keep (5)": (
        "self.hidden, self.head = (nn.Linear(6, 8), nn.Linear(8, 7))",
        "xs",
        """
        kept = [[] for _ in range(2)]
        for i, x in enumerate(xs):
            kept[i % 2].append(self.head(self.hidden(x).relu()))
        return [torch.stack(some) for some in kept]
        """,
        "x(2, 5, 6)",
        {"matrix": "hidden.weight", "output": "head.weight"},
    ),
    "a parameter or what a layer made (4)": (
        """
        self.e, self.a, self.h = (nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(16, 50))
        self.back, self.mix, self.none = (nn.Linear(24, 16), nn.Linear(16, 16), nn.Parameter(torch.zeros(16)))
        """,
        "ids, more=None, flag=True",
        """
        x = self.e(ids)
        made = self.back(self.a(x).relu())
        dense = self.none if self.training else made
        x = self.mix(x + dense)
        return self.h(x)
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight back.weight mix.weight", "output": "h.weight"},
    ),
    "layers that are taken from containers (4)": (
        """
        self.a, self.b, self.head = (nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 7))
        self.steps = [lambda x: self.a(x).relu(), lambda x: self.b(x).tanh()]
        """,
        "x",
        """
        for step in self.steps:
            x = step(x)
        return self.head(x)
        """,
        "x(2, 5, 8)",
        {"matrix": "a.weight b.weight", "output": "head.weight"},
    ),
    "a parameter or what a layer made (5)": (
        """
        self.e, self.a, self.h = (nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(16, 50))
        self.back, self.mix, self.none = (nn.Linear(24, 16), nn.Linear(16, 16), nn.Parameter(torch.zeros(16)))
        """,
        "ids, more=None, flag=True",
        """
        x = self.e(ids)
        made = self.back(self.a(x).relu())
        dense = made if more is not None else self.none
        x = self.mix(x + dense)
        return self.h(x)
        """,
        "ids(2, 5)",
        {"embedding": "e.weight", "matrix": "a.weight back.weight mix.weight", "output": "h.weight"},
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_forward_shows_what_each_parameter_is(check_model, case):
    """Every parameter has its role and view, for certain."""
    check_model(*MODELS[case])
