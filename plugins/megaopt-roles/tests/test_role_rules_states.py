"""What a recurrence begins with, and learned queries: they go on as activations, and are no weights."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

CELL = (
    "self.e, self.h = nn.Embedding(50, 16), nn.Linear(24, 50)\n"
    "self.w, self.u = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.randn(24, 24))\n"
    "self.first = nn.Parameter(torch.zeros(2, 1, 24))"
)
BEGINS = {  # how the two rows of `self.first` become what the recurrence begins with
    "unpacked": "h, c = self.first.expand(-1, len(ids), -1)",
    "each expanded": "h, c = (s.expand(len(ids), -1) for s in self.first)",
    "by their number": "h, c = self.first[0].expand(ids.size(0), -1), self.first[1].expand(ids.size(0), -1)",
    "repeated": "h, c = self.first[0].repeat(len(ids), 1), self.first[1].repeat(len(ids), 1)",
    "of a function": "h, c = (torch.broadcast_to(self.first[i], (len(ids), 24)) for i in (0, 1))",
}
STEPS = {  # the product of a state
    "@": "h @ self.u.T",
    "linear": "F.linear(h, self.u)",
    "einsum": "torch.einsum('bi,oi->bo', h, self.u)",
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", BEGINS)
def test_first_states_of_a_recurrence(generated_models: ModuleType, case: str, step: str) -> None:
    """A state is element-wise, and the weights that it meets are matrices."""
    methods = (
        f"def forward(self, ids):\n    {BEGINS[case]}\n    for x in self.e(ids).unbind(1):\n"
        f"        gate = torch.sigmoid(F.linear(x, self.w) + {STEPS[step]})\n"
        "        c = gate * c + (1 - gate)\n        h = torch.tanh(c)\n    return self.h(h)"
    )
    model = generated_models.model(CELL, methods)()
    model(torch.zeros(2, 8, dtype=torch.long))
    found = infer_roles(model)
    assert found["first"].role is Role.ELEMENTWISE
    for name in "wu":
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason


PRODUCTS = {  # projections of what is repeated for each sample
    "einsum": "torch.einsum('bnd,dk->bnk', {}, self.{})",
    "matmul": "torch.matmul({}, self.{})",
    "@": "{} @ self.{}",
}
REPEATED = {
    "expand": "self.latents.expand(len(x), -1, -1)",
    "repeat": "self.latents.unsqueeze(0).repeat(len(x), 1, 1)",
    "added": "self.latents[None].expand(x.size(0), 9, 16)",
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("case", REPEATED)
def test_queries_repeated_for_each_sample(generated_models: ModuleType, case: str, product: str) -> None:
    """What projects learned queries, in a product by hand, is a matrix, and the queries are no factor of one."""
    made = (
        "self.latents, self.h = nn.Parameter(torch.randn(9, 16)), nn.Linear(16, 50)\n"
        "for n in 'qkv':\n    self.register_parameter(n, nn.Parameter(torch.randn(16, 16)))"
    )
    q, k, v = (PRODUCTS[product].format(of, n) for n, of in (("q", "lat"), ("k", "x"), ("v", "x")))
    methods = (
        f"def forward(self, x):\n    lat = {REPEATED[case]}\n    q, k, v = {q}, {k}, {v}\n"
        "    return self.h(torch.softmax(q @ k.mT, -1) @ v)"
    )
    model = generated_models.model(made, methods)()
    model(torch.zeros(2, 8, 16))
    found = infer_roles(model)
    assert found["latents"].role is Role.ELEMENTWISE
    for name in "qkv":
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason


UPDATES = {  # what becomes of a matrix that keys write values into
    "added": "s = s + torch.einsum('bk,bv->bkv', k, v)",
    "a function": "s = torch.add(s, k.unsqueeze(-1) * v.unsqueeze(-2))",
    "the delta rule": "s = s + k[..., None] * (v - torch.einsum('bk,bkv->bv', k, s))[..., None, :]",
    "decayed": "s = 0.9 * s + k.unsqueeze(-1) @ v.unsqueeze(-2)",
}
READS = {"einsum": "torch.einsum('bk,bkv->bv', q, s)", "@": "(q.unsqueeze(1) @ s).squeeze(1)"}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("case", UPDATES)
def test_states_that_products_read(generated_models: ModuleType, case: str, read: str) -> None:
    """A matrix that products of activations are added to, and others read, is no weight for certain."""
    made = (
        "self.e, self.h, self.s = nn.Embedding(50, 16), nn.Linear(12, 50), nn.Parameter(torch.zeros(12, 12))\n"
        "self.q, self.k, self.v = (nn.Linear(16, 12) for _ in range(3))"
    )
    methods = (
        "def forward(self, ids):\n    s, out = self.s.expand(len(ids), -1, -1), []\n"
        "    for x in self.e(ids).unbind(1):\n        q, k, v = self.q(x), self.k(x), self.v(x)\n"
        f"        out.append({READS[read]})\n        {UPDATES[case]}\n        out.append({READS[read]})\n"
        "    return self.h(torch.stack(out, 1))"
    )
    model = generated_models.model(made, methods)()
    model(torch.zeros(2, 8, dtype=torch.long))
    found = infer_roles(model)
    assert found["s"].role is Role.ELEMENTWISE or found["s"].doubt is Doubt.ROLE
    for name in "qkv":
        assert found[f"{name}.weight"].role is Role.MATRIX
