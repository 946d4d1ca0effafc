"""Parts of values that are not known: which layer made them is a guess, and no certain evidence."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.body, self.policy, self.value = nn.Linear(6, 16), nn.Linear(16, 5), nn.Linear(16, 5)\n"
    "self.step, self.one, self.two, self.pack = *(nn.Linear(16, 16) for _ in range(3)), _pack"
)
BEFORE = """
class Out(tuple):
    policy, value, state = (property(lambda s, i=i: s[i]) for i in range(3))
def _bare(*parts):
    return parts
exec("def _pack(*parts): return parts")
exec("def _named(*parts): return dict(zip(('policy', 'value', 'state'), parts))")
"""
TAKEN = {  # how the hidden state leaves a value that is not known
    "properties of a tuple": ("Out((p, v, h))", "out.state"),
    "attributes of something unknown": ("torch.jit.annotate(tuple, _named(p, v, h))", "out.state"),
    "keys of something unknown": ("_named(p, v, h)", "out['state']"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_leaves_an_unknown_value(generated_models: ModuleType, case: str) -> None:
    """A head that may be what another layer takes is no certain matrix."""
    made, taken = TAKEN[case]
    forward = (
        "def heads(self, h):\n    p, v = self.policy(self.one(h).relu()), self.value(self.two(h).relu())\n"
        f"    return {made}\n"
        "def forward(self, x):\n    out = self.heads(self.body(x).relu())\n    several = [out]\n"
        f"    for _ in range(2):\n        out = self.heads(self.step({taken}).relu())\n        several.append(out)\n"
        "    return several"
    )
    found = infer_roles(generated_models.model(MADE, forward, BEFORE)())
    for name in ("policy", "value"):
        decision = found[f"{name}.weight"]
        assert decision.role is Role.OUTPUT or decision.doubt is Doubt.ROLE, decision.reason
    assert found["body.weight"].role is found["step.weight"].role is Role.MATRIX


def test_twins_that_are_both_taken_in_a_guess(generated_models: ModuleType) -> None:
    """Neither of two layers of a list answers for the other, for ever."""
    made = (
        "self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 24), nn.Linear(6, 24), nn.Linear(8, 8)]) "
        "for _ in range(3))\nself.pack = _pack"
    )
    forward = (
        "def forward(self, x, c):\n    for a, b, out in self.blocks:\n        q, k, v = self.pack(a(x), b(c))\n"
        "        x = x + out(F.scaled_dot_product_attention(q, k, v))\n    return x"
    )
    found = infer_roles(generated_models.model(made, forward, BEFORE)())
    assert found["blocks.0.0.weight"].role is Role.MATRIX
    assert found["blocks.0.2.weight"].role is Role.MATRIX
