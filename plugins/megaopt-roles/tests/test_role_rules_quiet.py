"""Reading a model runs none of its code."""

import enum
from collections.abc import Iterable, Iterator
from typing import Any, Never, Self

import pytest
import torch
from torch import nn

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

RAN = []


def note(what: str) -> None:
    """Note that some code of the model ran."""
    RAN.append(what)


class Journal(list):
    """A list that notes what is appended."""

    def append(self, item: object) -> None:
        note("append")
        super().append(item)

    def __iter__(self) -> Iterator[Any]:
        note("__iter__")
        return super().__iter__()

    def __len__(self) -> int:
        note("__len__")
        return 1


class Settings:
    """A configuration with everything that may run."""

    limit = 3

    @property
    def width(self) -> int:
        note("property")
        return 4

    def __getattr__(self, name: str) -> Never:
        note("__getattr__")
        raise AttributeError(name)

    def __eq__(self, other: object) -> bool:
        note("__eq__")
        return True

    __hash__ = None

    def __bool__(self) -> bool:
        note("__bool__")
        return True

    def __contains__(self, item: object) -> bool:
        note("__contains__")
        return True

    def __getitem__(self, key: object) -> int:
        note("__getitem__")
        return 1

    def __add__(self, other: object) -> Self:
        note("__add__")
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        note("__call__")
        return x

    def __str__(self) -> str:
        note("__str__")
        return "settings"


class Mode(enum.Enum):
    """A plain setting."""

    FAST = 1


GLOBAL = []


class Nosy(nn.Module):
    """Does with its own objects whatever may run their code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)
        self.journal, self.settings, self.mode = Journal(), Settings(), Mode.FAST
        self.table = {"first": []}
        self.pair = ([],)

    def children(self) -> Iterator[nn.Module]:
        note("children")
        return super().children()

    @property
    def gain(self) -> int:
        note("module property")
        return 2

    def get_output_embeddings(self) -> nn.Linear:
        note("getter")
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.journal.append(x)
        self.table["first"].append(x)
        self.pair[0].append(x)
        GLOBAL.append(x)
        for _ in self.journal:
            x = x + len(self.journal)
        if self.settings or self.settings == 3 or 3 in self.settings or self.settings in (1, 2):
            x = x * self.settings.width + self.settings.limit * self.gain
        if self.mode == Mode.FAST:
            x = self.settings(x)
        x = x + self.settings[0] + str(self.settings) + getattr(self.settings, "nothing", 0)
        x = x if hasattr(self.settings, "missing") else x + (self.settings + 1)
        for child in self.children():
            x = child(x)
        return self.head(self.norm(self.first(x)))


def test_no_code_of_the_model_runs():
    """Overridden operators, properties, iterators, getters and methods are looked at, never called."""
    model = Nosy()
    RAN.clear()
    found = infer_roles(model)
    assert RAN == []
    assert (found["first.weight"].role, found["head.weight"].role) == (Role.MATRIX, Role.OUTPUT)
    assert found["head.weight"].reason == "the model names it as its output layer (get_output_embeddings())"


def test_no_container_changes():
    """What a forward keeps in a container, of its own or global, nested or not, is kept nowhere."""
    model = Nosy()
    infer_roles(model)
    assert (list.__len__(model.journal), model.table, model.pair, GLOBAL) == (0, {"first": []}, ([],), [])


def block(order: Iterable[str]) -> str:
    """Return a class of layers whose parameters are registered in an order."""
    parts = {
        "down": "self.w_down = nn.Parameter(torch.zeros(16, 64))",
        "qkv": "self.w_qkv = nn.Parameter(torch.zeros(48, 16))",
        "out": "self.w_out = nn.Parameter(torch.zeros(16, 16))",
        "up": "self.w_up = nn.Parameter(torch.zeros(64, 16))",
    }
    return "\n        ".join(parts[name] for name in order)


@pytest.mark.parametrize(
    "order", [("down", "qkv", "out", "up"), ("qkv", "down", "up", "out"), ("up", "out", "down", "qkv")]
)
def test_layers_that_repeat_have_the_same_views(order, generated_models):
    """The first of several equal layers is split as the others are, whatever parameter it registers first."""
    model = generated_models.module(f"""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        {block(order)}

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = F.linear(x, self.w_qkv).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + F.linear(a, self.w_out)
        return x + F.linear(F.gelu(F.linear(x, self.w_up)), self.w_down)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.h:
            x = layer(x)
        return self.head(x)
""")()
    found = infer_roles(model)
    assert [found[f"h.{i}.w_qkv"].view.split_sizes for i in range(3)] == [(16, 16, 16)] * 3
    assert not any(decision.uncertain for decision in found.values())


def test_exported_models():
    """Every module of torch.export is made of operators of aten; its head and table are what they are."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 9))
    exported = torch.export.export(model, (torch.zeros(2, 3, dtype=torch.long),)).module()
    found = infer_roles(exported)
    assert {
        name: (decision.role, decision.uncertain) for name, decision in found.items() if "weight" in name
    } == {
        "0.weight": (Role.EMBEDDING, False),
        "1.weight": (Role.MATRIX, False),
        "2.weight": (Role.ELEMENTWISE, False),
        "3.weight": (Role.OUTPUT, False),
    }
