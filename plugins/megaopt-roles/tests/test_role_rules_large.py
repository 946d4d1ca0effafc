"""Forwards of large models are read to their end: what looks through all of them is not worth all the steps."""

from collections.abc import Sequence

import torch
from torch import nn

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

WIDTH, DEPTH = 16, 240


class Block(nn.Module):
    """A block that adds a table of positions to what it attends with."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return the residual stream."""
        h = self.norm(x) + table
        h = torch.relu(self.up(h))
        return x + self.down(h)


class LooksThrough(nn.Module):
    """Asks for its dtype, as a model that loops over all that it has to find it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.table = nn.Parameter(torch.randn(9, WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first module with a hook, or of the first parameter that is not kept in float32."""
        for _, module in self.named_modules():
            if not hasattr(module, "own_hook"):
                continue
            for hook in module.own_hook:
                return hook.dtype
        last = torch.float32
        for name, param in self.named_parameters():
            last = param.dtype
            if any(part in name for part in ("norm", "head", "embed")):
                continue
            if last in self.half_types():
                return last
        return last

    def half_types(self) -> Sequence[torch.dtype]:
        """Return the dtypes that are looked for."""
        return [kind for kind in (torch.float16, torch.bfloat16) if kind.itemsize == 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        h = self.embed(x.to(self.dtype))
        for block in self.blocks:
            h = block(h, self.table[: h.shape[1]])
        return self.head(h)


class DtypeOfTheFirst(LooksThrough):
    """Returns the dtype of the first parameter that is a floating-point one: what has a gradient is."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        found = torch.float32
        for param in self.parameters():
            if param.is_floating_point():
                return param.dtype
            found = param.dtype
        return found


def test_a_property_that_looks_through_the_model_hides_nothing() -> None:
    """Its value is not known; the layers behind it are."""
    for model in (LooksThrough(), DtypeOfTheFirst()):
        found = infer_roles(model)
        assert {name for name, decision in found.items() if decision.uncertain} == set()
        assert found["head.weight"].role is Role.OUTPUT
        assert found[f"blocks.{DEPTH - 1}.down.weight"].role is Role.MATRIX
        assert found["table"].role is not Role.MATRIX
