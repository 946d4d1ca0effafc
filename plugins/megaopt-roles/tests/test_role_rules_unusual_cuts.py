"""What a forward does with the rows of a projection by hand: cuts of weights, softmaxes, heads in unusual places."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, Fused, MatrixView, Role, RoleDecision
from megaopt_core.routing import infer_roles

WIDTH, HEADS = 32, 4


def attend(layer: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend over heads of equal size."""
    q, k, v = (part.view(2, 5, HEADS, -1).transpose(1, 2) for part in (q, k, v))
    return layer.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, WIDTH))


class ChunkedWeight(nn.Module):
    """Cuts the weight of a layer, instead of what the layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = self.qkv.weight.chunk(3)
        return x + attend(self, functional.linear(x, q), functional.linear(x, k), functional.linear(x, v))


class SlicedWeight(ChunkedWeight):
    """The same by slices, in a comprehension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        weight = self.qkv.weight
        parts = (weight[:WIDTH], weight[WIDTH : 2 * WIDTH], weight[2 * WIDTH :])
        return x + attend(self, *[functional.linear(x, part) for part in parts])


class Depthwise(ChunkedWeight):
    """Sends queries, keys and values through a convolution that mixes no channels."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=1, groups=3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = self.near(self.qkv(x).transpose(1, 2)).transpose(1, 2).chunk(3, -1)
        return x + attend(self, q, k, v)


class Router(nn.Module):
    """Weighs experts by a softmax, one column of it at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix what the experts return."""
        weights, y = functional.softmax(self.router(x), dim=-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + weights[..., i : i + 1] * expert(x)
        return x + y


class NoisyRouter(Router):
    """The same with what another layer adds."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix what the experts return."""
        first, second, *_ = (self.router(x) + self.noise(x)).softmax(-1).unbind(-1)
        return x + first[..., None] * self.experts[0](x) + second[..., None] * self.experts[1](x)


class HeadsLast(nn.Module):
    """Shapes queries into heads whose rows lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = (
            layer(x).view(2, 5, WIDTH // HEADS, HEADS).permute(0, 3, 1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return x + self.out(
            functional.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).reshape(2, 5, WIDTH)
        )


class InterleavedGate(nn.Module):
    """A gate whose rows lie between those of what it opens: there are no heads of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Open and close."""
        both = self.up(x).view(2, 5, 64, 2)
        return x + self.down(functional.silu(both[..., 0]) * both[..., 1])


class Einsums(nn.Module):
    """Attention with weights `[in, parts, heads, size]` and `[heads, size, out]`."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q = nn.Parameter(torch.randn(WIDTH, HEADS, size))
        self.kv = nn.Parameter(torch.randn(WIDTH, 2, HEADS, size))
        self.out = nn.Parameter(torch.randn(HEADS, size, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q = torch.einsum("btd,dhe->bhte", x, self.q)
        k, v = torch.einsum("btd,dnhe->nbhte", x, self.kv).unbind(0)
        return x + torch.einsum("bhte,hed->btd", functional.scaled_dot_product_attention(q, k, v), self.out)


class OneHot(nn.Module):
    """Looks a table up by a product with a one-hot encoding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(100, WIDTH, bias=False)
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.body(self.table(functional.one_hot(ids, 100).float())))


class SelfConditioned(nn.Module):
    """Returns logits after every round, and reads them again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head, self.back = nn.Linear(WIDTH, 100), nn.Linear(100, WIDTH)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of two rounds."""
        x, rounds = functional.relu(self.first(x)), []
        for _ in range(2):
            x = x + self.body(x)
            logits = self.head(x)
            rounds.append(logits)
            x = x + self.back(logits.softmax(-1))
        return rounds


def decided(layer: nn.Module) -> dict[str, RoleDecision]:
    """Return what is decided of a layer between a table and a head."""
    model = nn.Sequential(nn.Embedding(50, WIDTH), layer, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50))
    return {name.removeprefix("1."): found for name, found in infer_roles(model).items() if name[0] == "1"}


@pytest.mark.parametrize("layer", [ChunkedWeight, SlicedWeight, Depthwise])
def test_what_is_cut_by_hand_is_split(layer: type[nn.Module]) -> None:
    """A cut of the weight is a cut of what it makes, and a filter a channel mixes none of them."""
    found = decided(layer())["qkv.weight"]
    assert not found.uncertain
    assert (found.view.split_sizes, found.view.fused) == ((WIDTH,) * 3, Fused.QKV)
    assert found.view.head_sizes in ((), (WIDTH // HEADS,) * 3)


@pytest.mark.parametrize("layer", [Router, NoisyRouter])
def test_what_a_softmax_has_mixed_is_one_matrix(layer: type[nn.Module]) -> None:
    """Columns that are taken of it are no matrices."""
    found = decided(layer())["router.weight"]
    assert (found.role, found.view.split_sizes) == (Role.MATRIX, ())


@pytest.mark.parametrize(("layer", "name"), [(HeadsLast, "q"), (HeadsLast, "out"), (InterleavedGate, "up")])
def test_rows_that_are_no_heads_are_not_taken_for_them(layer: type[nn.Module], name: str) -> None:
    """Rows of a head that lie apart have no view, and one row is no head."""
    view = decided(layer())[f"{name}.weight"].view
    assert (view.head_sizes, view.head_columns) == ((), 0)


def test_axes_of_an_einsum_are_followed() -> None:
    """Keys and values are two matrices of heads; one that sums over heads is one matrix, with an example too."""
    model = Einsums()
    found = infer_roles(model)
    size = WIDTH // HEADS
    assert found["q"].view.head_sizes == (size,)
    assert (found["kv"].view.split_sizes, found["kv"].view.head_sizes) == ((WIDTH, WIDTH), (size, size))
    for decisions in (found, infer_roles(model, example=torch.randn(2, 5, WIDTH))):
        out = decisions["out"]
        assert (out.role, out.doubt) == (Role.MATRIX, Doubt.LAYOUT)  # experts would be written the same
        assert out.view == MatrixView(transposed=True, first_dims=2)


@pytest.mark.parametrize(
    ("model", "name", "role"), [(OneHot, "table", Role.EMBEDDING), (SelfConditioned, "head", Role.OUTPUT)]
)
def test_tables_and_heads_in_disguise_are_no_matrices(model: type[nn.Module], name: str, role: Role) -> None:
    """A one-hot encoding looks rows up, and logits stay logits where the model reads them again."""
    assert infer_roles(model())[f"{name}.weight"].role is role


class OfEitherKind(nn.Module):
    """Attention to itself or to others: one layer makes three parts, or two, by what the module was built for."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
        """Return what was attended to, through the output projection."""
        if others is not None:
            q = x
            k, v = self.project(others).split(16, dim=2)
        else:
            q, k, v = self.project(x).split(16, dim=2)
        shape = (*k.shape[:-1], -1, 8)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        made = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(made.transpose(1, 2).flatten(2))


def test_a_branch_that_takes_fewer_parts_hides_no_split() -> None:
    """Where each part gets a name in one branch, another one is of layers that were built otherwise."""
    view = infer_roles(nn.Sequential(nn.Embedding(20, 16), OfEitherKind(), nn.Linear(16, 20)))[
        "1.project.weight"
    ].view
    assert view is not None
    assert view.split_sizes == (16, 16, 16)
