"""Functions of autograd: their forward is Python, which is read; what a kernel does inside stays out of sight."""

import textwrap

import pytest
import torch

from megaopt_core.params import Role
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

MATRIX, OUTPUT = (Role.MATRIX, Doubt.NONE), (Role.OUTPUT, Doubt.NONE)
MADE = "self.e, self.a, self.b, self.h = nn.Embedding(50, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 50)"
CASES = {  # the forward of the function, that of the model, what is expected of some weights
    "a checkpoint of a method": (
        "def forward(ctx, function, count, *args):\n    ctx.function, ctx.given = function, list(args[:count])\n"
        "    with torch.no_grad():\n        return ctx.function(*ctx.given)",
        "def inner(self, x): return self.b(self.a(x).relu())\n"
        "def forward(self, ids):\n"
        "    return self.h(Own.apply(self.inner, 1, self.e(ids), *self.a.parameters(), *self.b.parameters()))",
        {"a.weight": MATRIX, "b.weight": MATRIX, "h.weight": OUTPUT},
    ),
    "a product that keeps what it needs": (
        "def forward(ctx, x, w):\n    ctx.save_for_backward(x, w)\n    if ctx.needs_input_grad[1]:\n"
        "        ctx.mark_non_differentiable(x)\n    return x.matmul(w.t())",
        "def forward(self, ids):\n    x = Own.apply(self.e(ids), self.a.weight).relu()\n"
        "    return Own.apply(Own.apply(x, self.b.weight), self.h.weight)",
        {"a.weight": MATRIX, "b.weight": MATRIX, "h.weight": OUTPUT},
    ),
    "a forward without a context": (
        "def forward(x, w):\n    return x @ w.t()\n"
        "@staticmethod\ndef setup_context(ctx, inputs, output):\n    ctx.save_for_backward(*inputs)",
        "def forward(self, ids):\n    return Own.apply(self.b(self.a(self.e(ids)).relu()), self.h.weight)",
        {"a.weight": MATRIX, "b.weight": MATRIX, "h.weight": OUTPUT},
    ),
    "a loss in chunks": (
        "def forward(ctx, x, w, target):\n    losses, grad = torch.zeros(x.shape[0]), torch.zeros_like(w)\n"
        "    for i in range(0, x.shape[0], 2):\n        logits = x[i : i + 2] @ w.t()\n"
        "        losses[i : i + 2] = F.cross_entropy(logits, target[i : i + 2], reduction='none')\n"
        "    ctx.save_for_backward(grad)\n    return losses.sum()",
        "def forward(self, ids, t):\n    return Own.apply(self.b(self.a(self.e(ids)).relu()), self.h.weight, t)",
        {"a.weight": MATRIX, "b.weight": MATRIX, "h.weight": OUTPUT},
    ),
    "logits that a kernel turns into a loss": (
        "def forward(ctx, x, w, target):\n    losses = torch.zeros(x.shape[0])\n"
        "    kernel[(8,)](x @ w.t(), target, losses)\n    return losses.sum()",
        "def forward(self, ids, t):\n    return Own.apply(self.b(self.a(self.e(ids)).relu()), self.h.weight, t)",
        {"a.weight": MATRIX, "b.weight": MATRIX, "h.weight": OUTPUT},
    ),
    "an activation that a kernel writes": (
        "def forward(ctx, x):\n    y = torch.empty_like(x)\n    kernel[(8,)](x, y)\n    return y",
        "def forward(self, ids):\n    return Own.apply(self.h(self.b(Own.apply(self.a(self.e(ids))))))",
        {"a.weight": MATRIX, "b.weight": MATRIX, "h.weight": OUTPUT},
    ),
    "a step": (
        "def forward(ctx, u):\n    ctx.save_for_backward(u)\n    return (u > 0).to(u.dtype)",
        "def forward(self, ids):\n    x = Own.apply(ids.float() - 1) @ self.a.weight.t()\n"
        "    return self.h(Own.apply(x @ self.b.weight.t()))",
        {"a.weight": MATRIX, "b.weight": MATRIX, "h.weight": OUTPUT},
    ),
    "a product in a kernel": (
        "def forward(ctx, x, w):\n    y = torch.empty(2, 8)\n    kernel[(8,)](x, w, y)\n    return y",
        "def forward(self, ids):\n    return self.h(Own.apply(self.a(self.e(ids)).relu(), self.b.weight))",
        {"a.weight": MATRIX, "b.weight": (Role.MATRIX, Doubt.ROLE), "h.weight": OUTPUT},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_its_forward_is_read(generated_models, case):
    """A weight inside is what the forward of the function says; in a kernel it is doubtful."""
    function, methods, expected = CASES[case]
    before = f"class Own(torch.autograd.Function):\n{textwrap.indent(f'@staticmethod\n{function}', ' ' * 4)}"
    with torch.device("meta"):
        found = infer_roles(generated_models.model(MADE, methods, before)())
    for name, (role, doubt) in expected.items():
        assert (found[name].role, found[name].doubt) == (role, doubt), (name, found[name].reason)


MEMBER = """
class Member(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.c = nn.Embedding(40, 6), nn.Conv1d(6, 16, 3)
        self.n, self.a, self.h = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.own = nn.Parameter(torch.zeros(16, 16))
    def forward(self, ids):
        x = self.c(self.e(ids).transpose(1, 2)).transpose(1, 2)
        return self.h((self.n(self.a(x)) @ self.own).relu())
"""
NAMES = {  # how the weights are kept, and how they are named again
    "a dictionary": (
        "self.w = nn.ParameterDict({k.replace('.', '_'): nn.Parameter(v) for k, v in stacked.items()})",
        "{k.replace('_', '.'): v for k, v in dict(self.w).items()}",
    ),
    "a list beside the names": (
        "self.names, self.w = list(stacked), nn.ParameterList([nn.Parameter(v) for v in stacked.values()])",
        "dict(zip(self.names, self.w))",
    ),
}


@pytest.mark.parametrize("how", NAMES)
def test_weights_of_an_ensemble(generated_models, how):
    """A skeleton that is called with stacked weights shows what each of them is; its last stack is a head."""
    kept, named = NAMES[how]
    made = (
        "members = [Member() for _ in range(3)]\n"
        "stacked = {k: torch.stack([dict(m.named_parameters())[k] for m in members]).detach() "
        f"for k, _ in members[0].named_parameters()}}\n{kept}\nself.__dict__['skeleton'] = members[0]"
    )
    forward = (
        "def forward(self, ids):\n    def one(given, ids):\n"
        "        return torch.func.functional_call(self.skeleton, given, (ids,))\n"
        f"    return torch.func.vmap(one, in_dims=(0, None))({named}, ids)"
    )
    model = generated_models.model(made, forward, MEMBER)()
    found = infer_roles(model)
    keys = [name for name, _ in model.skeleton.named_parameters()]
    stored = {key: key.replace(".", "_") if how == "a dictionary" else str(i) for i, key in enumerate(keys)}
    roles = {key: found[f"w.{name}"] for key, name in stored.items()}
    for key in ("a.weight", "c.weight", "own"):
        assert (roles[key].role, roles[key].doubt) == (Role.MATRIX, Doubt.NONE), (key, roles[key].reason)
    for key in ("n.weight", "a.bias", "h.bias", "c.bias"):
        assert (roles[key].role, roles[key].doubt) == (Role.ELEMENTWISE, Doubt.NONE), (key, roles[key].reason)
    assert (roles["h.weight"].role, roles["h.weight"].doubt) == OUTPUT, roles["h.weight"].reason
    assert roles["e.weight"].role is not Role.MATRIX


def test_a_skeleton_is_not_asked(generated_models):
    """What a skeleton lists by code of its own is not run: its modules are looked at as they are registered."""
    before = (
        "class Member(nn.Linear):\n    def parameters(self, recurse=True): raise AssertionError\n"
        "    def named_modules(self, *args, **kwargs): raise AssertionError\n"
    )
    made = (
        "self.__dict__['skeleton'] = Member(6, 16, bias=False)\n"
        "self.w, self.h = nn.Parameter(torch.zeros(16, 6)), nn.Linear(16, 4)"
    )
    forward = (
        "def forward(self, x):\n"
        "    return self.h(torch.func.functional_call(self.skeleton, {'weight': self.w}, (x,)).relu())"
    )
    found = infer_roles(generated_models.model(made, forward, before)())
    assert (found["w"].role, found["w"].doubt) == MATRIX, found["w"].reason
    assert (found["h.weight"].role, found["h.weight"].doubt) == OUTPUT
