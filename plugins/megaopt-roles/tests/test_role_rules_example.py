"""An example batch settles what the source leaves open."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from megaopt_testing import temporary_plugin
from torch import nn

from megaopt_core import OptimizerConfig, OptimizerEntry, build_optimizer, hookimpl, route
from megaopt_core.errors import RoutingError
from megaopt_core.params import MatrixView, Role
from megaopt_core.routing import infer_roles

_spec = importlib.util.spec_from_file_location(
    "generated_models", Path(__file__).with_name("generated_models.py")
)
assert _spec is not None
assert _spec.loader is not None
generated = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generated)

IDS = torch.zeros(2, 4, dtype=torch.long)
HEAD = "self.wte = nn.Embedding(100, 16)\nself.lm_head = nn.Linear(16, 100, bias=False)"
FUSED = "return FusedLoss.apply(x.view(-1, 16), self.lm_head.weight, target.view(-1))"


def fused_loss_model() -> nn.Module:
    """Return a model whose head meets its input inside of an autograd.Function."""
    return generated.language_model(HEAD, "self.wte(ids)", FUSED)()


def unread(source: str) -> nn.Module:
    """Return an instance of a class whose source cannot be read."""
    scope = {"nn": nn, "torch": torch, "F": F}
    exec(source, scope)  # noqa: S102 - the point is a class without a source
    return scope["Model"]()


def test_a_head_out_of_sight():
    """The example shows the head, wins, and the reason says what the source said; the rest stays as it was."""
    model = fused_loss_model()
    read, shown = infer_roles(model), infer_roles(model, example=(IDS, IDS))
    head = shown.pop("lm_head.weight")
    assert (head.role, head.uncertain) == (Role.OUTPUT, False)
    assert head.reason.startswith(
        "the last product before the output of the example; the source says matrix: "
    )
    assert shown == {name: decision for name, decision in read.items() if name in shown}


ATTENTION = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(50, 8))
        self.position = nn.Parameter(torch.zeros(4, 8))
        self.qkv = nn.Parameter(torch.zeros(24, 8))
        self.out = nn.Parameter(torch.zeros(8, 8))
        self.experts = nn.Parameter(torch.zeros(3, 8, 16))
        self.down = nn.Linear(16, 8)
        self.gain = nn.Parameter(torch.ones(8))
        self.depthwise = nn.Conv1d(8, 8, 3, padding=1, groups=8)
    def forward(self, ids):
        x = self.table[ids] + self.position
        q, k, v = F.linear(x, self.qkv).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v) @ self.out
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        y = torch.bmm(x.reshape(1, -1, 8).expand(3, -1, -1), self.experts)
        x = x + self.down(y.sum(0)).reshape(x.shape)
        return F.rms_norm(x, (8,)) * self.gain @ self.table.T
"""


def test_everything_out_of_sight():
    """Without a source, the example tells tables, positions, matrices, stacks and the tied head apart."""
    found = infer_roles(unread(ATTENTION), example=IDS)
    assert {
        name: (decision.view if decision.role is Role.MATRIX else decision.role, decision.uncertain)
        for name, decision in found.items()
        if "." not in name and name != "gain"
    } == {
        "table": (Role.EMBEDDING, False),
        "position": (Role.ELEMENTWISE, False),
        "qkv": (MatrixView(), False),
        "out": (MatrixView(transposed=True), False),
        "experts": (MatrixView(batch_dims=1, transposed=True), False),
    }
    assert found["depthwise.weight"].role is Role.ELEMENTWISE
    assert (found["down.weight"].role, found["down.weight"].uncertain) == (Role.MATRIX, False)


@pytest.mark.parametrize("example", [IDS, (IDS,), {"ids": IDS}], ids=["tensor", "tuple", "mapping"])
def test_forms_of_an_example(example):
    """A batch is a tensor, a tuple of arguments or a mapping of keyword arguments."""
    assert infer_roles(unread(ATTENTION), example=example)["table"].role is Role.EMBEDDING


def test_nothing_is_computed_or_changed():
    """The run leaves parameters, buffers, gradients, the generator and the mode as they were."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    infer_roles(model, example=torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(param.grad is None for param in model.parameters())
    assert model.training


class Shared(nn.Module):
    """A table that two modules hold, in one module of two names, and that a head is tied to."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(64, 8)
        self.encoder = nn.Module()
        self.encoder.table = self.shared
        self.encoder.norm = nn.BatchNorm1d(8)
        self.norm = self.encoder.norm
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Use both names."""
        x = self.shared(ids) + self.encoder.table(ids)
        return self.head(self.norm(self.encoder.norm(x.mT)).mT)


def test_a_module_of_two_names_is_put_back():
    """Every name of parameters and buffers holds what it held, also where modules and weights are shared."""
    model = Shared()
    before = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    infer_roles(model, example=IDS)
    after = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))
    assert model(IDS).shape == (2, 4, 64)


def test_attributes_win_over_the_example():
    """What is said of a parameter explicitly stays said."""
    model = fused_loss_model()
    model.lm_head.weight.use_muon = True
    assert infer_roles(model, example=(IDS, IDS))["lm_head.weight"].role is Role.MATRIX


def test_through_route_and_build(stand_in):
    """`route` and `build_optimizer` pass the example on."""
    config = OptimizerConfig(optimizer="whole", lr=0.1)
    model = fused_loss_model()
    doubtful = route(config, model).params["lm_head.weight"]
    assert doubtful.spec.optimizer == "plain"
    assert "its attribute use_muon settles this; not for whole: what it is is doubtful" in doubtful.reason
    settled = route(config, model, example=(IDS, IDS)).params["lm_head.weight"]
    assert (settled.decision.role, settled.decision.uncertain) == (Role.OUTPUT, False)
    report = build_optimizer(model, "whole", lr=0.1, example=(IDS, IDS)).report()
    row = next(row for row in report.params if row.name == "lm_head.weight")
    assert (row.role, row.optimizer, row.uncertain) == ("output", "plain", False)


def test_an_example_is_for_one_chunk(stand_in):
    """With several chunks there is no one batch, and the error says so."""
    with pytest.raises(RoutingError, match="example: a batch is for a model of one chunk, this one has 2"):
        route(OptimizerConfig(optimizer="plain", lr=0.1), [nn.Linear(2, 2), nn.Linear(2, 2)], example=IDS)


def test_an_override_settles_a_doubt(stand_in):
    """A doubtful matrix goes to the matrix optimizer that an override asks for by name."""
    from megaopt_core import ParamKey

    override = {ParamKey(name="lm_head.weight"): {"optimizer": "whole"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        routing = route(OptimizerConfig(optimizer="whole", lr=0.1), fused_loss_model(), override)
    assert routing.params["lm_head.weight"].spec.optimizer == "whole"


KEPT = {  # how a model is made, its forward, a weight, and what the source alone says of it
    "a head that is read back": (
        "self.a, self.w = nn.Linear(6, 16), nn.Parameter(torch.zeros(16, 4))\nself.s = nn.Parameter(torch.zeros(4, 1))",
        "y = self.a(x).relu() @ self.w\nreturn (y @ self.s).transpose(1, 2).softmax(-1) @ y",
        "w",
    ),
    "logits that a norm with gains scales": (
        "self.a, self.b, self.n = nn.Linear(6, 16), nn.Linear(16, 5), nn.LayerNorm(5)",
        "return self.n(self.b(self.a(x).relu()))",
        "b.weight",
    ),
    "towers that are compared": (
        "self.a, self.b = (nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 12)) for _ in range(2))",
        "return self.a(x[:, 0]) @ self.b(x[:, 1]).T",
        "a.2.weight",
    ),
    "a kernel that is modulated": (
        "self.m, self.w = nn.Linear(6, 8), nn.Parameter(torch.zeros(1, 8, 8, 3, 3))\nself.h = nn.Conv2d(8, 3, 1)",
        "w = (self.w * self.m(x[:, 0]).view(-1, 1, 8, 1, 1)).view(-1, 8, 3, 3)\n"
        "y = F.conv2d(torch.ones(1, 16, 4, 4, device=x.device), w, padding=1, groups=2)\n"
        "return self.h(y.view(2, 8, 4, 4))",
        "w",
    ),
    "a stream of columns": (
        "self.w, self.a = nn.Parameter(torch.zeros(8, 40)), nn.Parameter(torch.zeros(8, 6))\n"
        "self.b = nn.Parameter(torch.zeros(40, 8))",
        "h = self.a @ x[:, 0].T\nreturn (h + self.w @ (self.b @ h).relu()).T",
        "w",
    ),
    "a layer that makes weights": (
        "self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 24)\nself.c = nn.Linear(6, 8)",
        "return self.c(x).relu() @ self.b(self.a(x[:, 0]).relu()).view(-1, 8, 3)",
        "b.weight",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_the_example_does_not_tell(case):
    """Where a head and a hidden layer look alike in the example, too, the doubt or the decision of the source stays."""
    made, forward, name = KEPT[case]
    methods = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in forward.splitlines())
    model = generated.model(made, methods)()
    read, seen = infer_roles(model)[name], infer_roles(model, example=torch.ones(2, 3, 6))[name]
    assert (seen.role, seen.doubt) == (read.role, read.doubt), seen.reason


def test_doubt_keeps_nothing_from_an_element_wise_optimizer() -> None:
    """One that takes some parameters only is asked for those in doubt, too: its step is safe for whatever they are."""

    class Real:
        megaopt_api = "1"

        @hookimpl
        def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
            real = OptimizerEntry(
                torch.optim.SGD, accepts=lambda spec, view: "complex" if spec.dtype.is_complex else None
            )
            return {"real": real}

    with temporary_plugin(Real(), name="real"):
        routing = route(OptimizerConfig(optimizer="real", lr=0.1), fused_loss_model())
    assert routing.params["lm_head.weight"].decision.uncertain
    assert {entry.spec.optimizer for entry in routing.params.values()} == {"real"}
