"""Modules whose forward cannot be read, and layers that are a model by themselves."""

import pytest
import torch
from torch import nn

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

SOURCE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        return x + self.down(self.up(x))

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20)
    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))
        self.policy, self.value = nn.Linear(16, 4), nn.Linear(16, 1)
    def forward(self, x):
        x = self.trunk(x)
        return self.policy(x), self.value(x)
"""


def unread(name: str) -> nn.Module:
    """Return a model without a source."""
    scope = {"nn": nn, "torch": torch}
    exec(SOURCE, scope)  # noqa: S102 - the point is a class without a source
    return scope[name]()


def weights(model: nn.Module) -> dict[str, tuple[Role, bool]]:
    """Return role and certainty of every weight."""
    found = infer_roles(model)
    return {
        name: (found[name].role, found[name].uncertain)
        for name, param in model.named_parameters()
        if param.dim() > 1
    }


SURE, GUESS = False, True


@pytest.mark.parametrize(
    ("name", "heads"), [("Language", {"head.weight"}), ("Agent", {"policy.weight", "value.weight"})]
)
def test_heads_without_a_source(name, heads):
    """The last projections are taken for heads; that, and what else the forward would say, is a guess."""
    sure = {"tokens.weight": Role.EMBEDDING, "trunk.0.weight": Role.MATRIX}  # a Sequential says what follows
    for weight, (role, uncertain) in weights(unread(name)).items():
        if weight in sure:
            assert (role, uncertain) == (sure[weight], SURE)
        else:
            assert (role, uncertain) == (Role.OUTPUT if weight in heads else Role.MATRIX, GUESS)


def test_a_part_without_a_source():
    """What a readable model says around a part without a source stays sure."""
    model = nn.Sequential(nn.Embedding(9, 8), unread("Block"), nn.LayerNorm(8), nn.Linear(8, 9))
    assert weights(model) == {
        "0.weight": (Role.EMBEDDING, SURE),
        "1.up.weight": (Role.MATRIX, GUESS),
        "1.down.weight": (Role.MATRIX, GUESS),
        "3.weight": (Role.OUTPUT, SURE),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiler", ["script", "trace", "fx"])
def test_compiled_models(compiler):
    """Compiled models keep the roles of torch's own layers."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 9))
    expected = {name: decision.role for name, decision in infer_roles(model).items()}
    if compiler == "script":
        model = torch.jit.script(model)
    elif compiler == "trace":
        model = torch.jit.trace(model, torch.zeros(1, 3, dtype=torch.long))
    else:
        model = torch.fx.symbolic_trace(model)
    assert {name: decision.role for name, decision in infer_roles(model).items()} == expected


@pytest.mark.parametrize(
    "layer",
    [
        nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16),
        nn.MultiheadAttention(8, 2),
        nn.LSTM(8, 8),
        nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_lone_layers_have_no_head(layer):
    """A layer that returns what it takes ends with no output head."""
    assert {role for role, _ in weights(layer).values()} == {Role.MATRIX}


def test_a_narrow_autoencoder_has_a_head():
    """A model that returns what it takes through something narrower ends with an output head."""
    model = nn.Sequential(nn.Linear(8, 3), nn.GELU(), nn.Linear(3, 8))
    assert weights(model)["2.weight"] == (Role.OUTPUT, SURE)


class Detector(nn.Module):
    """Two heads, one as wide as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.kind, self.box = nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(x)
        return {"kind": self.kind(x), "box": self.box(x)}


def test_heads_as_wide_as_the_input():
    """A model with several heads is no lone layer, whatever their widths."""
    assert weights(Detector()) == {
        "body.0.weight": (Role.MATRIX, SURE),
        "kind.weight": (Role.OUTPUT, SURE),
        "box.weight": (Role.OUTPUT, SURE),
    }


class Recorder(nn.Module):
    """Changes a list and a dictionary of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.seen, self.cache = [], {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.proj(x))
        self.cache["last"] = x
        if x.shape[-1] != 1000:
            raise ValueError(x.shape)
        return self.proj(x)


def test_reading_changes_no_container():
    """Reading a forward that keeps things in the module keeps nothing, and passes its checks."""
    model = Recorder()
    infer_roles(model)
    assert (model.seen, model.cache) == ([], {})
