"""Networks that make the weights of another one: what they make is taken by the products of that."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.first, self.second = nn.Linear(5, 48), nn.Linear(48, 20)\n"
    "net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3))\n"
    "self.sizes = {name: tuple(param.shape) for name, param in net.named_parameters()}\n"
    "self.__dict__['net'] = net\n"
)
SEVERAL = (
    "self.makers = nn.ModuleDict({name.replace('.', '_'): nn.Linear(20, math.prod(size))"
    " for name, size in self.sizes.items()})"
)
ONE = "self.maker = nn.Linear(20, sum(math.prod(size) for size in self.sizes.values()))"
HOW = {  # the layers that make the weights, what they make, and the call
    "for each sample": (
        SEVERAL,
        "made = {n: self.makers[n.replace('.', '_')](z).view(-1, *s) for n, s in self.sizes.items()}\n"
        "run = lambda p, x: torch.func.functional_call(self.net, p, (x,))\nreturn torch.func.vmap(run)(made, xy)",
    ),
    "one network": (
        SEVERAL,
        "z, made = z.mean(0), {}\nfor name, size in self.sizes.items():\n"
        "    made[name] = self.makers[name.replace('.', '_')](z).reshape(size)\n"
        "return torch.func.functional_call(self.net, made, xy)",
    ),
    "one vector, cut": (
        ONE,
        "parts = self.maker(z.mean(0)).split([math.prod(size) for size in self.sizes.values()])\n"
        "made = {n: part.view(s) for (n, s), part in zip(self.sizes.items(), parts)}\n"
        "return torch.func.functional_call(self.net, made, (xy,))",
    ),
    "names and values": (
        SEVERAL,
        "values = [m(z.mean(0)).view(s) for m, s in zip(self.makers.values(), self.sizes.values())]\n"
        "return torch.func.functional_call(self.net, dict(zip(self.sizes, values)), args=(xy,))",
    ),
    "added to the weights that there are": (
        SEVERAL,
        "made = {n: p + self.makers[n.replace('.', '_')](z.mean(0)).view_as(p) "
        "for n, p in self.net.named_parameters()}\n"
        "return torch.func.functional_call(self.net, made, (xy,))",
    ),
}


@pytest.mark.parametrize("case", HOW)
def test_layers_that_make_weights(generated_models: ModuleType, case: str) -> None:
    """They are hidden matrices, and certainly so: nothing that they return is what the model does."""
    makers, body = HOW[case]
    body = body.replace("\n", "\n    ")
    forward = (
        f"def forward(self, given, xy):\n    z = self.second(self.first(given).relu()).mean(1)\n    {body}"
    )
    model = generated_models.model(MADE + makers, forward, "import math\n")()
    model(torch.randn(2, 7, 5), torch.randn(2, 9, 2))
    for name, decision in infer_roles(model).items():
        if name.endswith("weight"):
            assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), (name, decision.reason)


def test_what_stands_behind_a_matrix_that_is_made_for_each_sample(generated_models: ModuleType) -> None:
    """An einsum with a matrix that several parameters make for each sample is read, and what follows it, too."""
    model = generated_models.model_with_forward(
        "self.a, self.h = nn.Linear(8, 8), nn.Linear(8, 5)\nself.t = nn.Parameter(torch.randn(5, 8, 8))\n"
        "self.b, self.c = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))",
        "x, ids",
        "w = torch.einsum('...io,op,pj->...ij', self.t[ids], self.b, self.c)\n"
        "return self.h(torch.einsum('bsi,bij->bsj', self.a(x), w))",
    )
    found = infer_roles(model())["a.weight"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
