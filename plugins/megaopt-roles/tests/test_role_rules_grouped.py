"""Codes of a quantized weight that do not train, with scales and offsets that do: one for a group of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

GROUP, WIDTH, CLASSES = 4, 16, 23


class Coded(nn.Module):
    """A layer whose weight is made of codes."""

    codes: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8))
        self.scales, self.zeros = (nn.Parameter(torch.rand(outputs, inputs // GROUP)) for _ in "sz")

    def weight(self) -> torch.Tensor:
        """Return the weight."""
        apart = self.codes.float().unflatten(1, (-1, GROUP))
        return ((apart - self.zeros.unsqueeze(-1)) * self.scales.unsqueeze(-1)).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x @ self.weight().t()


class Repeated(Coded):
    """Repeats both along the inputs, and adds the offsets afterwards."""

    def weight(self) -> torch.Tensor:
        """Return the weight."""
        scales, zeros = (part.repeat_interleave(GROUP, dim=1) for part in (self.scales, self.zeros))
        return self.codes * scales + zeros


class Flat(Coded):
    """Has one row for a group."""

    def weight(self) -> torch.Tensor:
        """Return the weight."""
        rows = self.codes.to(self.scales.dtype).view(-1, GROUP)
        return (rows * self.scales.view(-1, 1) + self.zeros.reshape(-1, 1)).view_as(self.codes)


class ByInputs(Coded):
    """Has groups of inputs first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(outputs, inputs)
        self.scales, self.zeros = (nn.Parameter(torch.rand(inputs // GROUP, outputs)) for _ in "sz")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        apart = self.codes.float().reshape(len(self.scales), GROUP, -1)
        return torch.matmul(x, (self.scales[:, None] * (apart - self.zeros[:, None])).flatten(0, 1))


class Frozen(Coded):
    """Its codes are a parameter that does not train."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.frozen = nn.Parameter(torch.randn(outputs, inputs // GROUP, GROUP), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        weight = (self.frozen - self.zeros[..., None]) * self.scales[..., None]
        return functional.linear(x, weight.reshape(weight.shape[0], -1))


class Model(nn.Module):
    """Layers of any kind between a table and a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.wide, self.narrow = kind(WIDTH, 24), kind(24, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(ids)
        return torch.as_tensor(self.head(x + self.narrow(functional.gelu(self.wide(x)))))


@pytest.mark.parametrize("kind", [Coded, Repeated, Flat, ByInputs, Frozen])
def test_scales_and_offsets_of_groups_are_elementwise(kind: type[nn.Module]) -> None:
    """A product contracts what is made of them, but nothing of theirs is a matrix."""
    model = Model(kind)
    assert model(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, CLASSES)
    found = infer_roles(model)
    for name in (f"{layer}.{part}" for layer in ("wide", "narrow") for part in ("scales", "zeros")):
        assert (found[name].role, found[name].uncertain) == (Role.ELEMENTWISE, False), (name, found[name])


class Masked(nn.Module):
    """Has one weight for several masks."""

    masks: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.register_buffer("masks", torch.ones(3, outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the products."""
        return torch.einsum("btd,mfd->btf", x, self.weight[None] * self.masks)


def test_a_weight_that_several_masks_share_is_a_matrix() -> None:
    """It is repeated as a whole."""
    found = infer_roles(Model(Masked))
    for name in ("wide.weight", "narrow.weight"):
        assert (found[name].role, found[name].uncertain) == (Role.MATRIX, False), (name, found[name])
