"""The conventions that decide without a batch, one test each: no forward is run, and most models here have none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

MATRIX, OUTPUT, ELEMENTWISE = "matrix", "output", "elementwise"


class Holder(nn.Module):
    """A model of named parts, in this order."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def told(decision: RoleDecision) -> str:
    """Return a role, `?` where it is in doubt and `~` where only the view is."""
    mark = {Doubt.NONE: "", Doubt.ROLE: "?"}.get(decision.doubt, "~")
    return f"{decision.role}{mark}"


def check(model: nn.Module, **expected: str) -> None:
    """Compare what parameters are seen as; names are written with `__` for a dot."""
    found = infer_roles(model)
    names = {name.replace("__", "."): role for name, role in expected.items()}
    assert {name: told(found[name]) for name in names} == names


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without a bias."""
    return nn.Linear(inputs, outputs, bias=False)


def test_as_many_rows_as_the_largest_embedding_make_a_head():
    """Neither those of a smaller embedding count first, nor those of a square one, nor four."""
    parts = {"table": nn.Embedding(50, 8), "up": linear(8, 16), "down": linear(16, 8), "last": linear(8, 50)}
    check(Holder(**parts), last__weight=OUTPUT, up__weight=MATRIX, down__weight=MATRIX)
    square = {"table": nn.Embedding(8, 8), "up": linear(8, 8), "down": linear(8, 12)}
    check(Holder(**square), up__weight=MATRIX)


def test_such_a_head_is_in_doubt_where_a_layer_takes_as_many_features():
    """The table may have as many rows by chance, as one of positions has."""
    parts = {"table": nn.Embedding(64, 8), "up": linear(8, 64), "down": linear(64, 8), "last": linear(8, 5)}
    check(Holder(**parts), up__weight="output?")


def test_a_layer_in_a_repeated_block_is_hidden():
    """A list with a head's name and layers of few rows are none."""
    blocks = nn.ModuleList(Holder(one=linear(8, 8), gate=linear(8, 3)) for _ in range(2))
    heads = nn.ModuleList(Holder(one=linear(8, 20)) for _ in range(2))
    model = Holder(blocks=blocks, heads=heads)
    check(
        model, blocks__0__one__weight=MATRIX, blocks__1__gate__weight="output?", heads__0__one__weight=OUTPUT
    )


@pytest.mark.parametrize(
    "taker",
    [
        lambda: nn.Linear(12, 5),
        lambda: nn.Conv1d(12, 5, 3),
        lambda: nn.GRU(12, 5),
        lambda: nn.LSTMCell(12, 5),
        lambda: nn.MultiheadAttention(12, 3),
        lambda: nn.Bilinear(12, 4, 5),
    ],
    ids=["Linear", "Conv1d", "GRU", "LSTMCell", "MultiheadAttention", "Bilinear"],
)
def test_a_layer_whose_features_a_later_one_takes_is_hidden(taker: Callable[[], nn.Module]):
    """The order of registration counts: one that was registered before takes nothing."""
    check(Holder(first=linear(7, 12), later=taker()), first__weight=MATRIX)
    check(Holder(later=taker(), first=linear(7, 12)), first__weight="output?")


@pytest.mark.parametrize("times", [2, 3, 4])
def test_several_times_as_many_features_make_a_matrix_of_a_doubtful_view(times):
    """It may be query, key and value, or a gate beside what it gates."""
    model = Holder(first=linear(7, 12 * times), later=linear(12, 5))
    check(model, first__weight="matrix~")
    reason = infer_roles(model)["first.weight"].reason
    assert reason.startswith(f"later takes a part of its {12 * times} features")


def test_few_features_show_nothing():
    """A layer of four rows may be a head, whatever takes four features."""
    check(Holder(first=linear(7, 4), later=linear(4, 5)), first__weight="output?")


def test_members_of_one_list_of_heads_do_not_take_from_each_other():
    """They stand beside each other, and are as wide as what they take by chance; in another list they are hidden."""
    two = nn.ModuleList([linear(8, 8), linear(8, 8)])
    check(Holder(stem=linear(6, 8), heads=two), stem__weight=MATRIX, heads__0__weight="output?")
    check(Holder(stem=linear(6, 8), parts=two), parts__0__weight=MATRIX)


def test_a_layer_before_a_squash_that_ends_its_sequence_is_taken_by_nobody():
    """It gives scores, or a share of something: a later layer that takes as many does so by chance."""
    gate = nn.Sequential(linear(8, 6), nn.Sigmoid())
    check(Holder(gate=gate, later=linear(6, 9)), gate__0__weight="output?")
    inner = nn.Sequential(linear(8, 6), nn.Sigmoid(), linear(6, 6))
    check(Holder(gate=inner, later=linear(6, 9)), gate__0__weight=MATRIX)


def test_as_many_rows_as_any_embedding_make_a_head_where_nothing_takes_them():
    """A model with two vocabularies has a head of the smaller one, too."""
    tables = {"words": nn.Embedding(60, 8), "tags": nn.Embedding(20, 8)}
    check(Holder(**tables, to_tags=linear(8, 20)), to_tags__weight=OUTPUT)


@pytest.mark.parametrize("name", ["head", "lm_head", "classifier", "score", "logits", "exits"])
def test_a_heads_name_makes_a_head_of_a_layer_that_nothing_takes(name):
    """The same layer by another name may be hidden in what the model is a part of."""
    check(Holder(stem=linear(8, 8), **{name: linear(8, 9)}), **{f"{name}__weight": OUTPUT})
    check(Holder(stem=linear(8, 8), other=linear(8, 9)), other__weight="output?")


def test_the_last_layer_of_a_model_that_is_one_sequence_is_its_head():
    """A model that holds such a sequence and nothing else is one, too; a sequence beside others is not."""
    net = nn.Sequential(linear(8, 12), nn.ReLU(), linear(12, 3))
    check(net, **{"0.weight": MATRIX, "2.weight": OUTPUT})
    check(Holder(net=net), net__0__weight=MATRIX, net__2__weight=OUTPUT)
    check(Holder(net=net, beside=linear(8, 9)), net__2__weight="output?")


def test_a_layer_of_torchs_own_blocks_is_hidden():
    """The input projection of attention is a matrix of three parts."""
    model = Holder(block=nn.TransformerEncoderLayer(8, 2, 16), attention=nn.MultiheadAttention(8, 2))
    check(
        model,
        block__linear1__weight=MATRIX,
        block__linear2__weight=MATRIX,
        block__self_attn__in_proj_weight=MATRIX,
        attention__out_proj__weight=MATRIX,
    )


@pytest.mark.parametrize(
    ("shape", "name", "expected"),
    [
        ((1, 8), "anything", ELEMENTWISE),
        ((8, 1), "anything", ELEMENTWISE),
        ((1, 4, 8), "anything", ELEMENTWISE),
        ((1, 2, 4, 8), "anything", ELEMENTWISE),
        ((6, 8), "pos_embed", ELEMENTWISE),
        ((6, 8), "cls_token", ELEMENTWISE),
        ((6, 8), "rel_bias", ELEMENTWISE),
        ((6, 8), "A_log", ELEMENTWISE),
        ((6, 8), "anything", "elementwise?"),
        ((3, 6, 8), "anything", "elementwise?"),
    ],
)
def test_a_bare_parameter_is_elementwise(shape, name, expected):
    """A side of one and the names of tables, tokens, biases and gains make that certain."""
    model = Holder(stem=linear(8, 8), part=Holder(**{name: nn.Parameter(torch.zeros(shape))}))
    check(model, **{f"part__{name}": expected})


class Adapted(nn.Module):
    """A layer of PEFT's shape: a base layer, and factors by the name of an adapter."""

    def __init__(self, base: nn.Module, *, table: bool = False) -> None:
        super().__init__()
        self.base_layer = base
        rows, width = base.weight.shape
        if table:
            self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.zeros(3, rows))})
            self.lora_embedding_B = nn.ParameterDict({"default": nn.Parameter(torch.zeros(width, 3))})
        else:
            self.lora_A = nn.ModuleDict({"default": linear(width, 3)})
            self.lora_B = nn.ModuleDict({"default": linear(3, rows)})


@pytest.mark.parametrize("with_batch", [False, True])
def test_factors_of_peft_are_what_their_base_layer_is(with_batch):
    """Those of hidden layers are matrices, those of an embedding or a head element-wise, and all for certain."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = Adapted(nn.Embedding(50, 8), table=True), Adapted(linear(8, 50))
            self.blocks = nn.ModuleList(Holder(up=Adapted(linear(8, 8))) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows = self.embed.lora_embedding_A["default"].T[ids] @ self.embed.lora_embedding_B["default"].T
            x = self.embed.base_layer(ids) + rows
            for layer in (*(block.up for block in self.blocks), self.head):
                x = layer.base_layer(x) + layer.lora_B["default"](layer.lora_A["default"](x))
            return x

    found = infer_roles(Model(), example=torch.zeros(2, 4, dtype=torch.long) if with_batch else None)
    factors = {name: said for name, said in found.items() if ".lora_" in name}
    assert len(factors) == 8
    assert {name for name, said in factors.items() if said.uncertain} == set()
    hidden = {name for name, said in factors.items() if said.role is Role.MATRIX}
    assert hidden == {name for name in factors if name.startswith("blocks.")}
    assert {said.role for name, said in factors.items() if name not in hidden} == {Role.ELEMENTWISE}


def test_a_base_layer_is_no_factor_of_what_adapts_it():
    """A factor of a high rank may be larger than the layer, which then looks like a factor itself."""
    adapted = Adapted(linear(32, 16))
    for name, rows in {"lora_A": 32, "lora_B": 16}.items():
        setattr(adapted, name, nn.ParameterDict({"default": nn.Parameter(torch.zeros(rows, 32))}))
    model = Holder(blocks=nn.ModuleList(Holder(up=adapted if i else linear(32, 16)) for i in range(2)))
    check(
        model,
        blocks__1__up__base_layer__weight=MATRIX,
        blocks__1__up__lora_A__default=MATRIX,
        blocks__1__up__lora_B__default=MATRIX,
    )


def test_the_columns_that_heads_of_attention_fill_are_seen():
    """A projection takes the heads side by side: Muon may orthogonalize it head by head."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (linear(12, 12) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part(x).unflatten(-1, (3, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
            mixed = (q @ k.mT).softmax(-1) @ v
            return x + self.o(mixed.transpose(1, 2).flatten(2))

    model = nn.Sequential(nn.Embedding(20, 12), Attention(), linear(12, 20))
    found = infer_roles(model, example=torch.zeros(2, 5, dtype=torch.long))
    assert found["1.o.weight"].view.head_columns == 4
    assert found["1.q.weight"].view.head_sizes == (4,)


def test_layers_that_make_weights_and_biases_are_hidden():
    """A product that another takes as its weight, or adds as its bias, does not leave the model."""

    class Hypernetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.condition, self.weight, self.bias = linear(3, 6), linear(6, 40), linear(6, 5)
            self.last = linear(5, 2)

        def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            c = self.condition(given).relu()
            x = torch.einsum("bi,boi->bo", x, self.weight(c).unflatten(-1, (5, 8))) + self.bias(c)
            return self.last(x.relu())

    found = infer_roles(Hypernetwork(), example=(torch.zeros(4, 8), torch.zeros(4, 3)))
    roles = {name.partition(".")[0]: told(said) for name, said in found.items()}
    assert roles == {"condition": MATRIX, "weight": MATRIX, "bias": MATRIX, "last": OUTPUT}
