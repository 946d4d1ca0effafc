"""Makes modules from source text that can be read again, so that one template gives a family of models."""

import itertools
import linecache
import textwrap
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

__all__ = ["language_model", "model", "model_with_forward", "module"]

_numbers = itertools.count()


_kernels: dict[str, Any] = {}
exec("def loss(h, w, t): return F.cross_entropy(h @ w.T, t)", {"F": F}, _kernels)  # noqa: S102 - it has no source


class FusedLoss(torch.autograd.Function):
    """A loss that multiplies with a weight out of sight: in a kernel."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, target)
        loss: torch.Tensor = _kernels["loss"](hidden, weight, target)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        return None, None, None


class OwnLinear(nn.Module):
    """A linear layer of its own class."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kernel.t()


def module(source: str, name: str = "Model") -> type[nn.Module]:
    """Return the class of a source text whose methods `inspect` can read."""
    file = f"<generated {next(_numbers)}>"
    source = textwrap.dedent(source)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"torch": torch, "nn": nn, "F": F, "FusedLoss": FusedLoss, "OwnLinear": OwnLinear}
    exec(compile(source, file, "exec"), scope)  # noqa: S102 - the sources are those of the tests
    return scope[name]


def model(made: str, methods: str, before: str = "") -> type[nn.Module]:
    """Return the class of a model: how it is made, its methods, and the classes that stand before it."""
    return module(
        f"{before}\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"{textwrap.indent(made, ' ' * 8)}\n{textwrap.indent(methods, ' ' * 4)}\n"
    )


_LANGUAGE_MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {parts}
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.ln = nn.LayerNorm(16)

    def forward(self, ids, target=None):
        x = {embed}
        x = x + self.down(F.gelu(self.up(x)))
        x = self.ln(x)
        {result}
"""


def model_with_forward(made: str, arguments: str, forward: str) -> type[nn.Module]:
    """Return the class of a model: how it is made, what its forward takes, and the body of that."""
    return model(made, f"def forward(self, {arguments}):\n{textwrap.indent(forward, ' ' * 4)}")


def language_model(parts: str, embed: str, *result: str) -> type[nn.Module]:
    """Return a small language model: how its table and head are made, how ids become features, what it returns."""
    indented = textwrap.indent("\n".join(result), " " * 8).strip()
    parts = textwrap.indent(parts, " " * 8).strip()
    return module(_LANGUAGE_MODEL.format(parts=parts, embed=embed, result=indented))
