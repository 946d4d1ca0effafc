"""Layers as libraries of graphs write them: names for values of several kinds, long helpers, results of two forms."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

HELPERS = (
    "def _checked(index, size):\n    total = 0\n"
    + "".join(
        f"    if index.dim() == {i}:\n        total = total + index.size(0) * {i} + size\n"
        for i in range(200)
    )
    + "    return total\n\n"
)
MLP = (
    "def mlp(self, x, both=None):\n    kept = None\n"
    "    for layer in self.layers[:-1]:\n        x = layer(x).relu()\n        if both is True:\n            kept = x\n"
    "    x = self.layers[-1](x)\n    return (x, kept) if isinstance(both, bool) else x\n"
)
FORMS = {  # forwards whose result has another form in another branch
    "a loss instead of a dictionary": (
        "self.a, self.b, self.out = nn.Linear(9, 20), nn.Linear(20, 4), nn.Linear(20, 6)",
        "def forward(self, x, y=None):\n    h = self.a(x).relu()\n    boxes, scores = self.b(h), self.out(h)\n"
        "    if y is None:\n        return {'scores': scores.softmax(-1)}\n"
        "    return F.cross_entropy(scores, y) + F.l1_loss(boxes, x[:, :4])\n",
        ("b.weight", "out.weight"),
    ),
    "a dictionary after all": (
        "self.a, self.b, self.out = nn.Linear(9, 20), nn.Linear(20, 4), nn.Linear(20, 6)",
        "def forward(self, x, y=None):\n    h = self.a(x).relu()\n"
        "    if y is not None:\n        return F.cross_entropy(self.out(h), y) + self.b(h).square().mean()\n"
        "    return dict(scores=self.out(h), boxes=self.b(h))\n",
        ("b.weight", "out.weight"),
    ),
}
KINDS = {  # ways to ask for the kind of what is a tensor for certain
    "a weight": "if not isinstance(self.w, torch.Tensor):\n    return self.out(x * self.w[0])\n"
    "return self.out(x @ self.w)",
    "one of several": "if isinstance(self.w, (list, dict)):\n    return self.out(x * self.w[0])\n"
    "return self.out(x @ self.w)",
    "what a layer made": "h = self.a(x)\nif isinstance(h, dict):\n    h = h['x'] * self.w\nreturn self.out(h)",
}
STEP = "    x = torch.tanh(x @ self.p[f'w{i}'] + h @ self.p[f'u{i}'])"
ROWS = {  # loops over the rows of a parameter
    "numbered": "for i, h in enumerate(h.expand(len(x), -1) for h in self.start):\n" + STEP,
    "of a list": "for i, h in enumerate([h.expand(len(x), -1) for h in self.start]):\n" + STEP,
    "side by side": "for h, i in zip(self.start, '01'):\n    h = h.expand(len(x), -1)\n" + STEP,
}


def roles_of(models: ModuleType, made: str, methods: str) -> dict[str, RoleDecision]:
    """Return the decisions for a model."""
    return dict(infer_roles(models.model(made, methods)()))


@pytest.mark.parametrize("case", FORMS)
def test_every_form_of_a_result_is_returned(generated_models: ModuleType, case: str) -> None:
    """What only the loss is made of is a head as well."""
    made, methods, heads = FORMS[case]
    found = roles_of(generated_models, made, methods)
    assert {name: (found[name].role, found[name].doubt) for name in heads} == dict.fromkeys(
        heads, (Role.OUTPUT, Doubt.NONE)
    )


@pytest.mark.parametrize("forward", ["self.net(x + 1)", "self.net(x) + x.mean()", "x.max() * self.net(x)"])
def test_what_a_part_may_return_instead_adds_to_nothing(generated_models: ModuleType, forward: str) -> None:
    """A network that returns its hidden features, too, where it is asked to: its last layer may be a head."""
    made = "self.layers = nn.ModuleList([nn.Linear(9, 7), nn.Linear(7, 7)])"
    inside = generated_models.model(made, MLP.replace("def mlp", "def forward"))()
    model = generated_models.model("self.net = None", f"def forward(self, x):\n    return {forward}\n")()
    model.net = inside
    for part, name in ((inside, "layers.1.weight"), (model, "net.layers.1.weight")):
        last = infer_roles(part)[name]
        assert last.role is Role.OUTPUT or last.doubt is Doubt.ROLE, last.reason


def test_helpers_are_read_once_for_equal_arguments(generated_models: ModuleType) -> None:
    """However often a long function of numbers and what is given is called, the last layers are still read."""
    made = "self.layers, self.out = nn.ModuleList(OwnLinear(9, 9) for _ in range(12)), OwnLinear(9, 4)"
    body = "for layer in self.layers:\n    x = layer(x).relu() * _checked(index, 3)\nreturn self.out(x)"
    forward = "def forward(self, x, index):\n    " + body.replace("\n", "\n    ") + "\n"
    found = infer_roles(generated_models.model(made, forward, HELPERS)())
    assert {found[f"layers.{i}.kernel"].doubt for i in range(12)} == {Doubt.NONE}
    assert (found["out.kernel"].role, found["out.kernel"].doubt) == (Role.OUTPUT, Doubt.NONE)


@pytest.mark.parametrize("case", KINDS)
def test_branches_of_other_kinds_are_not_taken(generated_models: ModuleType, case: str) -> None:
    """A weight, and what a layer makes, are tensors: what would be done with a dictionary says nothing of them."""
    made = (
        "self.w, self.more, self.a = nn.Parameter(torch.randn(9, 9)), 1.0, nn.Linear(9, 9)\n"
        "self.out = nn.Linear(9, 5)"
    )
    text = "def forward(self, x):\n    " + KINDS[case].replace("\n", "\n    ") + "\n"
    found = roles_of(generated_models, made, text)
    name = "a.weight" if case == "what a layer made" else "w"
    assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason
    if case == "what a layer made":
        assert found["w"].doubt is Doubt.ROLE


@pytest.mark.parametrize("given", ["isinstance(scale, float)", "not isinstance(scale, torch.Tensor)"])
def test_what_is_given_may_be_of_any_kind(generated_models: ModuleType, given: str) -> None:
    """A number stands where nobody gives anything: both branches are read."""
    text = (
        f"def forward(self, x, scale=1.0):\n    if {given}:\n        return self.out(x * self.w[0])\n"
        "    return self.out(x @ self.w)\n"
    )
    made = "self.w, self.out = nn.Parameter(torch.randn(9, 9)), nn.Linear(9, 5)"
    assert roles_of(generated_models, made, text)["w"].doubt is Doubt.ROLE


@pytest.mark.parametrize("case", ROWS)
def test_loops_over_rows_see_all_of_them(generated_models: ModuleType, case: str) -> None:
    """Whatever is numbered beside the rows of a parameter is read for each of them."""
    made = (
        "self.start, self.out = nn.Parameter(torch.zeros(2, 9)), nn.Linear(9, 5)\n"
        "sizes = {'w0': 7, 'u0': 9, 'w1': 9, 'u1': 9}\n"
        "self.p = nn.ParameterDict({n: nn.Parameter(torch.randn(k, 9)) for n, k in sizes.items()})"
    )
    text = (
        "def forward(self, ids):\n    x = F.one_hot(ids, 7).float()\n    "
        + ROWS[case].replace("\n", "\n    ")
        + "\n    return self.out(x)\n"
    )
    model = generated_models.model(made, text)()
    model(torch.zeros(3, dtype=torch.long))
    found = infer_roles(model)
    kinds = {name: (found[f"p.{name}"].role, found[f"p.{name}"].doubt) for name in ("w0", "u0", "w1", "u1")}
    matrices = dict.fromkeys(("u0", "w1", "u1"), (Role.MATRIX, Doubt.NONE))
    assert kinds == {"w0": (Role.EMBEDDING, Doubt.NONE), **matrices}


def test_rows_that_are_indexed_or_summed_over(generated_models: ModuleType) -> None:
    """A weight that ids index and features meet, whichever is given, is a table in doubt."""
    text = (
        "def forward(self, x):\n    if x.is_floating_point():\n        h = x @ self.w\n"
        "    else:\n        h = self.w[x]\n    return self.out(h.relu())\n"
    )
    made = "self.w, self.out = nn.Parameter(torch.randn(30, 8)), nn.Linear(8, 5)"
    found = roles_of(generated_models, made, text)["w"]
    assert (found.role, found.doubt) == (Role.EMBEDDING, Doubt.ROLE)


def test_what_layers_made_stays_in_sight_where_it_may_be_a_dictionary(generated_models: ModuleType) -> None:
    """A helper that takes dictionaries as well: the layer behind it takes what the one before made."""
    methods = (
        "def trimmed(self, x, parts):\n    if isinstance(parts, dict):\n"
        "        return {name: x[name][:size] for name, size in parts.items()}, parts\n    return x[:parts], parts\n\n"
        "def forward(self, x, y, parts=None):\n    h = self.a(x).relu()\n    if parts is not None:\n"
        "        h, parts = self.trimmed(h * 2, parts)\n    h = h + self.b(h.index_select(0, y)).relu()\n"
        "    return self.out(h)\n"
    )
    made = "self.a, self.b, self.out = OwnLinear(9, 12), OwnLinear(12, 12), OwnLinear(12, 5)"
    found = roles_of(generated_models, made, methods)
    assert {
        name: (found[f"{name}.kernel"].role, found[f"{name}.kernel"].doubt) for name in ("a", "b", "out")
    } == {
        "a": (Role.MATRIX, Doubt.NONE),
        "b": (Role.MATRIX, Doubt.NONE),
        "out": (Role.OUTPUT, Doubt.NONE),
    }
